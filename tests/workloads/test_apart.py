# SPDX-License-Identifier: Apache-2.0
"""Containers of a pod that are not counted in its group, also if they cannot be found or are too many."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.workloads import apart
from resctrlmond.workloads.accounting import Quality
from resctrlmond.workloads.validation import canonical_key
from tests.workloads.conftest import UID, Host, assignment, join

Start = Callable[[], "subprocess.Popen[bytes]"]


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
    host.manager.assign(
        assignment(UID, pid, "oci", member=member, kind="container", is_from_runtime=True, own_cgroup=own)
    )


def test_pod_is_late_if_its_containers_cannot_be_listed_at_the_start(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = "1" * 64
    start(host, container(first), first)
    assert host.restart().get(UID).first.baseline is Quality.EXACT

    def fail(*_: object) -> dict[str, str]:
        raise NotRead("cannot list the containers")

    monkeypatch.setattr(apart, "containers_in", fail)
    group = host.restart().get(UID).first
    assert group.baseline is Quality.LATE
    assert group.baseline_reasons == (
        "containers of the pod that run outside are not detected: cannot list the containers",
    )


def test_pod_is_late_for_its_running_container_after_too_many_other_pods(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon remembers so many pods. The control group of the pod shows the container after that."""
    monkeypatch.setattr(apart, "_MAX_PODS", 2)
    excluded, later = "2" * 64, "3" * 64
    container(excluded)
    for pod in (UID, *(f"{number}" * 32 for number in range(3))):
        with host.manager.context.store.transaction(canonical_key(pod)) as txn:
            apart.mark_apart(host.manager.context, txn, f"{excluded} is not included, because of its profile quiet")
    assert canonical_key(UID) not in host.manager.context.memory.apart
    start(host, container(later), later)
    assert host.manager.get(UID).first.baseline_reasons == (
        f"{excluded} is not included: it runs in the control group of the pod, but not in the group",
    )


def test_pod_that_runs_is_late_for_its_container_after_too_many_other_pods(
    host: Host, container: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is in its record."""
    monkeypatch.setattr(apart, "_MAX_PODS", 2)
    why = "x is not included, because of its profile quiet"
    start(host, container("1" * 64), "1" * 64)
    for pod in (UID, *(f"{number}" * 32 for number in range(3))):
        with host.manager.context.store.transaction(canonical_key(pod)) as txn:
            apart.mark_apart(host.manager.context, txn, why)
    assert host.manager.get(UID).first.baseline_reasons == (why,)
    assert why in host.restart().get(UID).first.baseline_reasons
