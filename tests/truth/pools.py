# SPDX-License-Identifier: Apache-2.0
"""Compare the pools of the machine with the actual use of all RMIDs, while workloads come and go."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from resctrlmond.resctrl.counters import Kind
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.machine.pools import Machine, Pool
from tests.truth.world import Use

_PICO = 10**12
# The kernel rounds the energy of each group to a microjoule. The hardware counts traffic in units of 64 KiB, and what
# a group used of its last unit is not counted: at most one unit in each of two domains.
_JOULES, _BYTES = Decimal("0.000004"), 2 * 65536


# After a kill of the daemon. The simulated workloads are the only programs that change groups, and none does while no
# daemon runs: these figures must be right too.
_ONLY_RESTARTED = "changes of other programs were not seen while resctrlmond did not run"


class PoolCheck:
    """Checks the sums of the pools, over restarts and kills. ``problems`` has each sum that is wrong or fell."""

    def __init__(self, control: Control, rmids: int) -> None:
        self._control = control
        self._rmids = rmids
        self._since = ""
        self._before = Use()
        self._shown: dict[tuple[Pool, str, str], int | Decimal] = {}
        # So many groups may have been created, whose use is rounded.
        self._groups = 100
        self.exact = self.estimated = 0
        self.problems: list[str] = []
        # Whether the last sums were estimated: those of this daemon, and of the next ones, remain so.
        self.is_estimated = False

    def add_group(self) -> None:
        """Count a group that may have been created, whose use is rounded."""
        self._groups += 1

    def begin_anew(self, run: str) -> None:
        """Let the next daemon begin anew. No daemon is running; ``run`` is its folder."""
        Path(run, "machine.json").unlink(missing_ok=True)
        self._since, self._shown, self.is_estimated = "", {}, False

    def check(self, machine: Machine) -> None:
        """Compare the pools now. The first call begins."""
        machine.tick(has_trouble=False)
        found = machine.read()
        if not self._since:
            self._since, self._before = found.since, self._true()
            return
        if found.since != self._since:
            self.problems.append(f"the pools began again at {found.since}")
            self._since = found.since
        true = self._true() - self._before
        for use in found.pools:
            of = use.pool, use.domain, use.event.name
            if use.event.kind is Kind.CUMULATIVE and use.number is not None:
                if use.number < self._shown.get(of, 0):
                    self.problems.append(f"{of}: fell from {self._shown[of]} to {use.number}")
                self._shown[of] = use.number
        for name, total, rounding in (
            ("core_energy", true.joules, _JOULES),
            ("mbm_total_bytes", true.bytes, _BYTES),
        ):
            uses = [use for use in found.pools if use.event.name == name]
            reported = sum((Decimal(use.number or 0) for use in uses), Decimal(0))
            most = sum((Decimal(use.skew) for use in uses), Decimal(0)) + rounding * self._groups
            if any(use.reason not in ("", _ONLY_RESTARTED) for use in uses):
                self.estimated += 1
                self.is_estimated = True
                continue
            self.exact += 1
            if abs(reported - total) > most:
                self.problems.append(f"{name}: the pools have {reported}, {total} was used")

    def _true(self) -> Use:
        # Each by its number: without one, those that have not counted yet are left out, with their residue.
        rows = [row for rmid in range(self._rmids) for row in self._control.truth(rmid=rmid).rmids]
        used = [used for row in rows for used in row.total]
        return Use(Decimal(sum(one.picojoules for one in used)) / _PICO, sum(one.bytes for one in used))
