# SPDX-License-Identifier: Apache-2.0
"""Run a real daemon on a simulation, and check its invariants from outside."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resctrlmond.client import ProtocolError, VarlinkError
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.records.store import Store
from tests.daemon.conftest import MANAGER, Machine
from tests.workloads.conftest import MARK, Host

# In the simulation, one second of CPU time adds exactly 1 GiB to mbm_total_bytes.
SECOND_NS, GIB = 10**9, 2**30
FOREIGN = GroupRef("", "foreign")
_SETTLES_S = 120.0


class Outside(Host):
    """The state of the machine by its files and its tree, without the daemon."""

    def __init__(self, top: Path) -> None:
        self.mountpoint, self.run = str(top / "resctrl"), str(top / "run")
        self.tree = Tree.open(self.mountpoint, allow_simulation=True)

    def on_disk(self) -> list[Workload]:
        """Return all records. Raises AssertionError if one cannot be decoded."""
        found = list(Store(os.path.join(self.run, "records")).read_all())
        assert all(isinstance(record, Workload) for record in found), found
        return [record for record in found if isinstance(record, Workload)]


class Site:
    """A machine, its daemon, workloads and a foreign group. The simulation's tasks use CPU time on command."""

    def __init__(
        self, top: Path, settings: str = "", *wrapper: str, module: str = "resctrlmond", **environment: str
    ) -> None:
        self.top = top
        self.machine = Machine(top)
        self.machine.module = module
        given = settings or "snapshot_ttl: 1h\n"
        given += "" if "snapshot_ttl" in given else "snapshot_ttl: 1h\n"
        self.machine.config.write_text(f"group: {MARK}\nlog_level: debug\nlinger: 0\n{given}")
        self.control = Control(str(top / "resctrl"))
        self.outside = Outside(top)
        self.children: list[subprocess.Popen[bytes]] = []
        self._used: dict[str, int] = {}
        # The keys of all runs that tests began here.
        self._begun: set[str] = set()
        os.mkdir(top / "resctrl" / "gold")
        self.outside.make_foreign(FOREIGN.name)
        self._theirs = self.process()
        self.outside.tree.write_task(FOREIGN.path, self._theirs.pid)
        self._foreign = self.outside.tree.find(FOREIGN)
        self._wrapper, self._environment = wrapper, environment
        self.machine.start(*wrapper, **environment)

    @property
    def pid(self) -> int:
        """Return the pid of the daemon."""
        assert self.machine.daemon is not None
        return self.machine.daemon.pid

    def is_dead(self) -> bool:
        """Return whether the daemon has ended: while a tracer is attached, wait(2) does not report this."""
        if self.machine.daemon is None or self.machine.daemon.returncode is not None:
            return True
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"

    # -- workloads

    def process(self, class_: str = "") -> subprocess.Popen[bytes]:
        """Start a process, also in the simulation, in a class."""
        child = subprocess.Popen(["sleep", "600"])
        self.control.spawn(tid=child.pid)
        if class_:
            self.outside.tree.write_task(class_, child.pid)
        self.children.append(child)
        return child

    def end(self, child: subprocess.Popen[bytes]) -> None:
        """End a process, also in the simulation."""
        self.children.remove(child)
        self.control.exit(child.pid)
        child.kill()
        child.wait()

    def assigned(self, child: subprocess.Popen[bytes], claim: str = "engine", **more: Any) -> str:
        """Assign a process to a new container, with a claim that ends as the hook's does, and return its key."""
        key = more.pop("key", None) or uuid.uuid4().hex * 2
        self.call("Assign", key=key, pid=child.pid, claim=claim, late=False, **{"endRule": "container", **more})
        self._begun.add(str(key))
        return str(key)

    def use(self, key: str, child: subprocess.Popen[bytes]) -> None:
        """Use a second of CPU time in the workload."""
        self.control.run(child.pid, SECOND_NS)
        self._used[key] = self._used.get(key, 0) + GIB

    def call(self, verb: str, **parameters: Any) -> dict[str, Any]:
        """Call the daemon."""
        return self.machine.call(verb, **parameters)

    def attempt(self, verb: str, **parameters: Any) -> str:
        """Call the daemon during a fault, and return "done", "cut", or the name of the error."""
        try:
            self.call(verb, **parameters)
        except VarlinkError as error:
            return str(error.name).removeprefix(f"{MANAGER}.")
        except (ConnectionError, ProtocolError):
            return "cut"
        return "done"

    # -- checks

    def restart(self) -> None:
        """Kill the daemon, if it runs, and start it again."""
        if self.machine.daemon is not None:
            self.machine.kill()
        self.machine.start(*self._wrapper, **self._environment)

    def check(self) -> None:
        """Check that groups, records and files belong together, and that the foreign group is unchanged."""
        self._settled(lambda: self.outside.check_records(self.outside.on_disk()))
        assert self.outside.tree.find(FOREIGN) == self._foreign
        assert self.outside.tree.tasks(FOREIGN) == [self._theirs.pid]
        # Python's report of a fault at the write(2) to its wakeup socket, which does not fail on a real kernel.
        log = self.machine.log.read_text().replace("wakeup fd:\nTraceback", "wakeup fd:")
        # Python's report of an event loop that could not be created, after the daemon's own report.
        log = re.sub(r"(in: <function BaseEventLoop.__del__ .*>)\nTraceback", r"\1", log)
        assert "Traceback" not in log, log[log.index("Traceback") - 300 :]

    def drain(self, *, is_loss: bool = False, prunes: bool = False) -> None:
        """End all processes, release all claims, and check that no group is left and that all totals are correct.

        No workload may be lost, unless another program removed a group (``is_loss``). ``prunes``: the daemon
        deletes records of ended runs, so that those on disk do not tell how many there were.
        """
        for child in [child for child in self.children if child is not self._theirs]:
            self.end(child)
        for workload in self.call("List")["workloads"]:
            for claim in workload["claims"]:
                with contextlib.suppress(VarlinkError):
                    self.call("Release", key=workload["key"], claim=claim["owner"])

        def nothing_stays() -> None:
            assert self.outside.marked_groups() == []
            states = {record.key: record.state for record in self.outside.on_disk()}
            assert all(state.is_over for state in states.values()), states
            assert is_loss or State.LOST not in states.values(), states

        self._settled(nothing_stays)
        self.check()
        if not is_loss:
            # Each generation of a key is a run that has ended.
            on_disk = sum(record.generation for record in self.outside.on_disk())
            runs = len(self._begun) if prunes else on_disk
            counted = [one["runs"] for of in self.call("Sums", by="slice")["names"] for one in of["ends"]]
            assert sum(counted) == runs, (counted, runs)
        for key, used in self._used.items():
            self._check_total(key, used)
        self._used.clear()

    def _check_total(self, key: str, used: int) -> None:
        try:
            totals = self.call("Read", key=key)["totals"]
        except VarlinkError as error:
            assert error.name == f"{MANAGER}.NoSuchWorkload", error
            return  # the workload was never created
        for total in totals:
            if total["event"] != "mbm_total_bytes":
                continue
            if total["quality"] == "exact":
                assert int(total["value"]) == used, (key, total)
            else:
                assert total["reason" if total["quality"] != "late" else "value"], (key, total)
                assert int(total.get("value") or 0) <= used, (key, total)

    @staticmethod
    def _settled(holds: Callable[[], object]) -> None:
        """Check the invariants when the daemon has become idle."""
        deadline = time.monotonic() + _SETTLES_S
        while True:
            try:
                holds()
                return
            except (AssertionError, OSError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def close(self) -> None:
        """End the daemon and all processes."""
        self.machine.close()
        for child in self.children:
            child.kill()
            child.wait()
