# SPDX-License-Identifier: Apache-2.0
"""The width and the characters of the terminal.

shutil has the first function too, and imports every compression of the standard library.
"""

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


def has_blocks() -> bool:
    """Return whether the terminal can show block characters (Unicode, "Block Elements")."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        "█▏".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    # Python uses UTF-8 in the C locale as well, but a terminal of the C locale may not.
    names = [os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    return next(filter(None, names), "C") not in ("C", "POSIX")
