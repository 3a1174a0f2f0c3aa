# SPDX-License-Identifier: Apache-2.0
"""The manager as the agent of the simulated workloads: with restarts, and kills at random steps of its verbs."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

import msgspec

from resctrlmond.resctrl.counters import EVENTS, Kind, parse_value
from resctrlmond.resctrl.errors import ClassMismatch, NoSuchGroup, NoSuchProcess
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.verdict import cpu_time
from resctrlmond.workloads.model.errors import NoSuchClaim
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.workload import EndRule, State, Workload
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.truth.compare import JOULES_PER_NS
from tests.truth.pools import PoolCheck
from tests.truth.script import Owner
from tests.truth.world import Life, Reported
from tests.workloads.builders import drop
from tests.workloads.conftest import Host

T = TypeVar("T")
OTHER = "other"  # a second owner of the same workload
# The intervals of the daemon, here in seconds of the script.
SWEEP_S = 5
CHECKPOINT_S = 10
POOLS_S = 3
_NEVER = 1e9
PROMISED = ("core_energy", "mbm_total_bytes")
# The mark of a workload without a record: the daemon was killed during the hook's call. The hook logs that.
UNSEEN = "unseen"
# Everything by which a file or the tree is changed; an "open" counts if it is for writing.
_CHANGES = {"open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.symlink", "os.utime", "shutil.rmtree"}
_MOST_CHANGES = 60


class Trap:
    """Kills its process immediately before the change with a given number."""

    def __init__(self) -> None:
        self._left = -1
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._left < 0 or event not in _CHANGES:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def kills(self, change: int, action: Callable[[], object]) -> bool:
        """Run a function in a process of its own, which has the trap. Return whether the process was killed."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                self._left = change
                action()
                code = 0
            except (NoSuchGroup, NoSuchProcess, ClassMismatch):
                code = 0
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), status
        return status != 0


_TRAP = Trap()


