# SPDX-License-Identifier: Apache-2.0
"""Types of command-line arguments, for argparse."""

from __future__ import annotations

import argparse


def not_empty(text: str) -> str:
    """Return the text. Raises ArgumentTypeError if it is empty, as an unset variable of a script is."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty: give one, or leave the option out")
    return text
