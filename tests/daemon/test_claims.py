# SPDX-License-Identifier: Apache-2.0
"""Claims of clients: the names that are the daemon's own, the rules by which claims end, and Release."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from resctrlmond.api.varlink.client import VarlinkError
from tests.daemon.conftest import Machine

Start = Callable[[], "subprocess.Popen[bytes]"]
ERRORS = "org.resctrlmon.Manager"


@pytest.fixture
def process() -> Iterator[Start]:
    made: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.wait()


@pytest.mark.parametrize("owner", ["oci", "recovered"])
def test_a_client_cannot_claim_under_a_name_of_the_daemons_own(machine: Machine, process: Start, owner: str) -> None:
    machine.start()
    machine.call("Create", key="other", claim="me")
    calls = {
        "Create": {"key": "k"},
        "Assign": {"key": "k", "pid": process().pid},
        "AddMember": {"key": "other", "member": "m"},
        "Reconcile": {"keys": []},
        "ReportPods": {},
    }
    for verb, parameters in calls.items():
        with pytest.raises(VarlinkError, match="reserved for resctrlmond") as refused:
            machine.call(verb, claim=owner, **parameters)
        assert refused.value.name == f"{ERRORS}.InvalidRequest", verb
    assert machine.groups() == ["other"]


def test_an_empty_name_of_an_owner_is_refused(machine: Machine, process: Start) -> None:
    machine.start()
    machine.call("Create", key="other", claim="me")
    calls = {
        "Create": {"key": "k"},
        "Assign": {"key": "k", "pid": process().pid},
        "AddMember": {"key": "other", "member": "m"},
        "Release": {"key": "other"},
        "Reconcile": {"keys": []},
        "ReportPods": {},
    }
    for verb, parameters in calls.items():
        with pytest.raises(VarlinkError, match="the claim has no name") as refused:
            machine.call(verb, claim="", **parameters)
        assert refused.value.name == f"{ERRORS}.InvalidRequest", verb
    assert machine.groups() == ["other"]


@pytest.mark.parametrize("owner", ["run", "nri", "cli", "engine"])
def test_an_owners_name_alone_ends_no_claim(machine: Machine, process: Start, owner: str) -> None:
    machine.start()
    child = process()
    machine.call("Assign", key="k", pid=child.pid, claim=owner)
    child.kill()
    child.wait()
    assert machine.reaches("k", "idle")
    time.sleep(3)  # three ticks
    assert machine.group("k")["claims"][0]["endRule"] == "release"
    assert machine.group("k")["state"] == "idle"


def test_a_claim_of_any_name_ends_by_the_rule_that_its_request_names(machine: Machine, process: Start) -> None:
    machine.start()
    child = process()
    machine.call("Assign", key="k", pid=child.pid, claim="engine", endRule="container")
    child.kill()
    child.wait()
    assert machine.reaches("k", "completed")
    with pytest.raises(VarlinkError, match="reserved for resctrlmond"):
        machine.call("Create", key="l", claim="engine", endRule="tasks")


def test_releasing_a_claim_that_was_never_held_is_an_error(machine: Machine) -> None:
    machine.start()
    machine.call("Create", key="k", claim="me")
    with pytest.raises(VarlinkError, match="claimed by me") as refused:
        machine.call("Release", key="k", claim="other")
    assert refused.value.name == f"{ERRORS}.NoSuchClaim"
    assert machine.group("k")["state"] == "idle"
    assert machine.call("Release", key="k", claim="me")["completed"]
    # Of a workload that is over, anybody may ask for the totals once more.
    assert machine.call("Release", key="k", claim="other")["completed"]
