# SPDX-License-Identifier: Apache-2.0
"""The use of all workloads, which concurrent callers read in one pass."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from resctrlmond.api import calls, types
from resctrlmond.api.access import Caller
from resctrlmond.api.verbs import VERBS
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.resctrl.tree import Tree
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.messages import Operation
from resctrlmond.workloads.groups import counters
from resctrlmond.workloads.machine import pools as machine
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.clock import boot_ns
from resctrlmond.workloads.model.states import Quality, worst
from resctrlmond.workloads.model.workload import State, replace
from resctrlmond.workloads.records import usage as usages
from resctrlmond.workloads.records.usage import SharedPass, Usage
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.wait import wait_until
from tests.workloads.builders import workload
from tests.workloads.conftest import Host, assignment, locked
from tests.workloads.conftest import machine as virtual_machine

Start = Callable[[], "subprocess.Popen[bytes]"]
CALLER = Caller(uid=0, groups=frozenset({0}), pid=1)


@pytest.fixture(autouse=True)
def _no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at each call, as for calls that are further apart than the interval."""
    monkeypatch.setattr(usages, "INTERVAL_S", 0.0)
    monkeypatch.setattr(usages, "AGAIN", 0.0)


@pytest.fixture
def long_interval(monkeypatch: pytest.MonkeyPatch, _no_interval: None) -> None:
    monkeypatch.setattr(usages, "INTERVAL_S", 3600.0)


def all_usage(host: Host) -> dict[str, Usage]:
    return {usage.workload.key: usage for usage in host.manager.usages.read_all(with_ended=True)}


def check_as_read(host: Host) -> None:
    """Check that the use of each workload is that of Read."""
    for key, usage in all_usage(host).items():
        record, readings, totals = read(host.ctx, key)
        proof = replace(usage.workload.proof, until_ns=record.proof.until_ns)  # each looks at the witness itself
        workload = replace(usage.workload, proof=proof)
        assert (workload, list(usage.readings), list(usage.totals)) == (record, readings, totals)
        assert not usage.error


