# SPDX-License-Identifier: Apache-2.0
"""Start many containers at once on a guest with one emulated CPU, and print the outcome of each.

    python3 -m tests.kernel.starved [--profile monitoring-only] [--load 4] [COUNT ...]

Exits with 1 if a container did not start, was not deleted or got no monitoring group, or if a container that executed
outside its group is reported as exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .host import SOCKET, WHERE, Host
from .install import install, stage
from .machine import Machine

# The profile with more than 512 RMIDs: no container waits for one.
PROFILE = "monitoring-only"
COUNTS = (50, 200)
_WORK = "/run/starved"
_SECONDS = 1800.0
_QUEUE_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """Numbers of containers. ``unsaid`` lists those that executed outside their group and are reported as exact."""

    count: int
    started: int
    inside: int
    marked: int
    unmonitored: int
    deleted: int
    unsaid: list[str]
    errors: str

    @property
    def is_good(self) -> bool:
        """Whether every container started and ended, is in a group, and every exact figure is correct."""
        return self.started == self.deleted == self.count and not self.unsaid and not self.unmonitored

    def __str__(self) -> str:
        return (
            f"{self.count:5} at once: {self.started} started, of these {self.inside} in their group from the first "
            f"instruction, {self.marked} marked as late, {self.unmonitored} without a group; {self.deleted} deleted; "
            f"{len(self.unsaid)} outside and called exact"
        )


def start_at_once(host: Host, count: int, *, prefix: str = "") -> Outcome:
    """Start ``count`` containers with crun at once, each with the hooks as shipped, and delete them at once.

    ``prefix`` is put before 'crun run', for example a command that limits its CPU time.
    """
    bundle = host.bundle("starved", f"{WHERE}; exec sleep 3600", {}, "/starved/NAME", as_shipped=True)
    names = f"$(seq -f starved-%g {count})"
    host.run(
        f"rm -rf {_WORK} && mkdir -p {_WORK} && for name in {names}; do mkdir {_WORK}/$name && "
        f'sed "s:/starved/NAME:/starved/$name:" {bundle}/config.json >{_WORK}/$name/config.json || exit 1; done',
        timeout=_SECONDS,
    )
    _each(host, names, f"{prefix} crun run -d --bundle {_WORK}/$name $name </dev/null", "run")
    started = _succeeded(host, "run")
    # One process for all of them, because each fork takes seconds here.
    host.run(
        f"until test $(grep -l ^mon: {_WORK}/*/run.out | wc -l) -ge {len(started)}; do sleep 1; done",
        timeout=_SECONDS,
    )
    places = {name: line.removeprefix("mon:") for name, line in _lines(host, "run.out") if line.startswith("mon:")}
    groups = _groups(host, places)
    outside = [name for name, place in places.items() if place != name]
    known = [name for name in outside if name in groups]
    unsaid = [name for name in known if groups[name]["baseline"] == "exact"]
    _each(host, names, "crun delete --force $name", "delete")
    printed = [line for output in ("run.out", "delete.out") for _, line in _lines(host, output)]
    logged = host.run("journalctl --quiet -t resctrlmon-oci-hook -o cat", check=False, timeout=_SECONDS).stdout
    errors = Counter(line for line in (*printed, *logged.splitlines()) if not line.startswith(("mon:", "res:")))
    return Outcome(
        count=count,
        started=len(started),
        inside=len(places) - len(outside),
        marked=len(known) - len(unsaid),
        unmonitored=len(outside) - len(known),
        deleted=len(_succeeded(host, "delete")),
        unsaid=unsaid,
        errors="\n".join(f"{number:5} times: {line}" for line, number in errors.most_common(10)),
    )


def _groups(host: Host, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the workloads by key, as soon as all containers are in their groups, at the latest after _QUEUE_S.

    The daemon serves the calls of hooks that gave up after all others.
    """
    deadline = time.monotonic() + _QUEUE_S
    while True:
        listed = host.out(f"varlinkctl call --timeout=600 -j {SOCKET} org.resctrlmon.Manager.List", _SECONDS)
        groups = {workload["key"]: workload for workload in json.loads(listed)["workloads"]}
        is_joining = any(member.get("joining") for one in groups.values() for member in one["members"])
        if not is_joining and (groups.keys() >= set(names) or time.monotonic() > deadline):
            return groups
        time.sleep(1)


def _each(host: Host, names: str, command: str, step: str) -> None:
    # Each exit status goes into a file; the shell waits for all processes.
    path = f"{_WORK}/$name/{step}"
    loop = f"for name in {names}; do ({command} >{path}.out 2>&1; echo $? >{path}.status) & done; wait"
    host.run(loop, timeout=_SECONDS)


def _succeeded(host: Host, step: str) -> list[str]:
    return [name for name, status in _lines(host, f"{step}.status") if status == "0"]


def _lines(host: Host, file: str) -> list[tuple[str, str]]:
    """Return the lines of each container's file, with the container's name."""
    printed = host.run(f"grep -H '' {_WORK}/*/{file}", check=False, timeout=_SECONDS).stdout.splitlines()
    found = (line.removeprefix(f"{_WORK}/").partition(f"/{file}:") for line in printed)
    return [(name, text) for name, _, text in found]


def main() -> int:
    """Print one line for each count. Return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.kernel.starved", description=__doc__)
    parser.add_argument("counts", metavar="COUNT", type=int, nargs="*", default=list(COUNTS))
    parser.add_argument("--profile", default=PROFILE)
    parser.add_argument("--load", type=int, default=4, help="endless loops that run with the containers, default 4")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as staged, Machine(arguments.profile).start() as guest:
        install(guest, stage(Path(staged)))
        host = Host(guest)
        host.make_root()
        host.start()
        loop = "nohup setsid sh -c 'while :; do :; done' >/dev/null 2>&1 &"
        host.run(f"for i in $(seq {arguments.load}); do {loop} done")
        outcomes = []
        for count in arguments.counts:
            outcomes.append(start_at_once(host, count))
            print(outcomes[-1], outcomes[-1].errors, sep="\n", flush=True)
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
