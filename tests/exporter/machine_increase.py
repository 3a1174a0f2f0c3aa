# SPDX-License-Identifier: Apache-2.0
"""Compare the increase of the pools of the machine in Prometheus with the actual use of all RMIDs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from resctrlmond.exporter.metrics import EVENT_METRICS
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.profiles import Profile
from tests.exporter.prometheus import Prometheus
from tests.truth.record import Bounds, bounds, counted_events, resolution

# Sums of floating-point numbers.
_ACCURACY = 1e-9

# By event.
Amounts = Mapping[str, Fraction]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The pools of a scrape: all of them together, and that of workloads.

    ``before`` and ``after`` are the actual use of all RMIDs before and after it: tasks in no group use something all
    the time.
    """

    before: Amounts
    pools: Amounts
    tracked: Amounts
    after: Amounts


class MachineIncrease:
    """The increase of the pools between two scrapes that ``scrape`` returns, while no workload is running."""

    def __init__(self, scrape: Callable[[], Scrape], profile: Profile) -> None:
        self._scrape, self._profile = scrape, profile
        self._used_by_runs: dict[str, Bounds] = {}
        self._runs = 0

    def begin(self) -> None:
        """Count from the next scrape on."""
        self._first = self._scrape()
        self._used_by_runs, self._runs = {}, 0

    def add(self, used: Mapping[str, Bounds]) -> None:
        """Add a run, of which a part may be in no total, and in no pool."""
        self._runs += 1
        for event, of in used.items():
            self._used_by_runs[event] = self._used_by_runs.get(event, Bounds()) + of

    def faults(self) -> list[str]:
        """Return the events of which the pools did not increase by the use."""
        first, last, found = self._first, self._scrape(), []
        for name, event in counted_events(self._profile).items():
            # The groups of a run, and the class, have a counter in each node.
            error = resolution(self._profile, event) * 4 * (self._runs + 10) + Fraction(_ACCURACY) * last.pools[name]
            runs, margin = self._used_by_runs.get(name, Bounds()), Bounds(-error, error)
            least = last.before[name] - first.after[name] - (runs.high - runs.low)
            of_all = Bounds(least, last.after[name] - first.before[name])
            for what, increase, used in (
                ("all pools", last.pools[name] - first.pools[name], of_all + margin),
                ("the pool of workloads", last.tracked[name] - first.tracked[name], runs + margin),
            ):
                if increase not in used:
                    found.append(
                        f"{name} of {what} increased by {float(increase)!r}; {float(used.low)!r} to "
                        f"{float(used.high)!r} were used"
                    )
        return found


def scrape(server: Prometheus, control: Control, profile: Profile, settle: Callable[[], None]) -> Scrape:
    """Return the next scrape. ``settle`` waits for one that reads the counters after it is called."""
    before = _used(control, profile)
    settle()
    return Scrape(before, _pools(server, profile), _pools(server, profile, pool="tracked"), _used(control, profile))


def _used(control: Control, profile: Profile) -> Amounts:
    # Each by its number: without one, those that have not counted yet are left out, with their former use.
    rows = [row for rmid in range(profile.num_rmids) for row in control.truth(rmid=rmid).rmids]
    used = [used for row in rows for used in row.total]
    return {
        name: bounds(profile, event, used).low + resolution(profile, event) * len(used)
        for name, event in counted_events(profile).items()
    }


def _pools(server: Prometheus, profile: Profile, **labels: str) -> Amounts:
    found = {}
    for name in counted_events(profile):
        row = EVENT_METRICS[name]
        own = {row.machine.labels[-1]: row.label} if row.label else {}
        series = server.series(row.machine.sample, **labels, **own)
        found[name] = sum((Fraction(one.samples[-1][1]) for one in series), Fraction(0))
    return found
