# SPDX-License-Identifier: Apache-2.0
"""Compare the pools of the machine with the actual use of all RMIDs, while workloads come and go."""

from __future__ import annotations

from decimal import Decimal

from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.machine import Machine
from resctrlmond.workloads.states import Quality
from tests.truth.world import Use

_PICO = 10**12
# The kernel rounds the energy of each group to a microjoule. The hardware counts traffic in units of 64 KiB, and what
# a group used of its last unit is not counted: at most one unit in each of two domains.
_JOULES, _BYTES = Decimal("0.000004"), 2 * 65536


class PoolCheck:
    """Checks the sums of the pools of each daemon since its start. ``problems`` has each sum that is wrong."""

    def __init__(self, control: Control, rmids: int) -> None:
        self._control = control
        self._rmids = rmids
        self._machine: Machine | None = None
        self._before = Use()
        self._groups = 0
        self.exact = self.estimated = 0
        self.problems: list[str] = []

    def add_group(self) -> None:
        """Count a group that may have been created, whose use is rounded."""
        self._groups += 1

    def check(self, machine: Machine) -> None:
        """Compare the pools now; of a daemon that was not compared before, begin."""
        if machine is not self._machine:
            self._machine, self._groups = machine, 100
            machine.tick(has_trouble=False)
            self._before = self._true()
            return
        true = self._true() - self._before
        pools = machine.read().pools
        for name, of, rounding in (("core_energy", true.joules, _JOULES), ("mbm_total_bytes", true.bytes, _BYTES)):
            uses = [use for use in pools if use.event.name == name]
            if any(use.quality is not Quality.EXACT for use in uses):
                self.estimated += 1
                continue
            self.exact += 1
            reported = sum((Decimal(use.number or 0) for use in uses), Decimal(0))
            most = sum((Decimal(use.skew) for use in uses), Decimal(0)) + rounding * self._groups
            if abs(reported - of) > most:
                self.problems.append(f"{name}: the pools have {reported}, {of} was used")

    def _true(self) -> Use:
        # Each by its number: without one, those that have not counted yet are left out, with their residue.
        rows = [row for rmid in range(self._rmids) for row in self._control.truth(rmid=rmid).rmids]
        used = [used for row in rows for used in row.total]
        return Use(Decimal(sum(one.picojoules for one in used)) / _PICO, sum(one.bytes for one in used))
