# SPDX-License-Identifier: Apache-2.0
"""Print what the daemon takes while containers start and end without pause (make soak), and fail if it grows.

The daemon is killed and started again during the first third only, since memory grows in a process that lives.

No test of reused process numbers may run beside it: the look-alike of resctrl knows tasks by their numbers only, so a
container would seem to be in the group of the one that had its number a moment before. ``unshare --pid --fork
--mount-proc`` gives the run numbers of its own.
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
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from resctrlmond.client import Client, VarlinkError
from tests.bench.host import Host, resident
from tests.bench.measure import p99
from tests.daemon.conftest import cgroup_root, end
from tests.hook.builds import compile_hook
from tests.wait import wait_until

MANAGER = "org.resctrlmon.Manager."
WORKERS = 4
KILLED = 1 / 3
# From the second to the third part of the time after the kills. In the first, which lasts longer than snapshot_ttl,
# the ended runs that are kept increase.
MOST_GROWTH = 1.10
MOST_SLOWER = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory and files in use at a time. Since the previous sample: the hooks, and reads of all workloads."""

    at_s: float
    memory: float
    descriptors: int
    groups: int
    records: int
    snapshots: int
    hooks: list[float]
    lost: int
    reads: int

    def __str__(self) -> str:
        taken = f"{statistics.median(self.hooks) * 1e3:6.1f} / {p99(self.hooks) * 1e3:6.1f}" if self.hooks else "-"
        return (
            f"{self.at_s:6.0f} s  {self.memory / 2**20:6.1f} MiB  {self.descriptors:4} descriptors  {self.groups:4} "
            f"groups  {self.records:6} records  {self.snapshots:6} snapshots  {len(self.hooks):5} hooks, {taken} ms  "
            f"{self.reads:3} reads"
            f"{f', {self.lost} without the daemon' if self.lost else ''}"
        )


@dataclass
class Churn:
    """Containers that start and end in several threads until ``stopped`` is set."""

    host: Host
    stopped: threading.Event = field(default_factory=threading.Event)
    # The daemon is being killed or starts: hooks may be lost.
    is_down: threading.Event = field(default_factory=threading.Event)
    kills: int = 0
    hooks: list[float] = field(default_factory=list)
    lost: int = 0
    reads: int = 0
    failures: list[str] = field(default_factory=list)

    def live(self, worker: int) -> None:
        """Start and end one container after another."""
        number = 0
        while not self.stopped.is_set():
            number += 1
            self._container(f"{worker:02x}{os.getpid():08x}{number:054x}")

    def read(self) -> None:
        """Read as an exporter of metrics does: the list, the state, and the use of all workloads."""
        while not self.stopped.wait(1.0):
            with contextlib.suppress(OSError, VarlinkError), Client(self.host.varlink) as client:
                for verb in ("List", "ReadAll"):
                    for _ in client.stream(f"{MANAGER}{verb}"):
                        pass
                client.call(f"{MANAGER}Status")
                self.reads += 1

    def _container(self, id_: str) -> None:
        cgroup = cgroup_root() / f"crio-{id_}.scope"
        cgroup.mkdir()
        init = subprocess.Popen(["sleep", "3600"])
        try:
            (cgroup / "cgroup.procs").write_text(str(init.pid), encoding="ascii")
            self._hook(id_, init.pid)
        finally:
            end(init)
            cgroup.rmdir()

    def _hook(self, id_: str, pid: int) -> None:
        state = {"ociVersion": "1.2.0", "id": id_, "status": "created", "pid": pid, "bundle": "/b", "annotations": {}}
        # Not the hook's own limit of 2 s: on a busy machine, the time is shown and does not fail the run.
        command = [str(compile_hook()), "createRuntime", "--strict", "--socket", self.host.varlink]
        command += ["--timeout", "60"]
        was_down, kills = self.is_down.is_set(), self.kills
        began = time.monotonic()
        done = subprocess.run(
            command, input=json.dumps(state), stderr=subprocess.PIPE, text=True, check=False, env={}, timeout=120
        )
        if done.returncode == 0:
            self.hooks.append(time.monotonic() - began)
        elif was_down or self.kills != kills:
            self.lost += 1
        else:
            self.failures.append(f"the hook of container {id_} failed: {done.stderr.strip()}")


