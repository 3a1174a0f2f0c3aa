# SPDX-License-Identifier: Apache-2.0
"""The faults that are injected into a verb."""

from __future__ import annotations

import enum


class Blow(enum.Enum):
    """The fault at a system call, in strace's syntax."""

    KILL = "signal=KILL"
    EIO = "error=EIO"
    ENOSPC = "error=ENOSPC"
    EINTR = "error=EINTR"
    EMFILE = "error=EMFILE"
