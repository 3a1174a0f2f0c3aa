# SPDX-License-Identifier: Apache-2.0
"""A removed group loses the use since its last checkpoint, and the totals are estimated."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
import types
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.counters import Reading, parse_value
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.fuse.mount import Simulation, unmount
from resctrlmond.workloads.figures import checkpoint
from resctrlmond.workloads.figures.accounting import Total, totals
from resctrlmond.workloads.figures.checkpoint import LastRead
from resctrlmond.workloads.groups import counters
from resctrlmond.workloads.model import clock
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.upkeep.maintenance import log
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.sim.conftest import Puppet
from tests.workloads.builders import total_of
from tests.workloads.conftest import Host, assignment, own_host
from tests.workloads.conftest import machine as virtual_machine

Start = Callable[[], "subprocess.Popen[bytes]"]
DOMAIN = "mon_L3_01"
TRAFFIC = "mbm_total_bytes"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Host]:
    """A machine of its own, for what changes all of it."""
    with own_host(tmp_path, "intel-aet", 8) as host:
        yield host


def last_read(host: Host, key: str) -> checkpoint.Checkpoint:
    return host.ctx.snapshots.last_read(key)


def test_lost_group_is_estimated_while_the_clock_stands_still(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of its last reading was that of the loss, and the total exact."""
    at = datetime.now(UTC)
    monkeypatch.setattr(clock, "datetime", types.SimpleNamespace(now=lambda _zone: at))
    record = assign(host.ctx, assignment("k", puppet.pid)).workload
    host.manager.maintenance.tick()
    os.rmdir(host.tree.full_path(record.first.ref))
    host.manager.maintenance.tick()
    assert host.get("k").state is State.LOST
    assert {total.quality for total in read(host.ctx, "k")[2]} == {Quality.ESTIMATED}


def test_removed_group_ends_with_its_last_readings(host: Host, puppet: Puppet) -> None:
    record = assign(host.ctx, assignment("k", puppet.pid)).workload
    puppet.do("burn 0.2")
    host.manager.maintenance.tick()
    kept = last_read(host, "k")
    os.rmdir(host.tree.full_path(record.first.ref))
    host.manager.maintenance.tick()
    lost = host.get("k")
    assert lost.state is State.LOST
    host.check()
    files = host.files("k")
    for domain, last in kept.items():
        for event, text in last.values.items():
            assert files[f"mon_data/{domain}/{event}.end"] == f"{text}\n"
    totals = read(host.ctx, "k")[2]
    assert {one.quality for one in totals} == {Quality.ESTIMATED}
    traffic = total_of(totals)
    assert traffic.number is not None
    assert traffic.number > 0
    # Once, not for each domain: it is the same loss.
    assert traffic.reason == f"{lost.reason}; last read: {kept[DOMAIN].time}"
    assert read(host.restart().context, "k")[2] == totals


def test_checkpoint_is_written_at_once_and_then_at_the_interval(host: Host, puppet: Puppet) -> None:
    assign(host.ctx, assignment("k", puppet.pid))
    assert last_read(host, "k") == {}
    host.manager.maintenance.tick()
    first = last_read(host, "k")
    assert first
    puppet.do("burn 0.2")
    host.manager.maintenance.tick()
    assert last_read(host, "k") == first
    host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9)
    host.manager.maintenance.tick()
    assert last_read(host, "k")[DOMAIN].time > first[DOMAIN].time


def test_kill_before_the_first_checkpoint_loses_nothing(tmp_path: Path, process: Start) -> None:
    child = process()
    with virtual_machine(tmp_path, "intel-aet") as (host, control):
        control.spawn(tid=child.pid)
        assign(host.ctx, assignment("k", child.pid))
        control.run(child.pid, 1_000_000_000)
        assert not last_read(host, "k")
        host.restart()
        control.run(child.pid, 1_000_000_000)
        host.manager.maintenance.tick()
        (used,) = control.truth(tid=child.pid).tasks[0].used
        found = read(host.ctx, "k")[2]
        traffic = next(total for total in found if total.event.name == "mbm_total_bytes")
        assert (traffic.number, traffic.quality) == (used.bytes, Quality.EXACT)
        host.check()
        host.ctx.interference.close()


