# SPDX-License-Identifier: Apache-2.0
"""The sums have each run once, whatever fails, and no amount that a caller has got is taken back."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.api import translate
from resctrlmond.resctrl.counters import event
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.groups import removal
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import NameKind, Quality
from resctrlmond.workloads.model.workload import Member, PriorRuns, State, Workload, replace
from resctrlmond.workloads.records import atomic_files, sums, sums_format
from resctrlmond.workloads.records.store import Store
from resctrlmond.workloads.records.sums import OTHER, NameUse, Sums, SumsUse, run_of
from resctrlmond.workloads.records.sums_entries import MAX_NAME_LENGTH, MAX_NAMES
from resctrlmond.workloads.records.usage import Usage
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import save, workload
from tests.workloads.conftest import Host, assignment, machine
from tests.workloads.groups.test_cut import Fuse, cut

CTR = "4d" * 32
GIB = 2**30
TRAFFIC = "mbm_total_bytes"
NONE = ("", "", "", "")
Start = Callable[[], "subprocess.Popen[bytes]"]


def total(number: int | Decimal | None, quality: Quality = Quality.EXACT, name: str = TRAFFIC) -> Total:
    return Total(event(name), number, Quality.UNKNOWN if number is None else quality)


class Machine:
    """A store with sums in a folder, and the final totals of runs by key, without groups."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.totals: dict[str, list[Total]] = {}
        (top / "records").mkdir(exist_ok=True)
        self.start()

    def start(self, boot_id: str = "boot") -> str:
        """Start another daemon; return why the sums begin again."""
        self.store = Store(str(self.top / "records"))
        self.sums = self.store.sums = Sums(str(self.path), boot_id, lambda one: self.totals[one.key])
        unreadable = self.store.load()
        why = self.sums.load()
        self.sums.recover(self.store.by_key(), {item.key for item in unreadable})
        return why

    @property
    def path(self) -> Path:
        return self.top / "sums.json"

    @property
    def content(self) -> Any:
        return json.loads(self.path.read_bytes())

    def begin(self, key: str, **fields: Any) -> Workload:
        return save(self.store, workload(key, nonce=abs(hash(key)) + 1, **fields))

    def end(self, key: str, *totals: Total, state: State = State.COMPLETED) -> Workload:
        """End a run with these totals."""
        self.totals[key] = list(totals)
        return save(self.store, self.ended(key, state))

    def ended(self, key: str, state: State = State.COMPLETED) -> Workload:
        now = self.store.known(key)
        group = workload(key, state).first
        return replace(now.with_group(replace(now.first, state=group.state)), is_active=False)

    def read(self, *running: tuple[str, Total], begun: float = float("inf")) -> SumsUse:
        usages = [Usage(self.store.known(key), totals=(one,)) for key, one in running]
        return self.sums.read(usages, begun, self.store.get, list(NameKind))

    def tick(self) -> None:
        """Do what a tick of the manager does."""
        self.sums.write()
        for run in self.sums.unsettled():
            with self.store.transaction(run[0]) as txn:
                now = txn.find()
                if self.sums.settle(now, run) and now is not None and now.uncounted:
                    txn.save(replace(now, uncounted=False))


