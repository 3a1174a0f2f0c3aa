# SPDX-License-Identifier: Apache-2.0
"""Short workloads without pause, with kills of the daemon and of the exporter, while a real Prometheus scrapes.

The last value of each series in Prometheus is compared with what the daemon reported for each workload. Another
Prometheus has the same figures from the file for node_exporter, without start times.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from resctrlmond.exporter.metrics import EVENT_METRICS
from tests.daemon.conftest import Machine, end
from tests.exporter.conftest import machine_of, request, start
from tests.exporter.node_exporter import node_exporter, write_file
from tests.exporter.prometheus import Prometheus, Series, running
from tests.wait import wait_until

# After this number of workloads, something is killed: the daemon and the exporter in turn.
_KILL_EVERY = 10
_SCRIPT = "read go; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"
_BUSY = "while :; do :; done"
_NAMESPACES = ("shop", "bank", "farm")
# Sums of floating-point numbers.
_ACCURACY = 1e-9

# The labels and the values of the counters of one metric at the end of their workload.
Ends = dict[str, dict[frozenset[tuple[str, str]], float]]
# The actual use of the workloads of each namespace, by the metric and the labels of its sum.
Truth = dict[tuple[str, frozenset[tuple[str, str]]], Decimal]


@dataclass(slots=True)
class Outcome:
    """Numbers of events, and the faults that were found. ``ended``: all runs that ended, with the first ones."""

    workloads: int = 0
    ended: int = 0
    kills: int = 0
    samples: int = 0
    starts: int = 0
    faults: list[str] = field(default_factory=list)


def churn(top: Path, seconds: float, interval_s: int) -> Outcome:
    """Run workloads for some time, and check what Prometheus has then, which scrapes every ``interval_s``.

    A slow machine takes longer: the daemon and the exporter are killed once at least.
    """
    outcome, ends, truth = Outcome(), Ends(), Truth()
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(machine_of(top, "intel-aet"))
        machine.config.write_text("group: 4242\n")
        machine.start()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        options = (listener, top / "exporter.log", "--manager-socket", machine.socket)
        exporter = start(*options)
        stack.callback(lambda: end(exporter))
        textfiles = top / "textfiles"
        textfiles.mkdir()
        writing = (textfiles, machine.socket, top / "textfile.log", 1.0)
        writer = write_file(*writing)
        stack.callback(lambda: end(writer))
        node = stack.enter_context(node_exporter(top, textfiles))
        server = stack.enter_context(running(top / "prometheus", listener.getsockname()[1], interval_s))
        of_file = stack.enter_context(running(top / "prometheus-file", node.port, interval_s))
        busy = subprocess.Popen(["sh", "-c", _BUSY])
        stack.callback(end, busy)
        machine.call("Assign", key="busy", pid=busy.pid, claim="me")
        _await_start(server, machine)
        # The sum of a name begins with the first workload of that name: later ones are the increase.
        for namespace in _NAMESPACES:
            _run(machine, f"first-{namespace}", namespace)
            outcome.ended += 1
        for one in (server, of_file):
            _await_end(one, f"first-{_NAMESPACES[-1]}")
        first, first_of_file = _sums(server), _sums(of_file)
        deadline, key = time.monotonic() + seconds, ""
        while time.monotonic() < deadline or outcome.kills < 2:
            key, namespace = f"short-{outcome.workloads}", _NAMESPACES[outcome.workloads % len(_NAMESPACES)]
            for total in _run(machine, key, namespace):
                accounted = EVENT_METRICS[total["event"]].accounted
                assert accounted is not None
                values = ("namespace", namespace, EVENT_METRICS[total["event"]].label)
                series = accounted.sample, frozenset(zip(accounted.labels, values, strict=False))
                truth[series] = truth.get(series, Decimal(0)) + Decimal(total["value"])
            outcome.ended += 1
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
                writer.kill()
                writer.wait()
                writer = write_file(*writing)
                outcome.kills += 1
            elif outcome.workloads % _KILL_EVERY == 0:
                machine.kill()
                machine.start()
                _await_start(server, machine)
                outcome.kills += 1
        for one in (server, of_file):
            _await_end(one, key)
        _check(server, ends, outcome)
        _check_sums(server, first, truth, outcome)
        _check_file(of_file, ends, outcome)
        _check_sums(of_file, first_of_file, truth, outcome)
        outcome.faults += [line for line in node.log.read_text().splitlines() if "level=error" in line]
        for port in (listener.getsockname()[1], node.port):
            _check_text(port, outcome)
    return outcome


def _await_end(server: Prometheus, key: str) -> None:
    wait_until(lambda: server.series("resctrlmond_workload_end_time_seconds", key=key))


def _run(machine: Machine, key: str, namespace: str) -> list[dict[str, Any]]:
    """Run a short workload, and return its totals."""
    machine.call("Create", key=key, claim="me", attributes={"pod.namespace": namespace})
    with subprocess.Popen(["sh", "-c", _SCRIPT], stdin=subprocess.PIPE) as child:
        machine.call("Assign", key=key, pid=child.pid, late=False, claim="me")
        child.communicate(b"\n")
    totals: list[dict[str, Any]] = machine.call("Release", key=key, claim="me")["totals"]
    return totals


def _sums(server: Prometheus) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the last sample of each sum of a namespace."""
    names = [
        name for name in server.metrics() if name.startswith("resctrlmond_accounted_") and name.endswith("_total")
    ]
    return {(name, one.labels): one.samples[-1][1] for name in names for one in server.series(name, by="namespace")}


