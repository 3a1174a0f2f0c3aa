# SPDX-License-Identifier: Apache-2.0
"""The output of list, show and status, in each form, with the in-memory manager."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from resctrlctl.host.status import runtimes_without_hook
from resctrlctl.screen.layout import Sheet
from resctrlctl.workloads.reasons import reasons
from resctrlctl.workloads.render import render_status
from resctrlmond.api import types
from resctrlmond.api.types import Claim, Member
from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.kinds import Kind
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import EndRule, State
from tests.ctl.conftest import Ctl, command
from tests.ctl.fake_manager import LATER, NOW, PROOFS, READINGS, TOTALS, FakeManager, error

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


def test_list_prints_what_each_workload_uses(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("list")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "WORKLOAD     STATE      AGE      LLC  TRAFFIC  BANDWIDTH  ENERGY   POWER  QUALITY\n"
        "shop/cart-0  active   6m37s  1.50MiB        -          -   12.3J  31.1mW  unknown\n"
        "batch        pending      -        -        -          -       -       -  -\n"
        "\n"
        "2 workloads.\n"
    )
    assert not manager.called("List")


def test_list_of_all_has_ended_workloads_and_foreign_groups(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    manager.add("old", state=State.COMPLETED, completed_at=LATER)
    assert "old" not in ctl("list").stdout
    done = ctl("list", "--all", "--columns", "key,state")
    assert done.stdout == (
        "KEY                                   STATE\n"
        "6ca11e00-5ad0-4c0b-9f0e-0123456789ab  active\n"
        "batch                                 pending\n"
        "old                                   completed\n"
        "\n"
        "3 workloads.\n"
        "\n"
        "FOREIGN GROUP  CLASS  PATH\n"
        "pqos-7         /      /sys/fs/resctrl/mon_groups/pqos-7\n"
        "\n"
        "1 foreign group.\n"
    )


def test_list_leaves_out_columns_that_do_not_fit_and_cuts_none(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    for columns in range(20, 90, 7):
        done = ctl("list", COLUMNS=str(columns))
        assert "…" not in done.stdout
        assert "shop/cart-0" in done.stdout and "QUALITY" in done.stdout
        if columns > 50:
            table = done.stdout.split("\n\n")[0]
            assert max(map(len, table.splitlines())) <= columns
    narrow = ctl("list", COLUMNS="60").stdout
    assert "BANDWIDTH" not in narrow
    assert "Too wide for this terminal: bandwidth, llc, traffic (--full shows them)." in " ".join(narrow.split())
    assert "BANDWIDTH" in ctl("list", "--full", COLUMNS="60").stdout


def test_list_without_legend_and_quiet(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    assert len(ctl("list", "--no-legend").stdout.splitlines()) == 2
    assert ctl("-q", "list").stdout == f"{POD}\nbatch\n"
    assert ctl("-q", "list", "--filter", "state=pending").stdout == "batch\n"


def test_empty_list_names_the_option_for_more(ctl: Ctl) -> None:
    assert ctl("list").stdout == "No workload. 'resctrlctl list --all' also lists those that have ended.\n"
    assert ctl("list", "--no-legend").stdout == ""


@pytest.mark.parametrize("words", [("list",), ("list", "--units")], ids=" ".join)
def test_empty_list_states_that_a_filter_matches_nothing(ctl: Ctl, words: tuple[str, ...]) -> None:
    filtered = (*words, "--filter", "state=actve")
    hint = " 'resctrlctl list --all' also lists those that have ended."
    assert ctl(*filtered).stdout == f"No workload matches the filter.{hint}\n"
    assert ctl(*filtered, "--all").stdout == "No workload matches the filter.\n"
    assert ctl(*words, "--all").stdout == "No workload.\n"


def test_reason_of_two_groups_names_each_event_once() -> None:
    twice = "tasks stayed outside; tasks stayed outside"
    [sheet] = reasons([("core_energy", twice), ("mbm_total_bytes", twice)])
    assert sheet.fields == (("all", ("tasks stayed outside",)),)


def test_list_as_json_is_the_reply(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    short = ctl("list", "--all", "--json").stdout
    assert short.count("\n") == 1
    reply = json.loads(short)
    assert [usage["workload"]["key"] for usage in reply["usages"]] == [POD, "batch"]
    assert reply["usages"][0]["totals"][0]["value"] == TOTALS[0].value
    assert reply["foreign"] == [{"class": "", "name": "pqos-7", "path": "/sys/fs/resctrl/mon_groups/pqos-7"}]
    assert ctl("-j", "list", "-a").stdout == short
    pretty = ctl("list", "-a", "--json=pretty").stdout
    assert pretty.count("\n") > 20
    assert json.loads(pretty) == reply
    assert ctl("list", "--json=off").stdout == ctl("list").stdout


def test_unknown_column_is_a_wrong_command_line(ctl: Ctl) -> None:
    for option in ("--columns", "--sort"):
        done = ctl("list", option, "colour")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("resctrlctl: there is no column 'colour'. The columns are: workload, key,")


@pytest.mark.parametrize("text", ["shop/cart-0", "app", "6ca11e00", "6CA11E00-5AD0"])
def test_workload_is_selected_by_its_name_or_the_beginning_of_its_id(
    manager: FakeManager, ctl: Ctl, text: str
) -> None:
    populate(manager)
    for words in (["show", text], ["move", text, "gold"], ["release", text]):
        done = ctl(*words)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(POD)
        if words[0] == "release":
            assert manager.called("Release")[-1].key == POD


def test_beginning_of_a_name_selects_a_workload_to_show_but_not_to_change(manager: FakeManager, ctl: Ctl) -> None:
    """A typing error must not end the wrong workload."""
    populate(manager)
    assert ctl("show", "bat").stdout.startswith("batch\n")
    for words in (["release", "bat"], ["move", "bat", "gold"]):
        done = ctl(*words)
        assert (done.returncode, done.stdout) == (4, "")
        assert "there is no workload 'bat'" in done.stderr


def test_ambiguous_selector_lists_the_workloads(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    manager.add(f"{POD[:-1]}c")
    done = ctl("release", POD[:8])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (f"resctrlctl: '6ca11e00' selects 2 workloads: {POD}, {POD[:-1]}c. Give more of the key\n")
    # The one that runs is meant.
    manager.add(f"{POD[:-1]}c", state=State.COMPLETED)
    assert ctl("release", POD[:8]).returncode == 0
    assert manager.called("Release")[-1].key == POD


def test_rate_is_that_of_two_readings(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("a")
    done = ctl("list", "--rate", "--columns", "key,energy,power")
    # The readings of the in-memory manager are equal, and have the same time.
    assert done.stdout.splitlines()[1].split() == ["a", "12.3J", "-"]
    assert len(manager.called("ReadAll")) == 2


def test_watch_repeats_until_it_is_interrupted(manager: FakeManager, environment: dict[str, str]) -> None:
    manager.add("a")
    words = command(manager.socket, "list", "--watch=0.5", "--columns", "key")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(7)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == -signal.SIGINT
    assert lines.count("a\n") == 2


def test_show_prints_what_a_workload_used_and_then_the_details(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("show", POD)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.sub(r" +[0-9.]+[mun]W  exact", "  AVERAGE  exact", done.stdout) == (
        f"{POD}\n"
        "     State: active\n"
        "  Workload: shop/cart-0 app\n"
        "     Since: 2026-11-21 11:13:22\n"
        "       Now: llc_occupancy 1.50 MiB\n"
        "\n"
        "EVENT                  TOTAL  PER SECOND  QUALITY\n"
        "core_energy      12.345678 J  AVERAGE  exact\n"
        "mbm_total_bytes      unknown           -  unknown\n"
        "\n"
        "Not exact\n"
        "  mbm_total_bytes: mon_L3_00 read 'Unavailable' at the end\n"
        "\n"
        "Details\n"
        "       Class: gold\n"
        "        Path: /sys/fs/resctrl/gold/mon_groups/x\n"
        "         Run: 1\n"
        "    Baseline: exact\n"
        "      Claims: oci since 2026-11-21 11:13:22\n"
        "     Members: c1: container of oci, process 4711, was already running when it was put into the group, "
        "2 tasks stayed outside\n"
        "              c0: container of oci, process 4710, ended 2026-11-21 11:20:00\n"
        "  Attributes: container.name=app\n"
        "              pod.name=cart-0\n"
        "              pod.namespace=shop\n"
    )


def test_show_prints_the_average_over_the_life_of_a_workload(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k", state=State.COMPLETED, completed_at="2026-11-21T11:13:32.500000Z")
    lines = ctl("show", "k").stdout.splitlines()
    assert "core_energy      12.345678 J       1.23W  exact" in lines
    assert "  Completed: 2026-11-21 11:13:32" in lines


def test_show_names_the_control_group_of_an_assign_without_a_kind(manager: FakeManager, ctl: Ctl) -> None:
    group = Member("batch", "process", "cli", cgroup="/sys/fs/cgroup/batch.slice", started_at=NOW)
    manager.add("k", members=(group, Member("pid-7", "process", "cli", pid=7, started_at=NOW)))
    shown = ctl("show", "k").stdout
    assert "batch: control group of cli, /sys/fs/cgroup/batch.slice\n" in shown
    assert "pid-7: process of cli, process 7\n" in shown


def test_show_prints_the_use_of_each_domain_if_there_are_several(manager: FakeManager, ctl: Ctl) -> None:
    workload = manager.add("k")
    total = types.Total(event="core_energy", unit="joules", value="30", quality=Quality.EXACT)

    def shown(*values: str) -> str:
        uses = [
            types.DomainUse(
                domain=f"mon_PERF_PKG_{number:02}",
                event="core_energy",
                kind=Kind.CUMULATIVE,
                unit="joules",
                value=value,
                quality=Quality.EXACT,
            )
            for number, value in enumerate(values)
        ]
        manager.replies["Read"] = types.ReadReply(workload=workload, readings=[], totals=[total], domains=uses)
        return ctl("show", "k").stdout

    lines = shown("10", "20").splitlines()
    assert [line.split()[:4] for line in lines if line.startswith("mon_PERF")] == [
        ["mon_PERF_PKG_00", "core_energy", "10", "J"],
        ["mon_PERF_PKG_01", "core_energy", "20", "J"],
    ]
    assert "DOMAIN" not in shown("30")


def test_averages_after_a_loss_are_over_all_runs(manager: FakeManager, ctl: Ctl) -> None:
    # The totals cover 90 s, of which the run after the loss has 10 s.
    claim = Claim("cli", "2026-11-21T11:12:02.500000Z", EndRule.RELEASE)
    lost = manager.add("k", loss="its group was lost", claims=(claim,), completed_at="2026-11-21T11:13:32.500000Z")
    total = types.Total(event="core_energy", unit="joules", value="90", quality=Quality.ESTIMATED)
    part = types.DomainUse(
        domain="mon_PERF_PKG_00",
        event="core_energy",
        kind=Kind.CUMULATIVE,
        unit="joules",
        value="20",
        quality=Quality.EXACT,
    )
    read = types.ReadReply(workload=lost, readings=[], read_ns=lost.completed_ns, totals=[total], domains=[part])
    manager.replies["Read"] = read
    shown = ctl("show", "k").stdout
    assert re.search(r"^core_energy +90 J +1W +estimated$", shown, re.MULTILINE)
    assert re.search(r"^mon_PERF_PKG_00 +core_energy +20 J +2W +exact$", shown, re.MULTILINE)
    assert "Since 2026-11-21 11:13:22 only.\n" in shown
    manager.replies["Read"] = replace(read, workload=replace(lost, claims=()), domains=None)
    assert "PER SECOND" not in ctl("show", "k").stdout


def test_show_prints_the_counters_of_each_domain_on_request(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k")
    assert "mon_L3_00" not in ctl("show", "k").stdout.replace("mon_L3_00 read", "")
    assert ctl("show", "--raw", "k").stdout.endswith(
        "\n"
        "DOMAIN           EVENT                  VALUE  KIND\n"
        "mon_L3_00        llc_occupancy       1.50 MiB  gauge\n"
        "mon_L3_00        mbm_total_bytes  Unavailable  cumulative\n"
        "mon_PERF_PKG_00  core_energy        54.446 MJ  cumulative\n"
    )


def test_show_as_json_has_exact_values(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("a")
    manager.add("b")
    lines = ctl("show", "--json", "a", "b").stdout.splitlines()
    assert [json.loads(line)["workload"]["key"] for line in lines] == ["a", "b"]
    assert json.loads(lines[0])["readings"][2]["value"] == READINGS[2].value == "54446119.644974"
    assert json.loads(lines[0])["totals"][0]["value"] == TOTALS[0].value


def test_show_prints_single_properties_for_scripts(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k", attributes={"pod.name": "web", "key": "forged", "core_energy": "0"})
    done = ctl("show", "k", "-p", "key,core_energy,core_energy.quality,pod.name")
    assert done.stdout == "key=k\ncore_energy=12.345678\ncore_energy.quality=exact\npod.name=web\n"
    # JSON leaves these out.
    assert ctl("show", "k", "-p", "nested,observed,loss").stdout == "nested=0\nobserved=false\nloss=\n"
    assert ctl("show", "k", "-p", "core_energy", "--value").stdout == "12.345678\n"
    assert ctl("show", "k", "-p", "mbm_total_bytes,mon_L3_00/llc_occupancy", "--value").stdout == "\n1572864\n"
    unknown = ctl("show", "k", "-p", "joules")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "there is no property 'joules'. The properties are: " in unknown.stderr
    assert ctl("show", "k", "--value").returncode == 2


def test_foreign_group_has_its_counters_as_properties(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("show", "pqos-7", "-p", "name,mon_L3_00/llc_occupancy")
    assert done.stdout == "name=pqos-7\nmon_L3_00/llc_occupancy=1572864\n"


def test_show_continues_after_an_unknown_key(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("b")
    done = ctl("show", "a", "b")
    assert done.returncode == 4
    # The manager of the tests has no resctrl at its path.
    assert done.stderr.startswith(
        "resctrlctl: cannot show 'a': there is no workload 'a'. The classes cannot be read: /sys/fs/resctrl: "
    )
    assert done.stdout.startswith("b\n")


def test_show_marks_a_foreign_group_and_prints_no_totals(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("show", "pqos-7")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "pqos-7\n"
        "     State: foreign: another program created it; resctrlmond only reads it\n"
        "     Class: /\n"
        "      Path: /sys/fs/resctrl/mon_groups/pqos-7\n"
        "  Counters: includes what earlier owners of the RMID used\n"
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


def test_show_states_a_caveat_once_if_it_is_a_reason_of_a_total(manager: FakeManager, ctl: Ctl) -> None:
    shared, other = "the end was not seen", "no counter was free"
    manager.add(
        "k", caveats={"core_energy": shared, "mbm_total_bytes": f"{shared}; {other}", "llc_occupancy": shared}
    )
    totals = [replace(total, reason=f"{shared}; it is late") for total in TOTALS]
    manager.replies["Read"] = types.ReadReply(workload=manager.workloads["k"], readings=[], totals=totals)
    shown = ctl("show", "k").stdout
    assert f"Not exact\n  all: {shared}\n       it is late\n" in shown
    assert f"   Caveats: llc_occupancy: {shared}\n            mbm_total_bytes: {other}\n" in shown
    assert "core_energy: " not in shown


def test_unit_that_is_not_watched_is_listed_and_explained(manager: FakeManager, ctl: Ctl) -> None:
    reason = "it is in no group, because of its profile quiet (rule at /etc/quiet.yaml:3)"
    facts = {"profile": "quiet", "profile_source": "rule at /etc/quiet.yaml:3", "reason": reason}
    for id_, is_unit in (("getty@tty1.service", True), ("0123456789abcdef", False)):
        manager.unwatched.append(
            types.Unwatched(id=id_, is_unit=is_unit, since="2026-11-25T10:00:00.000000Z", **facts)
        )
    lines = ctl("list", "--all", "--full").stdout.splitlines()
    assert ["getty@tty1.service", "-", "-"] in [line.split()[:3] for line in lines]
    assert ["-", "0123456789ab", "-"] in [line.split()[:3] for line in lines]
    assert "1 unwatched container, 1 unwatched unit." in lines
    assert reason in ctl("list", "--all", "--full").stdout
    # An earlier run, before the profile applied.
    manager.add("getty@tty1.service", state=State.COMPLETED, completed_at=LATER)
    explained = json.loads(ctl("profiles", "explain", "getty@tty1.service", "--json").stdout)
    assert explained == {
        "id": "getty@tty1.service",
        "profile": "quiet",
        "source": "rule at /etc/quiet.yaml:3",
        "reason": reason,
    }


def test_show_why_prints_the_proofs(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k")
    table = (
        "PROOF    SHOWN  WHAT WAS SEEN\n"
        "entered  yes    the first task of c1 was in the group before it ran\n"
        "closed   no     c1 has no control group of its own\n"
    )
    shown = ctl("show", "--why", "k").stdout
    assert table in shown
    assert ctl("show", "k").stdout == shown.replace(f"{table}\n", "")
    found = json.loads(ctl("show", "--why", "-j", "k").stdout)
    assert found.pop("proofs") == [
        {"kind": "entered", "shown": True, "text": PROOFS[0].text},
        {"kind": "closed", "shown": False, "text": PROOFS[1].text},
    ]
    assert found == json.loads(ctl("show", "-j", "k").stdout)


@pytest.mark.parametrize(("option", "word"), [("-p", "key"), ("--root", "/")])
def test_show_why_is_refused_where_it_would_be_ignored(ctl: Ctl, option: str, word: str) -> None:
    done = ctl("show", "--why", option, word, "k")
    assert (done.returncode, "argument --why: not allowed with" in done.stderr) == (2, True)
