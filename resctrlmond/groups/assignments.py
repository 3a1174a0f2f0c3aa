# SPDX-License-Identifier: Apache-2.0
"""Assignable bandwidth counters (AMD's ABMC): groups that have none get those that come free, by priority."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from resctrlmond.groups.lifecycle import Lifecycle
from resctrlmond.groups.plan import lacking_counters
from resctrlmond.resctrl.bandwidth import Mode, domain_number

# What the failure to read the counters of the host is about; no workload can have this key.
ALL_COUNTERS = "bandwidth counters"


class Assignments:
    """Assigns free counters to groups of ours. No counter is taken from anybody. Takes the keys it works on."""

    def __init__(self, life: Lifecycle) -> None:
        self.life = life
        self.book = life.book

    def serve(self, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        """Assign the counters that are free to the groups that lack some, in their order."""
        lacking = lacking_counters(self.book.all())
        if not lacking:
            return
        with guard(ALL_COUNTERS):
            bandwidth = self.life.tree.bandwidth()
            if bandwidth.mode is not Mode.ASSIGNED:
                return
            free = {domain for domain, number in bandwidth.available.items() if number}
            for group in lacking:
                if _domains(group.unassigned).isdisjoint(free):
                    continue
                with guard(group.key), self.book.writing_if_free(group.key) as is_free:
                    record = self.book.get(group.key)
                    for own in lacking_counters([record] if record and is_free else []):
                        if own.part == group.part:
                            self.life.assign_counters(own)


def _domains(unassigned: Iterable[tuple[str, str]]) -> set[int]:
    return {domain_number(domain) for domain, _ in unassigned}