class Ours:
    """The manager in this process. ``restarts`` and ``kills`` count; the parameters are their shares of the verbs."""

    def __init__(
        self, simulation: Simulation, run: str, seed: int, restarts: float = 0.01, kills: float = 0.02
    ) -> None:
        self._chance = random.Random(f"{seed} of the daemon")
        self._restart, self._kill = restarts, kills
        self.host = Host(simulation.mountpoint, run)
        self._lives: dict[str, Life] = {}
        self.restarts = self.kills = 0
        self.pools = PoolCheck(Control(simulation.mountpoint), self.host.tree.capacity()[0].rmids)
        self._unreported: set[str] = set()
        # The start of the last reported run of a key: a later run that was not reported has another start.
        self._reported: dict[str, str] = {}
        self._is_down = False
        self._time_for_checkpoints(False)

    def _time_for_checkpoints(self, now: bool) -> None:
        # Each record gets its first checkpoint at once, for any interval.
        settings = msgspec.structs.replace(Settings(), checkpoint_interval_s=1e-9 if now else _NEVER)
        self.host.settings = self.host.ctx.config.settings = settings

    def _do(self, verb: Callable[[], T]) -> T:
        if not self._is_killed_in(verb) and self._chance.random() < self._restart:
            self._is_down = True
        self._start()
        return verb()

    def _is_killed_in(self, verb: Callable[[], object]) -> bool:
        """Run a verb. Return whether the daemon was killed in it, or after it and before its reply."""
        if self._chance.random() >= self._kill:
            return False
        self._start()
        self.kills += _TRAP.kills(self._chance.randrange(_MOST_CHANGES), verb)
        self._is_down = True
        return True

    def _start(self) -> None:
        if self._is_down:
            if self.pools.is_estimated:
                self.pools.begin_anew(self.host.run)
            self.host.restart()
            self.restarts += 1
            self._is_down = False

    def adopt(self, life: Life, late: bool) -> None:
        of = life.of
        self._lives[of.key] = life
        owners = [of.owner.value, *([OTHER] if of.second_claim else [])]
        self.pools.add_group()
        for owner in owners:
            assignment = Assignment(
                key=of.key,
                owner=owner,
                ends=EndRule.CONTAINER if owner == Owner.HOOK else None,
                pid=life.first.tid,
                own_cgroup=life.cgroup,
                member=f"c{life.container}",
                # A container without a control group of its own is late: processes may join it unseen.
                kind="container" if life.cgroup else "process",
                late=late,
            )

            def call(assignment: Assignment = assignment) -> object:
                return assign(self.host.ctx, assignment)

            if owner == Owner.HOOK and self._is_killed_in(call):
                # The container starts nevertheless. The call is not repeated; the daemon runs again a second later.
                self._unreported.add(of.key)
                return
            self._do(call)

    def move(self, life: Life, class_: str) -> bool:
        try:
            self._do(lambda: move(self.host.ctx, life.of.key, class_))
        except (NoSuchGroup, ClassMismatch):
            # It has none, or one in each of several classes.
            return False
        return True

    def group(self, life: Life) -> str:
        record = self._record(life)
        return record.first.ref.path if record and record.state.has_group else ""

    def _record(self, life: Life) -> Workload | None:
        return self.host.ctx.store.get(life.of.key)

    def end(self, life: Life) -> None:
        key, owner = life.of.key, life.of.owner
        if owner is Owner.HOOK and (key in self._unreported or not life.of.second_claim):
            return  # no call reports the end
        restarts = self.restarts
        released = None
        try:
            released = self._do(lambda: release(self.host.ctx, key, owner=owner.value))
        except NoSuchClaim:
            # It ended with the container, by its rule, or in the call in which the daemon was killed.
            assert life.of.second_claim
            assert owner is Owner.HOOK or self.restarts > restarts
        if life.of.second_claim:
            released = self._do(lambda: release(self.host.ctx, key, owner=OTHER))
        if released is not None and released.completed:
            life.reported = self._report(life, released.workload, released.totals)

    def second(self, number: int) -> None:
        self._start()
        self._time_for_checkpoints(number % CHECKPOINT_S == 0)
        manager = self.host.manager
        manager.maintenance.tick()
        if number % POOLS_S == 0:
            self.pools.check(manager.context.machine)
        if number % SWEEP_S == 0:
            for key in self._lives:
                manager.maintenance.sweep(key)
        for life in self._lives.values():
            record = self._record(life)
            is_of_before = record is not None and record.first.created_at == self._reported.get(life.of.key)
            if record is None or (is_of_before and life.of.key in self._unreported):
                if life.is_over and life.reported is None:
                    life.reported = unseen(life, life.of.key in self._unreported)
            elif record.state.is_over and not record.claims and life.is_over and life.reported is None:
                life.reported = self._report(life, record, read(manager.context, life.of.key)[2])
            elif record.state in (State.ACTIVE, State.IDLE) and (
                number % CHECKPOINT_S == 0 or life.pieces_checked < 0
            ):
                life.pieces_checked = life.pieces

    def _report(self, life: Life, record: Workload, totals: list[Total]) -> Reported:
        if read(self.host.ctx, life.of.key)[2] != totals:
            life.problems.append("Read and Release differ")
        self._reported[life.of.key] = record.first.created_at
        figures = {total.event.name: (total.number, total.quality.value) for total in totals}
        self._check_cpu_time(life, record, {mark for _, mark in figures.values()})
        return reported(
            life, os.path.join(self.host.run, "groups", life.of.key), figures, record.state, record.reason
        )

    def _check_cpu_time(self, life: Life, record: Workload, marks: set[str]) -> None:
        """Compare the CPU time of an exact or late run with that which its tasks used in its groups."""
        used = cpu_time(record)
        if used is not None and marks <= {"exact", "late"}:
            counted_ns = life.counted.joules / JOULES_PER_NS
            if used.inside_ns != counted_ns:
                life.problems.append(f"{used.inside_ns} ns of CPU time reported, {counted_ns} used in its groups")

    def forget(self, life: Life) -> None:
        manager, key = self.host.manager, life.of.key
        self._lives.pop(key, None)
        self._unreported.discard(key)
        if self._chance.random() < 0.5:
            return  # a run of the same key finds this one, and sets it aside
        with manager.context.store.transaction(key):
            manager.context.snapshots.delete(key)
            drop(manager.context.store, key)


def unseen(life: Life, expected: bool) -> Reported:
    """Return the figures of a workload without a record. ``expected``: the daemon was killed in the hook's call."""
    if not expected:
        life.problems.append("was assigned, and has no record")
    return Reported(None, None, dict.fromkeys(PROMISED, UNSEEN), UNSEEN)


def reported(
    life: Life, folder: str, totals: dict[str, tuple[int | Decimal | None, str]], state: str, reason: str
) -> Reported:
    """Return the figures of an ended run: ``totals`` as in its reply, compared with the files in ``folder``."""
    for event, number in from_files(folder).items():
        total, mark = totals.get(event, (None, "none"))
        if state == State.COMPLETED and mark in ("exact", "late") and total != number:
            life.problems.append(f"{event}: {number} by the files, {total} by Release")
    joules, traffic = (totals.get(event, (None, ""))[0] for event in PROMISED)
    return Reported(
        None if joules is None else Decimal(joules),
        None if traffic is None else int(traffic),
        # Without any figure, the workload never had an RMID, as the reason states.
        {event: mark for event, (_, mark) in totals.items()} or dict.fromkeys(PROMISED, "unknown"),
        state,
        reason,
    )


def from_files(folder: str) -> dict[str, int | Decimal]:
    """Return the sum over domains and classes of end minus begin of each event, from the files only."""
    found: dict[str, int | Decimal] = {}
    for end in Path(folder).glob("**/mon_data/*/*.end"):
        first = end.with_suffix(".begin")
        begin = parse_value(first.read_text()).number if first.exists() else None
        last = parse_value(end.read_text()).number
        if begin is not None and last is not None and EVENTS[end.stem].kind is Kind.CUMULATIVE:
            found[end.stem] = found.get(end.stem, 0) + last - begin
    return found
