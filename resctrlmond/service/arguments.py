# SPDX-License-Identifier: Apache-2.0
"""The parser of a command line, and types of its arguments."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong command line in one line, which refers to --help for the options."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}. See '{self.prog} --help'\n")


def add_manager_socket(parser: Parser, default: str) -> None:
    """Add the option of the socket of resctrlmond, which the environment can name as for resctrlctl."""
    parser.add_argument(
        "--manager-socket",
        type=not_empty,
        default=os.environ.get("RESCTRLMOND_SOCKET") or default,
        metavar="PATH",
        help=f"resctrlmond's socket ($RESCTRLMOND_SOCKET, else {default})",
    )


def not_empty(text: str) -> str:
    """Return the text. Raises ArgumentTypeError if it is empty, as an unset variable of a script is."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty: give one, or leave the option out")
    return text
