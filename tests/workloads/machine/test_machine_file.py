# SPDX-License-Identifier: Apache-2.0
"""The pools of the machine over restarts: another daemon continues what the last one has counted."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.counters import EVENTS, Kind, Value, event, parse_value
from resctrlmond.resctrl.errors import KernelRefused, NotRead, ResctrlError
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.mounts import Mounting
from resctrlmond.resctrl.package_energy import PackageEnergy
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.control.client import Fault
from resctrlmond.sim.fuse.mount import Simulation, unmount
from resctrlmond.sim.messages import Operation
from resctrlmond.workloads.machine.pools import MachineUse, Pool
from resctrlmond.workloads.machine.state import MachineFile, MachineState, OtherGroup
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.records import atomic_files, store
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment, join, own_host
from tests.workloads.groups.test_cut import Fuse, cut
from tests.workloads.machine.test_machine import DIGITS, SECOND, TRAFFIC, Pools, Start, pools, reasons, used

__all__ = ["pools"]

GONE = "the group of an ended workload was gone before its removal"
NOT_SEEN = "changes of other programs were not seen while resctrlmond did not run"


@pytest.fixture(scope="module")
def fuse() -> Fuse:
    return Fuse()


def file_of(host: Host) -> Path:
    return Path(host.run) / "machine.json"


def closed_in(host: Host) -> dict[str, Any]:
    """Return the groups that the file has as counted."""
    counted = json.loads(file_of(host).read_bytes())["counted"]
    assert isinstance(counted, dict)
    return counted


def test_another_daemon_continues(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    outside, running, ended, foreign = (
        control.spawn(),
        control.spawn(tid=process().pid),
        control.spawn(tid=process().pid),
        control.spawn(),
    )
    assign(host.ctx, assignment("running", running))
    assign(host.ctx, assignment("ended", ended))
    host.make_foreign("theirs")
    pools.restart()
    control.steal(foreign, "mon_groups/theirs")
    for tid in (outside, running, ended, foreign):
        control.run(tid, SECOND)
    first = pools.check(10)
    one = used(first, Pool.UNTRACKED)
    control.exit(ended)
    release(host.ctx, "ended", owner="test")
    for _ in range(2):
        host.restart().tick()
        for tid in (outside, running, foreign):
            control.run(tid, SECOND)
    found = pools.check(20)
    assert found.since == first.since
    assert abs(used(found, Pool.UNTRACKED) - 3 * one) < DIGITS
    assert used(found, Pool.FOREIGN) == 3 * one
    assert used(found, Pool.TRACKED) == 4 * one
    assert not reasons(found, Pool.TRACKED)
    assert reasons(found, Pool.UNTRACKED) == reasons(found, Pool.FOREIGN) == {NOT_SEEN}


def test_use_without_a_daemon_is_counted(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    running = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", running))
    before = used(pools.check(), Pool.TRACKED)
    host.ctx.interference.close()
    control.run(running, SECOND)
    control.exit(running)
    host.restart()
    release(host.ctx, "k", owner="test")
    found = pools.check()
    assert used(found, Pool.TRACKED) == before + Decimal("2.5")
    assert not reasons(found, Pool.TRACKED)


@pytest.mark.parametrize("verb", ["release", "end", "lost"])
def test_a_kill_at_each_change_of_an_end_counts_each_group_once(
    pools: Pools, process: Start, fuse: Fuse, verb: str
) -> None:
    host, control = pools.host, pools.control
    pools.read()
    step, killed, counted, unsure = 0, True, Decimal(0), []
    while killed:
        child = process()
        tid, key = control.spawn(tid=child.pid), f"k{step}"
        assign(host.ctx, assignment(key, tid, member="c"))
        group = host.tree.full_path(host.get(key).first.ref)
        control.run(tid, SECOND)
        if verb == "release":
            control.exit(tid)
            killed = cut(fuse, step, lambda key=key: release(host.ctx, key, owner="test"))  # type: ignore[misc]
        elif verb == "end":
            control.exit(tid)
            child.kill()
            child.wait()
            killed = cut(fuse, step, lambda key=key: host.manager.maintenance.record_ends(key))  # type: ignore[misc]
        else:
            os.rmdir(group)
            control.exit(tid)
            killed = cut(fuse, step, host.manager.tick)
        # The next daemon cannot know whether the last one removed the group.
        record = json.loads(Path(host.ctx.store.path(key)).read_bytes())
        is_unsure = not os.path.exists(group) and record["groups"][0]["state"] == "ending"
        host.restart().tick()
        if not host.get(key).state.is_over:
            release(host.ctx, key, owner="test")
        step += 1
        found = pools.read()
        assert not closed_in(host), f"after a kill before change {step - 1}"
        counted += Decimal("2.5")
        if verb == "lost":
            # Its use after the last checkpoint is not known.
            assert reasons(found, Pool.TRACKED)
            assert used(found, Pool.TRACKED) <= counted
        else:
            pools.check(2 * step)
            assert used(found, Pool.TRACKED) == counted, f"after a kill before change {step - 1}"
            assert reasons(found, Pool.TRACKED) == ({GONE} if is_unsure else set())
        assert used(host.restart().context.machine.read(), Pool.TRACKED) == used(found, Pool.TRACKED)
        if is_unsure:
            unsure.append(step)
            pools.restart()
            pools.read()
            counted = Decimal(0)
    assert step > 2
    assert len(unsure) <= 4  # the sums and the record: each is written, then renamed


def test_use_after_the_end_values_is_counted(pools: Pools, process: Start, fuse: Fuse) -> None:
    """A kill between the end values and the removal of the group: its tasks run on until the next start."""
    host, control = pools.host, pools.control
    pools.read()
    step, killed, total = 0, True, Decimal(0)
    while killed:
        tid, key = control.spawn(tid=process().pid), f"k{step}"
        assign(host.ctx, assignment(key, tid))
        killed = cut(fuse, step, lambda key=key: release(host.ctx, key, owner="test"))  # type: ignore[misc]
        control.run(tid, SECOND)
        host.restart().tick()
        if not host.get(key).state.is_over:
            release(host.ctx, key, owner="test")
        pools.check(2 * step + 2)
        step += 1
        total += Decimal("2.5")
    assert used(pools.read(), Pool.TRACKED) + used(pools.read(), Pool.UNTRACKED) == total


def test_group_that_a_kill_left_without_a_record_is_marked(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    pools.read()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    os.unlink(host.ctx.store.path("k"))
    host.restart()
    assert reasons(pools.read(), Pool.TRACKED) == {"a group with the mark of resctrlmond had no record"}


def test_group_that_others_removed_without_a_daemon_is_marked(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    pools.read()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    os.rmdir(host.tree.full_path(host.get("k").first.ref))
    host.restart()
    assert reasons(pools.read(), Pool.TRACKED) == {"another program removed the group of a workload"}


def test_group_whose_removal_failed_is_counted_while_it_is_used(pools: Pools, process: Start) -> None:
    """A kill between the last reading and the removal, in the undo of a failed call: the group lives on."""
    host, control = pools.host, pools.control
    pools.read()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    group, readings = host.get("k").first, host.tree.read(host.get("k").first.ref)
    host.ctx.machine.count_last("k", group, readings)
    for number in range(1, 3):
        host.restart()
        control.run(tid, SECOND)
        assert used(pools.check(), Pool.TRACKED) == Decimal("2.5") * number
    control.exit(tid)
    release(host.ctx, "k", owner="test")
    assert used(pools.check(), Pool.TRACKED) == Decimal(5)


@pytest.mark.parametrize("is_killed", [False, True], ids=["the same daemon", "another daemon"])
def test_ended_group_that_others_removed_after_our_removal_failed_is_marked(
    pools: Pools, process: Start, is_killed: bool
) -> None:
    """It was empty at its end, then a task came and went, and nobody read what that used."""
    host, control = pools.host, pools.control
    pools.read()
    tid, other = control.spawn(tid=process().pid), control.spawn()
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    control.exit(tid)
    control.set_faults(Fault(on=Operation.RMDIR, answer="EIO"))
    with pytest.raises(ResctrlError):
        release(host.ctx, "k", owner="test")
    control.set_faults()
    assert not reasons(pools.read(), Pool.TRACKED)
    control.steal(other, "mon_groups/k")
    control.run(other, SECOND)
    control.exit(other)
    control.remove_group("mon_groups/k")
    if is_killed:
        host.restart()
    host.manager.tick()
    assert host.get("k").state.is_over
    found = pools.read()
    assert used(found, Pool.TRACKED) == Decimal("2.5")
    assert reasons(found, Pool.TRACKED) == {GONE}
    host.restart()
    assert reasons(pools.read(), Pool.TRACKED) == {GONE}


def test_task_of_others_in_a_group_whose_removal_failed_is_marked(pools: Pools, process: Start, cgroup: str) -> None:
    """The workload was exact, and its own control group is empty: the task came after the end values."""
    host, control = pools.host, pools.control
    pools.read()
    first, other = process(), process()
    join(cgroup, first.pid)
    assign(host.ctx, assignment("k", control.spawn(tid=first.pid), own_cgroup=cgroup))
    control.exit(first.pid)
    first.kill()
    first.wait()
    control.set_faults(Fault(on=Operation.RMDIR, answer="EIO"))
    with pytest.raises(ResctrlError):
        release(host.ctx, "k", owner="test")
    control.set_faults()
    control.spawn(tid=other.pid)
    (Path(host.mountpoint) / "mon_groups/k/tasks").write_text(f"{other.pid}\n")
    control.run(other.pid, SECOND)
    host.manager.tick()
    assert host.get("k").state.is_over
    found = pools.read()
    assert used(found, Pool.TRACKED) == Decimal("2.5")
    assert reasons(found, Pool.TRACKED) == {"a workload ended while its tasks ran"}


def test_group_is_not_marked_if_only_its_record_could_not_be_written(
    pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, control = pools.host, pools.control
    pools.read()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    control.exit(tid)
    remove = host.tree.remove

    def remove_and_fill(ref: GroupRef) -> bool:
        monkeypatch.setattr(store, "write_file", refuse)
        return remove(ref)

    def refuse(path: str, _data: bytes, mode: int = 0o644) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context():
        monkeypatch.setattr(host.tree, "remove", remove_and_fill)
        with pytest.raises(NotWritten):
            release(host.ctx, "k", owner="test")
        monkeypatch.undo()
    host.manager.tick()
    assert host.get("k").state.is_over
    assert not reasons(pools.check(), Pool.TRACKED)


def test_lost_group_without_files_is_marked(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    pools.read()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    shutil.rmtree(Path(host.run, "groups", "k"))
    control.remove_group("mon_groups/k")
    host.manager.tick()
    assert reasons(pools.read(), Pool.TRACKED) == {"another program removed the group of a workload"}


def test_group_that_is_renamed_during_a_failing_call_is_marked(
    pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task runs on while the call is undone: what it uses after the last reading is in no pool."""
    host, control = pools.host, pools.control
    pools.read()
    tid = control.spawn(tid=process().pid)
    write_task = host.tree.write_task

    def move_and_fail(_before: Membership, directory: str, moved: int) -> NoReturn:
        write_task(directory, moved)
        os.rename(Path(host.mountpoint, directory), Path(host.mountpoint, "mon_groups", "theirs"))
        raise KernelRefused("the kernel refused it", errno=errno.EPERM)

    with monkeypatch.context() as patch:
        patch.setattr(host.tree, "write_task_from", move_and_fail)
        with pytest.raises(ResctrlError):
            assign(host.ctx, assignment("k", tid))
    assert not host.marked_groups()
    assert reasons(pools.read(), Pool.TRACKED) == {"a workload ended while its tasks ran"}


