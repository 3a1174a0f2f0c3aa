# SPDX-License-Identifier: Apache-2.0
"""The pools of the machine: together they are what the simulated hardware counted, however groups come and go."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from resctrlmond.api import translate
from resctrlmond.resctrl import class_counters, package_energy
from resctrlmond.resctrl.class_counters import ClassCounters, read_class
from resctrlmond.resctrl.counters import Reading, Value
from resctrlmond.resctrl.errors import NotRead, ResctrlError
from resctrlmond.resctrl.mounts import Mounting
from resctrlmond.resctrl.package_energy import PackageEnergy
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.messages import Operation
from resctrlmond.sim.profiles import PROFILES
from resctrlmond.workloads.machine import pools as machine
from resctrlmond.workloads.machine.pools import MachineUse, Pool
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import total_of
from tests.workloads.conftest import MARK, Host, assignment, join, own_host
from tests.workloads.evidence.test_interference import react, write

Start = Callable[[], "subprocess.Popen[bytes]"]
SECOND = 10**9
ZERO = Decimal(0)
# The kernel rounds the energy of a class, and of each group, to a microjoule.
DIGITS = Decimal("0.0001")
# The hardware counts traffic in units of this many bytes, in each domain.
UNIT = 2 * 65536
ENERGY, TRAFFIC, CACHE = "core_energy", "mbm_total_bytes", "llc_occupancy"


class Pools:
    """A machine with virtual tasks, and the true use of all its RMIDs since the pools began."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.control = Control(host.mountpoint)
        host.manager.tick()
        self._before = self._true()

    def _true(self) -> tuple[Decimal, int]:
        used = [used for row in self.control.truth().rmids for used in row.total]
        joules = Decimal(sum(one.picojoules for one in used)) / 10**12
        return joules, sum(one.bytes for one in used)

    def restart(self) -> None:
        """Start another daemon, which counts anew."""
        (Path(self.host.run) / "machine.json").unlink(missing_ok=True)
        self.host.restart().tick()
        self._before = self._true()

    def read(self) -> MachineUse:
        return self.host.ctx.machine.read()

    def check(self, runs: int = 2) -> MachineUse:
        """Check that the pools are together what was truly used by ``runs`` groups, and return them."""
        joules, traffic = self._true()
        found = self.read()
        for name, true in ((ENERGY, joules - self._before[0]), (TRAFFIC, traffic - self._before[1])):
            reported = sum((Decimal(use.number or 0) for use in found.pools if use.event.name == name), ZERO)
            skew = sum((Decimal(use.skew) for use in found.pools if use.event.name == name), ZERO)
            most = skew + (DIGITS if name == ENERGY else Decimal(UNIT * runs))
            assert abs(reported - true) <= most, (name, reported, true)
        return found


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    with own_host(tmp_path, "intel-aet", 64, residue=7, virtual_cpus=2, lag_ms=0) as host:
        yield Pools(host)


def used(found: MachineUse, pool: Pool, event: str = ENERGY) -> Decimal:
    return sum((Decimal(use.number or 0) for use in found.pools if (use.pool, use.event.name) == (pool, event)), ZERO)


def reasons(found: MachineUse, pool: Pool) -> set[str]:
    assert all((use.quality is Quality.EXACT) == (not use.reason) for use in found.pools)
    return {use.reason for use in found.pools if use.pool is pool and use.reason}