def _check_sums(
    server: Prometheus, first: dict[tuple[str, frozenset[tuple[str, str]]], float], truth: Truth, outcome: Outcome
) -> None:
    """Check that each sum of a namespace has increased by what its workloads used, and that no end is missing."""
    last = _sums(server)
    for series, used in truth.items():
        increase = last.get(series, 0.0) - first.get(series, 0.0)
        if abs(increase - float(used)) > _ACCURACY * last.get(series, 0.0):
            outcome.faults.append(
                f"{series[0]}{dict(series[1])} increased by {increase!r}; its workloads used {used}"
            )
    ended = sum(one.samples[-1][1] for one in server.series("resctrlmond_ends_total"))
    if ended != outcome.ended:
        outcome.faults.append(f"{outcome.ended} runs ended; resctrlmond_ends_total has {ended!r}")


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
        _check_ends(name, found, ends, outcome)
    missing = ends.keys() - set(counters)
    outcome.faults += [f"Prometheus does not have {name}" for name in missing]


def _check_ends(name: str, found: Mapping[frozenset[tuple[str, str]], Series], ends: Ends, outcome: Outcome) -> None:
    for labels, value in ends.get(name, {}).items():
        last = found[labels].samples[-1][1] if labels in found else None
        if last != value:
            outcome.faults.append(f"{name}{dict(labels)} ended at {value!r}; Prometheus has {last!r}")


def _check_file(server: Prometheus, ends: Ends, outcome: Outcome) -> None:
    """Check the series from the file, which has no start timestamps: only the pools begin again with the daemon."""
    (began,) = server.series("resctrlmond_machine_start_time_seconds")
    counters = [name for name in server.metrics() if name.startswith("resctrlmond_") and name.endswith("_total")]
    for name in counters:
        found = {one.labels: one for one in server.series(name)}
        is_pool = name.startswith("resctrlmond_machine_")
        for one in found.values():
            # Read after the start times, because scrapes go on.
            known = dict(began.samples)
            samples = tuple(of for of in one.samples if of[0] in known)
            starts = {time: known[time] if is_pool else 0.0 for time, _ in samples}
            outcome.faults += _falls(name, Series(one.labels, samples), starts)
            outcome.samples += len(samples)
        _check_ends(name, found, ends, outcome)
    outcome.faults += [f"the file does not have {name}" for name in ends.keys() - set(counters)]


def _check_text(port: int, outcome: Outcome) -> None:
    """Check with promtool what Prometheus gets from an exporter."""
    text = request(http.client.HTTPConnection("127.0.0.1", port, timeout=60)).body
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    outcome.faults += [f"promtool: {remark}" for remark in (done.stdout + done.stderr).decode().splitlines()]


def _falls(name: str, of: Series, created: dict[float, float]) -> list[str]:
    return [
        f"{name}{dict(of.labels)} fell from {before} to {after} with the same start"
        for (earlier, before), (later, after) in zip(of.samples, of.samples[1:], strict=False)
        if after < before and created[earlier] == created[later]
    ]
