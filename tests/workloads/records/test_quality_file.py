# SPDX-License-Identifier: Apache-2.0
"""``groups/KEY/quality`` is not better than what Read and Release answer with it, and at the end it is the same."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.api.translate import workload_of
from resctrlmond.resctrl.counters import Reading, parse_value
from resctrlmond.resctrl.witness import Watch
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Proof, State
from resctrlmond.workloads.records.quality_file import text, worse
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.totals import LiveReadings, used
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import remove_member
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import workload
from tests.workloads.conftest import Host, assignment, machine

Start = Callable[[], "subprocess.Popen[bytes]"]
OLD = "2000-01-01T00:00:00.000000Z"
EVENTS = ("activity", "core_energy", "mbm_local_bytes", "mbm_total_bytes")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with machine(tmp_path, "intel-aet", 8, residue=3) as (made, _):
        yield made


@pytest.fixture
def spawn(host: Host, process: Start) -> Callable[[], int]:
    """Start a process that has a virtual task; returns its id."""

    def start() -> int:
        return Control(host.mountpoint).spawn(tid=process().pid)

    return start


def written(host: Host, key: str = "k") -> str:
    return Path(host.run, "groups", key, "quality").read_text()


def qualities(host: Host, key: str = "k") -> dict[str, str]:
    return {line.split()[0]: line.split()[1] for line in written(host, key).splitlines()}


def all_of(quality: str) -> dict[str, str]:
    return dict.fromkeys(EVENTS, quality)


def released(host: Host, key: str = "k") -> list[Total]:
    """Release, and compare the file with the answer, and with what a new daemon answers."""
    totals = release(host.ctx, key, owner="test").totals
    assert written(host, key) == text(totals)
    folder = Path(host.run, "groups", key)
    # The file is final before completed_at is written.
    assert (folder / "quality").stat().st_mtime_ns <= (folder / "completed_at").stat().st_mtime_ns
    assert text(read(host.restart().context, key)[2]) == written(host, key)
    host.check()
    return totals


def test_each_event_has_a_line_from_creation_on_even_if_exact(host: Host, spawn: Callable[[], int]) -> None:
    create(host.ctx, "k", owner="test")
    assert written(host) == "".join(f"{name} exact\n" for name in EVENTS)
    assign(host.ctx, assignment("k", spawn()))
    host.manager.maintenance.tick()
    assert qualities(host) == all_of("exact")
    released(host)
    assert qualities(host) == all_of("exact")


def test_a_late_member_is_in_the_file_before_the_call_returns(host: Host, spawn: Callable[[], int]) -> None:
    assign(host.ctx, assignment("k", spawn()))
    assign(host.ctx, assignment("k", spawn(), late=True))
    assert qualities(host) == all_of("late")
    released(host)
    assert qualities(host) == all_of("late")


def test_the_workload_that_loses_a_task_is_late_in_its_file_at_once(host: Host, spawn: Callable[[], int]) -> None:
    pid = spawn()
    assign(host.ctx, assignment("k", pid))
    assign(host.ctx, assignment("other", pid, take_over=True))
    assert qualities(host) == all_of("late")
    released(host)


def test_a_reading_without_a_number_that_only_a_reader_sees_stays_in_the_file(
    host: Host, spawn: Callable[[], int]
) -> None:
    """Also over a kill, and in the reply of Release."""
    pid = spawn()
    record = assign(host.ctx, assignment("k", pid)).workload
    control = Control(host.mountpoint)
    control.set_faults(Fault(group=record.first.ref.path, event="mbm_total_bytes", answer="Unavailable"))
    reported = read(host.ctx, "k")[2]
    assert written(host) == text(reported)
    assert qualities(host)["mbm_total_bytes"] == "unknown"
    control.set_faults()
    control.run(pid, 1_000_000_000)
    host.restart()
    assert qualities(host)["mbm_total_bytes"] == "unknown"
    released(host)
    assert qualities(host) == all_of("exact") | {"mbm_total_bytes": "estimated"}


def test_a_number_that_only_a_reader_sees_is_not_forgotten(host: Host, spawn: Callable[[], int]) -> None:
    """Energy that read Unavailable at begin and end, and a number in between, is not 0 exact."""
    control, pid = Control(host.mountpoint), spawn()
    # Both events of the package: if one of them has a number, the RMID was active there.
    faults = [Fault(group="mon_groups/k", event=name, answer="Unavailable") for name in ("core_energy", "activity")]
    control.set_faults(*faults)
    assign(host.ctx, assignment("k", pid))
    assert qualities(host) == all_of("exact")
    control.set_faults()
    reported = next(one for one in read(host.ctx, "k")[2] if one.event.name == "core_energy")
    assert qualities(host)["core_energy"] == "estimated"
    control.set_faults(*faults)
    host.restart()
    total = next(one for one in released(host) if one.event.name == "core_energy")
    assert total.number
    assert (total.number, qualities(host)["core_energy"]) == (reported.number, "estimated")


def test_a_checkpoint_that_reads_no_number_is_in_the_file(host: Host, spawn: Callable[[], int]) -> None:
    record = assign(host.ctx, assignment("k", spawn())).workload
    Control(host.mountpoint).set_faults(
        Fault(group=record.first.ref.path, event="core_energy", answer="Error", times=1)
    )
    host.manager.maintenance.tick()
    assert qualities(host)["core_energy"] != "exact"
    released(host)
    assert qualities(host) == all_of("exact") | {"core_energy": "estimated"}


def test_file_is_estimated_after_a_domain_was_offline(host: Host, spawn: Callable[[], int]) -> None:
    assign(host.ctx, assignment("k", spawn()))
    host.manager.maintenance.tick()
    Control(host.mountpoint).offline("mon_L3_01")
    host.manager.maintenance.tick()
    assert qualities(host)["mbm_total_bytes"] == "estimated"
    Control(host.mountpoint).online("mon_L3_01")
    host.manager.maintenance.tick()
    assert written(host) == text(read(host.ctx, "k")[2])
    released(host)
    assert qualities(host)["mbm_total_bytes"] == "estimated"
    assert qualities(host)["core_energy"] == "exact"


@pytest.mark.parametrize("is_up", [True, False], ids=["while the daemon runs", "while it is down"])
def test_a_lost_group_is_estimated_and_so_is_its_next_run(host: Host, spawn: Callable[[], int], is_up: bool) -> None:
    record = assign(host.ctx, assignment("k", spawn())).workload
    host.manager.maintenance.tick()
    os.rmdir(host.tree.full_path(record.first.ref))
    if is_up:
        host.manager.maintenance.tick()
    else:
        host.restart()
    lost = host.get("k")
    assert lost.state is State.LOST
    assert qualities(host) == all_of("estimated")
    assert written(host) == text(read(host.ctx, "k")[2])
    assert assign(host.ctx, assignment("k", spawn())).workload.state is State.ACTIVE
    assert qualities(host) == all_of("estimated")
    assert "its group was lost" in written(host)
    released(host)


def test_a_pending_workload_has_no_file_and_is_late_from_its_baseline_on(
    host: Host, spawn: Callable[[], int]
) -> None:
    for number in range(8):
        assign(host.ctx, assignment(f"k{number}", spawn()))
    waiting = next(record for record in host.ctx.store.all() if record.state is State.PENDING)
    assert not os.path.exists(os.path.join(host.run, "groups", waiting.key))
    release(host.ctx, "k0", owner="test")
    while host.get(waiting.key).state is State.PENDING:
        Control(host.mountpoint).advance(1)
        host.manager.maintenance.tick()
    assert qualities(host, waiting.key) == all_of("late")
    released(host, waiting.key)


def test_a_second_group_in_another_class_is_in_the_file_of_the_workload(host: Host, spawn: Callable[[], int]) -> None:
    host.make_class("gold")
    first, second = spawn(), spawn()
    assign(host.ctx, assignment("k", first))
    host.tree.write_task("gold", second)
    assign(host.ctx, assignment("k", second))
    assert not list(Path(host.run, "groups", "k", "classes").glob("**/quality"))
    assert written(host) == text(read(host.ctx, "k")[2])
    released(host)


def test_final_qualities_are_computed_once(
    host: Host, spawn: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end values, of which there are hundreds on large machines, are in memory when they are written."""
    assign(host.ctx, assignment("k", spawn(), owner="oci", member="container"))
    reads: list[str] = []
    monkeypatch.setattr(Snapshots, "end_values", lambda _, subfolder: reads.append(subfolder))
    over = remove_member(host.ctx, "k", "container")
    assert (over.state, reads) == (State.COMPLETED, [])


