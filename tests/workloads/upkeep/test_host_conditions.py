# SPDX-License-Identifier: Apache-2.0
"""Conditions of the host that take away what can be shown are stated at the start, and while they last."""

from __future__ import annotations

import resource

import pytest

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.workloads.upkeep import host_conditions
from tests.workloads.conftest import Host


def test_host_without_such_conditions_has_no_problem(host: Host) -> None:
    assert host_conditions.found(host.tree) == []
    assert host.manager.problems == []


def test_each_condition_is_stated_once_with_its_remedy_while_it_lasts(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(processes, "is_hidden", lambda _tid: True)
        patch.setattr(cgroups, "has_version_2", lambda: False)
        patch.setattr(resource, "getrlimit", lambda _limit: (64, 256))
        manager = host.restart()
        hidden, version, limit = manager.problems
        assert hidden.startswith("/proc hides processes from resctrlmond (hidepid= in proc(5))")
        assert "mount /proc again with hidepid=0" in hidden
        assert version.startswith("no control groups of version 2 (cgroup2) are mounted")
        assert "systemd.unified_cgroup_hierarchy=1" in version
        assert limit.startswith("resctrlmond may open 256 files, and about 4200 are needed to use all 2000 RMIDs")
        assert "LimitNOFILE=4200" in limit
        manager.tick()
        assert manager.problems == [hidden, version, limit]
    manager.tick()
    assert manager.problems == []
