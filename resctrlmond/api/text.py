# SPDX-License-Identifier: Apache-2.0
"""Names of files as text for the interfaces."""

from __future__ import annotations

import os


def text(name: str) -> str:
    """Return the name of a file with escapes for bytes that are not UTF-8, because JSON is."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