@pytest.mark.parametrize("damage", ["missing", "better", "nonsense"])
def test_start_corrects_an_outdated_file(host: Host, spawn: Callable[[], int], damage: str) -> None:
    """A kill may come between the file and the record."""
    assign(host.ctx, assignment("k", spawn(), late=True))
    path, true = Path(host.run, "groups", "k", "quality"), written(host)
    if damage == "missing":
        path.unlink()
    else:
        path.write_text(true.replace("late", "exact") if damage == "better" else "\xff\n\n x")
    host.restart()
    assert written(host) == true


def test_read_succeeds_if_the_file_cannot_be_written(
    host: Host, spawn: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is removed then: it would be better than the answer. No disk can be filled for one file alone."""
    record = assign(host.ctx, assignment("k", spawn())).workload
    Control(host.mountpoint).set_faults(Fault(group=record.first.ref.path, event="core_energy", answer="Error"))
    rename = os.rename

    def refuse(source: str, target: str) -> None:
        if target.endswith("quality"):
            raise OSError(errno.ENOSPC, "full", target)
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        reported = read(host.ctx, "k")[2]
    assert {one.event.name for one in reported if one.quality != "exact"} == {"core_energy"}
    assert not Path(host.run, "groups", "k", "quality").exists()
    host.manager.maintenance.tick()
    assert qualities(host)["core_energy"] == "unknown"


def test_worse_line_of_two_texts_is_kept_for_each_event() -> None:
    assert worse("a exact\nb late\n", "a unknown why\nb exact\nc late\n") == "a unknown why\nb late\nc late\n"
    assert worse("", "a exact\n") == "a exact\n"
    assert worse("a better\n", "a late\n") == "a late\n"


def test_no_total_is_exact_while_a_member_is_being_put_in(host: Host, spawn: Callable[[], int]) -> None:
    """Its caller may have stopped waiting by now: this is found out after the last move only."""
    seen: list[tuple[dict[str, str], str, set[str]]] = []

    def observe() -> bool:
        record, _, totals = read(host.ctx, "k")
        seen.append((qualities(host), workload_of(record, None).baseline, {total.quality.value for total in totals}))
        return True

    assign(host.ctx, assignment("k", spawn(), is_awaited=observe))
    assert seen == [(all_of("late"), "late", {"late"})]
    record, _, totals = read(host.ctx, "k")
    assert (qualities(host), workload_of(record, None).baseline) == (all_of("exact"), "exact")
    assert {total.quality.value for total in totals} == {"exact"}
    host.check()


def test_file_is_not_exact_while_a_member_is_being_put_in(host: Host, spawn: Callable[[], int]) -> None:
    """There is no Read meanwhile."""
    seen: list[set[str]] = []

    def observe() -> bool:
        has_file = Path(host.run, "groups", "k", "quality").exists()
        seen.append(set(qualities(host).values()) if has_file else set())
        return True

    for member in ("first", "second"):
        assign(host.ctx, assignment("k", spawn(), member=member, is_awaited=observe))
        assert qualities(host) == all_of("exact")
    assert seen == [set(), {"late"}]
    host.check()


@pytest.mark.parametrize("is_reallocated", [False, True])
@pytest.mark.parametrize("has_begin", [False, True])
@pytest.mark.parametrize("event", ["mbm_total_bytes", "core_energy"])
@pytest.mark.parametrize("word", ["0", "7", "1.5", "Unavailable", "Unassigned", "Error", "strange"])
def test_run_that_begins_has_the_qualities_of_a_first_reading_like_its_baseline(
    tmp_path: Path, word: str, event: str, has_begin: bool, is_reallocated: bool
) -> None:
    snapshots = Snapshots(str(tmp_path), str(tmp_path))
    readings = [Reading(domain, event, parse_value(word + "\n")) for domain in ("mon_L3_00", "mon_L3_01")]
    readings += [Reading("mon_L3_00", "llc_occupancy", parse_value("1\n"))]
    snapshots.begin("k", "2026-01-01T00:00:00Z", "/x", sorted(readings, key=lambda each: (each.domain, each.event)))
    inodes = {"mon_L3_00": 1, "mon_L3_01": 2}
    known = workload("k", has_begin=has_begin, inodes=inodes, is_reallocated=is_reallocated)
    at_last = used(snapshots, known, {}, up_to_last=True)
    assert at_last == used(snapshots, known, {"k": LiveReadings(snapshots.begin_values("k"))})
    assert len(at_last) == 1


def test_begin_of_a_run_is_judged_by_its_own_readings(tmp_path: Path) -> None:
    """The qualities at the baseline are computed once for runs that differ only in the numbers."""
    (tmp_path / "groups").mkdir()
    snapshots = Snapshots(str(tmp_path / "groups"), str(tmp_path / "completed"))
    words = {"one": "5", "two": "6", "three": "Unavailable", "four": "7", "five": "Error"}
    found = {}
    for key, word in words.items():
        readings = [Reading("mon_L3_00", "mbm_total_bytes", parse_value(word))]
        snapshots.begin(key, OLD, "/live", readings)
        doubts = (doubt(Reason.NOT_INCLUDED, member="x", cause="why"),) if key == "four" else ()
        of = workload(key, has_begin=True, doubts=doubts, proof=Proof(watch=Watch(0, 0), until_ns=1))
        found[key] = used(snapshots, of, {}, up_to_last=True)[0].quality
    assert found["one"] is found["two"] is Quality.EXACT
    assert found["three"] is not Quality.EXACT
    assert found["four"] is Quality.LATE
    assert found["five"] is Quality.UNKNOWN


def test_final_totals_are_those_of_the_files(host: Host, spawn: Callable[[], int]) -> None:
    ended = []
    host.ctx.store.before_finish = lambda workload: ended.append((workload, host.ctx.quality.final_totals(workload)))
    assign(host.ctx, assignment("k", spawn()))
    release(host.ctx, "k", owner="test")
    ((workload, totals),) = ended
    assert totals == used(host.ctx.snapshots, workload, {})
    assert [total.domains for total in totals] == [total.domains for total in used(host.ctx.snapshots, workload, {})]
