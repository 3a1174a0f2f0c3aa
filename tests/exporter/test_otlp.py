# SPDX-License-Identifier: Apache-2.0
"""Pushes to a receiver of OTLP: figures, starts, resources and marks, over HTTP and gRPC."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from resctrlmond.exporter.otlp.figures import nanoseconds
from resctrlmond.exporter.otlp.ledger import Temporality
from resctrlmond.exporter.otlp.points import Name, Part, Point
from resctrlmond.exporter.otlp.sender import Protocol, Sender
from tests.exporter.conftest import Machine, StartProcess
from tests.exporter.otlp_receiver import Received, over_grpc, over_http, silent
from tests.exporter.pushing import PushProcess
from tests.exporter.test_figures import run_for
from tests.wait import wait_until

POD = "5f1d6a52-43a5-4b53-9b2e-2f0e8b7f2c11"
# The metric of each event, its unit, and its scope.
WORKLOAD = {
    "mbm_total_bytes": ("resctrl.workload.memory_bandwidth", "By", "total"),
    "mbm_local_bytes": ("resctrl.workload.memory_bandwidth", "By", "local"),
    "core_energy": ("resctrl.workload.core_energy", "J", None),
    "activity": ("resctrl.workload.core_activity", "F", None),
}


@pytest.fixture(params=["http/protobuf", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def receiver(protocol: str) -> Iterator[tuple[str, Received]]:
    with over_grpc() if protocol == "grpc" else over_http() as found:
        yield found


@contextlib.contextmanager
def pushing(machine: Machine, url: str, *options: str, **environment: str) -> Iterator[PushProcess]:
    with contextlib.closing(PushProcess(machine.top, machine.socket, url, *options, **environment)) as found:
        found.start()
        yield found


def pushes(received: Received, number: int = 2) -> None:
    """Wait for some more pushes: what was so before the first of them is in the last."""
    wanted = received.requests + number
    wait_until(lambda: received.requests >= wanted)


def test_final_figures_of_an_ended_workload(machine: Machine, protocol: str, receiver: tuple[str, Received]) -> None:
    url, received = receiver
    machine.start()
    attributes = {"pod.name": "web-0", "pod.namespace": "shop"}
    machine.call("Create", key=POD, claim="me", attributes=attributes)
    with pushing(machine, url, "--otlp-protocol", protocol) as exporter:
        wait_until(lambda: received.all(k8s_pod_uid=POD))
        with subprocess.Popen(["sh", "-c", "read go; seq 1 20000 >/dev/null"], stdin=subprocess.PIPE) as child:
            machine.call("Assign", key=POD, pid=child.pid, late=False, claim="me")
            child.communicate(b"\n")
        found = machine.call("Release", key=POD, claim="me")
        workload, totals = found["workload"], {of["event"]: of for of in found["totals"]}
        end_ns = nanoseconds(workload["completedAt"])
        wait_until(lambda: any(one.time_ns >= end_ns for one in received.all(k8s_pod_uid=POD)))
        number = len(received.all(k8s_pod_uid=POD))
        pushes(received)
        # Final figures that the receiver has accepted are not pushed again.
        assert len(received.all(k8s_pod_uid=POD)) == number
        assert exporter.stop() == 0
    assert "Traceback" not in exporter.log.read_text()
    assert totals.keys() >= WORKLOAD.keys()
    for event, (name, unit, scope) in WORKLOAD.items():
        of = {"resctrl_scope": scope} if scope else {}
        points = received.all(name, k8s_pod_uid=POD, **of)
        assert len({one.stream for one in points}) == 1
        assert {(one.unit, one.temporality) for one in points} == {(unit, "cumulative")}
        assert {one.start_ns for one in points} == {nanoseconds(workload["createdAt"])}
        last = points[-1]
        assert last.time_ns == end_ns
        if unit == "By":
            assert (type(last.value), last.value) == (int, int(totals[event]["value"]))
        else:
            assert (type(last.value), last.value) == (float, float(Decimal(totals[event]["value"])))
    marked = received.all("resctrl.workload.inexact", k8s_pod_uid=POD)
    assert {one.of("resctrl.event") for one in marked} == {
        event for event, of in totals.items() if of["quality"] != "exact" and event in WORKLOAD
    }
    (resource,) = {one.resource for one in received.all(k8s_pod_uid=POD)}
    assert dict(resource) | {"host.id": ""} == {
        "service.name": "resctrlmond",
        "service.instance.id": f"{socket.gethostname()}/{POD}",
        "host.name": socket.gethostname(),
        "host.id": "",
        "resctrl.workload.key": POD,
        "resctrl.workload.generation": 1,
        "k8s.pod.uid": POD,
        "k8s.pod.name": "web-0",
        "k8s.namespace.name": "shop",
    }


def test_run_that_gets_a_name_stays_one_resource(machine: Machine) -> None:
    """With two, a receiver would count the use since the start for both."""
    machine.start()
    machine.call("Create", key="k", claim="me")
    with over_http() as (url, received), pushing(machine, url):
        wait_until(lambda: received.all(resctrl_workload_key="k"))
        machine.call("Create", key="k", claim="me", attributes={"pod.name": "web-0"})
        # All readings within half a second are the same: this one is in the first that has the name.
        machine.call("Create", key="later", claim="me")
        wait_until(lambda: received.all(resctrl_workload_key="later"))
        pushes(received)
    (resource,) = {one.resource for one in received.all(resctrl_workload_key="k")}
    assert "k8s.pod.name" not in dict(resource)


def test_two_runs_in_one_message_may_be_one_resource() -> None:
    """Generations begin again when a run is no longer listed, and the SDK sends one of two equal resources only."""
    name, resource = Name("resctrl.workload.core_energy", "J", ""), {"resctrl.workload.key": "k"}
    parts = [Part(resource, [Point(name, {}, start, start + 2, 1.5)]) for start in (1, 5)]
    with over_http() as (url, received):
        sender = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE)
        assert sender.send(parts) is None
    assert [(one.start_ns, one.time_ns, one.value) for one in received.all()] == [(1, 3, 1.5), (5, 7, 1.5)]


def test_levels_sums_pools_and_health(machine: Machine, process: StartProcess) -> None:
    machine.start()
    run_for(machine, "short", namespace="shop")
    machine.call("Assign", key="late", pid=process().pid, late=True, claim="me", attributes={"unit": "x.service"})
    with over_http() as (url, received), pushing(machine, url):
        pushes(received)
        (shop,) = (of for of in machine.call("Sums", by="namespace")["names"] if of["name"] == "shop")
        pushes(received)
        machine.kill()
        wait_until(lambda: any(one.value == 0 for one in received.all("resctrl.up")))
    (level, *_) = received.all("resctrl.workload.llc_occupancy", systemd_unit_name="x.service")
    assert (level.unit, level.temporality, type(level.value)) == ("By", "", int)
    assert not received.all("resctrl.workload.llc_occupancy", resctrl_workload_key="short")
    marks = received.all("resctrl.workload.inexact", resctrl_workload_key="late", resctrl_quality="late")
    assert {one.of("resctrl.event") for one in marks} == set(WORKLOAD)
    pool = received.all("resctrl.machine.core_energy", resctrl_pool="tracked", resctrl_domain="0")[0]
    assert (pool.unit, pool.temporality) == ("J", "cumulative")
    assert pool.start_ns < pool.time_ns
    assert dict(pool.resource)["service.instance.id"] == socket.gethostname()
    (used,) = (Decimal(of["value"]) for of in shop["sums"] if of["event"] == "core_energy")
    total = received.all("resctrl.accounted.core_energy", resctrl_by="namespace", resctrl_name="shop")[-1]
    assert total.value == float(used) > 0
    last = {one.of("resctrl.quality"): one.value for one in received.all("resctrl.ends")}
    assert sum(last.values()) == 1
    assert received.all("resctrl.up")[0].value == 1
    assert received.all("resctrl.workloads", resctrl_state="active")[0].value == 1
    # Receivers with the names of Prometheus append "_ratio" to gauges with the unit "1".
    units = {one.name: one.unit for one in received.points if not one.temporality}
    assert {name for name, unit in units.items() if unit == "1"} == {"resctrl.accounted.inexact_ratio"}
    assert (units["resctrl.up"], units["resctrl.rmids_free"]) == ("", "{rmid}")
    # The alerts among the examples use resctrl_up and resctrl_exporter_ends_missing_total{resctrl_reason}.
    (missing,) = {one.unit for one in received.all("resctrl.exporter_ends_missing", resctrl_reason="full")}
    assert (missing, {one.value for one in received.all("resctrl.exporter_ends_missing")}) == ("{run}", {0})


def test_all_events_can_be_chosen(machine: Machine) -> None:
    machine.start()
    run_for(machine, "short")
    with over_http() as (url, received), pushing(machine, url, "--event", "uops*", "--event", "c?_res"):
        wait_until(lambda: received.all(resctrl_workload_key="short"))
    found = {(one.name, one.unit, one.of("resctrl.state")) for one in received.all(resctrl_workload_key="short")}
    assert {of for of in found if "inexact" not in of[0]} == {
        ("resctrl.workload.uops_retired", "{uop}", None),
        ("resctrl.workload.core_idle_cycles", "{cycle}", "c1"),
        ("resctrl.workload.core_idle_cycles", "{cycle}", "c6"),
    }


def test_settings_of_the_environment(machine: Machine, protocol: str, receiver: tuple[str, Received]) -> None:
    url, received = receiver
    machine.start()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20secret",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_RESOURCE_ATTRIBUTES": "k8s.cluster.name=blue,host.name=other",
    }
    # The option has no value: the address is that of the environment.
    with contextlib.closing(PushProcess(machine.top, machine.socket, "--log-level=info", **environment)) as exporter:
        exporter.start()
        pushes(received)
        assert exporter.stop() == 0
    assert received.headers[0]["authorization"] == "Bearer secret"
    resource = dict(received.all("resctrl.up")[0].resource)
    assert (resource["k8s.cluster.name"], resource["host.name"]) == ("blue", "other")
    assert "secret" not in exporter.log.read_text()


def other_threads_block_sigterm(pid: int) -> bool:
    """Return whether SIGTERM can only be received by the main thread, which waits for it."""
    masks = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = (task / "status").read_text().splitlines()
            mask = next(line.split()[1] for line in lines if line.startswith("SigBlk:"))
            masks += [int(mask, 16)] if task.name != str(pid) else []
    assert masks
    return all(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


def test_refusal_is_logged_once_and_its_end_too(
    machine: Machine, protocol: str, receiver: tuple[str, Received]
) -> None:
    url, received = receiver
    machine.start()
    is_open = threading.Event()
    received.accepts = is_open.is_set
    with pushing(machine, url, "--otlp-protocol", protocol) as exporter:
        pushes(received, 3)
        run_for(machine, "meanwhile")
        pushes(received)
        text = exporter.log.read_text()
        assert text.count("cannot push to") == 1
        assert "400" in text or "INVALID_ARGUMENT" in text
        is_open.set()
        wait_until(lambda: received.all(resctrl_workload_key="meanwhile"))
        wait_until(lambda: "accepts figures again" in exporter.log.read_text())
        # Else SIGTERM could end the process in the middle of a push.
        assert other_threads_block_sigterm(exporter.process.pid)
        assert exporter.stop() == 0


def test_receiver_that_does_not_answer_delays_nothing_but_the_push(machine: Machine) -> None:
    machine.start()
    with silent() as url:
        environment = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
        with pushing(machine, url, **environment) as exporter:
            wait_until(lambda: "cannot push to" in exporter.log.read_text())
            assert exporter.stop() == 0


def test_missing_sdk_is_explained() -> None:
    """As on Debian 13, which does not have it."""
    script = (
        "import sys; sys.modules['opentelemetry'] = None; from resctrlmond.exporter.__main__ import main;"
        " sys.exit(main(['--otlp', 'http://localhost:4318']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--otlp needs the SDK of OpenTelemetry" in done.stderr
    assert "install opentelemetry-exporter-otlp with pip" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--otlp", "localhost:4317"], "is not an address such as http://localhost:4318"),
        (["--otlp", "--otlp-temporality", "delta"], "needs --otlp-state"),
        (["--otlp-state", "/x"], "need --otlp"),
        (["--otlp", "--textfile", "/x"], "cannot be used with --otlp"),
        (["--otlp", "--listen", "/x"], "cannot be used with --otlp"),
    ],
)
def test_options_that_do_not_fit(options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "resctrlmond.exporter", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    "content",
    ["{", '{"version":9,"series":[],"ends":[]}', f'{{"version":1,"x":{"[" * 100_000}', None],
    ids=["damaged", "later", "nested", "absent"],
)
def test_state_that_cannot_be_used_is_not_replaced(tmp_path: Path, content: str | None) -> None:
    """Without it, all use since the starts would be pushed again."""
    path = tmp_path / "state" if content else tmp_path / "none" / "state"
    if content:
        path.write_text(content)
    options = ["--otlp", "http://127.0.0.1:1", "--otlp-temporality", "delta", "--otlp-state", str(path)]
    command = [sys.executable, "-m", "resctrlmond.exporter", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == os.EX_CANTCREAT
    assert ("cannot use the state" if content else "cannot write the state") in done.stderr
    assert "Traceback" not in done.stderr
    assert not content or path.read_text() == content
