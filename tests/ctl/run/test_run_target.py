# SPDX-License-Identifier: Apache-2.0
"""The use of a workload between two readings, and processes and control groups that are all of a workload."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from resctrlctl.base.errors import CommandError
from resctrlctl.run.target import Target, difference, opened, together
from resctrlmond.api import types
from resctrlmond.api.types import Member
from resctrlmond.workloads.model.states import Quality, State
from tests.ctl.fake_manager import NOW

PROCESS = Member("pid-12", "process", "cli", pid=12, start_time=345)
CONTAINER = Member("web", "container", "oci", pid=12, start_time=345, cgroup="/sys/fs/cgroup/web.scope")
SANDBOX = Member("pause", "sandbox", "nri")


def workload(*members: Member, **fields: Any) -> types.Workload:
    known: dict[str, Any] = {"generation": 1, "baseline": Quality.EXACT, "claims": (), "attributes": {}}
    known |= {"key": "web", "class_": "", "state": State.ACTIVE, "created_at": NOW, "members": members}
    return types.Workload(**(known | fields))


def reading(
    value: str | None, quality: Quality = Quality.EXACT, reason: str | None = None, of: types.Workload | None = None
) -> types.ReadReply:
    total = types.Total(event="core_energy", unit="joules", value=value, quality=quality, reason=reason)
    return types.ReadReply(workload=of or workload(PROCESS), readings=[], totals=[total])


def used(begin: types.ReadReply, end: types.ReadReply) -> tuple[str | None, str, str | None]:
    (total,) = difference(begin, end)
    return total.value, total.quality, total.reason


def test_difference_of_two_exact_totals_is_exact_with_all_digits() -> None:
    first, last = "18446744073709551615.000000001", "18446744073709551616.123456789"
    assert used(reading(first), reading(last)) == ("1.123456788", "exact", None)


@pytest.mark.parametrize("swapped", [False, True])
def test_difference_has_the_quality_of_the_worse_reading(swapped: bool) -> None:
    qualities = [Quality.ESTIMATED, Quality.EXACT]
    begin, end = reversed(qualities) if swapped else qualities
    reasons = {Quality.ESTIMATED: "it was reset", Quality.EXACT: None}
    found = used(reading("1", begin, reasons[begin]), reading("3", end, reasons[end]))
    assert found == ("2", "estimated", "it was reset")


def test_difference_without_a_number_is_unknown() -> None:
    assert used(reading(None, Quality.UNKNOWN, "no number"), reading("3")) == (None, "unknown", "no number")
    assert used(reading("3"), reading(None, Quality.UNKNOWN, "no number")) == (None, "unknown", "no number")
    without = types.ReadReply(workload=workload(PROCESS), readings=[], totals=[])
    assert used(without, reading("3")) == (None, "unknown", "it was not counted when the command began")
    assert used(reading("3"), reading("2"))[1] == "unknown"


@pytest.mark.parametrize("fields", [{"generation": 2}, {"created_at": "2026-11-21T12:00:00Z"}])
def test_workload_that_began_again_has_no_difference(fields: dict[str, Any]) -> None:
    with pytest.raises(CommandError, match="ended and began again"):
        difference(reading("1"), reading("2", of=workload(PROCESS, **fields)))


def test_use_of_members_that_joined_meanwhile_is_not_that_of_the_target() -> None:
    joined = Member("pid-13", "process", "cli", pid=13, start_time=400, ended_at=NOW)
    value, quality, reason = used(reading("1"), reading("2", of=workload(PROCESS, joined)))
    assert (value, quality) == ("1", "estimated")
    assert reason == "other members joined the workload, and their use is counted"
    # A member without tasks uses nothing.
    assert used(reading("1"), reading("2", of=workload(PROCESS, SANDBOX)))[1] == "exact"


@pytest.mark.parametrize(
    ("members", "is_process", "is_cgroup"),
    [
        ([PROCESS], True, False),
        ([CONTAINER], False, True),
        ([CONTAINER, SANDBOX], False, True),
        ([PROCESS, CONTAINER], False, False),
        ([Member("pid-12", "process", "cli", pid=12, start_time=1)], False, False),
        # Processes that an ended member has left may run on.
        ([PROCESS, Member("old", "process", "cli", pid=9, start_time=1, ended_at=NOW)], False, False),
        ([], False, False),
    ],
)
def test_target_is_all_of_a_workload_only_without_other_members(
    members: list[Member], is_process: bool, is_cgroup: bool
) -> None:
    process, cgroup = Target(pid=12, start_time=345), Target(cgroup=CONTAINER.cgroup)
    assert (process.is_all_of(workload(*members)), cgroup.is_all_of(workload(*members))) == (is_process, is_cgroup)


def test_event_that_only_nested_workloads_counted_is_a_lower_bound() -> None:
    def total(name: str, value: str) -> types.Total:
        return types.Total(event=name, unit="J", value=value, quality=Quality.EXACT)

    both, other = together([total("a", "1")], [total("a", "2"), total("b", "3")])
    assert (both.value, both.quality) == ("3", Quality.EXACT)
    assert (other.value, other.quality) == ("3", Quality.ESTIMATED)
    assert other.reason == "only nested workloads counted it"


def test_message_of_systemctl_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    program.write_text("#!/bin/sh\nprintf 'No bus.\\nSee the log.\\n' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    args = argparse.Namespace(pid=None, cgroup=None, unit="web.service")
    with pytest.raises(CommandError) as raised, opened(args):
        pass
    assert str(raised.value).startswith(
        "cannot measure unit 'web.service': systemctl: \"No bus. See the log\". Use --cgroup"
    )
