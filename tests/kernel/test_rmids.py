# SPDX-License-Identifier: Apache-2.0
"""Out of RMIDs on the real kernel: an immediate reply with the kernel's reason, and adoption when one is free."""

from __future__ import annotations

import pytest

from .host import TREE, Host
from .machine import Guest

THRESHOLD = f"{TREE}/info/L3_MON/max_threshold_occupancy"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host with the daemon and 64 RMIDs, 62 of which foreign groups use."""
    host = Host(installed_guest)
    host.start()
    host.run(f"cd {TREE}/mon_groups && for i in $(seq 62); do mkdir taken$i; done")
    host.call("Create", key="last", claim="me")
    return host


def test_reply_is_pending_at_once_if_all_rmids_are_in_use(host: Host) -> None:
    pid = host.process("sleep 300")
    # No RMID becomes free before the reply.
    workload = host.call("Assign", key="waits", pid=pid, claim="me")["workload"]
    assert workload["state"] == "pending"
    assert "ENOSPC" in workload["reason"]
    assert "Out of RMIDs" in workload["reason"]
    assert not workload.get("inLimbo")
    status = host.call("Status")
    assert (status["rmids"], status["rmidsUsed"], status["pending"]) == (64, 64, 1)
    refusal = host.refused("Create", key="now", claim="me", allowPending=False)
    assert "RmidsExhausted" in refusal
    assert '"inLimbo":false' in refusal.replace(" ", "") or "inLimbo" in refusal
    assert host.state("now") == "", "now or never leaves nothing behind"

    host.run(f"rmdir {TREE}/mon_groups/taken1")
    host.until(lambda: host.state("waits") == "active", "the pending workload to be adopted")
    assert host.membership(pid) == ("/", "waits")
    workload = host.call("Get", key="waits")["workload"]
    assert workload["baseline"] == "late"
    assert workload["members"][0]["late"] is True
    host.run(f"kill {pid}")
    host.call("Release", key="waits", claim="me")


def test_rmids_in_limbo_have_their_own_reason(host: Host) -> None:
    # With a threshold of 0, a freed RMID is never clean: an endless limbo.
    host.run(f"until mkdir -p {TREE}/mon_groups/taken1 2>/dev/null; do sleep 0.2; done", timeout=100)
    host.run(f"echo 0 >{THRESHOLD} && rmdir {TREE}/mon_groups/taken2")
    try:
        workload = host.call("Create", key="limbo", claim="me")["workload"]
        assert workload["state"] == "pending"
        assert workload["inLimbo"] is True
        assert "EBUSY" in workload["reason"]
        assert "Out of RMIDs" in workload["reason"]
        refusal = host.refused("Create", key="never", claim="me", allowPending=False)
        assert "RmidsExhausted" in refusal
    finally:
        host.run(f"echo 29360191 >{THRESHOLD}")
    host.until(lambda: host.state("limbo") == "idle", "the RMID to come out of limbo")
    host.call("Release", key="limbo", claim="me")


def test_a_pending_workload_that_is_released_never_gets_a_group(host: Host) -> None:
    # The kernel refuses with EBUSY while an RMID is in limbo, which becomes free soon, and with ENOSPC at the end.
    fill = f"mkdir {TREE}/mon_groups/fill$i 2>&1 | grep 'No space left'"
    host.run(f"i=0; until {fill}; do i=$((i+1)); sleep 0.1; done", timeout=100)
    assert host.call("Create", key="gives-up", claim="me")["workload"]["state"] == "pending"
    assert host.call("Release", key="gives-up", claim="me")["completed"]
    host.run(f"rmdir {TREE}/mon_groups/taken3 && sleep 3")
    assert "gives-up" not in host.groups()
