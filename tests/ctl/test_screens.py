# SPDX-License-Identifier: Apache-2.0
"""Screens of the verbs at 80 and 200 columns; of those with a line for each workload with 0, 1, 30 and 500 of them.

Those of top, plot and doctor are in other files.

``python -m tests.ctl.test_screens`` writes the files again. Look at each before you commit it.
"""

from __future__ import annotations

import os
import time
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec.structs import replace

from resctrlctl.host.machine import blocks as machine_blocks
from resctrlctl.host.machine import rates_since
from resctrlctl.live.watch import text as watch_text
from resctrlctl.run.report import Report as RunReport
from resctrlctl.run.report import as_text as run_text
from resctrlctl.run.samples import LevelSummary
from resctrlctl.screen.layout import to_text
from resctrlctl.units.render_unit import blocks as unit_blocks
from resctrlctl.units.unit_state import UnitState
from resctrlctl.units.unit_status import Absence, Run, UnitStatus
from resctrlctl.workloads.classes import Allocation, Class, ClassesReply, with_use
from resctrlctl.workloads.classes import blocks as class_blocks
from resctrlctl.workloads.render import render_pods, render_status, render_workload
from resctrlctl.workloads.report import Entry, Report, grouped
from resctrlctl.workloads.report import table as report_table
from resctrlctl.workloads.workload_table import in_order, lines, table
from resctrlmond.api.types import (
    Capacity,
    Change,
    Claim,
    Companion,
    Container,
    Foreign,
    Level,
    ListPodsReply,
    MachineReply,
    Member,
    Pod,
    PoolUse,
    ReadReply,
    StatusReply,
    Total,
    Usage,
    Workload,
)
from resctrlmond.resctrl.kinds import Kind
from resctrlmond.workloads.model.changes import ChangeKind, ContainerState
from resctrlmond.workloads.model.states import CompanionState, Pool, Quality
from resctrlmond.workloads.model.workload import EndRule, State
from tests.ctl.samples import since_boot

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (80, 200)
COUNTS = (0, 1, 30, 500)
_BEGIN, _END = "2026-11-21T11:00:00.000000Z", "2026-11-21T11:10:00.000000Z"
_QUALITIES = (Quality.EXACT, Quality.EXACT, Quality.EXACT, Quality.LATE, Quality.ESTIMATED)


def workload(number: int) -> Workload:
    """Return a pod, a unit, a container or a command."""
    attributes = (
        {"pod.namespace": "shop", "pod.name": f"cart-{number}", "container.name": "app"},
        {"unit": f"worker@{number}.service"},
        {"container.name": f"web-{number}"},
        {"command": "make -j8"},
    )[number % 4]
    keys = (
        f"{number:08x}-ad00-4c0b-9f0e-0123456789ab",
        f"worker@{number}.service",
        f"{number:064x}",
        f"run-{number}-7",
    )
    return Workload(
        key=keys[number % 4],
        class_="",
        state=State.PENDING if number % 17 == 16 else State.ACTIVE,
        generation=1,
        baseline=Quality.EXACT,
        claims=(Claim("oci", _BEGIN, EndRule.RELEASE),),
        members=(),
        attributes=attributes,
        created_at=_BEGIN,
        created_ns=since_boot(_BEGIN),
    )


def usage(number: int) -> Usage:
    """Return the use of a workload, from nothing to terabytes."""
    known = workload(number)
    if known.state is State.PENDING:
        return Usage(workload=known, totals=[], levels=[])
    quality = _QUALITIES[number % 5]
    read_at = f"2026-11-{21 + number % 9:02}T12:{number % 60:02}:00.000000Z"
    return Usage(
        workload=known,
        read_at=read_at,
        read_ns=since_boot(read_at),
        totals=[
            Total(event="core_energy", unit="joules", value=f"{number**5}.{number:06}", quality=quality),
            Total(event="mbm_total_bytes", unit="bytes", value=str(number**7), quality=quality),
        ],
        levels=[Level(event="llc_occupancy", unit="bytes", value=str(number * 70_000))],
    )


def screen(count: int, width: int) -> str:
    """Return the text of ``list --sort power``."""
    found = in_order(lines([usage(number) for number in range(count)]), "power")
    return to_text([table(found, (), width)], width, legend=True)


