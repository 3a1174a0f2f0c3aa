# SPDX-License-Identifier: Apache-2.0
"""Files of the kernel are read whole, with as few system calls as possible."""

from __future__ import annotations

import os

import pytest

from resctrlmond.resctrl import kernel_files


def test_file_of_many_records_is_read_whole() -> None:
    """The kernel returns the records that fit into a page by one read."""
    with open("/proc/kallsyms", "rb") as opened:
        whole = opened.read()
    assert len(whole) > 1_000_000
    assert kernel_files.read("/proc/kallsyms") == whole


def test_short_file_is_read_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    read = os.read

    def counted(fd: int, size: int) -> bytes:
        calls.append(fd)
        return read(fd, size)

    monkeypatch.setattr(os, "read", counted)
    assert kernel_files.read("/proc/self/status").startswith(b"Name:")
    assert len(calls) == 1
