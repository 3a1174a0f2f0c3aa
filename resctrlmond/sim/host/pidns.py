# SPDX-License-Identifier: Apache-2.0
"""Thread numbers in other PID namespaces (pid_namespaces(7))."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable

_NS_GET_PARENT = 0xB702  # linux/nsfs.h


def _inode(tid: int | str) -> int:
    """Return the PID namespace of a thread ("self": this process); 0 if the thread has ended or is not accessible."""
    try:
        return os.stat(f"/proc/{tid}/ns/pid").st_ino
    except OSError:
        return 0


def _ancestor(tid: int, generations: int) -> int:
    """Return the namespace this many levels above that of a thread; 0 if the thread has ended."""
    try:
        descriptor = os.open(f"/proc/{tid}/ns/pid", os.O_RDONLY)
        for _ in range(generations):
            below, descriptor = descriptor, -1
            try:
                descriptor = fcntl.ioctl(below, _NS_GET_PARENT)
            finally:
                os.close(below)
        found = os.fstat(descriptor).st_ino
        os.close(descriptor)
    except OSError:
        return 0
    return found


def _numbers(tid: int) -> list[int]:
    """Return a thread's numbers, from this namespace down to its own (NSpid, proc_pid_status(5)); [] if it ended."""
    try:
        with open(f"/proc/{tid}/status", encoding="ascii", errors="replace") as file:
            return [int(word) for line in file if line.startswith("NSpid:") for word in line.split()[1:]]
    except OSError:
        return []


class PidNamespaces:
    """Translates between this namespace and that of a caller, given by its thread number (0: not visible)."""

    def __init__(self) -> None:
        self._ours = _inode("self")

    def _is_ours(self, asking: int) -> bool:
        return _inode(asking) in (self._ours, 0)

    def seen(self, tids: Iterable[int], asking: int) -> list[int]:
        """Return the numbers of these threads in the caller's namespace, without threads that are not in it."""
        if self._is_ours(asking):
            return list(tids)
        return [number for tid in tids if (number := self._number(tid, asking)) is not None]

    def named(self, number: int, all_tids: Callable[[], Iterable[int]], asking: int) -> int | None:
        """Return the thread with this number in the caller's namespace; None if there is none."""
        if self._is_ours(asking):
            return number
        return next((tid for tid in all_tids() if self._number(tid, asking) == number), None)

    @staticmethod
    def _number(tid: int, asking: int) -> int | None:
        numbers, depth = _numbers(tid), len(_numbers(asking)) - 1
        if not 0 <= depth < len(numbers):
            return None
        return numbers[depth] if _ancestor(tid, len(numbers) - 1 - depth) == _inode(asking) else None
