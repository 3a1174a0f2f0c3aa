# SPDX-License-Identifier: Apache-2.0
"""Containerds of two versions as they spoke to us: to the byte, and with living processes in the place of theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from resctrlmond.nri import messages, nri_pb2
from resctrlmond.nri.messages import Event
from tests.nri.conftest import Node
from tests.nri.recording import RECORDINGS, Call, Frame, calls, sessions
from tests.nri.runtime import Plugin, Runtime

VERSIONS = [pytest.param(recording, id=recording.stem) for recording in RECORDINGS]
# Before 0.12, NRI tells all events by number but this one.
CHANGE, STOP = "StateChange", "StopContainer"


@contextmanager
def alone(top: Path) -> Iterator[Runtime]:
    """The adapter without any daemon: what it answers does not depend on one."""
    runtime = Runtime(str(top / "nri.sock"))
    command = [sys.executable, "-m", "resctrlmond.nri", "--socket", str(top / "nri.sock")]
    with closing(runtime), (top / "log").open("wb") as log:
        adapter = subprocess.Popen([*command, "--manager-socket", str(top / "none")], stderr=log)
        try:
            yield runtime
            adapter.send_signal(signal.SIGTERM)
            assert adapter.wait(60) == 0
        finally:
            adapter.kill()
            adapter.wait()
    assert b"Traceback" not in (top / "log").read_bytes()


def replay(plugin: Plugin, frames: list[Frame]) -> int:
    """Say what the runtime said, and compare what is answered with what was; how many frames were compared."""
    compared = 0
    for frame in frames:
        if frame.is_runtimes:
            plugin.raw(frame.data)
        else:
            assert plugin._exactly(len(frame.data)) == frame.data
            compared += 1
    return compared


def test_there_are_recordings_of_both_versions() -> None:
    assert [recording.stem.rpartition(".")[0] for recording in RECORDINGS] == ["containerd-1.7", "containerd-2.1"]


@pytest.mark.parametrize("recording", VERSIONS)
@pytest.mark.parametrize("piece", [None, 7], ids=["whole", "in-pieces"])
def test_the_same_is_answered_to_the_byte(recording: Path, piece: int | None, tmp_path: Path) -> None:
    recorded = sessions(recording)
    assert len(recorded) >= 3, "one to begin with, one after the adapter's restart, one after containerd's"
    with alone(tmp_path) as runtime:
        for frames in recorded:
            with runtime.accept() as plugin:
                plugin.piece = piece
                assert replay(plugin, frames) > 2


@pytest.mark.parametrize("recording", VERSIONS)
def test_the_recording_has_what_the_adapter_lives_on(recording: Path) -> None:
    """What is said of containerd, of these two: when a process is told, and what comes after a restart."""
    first, *later = [list(calls(frames)) for frames in sessions(recording)]
    assert [call.method for call in first[:2]] == ["Configure", "Synchronize"]
    configure = messages.decode(first[0].method, first[0].payload)
    assert isinstance(configure, messages.Configure)
    assert (configure.runtime, configure.config) == ("containerd", "")
    told = [messages.decode(call.method, call.payload) for call in first[2:]]
    assert {call.method for call in first[2:]} == {CHANGE, STOP}
    by_event: dict[Event, list[messages.Happened]] = {}
    for one in told:
        assert isinstance(one, messages.Happened)
        assert one.event is not None, "nothing that we did not ask for"
        assert one.pod is not None
        by_event.setdefault(one.event, []).append(one)
    assert set(by_event) == set(Event)
    for event in (Event.START_CONTAINER, Event.POST_START_CONTAINER):
        assert all(one.container and one.container.pid for one in by_event[event])
    assert all(one.container and not one.container.pid for one in by_event[Event.POST_CREATE_CONTAINER])
    for calls_of in later:
        synchronize = messages.decode("Synchronize", calls_of[1].payload)
        assert isinstance(synchronize, messages.Synchronize)
        [pod] = synchronize.pods
        assert pod.cgroup_parent.endswith(f"/pod{pod.uid}")
        assert all(one.pid for one in synchronize.containers if one.is_running)
        assert any(one.is_running for one in synchronize.containers)
    # Of the sandbox from before its own restart, the last connection's containerd does not tell the removal.
    last = [messages.decode(call.method, call.payload) for call in later[-1][2:]]
    assert Event.REMOVE_POD_SANDBOX not in {one.event for one in last if isinstance(one, messages.Happened)}


class Cast:
    """Processes of ours in the roles of the recorded ones, by the ids of containers and sandboxes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pids: dict[str, int] = {}

    def played(self, call: Call) -> bytes:
        """The call's payload with our processes in it; every other field, known or not, as it was."""
        if call.method == "Synchronize":
            told = nri_pb2.SynchronizeRequest.FromString(call.payload)
            for one in (*told.pods, *told.containers):
                self._play(one)
            return told.SerializeToString()
        event = (nri_pb2.EventRequest if call.method == STOP else nri_pb2.StateChangeEvent).FromString(call.payload)
        for part in (event.pod, event.container):
            self._play(part)
        return event.SerializeToString()

    def _play(self, one: nri_pb2.PodSandbox | nri_pb2.Container) -> None:
        if one.pid:
            if one.id not in self.pids:
                self.pids[one.id] = self.node.process()
            one.pid = self.pids[one.id]


@pytest.mark.parametrize("recording", VERSIONS)
def test_each_container_is_in_its_group_when_its_start_is_answered(recording: Path, node: Node) -> None:
    cast = Cast(node)
    started, removed = 0, set()
    for frames in sessions(recording):
        with node.connected() as plugin:
            plugin.registered()
            for call in calls(frames):
                if call.method == "Configure":
                    plugin.configure()
                    continue
                told = messages.decode(call.method, call.payload)
                is_end = isinstance(told, messages.Happened) and told.event is Event.STOP_CONTAINER
                if is_end and told.container and told.container.id in cast.pids:
                    # The runtime tells when it has ended.
                    node.end(cast.pids[told.container.id])
                answer = plugin.call(call.method, cast.played(call))
                assert answer.status.code == 0
                if not isinstance(told, messages.Happened) or told.pod is None:
                    continue
                if told.event is Event.START_CONTAINER and told.container:
                    name, uid = told.container.id, told.pod.uid
                    assert cast.pids[name] in node.machine.tasks(uid)
                    assert name in node.living(uid)
                    assert not node.member(name, uid).get("late")
                    started += 1
                elif is_end and told.container:
                    assert told.container.id not in node.living(told.pod.uid)
                elif told.event is Event.REMOVE_POD_SANDBOX:
                    assert not any(told.pod.id in node.living(key) for key in node.machine.groups())
                    removed.add(told.pod.id)
    assert started >= 5
    assert removed


def test_the_recordings_are_small_enough_to_keep() -> None:
    assert sum(os.path.getsize(recording) for recording in RECORDINGS) < 600_000