def test_totals_of_a_group_that_is_lost_before_its_first_checkpoint_are_unknown(host: Host, process: Start) -> None:
    assign(host.ctx, assignment("k", process().pid))
    os.rmdir(host.tree.full_path(host.ctx.store.known("k").first.ref))
    host.restart()
    assert host.ctx.store.known("k").state is State.LOST
    found = read(host.ctx, "k")[2]
    assert {total.quality for total in found} == {Quality.UNKNOWN}
    assert all("last read: never" in total.reason for total in found)
    host.check()


def test_group_that_did_not_change_is_not_written_again(tmp_path: Path, process: Start) -> None:
    """Each checkpoint wrote two files, and read all begin values back."""
    with virtual_machine(tmp_path, "intel-aet") as (host, control):
        child = process()
        control.spawn(tid=child.pid)
        check_that_only_changes_are_written(host, control, child.pid)


def check_that_only_changes_are_written(host: Host, control: Control, pid: int) -> None:
    assign(host.ctx, assignment("k", pid))
    folder = Path(host.run, "groups", "k")

    def tick() -> dict[str, tuple[int, int]]:
        host.manager.maintenance.tick()
        # A filesystem may give a new file the inode number of the file that it has replaced.
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}

    first = tick()
    assert tick() == first
    control.run(pid, 1_000_000_000)
    second = tick()
    assert second["checkpoint"] != first["checkpoint"]
    control.run(pid, 1_000_000_000)
    read(host.ctx, "k")
    third = tick()
    assert third["checkpoint"] != second["checkpoint"], "the values that a caller has read are new too"
    assert tick() == third
    # Files that another program removed are written again.
    for name in ("checkpoint", "quality"):
        (folder / name).unlink()
        assert tick().keys() == third.keys()
    host.check()
    assert total_of(release(host.ctx, "k", owner="test").totals).quality is Quality.EXACT


def test_quality_of_readings_that_did_not_change_is_written_if_that_failed_before(
    machine: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, child = machine, process()
    host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9)
    assign(host.ctx, assignment("k", child.pid))
    host.manager.maintenance.tick()
    Control(host.mountpoint).set_faults(Fault(group="mon_groups/k", event=TRAFFIC, answer="Error"))
    snapshots = host.ctx.snapshots
    with monkeypatch.context() as full:

        def refuse(_subfolder: str, _text: str) -> None:
            raise NotWritten("cannot write", errno=errno.ENOSPC)

        full.setattr(snapshots, "write_quality", refuse)
        host.manager.maintenance.tick()
        assert host.manager.problems
    assert "\nmbm_total_bytes exact" in snapshots.quality("k")
    host.manager.maintenance.tick()
    assert "\nmbm_total_bytes exact" not in snapshots.quality("k")
    host.check()


def test_without_an_interval_no_checkpoint_is_written_and_a_loss_is_unknown(host: Host, process: Start) -> None:
    host.settings = host.ctx.config.settings = Settings(checkpoint_interval_s=0)
    record = assign(host.ctx, assignment("k", process().pid)).workload
    host.manager.maintenance.tick()
    assert "checkpoint" not in host.files("k")
    os.rmdir(host.tree.full_path(record.first.ref))
    host.manager.maintenance.tick()
    host.check()
    traffic = total_of(read(host.ctx, "k")[2])
    assert (traffic.number, traffic.quality) == (None, Quality.UNKNOWN)
    assert "last read: never" in traffic.reason


def test_removed_group_ends_with_the_last_readings_of_a_caller(host: Host, puppet: Puppet) -> None:
    """Its end values were those of the previous checkpoint, and less than a caller had read."""
    record = assign(host.ctx, assignment("k", puppet.pid)).workload
    host.manager.maintenance.tick()
    puppet.do("burn 0.2")
    before = total_of(read(host.ctx, "k")[2])
    assert before.number
    os.rmdir(host.tree.full_path(record.first.ref))
    host.restart()
    lost = total_of(read(host.ctx, "k")[2])
    assert (lost.number, lost.quality) == (before.number, Quality.ESTIMATED)
    host.check()


