# SPDX-License-Identifier: Apache-2.0
"""Render ``show`` of a class or of a foreign group. Without side effects."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from resctrlctl.screen.format import format_class, format_count, format_value
from resctrlctl.screen.layout import Block, Column, Row, Sheet, Table, Tone
from resctrlctl.screen.output import to_json
from resctrlctl.workloads import classes
from resctrlctl.workloads.directories import ClassReport, ForeignReport, Rate
from resctrlctl.workloads.render import average
from resctrlmond.api.types import Reading
from resctrlmond.resctrl.errors import printable

_COLUMNS = (
    Column("DOMAIN"),
    Column("EVENT"),
    Column("VALUE", right=True),
    Column("KIND"),
    Column("PER SECOND", right=True),
    Column("NOTE", is_note=True),
)
# The kernel's value of a class is a sum over its own RMID and those of its present groups (rdtgroup_mondata_show()).
_SUM = "the class and its present groups together"
_JUMPS = "falls when a group is removed; rises by what the RMID of a new group counted before"
_RESIDUE = "includes what earlier owners of the RMID used"


def blocks(report: ClassReport | ForeignReport, width: int | None) -> list[Block]:
    """Render a class or a foreign group: what it is, its current counters with their rates, and its limits.

    ``width`` is that of the output, None if it has no limit.
    """
    sheet = _class_sheet(report) if isinstance(report, ClassReport) else _foreign_sheet(report)
    rates = {(rate.domain, rate.event): rate for rate in report.rates}
    rows = (_row(reading, rates.get((reading.domain, reading.event))) for reading in report.readings)
    found: list[Block] = [sheet, Table(_COLUMNS, tuple(rows))]
    if isinstance(report, ClassReport) and report.class_.allocations:
        reply = classes.ClassesReply(0, [report.class_], {}, report.is_in_mbps)
        found += [replace(table, footer="") for table in classes.blocks(reply, width)]
    return found


def properties(report: ClassReport | ForeignReport) -> dict[str, str]:
    """Return the properties by name, without the counters: unknown values are ""."""
    subject = report.class_ if isinstance(report, ClassReport) else report.foreign
    texts = {
        name: value
        for source in (subject, report)
        for name, value in msgspec.to_builtins(source).items()
        if value is None or isinstance(value, (str, int))
    }
    found = {name: _text(value) for name, value in texts.items()}
    if isinstance(report, ClassReport):
        for limit in report.class_.allocations:
            found |= {f"{limit.resource}/{domain}": limit.value for domain in limit.domains}
    return found | {f"{rate.domain}/{rate.event}.rate": rate.value or "" for rate in report.rates}


def _text(value: str | int | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else to_json(value)


def _class_sheet(report: ClassReport) -> Sheet:
    name = report.class_.name
    groups = f"{format_count(report.groups, 'monitoring group')}, {report.foreign} foreign"
    fields = [
        ("Kind", ("class (control group)" if name else "root class: the tasks that no other class has",)),
        ("Path", (printable(report.path),)),
        ("Tasks", () if report.tasks is None else (f"{report.tasks}, with those of its groups",)),
        ("Groups", (groups,)),
        ("Counters", (_SUM, _JUMPS)),
    ]
    return Sheet(format_class(name), tuple((label, values) for label, values in fields if values))


def _foreign_sheet(report: ForeignReport) -> Sheet:
    foreign = report.foreign
    fields = [
        ("State", ("foreign: another program created it; resctrlmond only reads it",)),
        ("Class", (format_class(foreign.class_),)),
        ("Path", (printable(foreign.path),)),
        ("Tasks", () if report.tasks is None else (str(report.tasks),)),
        ("Counters", (_RESIDUE,)),
    ]
    shown = tuple((label, values) for label, values in fields if values)
    return Sheet(printable(foreign.name), shown, Tone.FAINT)


def _row(reading: Reading, rate: Rate | None) -> Row:
    known = reading.value is not None
    cells = (
        printable(reading.domain),
        printable(reading.event),
        # The kernel's word for a missing number, such as "Unavailable", does not mean 0.
        format_value(reading.value, reading.unit) if known else printable(reading.text),
        str(reading.kind),
        average(rate.value, reading.unit, 1) if rate and rate.value is not None else "-",
        printable(rate.reason) if rate and rate.reason else "-",
    )
    return Row(cells, Tone.NORMAL if known else Tone.WARNING)
