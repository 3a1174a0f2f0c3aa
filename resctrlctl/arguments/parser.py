# SPDX-License-Identifier: Apache-2.0
"""The parser of resctrlctl, and the types of its arguments."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Any, NoReturn

from resctrlctl.screen.width import terminal_width
from resctrlmond.api.exit_codes import USAGE
from resctrlmond.service.arguments import not_empty

# The limit of the daemon, in resctrlmond.workloads.model.validation.
MAX_PRIORITY = 1000


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width() - 2)


class Parser(argparse.ArgumentParser):
    """An argument parser. For a wrong command line it exits with ``usage_status``."""

    usage_status = USAGE

    def __init__(self, **settings: Any) -> None:
        # No abbreviated options: a later version may have another option with the same beginning.
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)
        self.verbs: dict[str, Parser] = {}

    @property
    def options_with_value(self) -> set[str]:
        """The names of the options whose value is the next word."""
        return {name for action in self._actions if action.nargs is None for name in action.option_strings}

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores errors when it writes its help to standard output.
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse lists all choices, also if one of them was mistyped.
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value)[:64], choices, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"there is no {str(value)[:64]!a}. {remedy}")

    def error(self, message: str) -> NoReturn:
        """Print the error as one line that refers to --help, and exit."""
        stop = "" if message.endswith("?") else "."
        self.exit(self.usage_status, f"{self.prog}: {message}{stop} See '{self.prog} --help'\n")


def words(text: str) -> list[str]:
    # An empty list would mean all: that is not what a script with an unset variable asks for.
    return [word for word in text.split(",") if word] or [not_empty("")]


def seconds(text: str) -> float:
    # The daemon reads the counters at most every half second.
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0.5 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.5 to 86400")
    return seconds


def milliseconds(text: str) -> int:
    milliseconds = _number(text)
    if not 10 <= milliseconds <= 86_400_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds from 10 to 86400000")
    return milliseconds


def count(text: str) -> int:
    if not 0 < _number(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def process_id(text: str) -> int:
    if not 0 < _number(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id")
    return int(text)


def priority(text: str) -> int:
    if text.removeprefix("-") != "0" and not 0 < _number(text.removeprefix("-")) <= MAX_PRIORITY:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return int(text)


def _number(text: str) -> int:
    """Return the number; 0 if the text is not one, or has so many digits that Python does not convert it."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else 0


def name_and_value(text: str, form: str = "NAME=VALUE") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not {form}")
    return name, value
