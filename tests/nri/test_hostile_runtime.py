# SPDX-License-Identifier: Apache-2.0
"""Broken or hostile runtimes: the adapter does not crash, fills neither memory nor log, and serves the next one."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from resctrlmond.nri import connector, messages, nri_pb2, place
from resctrlmond.nri import plugin as adapter
from resctrlmond.nri.connector import Connector
from resctrlmond.nri.manager import Manager
from resctrlmond.nri.messages import MAX_SANDBOXES, Event, EventReport
from resctrlmond.nri.plugin import MAX_STEPS
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.session import Session
from resctrlmond.nri.updater import Updater
from resctrlmond.service.rate_limit import BURST, LONGEST
from tests.nri.conftest import UID, Node, an_id
from tests.nri.hostile import request
from tests.nri.runtime import PLUGIN, Plugin, Runtime
from tests.nri.test_places import inner, settled

OTHER = "11111111-2222-4333-8444-555555555555"
MAX_DATA = 4 << 20


def chunk(pods: Iterable[nri_pb2.PodSandbox] = (), containers: Iterable[nri_pb2.Container] = ()) -> bytes:
    """Return a part of a list that is not its last one."""
    return nri_pb2.SynchronizeRequest(pods=pods, containers=containers, more=True).SerializeToString()


def unknown_calls(number: int) -> bytes:
    """Return calls that each get a response of a kilobyte."""
    calls = (request(2 * one + 1, "x" * 2000, b"") for one in range(number))
    return b"".join(struct.pack(">II", PLUGIN, len(call)) + call for call in calls)


def memory(node: Node) -> int:
    """Return the adapter's current memory, in MiB."""
    return _mebibytes(node, "VmRSS:")


def peak(node: Node) -> int:
    """Return the adapter's peak memory, in MiB."""
    return _mebibytes(node, "VmHWM:")


def _mebibytes(node: Node, field: str) -> int:
    assert node.adapter is not None
    status = Path(f"/proc/{node.adapter.pid}/status").read_text()
    return int(status.partition(field)[2].split()[0]) // 1024


def descriptors(node: Node) -> int:
    """Return the number of descriptors that the adapter has open."""
    assert node.adapter is not None
    return len(os.listdir(f"/proc/{node.adapter.pid}/fd"))


# -- connections


def test_repeated_disconnects_are_logged_once(node: Node) -> None:
    for _ in range(4):
        with node.connected() as plugin:
            plugin.registered()
            plugin.configure()
    with node.connected() as plugin:
        plugin.greet()
        assert node.log_text().count("the runtime closed the connection") == 1


def test_connection_delay_restarts_after_a_lasting_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "LASTING_S", 0.0)
    path = str(tmp_path / "nri.sock")
    statuses: list[str] = []
    tested = Connector(path, "n", "00", adapter.Plugin(Updater(Manager("/none"), Pods())), statuses.append)

    async def serve(runtime: Runtime) -> None:
        connecting = asyncio.create_task(tested.run())
        for _ in range(4):
            with await asyncio.to_thread(runtime.accept) as plugin:
                await asyncio.to_thread(plugin.registered)
                await asyncio.to_thread(plugin.configure)
        connecting.cancel()

    with closing(Runtime(path)) as runtime:
        asyncio.run(serve(runtime))
    assert sum(status.startswith("waiting for a runtime") for status in statuses) == 3
    assert tested._wait_s <= 2 * connector.RECONNECT_S[0]


def test_runtime_that_does_not_read_leaks_no_descriptor(node: Node) -> None:
    """Unread data remains in the socket when the runtime sends invalid data, and it does not close its end."""
    kept, counted = [], []
    for _ in range(3):
        kept.append(plugin := node.connected())
        plugin.greet()
        # Now the connection to resctrlmond is open too.
        plugin.send_event(Event.RUN_POD_SANDBOX, node.pod())
        counted.append(descriptors(node))
        plugin.raw(unknown_calls(400) + struct.pack(">II", PLUGIN, 0xFFFFFFFF))
    with node.connected() as plugin:
        plugin.greet()
        # The last of them may be closed a moment later.
        node.until(lambda: descriptors(node) <= counted[0], "the earlier connections to be closed")
        assert "this is not NRI" in node.log_text()
    for plugin in kept:
        plugin.socket.close()


def test_runtime_that_does_not_read_is_disconnected(node: Node) -> None:
    with node.connected() as plugin:
        plugin.registered()
        with pytest.raises(OSError, match=r"pipe|reset"):
            plugin.raw(unknown_calls(4000))
        with node.connected() as second:
            second.greet()
            assert "does not read the responses" in node.log_text()


