# SPDX-License-Identifier: Apache-2.0
"""A machine with a real daemon on it, as a process of its own, and what must hold of it from outside."""

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

from resctrlmond.api.varlink.client import ProtocolError, VarlinkError
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.model import State, Workload
from resctrlmond.workloads.store import Store
from tests.daemon.conftest import MANAGER, Machine
from tests.workloads.conftest import MARK, Host

# One second of CPU time is so much of mbm_total_bytes there, exactly.
SECOND_NS, GIB = 10**9, 2**30
FOREIGN = GroupRef("", "foreign")
_SETTLES_S = 20.0


class Outside(Host):
    """The machine as its files and its tree tell it, whatever the daemon says."""

    def __init__(self, top: Path) -> None:
        self.mountpoint, self.run = str(top / "resctrl"), str(top / "run")
        self.tree = Tree.open(self.mountpoint, allow_simulation=True)

    def on_disk(self) -> list[Workload]:
        """Every record; AssertionError where one has no meaning."""
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
        os.mkdir(top / "resctrl" / "gold")
        self.outside.make_foreign(FOREIGN.name)
        self._theirs = self.process()
        self.outside.tree.write_task(FOREIGN.path, self._theirs.pid)
        self._foreign = self.outside.tree.find(FOREIGN)
        self._wrapper, self._environment = wrapper, environment
        self.machine.start(*wrapper, **environment)

    @property
    def pid(self) -> int:
        """The daemon's."""
        assert self.machine.daemon is not None
        return self.machine.daemon.pid

    def is_dead(self) -> bool:
        """Whether the daemon has ended; its parent does not hear of that while a tracer holds it."""
        if self.machine.daemon is None or self.machine.daemon.returncode is not None:
            return True
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"

    # -- workloads

    def process(self, class_: str = "") -> subprocess.Popen[bytes]:
        """A process, real and in the simulation, in that class."""
        child = subprocess.Popen(["sleep", "600"])
        self.control.spawn(tid=child.pid)
        if class_:
            self.outside.tree.write_task(class_, child.pid)
        self.children.append(child)
        return child

    def end(self, child: subprocess.Popen[bytes]) -> None:
        """The process ends."""
        self.children.remove(child)
        self.control.exit(child.pid)
        child.kill()
        child.wait()

    def assigned(self, child: subprocess.Popen[bytes], claim: str = "engine", **more: Any) -> str:
        """The key of a new container with that process, whose claim ends as the hook's does."""
        key = more.pop("key", None) or uuid.uuid4().hex * 2
        self.call("Assign", key=key, pid=child.pid, claim=claim, late=False, **{"endRule": "container", **more})
        return str(key)

    def use(self, key: str, child: subprocess.Popen[bytes]) -> None:
        """The workload uses a second of CPU time."""
        self.control.run(child.pid, SECOND_NS)
        self._used[key] = self._used.get(key, 0) + GIB

    def call(self, verb: str, **parameters: Any) -> dict[str, Any]:
        """A call of the daemon."""
        return self.machine.call(verb, **parameters)

    def attempt(self, verb: str, **parameters: Any) -> str:
        """How a call that is struck ended: "done", "cut", or the error's name."""
        try:
            self.call(verb, **parameters)
        except VarlinkError as error:
            return str(error.name).removeprefix(f"{MANAGER}.")
        except (ConnectionError, ProtocolError):
            return "cut"
        return "done"

    # -- what must hold

    def restart(self) -> None:
        """The daemon anew, as after a kill."""
        if self.machine.daemon is not None:
            self.machine.kill()
        self.machine.start(*self._wrapper, **self._environment)

    def check(self) -> None:
        """Every group has its record, every record its groups and files, and nothing of others was touched."""
        self._settled(lambda: self.outside.check_records(self.outside.on_disk()))
        assert self.outside.tree.find(FOREIGN) == self._foreign
        assert self.outside.tree.tasks(FOREIGN) == [self._theirs.pid]
        # Python's own word of its wakeup socket, which a strike at write() reaches and no kernel would.
        log = self.machine.log.read_text().replace("wakeup fd:\nTraceback", "wakeup fd:")
        # And of a loop that could not be made, after our own.
        log = re.sub(r"(in: <function BaseEventLoop.__del__ .*>)\nTraceback", r"\1", log)
        assert "Traceback" not in log, log[log.index("Traceback") - 300 :]

    def drain(self, *, is_loss: bool = False) -> None:
        """All workloads end, by their processes or by word: nothing of them stays, and their totals are right.

        None of them ends as lost, unless somebody else removed a group (``is_loss``).
        """
        for child in [child for child in self.children if child is not self._theirs]:
            self.end(child)
        for group in self.call("List")["groups"]:
            for claim in group["claims"]:
                with contextlib.suppress(VarlinkError):
                    self.call("Release", key=group["key"], claim=claim["owner"])

        def nothing_stays() -> None:
            assert self.outside.ours() == []
            states = {record.key: record.state for record in self.outside.on_disk()}
            assert all(state.is_over for state in states.values()), states
            assert is_loss or State.LOST not in states.values(), states

        self._settled(nothing_stays)
        self.check()
        for key, used in self._used.items():
            self._check_total(key, used)
        self._used.clear()

    def _check_total(self, key: str, used: int) -> None:
        try:
            totals = self.call("Read", key=key)["totals"]
        except VarlinkError as error:
            assert error.name == f"{MANAGER}.NoSuchGroup", error
            return  # it never came to be
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
        """Everything that was started ends."""
        self.machine.close()
        for child in self.children:
            child.kill()
            child.wait()
