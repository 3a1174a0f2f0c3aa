# SPDX-License-Identifier: Apache-2.0
"""The verbs of the manager without a daemon, beside the calls on resctrl that each of them needs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from resctrlmond.configuration.config import Config
from resctrlmond.daemon.startup import prepare
from resctrlmond.workloads.groups.counters import REPORTING_LAG_S
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.release import release
from tests.bench.host import Host
from tests.bench.measure import SECONDS, Row
from tests.bench.rows import read_by_hand
from tests.bench.serve import MARK

GOALS = {"Create": 2.0, "Assign": 2.5, "Release": 3.0}
OWNER = "bench"


@contextlib.contextmanager
def manager(host: Host) -> Iterator[Manager]:
    """Yield a manager in this process, which has the group id of the mark meanwhile. No tick runs."""
    before = os.getegid()
    config = Config(resctrl=str(host.tree), runtime_dir=f"{host.folder}/run", log_level="warning")
    setup = prepare(config, MARK, allow_simulation=True)
    try:
        setup.manager.recover()
        yield setup.manager
    finally:
        setup.manager.context.interference.close()
        os.close(setup.lock)
        os.setegid(before)


def verbs(host: Host, pid: int, rounds: int) -> Iterator[Row]:
    """Measure each verb as a function call, with a new key in each round. Records and files are written.

    By hand, Create is mkdir, the time of the directory and a reading; Assign a write; Release a reading and rmdir.
    The manager waits for the last energy counts before the last reading. This wait is in neither figure.
    """
    with manager(host) as ours:

        def verb_calls(number: int) -> dict[str, Callable[[], object]]:
            key = f"in-process{number}"
            return {
                "Create": lambda: create(ours.context, key, owner=OWNER),
                "Assign": lambda: assign(ours.context, Assignment(key=key, owner=OWNER, pid=pid)),
                "Release": lambda: release(ours.context, key, owner=OWNER),
            }

        by_hand = _by_hand(f"{host.tree}/mon_groups/bare", pid)
        taken: dict[str, list[float]] = {verb: [] for verb in GOALS}
        bare: dict[str, list[float]] = {verb: [] for verb in GOALS}
        for number in range(rounds + 1):
            for calls, samples in ((verb_calls(number), taken), (by_hand, bare)):
                for verb, call in calls.items():
                    started = time.perf_counter()
                    call()
                    samples[verb].append(time.perf_counter() - started)
    waited = {"Release": REPORTING_LAG_S}
    for verb, goal in GOALS.items():
        # The first round imports and fills caches.
        own = [each - waited.get(verb, 0.0) for each in taken[verb][1:]]
        note = ", without its wait" if verb in waited else ""
        yield Row(f"{verb} in-process{note}", own, _BARE_IS[verb], bare[verb][1:], SECONDS, fuse=True, goal=goal)


_BARE_IS = {
    "Create": "mkdir, utime, 10 counters read",
    "Assign": "open, write, close of tasks",
    "Release": "10 counters read, rmdir",
}


def _by_hand(group: str, pid: int) -> dict[str, Callable[[], object]]:
    def create() -> None:
        os.mkdir(group)
        os.utime(group, ns=(1, 1))
        read_by_hand(group)

    def assign() -> None:
        fd = os.open(f"{group}/tasks", os.O_WRONLY)
        os.write(fd, b"%d\n" % pid)
        os.close(fd)

    def release() -> None:
        read_by_hand(group)
        os.rmdir(group)

    return {"Create": create, "Assign": assign, "Release": release}
