# SPDX-License-Identifier: Apache-2.0
"""Mount the simulation, and run real processes in its groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.sim.fuse.mount import Simulation
from tests.commanded import Commanded

# Reads commands from standard input, one on each line, and replies to each with one line.
_WORKER = """
import os, queue, sys, threading, time

def spawn():
    return os.posix_spawn("/bin/sleep", ["sleep", "600"], {})

def serve(orders, answers):
    for order in iter(orders.get, None):
        answers.put(order())

workers = {}
for line in sys.stdin:
    verb, *words = line.split()
    if verb == "fork":
        answer = spawn()
    elif verb == "orphan":
        answer = os.popen("sleep 600 >/dev/null 2>&1 & echo $!").read().strip()
    elif verb == "thread":
        orders, answers = queue.Queue(), queue.Queue()
        thread = threading.Thread(target=serve, args=(orders, answers), daemon=True)
        thread.start()
        answer = thread.native_id
        workers[answer] = orders, answers
    elif verb == "fork-in":
        orders, answers = workers[int(words[0])]
        orders.put(spawn)
        answer = answers.get()
    elif verb == "end":
        workers[int(words[0])][0].put(None)
        answer = "done"
    elif verb == "burn":
        until = time.process_time() + float(words[0])
        while time.process_time() < until:
            pass
        answer = "done"
    print(answer, flush=True)
"""


class Puppet(Commanded):
    """A process that forks, starts threads and uses CPU time on command."""

    def __init__(self) -> None:
        super().__init__(_WORKER)


@pytest.fixture
def puppet() -> Iterator[Puppet]:
    made = Puppet()
    yield made
    made.kill()


class Mounted:
    """A mounted simulation, with paths relative to its root."""

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, relative: str = "") -> str:
        return os.path.join(self.root, relative)

    def read(self, relative: str) -> str:
        return Path(self.path(relative)).read_text()

    def write(self, relative: str, text: str) -> None:
        fd = os.open(self.path(relative), os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def mkdir(self, relative: str) -> None:
        os.mkdir(self.path(relative))

    def rmdir(self, relative: str) -> None:
        os.rmdir(self.path(relative))

    def rename(self, old: str, new: str) -> None:
        os.rename(self.path(old), self.path(new))

    def tids(self, relative: str) -> set[int]:
        return {int(line) for line in self.read(os.path.join(relative, "tasks")).split()}

    def groups_of(self, tid: int | str) -> str:
        return os.getxattr(self.root, f"user.resctrlmond.task.{tid}").decode()

    @property
    def status(self) -> str:
        return self.read("info/last_cmd_status").rstrip("\n")

    def clean(self) -> None:
        """Remove all groups."""
        for name in os.listdir(self.path()):
            if os.path.isdir(self.path(name + "/mon_groups")):
                self.rmdir(name)
        for name in os.listdir(self.path("mon_groups")):
            self.rmdir("mon_groups/" + name)


def mounted(directory: Path, profile: str, rmids: int | None = None) -> Iterator[Mounted]:
    """Mount a simulation until the generator ends."""
    with Simulation(str(directory), profile, rmids):
        yield Mounted(str(directory))


@pytest.fixture(scope="module")
def aet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    yield from mounted(tmp_path_factory.mktemp("aet"), "intel-aet")


@pytest.fixture
def sim(aet: Mounted) -> Iterator[Mounted]:
    """Yield the module's mount, without groups."""
    yield aet
    aet.clean()