def test_silent_runtime_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "REGISTRATION_S", 0.05)
    path = str(tmp_path / "nri.sock")
    plugin = adapter.Plugin(Updater(Manager("/none"), Pods()))
    statuses: list[str] = []

    def report(text: str) -> None:
        statuses.append(text)
        # The second connection is not silent, but the machine may be busy.
        monkeypatch.setattr(connector, "REGISTRATION_S", 60.0)

    async def serve(runtime: Runtime) -> None:
        connecting = asyncio.create_task(Connector(path, "n", "00", plugin, report).run())
        silent = await asyncio.to_thread(runtime.accept)
        with await asyncio.to_thread(runtime.accept) as second, silent:
            await asyncio.to_thread(second.registered)
            await asyncio.to_thread(second.configure)
            # After the registration, the runtime may be silent for any time.
            await asyncio.sleep(0.3)
            assert (await asyncio.to_thread(second.call, "Shutdown", b"")).status.code == 0
        connecting.cancel()

    with closing(Runtime(path)) as runtime:
        asyncio.run(serve(runtime))
    assert statuses[0].endswith("it accepted the connection but sent nothing for 0 s")
    assert "registered with containerd v1.7.24" in statuses


def test_events_that_exceed_the_limit_are_answered_at_once() -> None:
    """Unread events would be answered after the time that the runtime waits."""
    own_end, other_end = socket.socketpair()
    extra = 9

    def runtime() -> set[int]:
        with Plugin(other_end) as peer:
            other_end.settimeout(30)
            peer.greet()
            pods = [nri_pb2.PodSandbox(id=f"s{number}", uid=OTHER) for number in range(MAX_STEPS + extra)]
            events = [nri_pb2.StateChangeEvent(event=1, pod=pod).SerializeToString() for pod in pods]
            requests = [request(2 * number + 99, "StateChange", event) for number, event in enumerate(events)]
            for one in requests:
                peer.write(PLUGIN, one)
            return {peer.answer()[0] for _ in range(extra)}

    async def serve() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=own_end)
        # The worker of the plugin does not run.
        session = Session(reader, writer, adapter.Plugin(Updater(Manager("/none"), Pods())), lambda _: None)
        with pytest.raises((EOFError, ConnectionError)):
            await session.run("n", "00")

    async def both() -> set[int]:
        answered, _ = await asyncio.gather(asyncio.to_thread(runtime), serve())
        return answered

    assert asyncio.run(both()) == {2 * number + 99 for number in range(MAX_STEPS, MAX_STEPS + extra)}


# -- lists and events without a limit


def test_endless_list_does_not_fill_the_memory(node: Node) -> None:
    with node.connected() as plugin:
        plugin.registered()
        plugin.configure()
        labels = {f"l{number}": "x" * 1000 for number in range(10)}
        pods = [node.pod(f"{number:08x}-2222-4333-8444-555555555555", labels=labels) for number in range(350)]
        plugin.call("Synchronize", chunk(pods))
        before = memory(node)
        for _ in range(60):
            for pod in pods:
                pod.id = an_id()
            assert plugin.call("Synchronize", chunk(pods)).status.code == 0
        # 21,000 pods with 10 kB of labels each would be 210 MB.
        assert memory(node) - before < 120
        plugin.synchronize(nri_pb2.SynchronizeRequest())
        node.until(lambda: f"its pods ({MAX_SANDBOXES + 1})" in node.log_text(), "the end of the list")
    assert f"exceeds the limit of {MAX_SANDBOXES}" in node.log_text()


def test_a_list_of_two_million_empty_pods_is_not_unfolded(node: Node) -> None:
    with node.connected() as plugin:
        plugin.registered()
        plugin.configure()
        before = peak(node)
        # Field 1 and field 2, each of no bytes: pods and containers.
        for payload in (b"\x0a\x00" * 2_000_000, b"\x12\x00" * 2_000_000):
            assert plugin.call("Synchronize", payload).status.code == 0
        assert peak(node) - before < 500
        plugin.send_event(Event.RUN_POD_SANDBOX, node.pod())
        node.until(lambda: len(node.living()) == 1, "the next pod")


def test_thousands_of_refused_pods_are_logged_in_a_few_lines(node: Node) -> None:
    assert node.machine.stop() == 0
    with node.connected() as plugin:
        plugin.registered()
        plugin.configure()
        lost = [node.container(node.pod(), 0) for _ in range(5000)]
        bad = [node.pod(uid="x\nforged: error: line") for _ in range(5000)]
        plugin.synchronize(nri_pb2.SynchronizeRequest(pods=bad, containers=lost))
        for pod in bad[:100]:
            plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        for _ in range(100):
            assert plugin.call("StateChange", b"\xff\xff").status.code == 0
    lines = node.log_text().splitlines()
    assert sum("unmonitored: " in line for line in lines) == 2 * BURST
    assert sum("cannot be read" in line for line in lines) == BURST
    assert not [line for line in lines if line.strip().startswith("forged")]
    node.machine.start()


