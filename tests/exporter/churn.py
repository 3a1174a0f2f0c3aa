# SPDX-License-Identifier: Apache-2.0
"""Short workloads without pause, with kills of the daemon and of the exporter, while a real Prometheus scrapes.

The increase of the sums of namespaces in Prometheus is compared with what the simulator recorded of each process, and
that of the pools of the machine with what it recorded of all RMIDs. The last value of each series of a workload is
compared with the reports of the daemon. Another Prometheus has the same figures from a file, without
start times, and a receiver of OTLP from pushes.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from resctrlmond.exporter.metrics import EVENT_METRICS
from resctrlmond.resctrl.tree import INEXACT_ATTRIBUTE
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.model.states import Quality
from tests.daemon.conftest import Machine, end
from tests.exporter.conftest import machine_of, request, start
from tests.exporter.increase import Increase, sums
from tests.exporter.load import Event, Load, Run
from tests.exporter.machine_increase import MachineIncrease, scrape
from tests.exporter.node_exporter import node_exporter, write_file
from tests.exporter.otlp_receiver import over_http
from tests.exporter.prometheus import Prometheus, Series, running
from tests.exporter.pushed import Pushed
from tests.exporter.pushing import PushProcess
from tests.wait import wait_until

# The events of workloads by their number, which repeat.
_EVENTS_OF_40 = {9: Event.KILLED_AT_RELEASE, 29: Event.KILLED}
_EVENTS_OF_10 = {3: Event.LATE, 6: Event.REMOVED}
# After this number of workloads, all exporters are killed.
_KILLS_EXPORTERS = 20
_BUSY = "while :; do :; done"
# The namespaces of workloads whose readings have all that was used in their groups.
_NAMESPACES = ("shop", "bank", "farm")
# Those of workloads of which another program removes the group, and of the one that runs all the time.
_REMOVED, _LONG = "ward", "house"

# The labels and the values of the counters of one metric at the end of their workload.
Ends = dict[str, dict[frozenset[tuple[str, str]], float]]
# The totals of a workload by event, over all domains.
Totals = dict[str, float]


@dataclass(slots=True)
class Outcome:
    """Numbers of events, and the faults that were found.

    ``short`` is the number of workloads that lived less than the interval of scrapes. ``ended`` is that of all runs,
    with the first ones and the long one, by the worst quality of their totals.
    """

    workloads: int = 0
    short: int = 0
    ended: Counter[Quality] = field(default_factory=Counter)
    kills: int = 0
    samples: int = 0
    points: int = 0
    starts: int = 0
    faults: list[str] = field(default_factory=list)


def churn(top: Path, seconds: float, interval_s: int) -> Outcome:
    """Run workloads for some time, and check what Prometheus has then, which scrapes every ``interval_s``.

    A slow machine takes longer: the daemon and the exporter are killed once at least.
    """
    outcome, ends, totals = Outcome(), Ends(), dict[str, Totals]()
    with contextlib.ExitStack() as stack:
        # The energy of a run is not exact if its RMID has never counted before.
        machine = stack.enter_context(machine_of(top, "intel-aet", residue=1))
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
        url, received = stack.enter_context(over_http())
        pushed = Pushed(received)
        pushing = PushProcess(
            top, machine.socket, url, "--interval", str(interval_s), "--otlp-state", str(top / "otlp-state")
        )
        stack.callback(pushing.close)
        pushing.start()
        load, increases = Load(machine), {one: Increase(partial(sums, one)) for one in (server, of_file)}
        since_kill, of_pushes = Increase(partial(sums, server)), Increase(pushed.sums)
        assert machine.simulation
        profile, control = machine.simulation.profile, Control(machine.simulation.mountpoint)
        settle = partial(_await_reading, server, machine)
        of_machine = MachineIncrease(partial(scrape, server, control, profile, settle), profile)

        def add(namespace: str, run: Run) -> None:
            outcome.ended[run.quality] += 1
            outcome.faults += run.faults
            for increase in (*increases.values(), since_kill, of_pushes):
                increase.add(namespace, run.used)
            of_machine.add(run.used)

        # The sum of a name begins with the first workload of that name: later ones are the increase.
        for namespace in (*_NAMESPACES, _REMOVED, _LONG):
            add(namespace, load.run(f"first-{namespace}", namespace))
        for one, increase in increases.items():
            _await_end(one, f"first-{_LONG}")
            _await_scrape(one, machine)
            increase.begin()
        since_kill.begin()
        pushed.await_reading()
        of_pushes.begin()
        of_machine.begin()
        # Other tests may run at the same time.
        busy = subprocess.Popen(["nice", "-n", "19", "sh", "-c", _BUSY])
        stack.callback(end, busy)
        machine.call("Create", key="busy", claim="me", attributes={"pod.namespace": _LONG})
        machine.call("Assign", key="busy", pid=busy.pid, claim="me")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or outcome.kills < 3:
            number, key = outcome.workloads, f"short-{outcome.workloads}"
            outcome.workloads += 1
            event = _event(number)
            namespace = _REMOVED if event is Event.REMOVED else _NAMESPACES[number % len(_NAMESPACES)]
            run = load.run(key, namespace, event)
            add(namespace, run)
            outcome.short += run.lived_s < interval_s
            totals[key] = _add_ends(machine, key, ends)
            if event in (Event.KILLED, Event.KILLED_AT_RELEASE):
                outcome.kills += 1
                _await_scrape(server, machine)
                outcome.faults += since_kill.faults(without=_LONG)
                since_kill.begin()
            elif number % _KILLS_EXPORTERS == _KILLS_EXPORTERS - 1:
                exporter.kill()
                exporter.wait()
                exporter = start(*options)
                writer.kill()
                writer.wait()
                writer = write_file(*writing)
                pushing.kill()
                pushing.start()
                outcome.kills += 1
        end(busy)
        add(_LONG, load.end("busy", busy.pid))
        for one, increase in increases.items():
            _await_end(one, "busy")
            _await_scrape(one, machine)
            outcome.faults += increase.faults()
            _check_ended(one, outcome)
        # The figures of a reading are in several messages.
        pushed.await_reading()
        pushed.await_reading()
        outcome.faults += of_pushes.faults()
        _check_pushed(pushed, totals, outcome)
        outcome.faults += of_machine.faults()
        _check(server, ends, outcome)
        _check_file(of_file, ends, outcome)
        outcome.faults += since_kill.faults(without=_LONG)
        # Then the record of the simulator is not complete, and this is the reason.
        outcome.faults += filter(None, [os.getxattr(top / "resctrl", INEXACT_ATTRIBUTE).decode()])
        outcome.faults += [line for line in node.log.read_text().splitlines() if "level=error" in line]
        for port in (listener.getsockname()[1], node.port):
            _check_text(port, outcome)
    return outcome


def _event(number: int) -> Event:
    return _EVENTS_OF_40.get(number % 40) or _EVENTS_OF_10.get(number % 10, Event.NONE)


def _add_ends(machine: Machine, key: str, ends: Ends) -> Totals:
    """Add the counters of a workload that has ended. Return its totals."""
    found = machine.call("Read", key=key)
    for use in found["domains"]:
        if "value" not in use:
            continue
        row = EVENT_METRICS[use["event"]]
        domain = str(int(use["domain"].rpartition("_")[2]))
        labels = zip(row.workload.labels, (key, domain, row.label), strict=False)
        ends.setdefault(row.workload.sample, {})[frozenset(labels)] = float(use["value"])
    return {total["event"]: float(total["value"]) for total in found["totals"] if "value" in total}


def _await_end(server: Prometheus, key: str) -> None:
    wait_until(lambda: server.series("resctrlmond_workload_end_time_seconds", key=key))


def _check_ended(server: Prometheus, outcome: Outcome) -> None:
    """Check that each end is counted once, with its quality."""
    found = {dict(one.labels)["quality"]: one.samples[-1][1] for one in server.series("resctrlmond_ends_total")}
    if {quality: number for quality, number in found.items() if number} != outcome.ended:
        outcome.faults.append(f"{dict(outcome.ended)} runs ended; resctrlmond_ends_total has {found}")


def _await_scrape(server: Prometheus, machine: Machine) -> None:
    """Wait for a scrape that began after now and got figures."""
    now = time.time()
    since = datetime.datetime.fromisoformat(machine.call("Machine")["since"]).timestamp()

    def is_seen() -> bool:
        found = server.series("resctrlmond_machine_start_time_seconds")
        return any(at > now and value == since for one in found for at, value in one.samples)

    wait_until(is_seen, interval_s=0.2)


def _await_reading(server: Prometheus, machine: Machine) -> None:
    """Wait for a scrape that read the counters after now: a reading is shared for half a second."""
    time.sleep(1)
    _await_scrape(server, machine)


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
    """Check the series from the file, which has no start timestamps: none begins again."""
    counters = [name for name in server.metrics() if name.startswith("resctrlmond_") and name.endswith("_total")]
    for name in counters:
        found = {one.labels: one for one in server.series(name)}
        for one in found.values():
            outcome.faults += _falls(name, one, dict.fromkeys(dict(one.samples), 0.0))
            outcome.samples += len(one.samples)
        _check_ends(name, found, ends, outcome)
    outcome.faults += [f"the file does not have {name}" for name in ends.keys() - set(counters)]


def _check_pushed(pushed: Pushed, totals: Mapping[str, Totals], outcome: Outcome) -> None:
    outcome.points = pushed.number
    outcome.faults += pushed.faults
    for key, used in totals.items():
        found = pushed.used(key)
        if found != used:
            outcome.faults.append(f"{key} ended at {used}; the receiver of OTLP has {found}")


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
