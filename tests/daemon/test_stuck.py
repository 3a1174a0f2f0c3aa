# SPDX-License-Identifier: Apache-2.0
"""System calls that hang in the kernel delay only the work that needs them."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import threading

from resctrlmond.api.workers import Lane, Workers
from resctrlmond.daemon.startup import Exit
from resctrlmond.daemon.ticker import Ticker
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.messages import Operation
from tests.daemon.conftest import Machine, StartProcess, end


def test_eight_stuck_calls_block_neither_list_nor_status_nor_a_stop(machine: Machine, process: StartProcess) -> None:
    """With eight threads for all verbs, eight calls that hung in the kernel blocked every reply, and the tick."""
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
    # The records are written, so the calls are in the kernel, or wait for a thread.
    states: dict[str, str] = {}
    while list(states.values()).count("pending") < 8:
        states = {workload["key"]: workload["state"] for workload in machine.call("List")["workloads"]}
    assert states["before"] == "active"
    status = machine.call("Status")
    assert all(caller.is_alive() for caller in callers)
    assert status["mounted"]
    assert (status["rmidsUsed"], status["classes"]) == (2, [""])
    assert any("no answer since" in problem for problem in status["problems"])
    assert machine.stop_with_hanging_calls() == Exit.OK
    for caller in callers:
        caller.join(60)
    assert len(ended) == 9


def test_start_that_hangs_reports_its_workload_and_can_be_stopped(machine: Machine, process: StartProcess) -> None:
    """The cause of the missing daemon was not visible, and SIGTERM waited until systemd killed the daemon."""
    machine.start()
    child = process()
    machine.call("Assign", key="hangs", pid=child.pid, claim="engine", endRule="container")
    machine.kill()
    end(child)
    while machine.wait_for_notify("", 0.01):
        pass  # messages of the first daemon
    hang = Fault(on=Operation.READ, group="mon_groups/hangs", milliseconds=60_000, times=1)
    Control(str(machine.top / "resctrl")).set_faults(hang)
    offset = machine.log.stat().st_size
    with machine.log.open("ab") as log:
        machine.daemon = subprocess.Popen(
            machine.command(), env={**os.environ, "NOTIFY_SOCKET": machine.notify_path}, stderr=log
        )
    assert machine.wait_for_notify("STATUS=") == [f"STATUS=opening resctrl at {machine.top}/resctrl"]
    (status,) = machine.wait_for_notify("STATUS=")
    assert status.startswith("STATUS=recovering, now at hangs:")
    assert machine.stop_with_hanging_calls() == Exit.OK
    assert machine.wait_for_notify("STOPPING=1")
    assert "ready:" not in machine.log.read_text()[offset:], "the daemon finished the recovery before it stopped"


def test_daemon_that_cannot_listen_closes_its_other_interfaces(machine: Machine) -> None:
    """The interfaces that were open stayed open, and the daemon waited for their threads."""
    machine.run.mkdir(exist_ok=True)
    machine.run.joinpath("org.resctrlmon.Manager").mkdir()
    with machine.log.open("ab") as log:
        done = subprocess.run(machine.command(), stderr=log, check=False, timeout=120)
    assert done.returncode != Exit.OK
    text = machine.log.read_text()
    assert "cannot listen: " in text
    assert "Traceback" not in text
    assert "resctrlmond: info: stopped\n" in text


def test_hanging_tick_is_reported_and_further_ticks_run() -> None:
    """Further ticks run in other threads, until no thread is free."""
    go_on = threading.Event()
    started: list[int] = []

    def tick() -> None:
        started.append(len(started))
        go_on.wait(60)

    async def run() -> None:
        workers = Workers()
        ticker = Ticker(workers, tick, hangs_s=0)
        for number in range(Lane.UPKEEP.value[1]):
            assert not ticker.is_stuck
            ticker.step()
            while len(started) <= number:
                await asyncio.sleep(0.001)
        assert "has hung since" in ticker.problem
        ticker.step()
        assert ticker.is_stuck
        ticker.step()
        go_on.set()
        while ticker.is_stuck or ticker.problem:
            await asyncio.sleep(0.001)
        ticker.step()
        while len(started) <= Lane.UPKEEP.value[1]:
            await asyncio.sleep(0.001)
        assert workers.close() == 0

    asyncio.run(run())


def test_long_tick_that_makes_progress_does_not_count_as_hanging() -> None:
    """A tick over workloads with thousands of control groups took so long that further ticks were started, until no
    thread was free and the watchdog ended the daemon."""
    go_on = threading.Event()
    started: list[int] = []
    progress_s = math.inf  # the time of the last progress: later than any check

    def tick() -> None:
        started.append(len(started))
        go_on.wait(60)

    async def run() -> None:
        nonlocal progress_s
        workers = Workers()
        ticker = Ticker(workers, tick, hangs_s=0, last_progress=lambda: progress_s)
        ticker.step()
        while not started:
            await asyncio.sleep(0.001)
        ticker.step()
        assert (len(started), ticker.problem) == (1, "")
        progress_s = 0.0
        ticker.step()
        assert "has hung since" in ticker.problem
        go_on.set()
        while ticker.problem:
            await asyncio.sleep(0.001)
        assert workers.close() == 0

    asyncio.run(run())


def test_full_lane_does_not_block_other_lanes() -> None:
    go_on = threading.Event()

    async def run() -> None:
        workers = Workers()
        stuck = [asyncio.ensure_future(workers.run(Lane.CHANGE, go_on.wait, 60)) for _ in range(9)]
        await asyncio.sleep(0)  # let the tasks start
        for lane in set(Lane) - {Lane.CHANGE}:
            assert await workers.run(lane, lambda: "done") == "done"
        assert workers.close(0) == 8
        go_on.set()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert workers.close() == 0

    asyncio.run(run())
