# SPDX-License-Identifier: Apache-2.0
"""Print a table of the delays of Assign and Hook.Run under each flood, and of the daemon's memory (make flood).

The limit on memory is a requirement. Latency is a ratio to that without a flood, because it depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from resctrlmond.client import Client
from tests.bench.host import ROOT, Host
from tests.flood.attack import FLOODS, MANAGER

# The daemon's own limits add up to less; most floods take a tenth of it.
MOST_MIB = 400
# Processes of each flood.
ATTACKERS = 2
# Each has 60 KB: their list, with the workloads that the rows add, is within what one reply over D-Bus may take.
WORKLOADS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds that each call took, and the daemon's peak memory in MiB meanwhile."""

    flood: str
    assign: list[float]
    hook: list[float]
    bus: list[float]
    peak_mib: float


def measure(floods: Sequence[str], samples: int) -> list[Row]:
    """A row without a flood, and one for each flood."""
    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
        os.chmod(top, 0o755)
        host = Host(Path(top))
        stack.enter_context(host.running())
        pid = stack.enter_context(_daemon(host))
        _fill(host)
        rows = [_row("none", host, pid, samples)]
        for flood in floods:
            with _flooded(flood, host):
                rows.append(_row(flood, host, pid, samples))
            _release_workloads_of_row(host)
            print(table([rows[0], rows[-1]]), flush=True)
        return rows


@contextlib.contextmanager
def _daemon(host: Host) -> Iterator[int]:
    """Run the daemon, and kill it at the end: a stop during a flood is not measured."""
    environment = os.environ | {"DBUS_SYSTEM_BUS_ADDRESS": host.bus.address}
    command = [sys.executable, "-m", "tests.bench.serve", str(host.folder)]
    with subprocess.Popen(command, cwd=ROOT, env=environment) as it:
        try:
            deadline = time.monotonic() + 60
            while not os.path.exists(host.varlink):
                assert it.poll() is None, "the daemon ended by itself"
                assert time.monotonic() < deadline, "the daemon opened no socket"
                time.sleep(0.05)
            yield it.pid
        finally:
            it.kill()


def _fill(host: Host) -> None:
    attributes = {f"n{number}": "v" * 4000 for number in range(15)}
    with Client(host.varlink, timeout_s=60) as client:
        for number in range(WORKLOADS):
            client.call(f"{MANAGER}.Create", {"key": f"long-{number}", "attributes": attributes})


def _release_workloads_of_row(host: Host) -> None:
    """End the workloads of a row: those of the next one need their RMIDs. Each must have had a group."""
    with Client(host.varlink, timeout_s=60) as client:
        workloads = client.call(f"{MANAGER}.List", {})["workloads"]
        assert not [workload["key"] for workload in workloads if workload["state"] == "pending"]
        for workload in workloads:
            for claim in workload["claims"] if not workload["key"].startswith("long-") else ():
                client.call(f"{MANAGER}.Release", {"key": workload["key"], "claim": claim["owner"]})


@contextlib.contextmanager
def _flooded(flood: str, host: Host) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.flood.attack", flood, host.varlink, host.bus.address]
    attackers = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(ATTACKERS)]
    try:
        time.sleep(2)
        assert all(one.poll() is None for one in attackers), f"the flood {flood} ended by itself"
        yield
    finally:
        for one in attackers:
            one.send_signal(signal.SIGKILL)
            one.wait()


def _row(flood: str, host: Host, pid: int, samples: int) -> Row:
    # The high-water mark begins anew (proc(5), clear_refs).
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    assign: list[float] = []
    hook: list[float] = []
    bus: list[float] = []
    for number in range(samples):
        key = f"{flood.replace(' ', '-')}-{number}"
        for seconds, method, before in ((assign, "Assign", "a-"), (hook, "Hook.Run", "h-")):
            with subprocess.Popen(["sleep", "600"]) as process:
                try:
                    seconds.append(_timed(host, method, before + key, process.pid))
                finally:
                    process.kill()
        bus.append(_timed_on_bus(host, "b-" + key))
    return Row(flood, assign, hook, bus, _peak_mib(pid))


def _timed(host: Host, method: str, key: str, pid: int) -> float:
    begun = time.perf_counter()
    with Client(host.varlink, timeout_s=60) as client:
        if method == "Assign":
            client.call(f"{MANAGER}.Assign", {"key": key, "pid": pid})
        else:
            state = {"ociVersion": "1.2.0", "id": key, "status": "created", "pid": pid, "bundle": "/b"}
            client.call("org.resctrlmon.Hook.Run", {"stage": "createRuntime", "state": json.dumps(state)})
    return time.perf_counter() - begun


def _timed_on_bus(host: Host, key: str) -> float:
    """Return the time that root waits for Create over D-Bus, on a new connection."""
    call = ("call", "org.resctrlmon1", "/org/resctrlmon1", "org.resctrlmon1.Manager", "Create", "sa{sv}", key, "0")
    begun = time.perf_counter()
    command = ["busctl", f"--address={host.bus.address}", "--timeout=60", *call]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


def _peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError("the kernel does not report the peak")


def table(rows: list[Row]) -> str:
    """The rows for people; ratios are to the first."""
    lines = [
        f"{'flood':<18} {'Assign: median':>18} {'max':>16} {'Hook.Run: median':>20} {'max':>16} "
        f"{'D-Bus: median':>20} {'max':>16} {'peak':>9}"
    ]
    for row in rows:
        cells = [
            f"{1000 * of(mine):8.1f} ms {of(mine) / of(quiet):4.1f}x"
            for mine, quiet in ((row.assign, rows[0].assign), (row.hook, rows[0].hook), (row.bus, rows[0].bus))
            for of in (statistics.median, max)
        ]
        lines.append(
            f"{row.flood:<18} {cells[0]:>18} {cells[1]:>16} {cells[2]:>20} {cells[3]:>16} "
            f"{cells[4]:>20} {cells[5]:>16} {row.peak_mib:5.0f} MiB"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table; 1 if the daemon took more memory than it may."""
    parser = argparse.ArgumentParser(prog="python -m tests.flood", description=__doc__)
    parser.add_argument("--samples", type=int, default=20, help="calls of each kind for each flood")
    parser.add_argument("--flood", action="append", choices=FLOODS, help="only this one; may be given several times")
    options = parser.parse_args()
    rows = measure(options.flood or list(FLOODS), options.samples)
    print(table(rows))
    return int(any(row.peak_mib > MOST_MIB for row in rows))


if __name__ == "__main__":
    sys.exit(main())
