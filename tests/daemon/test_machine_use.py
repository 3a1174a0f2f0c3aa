# SPDX-License-Identifier: Apache-2.0
"""Machine, of the daemon as a process: the pools begin soon after its start, and again after a kill."""

from __future__ import annotations

from typing import Any

from tests.daemon.conftest import Machine


def pools(machine: Machine) -> dict[str, Any]:
    reply = machine.call("Machine")
    assert {use["pool"] for use in reply["pools"]} == {"tracked", "foreign", "untracked"}
    assert {use["quality"] for use in reply["pools"]} == {"exact"}
    return reply


def test_pools_begin_again_with_each_daemon(machine: Machine) -> None:
    machine.start()
    first = pools(machine)
    machine.call("Create", key="k", claim="me")
    machine.call("Release", key="k", claim="me")
    assert pools(machine)["since"] == first["since"]
    machine.kill()
    machine.start()
    assert pools(machine)["since"] > first["since"]