def test_delayed_read_does_not_replace_newer_values(host: Host, process: Start) -> None:
    """They would look like counters that went back. So would values that are kept after the end values."""
    record = assign(host.ctx, assignment("k", process().pid)).workload
    snapshots, begun_ns = host.ctx.snapshots, time.monotonic_ns()
    readings = read(host.ctx, "k")[1]
    old = [Reading(one.domain, one.event, parse_value("0")) for one in readings]
    newer = last_read(host, "k")
    snapshots.keep_read(record.first.created_at, begun_ns, "k", old, record.first.inodes)
    assert last_read(host, "k") == newer
    snapshots.keep_no_more("k")
    snapshots.keep_read(record.first.created_at, time.monotonic_ns(), "k", old, record.first.inodes)
    assert last_read(host, "k") == newer


def test_overtaken_read_of_a_domain_that_came_back_does_not_count_it_twice(machine: Host, puppet: Puppet) -> None:
    """Its higher count of before looked like use since then, and the count before was added to it."""
    group = assign(machine.ctx, assignment("k", puppet.pid)).workload.first
    puppet.do("burn 0.4")
    snapshots, begun_ns = machine.ctx.snapshots, time.monotonic_ns()
    old = machine.tree.read(group.ref)
    read(machine.ctx, "k")
    for domain in ("mon_L3_00", DOMAIN):
        Control(machine.mountpoint).offline(domain)
        Control(machine.mountpoint).online(domain)
    puppet.do("burn 0.1")
    read(machine.ctx, "k")
    newer = last_read(machine, "k")
    assert sum(last.carried.get(TRAFFIC, 0) for last in newer.values()) > 0
    kept = snapshots.keep_read(group.created_at, begun_ns, "k", old, group.inodes).checkpoint
    assert kept is not None
    for domain, last in newer.items():
        now = kept[domain]
        assert (now.inode, now.carried, now.values.get(TRAFFIC)) == (
            last.inode,
            last.carried,
            last.values.get(TRAFFIC),
        )


