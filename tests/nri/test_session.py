# SPDX-License-Identifier: Apache-2.0
"""The connection to the runtime: its responses, and that it is created again after any end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from resctrlmond.nri import mux, nri_pb2
from resctrlmond.nri import plugin as adapter
from resctrlmond.nri.manager import Manager
from resctrlmond.nri.messages import Event, EventReport
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.session import Session
from resctrlmond.nri.updater import Updater
from tests.nri.conftest import UID, Node
from tests.nri.hostile import packed, request
from tests.nri.runtime import PLUGIN, REQUEST, RESPONSE, Plugin, Runtime

OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 0, 3, 8, 12
MAX_DATA = 4 << 20


def test_a_runtime_that_writes_one_byte_at_a_time(node: Node) -> None:
    with node.connected() as plugin:
        plugin.piece = 1
        assert plugin.greet() == 0x677
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        container = node.start_container(plugin, pod)
        assert node.machine.tasks(UID) == {container.pid}


def test_a_list_of_nearly_4_mib_in_two_frames(node: Node) -> None:
    with node.connected() as plugin:
        plugin.registered()
        plugin.configure()
        pod = node.pod(labels={f"l{number}": "x" * 4096 for number in range(1000)})
        chunk = nri_pb2.SynchronizeRequest(pods=[pod])
        assert 4_000_000 < chunk.ByteSize() < MAX_DATA
        plugin.synchronize(chunk)
        node.until(lambda: node.living() == {pod.id}, "the pod")


def test_message_that_is_too_long_is_refused_and_the_connection_remains(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        stream = plugin.send("StateChange", bytes(MAX_DATA))
        answered, answer = plugin.answer()
        assert (answered, answer.status.code) == (stream, RESOURCE_EXHAUSTED)
        assert "exceed maximum message size of 4194304" in answer.status.message
        plugin.send_event(Event.RUN_POD_SANDBOX, node.pod())


def test_stream_ids_may_skip_and_even_or_falling_ids_are_refused(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        assert plugin.call("StateChange", b"", skip=6).status.code == OK
        for stream in (plugin.stream + 1, plugin.stream, 1, 0):
            plugin.write(PLUGIN, request(stream, "StateChange", b""))
            answered, answer = plugin.answer()
            assert (answered, answer.status.code) == (stream, INVALID_ARGUMENT)
        assert plugin.call("StateChange", b"").status.code == OK


def test_unknown_method_is_unimplemented(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        for method in ("UpdateContainer", "ValidateContainerAdjustment", "Nope", ""):
            assert plugin.call(method, b"").status.code == UNIMPLEMENTED
        assert plugin.call("StateChange", b"", service="nri.pkg.api.v9.Plugin").status.code == UNIMPLEMENTED
        assert plugin.call("Shutdown", b"").status.code == OK


def test_unreadable_event_does_not_fail_the_container(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        for method in ("StateChange", "StartContainer"):
            answer = plugin.call(method, b"\xff\xff")
            assert (answer.status.code, answer.payload) == (OK, b"")
        assert "cannot be read" in node.log_text()


def test_invalid_request_is_refused_or_skipped(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        plugin.stream += 2
        plugin.write(PLUGIN, packed(plugin.stream, REQUEST, b"\xff"))
        assert plugin.answer()[1].status.code == INVALID_ARGUMENT
        plugin.write(PLUGIN, packed(99, RESPONSE, b""))
        plugin.write(PLUGIN, packed(99, 3, b"data"))
        for connection in (0, 3, 2**32 - 1):
            plugin.write(connection, b"for no connection")
        assert plugin.call("StateChange", b"").status.code == OK


def test_calls_are_read_while_another_call_runs_and_each_gets_a_response(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pods = [node.pod(f"0000000{number}-2222-4333-8444-555555555555") for number in range(9)]
        changes = [nri_pb2.StateChangeEvent(event=1, pod=pod).SerializeToString() for pod in pods]
        streams = {plugin.send("StateChange", change) for change in changes}
        answers = dict(plugin.answer() for _ in streams)
        assert set(answers) == streams
        assert {answer.status.code for answer in answers.values()} == {OK}
        assert sorted(node.machine.groups()) == [pod.uid for pod in pods]


def test_invalid_frame_ends_the_connection_and_the_adapter_reconnects(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        plugin.raw(b"GET / HTTP/1.1\r\n\r\n")
        assert plugin.is_closed()
    with node.connected() as plugin:
        plugin.greet()
    assert "this is not NRI" in node.log_text()


def test_connection_that_ends_within_a_frame_is_renewed_and_keeps_the_group(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        plugin.raw(struct.pack(">II", PLUGIN, 100) + b"half of i")
    with node.connected() as plugin:
        plugin.greet([pod])
        assert node.living() == {pod.id}
    assert "within a frame" in node.log_text()


def test_connection_that_ends_within_a_list_discards_its_chunks(node: Node) -> None:
    """A runtime that restarts in the middle of its list: the first part is not a list, and is not added to the next
    one.
    """
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
    half = node.pod("11111111-2222-4333-8444-555555555555")
    with node.connected() as plugin:
        plugin.registered()
        plugin.configure()
        chunk = nri_pb2.SynchronizeRequest(pods=[half], more=True)
        assert plugin.call("Synchronize", chunk.SerializeToString()).status.code == OK
        assert node.living() == {pod.id}, "an incomplete list ends no workload"
    with node.connected() as plugin:
        plugin.greet([pod])
        node.until(lambda: "its pods (1)" in node.log_text(), "the whole list")
        assert node.machine.groups() == [UID]


def test_unreadable_list_ends_only_the_connection(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        assert plugin.call("Synchronize", b"\xff").status.code == INVALID_ARGUMENT
        assert node.living() == {pod.id}


def test_adapter_connects_once_a_runtime_listens(node: Node) -> None:
    assert not os.path.exists(node.nri)
    node.until(lambda: "No such file or directory" in node.log_text(), "the first attempt")
    dead = Runtime(node.nri)
    dead.close()
    node.until(lambda: "Connection refused" in node.log_text(), "an attempt with a socket without a listener")
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
    node.stop_runtime()
    with node.connected() as plugin:
        plugin.greet([pod])
        assert node.living() == {pod.id}


def test_registration_is_retried_after_a_refusal(node: Node) -> None:
    with node.connected() as plugin:
        plugin._message(2)  # the registration
        refused = nri_pb2.Response(status=nri_pb2.Status(code=2, message="no plugins today"))
        plugin.write(2, packed(1, RESPONSE, refused.SerializeToString()))
        assert plugin.is_closed()
    with node.connected() as plugin:
        assert plugin.greet() == 0x677
    assert "no plugins today" in node.log_text()


def test_ready_status_and_stop(node: Node, tmp_path: Path) -> None:
    node.stop_adapter()
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(tmp_path / "nri-notify"))
    notify.settimeout(30)
    with notify:
        node.start_adapter("--name", "probe", "--index", "07", NOTIFY_SOCKET=str(tmp_path / "nri-notify"))
        assert notify.recv(4096) == b"READY=1", "ready without a runtime: one may come later"
        with node.connected() as plugin:
            plugin.greet()
            assert plugin.name == "07-probe"
            statuses = iter(lambda: notify.recv(4096).decode(), "STATUS=registered with containerd v1.7.24")
            assert all(status.startswith("STATUS=waiting for a runtime") for status in statuses)
            pod = node.pod()
            plugin.send_event(Event.RUN_POD_SANDBOX, pod)
            assert node.stop_adapter() == 0
            assert plugin.is_closed()
            assert notify.recv(4096) == b"STOPPING=1"
    assert node.living() == {pod.id}, "no workload ends when the adapter stops"


def test_killed_adapter_continues_after_its_restart(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        container = node.start_container(plugin, pod)
        before = node.group()
        node.stop_adapter(signal.SIGKILL)
    missed = node.container(pod, node.process())
    node.start_adapter()
    with node.connected() as plugin:
        container.state = 3
        plugin.greet([pod], [container, missed])
        node.until(lambda: missed.id in node.living(), "the container that was missed")
        assert node.group()["members"][:2] == before["members"]
        assert node.member(missed.id)["late"]


def test_restarted_adapter_leaves_an_observed_container_alone(node: Node) -> None:
    """The adapter ended the container, because its list of pods does not have the key of that workload."""
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        container, gone = node.start_container(plugin, pod, has_group=True), node.start_container(plugin, pod)
        before = node.group(container.id)
        assert (before["observed"], before["state"], node.group()["baseline"]) == (True, "active", "late")
        node.stop_adapter(signal.SIGKILL)
    node.start_adapter()
    with node.connected() as plugin:
        container.state = 3
        plugin.greet([pod], [container])
        # Its key is greater, so its end comes later.
        assert container.id < UID
        node.until(lambda: gone.id not in node.living(), "the end of a container that is not listed")
        now = node.group(container.id)
        assert (now["state"], now["generation"], now["members"]) == ("active", 1, before["members"])
    assert "is unmonitored" not in node.log_text()


class Broken(adapter.Plugin):
    """A plugin with a bug."""

    def __init__(self) -> None:
        super().__init__(Updater(Manager("/none"), Pods()))

    def handle_event(self, report: EventReport) -> asyncio.Future[None]:
        raise ZeroDivisionError


def test_bug_of_the_adapter_does_not_fail_the_container(caplog: pytest.LogCaptureFixture) -> None:
    own_end, other_end = socket.socketpair()

    async def serve() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=own_end)
        session = Session(reader, writer, Broken(), lambda _: None)
        with pytest.raises(EOFError):
            await session.run("n", "00")

    def runtime() -> int:
        with Plugin(other_end) as peer:
            other_end.settimeout(30)
            peer.greet()
            return peer.call("StartContainer", b"").status.code

    async def both() -> int:
        code, _ = await asyncio.gather(asyncio.to_thread(runtime), serve())
        return code

    assert asyncio.run(both()) == OK
    assert "ZeroDivisionError" in caplog.text


class Recorder(adapter.Plugin):
    """A plugin that records the connection that each response waits for."""

    def __init__(self) -> None:
        super().__init__(Updater(Manager("/none"), Pods()))
        self.waiting: list[asyncio.Future[None]] = []

    def handle_event(self, report: EventReport) -> asyncio.Future[None]:
        self.waiting.append(super().handle_event(report))
        return self.waiting[-1]


def test_event_that_arrives_with_the_end_of_the_connection_delays_no_container() -> None:
    """The next connection was mistaken for the connection that waits for the response."""
    own_end, other_end = socket.socketpair()
    event = nri_pb2.StateChangeEvent(event=1, pod=nri_pb2.PodSandbox(id="s", uid=UID))

    async def serve() -> Recorder:
        _, writer = await asyncio.open_unix_connection(sock=own_end)
        reader = asyncio.StreamReader()
        reader.feed_data(mux.frames(PLUGIN, request(1, "StateChange", event.SerializeToString())))
        reader.feed_eof()
        plugin = Recorder()
        with pytest.raises(EOFError):
            await Session(reader, writer, plugin, lambda _: None).run("n", "00")
        return plugin

    with other_end:
        (waiting,) = asyncio.run(serve()).waiting
    assert waiting.cancelled()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--index", "9"),
        ("--index", "100"),
        ("--index", "\u0660\u0661"),
        ("--name", "a b"),
        ("--name", ""),
        ("--socket", ""),
        ("--manager-socket", ""),
        ("--config", ""),
        ("--log-level", "x"),
    ],
)
def test_arguments_that_runtimes_do_not_accept_are_refused(arguments: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "resctrlmond.nri", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
