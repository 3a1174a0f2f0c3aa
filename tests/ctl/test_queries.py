# SPDX-License-Identifier: Apache-2.0
"""The output of list, show and status, in each form, with the in-memory manager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from resctrlctl.layout import Sheet
from resctrlctl.queries import runtimes_without_hook
from resctrlctl.render import render_status
from resctrlmond.api import types
from resctrlmond.api.types import Claim, Member
from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.workloads.accounting import Quality
from resctrlmond.workloads.model import EndRule, State
from tests.ctl.conftest import Ctl
from tests.ctl.fake_manager import LATER, NOW, READINGS, TOTALS, FakeManager, error

POD = "6ca11e00-5ad0-4c0b-9f0e-0123456789ab"


def populate(manager: FakeManager) -> None:
    """Add a pod, a pending command and a foreign group."""
    pod = {"pod.namespace": "shop", "pod.name": "cart-0", "container.name": "app"}
    members = (
        Member("c1", "container", "oci", pid=4711, started_at=NOW, late=True, tasks_outside=2),
        Member("c0", "container", "oci", pid=4710, started_at=NOW, ended_at=LATER, reason="ended"),
    )
    claims = (Claim("oci", NOW, EndRule.CONTAINER),)
    manager.add(
        POD, class_="gold", path="/sys/fs/resctrl/gold/mon_groups/x", attributes=pod, members=members, claims=claims
    )
    manager.add(
        "batch", state=State.PENDING, reason="no RMID", path=None, attributes={"command": "make -j8 'all of it'"}
    )
    foreign = types.Foreign(class_="", name="pqos-7", path="/sys/fs/resctrl/mon_groups/pqos-7")
    manager.foreign.append(foreign)


def test_list_prints_a_table(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("list")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "KEY                                   CLASS  STATE    MEMBERS  SINCE                WORKLOAD\n"
        "6ca11e00-5ad0-4c0b-9f0e-0123456789ab  gold   active         1  2026-11-21 11:13:22  shop/cart-0 app\n"
        "batch                                 /      pending        0  2026-11-21 11:13:22  make -j8 'all of it'\n"
        "pqos-7                                /      foreign        -  -                    -\n"
        "\n"
        "2 workloads, 1 foreign group.\n"
    )


def test_list_cuts_lines_to_columns_unless_full(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("list", COLUMNS="72")
    assert max(map(len, done.stdout.splitlines())) <= 72
    assert "…" in done.stdout
    assert "…" not in ctl("list", "--full", COLUMNS="72").stdout


def test_list_without_legend_and_quiet(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    assert len(ctl("list", "--no-legend").stdout.splitlines()) == 3
    assert ctl("-q", "list").stdout == f"{POD}\nbatch\n"


def test_empty_list_has_only_a_footer(ctl: Ctl) -> None:
    assert ctl("list").stdout == "0 workloads, 0 foreign groups.\n"
    assert ctl("list", "--no-legend").stdout == ""


def test_list_as_json_is_the_reply(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    short = ctl("list", "--json").stdout
    assert short.count("\n") == 1
    reply = json.loads(short)
    assert [workload["key"] for workload in reply["workloads"]] == [POD, "batch"]
    assert reply["foreign"] == [{"class": "", "name": "pqos-7", "path": "/sys/fs/resctrl/mon_groups/pqos-7"}]
    assert ctl("-j", "list").stdout == short
    pretty = ctl("list", "--json=pretty").stdout
    assert pretty.count("\n") > 20
    assert json.loads(pretty) == reply
    assert ctl("list", "--json=off").stdout == ctl("list").stdout


def test_show_prints_the_workload_with_counters_and_totals(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("show", POD)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"{POD}\n"
        "       State: active\n"
        "    Workload: shop/cart-0 app\n"
        "       Class: gold\n"
        "        Path: /sys/fs/resctrl/gold/mon_groups/x\n"
        "       Since: 2026-11-21 11:13:22\n"
        "         Run: 1\n"
        "    Baseline: exact\n"
        "      Claims: oci since 2026-11-21 11:13:22\n"
        "     Members: c1: container of oci, process 4711, was already running when it was put into the group, "
        "2 tasks stayed outside\n"
        "              c0: container of oci, process 4710, ended 2026-11-21 11:20:00\n"
        "  Attributes: container.name=app\n"
        "              pod.name=cart-0\n"
        "              pod.namespace=shop\n"
        "\n"
        "DOMAIN           EVENT                  VALUE  KIND\n"
        "mon_L3_00        llc_occupancy       1.50 MiB  gauge\n"
        "mon_L3_00        mbm_total_bytes  Unavailable  cumulative\n"
        "mon_PERF_PKG_00  core_energy        54.446 MJ  cumulative\n"
        "\n"
        "EVENT                  TOTAL  QUALITY  REASON\n"
        "core_energy      12.345678 J  exact    -\n"
        "mbm_total_bytes      unknown  unknown  mon_L3_00 read 'Unavailable' at the end\n"
    )


def test_show_as_json_has_exact_values(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("a")
    manager.add("b")
    lines = ctl("show", "--json", "a", "b").stdout.splitlines()
    assert [json.loads(line)["workload"]["key"] for line in lines] == ["a", "b"]
    assert json.loads(lines[0])["readings"][2]["value"] == READINGS[2].value == "54446119.644974"
    assert json.loads(lines[0])["totals"][0]["value"] == TOTALS[0].value


def test_show_continues_after_an_unknown_key(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("b")
    done = ctl("show", "a", "b")
    assert done.returncode == 4
    assert done.stderr == "resctrlctl: cannot show 'a': there is no workload 'a'\n"
    assert done.stdout.startswith("b\n")


def test_show_marks_a_foreign_group_and_prints_no_totals(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("show", "pqos-7")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "pqos-7\n"
        "  State: foreign: another program created it; resctrlmond only reads it\n"
        "  Class: /\n"
        "   Path: /sys/fs/resctrl/mon_groups/pqos-7\n"
        "\n"
        "DOMAIN"
    )
    assert "QUALITY" not in done.stdout
    reply = json.loads(ctl("show", "-j", "/sys/fs/resctrl/mon_groups/pqos-7").stdout)
    assert reply["foreign"]["name"] == "pqos-7"
    assert len(reply["readings"]) == len(READINGS)


def test_show_prefers_a_workload_to_a_foreign_group_with_its_name(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    manager.add("pqos-7")
    assert "workload" in json.loads(ctl("show", "-j", "pqos-7").stdout)


def test_times_in_reasons_are_local(manager: FakeManager, ctl: Ctl) -> None:
    reason = "its group was lost at 2026-11-21T11:13:22.500000Z (removed)"
    manager.add("web", loss=reason, reason=reason)
    shown = ctl("show", "web", TZ="America/New_York").stdout
    assert shown.count("its group was lost at 2026-11-21 06:13:22 (removed)") == 2
    assert json.loads(ctl("show", "-j", "web").stdout)["workload"]["loss"] == reason
    manager.refuse["Read"] = error("NotMounted", "no answer since 2026-11-21T11:13:22Z")
    assert "no answer since 2026-11-21 06:13:22" in ctl("show", "web", TZ="America/New_York").stderr


def test_status_prints_the_state_of_the_machine(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("status")
    assert done.returncode == 0
    assert done.stdout == (
        "resctrlmond 0.1.0\n"
        "      Mount: /sys/fs/resctrl\n"
        "      RMIDs: 5 of 64 used: 2 by classes, 2 by groups, 1 by foreign groups\n"
        "     Groups: 2 groups, 1 pending, 1 foreign\n"
        "    Classes: / gold\n"
        "  Resources: L3_MON: 64 RMIDs; llc_occupancy\n"
        "     Energy: core energy is not counted by this processor or kernel; see CORE ENERGY in resctrlmond(7)\n"
        "   Problems: nri-resctrl-mon runs here too\n"
    )
    assert json.loads(ctl("status", "-j").stdout)["rmids"] == 64


def status_of(*runtimes: str, **fields: Any) -> dict[str, tuple[str, ...]]:
    """Return the labels and values of ``status`` for a machine without groups, with these runtimes and fields."""
    reply = types.StatusReply(
        version="1",
        mount="/sys/fs/resctrl",
        mounted=True,
        rmids=64,
        rmids_used=1,
        pending=0,
        groups=0,
        foreign=[],
        classes=[""],
        capacity=[],
        problems=[],
    )
    (sheet,) = render_status(replace(reply, **fields), runtimes)
    assert isinstance(sheet, Sheet)
    return dict(sheet.fields)


def test_status_shows_the_limits_of_bandwidth_counters() -> None:
    counters = (types.Counters(domain="mon_L3_00", counters=32, available=0),)

    def shown(mode: Mode, can_assign: bool) -> dict[str, tuple[str, ...]]:
        offered = types.Bandwidth(mode=mode, can_assign=can_assign, counters=counters if can_assign else ())
        return status_of(bandwidth=offered)

    assert shown(Mode.ASSIGNED, True)["Bandwidth"] == ("mon_L3_00: 0 of 32 counters available",)
    assert "write mbm_event" in shown(Mode.REALLOCATED, True)["Bandwidth"][0]
    assert shown(Mode.REALLOCATED, False)["Bandwidth"] == (
        "reallocated by the processor: no total of bandwidth is exact",
    )
    assert "Bandwidth" not in shown(Mode.DEDICATED, False)


def test_runtimes_without_hook_are_detected_by_their_files(tmp_path: Path) -> None:
    assert runtimes_without_hook(str(tmp_path)) == []
    (tmp_path / "run/user/1000/libpod").mkdir(parents=True)
    assert runtimes_without_hook(str(tmp_path)) == ["rootless Podman"]
    (tmp_path / "run/docker.sock").touch()
    assert runtimes_without_hook(str(tmp_path)) == ["Docker", "rootless Podman"]


def test_status_refers_to_the_manual_page_for_containers_without_a_hook() -> None:
    energy = types.Capacity(resource="PERF_PKG_MON", rmids=64, events=("core_energy",))
    shown = status_of("Docker", capacity=[energy])
    assert shown["No hook"] == (
        "Docker: assign its containers by control group; see DOCKER AND ROOTLESS PODMAN in resctrlctl(1)",
    )
    assert "Energy" not in shown


def test_hostile_names_cannot_control_the_terminal(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("web", attributes={"pod.name": "\x1b]0;owned\x07", "command": "a\nb"}, reason="\x1b[2J")
    for arguments in (("list",), ("show", "web")):
        shown = ctl(*arguments).stdout
        assert all(character.isprintable() or character == "\n" for character in shown)
        assert "\\x1b" in shown


def test_show_prints_the_caveats_of_an_event(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k", baseline=Quality.ESTIMATED, caveats={"mbm_total_bytes": "no counter was free"})
    assert "  Baseline: estimated\n   Caveats: mbm_total_bytes: no counter was free\n" in ctl("show", "k").stdout
