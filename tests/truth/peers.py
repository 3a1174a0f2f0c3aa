# SPDX-License-Identifier: Apache-2.0
"""Model two other owners of monitoring groups by their sources, without their code.

They run the same script on the same simulated machine, but within this process: neither of them reads processes, so
no process needs to exist. The models have the system calls on resctrl, their times, and the figures that a reader
gets; not their speed, nor their other features.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import uuid
from collections.abc import Iterator
from decimal import Decimal

import msgspec

from resctrlmond.resctrl.counters import parse_value
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.control.orders import Orders
from resctrlmond.sim.kernel.clock import Stopwatch
from resctrlmond.sim.kernel.tree import Directory, File
from resctrlmond.sim.messages import TRUTH, VIRTUAL, Truth, Virtual
from resctrlmond.workloads.model.validation import is_pod_uid
from tests.sim.virtual import VirtualResctrl
from tests.truth.script import CPUS
from tests.truth.world import Life, Reported

# Both are read at this interval: OTLP is pushed every 15 s by default, and Prometheus scrapes about as often.
SCRAPE_S = 15
# nri-resctrl-mon looks for groups that it does not know every 30 s.
RECONCILE_S = 30
EVENTS = ("core_energy", "mbm_total_bytes")
Number = int | Decimal


class InProcess(Control):
    """The control of a simulation that is not mounted. Its clock stops between the seconds of the script."""

    def __init__(self, rmids: int, residue: int) -> None:
        super().__init__("")
        self.resctrl = VirtualResctrl("intel-aet", rmids, residue, reports_forks=True, cpus=CPUS)
        self._orders = Orders(self.resctrl.model, (self.resctrl.tasks, _Clock(self.resctrl)))

    def _send(self, attribute: str, order: object) -> None:
        self._orders.set(attribute, msgspec.json.encode(order))

    def _bear(self, order: Virtual) -> int:
        self._send(VIRTUAL, order)
        answer: dict[str, int] = msgspec.json.decode(self._orders.get(VIRTUAL) or b"", type=dict[str, int])
        return answer["tid"]

    def truth(self, *, tid: int | None = None, rmid: int | None = None) -> Truth:
        name = TRUTH if tid is None else f"{TRUTH}.{tid}"
        return msgspec.json.decode(self._orders.get(name) or b"", type=Truth)

    # -- file operations of a process

    def exists(self, path: str) -> bool:
        try:
            self.resctrl.node(path)
        except OSError:
            return False
        return True

    def join(self, group: str, tid: int) -> None:
        self.resctrl.write(f"{group}/tasks", f"{tid}\n")

    def groups(self) -> list[str]:
        """Return the names in mon_groups of the root."""
        return list(self.resctrl.directory("mon_groups").children)

    def numbers(self, group: str) -> Iterator[tuple[tuple[str, str], Number]]:
        """Return the numbers by (domain, event). Values that are not numbers are left out."""
        for domain in self.resctrl.directory(f"{group}/mon_data").children.values():
            assert isinstance(domain, Directory)
            for file in domain.children.values():
                if isinstance(file, File) and file.name in EVENTS:
                    number = parse_value(file.show()).number
                    if number is not None:
                        yield (domain.name, file.name), number


class _Clock(Stopwatch):
    def __init__(self, resctrl: VirtualResctrl) -> None:
        super().__init__()
        self._resctrl = resctrl

    def advance(self, seconds: float) -> None:
        self._resctrl.now += seconds


class _Peer:
    """The common part of both models: a group for each pod, with the first process of each container."""

    def __init__(self, machine: InProcess, seed: int, restarts: float = 0.03) -> None:
        self.machine = machine
        self._chance = random.Random(f"{seed} of the daemon")
        self._restart = restarts  # as often as resctrlmond is restarted or killed
        self.running: dict[str, Life] = {}
        self.figures: dict[str, dict[str, Number]] = {}

    def adopt(self, life: Life, late: bool) -> None:
        """Handle PostCreateContainer and StartContainer, or Synchronize for a container that runs already."""
        self._maybe_restart()
        self.running[_uid(life)] = life
        self._take_in(life)

    def _take_in(self, life: Life) -> None:
        # Only the first process is written: its existing threads and children stay outside.
        if self.ensure(_uid(life)):
            # Refused it is a warning in the log: where the task is in another class, for one.
            with contextlib.suppress(OSError):
                self.machine.join(self.path(_uid(life)), life.first.tid)

    def _maybe_restart(self) -> None:
        if self._chance.random() < self._restart:
            self.restart()

    def move(self, life: Life, class_: str) -> bool:
        """Return False: neither program moves groups, so the tasks leave the group for the class."""
        return False

    def group(self, life: Life) -> str:
        path = self.path(_uid(life))
        return path if self.machine.exists(path) else ""

    def end(self, life: Life) -> None:
        """Handle RemovePodSandbox: remove the group without reading it."""
        self._maybe_restart()
        uid = _uid(life)
        self.running.pop(uid, None)
        self.remove(uid)
        self.is_removed(uid)
        numbers = self.figures.pop(uid, {})
        joules, traffic = numbers.get("core_energy"), numbers.get("mbm_total_bytes")
        life.reported = Reported(
            None if joules is None else Decimal(joules), None if traffic is None else int(traffic)
        )

    def forget(self, life: Life) -> None:
        """Do nothing: no state is left."""

    def second(self, number: int) -> None:
        if number % SCRAPE_S == 0:
            self.scrape()
        if number % RECONCILE_S == 0:
            self.reconcile()

    def path(self, uid: str) -> str:
        return f"mon_groups/{uid}"

    def mkdir(self, uid: str) -> bool:
        try:
            self.machine.resctrl.mkdir(self.path(uid))
        except OSError as error:
            # An existing group of any owner is adopted. Without an RMID, the pod is unmonitored: ENOSPC, or
            # EBUSY, which they do not distinguish from other failures.
            return error.errno == errno.EEXIST
        return True

    def remove(self, uid: str) -> None:
        if self.machine.exists(self.path(uid)):
            self.machine.resctrl.rmdir(self.path(uid))

    def reconcile(self) -> None:
        """Remove groups with the names of unknown pods."""
        for name in self.machine.groups():
            if name not in self.running:
                self.remove(name)

    def restart(self) -> None:
        """Restart: the state in memory is lost, and the runtime reports the running containers."""
        for life in self.running.values():
            if not life.is_over:
                self._take_in(life)
        self.reconcile()

    def ensure(self, uid: str) -> bool:
        raise NotImplementedError

    def is_removed(self, uid: str) -> None:
        raise NotImplementedError

    def scrape(self) -> None:
        raise NotImplementedError


class NriResctrlMon(_Peer):
    """The NRI plugin (main branch, mid-2026), which creates groups and does not read them.

    Its reader works as the plugin's documentation describes: it reads the files of all groups at an interval, and
    reports their rise between the first and the last reading; a fall is a reset (as in Prometheus' increase()).
    """

    def __init__(self, machine: InProcess, seed: int) -> None:
        super().__init__(machine, seed)
        self._last: dict[str, dict[tuple[str, str], Number]] = {}

    def ensure(self, uid: str) -> bool:
        return self.mkdir(uid)

    def scrape(self) -> None:
        for uid in self.running:
            if not self.machine.exists(self.path(uid)):
                continue
            before = self._last.get(uid, {})
            now = dict(self.machine.numbers(self.path(uid)))
            figures = self.figures.setdefault(uid, {})
            for (domain, event), number in now.items():
                last = before.get((domain, event), number)
                rise = number - last if number >= last else number
                figures[event] = figures.get(event, 0) + rise
            self._last[uid] = before | now

    def is_removed(self, uid: str) -> None:
        self._last.pop(uid, None)


class GoresctrlMonitor(_Peer):
    """goresctrl's pkg/monitor with its OpenTelemetry bridge (pull request 192, its last push that was read).

    It reports the cumulative counter of a group that it last exported: it starts with the first raw value, adds each
    rise of a counter, ignores each fall, and continues with a group that was created again.
    """

    def __init__(self, machine: InProcess, seed: int) -> None:
        super().__init__(machine, seed)
        self._generations = itertools.count(1)
        self._tracked: dict[str, int] = {}
        self._states: dict[str, tuple[int, dict[tuple[str, str], tuple[Number, Number]]]] = {}

    def ensure(self, uid: str) -> bool:
        if uid in self._tracked and self.machine.exists(self.path(uid)):
            return True
        if not self.mkdir(uid):
            return False
        self._tracked[uid] = next(self._generations)
        return True

    def scrape(self) -> None:
        for uid, generation in self._tracked.items():
            if not self.machine.exists(self.path(uid)):
                continue
            known, states = self._states.get(uid, (generation, {}))
            anew = generation != known
            for series, number in self.machine.numbers(self.path(uid)):
                if series not in states:
                    states[series] = number, number
                    continue
                total, last = states[series]
                rise = 0 if anew else max(0, number - last)
                states[series] = total + rise, number
            self._states[uid] = generation, states
            sums: dict[str, Number] = {}
            for (_, event), (total, _) in states.items():
                sums[event] = sums.get(event, 0) + total
            self.figures[uid] = sums

    def is_removed(self, uid: str) -> None:
        self._tracked.pop(uid, None)
        self._states.pop(uid, None)

    def restart(self) -> None:
        self._tracked.clear()
        self._states.clear()
        super().restart()


def _uid(life: Life) -> str:
    """Return the UID of the pod: both programs know only pods, so each workload is one."""
    key = life.of.key
    return key if is_pod_uid(key) else str(uuid.uuid5(uuid.NAMESPACE_OID, key))
