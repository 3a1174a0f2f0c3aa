# SPDX-License-Identifier: Apache-2.0
"""Draw the dashboard of the examples from a real Prometheus, to be looked at (make panels). Debian has no Grafana."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

from resctrlmond.sim.control.client import Control
from tests.daemon.conftest import end
from tests.exporter.conftest import Machine, machine_of, start
from tests.exporter.prometheus import Curve, Prometheus, running
from tests.exporter.test_figures import run_for
from tests.wait import wait_until

EXAMPLES = Path(__file__).parents[2] / "packaging" / "examples" / "prometheus"
DASHBOARD = EXAMPLES / "resctrlmond.dashboard.json"
BUSY = ["nice", "sh", "-c", "while :; do :; done"]
# The values of the variables of the dashboard: the first three are those of "All".
VARIABLES = {"$job": ".*", "$instance": ".*", "$namespace": ".*", "$__rate_interval": "30s", "$__range": "15m"}
# Grafana's grid has 24 columns.
_COLUMNS, _ROW_INCHES = 24, 0.42
_UNITS = {"watt": "W", "joule": "J", "Bps": "B/s", "bytes": "B", "s": "s"}
_LONG = re.compile(r"\[(5m|15m|1h)\]")
# A scrape that takes longer than its time-out has no samples, and a rate needs those of two scrapes.
_WAIT_S = 300.0


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard, without the titles of rows."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def shortened(query: str) -> str:
    """Return a query of some seconds, without its variables: a run of minutes has no rate over an hour."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    return _LONG.sub("[30s]", query)


def curves(server: Prometheus, panel: dict[str, Any], begin: float, until: float) -> dict[str, Curve]:
    """Return the points of each series of a panel, by the name that its legend has."""
    found: dict[str, Curve] = {}
    for target in panel["targets"]:
        for labels, points in server.curves(shortened(target["expr"]), begin, until):
            found[_name(target.get("legendFormat") or "", labels)] = points
    return found


def wait_for_series(server: Prometheus, begin: float) -> None:
    """Wait until each panel has a series since ``begin``. Raise AssertionError with the titles of those without."""
    empty = panels()

    def has_all() -> bool:
        empty[:] = [panel for panel in empty if not curves(server, panel, begin, time.time())]
        return not empty

    with contextlib.suppress(AssertionError):
        wait_until(has_all, interval_s=0.5, timeout_s=_WAIT_S)
    titles = ", ".join(panel["title"] for panel in empty)
    assert not empty, f"Prometheus has no series of these panels after {_WAIT_S:.0f} s: {titles}"


def draw(server: Prometheus, path: Path, begin: float, until: float) -> dict[str, int]:
    """Draw all panels, as they are placed in the dashboard. Return the number of series of each, by its title."""
    shown = panels()
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown)
    figure = Figure(figsize=(18, height * _ROW_INCHES), layout=None)
    series = {}
    for panel in shown:
        place = panel["gridPos"]
        inner = (
            (place["x"] + 1.2) / _COLUMNS,
            1 - (place["y"] + place["h"] - 1.2) / height,
            (place["w"] - 1.6) / _COLUMNS,
            (place["h"] - 2.4) / height,
        )
        found = curves(server, panel, begin, until)
        _panel(figure.add_axes(inner), panel, found, begin)
        series[panel["title"]] = len(found)
    figure.savefig(path, dpi=70)
    return series


def _panel(axes: Axes, panel: dict[str, Any], found: dict[str, Curve], begin: float) -> None:
    axes.set_title(panel["title"], fontsize=9, loc="left")
    unit = panel["fieldConfig"]["defaults"].get("unit", "none")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    formatter = EngFormatter(_UNITS[unit], places=2) if unit in _UNITS else plain
    last = {name: points[-1][1] for name, points in found.items() if points}
    if panel["type"] == "stat":
        axes.axis("off")
        axes.text(0.5, 0.4, "\n".join(formatter(value, None) for value in last.values()), fontsize=20, ha="center")
    elif panel["type"] == "bargauge":
        axes.barh(list(last), list(last.values()))
        axes.xaxis.set_major_formatter(formatter)
    else:
        for name, points in found.items():
            axes.plot([at - begin for at, _ in points], [value for _, value in points], label=name or "(no name)")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(formatter)
        if found:  # Matplotlib warns of a legend without a series.
            axes.legend(fontsize=7, loc="upper left")
    axes.tick_params(labelsize=7)


def _name(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), template)


def _load(machine: Machine, stack: contextlib.ExitStack) -> Callable[[], None]:
    """Start pods and units that run and rest in turns. Return the function of a turn, which also runs a short one."""
    owners = [("shop", "web-0", ""), ("shop", "db-0", ""), ("bank", "ledger-0", ""), ("", "", "web.service")]
    children = []
    for number, (namespace, pod, unit) in enumerate(owners):
        busy = subprocess.Popen(BUSY)
        stack.callback(end, busy)
        names = {"unit": unit} if unit else {"pod.namespace": namespace, "pod.name": pod}
        key = unit or f"c0ffee00-0000-4000-8000-00000000000{number}"
        machine.call("Assign", key=key, pid=busy.pid, claim="me", attributes=names)
        children.append(busy)
    Control(str(machine.top / "resctrl")).make_group("mon_groups/theirs")
    turns = itertools.count()

    def turn() -> None:
        number = next(turns)
        for place, child in enumerate(children):
            child.send_signal(signal.SIGCONT if number >> place & 1 else signal.SIGSTOP)
        run_for(machine, f"short-{number}")

    return turn


def main() -> None:
    """Run a simulated machine for some minutes, and draw what the dashboard shows of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.exporter.panels", description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="(%(default)s)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="resctrlmond-panels.") as folder,
        machine_of(Path(folder), "intel-aet") as machine,
        contextlib.ExitStack() as stack,
    ):
        machine.start()
        turn = _load(machine, stack)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        command = ("--manager-socket", machine.socket, "--timeout", "60")
        stack.callback(end, start(listener, machine.top / "exporter.log", *command))
        server = stack.enter_context(running(machine.top / "prometheus", listener.getsockname()[1], 2))
        begin = time.time()
        while time.time() - begin < options.seconds:
            turn()
            time.sleep(5)
        series = draw(server, options.picture, begin, time.time())
    for title, number in series.items():
        print(f"{number:4}  {title}")


if __name__ == "__main__":
    main()
