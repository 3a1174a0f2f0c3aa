# SPDX-License-Identifier: Apache-2.0
"""The adapter as a separate process, between a scripted runtime and the real daemon on a simulated machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.client import VarlinkError
from resctrlmond.nri import nri_pb2
from resctrlmond.nri.messages import Event
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.sim.fuse.mount import Simulation
from tests.daemon.conftest import Machine
from tests.nri.runtime import Plugin, Runtime
from tests.wait import wait_until

UID = "0f8fad5b-d9cb-469f-a165-70867728950e"
_SERIAL = itertools.count(1)


def an_id() -> str:
    """Return a new ID in the form of a runtime's."""
    return f"{os.getpid():x}".rjust(8, "0") + f"{next(_SERIAL):056x}"


class Node:
    """A machine with its daemon, a runtime, and the adapter between them."""

    def __init__(self, top: Path) -> None:
        self.machine = Machine(top)
        self.nri = str(top / "nri.sock")
        self.log = top / "nri.log"
        self.adapter: subprocess.Popen[bytes] | None = None
        self.runtime: Runtime | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    # -- the parts

    def start_adapter(self, *options: str, **environment: str) -> None:
        """Start the adapter, which connects by itself."""
        command = [sys.executable, "-W", "error::DeprecationWarning", "-m", "resctrlmond.nri", "--socket", self.nri]
        with self.log.open("ab") as log:
            self.adapter = subprocess.Popen(
                [*command, "--manager-socket", self.machine.socket, "--log-level", "debug", *options],
                stderr=log,
                env={**os.environ, **environment},
            )

    def stop_adapter(self, number: int = signal.SIGTERM) -> int:
        """Stop the adapter and return its exit status."""
        assert self.adapter is not None
        self.adapter.send_signal(number)
        code = self.adapter.wait(60)
        self.adapter = None
        return code

    def connected(self) -> Plugin:
        """Return the next connection of the adapter to the runtime, before its registration."""
        if self.runtime is None:
            self.runtime = Runtime(self.nri)
        return self.runtime.accept()

    def assign_as_hook(self, container: nri_pb2.Container) -> None:
        """Assign the container's process as the hook of a runtime does, before the runtime reports the container."""
        self.machine.call(
            "Assign",
            key=UID,
            pid=container.pid,
            member=container.id,
            kind="container",
            claim="engine",
            endRule="container",
        )

    def stop_runtime(self) -> None:
        """Stop the runtime, so that nothing listens on its socket."""
        assert self.runtime is not None
        self.runtime.close()
        self.runtime = None

    def log_text(self) -> str:
        """Return the adapter's log."""
        return self.log.read_text()

    # -- pods

    def process(self) -> int:
        """Start a process that sleeps until the end of the test, and return its pid."""
        self._processes.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return self._processes[-1].pid

    def end(self, pid: int) -> None:
        """Kill a process of the test and reap it."""
        child = next(one for one in self._processes if one.pid == pid)
        child.kill()
        child.wait()

    def pod(self, uid: str = UID, **fields: Any) -> nri_pb2.PodSandbox:
        """Return a sandbox of a pod."""
        given = {"id": an_id(), "uid": uid, "name": "web-0", "namespace": "shop", "labels": {"app": "web"}} | fields
        return nri_pb2.PodSandbox(**given)

    def container(self, pod: nri_pb2.PodSandbox, pid: int, **fields: Any) -> nri_pb2.Container:
        """Return a container of that sandbox. A pid of 0 is not reported."""
        given: dict[str, Any] = {"id": an_id(), "pod_sandbox_id": pod.id, "name": "app", "state": 3, "pid": pid}
        return nri_pb2.Container(**given | fields)

    def running(self, pod: nri_pb2.PodSandbox, **fields: Any) -> nri_pb2.Container:
        """Return a container with a process in a control group of its own."""
        container = self.container(pod, self.process(), **fields)
        own = os.path.join(self._containers(), container.id)
        os.makedirs(own)
        Path(own, "cgroup.procs").write_text(str(container.pid))
        return container

    def start_container(
        self, plugin: Plugin, pod: nri_pb2.PodSandbox, *, has_group: bool = False, **fields: Any
    ) -> nri_pb2.Container:
        """Report the start of a container as containerd does. Return when the adapter has responded to all of it.

        ``has_group``: the runtime creates a monitoring group for it.
        """
        container = self.container(pod, 0, state=1, name=fields.get("name", "app"))
        plugin.send_event(Event.POST_CREATE_CONTAINER, pod, container)
        container = self.running(pod, id=container.id, state=1, **fields)
        if has_group:
            group = self.machine.top / "resctrl" / "mon_groups" / container.id
            group.mkdir()
            (group / "tasks").write_text(str(container.pid))
        plugin.send_event(Event.START_CONTAINER, pod, container)
        return container

    @staticmethod
    def _containers() -> str:
        """Return the parent directory of the containers' own control groups."""
        top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
        return os.path.join(top, f"resctrlmond-nri-containers-{os.getpid()}")

    # -- conditions

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Raise AssertionError with the logs if the adapter ends, or after a minute."""

        def is_met() -> bool:
            assert self.adapter is None or self.adapter.poll() is None, "the adapter has ended"
            return condition()

        try:
            wait_until(is_met, interval_s=0.02, failure=f"still waiting for {what}")
        except AssertionError as failure:
            failure.add_note(f"{self.log_text()}\n{self.machine.log.read_text()}")
            raise

    def group(self, key: str = UID) -> dict[str, Any]:
        """Return the workload as the daemon has it; {} if it has none."""
        try:
            return self.machine.group(key)
        except VarlinkError as error:
            assert error.name.endswith(".NoSuchWorkload")
            return {}

    def living(self, key: str = UID) -> set[str]:
        """Return the IDs of the workload's living members."""
        return {one["id"] for one in self.group(key).get("members", ()) if not one.get("endedAt")}

    def member(self, name: str, key: str = UID) -> dict[str, Any]:
        """Return one member of the workload."""
        found: dict[str, Any] = next(one for one in self.group(key)["members"] if one["id"] == name)
        return found

    def owners(self, key: str = UID) -> set[str]:
        """Return the owners of the workload's claims."""
        return {claim["owner"] for claim in self.group(key).get("claims", ())}

    def close(self) -> None:
        """Stop all processes."""
        for child in self._processes:
            child.kill()
            child.wait()
        _remove(self._containers())
        if self.adapter is not None:
            self.adapter.kill()
            self.adapter.wait()
        if self.runtime is not None:
            self.runtime.close()
        self.machine.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Yield a node with a running daemon and a running adapter."""
    (tmp_path / "resctrl").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt"):
        made = Node(tmp_path)
        try:
            made.machine.start()
            made.start_adapter()
            yield made
            assert "Traceback" not in made.log_text()
        finally:
            made.close()


@pytest.fixture
def pod_cgroup() -> Iterator[str]:
    """Yield a control group that is named for the pod, as by the kubelet with cgroupfs."""
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
    path = os.path.join(top, f"resctrlmond-nri-{os.getpid()}", f"pod{UID}")
    os.makedirs(path)
    yield path
    _remove(os.path.dirname(path))


def _remove(path: str) -> None:
    deadline = time.monotonic() + 60
    for directory, _, _ in os.walk(path, topdown=False):
        while os.path.isdir(directory) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                for pid in Path(directory, "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
                os.rmdir(directory)
            time.sleep(0.01)
