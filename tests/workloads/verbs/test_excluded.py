# SPDX-License-Identifier: Apache-2.0
"""Containers of a pod that a call named, and that are not counted in its group."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from resctrlmond.api import types
from resctrlmond.api.access import Caller
from resctrlmond.api.verbs import VERBS
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import NoSuchProcess, NotRead
from resctrlmond.resctrl.tasks import Moved
from resctrlmond.workloads.figures.reasons import text_of
from resctrlmond.workloads.figures.verdict import baseline_of, verdict
from resctrlmond.workloads.groups import placement
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import canonical_key
from resctrlmond.workloads.model.workload import Member
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.verbs import excluded
from resctrlmond.workloads.verbs.assign import assign
from tests.workloads.conftest import UID, Host, assignment, join

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


def start(host: Host, pid: int, member: str, pod: str = UID) -> None:
    own = cgroups.cgroup_of(pid)
    assign(
        host.ctx, assignment(pod, pid, "oci", member=member, kind="container", is_from_runtime=True, own_cgroup=own)
    )


def test_pod_that_runs_is_late_for_its_container_after_too_many_other_pods(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is in its record."""
    monkeypatch.setattr(excluded, "_MAX_PODS", 2)
    why = excluded.by_profile("x", "quiet")
    start(host, container("1" * 64), "1" * 64)
    for pod in (UID, *(f"{number}" * 32 for number in range(3))):
        with host.ctx.store.transaction(canonical_key(pod)) as txn:
            excluded.mark_excluded(host.ctx, txn, why)
    assert verdict(host.get(UID)).reasons == (text_of(why),)
    assert text_of(why) in verdict(host.restart().context.store.known(UID)).reasons


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


@pytest.mark.parametrize("pod", [UID, "etcd-master-0"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_container_whose_assign_failed(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, has_begun: bool, pod: str
) -> None:
    """It runs outside, and may have ended when the next sweep searches. ``has_begun``: the pod has another one.

    A pod of crictl, or a static pod, can have any text as its UID.
    """

    def fill(*_: object, **__: object) -> None:
        raise NotWritten("no space left on device")

    if has_begun:
        start(host, container(FIRST), FIRST, pod)
    rejected = container(SECOND)
    with monkeypatch.context() as patch, pytest.raises(NotWritten):
        patch.setattr("resctrlmond.workloads.records.store.write_file", fill)
        start(host, rejected, SECOND, pod)
    if not has_begun:
        start(host, container(FIRST), FIRST, pod)
    why = (f"{SECOND} is not included: its Assign failed, so it may run outside the group (no space left on device)",)
    assert verdict(host.get(pod)).reasons == why
    host.manager.tick()
    host.restart()
    assert verdict(host.get(pod)).reasons[:1] == why


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
    assert baseline_of(host.get(UID)) is Quality.EXACT
    second = container(SECOND)
    with monkeypatch.context() as patch, pytest.raises(NotRead):
        patch.setattr(cgroups, "cgroup_of", fail)
        run_hook(second, SECOND)
    assert baseline_of(host.get(UID)) is Quality.LATE


def test_container_that_has_ended_before_its_assign(host: Host, container: Callable[[str], int]) -> None:
    """It has used nothing that the pod lacks."""
    start(host, container(FIRST), FIRST)
    with pytest.raises(NoSuchProcess):
        assign(host.ctx, assignment(UID, 2**22 + 1, "oci", member=SECOND, kind="container"))
    assert baseline_of(host.get(UID)) is Quality.EXACT


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
    assert baseline_of(host.get(UID)) is Quality.EXACT