@pytest.mark.parametrize("step", ["before it is kept", "after it is kept"])
def test_another_reader_between_two_steps_of_a_read_leaves_it_exact(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The newer checkpoint of the other one made the counters of this one look as if they had gone back."""
    assign(host.ctx, assignment("k", puppet.pid))
    read(host.ctx, "k")
    puppet.do("burn 0.1")
    of, name = {
        "before it is kept": (host.ctx.tree, "read"),
        "after it is kept": (host.ctx.snapshots, "keep_read"),
    }[step]
    done = getattr(of, name)

    def other_reads_then(*arguments: object) -> object:
        found = done(*arguments)
        monkeypatch.setattr(of, name, done)
        puppet.do("burn 0.1")
        others.append(total_of(read(host.ctx, "k")[2]))
        return found

    others: list[Total] = []
    monkeypatch.setattr(of, name, other_reads_then)
    total = total_of(read(host.ctx, "k")[2])
    [other] = others
    assert (total.quality, total.reason, other.quality) == (Quality.EXACT, "", Quality.EXACT)
    assert "estimated" not in host.files("k")["quality"]


def test_a_gap_that_another_reader_finds_during_a_checkpoint_stays_in_the_file(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick wrote the quality of its own older readings over that of the reply."""
    group = assign(host.ctx, assignment("k", process().pid)).workload.first
    read(host.ctx, "k")
    snapshots, keep = host.ctx.snapshots, host.ctx.snapshots.keep_read

    def other_reads_then(*arguments: object) -> object:
        kept = keep(*arguments)  # type: ignore[arg-type]
        monkeypatch.setattr(snapshots, "keep_read", keep)
        control = Control(host.mountpoint)
        control.set_faults(Fault(group=group.ref.path, event="mbm_total_bytes", answer="Unavailable"))
        assert total_of(read(host.ctx, "k")[2]).quality is not Quality.EXACT
        control.set_faults()
        return kept

    monkeypatch.setattr(snapshots, "keep_read", other_reads_then)
    with host.ctx.store.transaction("k") as txn:
        counters.checkpoint(host.ctx, txn)
    assert "mbm_total_bytes exact" not in host.files("k")["quality"]


def test_a_read_of_an_earlier_run_is_not_kept_for_the_next_one(host: Host, process: Start) -> None:
    assign(host.ctx, assignment("k", process().pid))
    earlier, readings = host.get("k"), read(host.ctx, "k")[1]
    release(host.ctx, "k", owner="test")
    assign(host.ctx, assignment("k", process().pid))
    snapshots = host.ctx.snapshots
    snapshots.keep_read(earlier.first.created_at, time.monotonic_ns(), "k", readings, earlier.first.inodes)
    assert last_read(host, "k") == {}
    read(host.ctx, "k")
    assert last_read(host, "k")


def test_checkpoints_do_not_make_an_exact_end_estimated(host: Host, process: Start) -> None:
    assign(host.ctx, assignment("k", process().pid))
    host.manager.maintenance.tick()
    totals = release(host.ctx, "k", owner="test").totals
    assert {(one.quality, one.reason) for one in totals} == {(Quality.EXACT, "")}
    assert read(host.ctx, "k")[2] == totals


def test_unmount_loses_at_most_the_use_of_one_interval(machine: Host, puppet: Puppet) -> None:
    assign(machine.ctx, assignment("k", puppet.pid))
    puppet.do("burn 0.2")
    machine.manager.maintenance.tick()
    kept = last_read(machine, "k")
    assert unmount(machine.mountpoint)
    machine.manager.maintenance.tick()
    record, _, totals = read(machine.ctx, "k")
    assert record.state is State.LOST
    traffic = total_of(totals)
    assert (traffic.quality, bool(traffic.number)) == (Quality.ESTIMATED, True)
    assert "unmounted" in traffic.reason
    assert kept[DOMAIN].time in traffic.reason


def test_group_removed_without_a_daemon_ends_with_its_checkpoint(host: Host, process: Start) -> None:
    record = assign(host.ctx, assignment("k", process().pid)).workload
    host.manager.maintenance.tick()
    os.rmdir(host.tree.full_path(record.first.ref))
    host.restart()
    host.check()
    assert host.get("k").state is State.LOST
    assert total_of(read(host.ctx, "k")[2]).quality is Quality.ESTIMATED


def test_domain_that_went_offline_counts_until_its_last_reading(machine: Host, process: Start) -> None:
    assign(machine.ctx, assignment("k", process().pid))
    machine.manager.maintenance.tick()
    time = last_read(machine, "k")[DOMAIN].time
    Control(machine.mountpoint).offline(DOMAIN)
    reason = f"{DOMAIN} went offline, last read at {time}"
    living = total_of(read(machine.ctx, "k")[2])
    assert (living.quality, living.reason) == (Quality.ESTIMATED, reason)
    assert living.number is not None
    # A later checkpoint knows nothing of it and takes nothing away.
    machine.ctx.config.settings = Settings(checkpoint_interval_s=1e-9)
    machine.manager.maintenance.tick()
    assert last_read(machine, "k")[DOMAIN].time == time
    assert f"{TRAFFIC} estimated" in machine.files("k")["quality"]
    ended = release(machine.ctx, "k", owner="test")
    assert ended.workload.state is State.COMPLETED
    assert total_of(ended.totals).reason == reason
    energy = total_of(ended.totals, "core_energy")
    assert (energy.quality, energy.reason) == (Quality.EXACT, "")
    assert f"mon_data/{DOMAIN}/{TRAFFIC}.end" in machine.files("k")
    machine.check()


@pytest.mark.parametrize("checkpointed", [True, False], ids=["known", "unknown"])
def test_domain_that_was_offline_counts_before_and_after(machine: Host, puppet: Puppet, checkpointed: bool) -> None:
    """Its traffic begins from 0 again, as the baseline did: nothing goes back, and yet something is missing."""
    assign(machine.ctx, assignment("k", puppet.pid))
    puppet.do("burn 0.2")
    known = 0
    if checkpointed:
        machine.manager.maintenance.tick()
        known = sum(int(last.values.get(TRAFFIC, 0)) for last in last_read(machine, "k").values())
        assert known > 0
    domains = ("mon_L3_00", DOMAIN)
    for domain in domains:
        Control(machine.mountpoint).offline(domain)
        Control(machine.mountpoint).online(domain)
    puppet.do("burn 0.4")
    ended = release(machine.ctx, "k", owner="test")
    traffic, energy = total_of(ended.totals), total_of(ended.totals, "core_energy")
    files = machine.files("k")
    since = sum(int(files[f"mon_data/{domain}/{TRAFFIC}.end"]) for domain in domains)
    assert since > 0
    assert (traffic.number, traffic.quality) == (known + since, Quality.ESTIMATED)
    assert "went back" in traffic.reason
    # The registers of the packages run on.
    assert "went back" not in energy.reason
    assert read(machine.restart().context, "k")[2] == ended.totals


def test_counter_that_restarts_in_the_same_directory_is_detected_by_its_value() -> None:
    """As where the mode of bandwidth counters is changed: a reset, and not the noise of a sum."""

    def after(*texts: str) -> dict[str, int]:
        kept: checkpoint.Checkpoint = {}
        for text in texts:
            kept = checkpoint.with_readings(kept, "now", [Reading("d", TRAFFIC, parse_value(text), 7)])
        return kept["d"].carried

    assert after("100", "20", "30") == {TRAFFIC: 100}
    assert after("100", "20", "30", "5", "9") == {TRAFFIC: 130}
    # Noise, or a new beginning: it is marked, and nothing is counted twice.
    assert after("100", "80", "150") == {TRAFFIC: 0}
    assert after("100", "150", "148", "200") == {TRAFFIC: 0}
    assert after("100", "Unavailable", "200") == {}
    # AMD's counters read so when they are handed to another group, and begin from 0 when they are back.
    assert after("100", "Unavailable", "20") == {TRAFFIC: 100}
    assert after("100", "Unavailable", "Error", "20", "Unavailable", "30") == {TRAFFIC: 100}
    assert after("100", "Unavailable", "Unassigned", "20") == {TRAFFIC: 100}


_TEXTS = st.sampled_from(["0", "20", "100", "199", "7.5", "Unavailable", "Unassigned", "Error", "nonsense"])


@given(
    st.sampled_from([TRAFFIC, "core_energy", "llc_occupancy"]),
    st.lists(st.tuples(_TEXTS, st.integers(0, 2)), min_size=2),
)
def test_checkpoint_compared_with_itself_shows_nothing_new(name: str, seen: list[tuple[str, int]]) -> None:
    """The totals up to the last readings on disk are computed without that comparison."""
    rows = [[Reading("d", name, parse_value(text), inode)] for text, inode in seen]
    kept: checkpoint.Checkpoint = {}
    for row in rows[1:]:
        kept = checkpoint.with_readings(kept, "now", row, lambda: checkpoint.of_baseline(rows[0], {"d": 2}))
    again = checkpoint.with_readings(kept, "", checkpoint.readings_of(kept))
    assert again == {"d": msgspec.structs.replace(kept["d"], time="", inode=0)}


@pytest.mark.parametrize("name", [TRAFFIC, "core_energy"])
@pytest.mark.parametrize("end", ["950", "999"])
def test_total_is_not_exact_after_a_counter_went_back(name: str, end: str) -> None:
    """A decrease of up to a tenth since the last checkpoint counted as noise, and the total was exact."""

    def read(text: str) -> list[Reading]:
        return [Reading("d", name, parse_value(text), 7)]

    kept = checkpoint.of_baseline(read("100"), {"d": 7})
    for text in ("1000", end):
        kept = checkpoint.with_readings(
            kept, "now", read(text), lambda: checkpoint.of_baseline(read("100"), {"d": 7})
        )
    (total,) = totals(read("100"), read(end), past=checkpoint.histories(kept))
    assert (total.number, total.quality) == (int(end) - 100, Quality.ESTIMATED)
    assert "went back" in total.reason


def test_event_without_a_counter_for_a_time_is_estimated_from_its_readings(tmp_path: Path, process: Start) -> None:
    """AMD's assignable counters: the later use counted as all use, exactly."""
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "amd-abmc", 16, virtual_cpus=1):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        # Only the readings are examined here: each write to the file makes the total estimated.
        host.ctx.interference.close()
        host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9)
        control, child = Control(host.mountpoint), process()
        control.spawn(tid=child.pid)
        record = assign(host.ctx, assignment("k", child.pid)).workload
        assignments = Path(host.tree.full_path(record.first.ref), "mbm_L3_assignments")

        def used_with(state: str) -> Total:
            assignments.write_text(f"{TRAFFIC}:*={state}\n")
            control.run(child.pid, 1_000_000_000)
            host.manager.maintenance.tick()
            return total_of(read(host.ctx, "k")[2])

        first = used_with("e")
        assert first.quality is Quality.EXACT
        assert first.number
        without = used_with("_")
        assert (without.number, without.quality) == (first.number, Quality.ESTIMATED)
        assert "had no number at the end ('Unassigned'): the total is what was counted before" in without.reason
        again = used_with("e")
        assert (again.number, again.quality) == (2 * int(first.number), Quality.ESTIMATED)
        assert "had no counter for a time" in again.reason
        # The other event had its counter all the time.
        totals = release(host.ctx, "k", owner="test").totals
        assert total_of(totals, "mbm_local_bytes").quality is Quality.EXACT
        assert total_of(totals) == again


