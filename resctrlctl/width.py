# SPDX-License-Identifier: Apache-2.0
"""The width of the terminal. shutil has the same function, and imports every compression of the standard library."""

from __future__ import annotations

import os
import sys

_DEFAULT = 80


def terminal_width() -> int:
    """Return $COLUMNS, or else the columns of the terminal on standard output; 80 if there is none."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _DEFAULT
    except (AttributeError, ValueError, OSError):
        # Standard output is closed, replaced by a test, or not a terminal.
        return _DEFAULT