@pytest.fixture
def host(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def of(found: SumsUse, name: str = "", grouping: NameKind = NameKind.NAMESPACE) -> NameUse:
    return next((one for one in found.names[grouping] if one.name == name), NameUse(name, {}, 0, {}))


def amount(found: SumsUse, name: str = "", of_event: str = TRAFFIC) -> int | Decimal:
    """Return the amount of a namespace, without the runs that have no number."""
    amounts = of(found, name).amounts.get(of_event, {})
    return sum(number for quality, number in amounts.items() if quality is not Quality.UNKNOWN)


def no_space(*_: object, **_more: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """A function that makes the disk too full for the file of the sums, or not."""
    write, is_full = atomic_files.write_file, [False]

    def written(path: str, data: bytes, mode: int = 0o644) -> None:
        if is_full[0]:
            no_space()
        write(path, data, mode)

    monkeypatch.setattr(sums, "write_file", written)

    def set_full(value: bool) -> None:
        is_full[0] = value

    yield set_full


# -- names and qualities


def test_a_run_is_added_to_its_names(host: Machine) -> None:
    cgroup = "/sys/fs/cgroup/user.slice/user-1000.slice/session-1.scope"
    member = Member(id="m", kind="process", owner="me", cgroup=cgroup)
    host.begin("a", attributes={"pod.namespace": "shop"}, members=(member,), profile="fast")
    host.begin("b", attributes={"pod.namespace": "shop"})
    host.end("a", total(5), total(Decimal("0.25"), Quality.LATE, "core_energy"))
    host.end("b", total(7, Quality.ESTIMATED), total(None, name="core_energy"))
    found = host.read()
    assert of(found, "shop").amounts == {
        TRAFFIC: {Quality.EXACT: 5, Quality.ESTIMATED: 7},
        "core_energy": {Quality.LATE: Decimal("0.25"), Quality.UNKNOWN: 1},
    }
    assert of(found, "shop").ends == {Quality.LATE: 1, Quality.UNKNOWN: 1}
    for grouping, name in zip(list(NameKind)[1:], ("user.slice", "1000", "fast"), strict=True):
        assert of(found, name, grouping).amounts[TRAFFIC] == {Quality.EXACT: 5}
        assert of(found, "", grouping).amounts[TRAFFIC] == {Quality.ESTIMATED: 7}


def test_the_file_has_what_the_reading_has_after_a_restart(host: Machine) -> None:
    host.begin("a", attributes={"pod.namespace": "shop"})
    host.end("a", total(5), total(Decimal("0.25"), Quality.LATE, "core_energy"), state=State.LOST)
    before = host.read()
    assert host.start() == ""
    after = host.read()
    assert (after.names, after.since, after.lost) == (before.names, before.since, 1)
    assert after.reset == ""
    assert host.path.stat().st_mode & 0o777 == 0o640


def test_a_run_without_any_total_is_unknown(host: Machine) -> None:
    host.begin("a")
    host.end("a", state=State.FAILED)
    assert of(host.read()).ends == {Quality.UNKNOWN: 1}


def test_a_sum_is_not_exact_if_a_run_that_is_not_exact_has_counted_nothing(host: Machine) -> None:
    """The use of such a run may be missing."""
    for key, found in (("a", total(5)), ("b", total(0, Quality.ESTIMATED)), ("c", total(0, Quality.LATE))):
        host.begin(key)
        host.end(key, found)
    (shown,) = translate.name_sums(NameKind.NAMESPACE, of(host.read())).sums
    assert (shown.value, shown.late, shown.estimated) == ("5", "0", "0")
    host.begin("d", attributes={"pod.namespace": "shop"})
    (shown,) = translate.name_sums(NameKind.NAMESPACE, of(host.read(("d", total(5))), "shop")).sums
    assert (shown.value, shown.late, shown.estimated) == ("5", None, None)


def test_a_run_that_never_had_an_rmid_is_missing_in_each_event(host: Machine) -> None:
    """Its use is not in the sum, so the sum must not look exact."""
    host.begin("a")
    host.end("a", total(5))
    for key, members in (("b", (Member("m", "process", "me", started_at="now"),)), ("unused", ())):
        host.begin(key, members=members)
        running = host.sums.read([Usage(host.store.known(key))], float("inf"), host.store.get, list(NameKind))
        assert of(running).amounts == {TRAFFIC: {Quality.EXACT: 5, Quality.UNKNOWN: 1}}
        host.end(key)
        for _ in range(2):
            assert of(host.read()).amounts == {TRAFFIC: {Quality.EXACT: 5, Quality.UNKNOWN: 1}}
            host.start()


def test_gauges_are_not_added(host: Machine) -> None:
    host.begin("a")
    host.end("a", total(5, name="llc_occupancy"))
    assert of(host.read()).amounts == {}


def test_a_run_that_was_lost_and_resumed_is_added_once_with_all_its_parts(host: Machine) -> None:
    host.begin("a", claims=())
    lost = host.ended("a", State.LOST)
    claimed = lost.with_claim("me", "now")
    save(host.store, claimed)
    assert of(host.read()).ends == {}
    resumed = workload("a", nonce=9, generation=2, prior_runs=PriorRuns({TRAFFIC: "3"}, "lost"))
    save(host.store, resumed)
    host.end("a", total(8, Quality.ESTIMATED))
    found = host.read()
    assert (amount(found), of(found).ends, found.lost) == (8, {Quality.ESTIMATED: 1}, 1)


def test_names_beyond_the_limit_and_long_names_are_counted_together(host: Machine) -> None:
    for number in range(MAX_NAMES + 3):
        key = f"k{number}"
        host.begin(key, attributes={"pod.namespace": f"n{number}"})
        host.end(key, total(1))
    host.begin("long", attributes={"pod.namespace": "n" * (MAX_NAME_LENGTH + 1)})
    host.end("long", total(10))
    host.begin("none")
    host.end("none", total(100))
    for _ in range(2):
        found = host.read()
        names = [one.name for one in found.names[NameKind.NAMESPACE]]
        assert len(names) == MAX_NAMES + 2
        assert amount(found, OTHER) == 13
        assert amount(found, "") == 100
        assert amount(found, "n0") == 1
        assert host.start() == ""


def test_a_name_that_was_shown_keeps_its_place(host: Machine) -> None:
    """A running workload that is shown under its name must not end under the common one."""
    host.begin("first", attributes={"pod.namespace": "first"})
    assert amount(host.read(("first", total(4))), "first") == 4
    for number in range(MAX_NAMES):
        host.begin(f"k{number}", attributes={"pod.namespace": f"n{number}"})
        host.end(f"k{number}", total(1))
    host.tick()
    host.start()
    host.end("first", total(5))
    assert amount(host.read(), "first") == 5


# -- running workloads


def test_no_amount_falls_when_a_run_ends(host: Machine) -> None:
    host.begin("a")
    assert amount(host.read(("a", total(5)))) == 5
    assert of(host.read(("a", total(6)))).running == 1
    host.end("a", total(7))
    found = host.read()
    assert (amount(found), of(found).running) == (7, 0)


def test_a_final_total_below_the_shown_one_keeps_the_shown_one(host: Machine) -> None:
    """The counters of a lost group may have been shown and not saved."""
    host.begin("a")
    host.read(("a", total(5)))
    host.end("a", total(3))
    assert of(host.read()).amounts == {TRAFFIC: {Quality.ESTIMATED: 5}}


def test_a_shown_amount_whose_total_becomes_unknown_stays(host: Machine) -> None:
    host.begin("a")
    host.read(("a", total(5)))
    assert of(host.read(("a", total(None)))).amounts == {TRAFFIC: {Quality.ESTIMATED: 5}}
    host.end("a", total(None))
    assert of(host.read()).amounts == {TRAFFIC: {Quality.ESTIMATED: 5}}


def test_a_shown_amount_that_the_totals_at_the_end_lack_is_not_exact(host: Machine) -> None:
    host.begin("a")
    host.read(("a", total(5)))
    host.end("a", total(1, name="core_energy"))
    assert of(host.read()).amounts == {TRAFFIC: {Quality.ESTIMATED: 5}, "core_energy": {Quality.EXACT: 1}}
    host.begin("b")
    host.read(("b", total(5)))
    host.sums._final_totals = lambda _workload: [1 / 0]  # type: ignore[list-item]  # a defect
    save(host.store, host.ended("b"))
    assert of(host.read()).amounts[TRAFFIC] == {Quality.ESTIMATED: 10}
    assert of(host.read()).ends == {Quality.ESTIMATED: 2}


def test_a_workload_that_was_not_read_keeps_its_shown_amount(host: Machine) -> None:
    host.begin("a")
    host.read(("a", total(5)))
    assert amount(host.read()) == 5


def test_a_shown_amount_of_a_workload_that_cannot_be_read_is_not_exact(host: Machine) -> None:
    """It lacks what the workload has used since the last reading."""
    host.begin("a")
    host.read(("a", total(5)))
    unreadable = Usage(host.store.known("a"), error="the kernel does not answer")
    found = host.sums.read([unreadable], float("inf"), host.store.get, list(NameKind))
    assert of(found).amounts == {TRAFFIC: {Quality.ESTIMATED: 5}}
    assert of(host.read(("a", total(9)))).amounts == {TRAFFIC: {Quality.EXACT: 9}}
    host.end("a", total(9))
    assert of(host.read()).amounts == {TRAFFIC: {Quality.EXACT: 9}}


def test_a_reading_from_before_an_end_does_not_count_the_run_twice(host: Machine) -> None:
    before = host.begin("a")
    host.end("a", total(7))
    stale = Usage(before, totals=(total(5),))
    assert amount(host.sums.read([stale], 0.0, host.store.get, list(NameKind))) == 7


def test_a_run_between_the_file_and_its_record_counts_once(host: Machine) -> None:
    host.begin("a")
    ending = save(host.store, replace(host.ended("a", State.ENDING)))
    host.totals["a"] = [total(7)]
    assert host.sums.count(host.ended("a"))
    usage = Usage(ending, totals=(total(7),))
    assert amount(host.sums.read([usage], float("inf"), host.store.get, list(NameKind))) == 7


def test_use_after_a_change_of_the_name_is_added_to_the_new_name(host: Machine) -> None:
    host.begin("a")
    host.read(("a", total(5)))
    save(host.store, replace(host.store.known("a"), attributes={"pod.namespace": "shop"}))
    found = host.read(("a", total(8)))
    assert (amount(found, ""), amount(found, "shop")) == (5, 3)
    assert (of(found, "").running, of(found, "shop").running) == (0, 1)
    host.end("a", total(9))
    found = host.read()
    assert (amount(found, ""), amount(found, "shop")) == (5, 4)
    assert of(found, "shop").ends == {Quality.EXACT: 1}
    host.start()
    assert host.read().names == found.names


def test_a_restart_does_not_take_back_what_was_added_to_a_former_name(host: Machine) -> None:
    host.begin("a")
    host.read(("a", total(5)))
    save(host.store, replace(host.store.known("a"), attributes={"pod.namespace": "shop"}))
    host.read(("a", total(5)))
    host.tick()
    host.start()
    host.begin("other")
    host.end("other", total(0))  # writes the file before any reading
    host.start()
    for _ in range(2):
        found = host.read(("a", total(8)))
        assert (amount(found, ""), amount(found, "shop")) == (5, 3)
        host.start()
    host.end("a", total(9))
    host.start()
    found = host.read()
    assert (amount(found, ""), amount(found, "shop"), host.content["renamed"]) == (5, 4, [])
    assert of(found, "shop").ends == {Quality.EXACT: 1}


def test_a_renamed_run_that_a_start_does_not_find_is_not_taken_back(host: Machine) -> None:
    before = host.begin("a")
    host.read(("a", total(5)))
    save(host.store, replace(before, attributes={"pod.namespace": "shop"}))
    host.read(("a", total(8)))
    host.tick()
    os.unlink(host.top / "records" / "a.json")
    for _ in range(2):
        host.start()
        found = host.read()
        assert (amount(found, ""), amount(found, "shop"), host.content["renamed"]) == (5, 3, [])


def test_a_shown_run_that_is_undone_is_not_taken_back(host: Machine) -> None:
    host.begin("a")
    host.read(("a", total(5)))
    with host.store.transaction("a") as txn:
        txn.drop()
    found = host.read()
    assert (amount(found), of(found).ends) == (5, {})
    assert of(found).amounts == {TRAFFIC: {Quality.ESTIMATED: 5}}


# -- kills and failures


def test_a_kill_before_the_record_states_the_end_counts_the_run_once(host: Machine) -> None:
    host.begin("a")
    host.totals["a"] = [total(7)]
    host.sums.count(host.ended("a"))
    assert [one["key"] for one in host.content["counted"]] == ["a"]
    host.start()
    host.end("a", total(7))
    found = host.read()
    assert (amount(found), of(found).ends) == (7, {Quality.EXACT: 1})
    host.begin("b")
    host.end("b", total(1))
    assert [one["key"] for one in host.content["counted"]] == ["b"]
    host.start()
    assert amount(host.read()) == 8


def test_an_end_that_is_repeated_with_a_worse_quality_is_not_exact(host: Machine) -> None:
    host.begin("a")
    host.totals["a"] = [total(7)]
    host.sums.count(host.ended("a"))
    host.start()
    host.end("a", total(8, Quality.LATE))
    amounts = of(host.read()).amounts[TRAFFIC]
    assert {quality: number for quality, number in amounts.items() if number} == {Quality.LATE: 8}
    assert {quality: runs for quality, runs in of(host.read()).ends.items() if runs} == {Quality.LATE: 1}


def test_a_later_run_of_the_key_is_another_run(host: Machine) -> None:
    host.begin("a")
    host.totals["a"] = [total(7)]
    host.sums.count(host.ended("a"))
    save(host.store, workload("a", nonce=77, generation=2))
    host.start()
    host.end("a", total(7))
    assert amount(host.read()) == 14


def test_a_full_disk_does_not_keep_a_run_from_ending(host: Machine, full: Callable[[bool], None]) -> None:
    host.begin("a")
    full(True)
    assert host.end("a", total(7)).uncounted
    assert "cannot write" in host.sums.problem
    assert amount(host.read()) == 7
    full(False)
    host.tick()
    assert not host.store.known("a").uncounted
    assert host.sums.problem == ""
    host.start()
    assert amount(host.read()) == 7


@pytest.mark.parametrize("is_written", [False, True])
def test_a_kill_while_the_disk_is_full_loses_no_run(
    host: Machine, full: Callable[[bool], None], is_written: bool
) -> None:
    host.begin("a")
    full(True)
    host.end("a", total(7))
    full(False)
    if is_written:
        host.sums.write()
    for _ in range(2):
        host.start()
        assert amount(host.read()) == 7
        host.tick()
        assert not host.store.known("a").uncounted


def test_the_next_run_of_a_key_does_not_lose_an_end_that_is_not_in_the_file(
    host: Machine, full: Callable[[bool], None]
) -> None:
    host.begin("a")
    full(True)
    ended = host.end("a", total(7))
    full(False)
    save(host.store, workload("a", nonce=77, generation=2))
    assert amount(host.read()) == 7
    host.tick()
    # The Assign of the next run fails: the ended run is the current one again.
    with host.store.transaction("a") as txn:
        assert not txn.restore(ended).uncounted
    host.start()
    assert (amount(host.read()), of(host.read()).ends) == (7, {Quality.EXACT: 1})


def test_a_kill_after_the_begin_of_the_next_run_does_not_lose_an_end_that_was_not_in_the_file(
    host: Machine, full: Callable[[bool], None]
) -> None:
    host.begin("a")
    full(True)
    host.end("a", total(7))
    full(False)
    save(host.store, workload("a", nonce=77, generation=2))
    for _ in range(2):
        host.start()
        assert (amount(host.read()), of(host.read()).ends) == (7, {Quality.EXACT: 1})


def test_a_record_that_is_removed_does_not_lose_its_end(host: Machine, full: Callable[[bool], None]) -> None:
    host.begin("a")
    full(True)
    host.end("a", total(7))
    full(False)
    with host.store.transaction("a") as txn:
        txn.drop()
    host.start()
    assert amount(host.read()) == 7


def end_unwritten(host: Machine, full: Callable[[bool], None]) -> None:
    """End the runs b, with 7, and then a, with 8, which the file of the sums lacks, because the disk is full."""
    for key in ("a", "b"):
        host.begin(key)
    host.end("b", total(7))
    full(True)
    host.end("a", total(8))


@pytest.fixture(params=["replaced", "removed"])
def lacking(request: pytest.FixtureRequest, host: Machine, full: Callable[[bool], None]) -> Machine:
    """A host with a full disk, whose file of the sums lacks the run ``a``. The record of that run is gone."""
    end_unwritten(host, full)
    if request.param == "replaced":
        save(host.store, workload("a", State.ACTIVE, nonce=2, generation=2))
    else:
        with host.store.transaction("a") as txn:
            txn.drop()
    return host


def test_a_kill_does_not_leave_sums_that_lack_a_run_without_a_record(lacking: Machine) -> None:
    """The sums were exact without the run. Which run it was is not known, so the sums begin again."""
    before = lacking.read()
    assert amount(before) == 15
    problem = lacking.start()
    assert "it lacks a run whose record was replaced or removed" in problem
    kept = json.loads(Path(lacking.sums.set_aside_path).read_bytes())
    assert kept["sums"]["namespace"][""]["amounts"] == {TRAFFIC: {"exact": "7"}}
    found = lacking.read()
    assert (amount(found), of(found).ends) == (0, {})
    assert found.since > before.since
    assert found.reset in problem


def test_sums_are_believed_if_the_record_that_goes_is_of_a_run_that_they_have(
    host: Machine, full: Callable[[bool], None]
) -> None:
    """The record of a does not state yet that the file has the run."""
    for key in ("a", "b"):
        host.begin(key)
    full(True)
    host.end("a", total(8))
    full(False)
    assert host.sums.write()
    full(True)
    host.end("b", total(7))
    assert host.store.known("a").uncounted
    with host.store.transaction("a") as txn:
        txn.drop()
    assert host.start() == ""
    assert amount(host.read()) == 15


def test_a_run_without_a_record_is_written_when_there_is_space_again(
    lacking: Machine, full: Callable[[bool], None]
) -> None:
    full(False)
    for _ in range(2):
        lacking.tick()
        assert sorted(os.listdir(lacking.top)) == ["records", "sums.json"]
        assert lacking.start() == ""
        assert amount(lacking.read()) == 15
        assert sorted(os.listdir(lacking.top)) == ["records", "sums.json"]
    assert lacking.read().reset == ""


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "removed"])
def test_a_kill_loses_no_sum_if_the_record_could_not_go_either(
    host: Machine, full: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """The file had its other name already, and the start began the sums again, although the record had the run."""
    end_unwritten(host, full)
    with monkeypatch.context() as patched, pytest.raises(NotWritten):
        if is_replaced:
            patched.setattr("resctrlmond.workloads.records.store.write_file", no_space)
            save(host.store, workload("a", State.ACTIVE, nonce=2, generation=2))
        else:
            patched.setattr(os, "unlink", no_space)
            with host.store.transaction("a") as txn:
                txn.drop()
    assert host.start() == ""
    assert amount(host.read()) == 15


def test_a_kill_loses_no_sum_if_the_next_run_is_undone(host: Machine, full: Callable[[bool], None]) -> None:
    """Its record fits, and something else does not. Then the record of the lacking run is written again."""
    end_unwritten(host, full)
    with host.store.transaction("a") as txn:
        before = txn.workload
        txn.save(workload("a", State.ACTIVE, nonce=2, generation=2))
        txn.restore(before)
    assert host.start() == ""
    assert amount(host.read()) == 15


def test_a_record_that_is_kept_in_memory_only_does_not_stand_for_the_one_that_is_gone(
    host: Machine, full: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the next run was written, the undo was not, and neither is what a tick tries to write."""
    end_unwritten(host, full)
    with host.store.transaction("a") as txn, monkeypatch.context() as patched:
        before = txn.workload
        txn.save(workload("a", State.ACTIVE, nonce=2, generation=2))
        patched.setattr("resctrlmond.workloads.records.store.write_file", no_space)
        with contextlib.suppress(NotWritten):
            txn.restore(before)
        with contextlib.suppress(NotWritten):
            txn.save(txn.workload)
    assert "it lacks a run whose record was replaced or removed" in host.start()


def test_sums_that_lack_one_run_do_not_count_again_because_another_record_stays(
    lacking: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking.begin("c")
    lacking.end("c", total(4))
    with monkeypatch.context() as patched, pytest.raises(NotWritten):
        patched.setattr("resctrlmond.workloads.records.store.write_file", no_space)
        save(lacking.store, workload("c", State.ACTIVE, nonce=3, generation=2))
    assert "it lacks a run whose record was replaced or removed" in lacking.start()


def test_totals_that_cannot_be_read_are_added_later(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    host.begin("a")
    host.read(("a", total(5)))

    def fails(_: Workload) -> list[Total]:
        raise NotRead("cannot read the end values", path="/run/x", errno=5)

    with monkeypatch.context() as patched:
        patched.setattr(host.sums, "_final_totals", fails)
        assert host.end("a", total(7)).uncounted
        assert "the sums lack a run of a: /run/x: cannot read the end values" in host.sums.problem
        assert amount(host.read()) == 5
    host.tick()
    assert not host.store.known("a").uncounted
    assert amount(host.read()) == 7


@pytest.fixture
def unreadable(host: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after whose call the final totals of no run can be read."""

    def fails(_: Workload) -> list[Total]:
        raise NotRead("cannot read the end values", path="/run/x", errno=errno.EIO)

    return lambda: monkeypatch.setattr(host.sums, "_final_totals", fails)


def test_a_sum_is_not_exact_while_the_totals_of_a_run_cannot_be_read(
    host: Machine, unreadable: Callable[[], None]
) -> None:
    for key in ("read", "shown", "never-shown"):
        host.begin(key, members=(Member(id=key, owner="test", kind="process"),))
    host.end("read", total(7))
    host.read(("shown", total(5)))
    unreadable()
    host.end("shown", total(6))
    host.end("never-shown", total(8))
    found = of(host.read()).amounts[TRAFFIC]
    assert found == {Quality.EXACT: 7, Quality.ESTIMATED: 5, Quality.UNKNOWN: 1}
    host.tick()
    host.start()  # by which time they can be read
    found = of(host.read()).amounts[TRAFFIC]
    assert {quality: number for quality, number in found.items() if number} == {Quality.EXACT: 21}
    host.tick()
    assert not any(host.store.known(key).uncounted for key in ("shown", "never-shown"))


def test_end_values_of_a_run_that_could_not_be_read_are_read_once_in_each_tick(
    host: Machine, unreadable: Callable[[], None]
) -> None:
    host.begin("a", members=(Member(id="a", owner="test", kind="process"),))
    unreadable()
    host.end("a", total(8))
    assert host.sums.unsettled() == [run_of(host.store.known("a"))]


def test_a_run_whose_totals_can_never_be_read_is_missing(host: Machine, unreadable: Callable[[], None]) -> None:
    """Its key was used again before they could be read: it was forgotten, and the sum was exact."""
    for key in ("a", "b"):
        host.begin(key, members=(Member(id=key, owner="test", kind="process"),))
    host.end("b", total(7))
    unreadable()
    host.end("a", total(8))
    save(host.store, workload("a", State.ACTIVE, nonce=2, generation=2))
    for _ in range(2):
        host.tick()
        assert of(host.read()).amounts[TRAFFIC] == {Quality.EXACT: 7, Quality.UNKNOWN: 1}
        host.start()


def test_a_run_whose_totals_can_never_be_read_is_missing_after_an_early_kill(
    host: Machine, unreadable: Callable[[], None]
) -> None:
    """No tick has written the file between the end and the next run."""
    for key in ("a", "b"):
        host.begin(key, members=(Member(id=key, owner="test", kind="process"),))
    host.end("b", total(7))
    unreadable()
    host.end("a", total(8))
    save(host.store, workload("a", State.ACTIVE, nonce=2, generation=2))
    host.start()
    assert of(host.read()).amounts[TRAFFIC] == {Quality.EXACT: 7, Quality.UNKNOWN: 1}


def test_a_defect_does_not_keep_a_run_from_ending(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    host.begin("a")
    monkeypatch.setattr(sums_format, "_encode", no_space)
    assert host.end("a", total(7)).uncounted
    assert "out of date" in host.sums.problem


def test_a_record_that_cannot_be_saved_counts_once(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    host.begin("a")
    with monkeypatch.context() as patched:
        patched.setattr("resctrlmond.workloads.records.store.write_file", no_space)
        with pytest.raises(NotWritten):
            host.end("a", total(7))
    host.tick()
    assert amount(host.read()) == 7
    host.end("a", total(7))
    found = host.read()
    assert (amount(found), of(found).ends) == (7, {Quality.EXACT: 1})


def test_one_write_serves_the_ends_that_wait(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"k{number}" for number in range(20)]
    for key in keys:
        host.begin(key)
        host.totals[key] = [total(1)]
    write, writes, may_write = atomic_files.write_file, [], threading.Event()

    def written(path: str, data: bytes, mode: int = 0o644) -> None:
        writes.append(path)
        assert may_write.wait(60)
        write(path, data, mode)

    monkeypatch.setattr(sums, "write_file", written)
    threads = [threading.Thread(target=host.sums.count, args=(host.ended(key),)) for key in keys]
    for thread in threads:
        thread.start()
    while len(host.sums.unsettled()) < len(keys):
        threads[0].join(0.001)
    may_write.set()
    for thread in threads:
        thread.join()
    assert len(writes) <= 2
    assert len(host.content["counted"]) == len(keys)


def test_an_end_encodes_only_its_own_names(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        host.begin(f"k{number}", attributes={"pod.namespace": f"n{number}"})
        host.end(f"k{number}", total(1))
    encode, encoded = sums_format._encode, []

    def counted(name: str, of_name: Any) -> bytes:
        encoded.append(name)
        return encode(name, of_name)

    monkeypatch.setattr(sums_format, "_encode", counted)
    host.begin("new", attributes={"pod.namespace": "n7"})
    host.end("new", total(1))
    assert sorted(encoded) == ["", "", "", "n7"]


# -- files that cannot be used


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "Input data was truncated"),
        (b"", "Input data was truncated"),
        (b'{"version":2,"more":1}', "written by another version of resctrlmond"),
        (b'{"version":1}', "missing required field"),
        (b"[" * 100_000, ""),
    ],
)
def test_a_file_that_cannot_be_used_is_set_aside_and_the_sums_begin_again(
    host: Machine, content: bytes, why: str
) -> None:
    host.begin("a")
    host.end("a", total(7))
    before = host.read().since
    host.path.write_bytes(content)
    problem = host.start()
    assert why in problem
    assert "The sums begin again" in problem
    assert Path(host.sums.set_aside_path).read_bytes() == content
    found = host.read()
    assert found.since > before
    assert why in found.reset
    assert found.reset
    assert amount(found) == 0
    assert host.start() == ""
    assert host.read().reset == found.reset


def test_sums_that_begin_again_have_all_use_of_the_runs_that_have_not_ended(host: Machine) -> None:
    """Also if the file was removed. The runs that ended before are missing, and the reason is shown."""
    for key in ("a", "b"):
        host.begin(key)
    assert host.read().reset == ""
    host.read(("a", total(5)))
    host.end("b", total(7))
    before = host.read().since
    host.path.unlink()
    for _ in range(2):
        host.start()
        found = host.read(("a", total(6)))
        assert found.reset == "the file is missing"
        assert found.since > before
        assert of(found).amounts == {TRAFFIC: {Quality.EXACT: 6}}
    host.end("a", total(8))
    assert of(host.read()).amounts == {TRAFFIC: {Quality.EXACT: 8}}


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["sums"]["namespace"][""]["amounts"][TRAFFIC].update(exact="NaN"),
        lambda content: content["sums"]["namespace"][""]["amounts"][TRAFFIC].update(exact="-1"),
        lambda content: content["sums"]["namespace"][""]["amounts"][TRAFFIC].update(exact="1e9"),
        lambda content: content["sums"]["namespace"].update({"n" * 1000: content["sums"]["namespace"][""]}),
        lambda content: content["sums"]["user"].update(
            {f"{number}": content["sums"]["user"][""] for number in range(1000)}
        ),
    ],
)
def test_a_damaged_file_is_not_believed(host: Machine, change: Callable[[Any], None]) -> None:
    host.begin("a")
    host.end("a", total(7))
    content = host.content
    change(content)
    host.path.write_text(json.dumps(content))
    assert "The sums begin again" in host.start()


