# SPDX-License-Identifier: Apache-2.0
"""The mount of a container's figures: what the runtime is asked for, and when the mount is left out.

In tests/kernel/test_nri.py a real runtime mounts it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.nri import nri_pb2
from resctrlmond.nri.exposure import DESTINATION, OPTIONS, _check, why_not_among
from resctrlmond.nri.messages import CREATE_MASK, MASK, Event, Mount, adjustment, decode
from resctrlmond.nri.session import ANSWER_S
from tests.nri.conftest import UID, Node, an_id
from tests.nri.runtime import Plugin

PROFILES = """\
profiles:
  seen: {expose: true}
  apart: {expose: true, watch: container}
  plain: {priority: 1}
  tight: {expose: true, swap: deny}
default_profile: seen
"""
# The runtime's own limit for a response; it disconnects a slower plugin.
RUNTIME_LIMIT_S = 2.0


@pytest.fixture
def exposing(node: Node) -> Node:
    """A node whose daemon and adapter have PROFILES."""
    directory = node.machine.top / "profiles.d"
    directory.mkdir()
    (directory / "10.yaml").write_text(PROFILES)
    node.stop_adapter()
    assert node.machine.stop() == 0
    node.machine.options = ("--profiles-dir", str(directory))
    node.machine.start()
    node.start_adapter("--profiles-dir", str(directory))
    return node


@contextmanager
def greeted(node: Node) -> Iterator[tuple[Plugin, nri_pb2.PodSandbox]]:
    """Yield a registered plugin, and a pod that runs."""
    with node.connected() as plugin:
        assert plugin.greet() == MASK | CREATE_MASK
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        yield plugin, pod


def create(
    plugin: Plugin, node: Node, pod: nri_pb2.PodSandbox, profile: str | None = None, **fields: Any
) -> tuple[str, nri_pb2.Mount | None]:
    """Report that a container is about to be created. Return its id, and the mount that it gets."""
    asked = nri_pb2.PodSandbox()
    asked.CopyFrom(pod)
    if profile is not None:
        asked.annotations.add(name=b"profile.resctrlmon.org", value=profile.encode())
    id_ = an_id()
    container = node.container(asked, 0, id=id_, linux={"cgroups_path": f"/pods/{id_}"}, **fields)
    request = nri_pb2.EventRequest(pod=asked, container=container).SerializeToString()
    answer = plugin.call("CreateContainer", request)
    assert answer.status.code == 0
    mounts = nri_pb2.CreateContainerResponse.FromString(answer.payload).adjust.mounts
    assert len(mounts) <= 1
    return id_, mounts[0] if mounts else None


def start(plugin: Plugin, node: Node, pod: nri_pb2.PodSandbox, id_: str, **fields: Any) -> None:
    """Report that a container that was created starts."""
    plugin.send_event(Event.POST_CREATE_CONTAINER, pod, node.container(pod, 0, id=id_, state=1, **fields))
    own = os.path.join(node._containers(), id_)
    os.makedirs(own)
    pid = node.process()
    Path(own, "cgroup.procs").write_text(str(pid))
    plugin.send_event(Event.START_CONTAINER, pod, node.container(pod, pid, id=id_, state=1, **fields))


def test_container_gets_the_files_of_its_pod_as_a_mount(exposing: Node) -> None:
    with greeted(exposing) as (plugin, pod):
        id_, mount = create(plugin, exposing, pod)
        assert mount is not None
        assert (mount.destination, mount.type, tuple(mount.options)) == (DESTINATION, "bind", OPTIONS)
        folder = Path(mount.source)
        # It exists before the runtime has the response.
        assert folder == exposing.machine.top / "run" / "exposed" / UID / "files"
        assert folder.is_dir()
        start(plugin, exposing, pod, id_)
        assert exposing.member(id_)["exposed"] == f"mounted at {DESTINATION}"
        exposing.until(lambda: "state active\n" in _text(folder / "live"), "the figures")
        assert (folder / "begin").exists()
        # The second container of the pod shares them.
        _, other = create(plugin, exposing, pod, name="other")
        assert other is not None
        assert other.source == mount.source


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_container_with_a_group_of_its_own_gets_its_own_files(exposing: Node) -> None:
    with greeted(exposing) as (plugin, pod):
        id_, mount = create(plugin, exposing, pod, "apart")
        assert mount is not None
        assert mount.source.endswith(f"/exposed/{id_}/files")
        # A container without the key has no mount, and nothing is logged about it.
        assert create(plugin, exposing, pod, "plain")[1] is None
        assert "as a mount" not in exposing.log_text()


def test_runtime_is_asked_only_if_a_profile_exposes_something(exposing: Node) -> None:
    path = exposing.machine.top / "profiles.d" / "10.yaml"
    with greeted(exposing) as (plugin, _):
        path.write_text("profiles: {plain: }\n")
        assert exposing.adapter is not None
        exposing.adapter.send_signal(signal.SIGHUP)
        assert plugin.is_closed()
    with exposing.connected() as plugin:
        assert plugin.greet() == MASK


@pytest.mark.parametrize(
    ("destination", "options", "why"),
    [
        (DESTINATION, {}, "another mount at /run/resctrlmon"),
        ("/run//resctrlmon/", {}, "another mount at"),
        ("/run/resctrlmon/deeper", {}, "another mount at"),
        ("/var/run/resctrlmon", {}, "another mount at"),
        ("/run", {}, "cannot be created in the container's mount at /run"),
        ("/var/run", {}, "cannot be created in"),
        ("/run", {"type": "tmpfs", "options": ("nosuid", "ro")}, "cannot be created in"),
        ("/run", {"type": "tmpfs", "options": ("nosuid", "mode=755")}, ""),
        ("/", {}, ""),
        ("/run/resctrlmond", {}, ""),
        ("/run/secrets", {}, ""),
        ("run/resctrlmon", {}, "another mount at"),
    ],
)
def test_mount_is_left_out_if_the_runtime_could_not_add_it(
    destination: str, options: dict[str, Any], why: str
) -> None:
    found = why_not_among([Mount("/proc", "proc"), Mount(destination, **{"type": "bind", **options})])
    assert why in found
    assert bool(found) == bool(why)


def test_mount_of_another_plugin_at_the_same_place_stays(exposing: Node) -> None:
    """NRI does not create a container for which two plugins mount something at the same place."""
    with greeted(exposing) as (plugin, pod):
        there = nri_pb2.Mount(destination=DESTINATION, type="bind", source="/tmp", options=["ro"])
        id_, mount = create(plugin, exposing, pod, mounts=[there])
        assert mount is None
        start(plugin, exposing, pod, id_)
        why = f"the container has another mount at {DESTINATION}"
        assert exposing.member(id_)["exposed"] == f"not mounted: {why}"
        assert f"does not get its figures as a mount: {why}" in exposing.log_text()
        assert (
            create(plugin, exposing, pod, mounts=[nri_pb2.Mount(destination=f"/{n}") for n in range(3000)])[1] is None
        )
        assert "the container has too many mounts" in exposing.log_text()


def test_container_is_created_without_the_daemon(exposing: Node) -> None:
    with greeted(exposing) as (plugin, pod):
        assert exposing.machine.stop() == 0
        id_, mount = create(plugin, exposing, pod)
        assert mount is None
        start(plugin, exposing, pod, id_)
        exposing.machine.start()
        exposing.until(lambda: id_ in exposing.living(), "the container")
        assert exposing.member(id_)["exposed"].startswith("not mounted: ")
        later, mount = create(plugin, exposing, pod)
        assert mount is not None
        start(plugin, exposing, pod, later)
        assert exposing.member(later)["exposed"] == f"mounted at {DESTINATION}"


def test_daemon_that_hangs_delays_one_creation(exposing: Node) -> None:
    with greeted(exposing) as (plugin, pod):
        assert exposing.machine.daemon is not None
        exposing.machine.daemon.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert create(plugin, exposing, pod, "tight", name="first")[1] is None
            # A generous bound for a busy machine: the response came without a person's help.
            assert time.monotonic() - began < 10 * RUNTIME_LIMIT_S
            # The other settings of the profile do not wait for the daemon.
            assert "memory.swap.max" in exposing.log_text()
            seconds = []
            for number in range(5):
                began = time.monotonic()
                assert create(plugin, exposing, pod, name=f"other-{number}")[1] is None
                seconds.append(time.monotonic() - began)
            assert exposing.log_text().count("as a mount: resctrlmond did not answer in time") == 6
            # Those that wait for the daemon take more than half of the time. A busy machine can delay single ones.
            assert min(seconds) < ANSWER_S / 2
        finally:
            exposing.machine.daemon.send_signal(signal.SIGCONT)


def test_runtime_that_refuses_the_mount_gets_none_for_the_next_container(exposing: Node) -> None:
    """As with a plugin that is called later and mounts something at the same place."""
    with greeted(exposing) as (plugin, pod):
        assert create(plugin, exposing, pod, name="refused")[1] is not None
        again, mount = create(plugin, exposing, pod, name="refused")
        assert mount is None
        start(plugin, exposing, pod, again, name="refused")
        why = "the runtime did not create an earlier container with the mount"
        assert exposing.member(again)["exposed"] == f"not mounted: {why}"
        # Also after that one, and not in other containers.
        assert create(plugin, exposing, pod, name="refused")[1] is None
        created, mount = create(plugin, exposing, pod, name="created")
        assert mount is not None
        start(plugin, exposing, pod, created, name="created")
        assert create(plugin, exposing, pod, name="created")[1] is not None


def test_pod_that_is_not_selected_gets_no_mount(exposing: Node) -> None:
    (exposing.machine.top / "nri.yaml").write_text("namespaces: [other]\n")
    exposing.stop_adapter()
    exposing.start_adapter(
        "--profiles-dir",
        str(exposing.machine.top / "profiles.d"),
        "--config",
        str(exposing.machine.top / "nri.yaml"),
    )
    with greeted(exposing) as (plugin, pod):
        assert create(plugin, exposing, pod)[1] is None
        assert "as a mount: not selected: its namespace" in exposing.log_text()
        assert not (exposing.machine.top / "run" / "exposed" / UID).exists()


def test_directory_of_the_mount_that_is_a_link_is_not_mounted(exposing: Node) -> None:
    top = exposing.machine.top / "run" / "exposed" / UID
    top.mkdir(parents=True)
    (top / "files").symlink_to(exposing.machine.top / "resctrl")
    with greeted(exposing) as (plugin, pod):
        assert create(plugin, exposing, pod)[1] is None
        assert "as a mount: " in exposing.log_text()


def test_links_above_the_folder_of_the_daemon_are_allowed(tmp_path: Path) -> None:
    """As /var/run, which a configuration may name."""
    (tmp_path / "run" / "exposed" / "k" / "files").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    _check(f"{tmp_path}/link/exposed/k/files")
    (tmp_path / "run" / "exposed" / "other").symlink_to("k")
    with pytest.raises(NotADirectoryError):
        _check(f"{tmp_path}/link/exposed/other/files")
    with pytest.raises(FileNotFoundError):
        _check(f"{tmp_path}/run/exposed/none/files")


def test_response_has_the_mount_as_the_runtime_reads_it() -> None:
    found = nri_pb2.CreateContainerResponse.FromString(
        adjustment({"memory.high": "1"}, Mount(DESTINATION, "bind", OPTIONS, "/run/x"))
    )
    (mount,) = found.adjust.mounts
    assert (mount.destination, mount.type, mount.source) == (DESTINATION, "bind", "/run/x")
    assert dict(found.adjust.linux.resources.unified) == {"memory.high": "1"}


def test_mounts_of_a_container_are_read_while_it_is_created() -> None:
    container = nri_pb2.Container(id="c", pod_sandbox_id="s")
    container.mounts.add(destination="/x", type="tmpfs", options=["ro"], source="/y")
    request = nri_pb2.EventRequest(pod=nri_pb2.PodSandbox(id="s"), container=container).SerializeToString()
    found = decode("CreateContainer", request)
    assert found.container.mounts == (Mount("/x", "tmpfs", ("ro",)),)  # type: ignore[union-attr]