def test_closed_group_of_another_version_is_counted_while_it_is_used(pools: Pools, process: Start) -> None:
    """This version has no record of it, so its use up to the last reading must not count as that of a removed one."""
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    pools.restart()
    control.run(tid, SECOND)
    pools.read()
    group = host.get("k").first
    host.ctx.machine.count_last("k", group, host.tree.read(group.ref))
    record = Path(host.ctx.store.path("k"))
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"version": 10**6}))
    host.restart()
    control.run(tid, SECOND)
    assert used(pools.check(), Pool.TRACKED) == Decimal(5)


def test_older_reading_does_not_replace_the_last_one(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    pools.read()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    control.exit(tid)
    group = host.get("k").first
    host.ctx.machine.count_last("k", group, host.tree.read(group.ref))
    # By another program, after a kill.
    os.rmdir(host.tree.full_path(group.ref))
    host.restart()
    found = pools.check()
    assert used(found, Pool.TRACKED) == Decimal("2.5")
    assert reasons(found, Pool.TRACKED) == {"another program removed the group of a workload"}


def test_group_that_replaces_another_one_does_not_count_from_its_values(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that cannot move groups: the new one has the nonce of the old one, and another RMID."""
    host = pools.host
    host.make_class("gold")
    create(host.ctx, "k", owner="test")
    pools.restart()
    assert host.get("k").first.nonce in host.ctx.machine._state.base

    def refuse(_from: GroupRef, _to: GroupRef) -> NoReturn:
        raise KernelRefused("cannot move groups", errno=errno.EPERM)

    monkeypatch.setattr(host.tree, "rename", refuse)
    move(host.ctx, "k", "gold")
    tid = pools.control.spawn()
    for group in ("gold", "gold/mon_groups/k"):
        pools.control.steal(tid, group)
    pools.control.run(tid, SECOND)
    assert used(pools.check(), Pool.TRACKED) == Decimal("2.5")


def test_unreadable_group_ends_and_is_marked(pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end values are written already, and its removal failed."""
    host, control = pools.host, pools.control
    pools.read()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.exit(tid)
    control.set_faults(Fault(on=Operation.RMDIR, answer="EIO"))
    with pytest.raises(ResctrlError):
        release(host.ctx, "k", owner="test")
    control.set_faults()

    def refuse(_ref: GroupRef, _mounting: Mounting | None = None) -> NoReturn:
        raise NotRead("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(host.tree, "read", refuse)
        host.manager.tick()
    assert not host.marked_groups()
    assert reasons(pools.read(), Pool.TRACKED) == {
        "the values of an ended workload cannot be read: too many open files"
    }


def test_group_without_begin_values_does_not_count_former_owners(pools: Pools, process: Start) -> None:
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    before = used(pools.read(), Pool.TRACKED, TRAFFIC)
    shutil.rmtree(Path(host.run, "groups", "k", "mon_data"))
    host.restart()
    found = pools.read()
    assert used(found, Pool.TRACKED, TRAFFIC) <= before
    assert any("begin values" in reason for reason in reasons(found, Pool.TRACKED))


def test_counters_that_programs_can_reset_are_estimated_after_a_restart(tmp_path: Path, process: Start) -> None:
    with own_host(tmp_path, "amd-abmc", 16, residue=7, virtual_cpus=2, lag_ms=0) as host:
        pools = Pools(host)
        assign(host.ctx, assignment("k", pools.control.spawn(tid=process().pid)))
        assert not reasons(pools.read(), Pool.TRACKED)
        host.restart()
        marked = {use.event.name for use in pools.read().pools if use.pool is Pool.TRACKED and use.reason == NOT_SEEN}
        assert marked == {"mbm_total_bytes", "mbm_local_bytes"}


def test_no_number_falls(pools: Pools, process: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose counter has no number for a time; the number is held, also by another daemon."""
    host, control = pools.host, pools.control
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    first = pools.read()
    machine = host.restart().context.machine
    monkeypatch.setattr(machine, "_live", lambda _classes: {})
    held = machine.read()
    for before, now in zip(first.pools, held.pools, strict=True):
        if before.number is not None and before.event.kind.value == "cumulative":
            assert now.number is not None
            assert now.number >= before.number
            if before.pool is Pool.TRACKED:
                assert now.skew >= before.number


def test_nothing_is_kept_while_nobody_asks(pools: Pools, process: Start) -> None:
    host = pools.host
    assign(host.ctx, assignment("k", pools.control.spawn(tid=process().pid)))
    release(host.ctx, "k", owner="test")
    assert not file_of(host).exists()
    pools.read()
    assert file_of(host).stat().st_mode & 0o777 == 0o640


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A function that makes the disk too full for the file of the pools, or not."""
    write, is_full = atomic_files.write_file, [False]

    def write_file(path: str, data: bytes, mode: int, limit: int) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        write(path, data, mode, limit=limit)

    monkeypatch.setattr("resctrlmond.workloads.machine.state.write_file", write_file)

    def set_full(value: bool) -> None:
        is_full[0] = value

    return set_full


def test_a_full_disk_leaves_no_file_that_is_out_of_date(
    pools: Pools, process: Start, full: Callable[[bool], None]
) -> None:
    host, control = pools.host, pools.control
    first = pools.read()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    control.exit(tid)
    full(True)
    release(host.ctx, "k", owner="test")
    assert not file_of(host).exists()
    assert used(pools.check(), Pool.TRACKED) == Decimal("2.5")
    full(False)
    assert pools.check().since == first.since
    assert file_of(host).exists()
    full(True)
    pools.read()
    host.restart().tick()
    assert pools.read().since > first.since
    assert not reasons(pools.read(), Pool.UNTRACKED)


def test_a_file_that_could_not_be_removed_is_replaced_by_a_tick(
    pools: Pools, full: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = pools.host
    pools.read()
    inode = file_of(host).stat().st_ino
    full(True)
    with monkeypatch.context() as patch:

        def unlink(path: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        patch.setattr(os, "unlink", unlink)
        pools.read()
    full(False)
    host.manager.tick()
    assert file_of(host).stat().st_ino != inode


def test_a_new_mount_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()

    def count(host: Host) -> MachineUse:
        host.manager.tick()
        return host.ctx.machine.read()

    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        first = count(host)
        host.make_class("gold")
        assert count(host).since == first.since
        host.restart()
        assert count(host).since == first.since
        assert unmount(host.mountpoint)
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host.restart()
        assert count(host).since > first.since


def test_a_changed_attribute_of_the_root_directory_resets_nothing(pools: Pools) -> None:
    """It has a new ctime then, which names the mount in the file, and so has each new class after it."""
    host = pools.host
    since = pools.read().since
    os.chmod(host.mountpoint, 0o755)
    host.manager.tick()
    host.restart()
    assert pools.read().since == since
    host.make_class("gold")
    host.manager.tick()
    host.restart()
    assert pools.read().since == since


def test_a_new_mount_is_not_taken_for_one_with_a_changed_attribute(tmp_path: Path) -> None:
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        host.manager.tick()
        since = host.ctx.machine.read().since
        assert unmount(host.mountpoint)
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host.manager.tick()
        host.restart().tick()
        assert host.ctx.machine.read().since > since


def test_release_of_all_is_counted(pools: Pools, process: Start) -> None:
    """As ``resctrlctl release-all`` does, without a daemon."""
    host, control = pools.host, pools.control
    first = pools.read()
    tid = control.spawn(tid=process().pid)
    assign(host.ctx, assignment("k", tid))
    control.run(tid, SECOND)
    control.exit(tid)
    host.restart().release_all()
    host.restart().tick()
    found = pools.check()
    assert found.since == first.since
    assert used(found, Pool.TRACKED) == Decimal("2.5")


def test_a_start_without_descriptors_does_not_reset_the_pools(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pools.read()
    file = MachineFile(str(file_of(pools.host)), "boot")

    def no_descriptor(path: str, *_: object, **_more: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_descriptor)
        with pytest.raises(NotRead):
            file.load((1, 1))
    pools.host.restart()
    assert pools.read().since == first.since


def test_energy_of_packages_continues(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in (("name", "package-0"), ("max_energy_range_uj", str(10**12)), ("energy_uj", "5000000")):
        (zone / name).write_text(text + "\n")
    before = PackageEnergy(str(tmp_path))
    before.begin()
    (zone / "energy_uj").write_text("7000000\n")
    before.update()
    path = str(tmp_path / "machine.json")
    MachineFile(path, "boot").write(
        MachineFile(path, "boot").encode(MachineState(since="x"), (1, 2), before.zones, before.missed)
    )
    found = MachineFile(path, "boot").load((1, 2))
    assert found is not None
    now = PackageEnergy(str(tmp_path))
    now.restore(*found[1:])
    (zone / "energy_uj").write_text("10000000\n")
    now.update()
    assert (now.used_joules(), now.missed) == ({0: Decimal(5)}, "")


# -- the size


def test_each_group_of_others_adds_few_bytes_to_the_file(tmp_path: Path) -> None:
    domains, groups = 32, 10
    with own_host(tmp_path, "amd-abmc", 4 + groups, domains=domains, counters=32, residue=7) as host:
        pools = Pools(host)
        pools.read()
        before = file_of(host).stat().st_size
        for number in range(groups):
            host.make_foreign(f"theirs{number}")
        pools.read()
        # Two readings of two counters, with up to 15 digits each.
        assert (file_of(host).stat().st_size - before) / (domains * groups) < 2 * 2 * 16 + 4


def test_a_machine_full_of_groups_of_others_fits_into_the_file(tmp_path: Path) -> None:
    file = MachineFile(str(tmp_path / "machine.json"), "boot")
    state = MachineState(since="x")
    counters = [(f"mon_L3_{number:02}", name) for number in range(32) for name in ("mbm_local_bytes", TRAFFIC)]
    values = dict.fromkeys(counters, parse_value("123456789012345"))
    for inode in range(4095):
        state.others[inode] = OtherGroup(state.pack(values), state.pack(values))
    file.write(file.encode(state, (1, 2), {}, ""))
    found = file.load((1, 2))
    assert found is not None
    assert found[0].others.keys() == state.others.keys()
    assert found[0].unpack(found[0].others[7].last) == values


VALUES = st.sampled_from(["Unavailable", "Error", "Unassigned", "Input/output error"]) | st.one_of(
    st.integers(0, 10**20 - 1).map(str),
    st.decimals(0, 10**18, places=6, allow_nan=False).map("{:f}".format),
)
COUNTERS = st.tuples(
    st.sampled_from(["mon_L3_00", "mon_L3_01", "mon_PERF_PKG_00"]), st.sampled_from([*EVENTS, "new"])
)


@given(readings=st.lists(st.dictionaries(COUNTERS, VALUES.map(parse_value), max_size=9), max_size=5))
def test_readings_are_kept_whatever_counters_they_have(
    tmp_path_factory: pytest.TempPathFactory, readings: list[dict[tuple[str, str], Value]]
) -> None:
    """Domains come online and go offline between the readings."""
    file = MachineFile(str(tmp_path_factory.mktemp("machine") / "machine.json"), "boot")
    state, expected = MachineState(since="x"), {}
    for nonce, values in enumerate(readings):
        state.base[nonce] = state.pack(values)
        file.write(file.encode(state, (1, 2), {}, ""))
        found = file.load((1, 2))
        assert found is not None
        state = found[0]
        expected[nonce] = {of: value for of, value in values.items() if event(of[1]).kind is Kind.CUMULATIVE}
        assert {of: state.unpack(packed) for of, packed in state.base.items()} == expected
    if readings:
        state.update(state.base[0], readings[-1])
        assert state.unpack(state.base[0]) == expected[0] | expected[len(readings) - 1]


# -- bad files


def edited(host: Host, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file_of(host).read_text())
    change(content)
    file_of(host).write_text(json.dumps(content))


def set_number(number: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["classes"][""]["own"][0][1][0] = number

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(version=3),
        lambda content: content.update(bootId="another"),
        lambda content: content.update(root=[1, 2]),
        lambda content: content.update(since=5),
        lambda content: content.pop("ended"),
        lambda content: content["counters"].extend([["mon_L3_00", TRAFFIC]] * 2),
        lambda content: content["others"].update({"5": [[1] * 99, []]}),
        lambda content: content["base"].update({"5": [10**41]}),
        set_number("NaN"),
        set_number("Infinity"),
        set_number("1E+999999"),
        set_number("0.0000000001"),
        set_number(10**41),
        set_number(-(10**41)),
        set_number(None),
    ],
)
def test_a_file_that_is_not_valid_begins_anew(pools: Pools, change: Callable[[dict[str, Any]], None]) -> None:
    first = pools.read()
    edited(pools.host, change)
    pools.host.restart().tick()
    found = pools.read()
    assert found.since > first.since
    assert {use.quality for use in found.pools} == {Quality.EXACT}


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_content_is_read_without_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    path.write_bytes(data)
    assert MachineFile(str(path), "boot").load((1, 2)) is None
    assert not path.exists()


def test_the_file_of_this_version_is_read(tmp_path: Path) -> None:
    """Later versions must read the files of this one, or count it as another format."""
    path = tmp_path / "machine.json"
    path.write_text(STORED)
    found = MachineFile(str(path), "b").load((5, 6))
    assert found is not None
    state, zones, missed = found
    assert MachineFile(str(path), "b").encode(state, (5, 6), zones, missed).decode() == STORED


STORED = (
    '{"version":1,"bootId":"b","root":[5,6],"since":"2026-11-27T07:09:04.978616Z","domains":{"mon_L3_00":'
    '7},"classes":{"":{"inode":1,"own":[[["mon_PERF_PKG_00","core_energy"],["-0.000001","0.000002","1.5",'
    '0,{"why":null}]]]}},"counters":[["mon_L3_00","mbm_total_bytes"],["mon_PERF_PKG_00","core_energy"]],"'
    'others":{"9":[[5],["Unavailable"]]},"base":{"1700000000000000001":[null,"2.000000"]},"ended":{"track'
    'ed":[[["mon_L3_00","mbm_total_bytes"],[7,1,true,{"lost":null}]]],"foreign":[],"untracked":[],"uncore'
    '":[]},"counted":{"1700000000000000002":[[["mon_L3_00","mbm_total_bytes"],[3,0,true,{}]]]},"removed":['
    '1700000000000000003],"flaws":{"tracked":[],"foreign":["flaw"],"untracked":[],"uncore":[]},"domainFla'
    'ws":{"mon_L3_01":"was offline"},"eventFlaws":{"mbm_local_bytes":"changed"},"transactions":{"L3_MON/m'
    'bm_total_bytes_config":"0=0x7f"},"shown":[["tracked","mon_L3_00","mbm_total_bytes",12],["uncore","mo'
    'n_PERF_PKG_00","core_energy","4.25"]],"whileBeginning":{"0":"0.000100"},"zones":{"/sys/class/powerca'
    'p/intel-rapl:0":{"package":0,"range_uj":262143328850,"last_uj":5,"read_at":12.5,"used_uj":4}},"energ'
    'yMissed":""}'
    "\n"
)