def test_a_file_that_cannot_be_set_aside_is_not_reported_as_kept(host: Machine) -> None:
    Path(host.sums.set_aside_path).mkdir()
    host.path.write_text("{}")
    why = host.start()
    assert "the file could not be kept as" in why
    assert "is kept" not in why


def test_a_file_from_before_the_boot_is_not_continued(host: Machine) -> None:
    host.begin("a")
    host.end("a", total(7))
    assert "before this boot" in host.start("other boot")
    assert amount(host.read()) == 0


def test_a_start_without_descriptors_does_not_reset_the_sums(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    host.begin("a")
    host.end("a", total(7))

    def no_descriptor(path: str, *_: object, **_more: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", no_descriptor)
        with pytest.raises(NotRead):
            Sums(str(host.path), "boot", lambda _: []).load()
    host.start()
    assert amount(host.read()) == 7


# -- the daemon on a simulated machine


@pytest.fixture(scope="module")
def fuse() -> Fuse:
    return Fuse()


def sums_of(manager: Manager) -> dict[str, int]:
    """Return the traffic by namespace."""
    found = manager.usages.read_sums()
    return {one.name: int(amount(found, one.name)) for one in found.names[NameKind.NAMESPACE]}


@pytest.mark.parametrize("verb", ["release", "end"])
def test_a_kill_at_each_change_of_an_end_counts_each_run_once(
    small_host: Host, process: Start, fuse: Fuse, verb: str
) -> None:
    """The truth are the final totals of each run, which its files state."""
    step, killed, truth = 0, True, 0
    while killed:
        child = process()
        manager = small_host.manager
        assign(manager.context, assignment(CTR, child.pid, "oci", member="c1"))
        if verb == "end":
            child.kill()
            child.wait()
            killed = cut(fuse, step, lambda: small_host.manager.maintenance.record_ends(CTR))
        else:
            killed = cut(fuse, step, lambda: release(small_host.ctx, CTR, owner="oci"))
        manager = small_host.restart()
        if not manager.context.store.known(CTR).state.is_over:
            release(manager.context, CTR, owner="oci")
        truth += int(next(one.number or 0 for one in read(manager.context, CTR)[2] if one.event.name == TRAFFIC))
        step += 1
        found = manager.usages.read_sums()
        assert sum(of(found).ends.values()) == step, f"after a kill before change {step - 1}"
        assert amount(found) == truth
        assert of(small_host.restart().usages.read_sums()).ends == of(found).ends
    assert step > 10


def test_random_workloads_have_the_sums_of_their_use(tmp_path: Path, process: Start) -> None:
    """Restarts, losses, changes of names and readings at any time: no sum falls, and all are true at the end."""
    choices = random.Random(20261125)
    with machine(tmp_path, "intel-rdt", 2000) as (host, control):
        truth: dict[str, int] = {}
        shown: dict[str, int] = {}
        running: dict[str, tuple[str, int]] = {}
        ended = 0
        for step in range(120):
            match choices.choice(["begin", "begin", "use", "use", "use", "end", "end", "read", "restart"]):
                case "begin":
                    key, namespace = f"k{step % 40}", choices.choice(["shop", "bank", ""])
                    if key in running:
                        continue
                    child = process()
                    control.spawn(tid=child.pid)
                    attributes = {"pod.namespace": namespace} if namespace else {}
                    assign(host.ctx, assignment(key, child.pid, attributes=attributes))
                    running[key] = namespace, child.pid
                case "use" if running:
                    namespace, pid = choices.choice(list(running.values()))
                    control.run(pid, 10**9)
                    truth[namespace] = truth.get(namespace, 0) + GIB
                case "end" if running:
                    key = choices.choice(list(running))
                    del running[key]
                    release(host.ctx, key, owner="test")
                    ended += 1
                case "restart":
                    host.restart()
                    host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9, reserve=0)
                case _:
                    now = sums_of(host.manager)
                    assert all(now.get(name, 0) >= value for name, value in shown.items()), (step, shown, now)
                    shown = now
        host.manager.usages._pass._last = None  # a reading of now
        assert {name: value for name, value in sums_of(host.manager).items() if value} == truth
        found = host.manager.usages.read_sums()
        assert sum(sum(one.ends.values()) for one in found.names[NameKind.NAMESPACE]) == ended
        assert sum(one.running for one in found.names[NameKind.NAMESPACE]) == len(running)
        for grouping in NameKind:
            amounts = [one.amounts.get(TRAFFIC, {}) for one in found.names[grouping]]
            assert sum(of_one.get(Quality.EXACT, 0) for of_one in amounts) == sum(truth.values())


def test_files_that_a_profile_does_not_keep_stay_until_the_sums_have_the_run(
    small_host: Host, process: Start, full: Callable[[bool], None]
) -> None:
    host = small_host
    assign(host.ctx, assignment(CTR, process().pid))
    with host.ctx.store.transaction(CTR) as txn:
        txn.save(replace(txn.workload, keeps_files=False))
    full(True)
    release(host.ctx, CTR, owner="test")
    host.manager.tick()
    assert host.get(CTR).uncounted
    full(False)
    host.restart()
    assert of(host.manager.usages.read_sums()).ends == {Quality.EXACT: 1}
    host.manager.tick()
    host.manager.tick()
    assert host.ctx.store.get(CTR) is None
    assert of(host.restart().usages.read_sums()).ends == {Quality.EXACT: 1}


def test_a_sum_does_not_fall_between_a_loss_and_the_next_run(tmp_path: Path, process: Start) -> None:
    with machine(tmp_path, "intel-rdt", 16) as (host, control):
        child = process()
        control.spawn(tid=child.pid)
        assign(host.ctx, assignment(CTR, child.pid))
        control.run(child.pid, 10**9)
        assert sums_of(host.manager) == {"": GIB}
        with host.ctx.store.transaction(CTR) as txn:
            os.rmdir(host.tree.full_path(txn.workload.first.ref))
            removal.lose(host.ctx, txn, "removed")
        assert host.get(CTR).is_interrupted
        assert sums_of(host.restart()) == {"": GIB}
        release(host.ctx, CTR, owner="test")
        found = host.manager.usages.read_sums()
        assert (amount(found), found.lost, of(found).ends) == (GIB, 1, {Quality.ESTIMATED: 1})