def report_screen(count: int, width: int) -> str:
    """Return the text of ``report --by pod``."""
    entries = [
        Entry(
            f"{number:032x}",
            {"pod": f"shop/cart-{number // 2}"},
            number * 100.5,
            _QUALITIES[number % 5],
            {total.event: (Decimal(total.value or 0), total.quality) for total in usage(number).totals},
        )
        for number in range(count)
    ]
    found = Report("pod", grouped(entries, "pod"), 0, 0, _BEGIN, journal_is_volatile=False)
    return to_text([report_table(found)], width, legend=True)


def show_screen(state: str, width: int) -> str:
    """Return the text of ``show`` for a container in a pod."""
    quality = {"exact": Quality.EXACT, "late": Quality.LATE, "observed": Quality.ESTIMATED}[state]
    reasons = {
        "late": "c1 ran and had used up to 1.250 s of CPU time before it was put into the group; another program "
        "moved tasks out of the group, and what they use outside is not counted",
        "observed": "another program owns the group, and may have moved tasks into or out of it",
    }
    name = 8 * "5ca1ab1e"
    member = Member(
        id=name,
        kind="container",
        owner="oci",
        pid=4711,
        cgroup=f"/sys/fs/cgroup/kubepods.slice/crio-{name}.scope",
        started_at=_BEGIN,
        late=state == "late",
    )
    shown = replace(
        workload(4),
        members=(member,),
        path=f"/sys/fs/resctrl/mon_groups/{name}",
        snapshot=f"/run/resctrlmond/groups/{name}",
        baseline=quality,
        observed=state == "observed",
        completed_at=_END,
        completed_ns=since_boot(_END),
        state=State.COMPLETED,
    )
    totals = [replace(total, quality=quality, reason=reasons.get(state)) for total in usage(4).totals]
    reply = ReadReply(workload=shown, readings=[], read_ns=shown.completed_ns, totals=totals)
    return to_text(render_workload(reply), width, legend=True)


def status_screen(width: int) -> str:
    """Return the text of ``status`` of a machine with problems."""
    reply = StatusReply(
        version="0.1.0",
        mount="/sys/fs/resctrl",
        mounted=True,
        rmids=288,
        rmids_used=288,
        pending=2,
        in_limbo=False,
        groups=280,
        foreign=[Foreign(class_="", name="pqos", path="/sys/fs/resctrl/mon_groups/pqos")],
        classes=["", "gold", "silver"],
        capacity=[Capacity(resource="L3_MON", rmids=288, events=("llc_occupancy", "mbm_total_bytes"))],
        problems=[
            "another program removes groups of resctrlmond: 3 since 2026-11-21T11:00:00Z, the last one of workload "
            "web, while resctrl is mounted. No program that is known to do this runs here. Stop that program, or "
            "configure it to leave groups with the group id of resctrlmond alone"
        ],
    )
    used = ("traffic: █ tracked 61 %, ▒ untracked 39 %", "█" * 29 + "▒" * 19)
    return to_text(render_status(reply, (), used), width, legend=True)


def unit_screen(state: str, width: int) -> str:
    """Return the text of ``status UNIT`` for a unit that is exact, late, ended, without an RMID, or excluded."""
    name = "php8.2-fpm@prometheus-alertmanager.service"
    unit = UnitState(
        name=name,
        load="loaded",
        active="failed" if state == "ended" else "active",
        sub="failed" if state == "ended" else "running",
        since=_BEGIN,
        description="The PHP FastCGI Process Manager of the alert manager",
        cgroup=f"/sys/fs/cgroup/system.slice/system-php.slice/{name}",
        file="/usr/lib/systemd/system/php8.2-fpm@.service",
    )
    member = Member(
        id=name,
        kind="unit",
        owner="systemd",
        cgroup=unit.cgroup,
        started_at=_BEGIN,
        late=state == "late",
        cpu_time_before_ns=1_250_000_000 if state == "late" else 0,
        tasks_outside=1 if state == "late" else 0,
    )
    quality = Quality.LATE if state == "late" else Quality.EXACT
    reason = f"{name} ran and had used up to 1.250 s of CPU time before it was put into the group"
    shared = "shared with 12 others in overflow@system.slice, because no RMID is free for it"
    no_rmid = "cannot keep the monitoring group: its RMID was needed for shop/cart-0, which has a higher priority"
    totals = [
        replace(total, quality=quality, reason=reason if state == "late" else None) for total in usage(4).totals
    ]
    if state == "shared":
        totals = [replace(total, value=None, quality=Quality.UNKNOWN, reason=shared) for total in totals]
    shown = replace(
        workload(4),
        key=name,
        state={"shared": State.PENDING, "ended": State.COMPLETED}.get(state, State.ACTIVE),
        reason=no_rmid if state == "shared" else None,
        claims=(Claim("systemd", _BEGIN, EndRule.RELEASE),),
        members=(member,),
        attributes={"unit": name},
        path=None if state == "shared" else f"/sys/fs/resctrl/mon_groups/{name}",
        priority=-1,
        profile="web",
        profile_source="rule 2 of /etc/resctrlmond/profiles.d/web.yaml",
        companion=Companion(state=CompanionState.RUNNING, unit=f"resctrlmon-companion-{name}"),
        baseline=quality,
        created_at=_BEGIN if state == "ended" else None,
        completed_at=_END if state == "ended" else None,
    )
    file = "/etc/resctrlmond/resctrlmond.yaml"
    absences = {
        "ended": Absence("it is not running", f"systemctl start {name}"),
        "excluded": Absence(
            f"the glob !php* in {file} excludes it",
            f"remove the glob from {file}, then: systemctl reload resctrlmond",
        ),
    }
    found = UnitStatus(
        unit=unit,
        glob="" if state == "excluded" else "*.service",
        glob_path="" if state == "excluded" else "/etc/resctrlmond/resctrlmond.d/units.yaml",
        exact_path="",
        use=None
        if state == "excluded"
        else ReadReply(
            workload=shown, readings=[], read_ns=since_boot(_END) if state == "ended" else None, totals=totals
        ),
        absence=absences.get(state),
        shared_key="overflow@system.slice" if state == "shared" else "",
        shared_with=12,
        tasks=17 if state in ("exact", "late") else None,
        runs=[Run(_BEGIN, 100.5, quality, usage(number).totals) for number in range(2, 5)],
        problems=[],
    )
    return to_text(unit_blocks(found), width, legend=True)


