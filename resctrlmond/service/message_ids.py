# SPDX-License-Identifier: Apache-2.0
"""The ids of messages that require an administrator, and of the ledger. The journal's catalogue explains each."""

from __future__ import annotations

import enum


class MessageId(enum.StrEnum):
    """Values of the field MESSAGE_ID.

    To add an id, add a row here, an entry in systemd/resctrlmond.catalog with the meaning and the remedy, and a line
    in resctrlmond(8).
    """

    CANNOT_START = "8f6d4d652af04b4580f7ee9b55d15b77"
    CONFIG_REFUSED = "5e76b53e113d44aaaf6b9f5a53cb9bca"
    RMIDS_EXHAUSTED = "5cb3bfb7f1264ccbba807c7a439b23c7"
    GROUP_LOST = "d7b72679c7cb4b71af2342618620a399"
    UNMOUNTED = "5514d2f6b88d431ea56ed957e2051e0c"
    GROUP_FAILED = "d2e2c33e6b6246afa2e920ec3424d064"
    RECORD_DAMAGED = "044a9a937b09444b8a8d3039f3d4ee3c"
    RECORD_OF_OTHER_VERSION = "f15b5dafb09c4dff89777fd804b48ccb"
    UNFINISHED = "e2a1a755eb244208b32e7d9c240f0e78"
    # Used by the NRI plugin, and by the hook, which has a copy because it imports nothing.
    UNMONITORED = "47f76e48a28c4accae8c5c9183767327"
    # The ledger: one entry for each ended workload, which resctrlctl report reads.
    ENDED = "37489fa7d512484b8f0d7c7a743b6828"
