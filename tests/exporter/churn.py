# SPDX-License-Identifier: Apache-2.0
"""Short workloads without pause, with kills of the daemon and of the exporter, while a real Prometheus scrapes.

The last value of each series in Prometheus is compared with what the daemon reported for each workload.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from resctrlmond.exporter.metrics import EVENT_METRICS
from tests.daemon.conftest import Machine, end
from tests.exporter.conftest import machine_of, start
from tests.exporter.prometheus import Prometheus, Series, running
from tests.wait import wait_until

# After this number of workloads, something is killed: the daemon and the exporter in turn.
_KILL_EVERY = 10
_SCRIPT = "read go; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"
_BUSY = "while :; do :; done"

# The labels and the values of the counters of one metric at the end of their workload.
Ends = dict[str, dict[frozenset[tuple[str, str]], float]]


@dataclass(slots=True)
class Outcome:
    """Numbers of events, and the faults that were found."""

    workloads: int = 0
    kills: int = 0
    samples: int = 0
    starts: int = 0
    faults: list[str] = field(default_factory=list)


def churn(top: Path, seconds: float, interval_s: int) -> Outcome:
    """Run workloads for some time, and check what Prometheus has then, which scrapes every ``interval_s``.

    A slow machine takes longer: the daemon and the exporter are killed once at least.
    """
    outcome, ends = Outcome(), Ends()
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(machine_of(top, "intel-aet"))
        machine.config.write_text("group: 4242\n")
        machine.start()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        options = (listener, top / "exporter.log", "--manager-socket", machine.socket)
        exporter = start(*options)
        stack.callback(lambda: end(exporter))
        server = stack.enter_context(running(top / "prometheus", listener.getsockname()[1], interval_s))
        busy = subprocess.Popen(["sh", "-c", _BUSY])
        stack.callback(end, busy)
        machine.call("Assign", key="busy", pid=busy.pid, claim="me")
        _await_start(server, machine)
        deadline, key = time.monotonic() + seconds, ""
        while time.monotonic() < deadline or outcome.kills < 2:
            key = f"short-{outcome.workloads}"
            machine.call("Create", key=key, claim="me")
            with subprocess.Popen(["sh", "-c", _SCRIPT], stdin=subprocess.PIPE) as child:
                machine.call("Assign", key=key, pid=child.pid, late=False, claim="me")
                child.communicate(b"\n")
            machine.call("Release", key=key, claim="me")
            for use in machine.call("Read", key=key)["domains"]:
                row = EVENT_METRICS[use["event"]]
                domain = str(int(use["domain"].rpartition("_")[2]))
                labels = zip(row.workload.labels, (key, domain, row.label), strict=False)
                ends.setdefault(row.workload.sample, {})[frozenset(labels)] = float(use["value"])
            outcome.workloads += 1
            if outcome.workloads % (2 * _KILL_EVERY) == 0:
                exporter.kill()
                exporter.wait()
                exporter = start(*options)
                outcome.kills += 1
            elif outcome.workloads % _KILL_EVERY == 0:
                machine.kill()
                machine.start()
                _await_start(server, machine)
                outcome.kills += 1
        wait_until(lambda: server.series("resctrlmond_workload_end_time_seconds", key=key))
        _check(server, ends, outcome)
    return outcome


def _await_start(server: Prometheus, machine: Machine) -> None:
    """Wait until Prometheus has a figure of the pools of this daemon."""
    since = datetime.datetime.fromisoformat(machine.call("Machine")["since"]).timestamp()

    def is_seen() -> bool:
        return any(
            value == since
            for one in server.series("resctrlmond_machine_start_time_seconds")
            for _, value in one.samples
        )

    wait_until(is_seen, interval_s=0.2)


def _check(server: Prometheus, ends: Ends, outcome: Outcome) -> None:
    counters = [name for name in server.metrics() if name.startswith("resctrlmond_") and name.endswith("_total")]
    for name in counters:
        found = {one.labels: one for one in server.series(name)}
        # Read after the values, because scrapes go on: each value has its start.
        created = {one.labels: dict(one.samples) for one in server.series(name.removesuffix("_total") + "_created")}
        for one in found.values():
            outcome.samples += len(one.samples)
            outcome.starts += len(set(created[one.labels].values())) - 1
            outcome.faults += _falls(name, one, created[one.labels])
        for labels, value in ends.get(name, {}).items():
            last = found[labels].samples[-1][1] if labels in found else None
            if last != value:
                outcome.faults.append(f"{name}{dict(labels)} ended at {value!r}; Prometheus has {last!r}")
    missing = ends.keys() - set(counters)
    outcome.faults += [f"Prometheus does not have {name}" for name in missing]


def _falls(name: str, of: Series, created: dict[float, float]) -> list[str]:
    return [
        f"{name}{dict(of.labels)} fell from {before} to {after} with the same start"
        for (earlier, before), (later, after) in zip(of.samples, of.samples[1:], strict=False)
        if after < before and created[earlier] == created[later]
    ]
