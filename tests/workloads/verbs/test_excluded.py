# SPDX-License-Identifier: Apache-2.0
"""Containers of a pod that are not counted in its group, also if they cannot be found or are too many."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from resctrlmond.api import types
from resctrlmond.api.access import Caller
from resctrlmond.api.verbs import VERBS
from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import NoSuchProcess, NotRead
from resctrlmond.resctrl.tasks import Moved
from resctrlmond.workloads.evidence.activity import activity
from resctrlmond.workloads.evidence.pod_cgroups import containers_in
from resctrlmond.workloads.groups import placement
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.clock import boot_ns
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import canonical_key
from resctrlmond.workloads.model.workload import Member
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.upkeep import maintenance
from resctrlmond.workloads.upkeep.recovery import Recovery
from resctrlmond.workloads.verbs import excluded
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import remove_member
from tests.workloads.conftest import UID, Host, assignment, join, locked

Start = Callable[[], "subprocess.Popen[bytes]"]
FIRST, SECOND = "1" * 64, "2" * 64


@pytest.fixture
def container(cgroup: str, process: Start) -> Iterator[Callable[[str], int]]:
    """Return a function that starts a container in the control group of the pod, and returns its process."""
    pod = Path(cgroup, f"test-pod{UID.replace('-', '_')}.slice")
    children: list[subprocess.Popen[bytes]] = []

    def start(id_: str) -> int:
        path = pod / f"crio-{id_}.scope"
        path.mkdir(parents=True)
        children.append(process())
        join(str(path), children[-1].pid)
        return children[-1].pid

    yield start
    for child in children:
        child.kill()
        child.wait()
    for path in [*pod.glob("*/"), pod]:
        path.rmdir()


def start(host: Host, pid: int, member: str) -> None:
    own = cgroups.cgroup_of(pid)
    assign(
        host.ctx, assignment(UID, pid, "oci", member=member, kind="container", is_from_runtime=True, own_cgroup=own)
    )


def test_pod_is_late_if_its_containers_cannot_be_listed_at_the_start(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = "1" * 64
    start(host, container(first), first)
    assert host.restart().context.store.known(UID).first.baseline is Quality.EXACT

    def fail(*_: object) -> dict[str, str]:
        raise NotRead("cannot list the containers")

    monkeypatch.setattr(excluded, "containers_in", fail)
    group = host.restart().context.store.known(UID).first
    assert group.baseline is Quality.LATE
    assert group.baseline_reasons == (
        "containers of the pod that run outside are not detected: cannot list the containers",
    )


def test_pod_is_late_for_its_running_container_after_too_many_other_pods(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon remembers so many pods. The control group of the pod shows the container after that."""
    monkeypatch.setattr(excluded, "_MAX_PODS", 2)
    first, later = "2" * 64, "3" * 64
    container(first)
    for pod in (UID, *(f"{number}" * 32 for number in range(3))):
        with host.ctx.store.transaction(canonical_key(pod)) as txn:
            excluded.mark_excluded(host.ctx, txn, f"{first} is not included, because of its profile quiet")
    assert canonical_key(UID) not in host.ctx.memory.excluded
    start(host, container(later), later)
    assert host.get(UID).first.baseline_reasons == (
        f"{first} is not included: it runs in the control group of the pod, but not in the group",
    )


