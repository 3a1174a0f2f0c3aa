# SPDX-License-Identifier: Apache-2.0
"""Read the small files of /proc, control groups and resctrl."""

from __future__ import annotations

import os


def read(path: str) -> bytes:
    """Return the whole content of a file. Raises OSError.

    Four system calls: those of ``open()`` and its ``read()`` are nine, and each call of the daemon reads many files.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = b""
        while chunk := os.read(fd, 65536):
            content += chunk
        return content
    finally:
        os.close(fd)
