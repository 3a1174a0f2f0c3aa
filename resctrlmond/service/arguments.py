# SPDX-License-Identifier: Apache-2.0
"""The parser of a command line, and types of its arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong command line in one line, which refers to --help for the options."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}. See '{self.prog} --help'\n")


def not_empty(text: str) -> str:
    """Return the text. Raises ArgumentTypeError if it is empty, as an unset variable of a script is."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty: give one, or leave the option out")
    return text
