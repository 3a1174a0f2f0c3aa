# SPDX-License-Identifier: Apache-2.0
"""The faults that strace injects into a system call."""

from __future__ import annotations

import enum


class Fault(enum.Enum):
    """A fault at a system call, in the syntax of strace."""

    KILL = "signal=KILL"
    EIO = "error=EIO"
    ENOSPC = "error=ENOSPC"
    EINTR = "error=EINTR"
    EMFILE = "error=EMFILE"
