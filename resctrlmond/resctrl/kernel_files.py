# SPDX-License-Identifier: Apache-2.0
"""Read the small files of /proc, control groups and resctrl."""

from __future__ import annotations

import os

# A file of records is read in parts: a record that does not fit into the kernel's page is returned by the next read
# (fs/seq_file.c). No record of the files that are read here has half a page, and a file of one record is read whole.
_CERTAINLY_ALL = 2048


def read(path: str) -> bytes:
    """Return the whole content of a file. Raises OSError.

    Three system calls: those of ``open()`` and its ``read()`` are nine, and each call of the daemon reads many files.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = chunk = os.read(fd, 65536)
        while len(chunk) > _CERTAINLY_ALL:
            chunk = os.read(fd, 65536)
            content += chunk
        return content
    finally:
        os.close(fd)