def long_names_screen(width: int) -> str:
    """Return the text of ``list`` with names that are as long as those of real pods."""
    names = ("prometheus-kube-prometheus-operator-7f9c6d5b8-x2x4z", "cart-7f9c6d5b8-x2x4z", "a")
    usages = [
        replace(
            usage(number),
            workload=replace(workload(number), attributes={"pod.namespace": "monitoring", "pod.name": name}),
        )
        for number, name in enumerate(names, 20)
    ]
    return to_text([table(lines(usages), (), width)], width, legend=True)


def pods_screen(count: int, width: int) -> str:
    """Return the text of ``list --pods``, with containers that are not monitored."""
    pods = [
        Pod(
            key=f"{number:08x}-ad00-4c0b-9f0e-0123456789ab",
            name=f"cart-7f9c6d5b8-{number}",
            namespace="shop",
            labels={},
            sandboxes=[],
            containers=[
                Container(
                    id=f"{number:064x}",
                    name="app",
                    state=ContainerState.RUNNING,
                    monitored=number % 7 != 0,
                    reason=None if number % 7 else "the namespace kube-system is not selected, see nri.yaml",
                )
            ],
            workload=workload(number) if number % 7 else None,
        )
        for number in range(count)
    ]
    return to_text(render_pods(ListPodsReply(pods=pods, reported=[])), width, legend=True)


