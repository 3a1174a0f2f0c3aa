# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus server and promtool accept the metrics, and Prometheus the queries of the manual page."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from resctrlmond.exporter.metrics import Names
from resctrlmond.sim.profiles import PROFILES
from tests.exporter.conftest import Exporter, machine_of, start
from tests.exporter.prometheus import running_with
from tests.exporter.test_figures import run_for
from tests.wait import wait_until, wait_until_equal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "man" / "resctrlmon-exporter.8.scd"


@pytest.mark.parametrize("profile", PROFILES)
def test_promtool_has_no_remark(tmp_path: Path, profile: str) -> None:
    with machine_of(tmp_path, profile) as machine:
        machine.start()
        run_for(machine, "short", loops=1000)
        machine.call("Create", key="empty", claim="me", attributes={"pod.name": 'a"b\\', "unit": "x.service"})
        machine.call("Create", key="c0ffee00-0000-4000-8000-000000000001", claim="me")
        names = [option for name in Names for option in ("--names", name)]
        with contextlib.closing(Exporter(tmp_path, machine.socket, "--event", "*", *names)) as exporter:
            exporter.start()
            text = exporter.get().body
    for name in ("resctrlmond_memory_bandwidth_bytes", "l3_mbm_bytes", "node_resctrl_memory_bandwidth_bytes"):
        assert f"{name}_total{{".encode() in text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_promtool_would_complain() -> None:
    wrong = b"# TYPE x counter\nx 1\n"
    done = subprocess.run(["promtool", "check", "metrics"], input=wrong, capture_output=True, timeout=60, check=False)
    assert done.returncode


def _blocks(page: str, heading: str) -> list[str]:
    """Return the literal blocks below a line of the page."""
    _, found, rest = page.partition(heading)
    assert found
    return [block.replace("\\\\", "\\") for block in rest.split("```\n")[1::2]]


def test_prometheus_scrapes_over_tls_with_the_files_of_the_page(tmp_path: Path) -> None:
    """The commands for the certificates, the options of the service, the job and the rules, as copied."""
    page = PAGE.read_text(encoding="utf-8").replace("node1.example", "localhost")
    for folder in ("/etc/ssl/private", "/etc/ssl", "/etc/prometheus"):
        page = page.replace(folder, str(tmp_path))
    certificates, _, service, _, job, *_ = _blocks(page, "\nListen on all addresses over TLS")
    commands = certificates.replace("# openssl", "openssl")
    subprocess.run(["sh", "-e", "-c", commands], check=True, timeout=60, capture_output=True)
    credentials = dict(re.findall(r"LoadCredential=(\w+):(\S+)", service))
    options = service.split("ExecStart=/usr/bin/resctrlmon-exporter ")[1].split()
    for name, file in credentials.items():
        options = [option.replace(f"${{CREDENTIALS_DIRECTORY}}/{name}", file) for option in options]
    [rules, *_] = _blocks(page, "\n_/usr/share/doc/resctrlmond/examples/prometheus_. Each alert")
    rules = rules.replace("/usr/share/doc/resctrlmond/examples", str(ROOT / "packaging" / "examples"))
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(machine_of(tmp_path, "intel-aet"))
        machine.start()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        log = tmp_path / "log"
        exporter = start(listener, log, "--manager-socket", machine.socket, *options)
        stack.callback(exporter.wait)
        stack.callback(exporter.kill)
        job = job.replace("localhost:10133", f"localhost:{listener.getsockname()[1]}")
        configuration = "global: {scrape_interval: 1s, scrape_timeout: 1s}\n" + rules + job
        server = stack.enter_context(running_with(tmp_path / "prometheus", configuration))
        wait_until(lambda: 1.0 in [value for one in server.series("resctrlmond_up") for _, value in one.samples])
        assert {value for one in server.series("up", job="resctrlmond") for _, value in one.samples} >= {1.0}

        def days() -> dict[str, float]:
            query = "round((resctrlmond_exporter_certificate_expiry_time_seconds - time()) / 86400)"
            return {labels["option"]: value for labels, value in server.query(query, time.time())}

        # The commands create certificates for 3650 days. After a scrape that took longer than its time-out, no series
        # has a value until the next one.
        wait_until_equal(days, {"certfile": 3650.0, "client-cafile": 3650.0}, interval_s=0.5)


def test_page_restricts_a_unix_socket() -> None:
    """All users can connect to a socket of systemd without a mode, and to the default address."""
    [block, *_] = _blocks(PAGE.read_text(encoding="utf-8"), "\nListen on a Unix socket")
    lines = block.split()
    assert lines[:2] == ["[Socket]", "ListenStream="]
    assert {"SocketMode=0660", "SocketGroup=resctrlmon-read"} <= set(lines)


def test_page_has_an_exact_query_and_the_error_of_increase(tmp_path: Path) -> None:
    """In an hour, one namespace used 1000 J at once, and a new one 500 J before its first scrape.

    A host without a sample an hour ago has used an unknown amount in the hour, not all since its boot.
    """
    page = PAGE.read_text(encoding="utf-8")
    estimate = next(line for line in page.splitlines() if line.startswith("sum by (name) (increase("))
    exact = next(block for block in page.split("```\n") if " offset 1h" in block)
    name = "resctrlmond_accounted_core_energy_joules_total"
    # Host c had no figures an hour ago, and the sums of host d began again since then.
    values = {
        ("shop", "a"): "7x100 1007x200",
        ("new", "a"): "_x100 500x200",
        ("gone", "c"): "_x100 5000000x200",
        ("boot", "d"): "9x100 30x200",
    }
    starts = {"a": "1x300", "c": "_x100 1x200", "d": "1x100 2x200"}
    series = [
        {"series": f'{name}{{by="namespace", name="{of}", instance="{host}"}}', "values": numbers}
        for (of, host), numbers in values.items()
    ]
    series += [
        {"series": f'resctrlmond_accounted_start_time_seconds{{instance="{host}"}}', "values": numbers}
        for host, numbers in starts.items()
    ]

    def query(expr: str, **increases: float) -> dict[str, object]:
        samples = [{"labels": f'{{name="{of}"}}', "value": value} for of, value in increases.items()]
        return {"expr": expr, "eval_time": "61m7s", "exp_samples": samples}

    # The 240 samples of the hour span 3585 s.
    error = 3600 / 3585
    assert f"up to {error - 1:.2%} too high" in page
    estimated = {"shop": round(1000 * error, 2), "new": 0, "gone": 0, "boot": round(21 * error, 2)}
    queries = [query(f"round({estimate}, 0.01)", **estimated), query(exact, shop=1000, new=500)]
    tests = [{"interval": "15s", "input_series": series, "promql_expr_test": queries}]
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