def test_without_a_counter_nothing_is_0() -> None:
    def carried(*texts: str) -> dict[str, int]:
        kept: checkpoint.Checkpoint = {}
        for text in texts:
            kept = checkpoint.with_readings(kept, "now", [Reading("d", TRAFFIC, parse_value(text), 7)])
        return kept["d"].carried

    assert carried("100", "Unassigned", "20", "60") == {TRAFFIC: 100}
    assert carried("100", "Unassigned", "Unassigned", "20", "Unassigned") == {TRAFFIC: 120}
    assert carried("Unassigned", "20") == {TRAFFIC: 0}
    begin, end = ([Reading("d", TRAFFIC, parse_value(text))] for text in ("Unassigned", "20"))
    past = {("d", TRAFFIC): checkpoint.CounterHistory(carried=0, has_gap=True)}
    (assigned_later,) = totals(begin, end, past=past)
    assert (assigned_later.number, assigned_later.quality) == (20, Quality.ESTIMATED)
    (gone,) = totals(end, begin, past=past)
    assert (gone.number, gone.quality) == (None, Quality.UNKNOWN)


def test_use_before_a_counter_was_unavailable_is_kept(tmp_path: Path, process: Start) -> None:
    """The use before was forgotten, and the rest was exact."""
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 8, virtual_cpus=1):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        control, child = Control(host.mountpoint), process()
        control.spawn(tid=child.pid)
        record = assign(host.ctx, assignment("k", child.pid)).workload
        host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9)
        control.run(child.pid, 1_000_000_000)
        host.manager.maintenance.tick()
        before = total_of(read(host.ctx, "k")[2])
        assert before.number
        control.set_faults(Fault(group=record.first.ref.path, event=TRAFFIC, answer="Unavailable"))
        host.manager.maintenance.tick()
        host.restart()
        control.set_faults()
        # It begins from 0.
        control.offline("mon_L3_00")
        control.online("mon_L3_00")
        ended = release(host.ctx, "k", owner="test")
        traffic = total_of(ended.totals)
        assert (traffic.number, traffic.quality) == (before.number, Quality.ESTIMATED)


