# SPDX-License-Identifier: Apache-2.0
"""Containers that started outside the group of their pod and ended while no daemon ran, detected by CPU time."""

from __future__ import annotations

import errno
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from resctrlmond.resctrl import cgroups
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import canonical_key
from resctrlmond.workloads.model.workload import Group
from resctrlmond.workloads.verbs import excluded
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from tests.workloads.conftest import UID, Host, assignment, join

FIRST, SECOND = "1" * 64, "2" * 64
KEY = canonical_key(UID)
# Each waits for a line, so that it runs in its control group only.
_WAIT, _BUSY, _BRIEF = (
    f"read line; {command}"
    for command in ("exec sleep 600", "while :; do :; done", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
)


class Pod:
    """A control group of a pod with containers."""

    def __init__(self, top: str) -> None:
        self.path = Path(top, f"test-pod{UID.replace('-', '_')}.slice")
        self.path.mkdir()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, id_: str, command: str = _WAIT, host: Host | None = None) -> None:
        """Start a container; with a ``host``, its hook calls the daemon."""
        path = self.path / f"crio-{id_}.scope"
        path.mkdir()
        child = self._children[id_] = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE)
        join(str(path), child.pid)
        if host is not None:
            assign(
                host.ctx,
                assignment(
                    UID,
                    child.pid,
                    "oci",
                    member=id_,
                    kind="container",
                    is_from_runtime=True,
                    own_cgroup=str(path),
                    pod_cgroup=str(self.path),
                ),
            )
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()

    def end(self, id_: str, *, is_killed: bool = False) -> None:
        """Wait for the end of a container, and remove its control group."""
        child = self._children.pop(id_)
        if is_killed:
            child.kill()
        child.wait()
        path = self.path / f"crio-{id_}.scope"
        while path.exists():
            with suppress(OSError):  # EBUSY until the kernel has released the last task
                path.rmdir()

    def used_ns(self) -> int:
        used = cgroups.cpu_time_ns(str(self.path))
        assert used is not None
        return used

    def run_busy(self) -> None:
        """Let the containers run until they have used 30 ms."""
        before = self.used_ns()
        while self.used_ns() < before + 30_000_000:
            time.sleep(0.001)

    def remove(self) -> None:
        for id_ in list(self._children):
            self.end(id_, is_killed=True)
        if self.path.exists():
            self.path.rmdir()


@pytest.fixture
def pod(cgroup: str) -> Iterator[Pod]:
    made = Pod(cgroup)
    yield made
    made.remove()


def first(host: Host) -> Group:
    return host.get(UID).first


def file(host: Host) -> Path:
    return Path(host.run, "records", f"{KEY}.cpu")


@pytest.mark.parametrize("is_noted", [True, False])
def test_container_that_starts_and_ends_while_no_daemon_runs(host: Host, pod: Pod, is_noted: bool) -> None:
    """It left no trace, and its pod stayed exact. Without ``is_noted``, no tick came before the kill."""
    pod.start(FIRST, host=host)
    if is_noted:
        host.manager.tick()
    assert file(host).exists() == is_noted
    pod.start(SECOND, _BRIEF)
    pod.end(SECOND)
    host.restart()
    assert first(host).baseline is Quality.LATE
    (why,) = first(host).baseline_reasons
    assert why.startswith("a container of the pod may have started outside the group and ended while resctrlmond")
    assert "CPU time more than the known containers that are still in it" in why


@pytest.mark.parametrize("is_noted", [True, False])
def test_pod_whose_containers_run_on_stays_exact(host: Host, pod: Pod, is_noted: bool) -> None:
    pod.start(FIRST, _BUSY, host)
    pod.start(SECOND, _BUSY, host)
    for _ in range(3):
        if is_noted:
            host.manager.tick()
        pod.run_busy()
        host.restart()
        host.manager.maintenance.search_left_out()
    assert first(host).baseline is Quality.EXACT


def test_container_that_ended_before_the_kill_leaves_the_pod_exact(host: Host, pod: Pod) -> None:
    """The last reading of a sleeping pod may be old, but each change of its members is followed by a new one."""
    pod.start(FIRST, host=host)
    host.manager.tick()
    pod.start(SECOND, _BRIEF, host)
    pod.end(SECOND)
    host.manager.tick()
    assert len(host.get(UID).living) == 1
    host.restart()
    assert first(host).baseline is Quality.EXACT


