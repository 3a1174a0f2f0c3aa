# SPDX-License-Identifier: Apache-2.0
"""Many containers whose tasks fork and exit, beside the same containers while all their tasks sleep."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from resctrlmond.client import Client
from tests.bench.host import Host
from tests.bench.measure import COUNT, SECONDS, Row
from tests.bench.rows import MANAGER, spent_asleep, spent_in
from tests.daemon.conftest import cgroup_root
from tests.wait import wait_until

# How many processes of all containers are replaced in a second, one container after another.
FORKS_A_SECOND = 50
# Each process that is forked is the init of a container. It replaces its child at each SIGUSR1, and tells the
# look-alike of resctrl, which cannot see forks, in whose group the child starts.
_CONTAINERS = """
import os, signal, sys
tree, folder, ids = sys.argv[1], sys.argv[2], sys.argv[3:]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
for id_ in ids:
    init = os.fork()
    if not init:
        break
    with open(f"{folder}/crio-{id_}.scope/cgroup.procs", "w") as procs:
        procs.write(str(init))
    print(init, flush=True)
else:
    signal.pause()
child = 0
while True:
    signal.sigwait([signal.SIGUSR1])
    before, child = child, os.fork()
    if not child:
        signal.pause()
    os.setxattr(tree, f"user.resctrlmond.fork.{child}", b"%d" % os.getpid())
    if before:
        os.kill(before, signal.SIGKILL)
        os.waitpid(before, 0)
"""


@contextlib.contextmanager
def _containers(tree: Path, count: int) -> Iterator[dict[str, int]]:
    """Start containers that fork at SIGUSR1, each in a control group. Yield their init processes by their ids."""
    folder = cgroup_root() / f"resctrlmond-busy-{os.getpid()}"
    ids = [f"{number:064x}" for number in range(count)]
    folder.mkdir()
    try:
        for id_ in ids:
            (folder / f"crio-{id_}.scope").mkdir()
        command = [sys.executable, "-IS", "-c", _CONTAINERS, str(tree), str(folder), *ids]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            try:
                yield {id_: int(parent.stdout.readline()) for id_ in ids}
            finally:
                (folder / "cgroup.kill").write_text("1", encoding="ascii")
                parent.kill()
    finally:
        wait_until(lambda: "populated 0" in (folder / "cgroup.events").read_text(encoding="ascii"))
        for scope in folder.glob("*.scope"):
            scope.rmdir()
        folder.rmdir()


def minutes(host: Host, client: Client, daemon: int, groups: int, for_s: float) -> Iterator[Row]:
    """Measure the daemon's CPU time and wake-ups, first while all tasks sleep, then while they are replaced."""
    with _containers(host.tree, groups) as inits:
        for id_, pid in inits.items():
            state = {"ociVersion": "1.2.0", "id": id_, "status": "created", "pid": pid}
            client.call("org.resctrlmon.Hook.Run", {"stage": "createRuntime", "state": json.dumps(state)})
        slept = spent_asleep(daemon, for_s)
        # Each container has its child before the minute begins.
        for pid in inits.values():
            os.kill(pid, signal.SIGUSR1)
        replaced = 0

        def replace() -> None:
            nonlocal replaced
            began = time.monotonic()
            for pid in itertools.cycle(inits.values()):
                time.sleep(max(0.0, began + replaced / FORKS_A_SECOND - time.monotonic()))
                if time.monotonic() - began >= for_s:
                    return
                os.kill(pid, signal.SIGUSR1)
                replaced += 1

        forked = spent_in(daemon, replace)
        workloads = client.call(f"{MANAGER}List")["workloads"]
        # The look-alike has no witness, so none is exact.
        active = [each for each in workloads if each["state"] == "active"]
        in_time = sum(not any(member.get("late") for member in each["members"]) for each in active)
    assert replaced >= 0.9 * FORKS_A_SECOND * for_s
    for what, spent in (
        (f"{groups} containers that sleep", slept),
        (f"{groups} containers, {FORKS_A_SECOND} forks and exits a second", forked),
    ):
        yield Row(f"daemon's CPU time in a minute, {what}", [spent.cpu_s], "a minute", [60.0], SECONDS)
        yield Row(f"daemon's wake-ups a second, {what}", [spent.wake_ups], "a timer each second", [1.0], COUNT)
    # A child that a look of the daemon finds before the look-alike knows of it was outside, as it seems.
    yield Row("containers that are not late after that minute", [float(in_time)], "all", [float(groups)], COUNT)
