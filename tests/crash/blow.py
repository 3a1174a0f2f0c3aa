# SPDX-License-Identifier: Apache-2.0
"""What a verb is struck with."""

from __future__ import annotations

import enum


class Blow(enum.Enum):
    """What happens at a system call, in strace's words."""

    KILL = "signal=KILL"
    EIO = "error=EIO"
    ENOSPC = "error=ENOSPC"
    EINTR = "error=EINTR"
    EMFILE = "error=EMFILE"
