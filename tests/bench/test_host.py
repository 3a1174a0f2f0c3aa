# SPDX-License-Identifier: Apache-2.0
"""The measured host: its daemon starts and stops, so that ``make bench`` ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.api.varlink.client import Client
from tests.bench.host import Host
from tests.bench.rows import MANAGER


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    with host.running():
        yield host


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_measured_daemon_stops_and_another_one_starts(host: Host) -> None:
    pids = []
    for _ in range(2):
        with host.daemon() as (pid, _took), Client(host.varlink) as client:
            assert client.call(f"{MANAGER}Status")["groups"] == 0
            pids.append(pid)
        assert not is_there(pid)
    assert pids[0] != pids[1]


def test_a_measurement_that_fails_ends_the_daemon_too(host: Host) -> None:
    pids = []
    with pytest.raises(ZeroDivisionError), host.daemon() as (pid, _):
        pids.append(pid)
        raise ZeroDivisionError
    assert not is_there(pids[0])
