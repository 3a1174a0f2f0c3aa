# SPDX-License-Identifier: Apache-2.0
"""Screens of list with 0, 1, 30 and 500 workloads, at 80 and 200 columns, as files in ``screens``.

``python -m tests.ctl.test_screens`` writes the files again. Look at each before you commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from resctrlctl.layout import to_text
from resctrlctl.workload_table import in_order, lines, table
from resctrlmond.api.types import Claim, Level, Total, Usage, Workload
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


if __name__ == "__main__":
    main()
