# SPDX-License-Identifier: Apache-2.0
"""The kinds of messages that ask for an operator: the journal's catalogue explains each by its id."""

from __future__ import annotations

import enum


class MessageId(enum.StrEnum):
    """Values of the field MESSAGE_ID.

    A new one is a row here, an entry of systemd/resctrlmond.catalog, which says what happened and what to do, and a
    line of resctrlmond(8).
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
    # Of the hook, which imports nothing and has a copy, and of the NRI plugin.
    UNMONITORED = "47f76e48a28c4accae8c5c9183767327"