def test_every_pool_has_what_its_tasks_used(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    outside, inside, foreign = control.spawn(), control.spawn(tid=process().pid), control.spawn()
    assign(host.ctx, assignment("a", inside))
    host.make_foreign("theirs")
    control.steal(foreign, "mon_groups/theirs")
    pools.restart()
    for tid, seconds in ((outside, 1), (inside, 2), (foreign, 4)):
        control.run(tid, seconds * SECOND)
    found = pools.check()
    one = used(found, Pool.UNTRACKED)
    assert one > 0
    assert used(found, Pool.TRACKED) == 2 * one
    assert used(found, Pool.FOREIGN) == 4 * one
    assert {use.quality for use in found.pools} == {Quality.EXACT}
    # An end adds nothing, and loses nothing.
    control.run(inside, SECOND)
    control.exit(inside)
    release(host.ctx, "a", owner="test")
    for _ in range(2):
        assert used(pools.check(), Pool.TRACKED) == 3 * one
    assert not set[str]().union(*(reasons(pools.read(), pool) for pool in Pool))


@pytest.mark.parametrize("profile", PROFILES)
def test_sum_is_right_on_each_machine(tmp_path: Path, process: Start, profile: str) -> None:
    with own_host(tmp_path, profile, 16, residue=7, virtual_cpus=4, lag_ms=0) as host:
        pools = Pools(host)
        outside = pools.control.spawn()
        for number in range(3):
            tid = pools.control.spawn(tid=process().pid)
            assign(host.ctx, assignment(f"k{number}", tid))
            for cpu in range(4):
                pools.control.run(tid, SECOND, cpu)
                pools.control.run(outside, SECOND, cpu)
            pools.control.exit(tid)
            if number:
                release(host.ctx, f"k{number}", owner="test")
        found = pools.check(10)
        is_reallocated = profile in ("amd-bmec", "amd-tracking")
        assert (Quality.ESTIMATED in {use.quality for use in found.pools}) == is_reallocated


def test_residue_of_former_owners_is_not_use(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    for round_ in range(3):
        tid = control.spawn(tid=process().pid)
        assign(host.ctx, assignment(f"k{round_}", tid))
        assert used(pools.check(), Pool.UNTRACKED) < DIGITS
        control.run(tid, SECOND)
        control.exit(tid)
        release(host.ctx, f"k{round_}", owner="test")
        assert used(pools.check(), Pool.UNTRACKED) < DIGITS
        assert used(pools.read(), Pool.TRACKED) == Decimal("2.5") * (round_ + 1)
    assert not set[str]().union(*(reasons(pools.read(), pool) for pool in Pool))


def test_use_that_nobody_asked_about_is_counted(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    for number in range(30):
        tid = control.spawn(tid=process().pid)
        assign(host.ctx, assignment(f"k{number}", tid))
        control.run(tid, SECOND)
        control.exit(tid)
        release(host.ctx, f"k{number}", owner="test")
    assert used(pools.check(30), Pool.TRACKED) == Decimal("2.5") * 30


def test_sum_is_right_while_groups_come_and_go(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    outside, steady = control.spawn(), control.spawn(tid=process().pid)
    assign(host.ctx, assignment("steady", steady))
    pids = [process().pid for _ in range(40)]
    is_over = threading.Event()

    def churn() -> None:
        os.setegid(MARK)
        for number, pid in enumerate(pids):
            tid = control.spawn(tid=pid)
            assign(host.ctx, assignment(f"k{number}", tid))
            for of in (tid, outside, steady):
                control.run(of, SECOND // 10)
            control.exit(tid)
            release(host.ctx, f"k{number}", owner="test")
        is_over.set()

    thread = threading.Thread(target=churn)
    thread.start()
    last: dict[tuple[Pool, str, str], Decimal] = {}
    readings = 0
    while not is_over.is_set():
        for use in pools.read().pools:
            if use.event.name in (ENERGY, TRAFFIC):
                key, number = (use.pool, use.domain, use.event.name), Decimal(use.number or 0)
                assert number >= last.get(key, ZERO) - use.skew, (key, number, last[key])
                last[key] = number
        readings += 1
    thread.join()
    assert readings > 3
    found = pools.check(41)
    assert used(found, Pool.TRACKED) == Decimal("0.25") * 80
    assert not set[str]().union(*(reasons(found, pool) for pool in Pool))


def test_groups_and_classes_of_others_that_come_and_go_are_estimated(pools: Pools) -> None:
    host, control = pools.host, pools.control
    tid = control.spawn()
    theirs = host.make_foreign("theirs")
    pools.restart()
    control.steal(tid, "mon_groups/theirs")
    control.run(tid, SECOND)
    assert used(pools.check(), Pool.FOREIGN) == Decimal("2.5")
    assert not reasons(pools.read(), Pool.FOREIGN)
    control.run(tid, SECOND)
    os.rmdir(host.tree.full_path(theirs))
    found = pools.read()
    assert used(found, Pool.FOREIGN) == Decimal("2.5")
    assert reasons(found, Pool.FOREIGN) == {"a group of another program was removed between two readings"}
    assert not reasons(found, Pool.TRACKED) | reasons(found, Pool.UNTRACKED)

    pools.restart()
    host.make_class("gold")
    assert reasons(pools.read(), Pool.UNTRACKED) == {"class gold was created between two readings"}
    control.steal(tid, "gold")
    control.run(tid, SECOND)
    assert used(pools.check(), Pool.UNTRACKED) == Decimal("2.5")
    os.rmdir(os.path.join(host.mountpoint, "gold"))
    found = pools.read()
    assert "class gold was removed between two readings" in reasons(found, Pool.UNTRACKED).pop()
    assert used(found, Pool.UNTRACKED) == Decimal("2.5")


@pytest.mark.parametrize("what", ["group", "class"])
def test_directory_that_came_and_went_between_two_readings_is_noticed(pools: Pools, what: str) -> None:
    host, control = pools.host, pools.control
    pool = Pool.FOREIGN if what == "group" else Pool.UNTRACKED
    assert not reasons(pools.read(), pool)
    tid = control.spawn()
    if what == "group":
        directory = host.make_foreign("brief").path
    else:
        host.make_class(directory := "brief")
    control.steal(tid, directory)
    control.run(tid, SECOND)
    os.rmdir(os.path.join(host.mountpoint, directory))
    host.ctx.interference.update()
    assert reasons(pools.read(), pool) == {f"{directory} was created and removed between two readings"}


def test_reasons_are_few_and_text_whatever_other_programs_do(pools: Pools) -> None:
    for number in range(12):
        for _ in range(2):
            path = os.path.join(os.fsencode(pools.host.mountpoint), b"gold\xff%d" % number)
            os.rmdir(path) if os.path.isdir(path) else os.mkdir(path)
            pools.read()
    (reason,) = reasons(pools.read(), Pool.UNTRACKED)
    assert reason.count("class gold") == 4
    assert reason.endswith("and more of that kind")
    (shown,) = {
        translate.pool_use(use).reason for use in pools.read().pools if use.pool is Pool.UNTRACKED and use.reason
    }
    assert shown is not None
    assert shown.encode()
    since = pools.read().since
    pools.host.restart()
    assert pools.read().since == since


def test_lost_group_is_counted_up_to_its_last_reading(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("a", tid))
    control.run(tid, SECOND)
    control.remove_group("mon_groups/a")
    host.manager.tick()
    found = pools.read()
    assert "another program removed the group of a workload" in reasons(found, Pool.TRACKED).pop()
    assert used(found, Pool.TRACKED) <= Decimal("2.5")


def test_group_without_a_record_is_not_overlooked(pools: Pools) -> None:
    os.mkdir(os.path.join(pools.host.mountpoint, "mon_groups/ours"))  # with the mark
    pools.read()
    assert reasons(pools.read(), Pool.TRACKED) == {"a group with the mark of resctrlmond has no record"}


def test_hanging_kernel_does_not_block_an_end(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, may_end = threading.Event(), threading.Event()

    def hang() -> str:
        hangs.set()
        assert may_end.wait(60)
        return ""

    monkeypatch.setattr(pools.host.ctx.machine, "_traffic_caveat", hang)
    reader = threading.Thread(target=pools.read)
    reader.start()
    try:
        assert hangs.wait(60)
        create(pools.host.ctx, "k", owner="test")
        release(pools.host.ctx, "k", owner="test")
    finally:
        may_end.set()
        reader.join(60)


def test_end_of_a_workload_whose_tasks_run_on_is_estimated(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("a", tid))
    control.run(tid, SECOND)
    release(host.ctx, "a", owner="test")
    found = pools.check()
    assert reasons(found, Pool.TRACKED) == {"a workload ended while its tasks ran"}
    # The use of the task is that of its class from now on.
    control.run(tid, SECOND)
    assert used(pools.check(), Pool.UNTRACKED) == Decimal("2.5")


def test_end_of_a_workload_without_members_whose_tasks_run_on_is_estimated(pools: Pools) -> None:
    """Other programs have put the tasks into its group."""
    host, control = pools.host, pools.control
    create(host.ctx, "a", owner="test")
    tid = control.spawn()
    control.steal(tid, "mon_groups/a")
    control.run(tid, SECOND)
    release(host.ctx, "a", owner="test")
    found = pools.check()
    assert used(found, Pool.TRACKED) == Decimal("2.5")
    assert reasons(found, Pool.TRACKED) == {"a workload ended while its tasks ran"}


def test_end_of_a_workload_in_whose_group_a_task_of_others_runs_is_estimated(
    pools: Pools, process: Start, cgroup: str
) -> None:
    """Its own control group is empty, so it has left no process."""
    host, control = pools.host, pools.control
    first = process()
    join(cgroup, first.pid)
    assign(host.ctx, assignment("a", control.spawn(tid=first.pid), own_cgroup=cgroup))
    other = control.spawn(tid=process().pid)
    (Path(host.mountpoint) / "mon_groups/a/tasks").write_text(f"{other}\n")
    control.run(other, SECOND)
    first.kill()
    first.wait()
    release(host.ctx, "a", owner="test")
    found = pools.check()
    assert used(found, Pool.TRACKED) == Decimal("2.5")
    assert reasons(found, Pool.TRACKED) == {"a workload ended while its tasks ran"}


def test_group_that_changes_its_class_is_counted_once(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    host.make_class("gold")
    pools.restart()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("a", tid))
    control.run(tid, SECOND)
    pools.check()
    move(host.ctx, "a", "gold")
    control.run(tid, SECOND)
    found = pools.check()
    assert used(found, Pool.TRACKED) == 5
    assert used(found, Pool.UNTRACKED) < DIGITS
    assert not reasons(found, Pool.TRACKED)


def test_domain_that_was_offline_is_estimated(pools: Pools) -> None:
    pools.control.run(pools.control.spawn(), SECOND, 1)
    before = pools.read()
    assert used(before, Pool.UNTRACKED, TRAFFIC) > 0
    pools.control.offline("mon_L3_01")
    # Its figures remain.
    offline = pools.read()
    assert used(offline, Pool.UNTRACKED, TRAFFIC) == used(before, Pool.UNTRACKED, TRAFFIC)
    assert any(use.domain == "mon_L3_01" and use.quality is Quality.ESTIMATED for use in offline.pools)
    pools.control.online("mon_L3_01")
    for use in pools.read().pools:
        is_estimated = use.domain == "mon_L3_01" and use.event.name != CACHE
        assert (use.quality is Quality.ESTIMATED) == is_estimated, use


def package(top: Path, zone: str, name: str, energy_uj: int, range_uj: int = 262_143_328_850) -> Path:
    folder = top / zone
    folder.mkdir(exist_ok=True)
    for file, text in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", range_uj)):
        (folder / file).write_text(f"{text}\n")
    return folder


def test_energy_of_packages_wraps_and_adds_dies(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", "package-0", 262_143_000_000)
    package(tmp_path, "intel-rapl:0:0", "core", 1)
    package(tmp_path, "intel-rapl:1", "package-1-die-0", 5)
    package(tmp_path, "intel-rapl:2", "package-1-die-1", 5)
    package(tmp_path, "intel-rapl:3", "psys", 5)
    energy = PackageEnergy(str(tmp_path))
    energy.begin()
    package(tmp_path, "intel-rapl:0", "package-0", 671_150)
    package(tmp_path, "intel-rapl:1", "package-1-die-0", 1_000_005)
    package(tmp_path, "intel-rapl:2", "package-1-die-1", 2_000_005)
    energy.update()
    assert energy.used_joules() == {0: 1, 1: 3}
    assert energy.missed == ""


def test_energy_that_may_have_wrapped_twice_is_not_exact(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", "package-0", 0, range_uj=1)
    energy = PackageEnergy(str(tmp_path))
    energy.begin()
    energy.update()
    assert "may have begun again" in energy.missed


def test_uncore_is_what_the_packages_used_beyond_their_cores(tmp_path: Path, process: Start) -> None:
    zones = tmp_path / "powercap"
    zones.mkdir()
    package(zones, "intel-rapl:0", "package-0", 0)
    with own_host(tmp_path, "intel-aet", 16, residue=7, virtual_cpus=2, lag_ms=0) as host:
        host.ctx.machine._energy = PackageEnergy(str(zones))  # a simulation has none
        pools = Pools(host)
        pools.control.run(pools.control.spawn(), SECOND)
        package(zones, "intel-rapl:0", "package-0", 10_000_000)
        (uncore,) = (use for use in pools.read().pools if use.pool is Pool.UNCORE)
        assert (uncore.domain, uncore.number, uncore.quality) == ("mon_PERF_PKG_00", Decimal("7.5"), Quality.EXACT)


def test_node_of_a_cache_that_was_offline_is_estimated(tmp_path: Path) -> None:
    with own_host(tmp_path, "intel-snc2", 16, virtual_cpus=8, lag_ms=0) as host:
        pools = Pools(host)
        control, tid = pools.control, pools.control.spawn()
        control.run(tid, SECOND, 0)
        pools.read()
        node = sorted(name.name for name in Path(host.mountpoint, "mon_data", "mon_L3_00").glob("mon_sub_*"))[0]
        control.offline(node)
        control.online(node)
        control.run(tid, 2 * SECOND, 0)  # more than before, so that no counter is lower than before
        for use in pools.read().pools:
            is_estimated = use.domain == "mon_L3_00" and use.event.name != CACHE
            assert (use.quality is Quality.ESTIMATED) == is_estimated, use


def test_file_of_a_cache_that_has_nodes_is_not_believed(tmp_path: Path, process: Start) -> None:
    """On kernels before Linux commit 594902c986e2 it can read 0: the machine had used 0 bytes, exact."""
    with own_host(tmp_path, "intel-snc2", 16, virtual_cpus=8, lag_ms=0) as host:
        pools = Pools(host)
        control, tid = pools.control, pools.control.spawn(tid=process().pid)
        assign(host.ctx, assignment("k", tid))
        control.set_faults(Fault(domain="mon_L3_0?", answer=WORD))
        for cpu in range(8):
            control.run(tid, SECOND, cpu)
        found = pools.read()
        for event in (TRAFFIC, CACHE):
            assert qualities(found, Pool.TRACKED, event) == {Quality.EXACT}
        assert used(found, Pool.TRACKED, TRAFFIC) == total_of(read(host.ctx, "k")[2]).number == 8 << 30
        assert used(found, Pool.TRACKED, CACHE) > 0


def test_group_that_is_found_in_two_classes_is_counted_once(
    pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, control = pools.host, pools.control
    host.make_class("gold")
    pools.restart()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("a", tid))
    control.run(tid, SECOND)

    def read_and_move(tree: str, class_: str) -> ClassCounters:
        found = read_class(tree, class_)
        if not class_ and host.get("a").first.class_ == "":
            move(host.ctx, "a", "gold")
        return found

    monkeypatch.setattr(machine, "read_class", read_and_move)
    found = pools.check()
    assert used(found, Pool.TRACKED) == Decimal("2.5")
    assert not reasons(found, Pool.TRACKED)


def test_end_does_not_fail_because_it_is_unknown_what_runs(
    pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_workload: object) -> bool:
        raise NotRead("too many open files")

    host = pools.host
    tid = pools.control.spawn(tid=process().pid)
    assign(host.ctx, assignment("a", tid))
    monkeypatch.setattr(host.ctx.machine, "_may_run", fail)
    release(host.ctx, "a", owner="test")
    assert not host.marked_groups()
    assert reasons(pools.read(), Pool.TRACKED) == {"a workload ended while its tasks ran"}


def test_failed_assign_leaves_no_group_whose_counters_cannot_be_read(
    pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    read, calls = host.tree.read, 0

    def fail_later(ref: GroupRef, mounting: Mounting | None = None) -> list[Reading]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise NotRead("too many open files")
        return read(ref, mounting)

    monkeypatch.setattr(host.tree, "read", fail_later)
    control.set_faults(Fault(on=Operation.TASKS, group="mon_groups/a", answer="EIO"))
    with pytest.raises(ResctrlError):
        assign(host.ctx, assignment("a", tid))
    assert not host.marked_groups()
    assert calls > 1
    assert reasons(pools.read(), Pool.TRACKED) == {
        "the values of an ended workload cannot be read: too many open files"
    }


def test_group_whose_removal_failed_is_counted_once(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("a", tid))
    control.run(tid, SECOND)
    control.exit(tid)
    control.set_faults(Fault(on=Operation.RMDIR, answer="EIO"))
    with pytest.raises(ResctrlError):
        release(host.ctx, "a", owner="test")
    assert used(pools.check(), Pool.TRACKED) == Decimal("2.5")
    control.set_faults()
    host.manager.tick()
    assert not host.marked_groups()
    assert used(pools.check(), Pool.TRACKED) == Decimal("2.5")
    assert not reasons(pools.read(), Pool.TRACKED)


def test_group_that_ended_before_the_start_and_ran_on_is_estimated(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("a", tid))
    control.set_faults(Fault(on=Operation.RMDIR, answer="EIO"))
    with pytest.raises(ResctrlError):
        release(host.ctx, "a", owner="test")
    pools.restart()
    control.run(tid, SECOND)
    assert used(pools.check(), Pool.TRACKED) == Decimal("2.5")
    control.set_faults()
    host.manager.tick()
    assert not host.marked_groups()
    assert used(pools.check(), Pool.TRACKED) == Decimal("2.5")
    assert reasons(pools.read(), Pool.TRACKED) == {"a workload ended while its tasks ran"}


def test_change_of_what_traffic_counts_is_estimated(tmp_path: Path) -> None:
    with own_host(tmp_path, "amd-abmc", 16, virtual_cpus=2, lag_ms=0) as host:
        pools = Pools(host)
        tid = pools.control.spawn()
        pools.control.run(tid, SECOND)
        assert not reasons(pools.read(), Pool.UNTRACKED)
        configuration = Path(host.mountpoint, "info", "L3_MON", "event_configs", TRAFFIC, "event_filter")
        before = configuration.read_text()
        for text in ("local_reads\n", before):  # as before at the reading after the next one
            configuration.write_text(text)
            pools.control.run(tid, 2 * SECOND)
            for use in pools.read().pools:
                assert (use.quality is Quality.ESTIMATED) == (use.event.name == TRAFFIC), use


def test_reading_knows_the_events_before_it(pools: Pools) -> None:
    host = pools.host
    os.rmdir(os.path.join(host.mountpoint, host.make_foreign("brief").path))
    assert reasons(host.manager.machine.get(), Pool.FOREIGN) == {
        "mon_groups/brief was created and removed between two readings"
    }


def test_energy_that_two_threads_read_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "intel-rapl:0", "package-0", 0)
    energy = PackageEnergy(str(tmp_path))
    energy.begin()
    values = iter([1_000_000, 2_000_000, 3_000_000])
    is_first = True
    other = threading.Thread(target=energy.update)

    def read(_zone: str) -> int:
        nonlocal is_first
        now = next(values)
        if is_first:
            is_first = False
            other.start()
            other.join(0.5)  # the other thread waits for this one
        return now

    monkeypatch.setattr(package_energy, "_energy_uj", read)
    energy.update()
    other.join()
    assert energy.used_joules() == {0: 2}


def test_names_of_other_programs_that_are_not_utf8_can_be_reported(pools: Pools) -> None:
    """The reply could not be encoded: no call of Machine got an answer until the next start."""
    host, odd = pools.host, os.fsdecode(b"od\xffd")
    host.make_class(odd)
    ref = host.make_foreign("b", odd)
    host.ctx.interference.update()
    os.rmdir(host.tree.full_path(ref))
    os.rmdir(os.path.join(host.mountpoint, odd))
    replies = [translate.pool_use(use) for use in host.manager.machine.get().pools]
    assert b"udcffd was created and removed between two readings" in msgspec.json.encode(replies)


def test_remount_during_a_reading_begins_anew(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, counting = pools.host.tree, pools.host.ctx.machine
    since, whole = pools.read().since, counting._read_whole

    def read_whole() -> object:
        monkeypatch.setattr(tree, "mounting", lambda: (9, 9))
        return whole()

    monkeypatch.setattr(counting, "_read_whole", read_whole)
    assert counting.read().since != since


def test_tick_does_not_begin_while_a_call_begins(tmp_path: Path) -> None:
    with own_host(tmp_path, "intel-aet", 16, virtual_cpus=2) as host:
        counting = host.ctx.machine
        with counting._begin_lock:
            counting.tick(has_trouble=False)
            assert counting._state.since == ""
        counting.tick(has_trouble=False)
        assert counting.read().since


def test_counter_that_could_not_be_read_is_exact_in_no_pool(
    pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(_class: str, _known: object, *, is_complete: bool) -> NoReturn:
        raise class_counters._Changed

    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("a", tid))
    control.run(tid, SECOND)
    pools.check()
    with monkeypatch.context() as patched:
        patched.setattr(class_counters, "_list_groups", changed)
        assert not [use for use in pools.read().pools if use.quality is Quality.EXACT and use.event.name != CACHE]
    found = pools.check()
    assert {use.quality for use in found.pools} == {Quality.EXACT}


def test_reading_ends_while_groups_come_and_go(pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass was repeated up to 8 times for each counter, and the workloads were missing in a pass that failed."""
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("a", tid))
    control.run(tid, SECOND)
    before = used(pools.check(), Pool.TRACKED)
    assert before > 0
    value, passes = class_counters._value, dict[class_counters.Counter, int]()
    group = [host.make_foreign("theirs0")]

    def change(directory: str, nodes: Sequence[str], name: str) -> Value:
        counter = nodes[0], name
        if directory == host.mountpoint:
            passes[counter] = passes.get(counter, 0) + 1
            os.rmdir(host.tree.full_path(group.pop()))
            group.append(host.make_foreign(f"theirs{sum(passes.values())}"))
        return value(directory, nodes, name)

    with monkeypatch.context() as patched:
        patched.setattr(class_counters, "_value", change)
        found = pools.read()
    assert set(passes.values()) == {2}, "the class is read at the begin and the end of a pass"
    assert len(passes) == 10
    assert used(found, Pool.TRACKED) == before
    for use in found.pools:
        is_unknown = use.pool is Pool.UNTRACKED and use.event.name == CACHE
        assert use.quality is (Quality.UNKNOWN if is_unknown else Quality.ESTIMATED), use


@pytest.mark.parametrize("is_ours", [True, False])
def test_group_that_is_removed_during_a_reading_is_not_exact(
    pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """The counters that were read after the removal of the group did without its use, and were exact."""
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    group = GroupRef("", "a")
    if is_ours:
        assign(host.ctx, assignment("a", tid))
    else:
        group = host.make_foreign("a")
        control.steal(tid, group.path)
    pools.restart()
    control.run(tid, SECOND)
    pools.check()
    control.run(tid, SECOND)
    read = class_counters._read_apart

    def remove(class_: str, counter: class_counters.Counter, *others: Any) -> object:
        if counter == ("mon_PERF_PKG_00", ENERGY) and os.path.exists(host.tree.full_path(group)):
            os.rmdir(host.tree.full_path(group))
        return read(class_, counter, *others)

    with monkeypatch.context() as patched:
        patched.setattr(class_counters, "_read_apart", remove)
        found = pools.read()
    assert reasons(found, Pool.TRACKED if is_ours else Pool.FOREIGN)


def test_counter_is_read_again_if_groups_came_and_went(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    host = pools.host
    pools.check()
    value, passes = class_counters._value, list[class_counters.Counter]()

    def change(directory: str, nodes: Sequence[str], name: str) -> Value:
        if directory == host.mountpoint:
            passes.append((nodes[0], name))
            if len(passes) in (1, 21):  # the first counter, at its first and at its second pass
                create(host.ctx, "brief", owner="test")
                release(host.ctx, "brief", owner="test")
                create(host.ctx, f"stays{len(passes)}", owner="test")
        return value(directory, nodes, name)

    with monkeypatch.context() as patched:
        patched.setattr(class_counters, "_value", change)
        found = pools.read()
    assert not set[str]().union(*(reasons(found, pool) for pool in Pool))
    assert passes.count(passes[0]) == 6
    assert len(passes) == 24


def test_domain_that_goes_offline_during_a_reading_is_estimated(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = class_counters._read_apart

    def fail(class_: str, counter: class_counters.Counter, *others: Any) -> object:
        if counter[0] == "mon_L3_01":
            raise FileNotFoundError
        return read(class_, counter, *others)

    monkeypatch.setattr(class_counters, "_read_apart", fail)
    uses = [use for use in pools.read().pools if use.domain == "mon_L3_01"]
    assert uses
    assert {use.quality for use in uses} == {Quality.ESTIMATED}


def test_uncore_states_what_packages_used_while_cores_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zones = tmp_path / "powercap"
    zones.mkdir()
    package(zones, "intel-rapl:0", "package-0", 0)
    with own_host(tmp_path, "intel-aet", 16, residue=7, virtual_cpus=2, lag_ms=0) as host:
        counting = host.ctx.machine
        counting._energy = PackageEnergy(str(zones))
        whole = counting._read_whole
        joules = iter((1, 3))

        def read_whole() -> object:
            package(zones, "intel-rapl:0", "package-0", next(joules) * 1_000_000)
            return whole()

        monkeypatch.setattr(counting, "_read_whole", read_whole)
        counting.tick(has_trouble=False)
        (uncore,) = (use for use in counting.read().pools if use.pool is Pool.UNCORE)
        assert uncore.number == 3
        assert uncore.skew >= 3


WORD = "Unavailable"


def qualities(found: MachineUse, pool: Pool, event: str = TRAFFIC) -> set[Quality]:
    return {use.quality for use in found.pools if (use.pool, use.event.name) == (pool, event)}


def test_cache_of_a_group_without_a_number_is_missing_in_its_pool(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    for key in ("one", "two"):
        assign(host.ctx, assignment(key, tid := control.spawn(tid=process().pid)))
        control.run(tid, SECOND)
    whole = used(pools.read(), Pool.TRACKED, CACHE)
    control.set_faults(Fault(group="*one", event=CACHE, answer=WORD))
    found = pools.read()
    assert used(found, Pool.TRACKED, CACHE) < whole
    assert qualities(found, Pool.TRACKED, CACHE) == {Quality.ESTIMATED}
    assert qualities(found, Pool.FOREIGN, CACHE) == {Quality.EXACT}
    control.set_faults()
    assert qualities(pools.read(), Pool.TRACKED, CACHE) == {Quality.EXACT}


@pytest.mark.parametrize("profile", ["intel-aet", "intel-snc2"])
@pytest.mark.parametrize("is_seen_by_machine", [False, True])
def test_counter_of_a_workload_that_had_no_number_for_a_time_is_not_exact(
    tmp_path: Path, process: Start, profile: str, is_seen_by_machine: bool
) -> None:
    """One of the figures, of the workload and of its pool, was exact: the reading of the other one found the gap."""
    with own_host(tmp_path, profile, 16, virtual_cpus=2, lag_ms=0) as host:
        pools = Pools(host)
        control, tid = pools.control, pools.control.spawn(tid=process().pid)
        assign(host.ctx, assignment("k", tid))
        control.run(tid, SECOND)
        pools.read()
        control.set_faults(Fault(group="*k", event=TRAFFIC, answer=WORD))
        if is_seen_by_machine:
            pools.read()
        else:
            read(host.ctx, "k")
        control.set_faults()
        control.run(tid, SECOND)
        assert qualities(pools.read(), Pool.TRACKED) == {Quality.ESTIMATED}
        assert total_of(read(host.ctx, "k")[2]).quality is Quality.ESTIMATED
        host.restart()
        found = pools.read()
        assert qualities(found, Pool.TRACKED) == {Quality.ESTIMATED}
        assert qualities(found, Pool.TRACKED, "mbm_local_bytes") == {Quality.EXACT}
        assert total_of(release(host.ctx, "k", owner="test").totals).quality is Quality.ESTIMATED
        assert qualities(pools.read(), Pool.TRACKED) == {Quality.ESTIMATED}


def test_counter_of_another_program_that_had_no_number_for_a_time_is_not_exact(pools: Pools) -> None:
    host, control = pools.host, pools.control
    host.make_foreign("theirs")
    pools.restart()
    control.steal(tid := control.spawn(), "mon_groups/theirs")
    control.run(tid, SECOND)
    assert qualities(pools.read(), Pool.FOREIGN) == {Quality.EXACT}
    control.set_faults(Fault(group="mon_groups/theirs", event=TRAFFIC, answer=WORD))
    pools.read()
    control.set_faults()
    control.run(tid, SECOND)
    found = pools.read()
    assert qualities(found, Pool.FOREIGN) == {Quality.ESTIMATED}
    assert qualities(found, Pool.FOREIGN, ENERGY) == {Quality.EXACT}


@pytest.mark.parametrize("pool", [Pool.TRACKED, Pool.FOREIGN])
def test_counter_that_began_again_unseen_is_not_exact(tmp_path: Path, process: Start, pool: Pool) -> None:
    """The number was held, as exact, until the counter had counted more than before."""
    with own_host(tmp_path, "amd-abmc", 16, virtual_cpus=2, lag_ms=0) as host:
        group = host.make_foreign("theirs")
        pools = Pools(host)
        control, tid = pools.control, pools.control.spawn(tid=process().pid)
        if pool is Pool.TRACKED:
            assign(host.ctx, assignment("k", tid))
            group = host.get("k").first.ref
        else:
            control.steal(tid, "mon_groups/theirs")
        # A reset that the kernel does not report as a write of another program.
        host.ctx.machine.read_events = lambda: True
        control.run(tid, 2 * SECOND)
        before = pools.read()
        assert qualities(before, pool) == {Quality.EXACT}
        for state in "_e":
            Path(host.tree.full_path(group), "mbm_L3_assignments").write_text(f"{TRAFFIC}:*={state}\n")
        for _ in range(3):
            control.run(tid, SECOND)
            found = pools.read()
            assert used(found, pool, TRAFFIC) >= used(before, pool, TRAFFIC)
            assert Quality.EXACT not in {
                use.quality for use in found.pools if use.pool is pool and use.event.name == TRAFFIC and use.number
            }


def test_group_that_is_renamed_during_a_reading_is_not_taken_for_a_removed_one(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop has read the event of the new name, which the reading could not find."""
    host = pools.host
    before = os.path.join(host.mountpoint, host.make_foreign("before").path)
    pools.read()
    found_before = reasons(pools.read(), Pool.FOREIGN)
    context = host.ctx
    read = context.machine._read_whole

    def read_and_rename() -> tuple[dict[str, ClassCounters], bool]:
        found = read()
        os.rename(before, os.path.join(host.mountpoint, "mon_groups/after"))
        context.interference.read_events()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(context.machine, "_read_whole", read_and_rename)
        pools.read()
    assert reasons(pools.read(), Pool.FOREIGN) == found_before


def test_zombie_in_the_group_of_a_workload_that_ends_is_exact(pools: Pools, process: Start) -> None:
    """The parent of the process has not waited for it yet."""
    host, control = pools.host, pools.control
    pools.read()
    create(host.ctx, "a", owner="test")
    child = process()
    control.spawn(tid=child.pid)
    (Path(host.mountpoint) / "mon_groups/a/tasks").write_text(f"{child.pid}\n")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert str(child.pid) in (Path(host.mountpoint) / "mon_groups/a/tasks").read_text().split()
    release(host.ctx, "a", owner="test")
    assert reasons(pools.read(), Pool.TRACKED) == set()


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("is_saved", [False, True])
def test_cpu_of_a_group_that_ends_makes_the_sum_of_the_groups_estimated(
    pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch, is_saved: bool, is_seen: bool
) -> None:
    """Others count on it between its last reading and its removal: that was in no pool."""
    host, control = pools.host, pools.control
    control.set_witness(available=is_seen)
    pools.read()
    first = process()
    assign(host.ctx, assignment("a", control.spawn(tid=first.pid)))
    write(host, "mon_groups/a/cpus_list", "0")
    if is_saved:
        react(host)
    stranger, count_last = control.spawn(), host.ctx.machine.count_last

    def count_and_run(*args: Any, **options: Any) -> None:
        count_last(*args, **options)
        control.run(stranger, SECOND, 0)

    monkeypatch.setattr(host.ctx.machine, "count_last", count_and_run)
    control.exit(first.pid)
    first.kill()
    first.wait()
    release(host.ctx, "a", owner="test")
    assert reasons(pools.read(), Pool.TRACKED) == {"a workload ended while its tasks ran"}


@pytest.mark.parametrize("is_estimated", [False, True], ids=["exact", "estimated"])
def test_task_that_came_after_the_last_reading_and_has_ended_is_estimated(
    pools: Pools, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch, is_estimated: bool
) -> None:
    """Also if the group is estimated already, for the same reason."""
    host, control = pools.host, pools.control
    pools.read()
    first, other = process(), process()
    join(cgroup, first.pid)
    assign(host.ctx, assignment("a", control.spawn(tid=first.pid), own_cgroup=cgroup))
    control.spawn(tid=other.pid)
    if is_estimated:
        tasks = Path(host.mountpoint) / "mon_groups/a/tasks"
        tasks.write_text(f"{other.pid}\n")
        Path(host.mountpoint, "tasks").write_text(f"{other.pid}\n")
        host.manager.maintenance.tick()
    control.exit(first.pid)
    first.kill()
    first.wait()
    context = host.ctx
    count_last = context.machine.count_last

    def count_and_move(*args: Any, **options: Any) -> None:
        count_last(*args, **options)
        (Path(host.mountpoint) / "mon_groups/a/tasks").write_text(f"{other.pid}\n")
        control.run(other.pid, SECOND)
        control.exit(other.pid)

    monkeypatch.setattr(context.machine, "count_last", count_and_move)
    release(host.ctx, "a", owner="test")
    assert reasons(pools.read(), Pool.TRACKED) == {"a workload ended while its tasks ran"}


def test_group_that_came_and_went_during_a_reading_is_known_to_it(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its use is in no pool. Only the next reading said so."""
    host = pools.host
    pools.read()
    machine = host.ctx.machine
    read = machine._read_whole

    def remove_and_read() -> tuple[dict[str, ClassCounters], bool]:
        os.rmdir(os.path.join(host.mountpoint, host.make_foreign("brief").path))
        return read()

    monkeypatch.setattr(machine, "_read_whole", remove_and_read)
    assert "mon_groups/brief was created and removed between two readings" in reasons(pools.read(), Pool.FOREIGN)
