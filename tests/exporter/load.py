# SPDX-License-Identifier: Apache-2.0
"""Short workloads of real processes, and the use of each that the simulator recorded."""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction

from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.model.states import Quality, worst
from tests.daemon.conftest import Machine
from tests.exporter.worker import Worker
from tests.truth.record import Bounds, bounds, counted_events, used_in_groups_by

# Releasing a workload takes about half of it. The daemon is killed at a random time within it.
_RELEASE_S = 0.02
# With these qualities, a total has all that was used in the group.
_WHOLE = (Quality.EXACT, Quality.LATE)


class Event(enum.Enum):
    """An event in the life of a workload, beside its begin and end."""

    NONE = enum.auto()
    LATE = enum.auto()  # it works before its Assign
    REMOVED = enum.auto()  # another program removes its group
    KILLED = enum.auto()  # the daemon is killed while it runs
    KILLED_AT_RELEASE = enum.auto()  # the daemon is killed while it releases it


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended. ``used`` is its use by event, as far as it can be known.

    That is what the simulator has recorded, but the least use of an event whose total is estimated or unknown is the
    total, or 0. ``quality`` is the worst of the totals. ``faults`` has what is wrong with the record or a total.
    """

    used: Mapping[str, Bounds]
    quality: Quality
    lived_s: float = 0.0
    faults: Sequence[str] = ()


class Load:
    """Runs workloads on a machine, one after the other."""

    def __init__(self, machine: Machine) -> None:
        assert machine.simulation
        self._machine = machine
        self._profile = machine.simulation.profile
        self._control = Control(machine.simulation.mountpoint)
        self._chance = random.Random(1)

    def run(self, key: str, namespace: str, event: Event = Event.NONE) -> Run:
        """Run a short workload, of which each run has another key."""
        machine, worker = self._machine, Worker()
        machine.call("Create", key=key, claim="me", attributes={"pod.namespace": namespace})
        if event is Event.LATE:
            worker.work()
        before_ns = worker.used_ns
        machine.call("Assign", key=key, pid=worker.pid, late=event is Event.LATE, claim="me")
        if event is not Event.LATE:
            worker.work()
        if event is Event.REMOVED:
            machine.call("Read", key=key)
            self._control.remove_group(f"mon_groups/{key}")
        elif event is Event.KILLED:
            machine.kill()
            machine.start()
        worker.work()
        least_ns = worker.used_ns - before_ns
        worker.end()
        if event is Event.KILLED_AT_RELEASE:
            self._kill_at_release(key)
        run = self.end(key, worker.pid)
        # The last work of the kernel for a task that ends is not in the record of its exit.
        recorded_ns, most_ns = self._recorded_ns(worker.pid), worker.used_ns - before_ns
        is_right = recorded_ns <= most_ns and (recorded_ns >= least_ns or event is Event.REMOVED)
        fault = f"{key} used {least_ns} to {most_ns} ns; the simulator recorded {recorded_ns} ns"
        return replace(run, lived_s=worker.lived_s, faults=[*run.faults, *([] if is_right else [fault])])

    def end(self, key: str, pid: int) -> Run:
        """End a workload whose process has ended."""
        reply = self._machine.call("Release", key=key, claim="me")
        totals = {total["event"]: total for total in reply["totals"]}
        recorded, used, qualities, faults = used_in_groups_by(self._control, pid), {}, [Quality.EXACT], []
        for name, event in counted_events(self._profile).items():
            total, known = Fraction(totals[name].get("value") or 0), bounds(self._profile, event, recorded)
            quality = Quality(totals[name]["quality"])
            qualities.append(quality)
            used[name] = known if quality in _WHOLE else Bounds(total, known.high)
            if total not in used[name]:
                faults.append(f"{key} has {totals[name]}; the simulator recorded {recorded}")
        return Run(used, worst(*qualities), faults=faults)

    def _recorded_ns(self, pid: int) -> int:
        return sum(row.cpu_ns for row in used_in_groups_by(self._control, pid))

    def _kill_at_release(self, key: str) -> None:
        machine = self._machine
        with ThreadPoolExecutor(1) as thread:
            reply = thread.submit(machine.call, "Release", key=key, claim="me")
            time.sleep(self._chance.uniform(0, _RELEASE_S))
            machine.kill()
            reply.exception()
        machine.start()
