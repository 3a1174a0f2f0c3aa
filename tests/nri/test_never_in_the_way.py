# SPDX-License-Identifier: Apache-2.0
"""Containers start in any state of resctrlmond, and are added as soon as it answers again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable
from contextlib import closing
from pathlib import Path

import pytest

from resctrlmond.api import signatures, types
from resctrlmond.nri import nri_pb2
from resctrlmond.nri.manager import Manager, Unavailable
from resctrlmond.nri.messages import Event
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.messages import Operation
from tests.nri.conftest import UID, Node
from tests.nri.runtime import Plugin

# The runtime's own limit for a response; it disconnects a slower plugin.
RUNTIME_LIMIT_S = 2.0


def test_containers_start_without_the_daemon_and_are_added_late(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        before = node.start_container(plugin, pod)
        assert node.machine.stop() == 0
        missed = node.start_container(plugin, pod)
        ended = node.start_container(plugin, pod)
        node.end(ended.pid)
        plugin.send_event(Event.STOP_CONTAINER, pod, ended)
        new_pod = node.pod("11111111-2222-4333-8444-555555555555")
        plugin.send_event(Event.RUN_POD_SANDBOX, new_pod)
        assert "may be unmonitored for now" in node.log_text()
        node.machine.start()
        node.until(lambda: node.living() == {pod.id, before.id, missed.id}, "the container that was missed")
        node.until(lambda: node.living(new_pod.uid) == {new_pod.id}, "the pod that was missed")
        assert node.member(missed.id)["late"]
        node.until(lambda: node.machine.tasks(UID) == {before.pid, missed.pid}, "the tasks")
        assert node.log_text().count("may be unmonitored for now") == 1, "logged once, not for each container"
        assert "resctrlmond answers again" in node.log_text()


def test_absent_daemon_is_logged_once_even_if_the_reason_changes(node: Node) -> None:
    """A daemon that starts removes the existing socket: connections are refused, and then the file does not exist."""
    assert node.machine.stop() == 0
    with node.connected() as plugin:
        plugin.greet()
        node.until(lambda: "(Connection refused)" in node.log_text(), "the warning")
        os.unlink(node.machine.socket)
        node.start_container(plugin, node.pod())
        node.until(lambda: "resctrlmond is still unavailable: " in node.log_text(), "the new reason")
    assert node.log_text().count("may be unmonitored for now") == 1
    node.machine.start()


def test_pod_that_was_removed_without_a_daemon_ends_when_the_daemon_runs_again(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        node.machine.kill()
        plugin.send_event(Event.REMOVE_POD_SANDBOX, pod)
        node.machine.start()
        node.until(lambda: node.group()["state"] == "completed", "its end")


def test_daemon_that_hangs_delays_only_one_start(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        assert node.machine.daemon is not None
        node.machine.daemon.send_signal(signal.SIGSTOP)
        try:
            held_up = node.start_container(plugin, pod)
            others = [node.start_container(plugin, pod) for _ in range(5)]
            node.until(lambda: "did not answer in time" in node.log_text(), "the call after it")
            others += [node.start_container(plugin, pod) for _ in range(5)]
            assert node.log_text().count("answered before resctrlmond was updated") == 1
        finally:
            node.machine.daemon.send_signal(signal.SIGCONT)
        everyone = {held_up.pid, *(one.pid for one in others)}
        node.until(lambda: node.machine.tasks(UID) == everyone, "all of them in the group")


def test_socket_without_replies_delays_less_than_the_runtime_waits(node: Node) -> None:
    assert node.machine.stop() == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        if os.path.exists(node.machine.socket):
            os.unlink(node.machine.socket)
        deaf.bind(node.machine.socket)
        deaf.listen(64)
        with node.connected() as plugin:
            plugin.greet()
            began = time.monotonic()
            node.start_container(plugin, node.pod())
            # A generous bound for a busy machine: the response came without a person's help.
            assert time.monotonic() - began < 10 * RUNTIME_LIMIT_S
            assert "answered before resctrlmond was updated" in node.log_text() or "in time" in node.log_text()
    node.machine.start()


def start_slowly(node: Node, plugin: Plugin) -> nri_pb2.Container:
    """Start a container whose tasks the kernel moves after the adapter has answered."""
    pod = node.pod()
    plugin.send_event(Event.RUN_POD_SANDBOX, pod)
    slow = Fault(on=Operation.TASKS, group=f"mon_groups/{UID}", milliseconds=5_000, times=1)
    Control(str(node.machine.top / "resctrl")).set_faults(slow)
    return node.start_container(plugin, pod)


def test_a_container_whose_start_is_answered_before_it_is_in_its_group_is_late(node: Node) -> None:
    """The runtime continued after 1.5 s, the container was moved later, and its total was exact."""
    with node.connected() as plugin:
        plugin.greet()
        container = start_slowly(node, plugin)
        assert "answered before resctrlmond was updated" in node.log_text()
        node.until(lambda: node.machine.tasks(UID) == {container.pid}, "its task")
        node.until(lambda: bool(node.member(container.id).get("late")), "the mark")
        assert node.group()["baseline"] == "late"


def test_container_is_late_although_the_adapter_stops_after_an_early_response(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        container = start_slowly(node, plugin)
        assert node.adapter is not None
        node.adapter.send_signal(signal.SIGSTOP)
        node.until(lambda: node.machine.tasks(UID) == {container.pid}, "its task")
        node.until(lambda: bool(node.member(container.id).get("late")), "the mark")
        node.adapter.send_signal(signal.SIGCONT)
    assert node.group()["baseline"] == "late"


def test_a_call_after_a_restart_of_the_daemon_connects_again(node: Node) -> None:
    node.stop_adapter()

    async def run() -> None:
        with closing(Manager(node.machine.socket)) as manager:
            for _ in range(2):
                assert [page.workloads for page in await manager.ask_list()] == [[]]
                assert node.machine.stop() == 0
                node.machine.start()

    asyncio.run(run())


def test_starts_use_one_connection_to_the_daemon(node: Node) -> None:
    def sockets() -> set[str]:
        assert node.adapter is not None
        found = set()
        for fd in Path(f"/proc/{node.adapter.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(fd))
        return {link for link in found if link.startswith("socket:")}

    with node.connected() as plugin:
        without_connection = sockets()
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        before = sockets()
        assert len(before - without_connection) == 1
        containers = [node.start_container(plugin, pod) for _ in range(3)]
        assert sockets() == before
        assert node.machine.tasks(UID) == {container.pid for container in containers}


def test_200_starts_at_once_are_all_in_the_group_or_late(node: Node) -> None:
    """A start whose response comes before the process is in the group is late. No container is lost."""
    with node.connected() as plugin:
        plugin.greet()
        uids = [f"{number:08x}-2222-4333-8444-555555555555" for number in range(4)]
        pods = [node.pod(uid) for uid in uids]
        for pod in pods:
            plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        # Also with a daemon that is slow at first.
        slow = Fault(on=Operation.TASKS, group=f"mon_groups/{uids[0]}", milliseconds=400, times=8)
        Control(str(node.machine.top / "resctrl")).set_faults(slow)
        sent = {}
        for number in range(200):
            pod = pods[number % len(pods)]
            container = node.container(pod, node.process(), state=1)
            event = nri_pb2.StateChangeEvent(event=Event.START_CONTAINER, pod=pod, container=container)
            sent[plugin.send("StateChange", event.SerializeToString())] = (pod, container)
        missed = []
        for _ in range(len(sent)):
            stream, answer = plugin.answer()
            assert answer.status.code == 0
            pod, container = sent[stream]
            if container.pid not in node.machine.tasks(pod.uid):
                missed.append((pod, container))
        started = {pod.uid: {pod.id} for pod in pods}
        for pod, container in sent.values():
            started[pod.uid].add(container.id)
        for uid in uids:
            node.until(lambda: node.living(uid) == started[uid], "all containers of a pod")  # noqa: B023
        for pod, container in missed:
            node.until(lambda: container.pid in node.machine.tasks(pod.uid), "its task")  # noqa: B023
            assert node.member(container.id, pod.uid)["late"]
    assert missed


def test_out_of_rmids_the_container_starts_and_its_group_is_pending(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        capacity = node.machine.call("Status")
        for number in range(capacity["rmids"] - capacity["rmidsUsed"]):
            os.mkdir(node.machine.top / "resctrl" / "mon_groups" / f"other-{number}")
        pod = node.pod()
        container = node.start_container(plugin, pod)
        assert node.group()["state"] == "pending"
        assert node.living() == {pod.id, container.id}
        os.rmdir(node.machine.top / "resctrl" / "mon_groups" / "other-0")
        node.until(lambda: node.group()["state"] == "active", "the RMID that came free")
        node.until(lambda: node.machine.tasks(UID) == {container.pid}, "its task")
        assert node.group()["baseline"] == "late"


@pytest.mark.parametrize("event", [Event.RUN_POD_SANDBOX, Event.START_CONTAINER])
def test_refusal_is_logged_once_and_the_container_starts(node: Node, event: Event) -> None:
    os.mkdir(node.machine.top / "resctrl" / "mon_groups" / UID)
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        for _ in range(3):
            plugin.send_event(
                event, pod, node.container(pod, node.process()) if event is Event.START_CONTAINER else None
            )
        assert "another program created it" in node.log_text()
        assert node.log_text().count("pod shop/web-0 is unmonitored") == 1
        assert node.machine.groups() == [UID]


def test_process_that_has_ended_before_its_event(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod, pid = node.pod(), node.process()
        node.end(pid)
        plugin.send_event(Event.START_CONTAINER, pod, node.container(pod, pid))
        assert node.living() == {pod.id}
        plugin.send_event(Event.REMOVE_POD_SANDBOX, pod)
        assert node.group()["state"] == "completed"


def test_timeout_of_a_list_does_not_mark_the_daemon_as_hung(tmp_path: Path) -> None:
    """A List waits for memory that the lists of other callers use; an Assign does not."""

    async def run() -> None:
        manager = Manager(str(tmp_path / "silent"), timeout_s=0.1)
        for call, is_hung in ((list_all, False), (assign, True), (list_all, True)):
            with pytest.raises(Unavailable):
                await call(manager)
            assert manager.is_hung == is_hung

    def list_all(manager: Manager) -> Awaitable[object]:
        return manager.ask_list()

    def assign(manager: Manager) -> Awaitable[object]:
        return manager.ask(signatures.ASSIGN, types.AssignRequest(key="k"))

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "silent"))
        listener.listen()
        asyncio.run(run())
