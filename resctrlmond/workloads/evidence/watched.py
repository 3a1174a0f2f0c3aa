# SPDX-License-Identifier: Apache-2.0
"""The members whose end is reported as it happens, so that the tick need not look for it each second.

If it did, an idle minute with 500 containers would take 10 times the CPU time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from resctrlmond.workloads.model.workload import EndRule, Member, Workload

# By id.
Members = Mapping[str, Member]
_NONE: Members = {}


class WatchedMembers:
    """The members of each workload for whose end ``Maintenance.record_ends`` is called. Thread-safe; empty at first.

    ``report`` replaces the members of one workload. A member whose end may have been reported, but is not recorded
    yet, is not one of them, because that call may fail.
    """

    def __init__(self) -> None:
        self._members: dict[str, Members] = {}
        # How often members were reported. Read it before the members.
        self.changes = 0
        self._guard = threading.Lock()

    def report(self, key: str, members: Iterable[Member]) -> None:
        """Record which members of the workload are watched from now on."""
        found = {member.id: member for member in members}
        if found:
            self._members[key] = found
        else:
            self._members.pop(key, None)
        with self._guard:
            self.changes += 1

    def of(self, key: str) -> Members:
        """Return the watched members of the workload. After the next report this is another object."""
        return self._members.get(key, _NONE)


def may_end_unseen(workload: Workload, watched: Members) -> bool:
    """Whether a member or a claim can end, or a dormant member return, without a report of a watched member.

    A claim that ends with members lasts while one that has tasks lives.
    """
    living = [member for member in workload.living if member.has_tasks]
    rules = {claim.ends for claim in workload.claims}
    return (
        bool(workload.dormant)
        or any(watched.get(member.id) != member for member in living)
        or EndRule.TASKS in rules
        or (not living and rules != {EndRule.RELEASE})
    )