def test_a_part_of_a_domain_that_was_offline_is_counted_once(tmp_path: Path, process: Start) -> None:
    """The sum of all parts went back by one of them, and the others were counted twice."""
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-snc2", 8, virtual_cpus=4):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        control, child = Control(host.mountpoint), process()
        control.spawn(tid=child.pid)
        assign(host.ctx, assignment("k", child.pid))
        control.run(child.pid, 3_000_000_000, 0)
        control.run(child.pid, 7_000_000_000, 1)
        host.manager.maintenance.tick()
        before = total_of(read(host.ctx, "k")[2])
        values = {domain: last.values[TRAFFIC] for domain, last in last_read(host, "k").items()}
        assert before.number == int(values["mon_L3_00"]) + int(values["mon_L3_01"])
        assert before.quality is Quality.EXACT
        control.offline("mon_sub_L3_01")
        control.online("mon_sub_L3_01")
        traffic = total_of(release(host.ctx, "k", owner="test").totals)
        assert (traffic.number, traffic.quality) == (before.number, Quality.ESTIMATED)
        assert "mon_sub_L3_01 went back" in traffic.reason


def test_energy_of_a_package_that_came_online_later_excludes_the_use_of_others(
    tmp_path: Path, process: Start
) -> None:
    """Its registers had run on: what another group had used there was counted again."""
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8, residue=7, virtual_cpus=4):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        control, child = Control(host.mountpoint), process()
        control.spawn(tid=child.pid)
        control.offline("mon_PERF_PKG_01")
        assign(host.ctx, assignment("k", child.pid))
        control.online("mon_PERF_PKG_01")
        energy = total_of(release(host.ctx, "k", owner="test").totals, "core_energy")
        # Nothing ran.
        assert (energy.number, energy.quality) == (0, Quality.ESTIMATED)
        assert "mon_PERF_PKG_01 had no number at the beginning: 'not online'" in energy.reason