def test_pod_that_runs_is_late_for_its_container_after_too_many_other_pods(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is in its record."""
    monkeypatch.setattr(excluded, "_MAX_PODS", 2)
    why = "x is not included, because of its profile quiet"
    start(host, container("1" * 64), "1" * 64)
    for pod in (UID, *(f"{number}" * 32 for number in range(3))):
        with host.ctx.store.transaction(canonical_key(pod)) as txn:
            excluded.mark_excluded(host.ctx, txn, why)
    assert host.get(UID).first.baseline_reasons == (why,)
    assert why in host.restart().context.store.known(UID).first.baseline_reasons


def test_container_that_starts_after_the_search_of_the_start(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(host, container(FIRST), FIRST)
    complete = Recovery._complete

    def then_a_container_starts(recovery: Recovery, txn: Transaction) -> None:
        container(SECOND)  # no socket yet: its hook fails
        complete(recovery, txn)

    with monkeypatch.context() as patch:
        patch.setattr(Recovery, "_complete", then_a_container_starts)
        host.restart()
    assert host.get(UID).first.baseline is Quality.EXACT
    host.manager.maintenance.search_left_out()
    assert host.get(UID).first.baseline is Quality.LATE


def test_pod_is_late_if_the_control_group_of_a_member_cannot_be_read(
    host: Host, container: Callable[[str], int], process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_pid: int) -> str:
        raise NotRead("too many open files", errno=errno.EMFILE)

    start(host, container(FIRST), FIRST)
    assign(host.ctx, assignment(UID, process().pid, "agent", member="helper", kind="process"))
    assert host.get(UID).first.baseline is Quality.EXACT
    container(SECOND)
    with monkeypatch.context() as patch:
        patch.setattr(cgroups, "cgroup_of", fail)
        host.restart()
    assert host.get(UID).first.baseline is Quality.LATE


def test_full_disk_does_not_keep_other_members_from_being_searched(
    host: Host, container: Callable[[str], int], process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object, **__: object) -> Moved:
        raise NotRead("too many open files", errno=errno.EMFILE)

    def fill(*_: object, **__: object) -> None:
        raise NotWritten("no space left on device")

    start(host, container(FIRST), FIRST)
    second = container(SECOND)
    start(host, second, SECOND)
    with monkeypatch.context() as patch:
        patch.setattr(placement, "_sweep_member", lacking)
        host.manager.maintenance.sweep(UID)
    searched = []
    real = placement._sweep_member

    def noted(ctx: Context, txn: Transaction, member: Member) -> Moved:
        searched.append(member.id)
        return real(ctx, txn, member)

    with monkeypatch.context() as patch:
        # The record of each member changes, because its last search failed.
        patch.setattr("resctrlmond.workloads.records.store.write_file", fill)
        patch.setattr(placement, "_sweep_member", noted)
        with suppress(NotWritten):
            host.manager.maintenance.sweep(UID)
    assert {FIRST, SECOND} <= set(searched)


def test_container_whose_hook_was_killed_before_its_call(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call names it, and no start searches for it."""
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    start(host, container(FIRST), FIRST)
    container(SECOND)
    host.manager.tick()
    assert host.get(UID).first.baseline is Quality.EXACT  # its hook may still call
    monkeypatch.setattr(excluded, "_UNASSIGNED_S", -1.0)
    host.manager.maintenance.tick()
    assert host.get(UID).first.baseline is Quality.LATE


def test_container_whose_hook_was_killed_in_a_pod_whose_other_containers_have_ended(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control group of the pod was known by those of its living members only."""
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    pid = container(FIRST)
    start(host, pid, FIRST)
    create(host.ctx, UID, owner="nri")
    os.kill(pid, signal.SIGKILL)
    remove_member(host.ctx, canonical_key(UID), FIRST, reason="it has stopped")
    assert not host.get(UID).living
    container(SECOND)
    monkeypatch.setattr(excluded, "_UNASSIGNED_S", -1.0)
    host.manager.tick()
    assert host.get(UID).first.baseline is Quality.LATE


@pytest.mark.parametrize("is_first", [True, False])
def test_container_whose_hook_was_killed_in_a_pod_that_sleeps(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Sweeps skipped the pod, because no task of its members had run. ``is_first``: it began before the pod slept."""
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    start(host, container(FIRST), FIRST)
    unassigned = container(SECOND) if is_first else 0
    host.ctx.watched.report(canonical_key(UID), host.get(UID).living)
    wait_until_it_sleeps(host)
    if not unassigned:
        unassigned = container(SECOND)
        # As each container does, it runs in its control group.
        used = cgroups.cpu_time_ns(cgroups.cgroup_of(unassigned))
        for signal_ in itertools.cycle((signal.SIGSTOP, signal.SIGCONT)):
            if used != cgroups.cpu_time_ns(cgroups.cgroup_of(unassigned)):
                break
            os.kill(unassigned, signal_)
        os.kill(unassigned, signal.SIGCONT)
        host.manager.maintenance.tick()
    assert host.get(UID).first.baseline is Quality.EXACT
    monkeypatch.setattr(excluded, "_UNASSIGNED_S", -1.0)
    host.manager.maintenance.tick()
    assert host.get(UID).first.baseline is Quality.LATE


def wait_until_it_sleeps(host: Host) -> None:
    """Tick until no task of the pod has run between two ticks."""
    before, slept = None, 0
    while slept < 3:
        host.manager.maintenance.tick()
        now = activity(host.get(UID), None)
        slept = slept + 1 if now == before else 0
        before = now


def test_container_whose_hook_was_killed_long_before_the_pod_begins(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sweep may come when the container has ended."""
    container(SECOND)
    monkeypatch.setattr(excluded, "_UNASSIGNED_S", -1.0)
    start(host, container(FIRST), FIRST)
    assert host.get(UID).first.baseline is Quality.LATE


@pytest.mark.parametrize("has_begun", [True, False])
def test_container_whose_assign_failed(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """It runs outside, and may have ended when the next sweep searches. ``has_begun``: the pod has another one."""

    def fill(*_: object, **__: object) -> None:
        raise NotWritten("no space left on device")

    if has_begun:
        start(host, container(FIRST), FIRST)
    rejected = container(SECOND)
    with monkeypatch.context() as patch, pytest.raises(NotWritten):
        patch.setattr("resctrlmond.workloads.records.store.write_file", fill)
        start(host, rejected, SECOND)
    if not has_begun:
        start(host, container(FIRST), FIRST)
    why = (f"{SECOND} is not included: its Assign failed, so it may run outside the group (no space left on device)",)
    assert host.get(UID).first.baseline_reasons == why
    host.manager.tick()
    host.restart()
    assert host.get(UID).first.baseline_reasons[:1] == why


def test_container_whose_control_group_cannot_be_read(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lack of descriptors, its hook failed before the Assign."""

    def fail(_pid: int) -> str:
        raise NotRead("too many open files", errno=errno.EMFILE)

    caller = Caller(0, frozenset({0}), os.getpid(), pid_namespaces=1)

    def run_hook(pid: int, id_: str) -> None:
        annotations = {"io.kubernetes.pod.uid": UID, "io.kubernetes.cri.container-type": "container"}
        state = {"ociVersion": "1.0.2", "id": id_, "pid": pid, "status": "created", "bundle": "/"}
        request = types.RunRequest(stage="createRuntime", state=json.dumps(state | {"annotations": annotations}))
        VERBS["Run"].run(host.manager, request, caller)

    run_hook(container(FIRST), FIRST)
    assert host.get(UID).first.baseline is Quality.EXACT
    second = container(SECOND)
    with monkeypatch.context() as patch, pytest.raises(NotRead):
        patch.setattr(cgroups, "cgroup_of", fail)
        run_hook(second, SECOND)
    assert host.get(UID).first.baseline is Quality.LATE


def test_container_that_has_ended_before_its_assign(host: Host, container: Callable[[str], int]) -> None:
    """It has used nothing that the pod lacks."""
    start(host, container(FIRST), FIRST)
    with pytest.raises(NoSuchProcess):
        assign(host.ctx, assignment(UID, 2**22 + 1, "oci", member=SECOND, kind="container"))
    assert host.get(UID).first.baseline is Quality.EXACT


def test_known_container_whose_second_assign_failed(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays in the group: after the hook, the NRI plugin assigns it too."""
    pid = container(FIRST)
    start(host, pid, FIRST)

    def fill(*_: object, **__: object) -> None:
        raise NotWritten("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(NotWritten):
        patch.setattr("resctrlmond.workloads.records.store.write_file", fill)
        assign(host.ctx, assignment(UID, pid, "nri", member=FIRST, kind="container"))
    assert host.get(UID).first.baseline is Quality.EXACT


def test_pod_with_many_members_is_listed_once(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search took as many lists of the pod as it has members, each compared with all members."""
    for number in range(4):
        start(host, container(f"{number}" * 64), f"{number}" * 64)
    listed = []

    def counted(pod: str, known: Collection[str]) -> dict[str, str]:
        listed.append(pod)
        return containers_in(pod, known)

    monkeypatch.setattr(excluded, "containers_in", counted)
    with host.ctx.store.transaction(canonical_key(UID)) as txn:
        excluded.mark_left_out(host.ctx, txn)
    assert len(listed) == 1
    assert host.get(UID).first.baseline is Quality.EXACT


def test_search_after_the_start_waits_for_no_call(host: Host, container: Callable[[str], int]) -> None:
    """A call that hung in the kernel kept the daemon from being ready."""
    start(host, container(FIRST), FIRST)
    host.restart()
    container(SECOND)
    searching = threading.Thread(target=host.manager.maintenance.search_left_out)
    with locked(host, canonical_key(UID)):
        searching.start()
        searching.join(20)
        assert not searching.is_alive()
    assert host.get(UID).first.baseline is Quality.EXACT
    host.manager.tick()
    assert host.get(UID).first.baseline is Quality.LATE


def test_container_that_starts_during_the_start_in_a_pod_that_begins_later(
    host: Host, container: Callable[[str], int]
) -> None:
    """Its hook found no socket, and the pod has no workload that could be searched."""
    host.restart()
    while boot_ns() < host.ctx.memory.since_ns + 10**9 // processes.TICKS_PER_S:
        pass  # times of starts are in clock ticks
    container(SECOND)
    host.manager.maintenance.search_left_out()
    start(host, container(FIRST), FIRST)
    assert host.get(UID).first.baseline_reasons == (
        f"{SECOND} is not included: it runs in the control group of the pod, but not in the group",
    )
