# SPDX-License-Identifier: Apache-2.0
"""The entries of the sums: the use of one run, and the ended runs of one name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from decimal import Decimal

import msgspec

from resctrlmond.resctrl.counters import Kind
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.model.states import Quality, worst
from resctrlmond.workloads.model.workload import Workload

# Further names of a grouping, and names that are too long, are counted together (``sums.OTHER``). Callers choose
# names: without a limit, each end would write more, and Prometheus would store more series.
MAX_NAMES = 128
MAX_NAME_LENGTH = 128

_MAX_EVENTS = 64

Number = int | Decimal
# A run: its key, its generation and the nonce of its first group.
Run = tuple[str, int, int]
# The name of a workload in each grouping; "" for a grouping in which it has none.
Names = tuple[str, ...]
# By event, the amount of each quality. That of UNKNOWN is the number of runs without a number.
Amounts = dict[str, dict[Quality, Number]]


class RunUse(msgspec.Struct):
    """The use of one run. ``parts``: by names and event, what was counted under these names.

    ``workload`` has the present names ``names``. ``has_run``: the workload has had a member.
    """

    names: Names
    has_run: bool = False
    workload: Workload | None = None
    parts: dict[Names, dict[str, Number]] = msgspec.field(default_factory=dict)
    qualities: dict[str, Quality] = msgspec.field(default_factory=dict)

    def take(self, totals: Iterable[Total]) -> None:
        """Add what these totals exceed the known amounts by, under the present names. No amount falls."""
        for total in totals:
            name = total.event.name
            if total.event.kind is Kind.GAUGE or (name not in self.qualities and len(self.qualities) >= _MAX_EVENTS):
                continue
            known = [part[name] for part in self.parts.values() if name in part]
            before = sum(known)
            if total.number is None and known:
                self.qualities[name] = worst(self.qualities[name], Quality.ESTIMATED)
                continue
            self.qualities[name] = total.quality
            if total.number is None:
                continue
            if total.number < before:
                self.qualities[name] = worst(total.quality, Quality.ESTIMATED)
            elif total.number > before or not known:
                part = self.parts.setdefault(self.names, {})
                part[name] = part.get(name, 0) + total.number - before

    def downgrade_except(self, events: Collection[str]) -> None:
        """Mark the amounts of all events but these: they were shown, and the present totals lack them."""
        for name in self.qualities.keys() - events:
            self.qualities[name] = worst(self.qualities[name], Quality.ESTIMATED)

    def amounts(self) -> Iterable[tuple[Names, str, Quality, Number]]:
        """Yield what each name used of each event; 1 with UNKNOWN for an event without a number."""
        for name, quality in self.qualities.items():
            found = [(names, part[name]) for names, part in self.parts.items() if name in part]
            if not found:
                yield self.names, name, Quality.UNKNOWN, 1
            for names, number in found:
                yield names, name, quality, number

    @property
    def is_missing(self) -> bool:
        """Whether a run that may have used something has no total of any event: it never had an RMID, for example."""
        return self.has_run and not self.qualities

    @property
    def quality(self) -> Quality:
        """The worst quality of the events."""
        return worst(*self.qualities.values()) if self.qualities else Quality.UNKNOWN

    def copy(self) -> RunUse:
        """Return a copy without the workload."""
        parts = {names: dict(part) for names, part in self.parts.items()}
        return RunUse(self.names, self.has_run, None, parts, dict(self.qualities))


class Counted(msgspec.Struct):
    """A run that is in the sums. The file has it from ``version`` on.

    ``had_loss``: the run lost a group.
    """

    use: RunUse
    version: int
    had_loss: bool


class NameSums(msgspec.Struct):
    """The ended runs of one name. ``encoded`` is their text in the file; None if it has changed.

    Without the texts, the end of a container takes 1.1 times the CPU time with 10 namespaces, and 1.3 times with 128.
    ``missing`` is the number of runs that have no total of any event (``RunUse.is_missing``).
    """

    ends: dict[Quality, int] = msgspec.field(default_factory=dict)
    amounts: Amounts = msgspec.field(default_factory=dict)
    missing: int = 0
    encoded: bytes | None = None

    def copy(self) -> NameSums:
        """Return a copy without the text."""
        return NameSums(dict(self.ends), {event: dict(of) for event, of in self.amounts.items()}, self.missing)
