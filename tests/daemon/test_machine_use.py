# SPDX-License-Identifier: Apache-2.0
"""Machine, of the daemon as a process: the pools begin soon after its first start, and continue after a kill."""

from __future__ import annotations

from typing import Any

from tests.daemon.conftest import Machine


def pools(machine: Machine) -> dict[str, Any]:
    reply = machine.call("Machine")
    assert {use["pool"] for use in reply["pools"]} == {"tracked", "foreign", "untracked"}
    return reply


def test_pools_continue_after_a_kill(machine: Machine) -> None:
    machine.start()
    first = pools(machine)
    assert {use["quality"] for use in first["pools"]} == {"exact"}
    machine.call("Create", key="k", claim="me")
    machine.call("Release", key="k", claim="me")
    assert pools(machine)["since"] == first["since"]
    machine.kill()
    machine.start()
    after = pools(machine)
    assert after["since"] == first["since"]
    for use in after["pools"]:
        is_gauge = use["event"] == "llc_occupancy"
        assert use["quality"] == ("exact" if use["pool"] == "tracked" or is_gauge else "estimated")
