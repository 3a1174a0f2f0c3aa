# SPDX-License-Identifier: Apache-2.0
"""Debian's Prometheus server, which scrapes an exporter every few seconds, and other targets if a test has them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.exporter.conftest import reserved_port
from tests.wait import wait_until

CONFIGURATION = """\
global: {{scrape_interval: {interval_s}s, scrape_timeout: {interval_s}s}}
scrape_configs:
  - job_name: resctrlmond
    static_configs: [{{targets: {targets}}}]
"""
_WAIT_S = 60.0
# Times (seconds since the epoch) and values.
Curve = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """A series: its labels without those of the target, and the times and values of its samples."""

    labels: frozenset[tuple[str, str]]
    samples: tuple[tuple[float, float], ...]


class Prometheus:
    """The HTTP interface of a server at a port of this host."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        """Return whether the server answers queries."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=_WAIT_S):
                return True
        except OSError:
            return False

    def series(self, metric: str, **labels: str) -> list[Series]:
        """Return all samples of a metric."""
        selector = ",".join(f'{name}="{value}"' for name, value in labels.items())
        query = urllib.parse.urlencode({"query": f"{metric}{{{selector}}}[1d]"})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{query}", timeout=_WAIT_S) as reply:
            found = json.load(reply)["data"]["result"]
        return [
            Series(
                frozenset(of for of in one["metric"].items() if of[0] not in ("__name__", "instance", "job")),
                tuple((float(time), float(value)) for time, value in one["values"]),
            )
            for one in found
        ]

    def query(self, query: str, time: float) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the values of an instant query at a time (seconds since the epoch)."""
        parameters = urllib.parse.urlencode({"query": query, "time": f"{time:.3f}"})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{parameters}", timeout=_WAIT_S) as reply:
            found = json.load(reply)["data"]["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def curves(self, query: str, begin: float, until: float) -> list[tuple[dict[str, str], Curve]]:
        """Return the labels and the points of each series of a query between two times (seconds since the epoch)."""
        step_s = max((until - begin) / 200, 1.0)
        parameters = urllib.parse.urlencode({"query": query, "start": begin, "end": until, "step": step_s})
        with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{parameters}", timeout=_WAIT_S) as reply:
            found = json.load(reply)["data"]["result"]
        return [(one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in found]

    def metrics(self) -> list[str]:
        """Return the names of all metrics."""
        with urllib.request.urlopen(f"{self._url}/api/v1/label/__name__/values", timeout=_WAIT_S) as reply:
            return list(json.load(reply)["data"])


@contextlib.contextmanager
def running(folder: Path, target: int, interval_s: int, *others: int) -> Iterator[Prometheus]:
    """Run a server that scrapes the port ``target``, and the ``others``, while the block runs."""
    targets = json.dumps([f"127.0.0.1:{port}" for port in (target, *others)])
    with running_with(folder, CONFIGURATION.format(targets=targets, interval_s=interval_s)) as server:
        yield server


@contextlib.contextmanager
def running_with(folder: Path, text: str) -> Iterator[Prometheus]:
    """Run a server with this configuration while the block runs."""
    folder.mkdir()
    configuration = folder / "prometheus.yml"
    configuration.write_text(text)
    log = folder / "log"
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.1"))
        command = ["prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        output = stack.enter_context(log.open("wb"))
        process = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output, cwd=folder))
        try:
            server = Prometheus(port)
            wait_until(lambda: server.is_ready() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield server
        finally:
            process.terminate()
