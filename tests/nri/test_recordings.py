# SPDX-License-Identifier: Apache-2.0
"""Replay two versions of containerd: the responses are identical, and living processes replace the recorded ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.nri import messages, nri_pb2
from resctrlmond.nri.messages import Event
from tests.nri.conftest import Node
from tests.nri.recording import RECORDINGS, Call, Frame, calls, sessions
from tests.nri.runtime import Plugin, Runtime

VERSIONS = [pytest.param(recording, id=recording.stem) for recording in RECORDINGS]
# NRI before 0.12 reports all events by number, except for this one.
CHANGE, STOP = "StateChange", "StopContainer"


@contextmanager
def alone(top: Path) -> Iterator[Runtime]:
    """Start the adapter without a daemon: its responses do not depend on one."""
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
    """Send the recorded requests and compare the responses. Return the number of compared frames."""
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
def test_responses_are_identical_to_the_recording(recording: Path, piece: int | None, tmp_path: Path) -> None:
    recorded = sessions(recording)
    assert len(recorded) >= 3, "one to begin with, one after the adapter's restart, one after containerd's"
    with alone(tmp_path) as runtime:
        for frames in recorded:
            with runtime.accept() as plugin:
                plugin.piece = piece
                assert replay(plugin, frames) > 2


@pytest.mark.parametrize("recording", VERSIONS)
def test_recording_has_the_events_that_the_adapter_needs(recording: Path) -> None:
    """Check that these two versions report pids and the events after a restart as the comments state."""
    first, *later = [list(calls(frames)) for frames in sessions(recording)]
    assert [call.method for call in first[:2]] == ["Configure", "Synchronize"]
    configure = messages.decode(first[0].method, first[0].payload)
    assert isinstance(configure, messages.Configure)
    assert (configure.runtime, configure.config) == ("containerd", "")
    decoded = [messages.decode(call.method, call.payload) for call in first[2:]]
    assert {call.method for call in first[2:]} == {CHANGE, STOP}
    by_event: dict[Event, list[messages.EventReport]] = {}
    for one in decoded:
        assert isinstance(one, messages.EventReport)
        assert one.event is not None, "no event without a subscription"
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
    # containerd does not report the removal of the sandbox from before its own restart.
    last = [messages.decode(call.method, call.payload) for call in later[-1][2:]]
    assert Event.REMOVE_POD_SANDBOX not in {one.event for one in last if isinstance(one, messages.EventReport)}


class Cast:
    """Processes of the test in the place of the recorded ones, by the IDs of containers and sandboxes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pids: dict[str, int] = {}

    def played(self, call: Call) -> bytes:
        """Return the call's payload with the pids of the test; all other fields, known or not, are unchanged."""
        if call.method == "Synchronize":
            decoded = nri_pb2.SynchronizeRequest.FromString(call.payload)
            for one in (*decoded.pods, *decoded.containers):
                self._play(one)
            return decoded.SerializeToString()
        event = (nri_pb2.EventRequest if call.method == STOP else nri_pb2.StateChangeEvent).FromString(call.payload)
        for part in (event.pod, event.container):
            self._play(part)
        return event.SerializeToString()

    def _play(self, one: Any) -> None:
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
                decoded = messages.decode(call.method, call.payload)
                ended = ""
                if isinstance(decoded, messages.EventReport) and decoded.event is Event.STOP_CONTAINER:
                    ended = decoded.container.id if decoded.container else ""
                if ended in cast.pids:
                    # The runtime reports the event after the end.
                    node.end(cast.pids[ended])
                answer = plugin.call(call.method, cast.played(call))
                assert answer.status.code == 0
                if not isinstance(decoded, messages.EventReport) or decoded.pod is None:
                    continue
                if decoded.event is Event.START_CONTAINER and decoded.container:
                    name, uid = decoded.container.id, decoded.pod.uid
                    assert cast.pids[name] in node.machine.tasks(uid)
                    assert name in node.living(uid)
                    # The processes here are in no control group of a container, and late for that.
                    assert not node.member(name, uid).get("cpuTimeBeforeNs")
                    started += 1
                elif ended:
                    assert ended not in node.living(decoded.pod.uid)
                elif decoded.event is Event.REMOVE_POD_SANDBOX:
                    assert not any(decoded.pod.id in node.living(key) for key in node.machine.groups())
                    removed.add(decoded.pod.id)
    assert started >= 5
    assert removed


def test_the_recordings_are_small_enough_to_keep() -> None:
    assert sum(os.path.getsize(recording) for recording in RECORDINGS) < 600_000