def test_a_host_with_2000_pods_is_served(node: Node) -> None:
    assert node.machine.stop() == 0
    with node.connected() as plugin:
        plugin.registered()
        plugin.configure()
        pods = [node.pod(f"{number:08x}-2222-4333-8444-555555555555") for number in range(2000)]
        containers = [node.container(pod, 0, state=4) for pod in pods for _ in range(3)]
        plugin.synchronize(nri_pb2.SynchronizeRequest(pods=pods), nri_pb2.SynchronizeRequest(containers=containers))
        rescans = node.log_text().count("rescan of 2000")
        node.until(lambda: node.log_text().count("rescan of 2000") > rescans, "a rescan")
        node.start_container(plugin, pods[-1])
        for pod in pods[1:]:
            plugin.send_event(Event.REMOVE_POD_SANDBOX, pod)
        node.machine.start()
        node.until(lambda: node.living(pods[0].uid) == {pods[0].id}, "the remaining pod")
        node.until(lambda: node.machine.groups() == [pods[0].uid], "no other")


def test_search_continues_after_a_failed_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter, "RESCAN_S", 0.05)
    caplog.set_level(logging.DEBUG, "resctrlmond.nri")
    tested = adapter.Plugin(Updater(Manager("/none"), Pods()))
    for name in "abc":
        tested._pods.add_sandbox(messages.Pod(name)).cgroup = "/none"

    async def run() -> None:
        working = asyncio.create_task(tested.run())
        tested._rescan_at = 0.0
        async with asyncio.timeout(60):
            while tested._pods.sandboxes:
                await asyncio.sleep(0.01)
        working.cancel()

    asyncio.run(run())
    assert caplog.text.count("rescan of") >= 3, "each rescan finds the end, and cannot report it"


# -- an error in one pod does not affect others


def test_pod_that_exceeds_a_request_is_sent_in_part(node: Node) -> None:
    """A request that is too long ends the connection to resctrlmond, which looks as if the daemon did not run."""
    with node.connected() as plugin:
        plugin.registered()
        plugin.configure()
        pod, other = node.pod(), node.pod(OTHER)
        many = [node.container(pod, 0, state=4, name="\N{GRINNING FACE}" * 1000) for _ in range(1000)]
        plugin.synchronize(
            nri_pb2.SynchronizeRequest(pods=[pod, other], containers=many[:500]),
            nri_pb2.SynchronizeRequest(containers=many[500:]),
        )
        container = node.start_container(plugin, other)
        assert node.machine.tasks(OTHER) == {container.pid}

        def listed() -> dict[str, int]:
            return {one["key"]: len(one["containers"]) for one in node.machine.call("ListPods")["pods"]}

        node.until(lambda: listed() == {UID: 1000, OTHER: 1}, "both pods in the daemon's list")
        assert "unmonitored for now" not in node.log_text()