def test_pass_reads_each_workload_once_if_there_is_no_witness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is exact then, so no second look can change that."""
    with virtual_machine(tmp_path, "intel-aet") as (host, control):
        control.set_witness(available=False)
        for key in "ab":
            create(host.ctx, key, owner="test")
        count, read_counters = [], counters.readings

        def and_count(*given: Any) -> Any:
            count.append(given)
            return read_counters(*given)

        monkeypatch.setattr(counters, "readings", and_count)
        assert {usage.totals[0].quality for usage in all_usage(host).values()} == {Quality.ESTIMATED}
        assert len(count) == 2


def test_pass_has_the_totals_of_each_workload(tmp_path: Path, process: Start) -> None:
    with virtual_machine(tmp_path, "intel-aet") as (host, control):
        for key, seconds in (("a", 1), ("b", 3)):
            tid = control.spawn(tid=process().pid)
            assign(host.ctx, assignment(key, tid, late=False))
            control.run(tid, seconds * 10**9)
        create(host.ctx, "empty", owner="test")
        check_as_read(host)
        energy = {
            key: next(total.number for total in usage.totals if total.event.name == "core_energy")
            for key, usage in all_usage(host).items()
        }
        assert energy["empty"] == 0
        assert energy["b"] == 3 * (energy["a"] or 0) > 0

        before = all_usage(host)["b"].totals
        release(host.ctx, "b", owner="test")
        check_as_read(host)
        ended = all_usage(host)["b"]
        assert (ended.workload.state, ended.read_at) == (State.COMPLETED, ended.workload.first.completed_at)
        assert [total.number for total in ended.totals] == [total.number for total in before]
        assert [usage.workload.key for usage in host.manager.usages.read_all()] == ["a", "empty"]


@pytest.mark.parametrize("machine", ["intel-snc2", "intel-aet"])
def test_parts_of_each_domain_add_up_to_the_totals(tmp_path: Path, process: Start, machine: str) -> None:
    with virtual_machine(tmp_path, machine) as (host, control):
        tid = control.spawn(tid=process().pid)
        assign(host.ctx, assignment("k", tid, late=False))
        control.run(tid, 10**9)
        [usage] = translated(host)
        assert usage.domains
        for total in usage.totals:
            parts = [use for use in usage.domains if use.event == total.event]
            assert sum(Decimal(use.value or "nan") for use in parts) == Decimal(total.value or "nan")
            assert worst(*(use.quality for use in parts if use.quality)) is total.quality
            assert total.quality is not Quality.UNKNOWN
        for level in usage.levels:
            parts = [use for use in usage.domains if use.event == level.event]
            assert sum(Decimal(use.value or "nan") for use in parts) == Decimal(level.value or "nan")
            assert {use.quality for use in parts} == {None}
        assert any(Decimal(total.value or 0) for total in usage.totals)
        assert not [use for use in usage.domains if "/" in use.domain]
        reply = VERBS["Read"].run(host.manager, types.KeyRequest(key="k"), CALLER)
        assert isinstance(reply, types.ReadReply)
        assert {(use.domain, use.event) for use in reply.domains or ()} == {
            (use.domain, use.event) for use in usage.domains
        }


def test_late_workload_is_late_for_the_same_reason_in_each_domain(host: Host, process: Start) -> None:
    assign(host.ctx, assignment("k", process().pid, late=True))
    [usage] = translated(host)
    reasons = {total.event: total.reason for total in usage.totals}
    assert all(reasons.values())
    for use in usage.domains or ():
        assert use.quality is None or (use.quality is Quality.LATE and use.reason == reasons[use.event])


def translated(host: Host) -> list[types.Usage]:
    """Return the reply of ReadAll with the use in each domain."""
    reply = VERBS["ReadAll"].run(host.manager, types.ReadAllRequest(domains=True), CALLER)
    assert isinstance(reply, types.ReadAllReply)
    plain = VERBS["ReadAll"].run(host.manager, types.ReadAllRequest(), CALLER)
    assert isinstance(plain, types.ReadAllReply)
    assert [usage.domains for usage in plain.usages] == [None] * len(reply.usages)
    return reply.usages


def test_files_of_an_ended_workload_are_read_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    create(host.ctx, "k", owner="test")
    release(host.ctx, "k", owner="test")
    first = all_usage(host)["k"]

    def fail(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("resctrlmond.workloads.verbs.read.current_totals", fail)
    assert all_usage(host)["k"] is first
    assert host.manager.usages.read_all() == []
    # They are kept only as long as callers ask for them.
    monkeypatch.setattr(usages, "FORGET_S", 0.0)
    host.manager.tick()
    with pytest.raises(AssertionError, match="read again"):
        all_usage(host)


def test_new_run_of_an_ended_workload_has_its_own_use(host: Host) -> None:
    for run in (1, 2):
        create(host.ctx, "k", owner="test")
        check_as_read(host)
        release(host.ctx, "k", owner="test")
        check_as_read(host)
        assert all_usage(host)["k"].workload.generation == run


def test_pending_workload_has_no_use(host: Host) -> None:
    control = Control(host.mountpoint)
    control.set_faults(Fault(on=Operation.MKDIR, group="mon_groups/k", answer="ENOSPC"))
    try:
        create(host.ctx, "k", owner="test")
        (usage,) = host.manager.usages.read_all()
    finally:
        control.set_faults()
    assert (usage.workload.state, usage.read_at, usage.readings, usage.totals) == (State.PENDING, "", (), ())


def test_age_of_a_workload_does_not_change_with_the_system_clock(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only wall times were replied, and a workload that had begun before the clock was set was years old."""
    assign(host.ctx, assignment("k", process().pid))
    monkeypatch.setattr("resctrlmond.workloads.verbs.read.utc_now", lambda: "2099-01-01T00:00:00.000000Z")
    monkeypatch.setattr("resctrlmond.workloads.groups.removal.utc_now", lambda: "2099-01-01T00:00:00.000000Z")
    for is_over in (False, True):
        (usage,) = calls.run_read_all(host.manager, types.ReadAllRequest(with_ended=True), CALLER).usages
        reply = calls.run_read(host.manager, types.KeyRequest(key="k"), CALLER)
        assert (usage.read_at or "").startswith("2099")
        for found in (usage, reply):
            begun_ns, read_ns = found.workload.created_ns, found.read_ns
            assert begun_ns and read_ns
            assert begun_ns < read_ns <= boot_ns()
            assert found.workload.completed_ns == (read_ns if is_over else None)
        if not is_over:
            release(host.ctx, "k", owner="test")


def test_late_workload_is_late(host: Host, process: Start) -> None:
    assign(host.ctx, assignment("k", process().pid, late=True))
    (usage,) = host.manager.usages.read_all()
    assert {total.quality for total in usage.totals} == {Quality.LATE}


