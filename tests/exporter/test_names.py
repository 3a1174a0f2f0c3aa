# SPDX-License-Identifier: Apache-2.0
"""The figures have the names and labels of other exporters on request, and the values of those of resctrlmond.

The file of queries has each query of the two dashboards of nri-resctrl-mon, by the commit of containers/nri-plugins,
the dashboard and the panel.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from resctrlmond.api.types import MachineReply
from resctrlmond.exporter.collector import Exporter as Collector
from resctrlmond.exporter.metrics import EVENT_METRICS, Names
from resctrlmond.exporter.source import Observation
from resctrlmond.sim.control.client import Control
from tests.daemon.conftest import end
from tests.exporter.conftest import Exporter, Exposition, Machine, StartProcess, start
from tests.exporter.prometheus import Prometheus, running
from tests.exporter.test_collector import LATER, START, Told, usage
from tests.exporter.test_figures import DOMAINS, run_for
from tests.wait import wait_until

QUERIES = json.loads((Path(__file__).parent / "nri_resctrl_mon_queries.json").read_text(encoding="utf-8"))
# Its names, which its own tests and dashboards have.
OF_NRI_RESCTRL_MON = {
    "llc_occupancy": "l3_llc_occupancy_bytes",
    "mbm_total_bytes": "l3_mbm_bytes_total",
    "mbm_local_bytes": "l3_mbm_local_bytes_total",
    "core_energy": "perf_core_energy_joules_total",
    "activity": "perf_activity_farads_total",
    "unhalted_core_cycles": "perf_unhalted_core_cycles_total",
    "unhalted_ref_cycles": "perf_unhalted_ref_cycles_total",
    "uops_retired": "perf_uops_retired_total",
    "stalls_llc_hit": "perf_stalls_llc_hit_total",
    "stalls_llc_miss": "perf_stalls_llc_miss_total",
    "c1_res": "perf_c1_res_total",
    "c6_res": "perf_c6_res_total",
}
WEB, DATABASE = "c0ffee00-0000-4000-8000-000000000001", "c0ffee00-0000-4000-8000-000000000002"
BUSY = ["nice", "sh", "-c", "while :; do :; done"]
# The metric of kube-state-metrics for the two pods.
PODS = f"""\
# TYPE kube_pod_info gauge
kube_pod_info{{namespace="shop",pod="web-7c9d8b5f6c-x2x4z",uid="{WEB}",created_by_kind="ReplicaSet",\
created_by_name="web-7c9d8b5f6c"}} 1
kube_pod_info{{namespace="bank",pod="db-0",uid="{DATABASE}",created_by_kind="StatefulSet",created_by_name="db"}} 1
"""
# The values of the variables of the dashboards; the first two are those of "All".
VARIABLES = {
    "$pod_name": "(web-7c9d8b5f6c-x2x4z|db-0)",
    "$namespace": "(shop|bank)",
    "$__rate_interval": "30s",
    "$__range": "15m",
}


def of_names(*names: Names) -> list[str]:
    return [option for name in names for option in ("--names", name)]


@contextlib.contextmanager
def exporter_of(on: Machine, *options: str) -> Iterator[Exporter]:
    with contextlib.closing(Exporter(on.top, on.socket, *options)) as exporter:
        exporter.start()
        yield exporter


def having(scraped: Exposition, name: str) -> dict[frozenset[tuple[str, str]], float]:
    """Return the values of the samples of a name, by their labels."""
    return {labels: value for (known, labels), value in scraped.samples.items() if known == name}


def test_pod_has_the_names_of_nri_resctrl_mon(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "worker-1")
    machine.start()
    run_for(machine, WEB)
    run_for(machine, "nightly.service")
    found = {(use["domain"], use["event"]): use["value"] for use in machine.call("Read", key=WEB)["domains"]}
    assert {event for _, event in found} == OF_NRI_RESCTRL_MON.keys() - {"llc_occupancy"}
    names = of_names(Names.NRI_RESCTRL_MON, Names.RESCTRLMOND)
    with exporter_of(machine, "--event", "*", *names) as exporter:
        scraped = exporter.scrape()
    samples = {
        (name, labels): value for (name, labels), value in scraped.samples.items() if re.match("l3_|perf_", name)
    }
    expected = {
        (
            OF_NRI_RESCTRL_MON[event],
            frozenset(
                {
                    "k8s_pod_uid": WEB,
                    "domain_id": f"0{DOMAINS[domain]}",
                    "domain_name": domain,
                    "resctrl_control_group": "",
                    "resctrl_group_source": "pod",
                    "k8s_node_name": "worker-1",
                }.items()
            ),
        ): float(value)
        for (domain, event), value in found.items()
    }
    assert samples == expected
    assert any(value for (name, _), value in samples.items() if name == "perf_core_energy_joules_total")
    # nri-resctrl-mon has no start timestamps.
    assert not [name for name in scraped.families if name.startswith(("l3_", "perf_")) and "created" in name]
    types = {name: of.type for name, of in scraped.families.items()}
    assert types["l3_mbm_bytes"] == types["perf_core_energy_joules"] == "counter"


def test_cache_of_a_pod_in_a_class_is_a_gauge_with_the_class(machine: Machine) -> None:
    machine.start()
    Control(str(machine.top / "resctrl")).make_group("gold")
    machine.call("Create", key=WEB, claim="me", **{"class": "gold"})
    with exporter_of(machine, *of_names(Names.NRI_RESCTRL_MON), "--node-name", "n") as exporter:
        scraped = exporter.scrape()
    assert scraped.families["l3_llc_occupancy_bytes"].type == "gauge"
    labels = [dict(of) for of in having(scraped, "l3_llc_occupancy_bytes")]
    assert {(of["resctrl_control_group"], of["domain_id"], of["k8s_node_name"]) for of in labels} == {
        ("gold", "00", "n"),
        ("gold", "01", "n"),
    }


def test_only_the_chosen_names_are_exported(
    machine: Machine, process: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics of the service, and the marks of the figures that are exported, have no other names."""
    monkeypatch.delenv("NODE_NAME", raising=False)
    machine.start()
    machine.call("Assign", key=WEB, pid=process().pid, late=True, claim="me")
    machine.call("Assign", key="late.service", pid=process().pid, late=True, claim="me")
    machine.call("Machine")
    figure = re.compile(r"resctrlmond_(machine_|accounted_|workload_)|.*_(bytes|joules|farads)(_total)?\Z")
    found = {}
    for name in Names:
        with exporter_of(machine, *of_names(name)) as exporter:
            scraped = exporter.scrape()
        assert scraped.value("up") == 1
        assert scraped.having("workloads")
        found[name] = {sample for sample, _ in scraped.samples if figure.match(sample)}
        hosts = {dict(of)["k8s_node_name"] for of in having(scraped, "perf_core_energy_joules_total")}
        assert hosts == ({os.uname().nodename.lower()} if name is Names.NRI_RESCTRL_MON else set())
        marked = {of["key"] for of in scraped.having("workload_inexact")}
        expected = {Names.RESCTRLMOND: {WEB, "late.service"}, Names.NRI_RESCTRL_MON: {WEB}}
        assert marked == expected.get(name, set())
    own = {"process_virtual_memory_bytes", "process_resident_memory_bytes"}
    assert found[Names.NRI_RESCTRL_MON] - own == {"resctrlmond_workload_inexact"} | {
        OF_NRI_RESCTRL_MON[event]
        for event in ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes", "core_energy", "activity")
    }
    assert found[Names.NODE_EXPORTER] - own - {"resctrlmond_machine_inexact"} == {
        "node_resctrl_llc_occupancy_bytes",
        "node_resctrl_memory_bandwidth_bytes_total",
    }
    assert not [name for name in found[Names.RESCTRLMOND] if re.match("l3_|perf_|node_", name)]
    assert "resctrlmond_core_energy_joules_total" in found[Names.RESCTRLMOND]