def machine_screen(*, by_domain: bool, width: int) -> str:
    """Return the text of ``machine`` for two packages and two caches."""
    reason = "class gold was removed between two readings, so its last use is estimated from the reading before"
    pools = [
        PoolUse(
            pool=pool,
            domain=f"{domain}_{number:02}",
            event=event,
            kind=Kind.GAUGE if event == "llc_occupancy" else Kind.CUMULATIVE,
            unit=unit,
            value=str(7**index * 10**power // (number + 1)),
            skew="0",
            quality=Quality.ESTIMATED if pool is Pool.UNTRACKED else Quality.EXACT,
            reason=reason if pool is Pool.UNTRACKED else None,
        )
        for event, domain, unit, power in (
            ("core_energy", "mon_PERF_PKG", "joules", 5),
            ("mbm_total_bytes", "mon_L3", "bytes", 10),
            ("llc_occupancy", "mon_L3", "bytes", 6),
        )
        for index, pool in enumerate(Pool)
        if pool is not Pool.UNCORE or event == "core_energy"
        for number in range(2)
    ]
    reply = MachineReply(since=_BEGIN, read_at="2026-11-21T12:00:00.000000Z", pools=pools)
    seconds, rates = rates_since(reply, None)
    found = machine_blocks(reply, width, by_domain=by_domain, seconds=seconds, rates=rates)
    return to_text(found, width, legend=True)


def classes_screen(count: int, width: int) -> str:
    """Return the text of ``classes`` for three classes whose ways overlap, and their workloads."""
    root = Allocation("L3", (0, 1), "fff", tuple(range(12)), 12, 576 << 20, ("gold", "silver"))
    limits = Allocation("MB", (0, 1), "40")
    found = [
        Class("", "shareable", [root]),
        Class("gold", "exclusive", [replace(root, ways=(0, 1, 2, 3), size=192 << 20, shared_with=("",)), limits]),
        Class("silver", "shareable", [replace(root, ways=(4, 5), size=96 << 20, shared_with=("",))]),
    ]
    names = ("", "gold", "silver")
    usages = [replace(usage(n), workload=replace(workload(n), class_=names[n % 3])) for n in range(count)]
    reply = with_use(ClassesReply(16, found, {"L3": (10, 11)}, is_in_mbps=False), usages)
    return to_text(class_blocks(reply, width), width, legend=True)


def watch_screen(count: int) -> str:
    """Return the lines of ``watch``, which have no limit: their ends have reasons."""
    kinds = (ChangeKind.PRESENT, ChangeKind.ADDED, ChangeKind.ENDED, ChangeKind.CHANGED)
    changes = [
        Change(
            change=ChangeKind.PENDING if usage(number).workload.state is State.PENDING else kinds[number % 4],
            at=_BEGIN,
            key=usage(number).workload.key,
            workload=usage(number).workload,
            totals=usage(number).totals,
        )
        for number in range(count)
    ]
    found = lines([usage(number) for number in range(count)])
    return "".join(f"{watch_text(change, line)}\n" for change, line in zip(changes, found, strict=True))


def run_screen(runs: int, width: int) -> str:
    """Return the report of ``run`` in the C locale."""
    used = usage(28).totals
    reason = "the command ran in the group of workload run-1-7, and the use of other tasks there is counted"
    reports = [
        RunReport(
            command=["make", "-j8"],
            exit_status=0,
            elapsed=10.0 + number,
            user=60.5,
            system=3.25,
            tasks_left=number,
            completed=True,
            workload=workload(3),
            totals=[replace(total, reason=reason) for total in used],
            levels=[LevelSummary("llc_occupancy", "bytes", "1234567", "2345678", 20)],
        )
        for number in range(runs)
    ]
    return run_text(reports, width, is_ascii=True)


def others() -> dict[str, str]:
    """Return all screens but those of list by the names of their files."""
    found = {}
    for width in WIDTHS:
        for count in COUNTS:
            found[f"report-{count}-{width}"] = report_screen(count, width)
            found[f"pods-{count}-{width}"] = pods_screen(count, width)
            found[f"classes-{count}-{width}"] = classes_screen(count, width)
        for state in ("exact", "late", "observed"):
            found[f"show-{state}-{width}"] = show_screen(state, width)
        found[f"list-long-names-{width}"] = long_names_screen(width)
        found[f"machine-{width}"] = machine_screen(by_domain=False, width=width)
        found[f"machine-domains-{width}"] = machine_screen(by_domain=True, width=width)
        found[f"run-1-{width}"] = run_screen(1, width)
        found[f"run-3-{width}"] = run_screen(3, width)
        found[f"status-{width}"] = status_screen(width)
        for state in ("exact", "late", "ended", "shared", "excluded"):
            found[f"unit-{state}-{width}"] = unit_screen(state, width)
    return found | {f"watch-{count}": watch_screen(count) for count in COUNTS}


@pytest.mark.usefixtures("environment")
def test_other_screens_are_as_they_were_looked_at() -> None:
    for name, text in others().items():
        assert text == (SCREENS / f"{name}.txt").read_text(encoding="utf-8"), name
        assert text.isascii() or name.startswith("status"), name


def test_nothing_but_names_and_paths_exceeds_the_width() -> None:
    verbs = ("report", "pods", "classes", "machine", "run", "status")
    for name, text in others().items():
        if name.startswith(verbs):
            assert max(map(len, text.splitlines())) <= int(name.rpartition("-")[2]), name


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
def test_screen_is_as_it_was_looked_at(count: int, width: int) -> None:
    text = screen(count, width)
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= width
    assert text == (SCREENS / f"list-{count}-{width}.txt").read_text(encoding="utf-8")


def main() -> None:
    """Write the files again."""
    SCREENS.mkdir(exist_ok=True)
    for count in COUNTS:
        for width in WIDTHS:
            (SCREENS / f"list-{count}-{width}.txt").write_text(screen(count, width), encoding="utf-8")
    os.environ["TZ"] = "UTC"
    time.tzset()
    for name, text in others().items():
        (SCREENS / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
