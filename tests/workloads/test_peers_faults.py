# SPDX-License-Identifier: Apache-2.0
"""Faults of other owners of monitoring groups that no other test covers; tests/truth/peers.md lists all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from resctrlmond.resctrl.counters import Reading, parse_value
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.messages import Operation
from resctrlmond.workloads.figures import checkpoint
from resctrlmond.workloads.figures.accounting import totals
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import UID, Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]


def test_class_of_a_task_is_read_from_the_task_and_not_from_lists(host: Host, process: Start) -> None:
    """The fault: all tasks of all classes are read to find one of them, so an assignment takes the longer the more
    threads the host has.
    """
    host.make_class("gold")
    read: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and watching and str(arguments[0]).endswith("/tasks"):
            flags = arguments[2]
            if isinstance(flags, int) and not flags & os.O_WRONLY:
                read.append(str(arguments[0]))

    watching = True
    sys.addaudithook(hook)
    child = process()
    host.tree.write_task("gold", child.pid)
    record = assign(host.ctx, assignment("k", child.pid)).workload
    host.manager.maintenance.sweep("k")
    watching = False
    # The tasks of a new group are listed once, because an rmdir may have left a task with its RMID.
    assert read == [os.path.join(host.tree.full_path(record.first.ref), "tasks")]
    assert record.first.class_ == "gold"


def test_a_workload_that_comes_back_while_its_end_is_pending_keeps_its_new_group(host: Host, process: Start) -> None:
    """The fault: a removal that failed is tried again after the workload came back, and takes its new group away."""
    assign(host.ctx, assignment(UID, process().pid, "nri"))
    control = Control(host.mountpoint)
    control.set_faults(Fault(on=Operation.RMDIR, group=f"mon_groups/{UID}", answer="EIO", times=2))
    with pytest.raises(ResctrlError):
        release(host.ctx, UID, owner="nri")
    host.manager.maintenance.tick()
    assert host.get(UID).state is State.ENDING
    child = process()
    anew = assign(host.ctx, assignment(UID, child.pid, "nri")).workload
    for _ in range(3):
        host.manager.maintenance.tick()
    assert control.faults == []
    found = host.get(UID)
    assert (found.state, found.generation, found.first.nonce) == (State.ACTIVE, 2, anew.first.nonce)
    assert host.tree.membership(child.pid).group == UID
    release(host.ctx, UID, owner="nri")
    host.check()


def test_groups_created_during_maintenance_remain(host: Host) -> None:
    """The fault: the cleaner of unknown groups removes a group that is created at that moment."""
    over = threading.Event()
    raised: list[BaseException] = []

    def tick() -> None:
        try:
            while not over.is_set():
                host.manager.maintenance.tick()
        except BaseException as error:  # reported below
            raised.append(error)

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        for number in range(25):
            create(host.ctx, f"k{number}", owner="test")
            assert host.tree.find(host.get(f"k{number}").first.ref) is not None
    finally:
        over.set()
        ticking.join()
    assert raised == []
    assert {record.state for record in host.ctx.store.all()} == {State.IDLE}
    host.check()


def test_a_dip_of_a_counter_adds_nothing() -> None:
    """The fault: 100, 150, 148, 200 is reported as a rise of 102, and each dip adds more."""

    def read(number: int) -> list[Reading]:
        return [Reading("mon_L3_00", "mbm_total_bytes", parse_value(str(number)), 7)]

    kept: checkpoint.Checkpoint = {}
    for number in (150, 148, 200):
        kept = checkpoint.with_readings(kept, "now", read(number))
    (total,) = totals(read(100), checkpoint.readings_of(kept), past=checkpoint.histories(kept))
    # The kernel's counters never decrease, so a total after a decrease is not exact.
    assert (total.number, total.quality) == (100, Quality.ESTIMATED)