@pytest.mark.parametrize("lack", [errno.ENOSPC, errno.ENOMEM])
def test_checkpoint_that_cannot_be_opened_without_descriptors_is_not_taken_as_missing(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch, lack: int
) -> None:
    """A lost group ended without its checkpoint. No kernel can be made to answer like this."""
    assign(host.ctx, assignment("k", process().pid))
    host.manager.maintenance.tick()

    def refuse(path: str, flags: int, *_: int) -> int:
        raise OSError(lack, "lacking", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(NotRead, match="checkpoint"):
            last_read(host, "k")
    assert last_read(host, "k")


def test_end_is_recorded_if_the_checkpoint_cannot_be_written(
    host: Host, process: Start, caplog: pytest.LogCaptureFixture
) -> None:
    child = process()
    assign(host.ctx, assignment("4d" * 32, child.pid, "oci"))
    os.mkdir(os.path.join(host.run, "groups", "4d" * 32, "checkpoint"))
    with caplog.at_level("ERROR", log.name):
        host.manager.maintenance.tick()
    assert "checkpoint" in caplog.text
    assert host.get("4d" * 32).state is State.ACTIVE
    shutil.rmtree(os.path.join(host.run, "groups", "4d" * 32, "checkpoint"))
    child.kill()
    child.wait()
    host.manager.maintenance.tick()
    assert host.get("4d" * 32).state is State.COMPLETED
    host.check()


@given(st.binary(max_size=200) | st.just(b'{"mon_L3_00": {"time": 1}}') | st.just(b"[" * 100_000))
def test_damaged_checkpoint_is_ignored(data: bytes) -> None:
    assert all(isinstance(one, LastRead) for one in checkpoint.decode(data).values())


def test_checkpoint_has_the_readings() -> None:
    rows = [
        Reading("mon_L3_00/mon_sub_L3_01", "mbm_local_bytes", parse_value("12")),
        Reading("d", "e", parse_value("?")),
    ]
    kept = checkpoint.with_readings({}, "now", rows)
    assert checkpoint.readings_of(checkpoint.decode(checkpoint.encode(kept))) == sorted(
        rows, key=lambda row: row.domain
    )
