# SPDX-License-Identifier: Apache-2.0
"""Compare the increase of the pools of the machine in Prometheus with the actual use of all RMIDs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from resctrlmond.exporter.metrics import EVENT_METRICS
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.profiles import Profile
from tests.exporter.prometheus import Prometheus
from tests.truth.record import Bounds, bounds, counted_events, resolution

# Sums of floating-point numbers.
_ACCURACY = 1e-9

Amounts = Mapping[str, Fraction]


class MachineIncrease:
    """The increase of the pool of workloads, and of all pools together, by event, from one scrape to another one.

    ``settle`` waits for a scrape that reads the counters after it is called. No workload is running meanwhile. Tasks
    in no group use something all the time, so the actual use of all is read before and after each scrape.
    """

    def __init__(self, control: Control, profile: Profile, server: Prometheus, settle: Callable[[], None]) -> None:
        self._control, self._profile = control, profile
        self._server, self._settle = server, settle
        self._before: Amounts = {}
        self._first: Amounts = {}
        self._after: Amounts = {}
        self._first_tracked: Amounts = {}
        self._used_by_runs: dict[str, Bounds] = {}
        self._runs = 0

    def begin(self) -> None:
        """Count from the next scrape on."""
        self._before, self._first, self._after = self._read()
        self._first_tracked = self._pools(pool="tracked")
        self._used_by_runs, self._runs = {}, 0

    def add(self, used: Mapping[str, Bounds]) -> None:
        """Add a run, of which a part may be in no total, and in no pool."""
        self._runs += 1
        for event, of in used.items():
            self._used_by_runs[event] = self._used_by_runs.get(event, Bounds()) + of

    def faults(self) -> list[str]:
        """Return the events whose pools did not increase by the use of all RMIDs."""
        before, last, after = self._read()
        tracked, found = self._pools(pool="tracked"), []
        for name, event in counted_events(self._profile).items():
            increase = last[name] - self._first[name]
            # The groups of a run, and the class, have a counter in each node.
            error = resolution(self._profile, event) * 4 * (self._runs + 10) + Fraction(_ACCURACY) * last[name]
            runs, margin = self._used_by_runs.get(name, Bounds()), Bounds(-error, error)
            of_all = margin + Bounds(
                before[name] - self._after[name] - (runs.high - runs.low), after[name] - self._before[name]
            )
            for what, amount, used in (
                ("all pools", increase, of_all),
                ("the pool of workloads", tracked[name] - self._first_tracked[name], runs + margin),
            ):
                if amount not in used:
                    found.append(
                        f"{name} of {what} increased by {float(amount)!r}; {float(used.low)!r} to "
                        f"{float(used.high)!r} were used"
                    )
        return found

    def _read(self) -> tuple[Amounts, Amounts, Amounts]:
        """Return the actual use before a scrape, the pools of the scrape, and the actual use after it."""
        before = self._used()
        self._settle()
        return before, self._pools(), self._used()

    def _used(self) -> Amounts:
        rows = [row for rmid in range(self._profile.num_rmids) for row in self._control.truth(rmid=rmid).rmids]
        used = [used for row in rows for used in row.total]
        return {
            name: bounds(self._profile, event, used).low + resolution(self._profile, event) * len(used)
            for name, event in counted_events(self._profile).items()
        }

    def _pools(self, **labels: str) -> Amounts:
        found = {}
        for name in counted_events(self._profile):
            row = EVENT_METRICS[name]
            own = {row.machine.labels[-1]: row.label} if row.label else {}
            series = self._server.series(row.machine.sample, **labels, **own)
            found[name] = sum((Fraction(one.samples[-1][1]) for one in series), Fraction(0))
        return found
