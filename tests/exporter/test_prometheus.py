# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus server and promtool accept the metrics, and Prometheus misses nothing."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from resctrlmond.exporter.metrics import Names
from resctrlmond.sim.profiles import PROFILES
from tests.exporter.churn import churn
from tests.exporter.conftest import Exporter, machine_of
from tests.exporter.test_figures import run_for

# Some scrapes and kills. In the hour of make churn, ended workloads expire too.
_SECONDS = 25.0


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


def test_prometheus_misses_no_end_and_sees_no_counter_fall(tmp_path: Path) -> None:
    outcome = churn(tmp_path, _SECONDS, 3)
    assert outcome.faults == []
    assert outcome.workloads > 10
    assert outcome.kills
    assert outcome.starts
    assert outcome.samples > outcome.workloads
    assert outcome.ended == outcome.workloads + 3
