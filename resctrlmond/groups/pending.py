# SPDX-License-Identifier: Apache-2.0
"""Those that wait for an RMID: served in their order, as RMIDs come free."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager

from resctrlmond.groups.errors import ForeignGroup
from resctrlmond.groups.lifecycle import Lifecycle
from resctrlmond.groups.plan import baseline_of, waiting
from resctrlmond.groups.record import Record, State
from resctrlmond.groups.sweeping import Sweeping
from resctrlmond.resctrl.errors import LACKS, GroupExists, KernelRefused, NoSuchClass, PermissionDenied

# What was in the way with these may be gone a second later.
PASSING = LACKS | {errno.EIO}


class Pending:
    """Makes the groups that had to wait. Takes the keys it works on."""

    def __init__(self, life: Lifecycle, sweeping: Sweeping) -> None:
        self.life = life
        self.book = life.book
        self.sweeping = sweeping

    def serve(self, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        """Make the groups that wait for an RMID, in their order, until there is none for the next of them."""
        for waiting_group in waiting(self.book.all()):
            with guard(waiting_group.key), self.book.writing_if_free(waiting_group.key) as is_free:
                record = self.book.get(waiting_group.key)
                for group in waiting([record] if record and is_free else []):
                    if group.part == waiting_group.part and not self._make(group):
                        # One that comes free now is for this one, and not for who has waited less.
                        return

    def _make(self, group: Record) -> bool:
        """Make the group; a reason that no waiting will end makes it fail. False if there is no RMID for it."""
        try:
            made = self.life.make(group, baseline_of(self.book.get(group.key), group))
        except (ForeignGroup, GroupExists, NoSuchClass, KernelRefused, PermissionDenied) as error:
            if error.errno in PASSING:
                raise  # it is tried again, and whoever calls goes on with the others
            self.life.fail(group, str(error))
            return True
        self.sweeping.adopt(made)
        return made.state is not State.PENDING