def test_failed_search_for_one_pod_does_not_affect_others(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.stop_adapter()
    monkeypatch.setattr(adapter, "FIRST_RESCAN_S", 0.05)
    real = place.pod_cgroup

    def broken(pid: int, uid: str, parent: str) -> str:
        if uid == UID:
            raise PermissionError(13, "no", "/sys/fs/cgroup")
        return real(pid, uid, parent)

    monkeypatch.setattr(place, "pod_cgroup", broken)
    tested = adapter.Plugin(Updater(Manager(node.machine.socket), Pods()))
    pods = [node.pod(), node.pod(OTHER)]

    async def run() -> None:
        working = asyncio.create_task(tested.run())
        decoded = messages.decode("Synchronize", nri_pb2.SynchronizeRequest(pods=pods).SerializeToString())
        assert isinstance(decoded, messages.Synchronize)
        tested.synchronize(decoded)
        async with asyncio.timeout(60):
            while await asyncio.to_thread(node.living, OTHER) != {pods[1].id} or "not be searched" not in caplog.text:
                await asyncio.sleep(0.02)
        working.cancel()

    asyncio.run(run())
    assert node.living() == {pods[0].id}
    assert "resctrlmond was not updated" in caplog.text


def test_container_changes_its_sandbox_only_by_a_list(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod, other = node.pod(), node.pod(OTHER)
        plugin.send_event(Event.RUN_POD_SANDBOX, other)
        container = node.start_container(plugin, pod)
        container.pod_sandbox_id = other.id
        plugin.send_event(Event.START_CONTAINER, other, container)
        assert (node.living(), node.living(OTHER)) == ({pod.id, container.id}, {other.id})
        assert f"is of sandbox {pod.id}, not of {other.id}" in node.log_text()
    with node.connected() as plugin:
        container.state = 3
        plugin.greet([pod, other], [container])
        node.until(lambda: node.living() == {pod.id}, "its end in the first pod")
        for one in (other, pod):
            plugin.send_event(Event.REMOVE_POD_SANDBOX, one)
        assert node.machine.groups() == []


def test_id_names_either_a_sandbox_or_a_container(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        container = node.start_container(plugin, pod)
        plugin.send_event(Event.START_CONTAINER, pod, node.container(pod, node.process(), id=pod.id))
        plugin.send_event(Event.RUN_POD_SANDBOX, node.pod(OTHER, id=container.id))
        assert node.living() == {pod.id, container.id}
        assert node.machine.tasks(UID) == {container.pid}
        assert node.machine.groups() == [UID]
    twice = [node.pod(OTHER, id=pod.id), pod]
    with node.connected() as plugin:
        container.state = 3
        plugin.greet(twice, [container, container])
        node.until(lambda: node.living(OTHER) == {pod.id, container.id}, "the first of the two that was reported")
        node.until(lambda: node.machine.groups() == [OTHER], "no other")


# -- processes of other programs


@pytest.mark.parametrize("path", ["/", "..", "{pod}", "{pod}/other", "/../../{pod}/other", "{pod}/other/../other"])
def test_control_group_that_is_not_the_containers_is_ignored(node: Node, pod_cgroup: str, path: str) -> None:
    settled(f"{pod_cgroup}/other", node.process())
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        paths = {"cgroups_path": path.format(pod=inner(pod_cgroup))}
        for event in (Event.START_CONTAINER, Event.POST_START_CONTAINER):
            plugin.send_event(event, pod, node.container(pod, 0, linux=paths))
        assert node.living() == {pod.id}
        assert node.machine.tasks(UID) == set()


def test_pod_that_is_removed_while_its_container_is_searched(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow start got its response before resctrlmond was updated, and then the removal arrived."""
    node.stop_adapter()
    tested = adapter.Plugin(Updater(Manager(node.machine.socket), Pods()))
    pod = messages.Pod(an_id(), UID)
    container = messages.Container(an_id(), pod.id, pid=node.process())
    removals: list[asyncio.Future[None]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def removed() -> None:
            removals.append(tested.handle_event(EventReport(Event.REMOVE_POD_SANDBOX, pod, None)))

        def own_cgroup(*_: object) -> str:
            loop.call_soon_threadsafe(removed)
            return ""

        monkeypatch.setattr(place, "own_cgroup", own_cgroup)
        working = asyncio.create_task(tested.run())
        await tested.handle_event(EventReport(Event.START_CONTAINER, pod, container))
        await removals[0]
        working.cancel()

    asyncio.run(run())
    assert node.group()["state"] == "completed"
    assert not caplog.records


def test_process_1_of_the_host_is_not_accepted_as_a_container(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod(pid=1)
        for event in (Event.START_CONTAINER, Event.POST_START_CONTAINER):
            plugin.send_event(event, pod, node.container(pod, 1))
        assert node.living() == {pod.id}
        assert node.machine.tasks(UID) == set()


# -- text


def test_names_from_the_runtime_are_logged_in_one_short_line(node: Node) -> None:
    os.mkdir(node.machine.top / "resctrl" / "mon_groups" / UID)
    forged = "\nforged: error: line\x1b[2J"
    with node.connected() as plugin:
        plugin.registered()
        request = nri_pb2.ConfigureRequest(runtime_name=forged + "x" * 1_000_000, config=forged * 10_000)
        assert plugin.call("Configure", request.SerializeToString()).status.code == 0
        plugin.synchronize(nri_pb2.SynchronizeRequest())
        pod = node.pod(name=forged + "y" * 1_000_000, namespace=forged)
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
    with node.connected() as plugin:
        plugin._message(2)
        refused = nri_pb2.Response(status=nri_pb2.Status(code=2, message=forged + "z" * 1_000_000))
        plugin.write(2, struct.pack(">IIBB", refused.ByteSize(), 1, 2, 0) + refused.SerializeToString())
        assert plugin.is_closed()
    node.until(lambda: "refused the plugin" in node.log_text(), "the refusal")
    lines = node.log_text().splitlines()
    assert max(map(len, lines)) < LONGEST
    assert not [line for line in lines if line.strip().startswith("forged")]
    assert sum("is unmonitored" in line for line in lines) == 1
