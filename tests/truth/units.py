# SPDX-License-Identifier: Apache-2.0
"""``make units-budget``: more systemd units than RMIDs, and the figures of each run compared with its actual use.

Units start, restart and end at random, and use CPU time. Containers come and go meanwhile. The simulator counts the
use of each task, and this module notes the group in which the task uses it. At the end, each run must report exactly
what was used in its group while it lasted, so that each use is counted once or, in no group, not at all.

Some of the units are exact services, the processes of whose commands call before they execute the command. Commands,
and whole starts whose control group is removed again, do not call at random. A run that is exact must have all use of
its service, and a run of which all commands have called must be exact.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.witness import SIMULATED_FOLDER
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.owners import OVERFLOW, SYSTEMD
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.profiles.requests import Assignment, UnitCommand
from resctrlmond.workloads.rmids import overflow, rmid_transfer
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.release import release
from tests.truth.compare import ENERGY, TRAFFIC
from tests.truth.crew import Crew, remove_cgroup
from tests.truth.pools import PoolCheck
from tests.truth.script import PIECE_NS
from tests.truth.world import mounted
from tests.workloads.conftest import Host, assignment

# The use of one piece of CPU time: see ``script.PIECE_NS``.
_JOULES, _BYTES = Decimal("0.078125"), 32 << 20
_NOTHING: tuple[str, int] = ("", 0)
_SWEEP_EACH = 3
_PRIORITIES = (-1, -2, -3)
# Each such unit is an exact service. A call of it is missed with this chance.
_EXACT_EACH = 4
_MISSED = 0.2
_MOST_BEFORE_NS = 2 * 10**9


@dataclass(frozen=True)
class Plan:
    """The sizes of one play."""

    units: int
    rmids: int
    seconds: int
    reserve: int
    shared: int
    seed: int = 1


@dataclass
class Outcome:
    """The counts of a play. ``wrong`` has a line for each broken promise."""

    wrong: list[str] = field(default_factory=list)
    runs: int = 0
    taken: int = 0
    containers: int = 0
    pieces: int = 0
    shared_pieces: int = 0
    uncounted_pieces: int = 0
    most_groups: int = 0
    pools_exact: int = 0
    exact_services: int = 0
    late_services: int = 0
    missed_pieces: int = 0


class _Play:
    def __init__(self, plan: Plan, mountpoint: str, run: str, crew: Crew) -> None:
        self.plan, self.crew = plan, crew
        self.chance = random.Random(plan.seed)
        self.host = Host(mountpoint, run)
        settings = Settings(checkpoint_interval_s=1e-9, reserve=plan.reserve, overflow=plan.shared)
        self.host.settings = self.host.ctx.config.settings = settings
        self.control = Control(mountpoint)
        self.outcome = Outcome()
        self.pools = PoolCheck(self.control, plan.rmids)
        self.host.ctx.store.before_finish = self.finished
        self.paths = {f"unit{number:03}.service": "" for number in range(plan.units)}
        self.services = {key for key in self.paths if int(key[4:7]) % _EXACT_EACH == 0}
        # By process: what it has used before its call.
        self.before_ns: Counter[int] = Counter()
        # The services whose control groups have use outside that may be missing in the next run.
        self.strayed: set[str] = set()
        # The runs of services that began with a call and in which no process ran on, those that may be late, and what
        # was used outside in each.
        self.called: set[tuple[str, int]] = set()
        self.doubtful: set[tuple[str, int]] = set()
        self.missed: Counter[tuple[str, int]] = Counter()
        # By unit or container: its process.
        self.pids: dict[str, int] = {}
        # By key and generation: the pieces that were used in the group of that run.
        self.used: Counter[tuple[str, int]] = Counter()
        self.reported: dict[tuple[str, int], dict[str, Decimal]] = {}
        self.qualities: dict[tuple[str, int], set[Quality]] = defaultdict(set)

    def finished(self, workload: Workload) -> None:
        """Keep the totals of a run that has ended."""
        self.outcome.runs += 1
        run, is_taken = (workload.key, workload.generation), "higher priority" in workload.reason
        self.outcome.taken += is_taken and bool(workload.first.inodes)
        if is_taken and workload.key in self.pids:
            self.called.discard(run)  # its process runs on
        totals = {total.event.name: total for total in self.host.ctx.quality.final_totals(workload)}
        self.reported[run] = {name: Decimal(total.number or 0) for name, total in totals.items()}
        self.qualities[run] = {totals[name].quality for name in (ENERGY, TRAFFIC) if name in totals}

    # -- units and containers

    def process(self, key: str) -> int:
        """Start a process in the control group of a unit, and return its number."""
        if not self.paths[key]:
            self.paths[key] = self.crew.make_cgroup(key)
        pid = self.crew.start(0, self.paths[key])[0]
        self.control.spawn(tid=pid)
        return pid

    def start(self, key: str, *, again: bool = False) -> None:
        """Start a unit, and let the watch assign it unless it is started ``again`` in the same run."""
        if key in self.services:
            self.start_service(key)
            return
        self.pids[key] = self.process(key)
        if not again:
            self.assign(key)

    def start_service(self, key: str) -> None:
        """Start an exact service; before that, perhaps, one whose commands do not call, and that ends."""
        if self.chance.random() < _MISSED:
            self.command(key, calls=False)
            self.remove(key)
        self.pids[key] = self.process(key)
        if self.chance.random() >= _MISSED:
            self.call(key, self.pids[key])
        elif self.chance.random() < 0.5:
            self.doubt(key)
            self.assign(key)
            self.doubt(key)
        else:
            self.doubt(key)

    def command(self, key: str, *, calls: bool) -> None:
        """Let a service run a command, which ends."""
        pid = self.process(key)
        if calls:
            self.call(key, pid)
        else:
            self.doubt(key)
        self.spend(key, pid, self.chance.randrange(1, 4))
        self.control.exit(pid)
        self.crew.end(pid)

    def call(self, key: str, pid: int) -> None:
        """Let the process of a command call. What it has used until then is systemd's own code."""
        pieces = self.chance.randrange(3)
        self.control.run(pid, pieces * PIECE_NS)
        self.before_ns[pid] = pieces * PIECE_NS
        self.used[_NOTHING] += pieces
        self.outcome.pieces += pieces
        self.outcome.uncounted_pieces += pieces
        before = self.host.ctx.store.get(key)
        is_new = before is None or before.state.is_over
        member = before.member(key) if before is not None and not is_new else None
        commands = (*(member.commands if member is not None else ())[-3:], f"ExecStart={pid}")
        request = replace(
            self.request(key),
            cgroup=None,
            pid=pid,
            own_cgroup=self.paths[key],
            late=False,
            unit_command=UnitCommand(commands=commands, most_before_ns=_MOST_BEFORE_NS),
        )
        self.pools.add_group()
        workload = assign(self.host.ctx, request).workload
        if is_new:
            self.called.add((key, workload.generation))
        if workload.state is not State.ACTIVE or key in self.strayed:
            self.doubt(key)

    def doubt(self, key: str) -> None:
        """Note that the run of a service may be late, or the next one if there is none."""
        workload = self.host.ctx.store.get(key)
        self.strayed.add(key)
        if workload is not None and not workload.state.is_over:
            self.doubtful.add((key, workload.generation))

    def remove(self, key: str) -> None:
        """Remove the empty control group of a unit, as systemd does."""
        for is_removed in (False, True):
            if is_removed:
                remove_cgroup(self.paths[key])
            # The simulator finds use and removals when it is read.
            Path(self.host.mountpoint, SIMULATED_FOLDER, "removed").read_bytes()
        self.paths[key] = ""
        self.strayed.discard(key)

    def request(self, key: str) -> Assignment:
        priority = _PRIORITIES[int(key[4:7]) % len(_PRIORITIES)]
        return Assignment(key=key, owner=SYSTEMD, cgroup=self.paths[key], kind="unit", member=key, priority=priority)

    def assign(self, key: str) -> None:
        self.pools.add_group()
        assign(self.host.ctx, self.request(key))

    def end(self, key: str) -> None:
        pid = self.pids.pop(key)
        self.control.exit(pid)
        self.crew.end(pid)

    def stop(self, key: str) -> None:
        self.end(key)
        if self.host.ctx.store.get(key) is not None:
            release(self.host.ctx, key, owner=SYSTEMD)
        if key in self.services and self.chance.random() < 0.7:
            self.remove(key)

    def container(self, number: int) -> None:
        """Start a container, which must get an RMID at once, and end one that runs."""
        key = f"box{number:04}"
        self.pids[key] = self.crew.start()[0]
        self.control.spawn(tid=self.pids[key])
        self.pools.add_group()
        workload = assign(self.host.ctx, assignment(key, self.pids[key], "oci", member=key)).workload
        self.outcome.containers += 1
        if workload.state is not State.ACTIVE or baseline_of(workload) is not Quality.EXACT:
            self.outcome.wrong.append(f"{key} is {workload.state}: {workload.reason}")
        running = [key for key in self.pids if key.startswith("box")]
        if len(running) > max(self.plan.reserve // 2, 1):
            self.end(running[0])
            self.host.manager.maintenance.record_ends(running[0])

    # -- time

    def use(self) -> None:
        """Let tasks use CPU time, and note the groups in which they do."""
        for key, pid in sorted(self.pids.items()):
            self.spend(key, pid, self.chance.randrange(4))

    def spend(self, key: str, pid: int, pieces: int) -> None:
        """Let a process use so many pieces."""
        if not pieces:
            return
        group = self.host.tree.membership(pid).group
        workload = self.host.ctx.store.get(group) if group else None
        run = (group, workload.generation) if workload is not None else _NOTHING
        self.control.run(pid, pieces * PIECE_NS)
        self.used[run] += pieces
        self.outcome.pieces += pieces
        self.outcome.shared_pieces += pieces * group.startswith("overflow@")
        self.outcome.uncounted_pieces += pieces * (not group)
        own = self.host.ctx.store.get(key)
        if key in self.services and group != key:
            self.doubt(key)
            if own is not None and not own.state.is_over:
                self.missed[key, own.generation] += pieces
                self.outcome.missed_pieces += pieces

    def tick(self, second: int) -> None:
        maintenance = self.host.manager.maintenance
        maintenance.tick()
        if second % _SWEEP_EACH == 0:
            for workload in self.host.ctx.store.unfinished():
                if workload.state.has_group:
                    maintenance.sweep(workload.key)
        groups = len(self.host.marked_groups())
        self.outcome.most_groups = max(self.outcome.most_groups, groups)
        self.control.advance(1.0)

    def play(self) -> Outcome:
        for key in self.paths:
            self.start(key)
        for second in range(self.plan.seconds):
            self.tick(second)
            self.use()
            self.change()
            self.container(second)
            if second % 5 == 0:
                self.pools.check(self.host.ctx.machine)
        self.finish()
        return self.outcome

    def change(self) -> None:
        """Stop, start and restart a tenth of the units."""
        for key in self.chance.sample(sorted(self.paths), max(self.plan.units // 10, 1)):
            if key not in self.pids:
                self.start(key)
            elif self.chance.random() < 0.5:
                self.stop(key)
            else:
                # A restart within the same workload.
                self.end(key)
                if self.chance.random() < 0.5:
                    self.host.manager.maintenance.record_ends(key)
                if key in self.services and self.chance.random() < 0.5:
                    self.remove(key)
                self.start(key, again=True)
        for key in sorted(self.services & self.pids.keys()):
            if self.chance.random() < 0.1:
                self.command(key, calls=self.chance.random() >= _MISSED)

    def finish(self) -> None:
        manager = self.host.manager
        for key in list(self.pids):
            if key in self.paths:
                self.stop(key)
            else:
                self.end(key)
                manager.maintenance.record_ends(key)
        for workload in manager.context.store.unfinished():
            if workload.is_claimed_by(OVERFLOW):
                release(manager.context, workload.key, owner=OVERFLOW)
        manager.maintenance.tick()
        if left := [found.path for found in self.host.marked_groups()]:
            self.outcome.wrong.append(f"groups were left: {left}")
        self.host.check_records(manager.context.store.all())
        self.compare()
        self.outcome.pools_exact = self.pools.exact
        self.outcome.wrong += self.pools.problems

    def compare(self) -> None:
        for run, pieces in sorted(self.used.items()):
            if run == _NOTHING:
                continue
            found = self.reported.get(run, {})
            expected = {ENERGY: pieces * _JOULES, TRAFFIC: Decimal(pieces * _BYTES)}
            for name, number in expected.items():
                if name in found and found[name] != number:
                    self.outcome.wrong.append(f"{run}: {found[name]} {name}, used in its group: {number}")
            if not found:
                self.outcome.wrong.append(f"{run}: no report, {pieces} pieces")
        for run, qualities in sorted(self.qualities.items()):
            of_unit = not run[0].startswith("box")
            if run[0] in self.services:
                self.compare_service(run, qualities)
            elif of_unit and Quality.EXACT in qualities:
                self.outcome.wrong.append(f"{run}: exact, although it ran before")
            if not of_unit and qualities - {Quality.EXACT}:
                self.outcome.wrong.append(f"{run}: {sorted(qualities)}, although it was in its group from its start")
        for workload in self.host.ctx.store.all():
            run = workload.key, workload.generation
            if self.missed[run] and baseline_of(workload) is Quality.EXACT and run not in self.qualities:
                self.outcome.wrong.append(f"{run}: exact without a report, {self.missed[run]} pieces are missing")
        counted = sum(found.get(TRAFFIC, Decimal(0)) for found in self.reported.values())
        used = (self.outcome.pieces - self.used[_NOTHING]) * _BYTES
        if counted != used:
            self.outcome.wrong.append(f"all runs together have {counted} bytes, {used} were used in groups")

    def compare_service(self, run: tuple[str, int], qualities: set[Quality]) -> None:
        if qualities == {Quality.EXACT}:
            self.outcome.exact_services += 1
            if self.missed[run] or run not in self.called:
                self.outcome.wrong.append(f"{run}: exact, although {self.missed[run]} pieces are missing")
        else:
            self.outcome.late_services += 1
            if run in self.called - self.doubtful:
                self.outcome.wrong.append(f"{run}: {sorted(qualities)}, although each command of it has called")


def play(plan: Plan) -> Outcome:
    """Play one plan, and compare.

    A unit may give up its RMID at once: a machine may be so fast that the whole plan takes less than any limit.
    """
    before = rmid_transfer.MIN_RUN_S, overflow.LINGER_S, processes.family_cpu_time_ns
    rmid_transfer.MIN_RUN_S, overflow.LINGER_S = 0.0, 0.5
    try:
        with mounted("intel-aet", plan.rmids, 7, lag_ms=0) as (simulation, top), Crew() as crew:
            made = _Play(plan, simulation.mountpoint, f"{top}/run", crew)
            # The tasks are virtual: their processes only wait.
            processes.family_cpu_time_ns = lambda pid, children_ns=0: made.before_ns[pid] + children_ns
            return made.play()
    finally:
        rmid_transfer.MIN_RUN_S, overflow.LINGER_S, processes.family_cpu_time_ns = before


def main() -> int:
    """Play, print what was counted, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="tests.truth.units", description=__doc__)
    for name, default in (
        ("units", 300),
        ("rmids", 60),
        ("seconds", 60),
        ("reserve", 16),
        ("shared", 4),
        ("seed", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    plan = Plan(**vars(parser.parse_args()))
    started = time.monotonic()
    found = play(plan)
    for line in found.wrong:
        sys.stdout.write(f"BROKEN: {line}\n")
    sys.stdout.write(
        f"{plan}: {found.runs} runs ended, {found.taken} of them for a higher priority; "
        f"{found.containers} containers; at most {found.most_groups} groups\n"
        f"{found.pieces} pieces of CPU time were used: {found.shared_pieces} in shared groups, "
        f"{found.uncounted_pieces} in no group; {found.pools_exact} sums of the machine exact and right; "
        f"{found.exact_services} runs of exact services were exact, {found.late_services} were not, which missed "
        f"{found.missed_pieces} pieces; "
        f"{len(found.wrong)} promises broken; {time.monotonic() - started:.0f} s\n"
    )
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
