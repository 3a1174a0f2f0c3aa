# SPDX-License-Identifier: Apache-2.0
"""The adapter as a plugin that the runtime launches, without the list that older runtimes do not send then."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from resctrlmond.nri import nri_pb2, plugin, search
from resctrlmond.nri.manager import Manager
from resctrlmond.nri.messages import Container, Event, EventReport, Pod
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.updater import Updater
from tests.nri.conftest import UID, Node, an_id
from tests.nri.runtime import Plugin

OTHER = "11111111-2222-4333-8444-555555555555"


@contextmanager
def launched(node: Node) -> Iterator[Plugin]:
    """Launch the adapter as containerd does: with fd 3, and only these three environment variables."""
    if node.adapter is not None:
        node.stop_adapter()
    own_end, other_end = socket.socketpair()
    own_end.settimeout(60)
    environment = {"NRI_PLUGIN_NAME": "resctrlmond", "NRI_PLUGIN_IDX": "42", "NRI_PLUGIN_SOCKET": "3"}
    command = [
        sys.executable,
        "-m",
        "resctrlmond.nri",
        "--manager-socket",
        node.machine.socket,
        "--log-level",
        "debug",
    ]
    with node.log.open("ab") as log, other_end:
        launch = f"import os, sys; os.dup2({other_end.fileno()}, 3); os.execv(sys.argv[1], sys.argv[1:])"
        node.adapter = subprocess.Popen(
            [sys.executable, "-c", launch, *command], stderr=log, env=environment, pass_fds=[other_end.fileno()]
        )
    with Plugin(own_end) as runtime:
        yield runtime


def test_the_life_of_a_pod_and_the_end_with_the_runtime(node: Node) -> None:
    with launched(node) as runtime:
        assert runtime.greet() == 0x677
        assert runtime.name == "42-resctrlmond"
        pod = node.pod()
        container = node.start_container(runtime, pod)
        assert node.machine.tasks(UID) == {container.pid}
    assert node.adapter is not None
    assert node.adapter.wait(60) == 0
    node.adapter = None
    assert node.living() == {pod.id, container.id}


def test_configuration_from_the_runtime_selects_pods(node: Node) -> None:
    with launched(node) as runtime:
        runtime.registered()
        request = nri_pb2.ConfigureRequest(runtime_name="containerd", config="namespaces: [other]\n")
        runtime.call("Configure", request.SerializeToString())
        node.start_container(runtime, node.pod())
        node.start_container(runtime, node.pod(OTHER, namespace="other"))
        assert node.machine.groups() == [OTHER]


def test_claims_are_kept_without_a_list(node: Node) -> None:
    """containerd 1.7.24 sends no list to a plugin that it launches, so running containers are unknown."""
    node.machine.call("Create", key=OTHER, claim="nri")
    with launched(node) as runtime:
        runtime.registered()
        runtime.configure()
        container = node.start_container(runtime, node.pod())
        assert node.machine.stop() == 0
        missed = node.start_container(runtime, node.pod())
        node.machine.start()
        node.until(lambda: missed.id in node.living(), "the container that was missed")
        # The last step of a resync.
        node.until(lambda: node.machine.call("ListPods")["reported"], "the end of the resync")
        assert container.id in node.living()
        assert node.owners(OTHER) == {"nri"}


def test_wait_for_a_list_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "LIST_S", 0.05)
    pods = Pods()
    tested = plugin.Plugin(Updater(Manager("/none"), pods))

    async def run() -> None:
        working = asyncio.create_task(tested.run())
        tested.begin()
        pod = Pod("a" * 64, UID)
        tested.handle_event(EventReport(Event.START_CONTAINER, pod, Container("c" * 64, pod.id)))
        assert pods._newer_ids
        async with asyncio.timeout(60):
            while pods._newer_ids:
                await asyncio.sleep(0.01)
        tested.handle_event(EventReport(Event.START_CONTAINER, pod, Container("d" * 64, pod.id)))
        assert not pods._newer_ids, "ids that are kept for a list that never comes would fill the memory"
        assert not pods.has_list
        working.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    "environment",
    [
        {"NRI_PLUGIN_SOCKET": "3"},
        {"NRI_PLUGIN_SOCKET": "3", "NRI_PLUGIN_NAME": "a b", "NRI_PLUGIN_IDX": "00"},
        {"NRI_PLUGIN_SOCKET": "99", "NRI_PLUGIN_NAME": "a", "NRI_PLUGIN_IDX": "00"},
        {"NRI_PLUGIN_SOCKET": "1", "NRI_PLUGIN_NAME": "a", "NRI_PLUGIN_IDX": "00"},
        {"NRI_PLUGIN_SOCKET": "x", "NRI_PLUGIN_NAME": "a", "NRI_PLUGIN_IDX": "00"},
        {"NRI_PLUGIN_SOCKET": "3" * 30, "NRI_PLUGIN_NAME": "a", "NRI_PLUGIN_IDX": "00"},
    ],
    ids=str,
)
def test_incomplete_launch_environment_is_refused(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "resctrlmond.nri"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (78, False)
    assert "NRI_PLUGIN_SOCKET" in done.stderr


# -- removals that are not reported


def test_a_pod_without_a_control_group_ends_when_all_its_processes_have(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the sandbox ends, then that of the container, and no removal is reported."""
    node.stop_adapter()
    monkeypatch.setattr(search, "EMPTY_S", 0.2)
    for name in ("RESCAN_S", "FIRST_RESCAN_S"):
        monkeypatch.setattr(plugin, name, 0.05)
    holder, pid, other = node.process(), node.process(), node.process()
    tested = plugin.Plugin(Updater(Manager(node.machine.socket), Pods()))
    gone, lives = Pod(an_id(), UID, pid=holder), Pod(an_id(), OTHER, pid=other)
    # The process of this sandbox is not reported, so its end cannot be detected.
    unknown = Pod(an_id(), "22222222-2222-4333-8444-555555555555")

    async def reaches(key: str, state: str) -> None:
        async with asyncio.timeout(60):
            while (await asyncio.to_thread(node.group, key)).get("state") != state:
                await asyncio.sleep(0.02)

    async def run() -> None:
        working = asyncio.create_task(tested.run())
        tested._pods.replace_all([gone, lives, unknown], [])
        tested._rescan_at = 0.0
        await tested.handle_event(EventReport(Event.START_CONTAINER, gone, Container(an_id(), gone.id, pid=pid)))
        await reaches(UID, "active")
        # The end of a process is detected only if a rescan has seen it alive.
        async with asyncio.timeout(60):
            while not tested._pods.sandboxes[gone.id].started:
                await asyncio.sleep(0.02)
        node.end(holder)
        await asyncio.sleep(0.5)
        assert (await asyncio.to_thread(node.group, UID))["state"] == "active", "its container lives"
        node.end(pid)
        await reaches(UID, "completed")
        for key in (OTHER, unknown.uid):
            assert (await asyncio.to_thread(node.group, key))["state"] == "idle"
        working.cancel()

    asyncio.run(run())
