# SPDX-License-Identifier: Apache-2.0
"""The mark of the daemon's own groups."""

from __future__ import annotations

import msgspec


class Mark(msgspec.Struct, frozen=True):
    """A group is the daemon's own if its directory has this group id, which the kernel sets at its creation.

    Records of another boot are about groups that ended with that boot.
    """

    gid: int
    boot_id: str