def test_names_of_node_exporter_are_sums_of_all_pools(machine: Machine, process: StartProcess) -> None:
    machine.start()
    machine.call("Machine")
    run_for(machine, "ended")
    machine.call("Assign", key="k", pid=process().pid, claim="me")
    Control(str(machine.top / "resctrl")).make_group("mon_groups/theirs")
    with exporter_of(machine, *of_names(Names.NODE_EXPORTER, Names.RESCTRLMOND)) as exporter:
        scraped = exporter.scrape()
    for name in ("llc_occupancy_bytes", "memory_bandwidth_bytes_total"):
        sums: dict[frozenset[tuple[str, str]], float] = {}
        for of, value in having(scraped, f"resctrlmond_machine_{name}").items():
            labels = frozenset(one for one in of if one[0] != "pool")
            sums[labels] = sums.get(labels, 0.0) + value
        assert sums == having(scraped, f"node_resctrl_{name}")
        assert {dict(labels)["domain"] for labels in sums} == {"0", "1"}
        assert any(sums.values())


def test_series_of_a_pod_is_not_split_when_the_pod_moves() -> None:
    """Back in its former class, the former series would count again what the other one has."""
    runs = [(START, ""), (START, "gold"), (START, ""), (LATER, "gold")]
    observations = []
    for number, (created_at, class_) in enumerate(runs):
        of = usage(str(number), key=WEB, created_at=created_at)
        of = msgspec.structs.replace(of, workload=msgspec.structs.replace(of.workload, class_=class_))
        observations.append(Observation(usages=[of]))
    observations += [Observation(), observations[0], Observation(usages=[]), observations[1]]
    collector = Collector(Told(*observations), names=[Names.NRI_RESCTRL_MON])
    found = []
    for _ in observations:
        families = collector.render(lambda registry: list(registry.collect()), 1.0, with_start_times=True)
        labels = [one.labels for of in families for one in of.samples if one.name == "perf_core_energy_joules_total"]
        found += [[of["resctrl_control_group"] for of in labels]]
    assert found == [[""], [""], [""], ["gold"], [], [""], [], ["gold"]]


