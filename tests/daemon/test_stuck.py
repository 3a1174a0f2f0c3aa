# SPDX-License-Identifier: Apache-2.0
"""System calls that do not come back: what does not need them goes on."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import threading
from collections.abc import Callable

from resctrlmond.api.workers import Lane, Workers
from resctrlmond.daemon.startup import Exit
from resctrlmond.daemon.ticker import Ticker
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.control.messages import Operation
from tests.daemon.conftest import Machine

Start = Callable[[], "subprocess.Popen[bytes]"]


def test_eight_stuck_calls_keep_neither_list_nor_status_from_answering_nor_a_stop(
    machine: Machine, process: Start
) -> None:
    """The verbs shared eight threads: as many that hung in the kernel stopped every answer, and the tick."""
    machine.start()
    machine.call("Assign", key="before", pid=process().pid)
    machine.call("Status")
    Control(str(machine.top / "resctrl")).set_faults(Fault(on=Operation.MKDIR, milliseconds=60_000))
    ended: list[str] = []

    def hang(number: int) -> None:
        try:
            machine.call("Create", key=f"stuck-{number}")
        except ConnectionError:
            ended.append(f"{number}")

    callers = [threading.Thread(target=hang, args=(number,)) for number in range(9)]
    for caller in callers:
        caller.start()
    # All have written their records down, so they are at the kernel, or behind one that is.
    while len([group for group in machine.call("List")["groups"] if group["state"] == "pending"]) < 8:
        pass
    assert machine.group("before")["state"] == "active"
    status = machine.call("Status")
    assert all(caller.is_alive() for caller in callers)
    assert status["mounted"]
    assert (status["rmidsUsed"], status["classes"]) == (2, [""])
    assert any("no answer since" in problem for problem in status["problems"])
    assert machine.stop_in_spite_of_hanging_calls() == Exit.OK
    for caller in callers:
        caller.join(20)
    assert len(ended) == 9


def test_a_start_that_hangs_says_at_what_and_a_stop_does_not_wait_for_it(machine: Machine, process: Start) -> None:
    """Nobody could see why there was no daemon, and SIGTERM waited until systemd killed it."""
    machine.start()
    child = process()
    machine.call("Assign", key="hangs", pid=child.pid, claim="engine", endRule="container")
    machine.kill()
    child.kill()
    child.wait()
    while machine.told("", 0.01):
        pass  # what the first one said
    hang = Fault(on=Operation.READ, group="mon_groups/hangs", milliseconds=60_000, times=1)
    Control(str(machine.top / "resctrl")).set_faults(hang)
    began = machine.log.stat().st_size
    with machine.log.open("ab") as log:
        machine.daemon = subprocess.Popen(
            machine.command(), env={**os.environ, "NOTIFY_SOCKET": machine.notify_path}, stderr=log
        )
    assert machine.told("STATUS=") == [f"STATUS=opening resctrl at {machine.top}/resctrl"]
    (status,) = machine.told("STATUS=")
    assert status.startswith("STATUS=recovering, now at hangs:")
    assert machine.stop_in_spite_of_hanging_calls() == Exit.OK
    assert machine.told("STOPPING=1")
    assert "ready:" not in machine.log.read_text()[began:], "it stopped before the recovery was done"


def test_a_door_that_cannot_be_opened_leaves_none_open(machine: Machine) -> None:
    """What was opened before stayed open, and its threads were waited for."""
    machine.run.mkdir(exist_ok=True)
    machine.run.joinpath("org.resctrlmon.Manager").mkdir()
    with machine.log.open("ab") as log:
        done = subprocess.run(machine.command(), stderr=log, check=False, timeout=120)
    assert done.returncode != Exit.OK
    text = machine.log.read_text()
    assert "cannot listen: " in text
    assert "Traceback" not in text
    assert "resctrlmond: info: stopped\n" in text


def test_hanging_tick_is_left_and_reported() -> None:
    """The first of them hangs: others go on beside it, until no thread is left for one more."""
    go_on = threading.Event()
    begun: list[int] = []

    def tick() -> None:
        begun.append(len(begun))
        go_on.wait(60)

    async def run() -> None:
        workers = Workers()
        ticker = Ticker(workers, tick, hangs_s=0)
        for number in range(Lane.UPKEEP.value[1]):
            assert not ticker.is_stuck
            ticker.step()
            while len(begun) <= number:
                await asyncio.sleep(0.001)
        assert "has hung since" in ticker.problem
        ticker.step()
        assert ticker.is_stuck
        ticker.step()
        go_on.set()
        while ticker.is_stuck or ticker.problem:
            await asyncio.sleep(0.001)
        ticker.step()
        while len(begun) <= Lane.UPKEEP.value[1]:
            await asyncio.sleep(0.001)
        assert workers.close() == 0

    asyncio.run(run())


def test_a_tick_that_is_long_but_goes_on_does_not_hang() -> None:
    """A tick over workloads with thousands of control groups each took longer than one may: the next ones began
    beside it and took as long, until no thread was left and the watchdog ended the daemon."""
    go_on = threading.Event()
    begun: list[int] = []
    went_on = math.inf  # at any time later than the last look

    def tick() -> None:
        begun.append(len(begun))
        go_on.wait(60)

    async def run() -> None:
        nonlocal went_on
        workers = Workers()
        ticker = Ticker(workers, tick, hangs_s=0, last_progress=lambda: went_on)
        ticker.step()
        while not begun:
            await asyncio.sleep(0.001)
        ticker.step()
        assert (len(begun), ticker.problem) == (1, "")
        went_on = 0.0
        ticker.step()
        assert "has hung since" in ticker.problem
        go_on.set()
        while ticker.problem:
            await asyncio.sleep(0.001)
        assert workers.close() == 0

    asyncio.run(run())


def test_a_lane_that_is_full_holds_up_no_other() -> None:
    go_on = threading.Event()

    async def run() -> None:
        workers = Workers()
        stuck = [asyncio.ensure_future(workers.run(Lane.CHANGE, go_on.wait, 60)) for _ in range(9)]
        await asyncio.sleep(0)  # what is done at once is not waited for, and those have not begun yet
        for lane in set(Lane) - {Lane.CHANGE}:
            assert await workers.run(lane, lambda: "done") == "done"
        assert workers.close(0) == 8
        go_on.set()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert workers.close() == 0

    asyncio.run(run())
