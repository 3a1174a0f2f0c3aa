# SPDX-License-Identifier: Apache-2.0
"""The readings of a group follow from the use of its task, to the resolution of the counters."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import pytest

from resctrlmond.sim.control.client import Control
from resctrlmond.sim.profiles import PROFILES
from tests.truth.record import bounds, counted_events, resolution, used_by, used_in_groups_by
from tests.truth.world import mounted

_CPUS = 4


@pytest.mark.parametrize("profile", ["intel-aet-perf", "intel-snc2", "amd-bmec"])
def test_readings_are_in_the_bounds_of_the_use(profile: str) -> None:
    chance, machine = random.Random(1), PROFILES[profile]
    with mounted(profile, 16, residue=7) as (simulation, _):
        control = Control(simulation.mountpoint)
        group = Path(simulation.mountpoint) / "mon_groups" / "a"
        group.mkdir()
        for number in range(20):
            tid = control.spawn()
            control.run(tid, chance.randrange(10**9))
            control.advance(1.0)
            before = {event: reading(group, event) for event in counted_events(machine)}
            (group / "tasks").write_text(str(tid))
            for _ in range(number % 4):
                control.run(tid, chance.randrange(10**7), chance.randrange(_CPUS))
            control.advance(1.0)
            control.exit(tid)
            used = used_in_groups_by(control, tid)
            for name, event in counted_events(machine).items():
                increase, known = reading(group, name) - before[name], bounds(machine, event, used)
                assert increase in known, (name, number)
                assert known.high - known.low == 2 * resolution(machine, event) * len(used)
                assert bool(used) == bool(number % 4)


def reading(group: Path, event: str) -> Fraction:
    """Return the sum of a counter over all domains."""
    return sum((Fraction(file.read_text()) for file in group.glob(f"mon_data/*/{event}")), start=Fraction(0))


def test_another_task_with_the_number_is_not_meant() -> None:
    with mounted("intel-aet", 16, residue=7) as (simulation, _):
        control = Control(simulation.mountpoint)
        group = Path(simulation.mountpoint) / "mon_groups" / "a"
        group.mkdir()
        for ns in (10**6, 10**7):
            tid = control.spawn(tid=4_000_000)
            (group / "tasks").write_text(str(tid))
            control.run(tid, ns)
            control.exit(tid)
            assert [row.cpu_ns for row in used_by(control, tid)] == [ns]
            control.advance(1.0)
            # This one was never in a group.
            assert used_by(control, 4_000_001) == ()