def whole(values: list[str | None], names: tuple[Names, ...] = (Names.NODE_EXPORTER,)) -> list[float | None]:
    """Return the exported sum of two pools for each value of the second; the first has 1."""
    use = {"domain": "mon_L3_00", "event": "mbm_total_bytes", "kind": "cumulative", "unit": "bytes", "skew": "0"}
    observations = []
    for value in values:
        pools = [
            {**use, "pool": "tracked", "value": "1", "quality": "exact"},
            {**use, "pool": "untracked", "value": value, "quality": "exact" if value else "estimated"},
        ]
        reply = msgspec.convert({"since": START, "readAt": START, "pools": pools}, MachineReply)
        observations.append(Observation(machine=reply))
    collector = Collector(Told(*observations), names=names)
    found: list[float | None] = []
    for _ in values:
        families = collector.render(lambda registry: list(registry.collect()), 1.0, with_start_times=False)
        samples = {one.name: one.value for of in families for one in of.samples}
        found.append(samples.get("node_resctrl_memory_bandwidth_bytes_total"))
    return found


def test_sum_without_the_number_of_a_pool_is_absent() -> None:
    assert whole(["2", None, "4"]) == [3, None, 5]


def test_sum_of_a_pool_that_falls_is_held() -> None:
    assert whole(["4", "2", "8"]) == [5, 5, 9]