def test_container_that_ends_while_no_daemon_runs(host: Host, pod: Pod) -> None:
    """Its use until its end cannot be distinguished from that of a container that was never assigned."""
    pod.start(FIRST, host=host)
    pod.start(SECOND, _BUSY, host)
    host.manager.tick()
    pod.run_busy()
    pod.end(SECOND, is_killed=True)
    host.restart()
    assert first(host).baseline is Quality.LATE


def test_pod_that_is_removed_while_no_daemon_runs(host: Host, pod: Pod) -> None:
    pod.start(FIRST, host=host)
    host.manager.tick()
    pod.remove()
    host.restart()
    workload = host.get(UID)
    assert workload.first.baseline_reasons == (
        "a container of the pod may have started outside the group and ended while resctrlmond was not running: the "
        "control group of the pod was removed meanwhile",
    )
    host.manager.tick()
    assert not file(host).exists()


def test_pod_whose_control_group_was_created_again_while_no_daemon_runs(host: Host, pod: Pod) -> None:
    """A static pod keeps its UID. Its new control group had used less CPU time than the removed one."""
    pod.start(FIRST, _BUSY, host)
    pod.run_busy()
    host.manager.tick()
    pod.remove()
    pod.path.mkdir()
    pod.start(SECOND, "read line")
    pod.end(SECOND)
    host.restart()
    assert first(host).baseline_reasons == (
        "a container of the pod may have started outside the group and ended while resctrlmond was not running: the "
        "control group of the pod was removed meanwhile",
    )


def test_container_without_a_hook_that_ended_only_while_no_daemon_runs(host: Host, pod: Pod) -> None:
    """Its use before the last reading of the pod does not count as that of a known container."""
    pod.start(FIRST, host=host)
    pod.start(SECOND, "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; exec sleep 600")
    while Path(f"/proc/{pod._children[SECOND].pid}/comm").read_text() != "sleep\n":
        time.sleep(0.001)
    host.manager.tick()
    assert first(host).baseline is Quality.EXACT
    pod.end(SECOND, is_killed=True)
    host.restart()
    assert first(host).baseline is Quality.LATE


def test_container_that_starts_and_ends_during_the_start(
    host: Host, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.start(FIRST, host=host)
    host.manager.tick()
    host.restart()
    pod.start(SECOND, _BRIEF)  # its hook finds no socket
    pod.end(SECOND)
    assert first(host).baseline is Quality.EXACT
    host.manager.maintenance.search_left_out()
    assert first(host).baseline is Quality.LATE


@pytest.mark.parametrize(
    "content", ["", "{}", '{"nonce": 1, "path": "", "inode": 1, "usedNs": 999999999999, "belowNs": {}}']
)
def test_reading_that_is_damaged_or_of_another_run_hides_nothing(host: Host, pod: Pod, content: str) -> None:
    pod.start(FIRST, host=host)
    host.manager.tick()
    file(host).write_text(content)
    host.restart()
    assert first(host).baseline is Quality.EXACT
    pod.start(SECOND, _BRIEF)
    pod.end(SECOND)
    file(host).write_text(content)
    host.restart()
    assert first(host).baseline is Quality.LATE


def test_reading_that_cannot_be_written_hides_nothing(host: Host, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object, **__: object) -> None:
        raise NotWritten("no space left on device", errno=errno.ENOSPC)

    pod.start(FIRST, host=host)
    host.manager.tick()
    before = file(host).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("resctrlmond.workloads.evidence.pod_times.write_file", fill)
        create(host.ctx, UID, owner="another")
        host.manager.tick()
    assert file(host).read_bytes() == before
    pod.start(SECOND, _BRIEF)
    pod.end(SECOND)
    host.restart()
    assert first(host).baseline is Quality.LATE


def test_file_of_a_workload_without_a_record_is_removed(host: Host) -> None:
    file(host).write_text("{}")
    host.restart()
    assert not file(host).exists()


def test_pod_that_is_late_already_gets_no_other_reason(host: Host, pod: Pod) -> None:
    pod.start(FIRST, host=host)
    with host.ctx.store.transaction(KEY) as txn:
        excluded.mark_excluded(host.ctx, txn, "x is not included, because of its profile quiet")
    pod.start(SECOND, _BRIEF)
    pod.end(SECOND)
    host.restart()
    assert len(first(host).baseline_reasons) == 1
