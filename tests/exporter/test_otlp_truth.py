# SPDX-License-Identifier: Apache-2.0
"""The sums of a receiver of OTLP are what each workload used, over refused pushes and restarts of both processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.exporter.metrics import EVENT_METRICS
from resctrlmond.exporter.otlp.figures import nanoseconds
from resctrlmond.exporter.otlp.points import name_of, of_workload
from resctrlmond.sim.control.client import Control
from tests.exporter.conftest import Machine, machine_of
from tests.exporter.otlp_receiver import Received, over_grpc, over_http
from tests.exporter.pushing import PushProcess
from tests.truth.record import bounds, counted_events, used_in_groups_by
from tests.wait import wait_until

_SCRIPT = "read go; i=0; while [ $i -lt 5000 ]; do i=$((i+1)); done"
_BUSY = "while :; do :; done"
# Sums of floating-point numbers.
_ACCURACY = 1e-9

Totals = dict[str, Decimal]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    # The energy of a run is not exact if its RMID has never counted before.
    with machine_of(tmp_path, "intel-aet", residue=1) as machine:
        yield machine


def run(machine: Machine, key: str, namespace: str = "shop") -> tuple[dict[str, Any], Totals]:
    """Run a short workload, and return it with its use, which the simulator has recorded."""
    machine.call("Create", key=key, claim="me", attributes={"pod.namespace": namespace})
    with subprocess.Popen(["sh", "-c", _SCRIPT], stdin=subprocess.PIPE) as child:
        machine.call("Assign", key=key, pid=child.pid, late=False, claim="me")
        child.communicate(b"\n")
    return released(machine, key, child.pid)


def released(machine: Machine, key: str, pid: int) -> tuple[dict[str, Any], Totals]:
    """End a workload whose process has ended."""
    reply = machine.call("Release", key=key, claim="me")
    assert machine.simulation
    profile = machine.simulation.profile
    recorded = used_in_groups_by(Control(machine.simulation.mountpoint), pid)
    totals = {of["event"]: of for of in reply["totals"]}
    for name, event in counted_events(profile).items():
        assert totals[name]["quality"] in ("exact", "late")
        assert Fraction(totals[name]["value"]) in bounds(profile, event, recorded), (name, recorded)
    return reply["workload"], {name: Decimal(of["value"]) for name, of in totals.items()}


def differences(received: Received, workload: dict[str, Any], used: Totals) -> list[str]:
    """Compare what the receiver has of a run with its actual use."""
    found = []
    for event, value in used.items():
        row = EVENT_METRICS[event]
        of = {f"resctrl_{row.workload.labels[-1]}": row.label} if row.label else {}
        points = [
            one
            for one in received.all(of_workload(row).name, resctrl_workload_key=workload["key"], **of)
            if one.of("resctrl.workload.generation") == workload["generation"]
        ]
        pushed = Received()
        pushed.points = points
        total = pushed.used("")
        if abs(total - value) > Decimal(_ACCURACY) * value:
            found.append(f"{workload['key']} used {value} of {event}; the receiver has {total}")
    return found


def has_end(received: Received, workload: dict[str, Any]) -> bool:
    """Return whether the receiver has the final figures of a run."""
    end_ns = nanoseconds(workload["completedAt"])
    points = received.all(resctrl_workload_key=workload["key"])
    return any(
        one.time_ns >= end_ns and one.of("resctrl.workload.generation") == workload["generation"] for one in points
    )


def quiet(received: Received, gate: threading.Event) -> None:
    """Refuse all, and wait for a push: the exporter knows what was accepted before."""
    gate.clear()
    wanted = received.requests + 2
    wait_until(lambda: received.requests >= wanted)


@pytest.mark.parametrize(("temporality", "protocol"), [("delta", "http/protobuf"), ("cumulative", "grpc")])
def test_receiver_has_what_each_workload_used(machine: Machine, temporality: str, protocol: str) -> None:
    machine.start()
    gate, numbers = threading.Event(), itertools.count()
    gate.set()
    with contextlib.ExitStack() as stack:
        url, received = stack.enter_context(over_grpc() if protocol == "grpc" else over_http())
        # Each third message is refused.
        received.accepts = lambda: gate.is_set() and next(numbers) % 3 != 0
        options = ["--otlp-protocol", protocol, "--otlp-temporality", temporality]
        options += ["--otlp-state", str(machine.top / "state")]
        exporter = PushProcess(machine.top, machine.socket, url, *options)
        stack.callback(exporter.close)
        busy = subprocess.Popen(["sh", "-c", _BUSY])
        stack.callback(busy.wait)
        stack.callback(busy.kill)
        machine.call("Machine")  # the pools begin
        machine.call("Assign", key="busy", pid=busy.pid, claim="me")
        exporter.start()
        runs = []
        for number in range(24):
            runs.append(run(machine, f"short-{number}"))
            match number % 8:
                case 2:
                    machine.kill()
                    machine.start()
                case 4:
                    quiet(received, gate)
                    exporter.kill()
                    runs.append(run(machine, f"unseen-{number}"))
                    gate.set()
                    exporter.start()
                case 6:
                    exporter.stop()
                    exporter.start()
        busy.kill()
        busy.wait()
        long, of_long = released(machine, "busy", busy.pid)
        for workload, _ in [*runs, (long, of_long)]:
            wait_until(lambda workload=workload: has_end(received, workload))  # type: ignore[misc]
        wait_until(lambda: ended(received) > len(runs))
        everything = [*(totals for _, totals in runs), of_long]
        wait_until(lambda: is_in_pool(received, everything))
        assert exporter.stop() == 0
        assert is_in_pool(received, everything)
        assert differences(received, long, of_long) == []
        faults = [fault for workload, used in runs for fault in differences(received, workload, used)]
        assert faults == []
        for event in runs[0][1]:
            row = EVENT_METRICS[event]
            assert row.accounted is not None
            of = {f"resctrl_{row.accounted.labels[-1]}": row.label} if row.label else {}
            total = received.used(name_of(row.accounted).name, resctrl_by="namespace", resctrl_name="shop", **of)
            used = sum(totals[event] for _, totals in runs)
            assert abs(total - used) <= Decimal(_ACCURACY) * used, event
        check_streams(received, temporality)


def is_in_pool(received: Received, runs: Sequence[Totals]) -> bool:
    """Return whether the pool of workloads has the use of these runs, and no other one."""
    for event in runs[0]:
        row = EVENT_METRICS[event]
        of = {f"resctrl_{row.machine.labels[-1]}": row.label} if row.label else {}
        total = received.used(name_of(row.machine).name, resctrl_pool="tracked", **of)
        used = sum(totals[event] for totals in runs)
        if abs(total - used) > Decimal(_ACCURACY) * used:
            return False
    return True


def ended(received: Received) -> Decimal:
    return received.used("resctrl.ends")


def check_streams(received: Received, temporality: str) -> None:
    """Check that no counter falls with the same start, and that no two deltas overlap."""
    streams: dict[object, list[Any]] = {}
    for point in received.all():
        if point.temporality:
            streams.setdefault(point.stream, []).append(point)
    for points in streams.values():
        assert all(point.start_ns <= point.time_ns for point in points)
        for before, after in itertools.pairwise(points):
            if temporality == "delta":
                assert after.start_ns >= before.time_ns
                assert after.value >= 0
            elif before.start_ns == after.start_ns:
                assert (after.value, after.time_ns) >= (before.value, before.time_ns)


@pytest.mark.parametrize("temporality", ["delta", "cumulative"])
def test_runs_of_one_key_between_two_pushes(machine: Machine, temporality: str) -> None:
    """Only Watch has the ends of runs whose key is used again, or whose files are removed."""
    machine.start()
    gate = threading.Event()
    gate.set()
    with contextlib.ExitStack() as stack:
        url, received = stack.enter_context(over_http())
        received.accepts = gate.is_set
        options = ["--otlp-temporality", temporality, "--otlp-state", str(machine.top / "state")]
        options += ["--log-level", "debug"]
        exporter = stack.enter_context(contextlib.closing(PushProcess(machine.top, machine.socket, url, *options)))
        exporter.start()
        first = run(machine, "again")
        wait_until(lambda: has_end(received, first[0]))
        # Its pushes do not wait for that.
        wait_until(lambda: "watching the workloads" in exporter.log.read_text())
        machine.call("Create", key="again", claim="me")
        wait_until(lambda: received.all(resctrl_workload_key="again", resctrl_workload_generation=2))
        machine.call("Release", key="again", claim="me")
        quiet(received, gate)
        runs = [first, *(run(machine, "again") for _ in range(4))]
        gate.set()
        for workload, _ in runs:
            wait_until(lambda workload=workload: has_end(received, workload))  # type: ignore[misc]
        faults = [fault for workload, used in runs for fault in differences(received, workload, used)]
        assert faults == []


def has_saved(state: Path, ends: int) -> bool:
    """Return whether the state has this number of ends that wait."""
    return len(json.loads(state.read_text())["ends"]) == ends


@pytest.mark.parametrize("temporality", ["delta", "cumulative"])
def test_ends_survive_a_kill_while_the_receiver_is_down(machine: Machine, temporality: str) -> None:
    """The daemon lists only the last run of a key, so only the exporter has the ends of the others."""
    machine.start()
    gate, state = threading.Event(), machine.top / "state"
    with contextlib.ExitStack() as stack:
        url, received = stack.enter_context(over_http())
        received.accepts = gate.is_set
        options = ["--otlp-temporality", temporality, "--otlp-state", str(state)]
        options += ["--log-level", "debug"]
        exporter = stack.enter_context(contextlib.closing(PushProcess(machine.top, machine.socket, url, *options)))
        runs = []
        for number in range(1, 4):
            exporter.start()
            text = "watching the workloads"
            wait_until(lambda number=number, text=text: exporter.log.read_text().count(text) == number)  # type: ignore[misc]
            runs += [run(machine, "again") for _ in range(3)]
            # A push begins after the ends, and saves them.
            wait_until(partial(has_saved, state, len(runs)))
            exporter.kill()
        machine.call("Create", key="again", claim="other")
        gate.set()
        exporter.start()
        for workload, _ in runs:
            wait_until(lambda workload=workload: has_end(received, workload))  # type: ignore[misc]
        faults = [fault for workload, used in runs for fault in differences(received, workload, used)]
        assert faults == []
        assert exporter.stop() == 0
        check_streams(received, temporality)


def test_run_that_continues_a_lost_one_is_not_counted_twice(machine: Machine) -> None:
    """The totals of a run after a loss include those of the lost one."""
    machine.start()
    with contextlib.ExitStack() as stack:
        url, received = stack.enter_context(over_http())
        exporter = stack.enter_context(contextlib.closing(PushProcess(machine.top, machine.socket, url)))
        busy = subprocess.Popen(["sh", "-c", _BUSY])
        stack.callback(busy.wait)
        stack.callback(busy.kill)
        machine.call("Assign", key="busy", pid=busy.pid, claim="me")
        exporter.start()
        wait_until(lambda: any(one.value for one in received.all("resctrl.workload.core_energy")))
        (group,) = (machine.top / "resctrl" / "mon_groups").iterdir()
        group.rmdir()
        wait_until(lambda: machine.call("Get", key="busy")["workload"].get("loss"))
        busy.kill()
        reply = machine.call("Release", key="busy", claim="me")
        assert reply["workload"]["generation"] == 2
        wait_until(lambda: any(has_time(received, reply["workload"]["completedAt"])))
        (used,) = (Decimal(of["value"]) for of in reply["totals"] if of["event"] == "core_energy")
        total = received.used("resctrl.workload.core_energy", resctrl_workload_key="busy")
        assert abs(total - used) <= Decimal(_ACCURACY) * used
        assert received.all("resctrl.workload.inexact", resctrl_event="core_energy", resctrl_quality="estimated")


def has_time(received: Received, time: str) -> Iterator[bool]:
    return (one.time_ns >= nanoseconds(time) for one in received.all("resctrl.workload.core_energy"))
