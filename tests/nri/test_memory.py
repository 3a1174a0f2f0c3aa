# SPDX-License-Identifier: Apache-2.0
"""Memory settings of profiles in the adapter's response. In tests/kernel/test_nri.py a real runtime writes them."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.nri import memory, nri_pb2
from resctrlmond.nri import plugin as adapter
from resctrlmond.nri.manager import Manager
from resctrlmond.nri.memory import Memory
from resctrlmond.nri.messages import CREATE_MASK, MASK, Container, Event, Pod, adjustment, decode
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.session import Session
from resctrlmond.nri.updater import Updater
from tests.nri.conftest import UID, Node
from tests.nri.runtime import Plugin

PROFILES = """\
profiles:
  tight: {swap: deny, memory_high: 64M}
  swapping: {swap: allow, allow_memory_annotations: {memory.high: 1G}}
  plain: {priority: 1}
  outside: {watch: none, memory_high: 4K}
rules:
  - {profile: outside, namespace: kube-*}
  - {profile: plain, image: quiet/*}
  - {profile: swapping, cgroup: /burst/*}
default_profile: tight
"""
TIGHT = {"memory.swap.max": "0", "memory.high": str(64 << 20)}
ID = "c" * 64


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Return a directory with the names of a hierarchy of version 2, one pod's control group in it."""
    path = tmp_path / "cgroup"
    (path / "burst" / f"pod{UID}").mkdir(parents=True)
    for directory in (path, path / "burst", path / "burst" / f"pod{UID}"):
        (directory / "cgroup.controllers").write_text("cpu memory pids\n")
    for directory in (path / "burst", path / "burst" / f"pod{UID}"):
        for name in TIGHT:
            (directory / name).write_text("max\n")
    return path


def loaded(tmp_path: Path, top: Path | str, text: str = PROFILES) -> Memory:
    """Return the settings of these profiles on a host whose hierarchy is at ``top``."""
    directory = tmp_path / "profiles.d"
    directory.mkdir(exist_ok=True)
    (directory / "10.yaml").write_text(text)
    made = Memory([str(directory)])
    made.load("nothing is set")
    made._top = str(top)
    return made


@pytest.fixture
def loaded_at_top(tmp_path: Path, top: Path) -> tuple[Memory, Path]:
    """Return the settings of PROFILES, and the hierarchy of their host."""
    return loaded(tmp_path, top), top


def files(made: Memory, cgroups_path: str = f"/pods/{ID}", **fields: Any) -> dict[str, str]:
    """Return the files that are set for a container; ``pod_`` fields are those of its pod."""
    of_pod = {name.removeprefix("pod_"): value for name, value in fields.items() if name.startswith("pod_")}
    own = {name: value for name, value in fields.items() if not name.startswith("pod_")}
    container = Container(ID, "s", **{"name": "app", "cgroups_path": cgroups_path, **own})
    return asyncio.run(made.files(Pod("s", uid=UID, **{"namespace": "shop", "name": "web", **of_pod}), container))


def test_profile_is_selected_as_for_the_groups(tmp_path: Path, top: Path) -> None:
    made = loaded(tmp_path, top)
    assert files(made) == TIGHT
    assert files(made, image="quiet/x") == {}
    assert files(made, f"/burst/pod{UID}/{ID}") == {"memory.swap.max": "max"}
    assert files(made, pod_namespace="kube-system") == {"memory.high": "4096"}
    ours = "profile.resctrlmon.org"
    assert files(made, pod_annotations={ours: "swapping"}) == {"memory.swap.max": "max"}
    assert files(made, pod_annotations={ours: "swapping", f"{ours}/app": ""}) == {}
    assert files(made, pod_annotations={ours: "unknown"}) == TIGHT
    theirs = {"class.memtierd.nri.io": "swapping", "memory.high.memtierd.nri.io/app": "2M"}
    assert files(made, pod_annotations=theirs) == {"memory.swap.max": "max", "memory.high": str(2 << 20)}


@pytest.mark.parametrize(
    ("case", "left", "why"),
    [
        ("set by others", {"memory.swap.max": "0"}, "another plugin sets it"),
        ("no path", {}, "does not report the control group"),
        ("no swap", {"memory.high": str(64 << 20)}, "the kernel has no such file"),
        ("no memory", {}, "has no memory controller"),
        ("no hierarchy", {}, "no control groups of version 2"),
    ],
)
def test_file_that_the_runtime_could_not_write_is_left_out(
    loaded_at_top: tuple[Memory, Path], case: str, left: dict[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The runtime would not start the container."""
    made, top = loaded_at_top
    fields: dict[str, Any] = {"pod_annotations": {"profile.resctrlmon.org": "tight"}}
    match case:
        case "set by others":
            fields["set_files"] = frozenset({"memory.high"})
        case "no path":
            fields["cgroups_path"] = ""
        case "no swap":
            for path in top.glob("**/memory.swap.max"):
                path.unlink()
        case "no memory":
            for path in top.glob("**/cgroup.controllers"):
                path.write_text("cpu\n")
        case _:
            made._top = ""
    for parent in ("/pods", f"/burst/pod{UID}"):
        assert files(made, **{"cgroups_path": f"{parent}/{ID}", **fields}) == left
    assert why in caplog.text


def test_text_of_an_annotation_cannot_break_the_log(
    tmp_path: Path, top: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"profile.resctrlmon.org": "swapping", "memory.high.memtierd.nri.io": "1\nERROR: all is lost \x1b[31m"}
    assert files(loaded(tmp_path, top), pod_annotations=given, pod_name="a\nb", name="c\nd") == {
        "memory.swap.max": "max"
    }
    assert "not an amount of memory" in caplog.text
    assert "\nERROR" not in caplog.text
    assert "\x1b" not in caplog.text


def test_response_has_the_files_as_the_runtime_reads_them() -> None:
    found = nri_pb2.CreateContainerResponse.FromString(adjustment(TIGHT))
    assert dict(found.adjust.linux.resources.unified) == TIGHT
    # An empty adjustment would make the plugin the owner of nothing, and none at all says the same.
    assert adjustment({}) == b""


def test_files_that_are_set_already_are_read() -> None:
    container = nri_pb2.Container(id=ID, pod_sandbox_id="s")
    container.linux.resources.unified["memory.high"] = "1"
    request = nri_pb2.EventRequest(pod=nri_pb2.PodSandbox(id="s"), container=container).SerializeToString()
    found = decode("CreateContainer", request)
    assert getattr(found, "container", None) == Container(ID, "s", set_files=frozenset({"memory.high"}))


# -- the adapter as a process


def restart_adapter(node: Node, text: str) -> Path:
    """Start the adapter with these profiles, and return their file."""
    directory = node.machine.top / "profiles.d"
    directory.mkdir()
    path = directory / "10.yaml"
    path.write_text(text)
    node.stop_adapter()
    node.start_adapter("--profiles-dir", str(directory))
    return path


def create(plugin: Plugin, node: Node) -> bytes:
    """Report that a container is about to be created, and return the response."""
    pod = node.pod()
    request = nri_pb2.EventRequest(pod=pod, container=node.container(pod, 0, linux={"cgroups_path": f"/pods/{ID}"}))
    answer = plugin.call("CreateContainer", request.SerializeToString())
    assert answer.status.code == 0
    return answer.payload


def test_runtime_is_asked_only_if_a_profile_sets_something(node: Node) -> None:
    path = restart_adapter(node, "profiles: {plain: {priority: 1}}\n")
    with node.connected() as plugin:
        assert plugin.greet() == MASK
        # Also a runtime that asks nevertheless gets a response.
        assert create(plugin, node) == b""
        path.write_text("profiles: {tight: {swap: wrong}}\n")
        assert node.adapter is not None
        node.adapter.send_signal(signal.SIGHUP)
        node.until(lambda: "10.yaml:1: swap cannot be 'wrong'" in node.log_text(), "the error")
        plugin.send_event(Event.RUN_POD_SANDBOX, node.pod())
        path.write_text("profiles: {tight: {swap: deny}}\ndefault_profile: tight\n")
        node.adapter.send_signal(signal.SIGHUP)
        assert plugin.is_closed()
    with node.connected() as plugin:
        assert plugin.greet() == MASK | CREATE_MASK
        create(plugin, node)
        node.until(lambda: "memory.swap.max" in node.log_text(), "the message about what was set, or why it was not")
        # Another value needs no other events, and no other connection.
        path.write_text("profiles: {tight: {swap: allow}}\ndefault_profile: tight\n")
        node.adapter.send_signal(signal.SIGHUP)
        node.until(lambda: node.log_text().count("profiles reloaded") == 2, "the reload")
        create(plugin, node)


def test_connection_ends_for_other_events_when_no_response_is_due(node: Node) -> None:
    """A container whose start waits for a response would be late."""
    path = restart_adapter(node, "profiles: {plain: {priority: 1}}\n")
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        assert node.machine.daemon is not None
        node.machine.daemon.send_signal(signal.SIGSTOP)
        try:
            event = nri_pb2.StateChangeEvent(event=int(Event.START_CONTAINER), pod=pod)
            event.container.CopyFrom(node.container(pod, node.process(), state=1))
            stream = plugin.send("StateChange", event.SerializeToString())
            path.write_text("profiles: {tight: {swap: deny}}\n")
            assert node.adapter is not None
            node.adapter.send_signal(signal.SIGHUP)
            node.until(lambda: "profiles reloaded" in node.log_text(), "the reload")
        finally:
            node.machine.daemon.send_signal(signal.SIGCONT)
        answered, answer = plugin.answer()
        assert (answered, answer.status.code) == (stream, 0)
        assert plugin.is_closed()


# -- failures


class Slow(Memory):
    """A host on which a look at a control group never ends."""

    is_wanted = True

    async def files(self, pod: Pod, container: Container) -> dict[str, str]:
        await asyncio.Event().wait()
        return TIGHT


class Broken(Memory):
    """Settings with a bug."""

    is_wanted = True

    async def files(self, pod: Pod, container: Container) -> dict[str, str]:
        raise ZeroDivisionError


@pytest.mark.parametrize(("failing", "message"), [(Slow, "the host is slow"), (Broken, "ZeroDivisionError")])
def test_failure_does_not_fail_the_container(
    failing: type[Memory], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_end, other_end = socket.socketpair()

    async def serve() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=own_end)
        plugin = adapter.Plugin(Updater(Manager("/none"), Pods()), failing(()))
        with pytest.raises(EOFError):
            await Session(reader, writer, plugin, lambda _: None).run("n", "00")

    def runtime() -> nri_pb2.Response:
        with Plugin(other_end) as peer:
            other_end.settimeout(60)
            assert peer.greet() == MASK | CREATE_MASK
            return peer.call("CreateContainer", b"")

    async def both() -> nri_pb2.Response:
        answer, _ = await asyncio.gather(asyncio.to_thread(runtime), serve())
        return answer

    answer = asyncio.run(both())
    assert (answer.status.code, answer.payload) == (0, b"")
    assert message in caplog.text


def test_limits_of_the_host_are_looked_at_beside_the_event_loop(
    tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a control group may block its reader."""
    made = loaded(tmp_path, top)
    loops: list[bool] = []

    def looked(*_: object) -> str:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            loops.append(False)
        else:
            loops.append(True)
        return ""

    monkeypatch.setattr(memory, "_why_not", looked)
    assert files(made) == TIGHT
    assert loops == [False, False]
