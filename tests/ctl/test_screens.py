# SPDX-License-Identifier: Apache-2.0
"""Screens of list and report with 0, 1, 30 and 500 workloads, of show and status, at 80 and 200 columns.

``python -m tests.ctl.test_screens`` writes the files again. Look at each before you commit it.
"""

from __future__ import annotations

import os
import time
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec.structs import replace

from resctrlctl.layout import to_text
from resctrlctl.render import render_status, render_workload
from resctrlctl.report import Entry, Report, grouped
from resctrlctl.report import table as report_table
from resctrlctl.workload_table import in_order, lines, table
from resctrlmond.api.types import (
    Capacity,
    Claim,
    Foreign,
    Level,
    Member,
    ReadReply,
    StatusReply,
    Total,
    Usage,
    Workload,
)
from resctrlmond.workloads.model import EndRule, State
from resctrlmond.workloads.states import Quality

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (80, 200)
COUNTS = (0, 1, 30, 500)
_BEGIN = "2026-11-21T11:00:00.000000Z"
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
    )


def usage(number: int) -> Usage:
    """Return the use of a workload, from nothing to terabytes."""
    known = workload(number)
    if known.state is State.PENDING:
        return Usage(workload=known, totals=[], levels=[])
    quality = _QUALITIES[number % 5]
    return Usage(
        workload=known,
        read_at=f"2026-11-{21 + number % 9:02}T12:{number % 60:02}:00.000000Z",
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
        completed_at="2026-11-21T11:10:00.000000Z",
        state=State.COMPLETED,
    )
    totals = [replace(total, quality=quality, reason=reasons.get(state)) for total in usage(4).totals]
    return to_text(render_workload(ReadReply(workload=shown, readings=[], totals=totals)), width, legend=True)


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


def others() -> dict[str, str]:
    """Return the screens of report, show and status by the names of their files."""
    found = {f"report-{count}-{width}": report_screen(count, width) for count in COUNTS for width in WIDTHS}
    states = ("exact", "late", "observed")
    found |= {f"show-{state}-{width}": show_screen(state, width) for state in states for width in WIDTHS}
    return found | {f"status-{width}": status_screen(width) for width in WIDTHS}


@pytest.mark.usefixtures("environment")
def test_other_screens_are_as_they_were_looked_at() -> None:
    for name, text in others().items():
        assert text == (SCREENS / f"{name}.txt").read_text(encoding="utf-8"), name


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