def soak(minutes: float, kill_every_s: float, sample_every_s: float) -> list[str]:
    """Print a line for each sample; return what is wrong."""
    with tempfile.TemporaryDirectory(prefix="resctrlmond-soak.", dir="/dev/shm") as folder:
        host = Host(Path(folder), is_constant=True)
        with host.running(), _churning(host) as churn:
            began = time.monotonic()
            end_of_kills = began + minutes * 60 * KILLED
            while time.monotonic() < end_of_kills:
                until = min(time.monotonic() + kill_every_s, end_of_kills)
                with _daemon(churn) as pid:
                    _run(churn, pid, began, until, sample_every_s)
                    churn.is_down.set()
                    churn.kills += 1
                    os.kill(pid, signal.SIGKILL)
            with _daemon(churn) as pid:
                steady = _run(churn, pid, began, began + minutes * 60, sample_every_s)
                churn.stopped.set()
                return churn.failures + growth(steady) + _left(host)


@contextlib.contextmanager
def _churning(host: Host) -> Iterator[Churn]:
    churn = Churn(host)
    churn.is_down.set()
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(churn.live, worker) for worker in range(WORKERS)] + [threads.submit(churn.read)]
        try:
            yield churn
        finally:
            churn.stopped.set()
    for each in running:
        each.result()


@contextlib.contextmanager
def _daemon(churn: Churn) -> Iterator[int]:
    with churn.host.daemon() as (pid, _):
        churn.is_down.clear()
        yield pid


def _run(churn: Churn, pid: int, began: float, until: float, sample_every_s: float) -> list[Sample]:
    """Sample until the time, and reload the daemon after each sample."""
    samples = []
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(sample_every_s, left_s))
        hooks, churn.hooks = churn.hooks, []
        lost, churn.lost = churn.lost, 0
        reads, churn.reads = churn.reads, 0
        run = churn.host.folder / "run"
        samples.append(
            Sample(
                at_s=time.monotonic() - began,
                memory=resident(pid),
                descriptors=len(os.listdir(f"/proc/{pid}/fd")),
                groups=len(os.listdir(churn.host.tree / "mon_groups")),
                records=len(os.listdir(run / "records")),
                snapshots=len(os.listdir(run / "groups")),
                hooks=hooks,
                lost=lost,
                reads=reads,
            )
        )
        print(samples[-1], flush=True)
        os.kill(pid, signal.SIGHUP)
    return samples


def growth(steady: list[Sample]) -> list[str]:
    """Return what grew from the second to the third part of the samples."""
    found = []
    third = len(steady) // 3
    before, after = steady[third : 2 * third], steady[2 * third :]
    if not all(any(sample.hooks for sample in part) for part in (before, after)):
        return ["a hook took longer than a third of the time without kills"]
    if not all(any(sample.reads for sample in part) for part in (before, after)):
        return ["the reader failed for a third of the time without kills"]
    # A sample has from 16 to 43 descriptors, as many as calls run at that time. A leak would add some for each hook.
    for name, most in (("memory", MOST_GROWTH), ("descriptors", MOST_SLOWER), ("groups", MOST_SLOWER)):
        first, last = (statistics.median(getattr(sample, name) for sample in part) for part in (before, after))
        if last > first * most:
            found.append(f"{name} grew from {first:.0f} to {last:.0f}")
    first, last = (statistics.median(taken for sample in part for taken in sample.hooks) for part in (before, after))
    if last > first * MOST_SLOWER:
        found.append(f"a hook took {first * 1e3:.1f} ms, then {last * 1e3:.1f} ms")
    return found


def _left(host: Host) -> list[str]:
    """Return what remains after the end of all containers."""
    with Client(host.varlink) as client:

        def workloads() -> list[dict[str, str]]:
            # Thousands of ended runs are kept, more than one reply may have.
            return [workload for page in client.stream(f"{MANAGER}List") for workload in page["workloads"]]

        def is_over() -> bool:
            return not os.listdir(host.tree / "mon_groups") and {each["state"] for each in workloads()} <= {
                "completed"
            }

        with contextlib.suppress(AssertionError):
            wait_until(is_over)
        print(f"baselines of the runs that are kept: {dict(Counter(each['baseline'] for each in workloads()))}")
        states = Counter(each["state"] for each in workloads())
    groups = os.listdir(host.tree / "mon_groups")
    left = [f"groups remain: {', '.join(groups)}"] if groups else []
    return left + ([f"workloads remain: {dict(states)}"] if set(states) - {"completed"} else [])


def main() -> int:
    """Run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    arguments = parser.parse_args()
    wrong = soak(arguments.minutes, kill_every_s=20.0, sample_every_s=10.0)
    print("\n".join(wrong) or "nothing grew, nothing is left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
