# SPDX-License-Identifier: Apache-2.0
"""The rules and the dashboard among the examples: promtool accepts them, and each query has data of real figures."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from resctrlmond.exporter import metrics
from resctrlmond.exporter.metrics import EVENT_METRICS, Metric
from resctrlmond.sim.control.client import Control
from tests.daemon.conftest import end
from tests.exporter.conftest import Machine, machine_of, start
from tests.exporter.panels import BUSY, DASHBOARD, EXAMPLES, VARIABLES, draw, panels, shortened, wait_for_series
from tests.exporter.prometheus import Prometheus, running
from tests.exporter.test_figures import run_for
from tests.wait import wait_until, wait_until_equal

RULES = EXAMPLES / "resctrlmond.rules.yaml"
TESTS = Path(__file__).parent / "resctrlmond.rules.test.yaml"
POD = "c0ffee00-0000-4000-8000-000000000001"
# Alerts on metrics that an exporter without TLS, or one that is scraped, does not have: test_prometheus.py,
# test_textfile.py and test_otlp.py check that others have them.
ELSEWHERE = {
    "ResctrlmonExporterCertificateExpires",
    *("ResctrlmonTextfileMissing", "ResctrlmonTextfileStale"),
    *("ResctrlmonPushesMissing", "ResctrlmonEndsMissing"),
}
# Without a sum of them, Prometheus would count the other scope twice.
SCOPED = re.compile(r"resctrlmond_(?:machine_|accounted_)?memory_bandwidth_bytes_total(\{[^}]*\})?")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Yield the name and the query of each panel and rule."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']}, {target['refId']}", target["expr"]
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]


def variables() -> dict[str, tuple[str, str]]:
    """Return the series of each variable of the dashboard, and the label whose values it has."""
    listed = json.loads(DASHBOARD.read_text())["templating"]["list"]
    of_series = [one for one in listed if one["type"] == "query"]
    found = {one["name"]: re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]["query"]) for one in of_series}
    return {name: (of[1], of[2]) for name, of in found.items() if of}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_promtool_accepts_the_rules_and_their_tests_pass(tmp_path: Path) -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stderr
    tests = tmp_path / "tests.yaml"
    tests.write_text(TESTS.read_text().replace("[RULES]", f"[{RULES}]"))
    done = promtool("test", "rules", str(tests))
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_would_complain_about_another_threshold(tmp_path: Path) -> None:
    wrong = RULES.read_text().replace("< on (job, instance) 0.1", "< on (job, instance) 0.01")
    (tmp_path / "rules.yaml").write_text(wrong)
    (tmp_path / "tests.yaml").write_text(TESTS.read_text().replace("[RULES]", "[rules.yaml]"))
    done = promtool("test", "rules", str(tmp_path / "tests.yaml"))
    assert done.returncode == 1
    assert "ResctrlmondRmidsLow" in done.stdout + done.stderr


def test_each_alert_has_a_severity_and_a_command() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    tested = TESTS.read_text()
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert "instance" in alert["annotations"]["summary"]
        description = alert["annotations"]["description"]
        assert re.search(r"'(resctrlctl|systemctl|journalctl) [^']+'", description), alert["alert"]
        assert alert["alert"] in tested
    assert len(alerts) == tested.count("exp_alerts: []")


def test_numbers_have_colours_of_their_own() -> None:
    """Without thresholds, Grafana shows each number from 80 on in red: many free RMIDs, and a usual power."""
    for panel in panels():
        if panel["type"] in ("stat", "bargauge"):
            assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None, panel["title"]


def test_each_figure_is_shown_by_namespace_pod_and_unit() -> None:
    titles = " ".join(panel["title"] for panel in panels())
    for figure in ("Power", "Bandwidth", "Occupancy"):
        assert all(f"{figure} by {one}" in titles for one in ("namespace", "pod", "unit")), figure


def test_each_query_names_metrics_of_the_exporter_and_one_scope() -> None:
    known = {one.sample for one in vars(metrics).values() if isinstance(one, Metric)}
    for row in EVENT_METRICS.values():
        known |= {one.sample for one in (row.workload, row.machine, row.accounted) if one is not None}
    for name, query in queries():
        used = set(re.findall(r"(?<!:)\bresctrlmond_\w+", query))
        assert {one.removesuffix("_bucket") for one in used} <= known, name
        for selector in SCOPED.findall(query):
            assert "scope=" in selector, name


@pytest.fixture
def server(machine: Machine) -> Iterator[Prometheus]:
    """A Prometheus server that has scraped pods and units, which run, end, wait and are lost."""
    machine.start()
    with contextlib.ExitStack() as stack:
        names = {"pod.namespace": "shop", "pod.name": "web-0"}
        for key, attributes in ((POD, names), ("web.service", {"unit": "web.service"})):
            busy = subprocess.Popen(BUSY)
            stack.callback(end, busy)
            machine.call("Assign", key=key, pid=busy.pid, claim="me", attributes=attributes)
        Control(str(machine.top / "resctrl")).make_group("mon_groups/theirs")
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        options = ("--manager-socket", machine.socket, "--timeout", "60")
        stack.callback(end, start(listener, machine.top / "exporter.log", *options))
        found = stack.enter_context(running(machine.top / "prometheus", listener.getsockname()[1], 1))
        for selector in (f'{{key="{POD}"}}', '{key="web.service"}'):
            query = f"rate(resctrlmond_core_energy_joules_total{selector}[30s]) > 0"
            wait_until(lambda query=query: found.query(query, time.time()))  # type: ignore[misc]
        # After the first scrape: Prometheus does not count what is in the first sample.
        run_for(machine, "ended")
        wait_until(lambda: found.query("increase(resctrlmond_ends_total[1h]) > 0", time.time()))
        yield found


def test_each_query_has_data(server: Prometheus) -> None:
    by_name = {}

    def have_data() -> bool:
        at = time.time()
        for name, query in queries():
            by_name[name] = server.query(_shortened(query), at)
        return {name for name, found in by_name.items() if not found} == ELSEWHERE

    # On a busy machine, a scrape can take longer than its time-out, and a rate needs the samples of two.
    with contextlib.suppress(AssertionError):
        wait_until(have_data, interval_s=0.5)
    assert {name for name, found in by_name.items() if not found} == ELSEWHERE
    (pod,) = by_name["Power by pod, the 10 largest, A"]
    assert pod[0] == {"namespace": "shop", "pod": "web-0"}
    assert {labels.get("name", "") for labels, _ in by_name["Power by namespace, A"]} == {"shop", "no namespace"}
    occupied = by_name["Occupancy by namespace, A"]
    assert {labels.get("namespace", "") for labels, _ in occupied} == {"shop", "no namespace"}
    units = by_name["Bandwidth by unit, the 10 largest, A"]
    assert [labels["unit"] for labels, _ in units] == ["web.service"]
    for name in ("Power by pod, the 10 largest, A", "Power of the cores, A", "Bandwidth by pool, A"):
        assert any(value > 0 for _, value in by_name[name]), name


def test_each_panel_can_be_drawn(server: Prometheus, tmp_path: Path) -> None:
    begin = time.time() - 60
    wait_for_series(server, begin)
    drawn = draw(server, tmp_path / "panels.png", begin, time.time())
    assert drawn.keys() == {panel["title"] for panel in panels()}
    assert [title for title, series in drawn.items() if not series] == []
    assert (tmp_path / "panels.png").read_bytes().startswith(b"\x89PNG")


def test_panels_without_series_can_be_drawn(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running(tmp_path / "prometheus", silent.getsockname()[1], 1) as server,
    ):
        drawn = draw(server, tmp_path / "panels.png", time.time() - 60, time.time())
    assert 0 in drawn.values()
    assert (tmp_path / "panels.png").read_bytes().startswith(b"\x89PNG")


def _shortened(query: str) -> str:
    """Return a query of some seconds, without its variables and the condition of an alert: none fires here."""
    return re.sub(r"\s(==|>|<) (on \(job, instance\) .*|[0-9.]+)\s*\Z", "", shortened(query))


def test_variables_have_values_on_a_machine_without_energy(tmp_path: Path) -> None:
    assert variables().keys() == {"job", "instance", "namespace"}
    with machine_of(tmp_path, "intel-rdt") as machine, contextlib.ExitStack() as stack:
        machine.start()
        run_for(machine, "ended", loops=1000, namespace="shop")
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        options = ("--manager-socket", machine.socket, "--timeout", "60")
        stack.callback(end, start(listener, machine.top / "exporter.log", *options))
        port = listener.getsockname()[1]
        server = stack.enter_context(running(machine.top / "prometheus", port, 1))

        def values() -> dict[str, set[str]]:
            found = {}
            for name, (series, label) in variables().items():
                query = f"group by ({label}) ({series.replace('$job', VARIABLES['$job'])})"
                found[name] = {labels[label] for labels, _ in server.query(query, time.time())}
            return found

        expected = {"job": {"resctrlmond"}, "instance": {f"127.0.0.1:{port}"}, "namespace": {"shop"}}
        # After a scrape that took longer than its time-out, no series has a value until the next one.
        wait_until_equal(values, expected, interval_s=0.5)
