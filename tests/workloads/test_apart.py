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