@pytest.mark.parametrize(
    "options",
    [
        ["--names", "other"],
        ["--names", "node-exporter", "--event", "core_*"],
        ["--node-name", "n"],
        ["--node-name", ""],
    ],
)
def test_wrong_names_are_refused(options: list[str]) -> None:
    command = [sys.executable, "-m", "resctrlmond.exporter", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert options[0] in done.stderr


class _Pods(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(PODS.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def pods() -> Iterator[int]:
    """Serve what kube-state-metrics would, and return the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pods) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def by_our_names(query: str) -> str:
    """Return the same query of the metrics of resctrlmond."""
    for event, sample in OF_NRI_RESCTRL_MON.items():
        row = EVENT_METRICS[event]
        labels = dict(zip(row.workload.labels[2:], (row.label,), strict=False))
        selector = "".join(f', {label}="{value}"' for label, value in labels.items())
        ours = f'{{__name__="{row.workload.sample}", key=~"{WEB}|{DATABASE}"{selector}'
        query = re.sub(rf'{{__name__="{sample}"(, resctrl_group_source="pod")?', ours, query)
    for label, other in (("k8s_node_name, ", ""), ("domain_id", "domain"), ("k8s_pod_uid", "key")):
        query = query.replace(label, other)
    assert "perf_" not in query
    return query


def test_dashboards_of_nri_resctrl_mon_have_data(machine: Machine, pods: int) -> None:
    """Each query has the values that it has with the names of resctrlmond."""
    machine.start()
    with contextlib.ExitStack() as stack:
        for key in (WEB, DATABASE, "nightly.service"):
            busy = subprocess.Popen(BUSY)
            stack.callback(end, busy)
            machine.call("Assign", key=key, pid=busy.pid, claim="me")
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        options = ["--manager-socket", machine.socket, "--timeout", "60", "--event", "*", *of_names(*Names)]
        exporter = start(listener, machine.top / "exporter.log", *options)
        stack.callback(end, exporter)
        port = listener.getsockname()[1]
        server = stack.enter_context(running(machine.top / "prometheus", port, 1, pods))

        at = 0.0

        def has_rates(name: str, selector: str = "") -> bool:
            rates = server.query(f"rate({name}{selector}[30s])", at)
            return len(rates) >= 2 and any(value for _, value in rates)

        def has_data() -> bool:
            nonlocal at
            # All scrapes that began before this time have ended: the samples of a scrape have the time of its begin.
            at = time.time() - 2
            # The last scrape of each target was in time: after another one, no series has a value.
            return (
                len(server.query("up == 1", at)) == 2
                and has_rates("perf_core_energy_joules_total", f'{{k8s_pod_uid="{WEB}"}}')
                and has_rates("perf_core_energy_joules_total", f'{{k8s_pod_uid="{DATABASE}"}}')
                and has_rates("node_resctrl_memory_bandwidth_bytes_total")
            )

        wait_until(has_data, interval_s=0.1, failure="Prometheus has no rates of two scrapes of each target")
        checked = 0
        for commit, dashboards in QUERIES.items():
            for dashboard, panels in dashboards.items():
                for panel, query in panels.items():
                    check(server, query, at, f"{commit}, {dashboard}, {panel}")
                    checked += 1
        assert checked == 24 + 23
        of_node = server.query("sum by (domain, scope) (node_resctrl_memory_bandwidth_bytes_total)", at)
        of_pools = server.query("sum by (domain, scope) (resctrlmond_machine_memory_bandwidth_bytes_total)", at)
        assert sorted(of_node, key=str) == sorted(of_pools, key=str)
        assert len(server.query("node_resctrl_llc_occupancy_bytes", at)) == 2


def check(server: Prometheus, query: str, at: float, name: str) -> None:
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    found = server.query(query, at)
    assert found, name
    if query.startswith("sum by"):  # two pods, or two packages
        assert len(found) == 2, name
    for labels in (labels for labels, _ in found):
        assert labels.get("pod") in {None, "web-7c9d8b5f6c-x2x4z", "db-0"}, name
        assert labels.get("workload") in {None, "web", "db"}, name
    values, expected = (sorted(value for _, value in of) for of in (found, server.query(by_our_names(query), at)))
    assert values == pytest.approx(expected, rel=1e-9), name
    assert all(math.isfinite(value) for value in values), name
    # The simulated pods never idle.
    assert any(values) or "perf_c" in query, name
