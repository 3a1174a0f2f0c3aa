# SPDX-License-Identifier: Apache-2.0
"""The measured host: its daemon starts and stops, so that ``make bench`` ends."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.client import Client
from tests.bench.host import Host
from tests.bench.rows import MANAGER, bursts, commands


@pytest.fixture
def host() -> Iterator[Host]:
    # Not tmp_path: the path of a socket has at most 107 bytes (unix(7)).
    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        host = Host(Path(folder))
        with host.running():
            yield host


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_measured_daemon_stops_and_another_daemon_starts(host: Host) -> None:
    pids = []
    for _ in range(2):
        with host.daemon() as (pid, _took), Client(host.varlink) as client:
            assert client.call(f"{MANAGER}Status")["groups"] == 0
            pids.append(pid)
        assert not is_there(pid)
    assert pids[0] != pids[1]


def test_ready_of_an_earlier_daemon_is_not_that_of_the_next_one(host: Host) -> None:
    """A killed daemon left READY=1 in the socket, and its successor was called before it listened."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.sendto(b"READY=1", str(host.folder / "notify"))
    with host.daemon(), Client(host.varlink) as client:
        assert client.call(f"{MANAGER}Status")["groups"] == 0


def test_a_measurement_that_fails_ends_the_daemon_too(host: Host) -> None:
    pids = []
    with pytest.raises(ZeroDivisionError), host.daemon() as (pid, _):
        pids.append(pid)
        raise ZeroDivisionError
    assert not is_there(pids[0])


def test_verbs_of_resctrlctl_are_measured(host: Host) -> None:
    with host.daemon():
        rows = list(commands(host, 1))
    assert [row.what for row in rows] == ["resctrlctl --version", "resctrlctl list", "resctrlctl run -- true"]


def test_hooks_at_once_are_measured(host: Host) -> None:
    with host.daemon(), Client(host.varlink) as client:
        lost, _ = bursts(host, client, 2, count=8)
        assert lost.ours == [0, 0]
        ended = client.call(f"{MANAGER}List")["workloads"]
    assert [(group["state"], group["baseline"], group["generation"]) for group in ended] == [
        ("completed", "exact", 2)
    ] * 8
