# SPDX-License-Identifier: Apache-2.0
"""Claims of clients: reserved names, the rules by which claims end, and Release."""

from __future__ import annotations

import time
from typing import Any

import pytest

from resctrlmond.client import VarlinkError
from tests.daemon.conftest import MANAGER, Machine, StartProcess, end


@pytest.mark.parametrize("owner", ["oci", "recovered"])
def test_client_cannot_use_the_name_of_a_reserved_claim(machine: Machine, process: StartProcess, owner: str) -> None:
    machine.start()
    machine.call("Create", key="other", claim="me")
    calls: dict[str, dict[str, Any]] = {
        "Create": {"key": "k"},
        "Assign": {"key": "k", "pid": process().pid},
        "AddMember": {"key": "other", "member": "m"},
        "Reconcile": {"keys": []},
        "ReportPods": {},
    }
    for verb, parameters in calls.items():
        with pytest.raises(VarlinkError, match="reserved for resctrlmond") as refused:
            machine.call(verb, claim=owner, **parameters)
        assert refused.value.name == f"{MANAGER}.InvalidRequest", verb
    assert machine.groups() == ["other"]


def test_claim_with_an_empty_name_is_refused(machine: Machine, process: StartProcess) -> None:
    machine.start()
    machine.call("Create", key="other", claim="me")
    calls: dict[str, dict[str, Any]] = {
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
        assert refused.value.name == f"{MANAGER}.InvalidRequest", verb
    assert machine.groups() == ["other"]


@pytest.mark.parametrize("owner", ["run", "nri", "cli", "engine"])
def test_claim_without_an_end_rule_ends_only_with_release(
    machine: Machine, process: StartProcess, owner: str
) -> None:
    machine.start()
    child = process()
    machine.call("Assign", key="k", pid=child.pid, claim=owner)
    end(child)
    assert machine.reaches("k", "idle")
    time.sleep(3)  # three ticks
    assert machine.group("k")["claims"][0]["endRule"] == "release"
    assert machine.group("k")["state"] == "idle"


def test_claim_of_any_name_ends_by_the_rule_of_its_request(machine: Machine, process: StartProcess) -> None:
    machine.start()
    child = process()
    machine.call("Assign", key="k", pid=child.pid, claim="engine", endRule="container")
    end(child)
    assert machine.reaches("k", "completed")
    with pytest.raises(VarlinkError, match="reserved for resctrlmond"):
        machine.call("Create", key="l", claim="engine", endRule="tasks")


def test_release_of_an_unknown_claim_is_an_error(machine: Machine) -> None:
    machine.start()
    machine.call("Create", key="k", claim="me")
    with pytest.raises(VarlinkError, match="claimed by me") as refused:
        machine.call("Release", key="k", claim="other")
    assert refused.value.name == f"{MANAGER}.NoSuchClaim"
    assert machine.group("k")["state"] == "idle"
    assert machine.call("Release", key="k", claim="me")["completed"]
    # After the end of a workload, Release returns its totals to every owner.
    assert machine.call("Release", key="k", claim="other")["completed"]