def test_workload_that_cannot_be_read_does_not_keep_others_from_being_read(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in "abc":
        create(host.ctx, key, owner="test")
    read = host.tree.read

    def fail_for_b(ref: object) -> object:
        if getattr(ref, "name", "") == "b":
            raise NotRead("cannot read the counters", path="b", errno=5)
        return read(ref)  # type: ignore[arg-type]

    # The simulator's faults are values of counters. An error of the call itself is rare.
    monkeypatch.setattr(host.tree, "read", fail_for_b)
    found = all_usage(host)
    assert {key: bool(usage.totals) for key, usage in found.items()} == {"a": True, "b": False, "c": True}
    assert "cannot read the counters" in found["b"].error


def test_locked_ended_workload_does_not_block(host: Host) -> None:
    create(host.ctx, "k", owner="test")
    release(host.ctx, "k", owner="test")
    with locked(host, "k"):
        assert all_usage(host)["k"].error == "another call changes it now"
    check_as_read(host)


def _reader(counted: list[int]) -> Iterator[Usage]:
    counted.append(1)
    yield Usage(workload("k", State.IDLE))


@pytest.mark.usefixtures("long_interval")
def test_calls_within_the_interval_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    shared = SharedPass(lambda: tuple(_reader(counted)))
    assert shared.get() is shared.get()
    assert len(counted) == 1
    monkeypatch.setattr(usages, "INTERVAL_S", 0.0)
    assert shared.get() is not shared.get()
    assert len(counted) == 3


def test_calls_share_a_pass_as_long_again_as_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds of groups, a pass was too old for the sums of the scrape for which it was made."""
    counted: list[int] = []

    def read() -> tuple[Usage, ...]:
        now_s[0] += 3.0
        return tuple(_reader(counted))

    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(usages, "AGAIN", 1.0)
    shared = SharedPass(read)
    first = shared.get()
    now_s[0] += 2.9
    assert shared.get() is first
    now_s[0] += 0.2
    assert shared.get() is not first
    assert len(counted) == 2


@pytest.mark.usefixtures("long_interval")
def test_call_during_a_pass_waits_for_it_and_gets_its_result() -> None:
    begun, may_end = threading.Event(), threading.Event()
    counted: list[int] = []

    def read() -> Iterator[Usage]:
        begun.set()
        assert may_end.wait(60)
        yield from _reader(counted)

    shared = SharedPass(lambda: tuple(read()))
    found: list[tuple[Usage, ...]] = []
    threads = [threading.Thread(target=lambda: found.append(shared.get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert len(counted) == 1
    assert found[0] is found[1] is found[2]


@pytest.mark.usefixtures("long_interval")
def test_pass_that_hangs_in_the_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hang() -> Iterator[Usage]:
        begun.set()
        assert may_end.wait(60)
        yield from ()

    monkeypatch.setattr(usages, "PATIENCE_S", 0.01)
    shared = SharedPass(lambda: tuple(hang()))
    thread = threading.Thread(target=shared.get)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(NotRead, match="the kernel has not answered since 20"):
        shared.get()
    shared.forget_old()
    may_end.set()
    thread.join(60)
    assert shared.get() == ()


@pytest.mark.usefixtures("long_interval")
def test_pass_without_callers_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    shared = SharedPass(lambda: tuple(_reader(counted)))
    shared.get()
    shared.forget_old()
    shared.get()
    assert len(counted) == 1
    monkeypatch.setattr(usages, "FORGET_S", 0.0)
    shared.forget_old()
    shared.get()
    assert len(counted) == 2


@pytest.mark.usefixtures("long_interval")
def test_pass_that_fails_is_tried_again_by_the_next_call() -> None:
    counted: list[int] = []

    def fail_once() -> Iterator[Usage]:
        yield from _reader(counted)
        if len(counted) == 1:
            raise NotRead("cannot list")

    shared = SharedPass(lambda: tuple(fail_once()))
    with pytest.raises(NotRead):
        shared.get()
    assert len(shared.get()) == 1


def test_workloads_that_come_and_go_during_passes(host: Host) -> None:
    """Each workload is in each pass at most once, and no pass fails."""
    is_over = threading.Event()
    passes: list[list[Usage]] = []

    def read() -> None:
        while not is_over.is_set():
            passes.append(host.manager.usages.read_all(with_ended=True))
            time.sleep(0.005)  # else the calls below wait for Python's lock most of the time

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(60):
            key = f"k{number % 3}"
            create(host.ctx, key, owner="test")
            release(host.ctx, key, owner="test")
        wait_until(lambda: len(passes) > 2)
    finally:
        is_over.set()
        reader.join(60)
    for found in passes:
        keys = [usage.workload.key for usage in found]
        assert keys == sorted(set(keys))
        assert all(usage.totals or usage.error or not usage.workload.state.has_group for usage in found)


@pytest.mark.parametrize(
    "reading",
    [
        (counters, "readings", lambda manager: manager.usages.read_all()),
        (machine, "read_class", lambda manager: manager.machine.get()),
        (counters, "readings", lambda manager: manager.usages.read_sums()),
        (Tree, "capacity", lambda manager: manager.watcher.look()),
    ],
    ids=["ReadAll", "Machine", "Sums", "Status"],
)
def test_reading_for_a_scrape_that_hangs_delays_no_start_and_no_end(
    host: Host,
    process: Start,
    monkeypatch: pytest.MonkeyPatch,
    reading: tuple[ModuleType | type, str, Callable[[Manager], object]],
) -> None:
    """A file of a simulation that hangs stops the whole simulation, so the reading stops before the file."""
    reached, go_on = threading.Event(), threading.Event()
    place, function, read = reading
    original = getattr(place, function)

    def hang(*arguments: Any) -> Any:
        thread = threading.current_thread()
        # Status looks at the tree in a thread of its own.
        if thread is scrape or thread.name == "survey":
            reached.set()
            go_on.wait()
        return original(*arguments)

    assign(host.ctx, assignment("a", process().pid))
    read(host.manager)  # the pools of the machine begin with the first reading
    monkeypatch.setattr(place, function, hang)
    scrape = threading.Thread(target=read, args=(host.manager,))
    scrape.start()
    try:
        assert reached.wait(60)
        for key in ("b", "a"):
            assert assign(host.ctx, assignment(key, process().pid)).moved.moved == 1
            assert release(host.ctx, key, owner="test").completed
    finally:
        go_on.set()
        scrape.join()
