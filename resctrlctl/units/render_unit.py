# SPDX-License-Identifier: Apache-2.0
"""Render ``status UNIT`` as sheets and tables. Without side effects."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from resctrlctl.screen.format import format_count, format_duration, format_message, format_time, shorten
from resctrlctl.screen.layout import Block, Column, Row, Sheet, Table, Tone
from resctrlctl.units import exact_units
from resctrlctl.workloads.render import late_text, level_texts, render_use, workload_lines
from resctrlctl.workloads.workload_table import TONES
from resctrlmond.api.types import Member, Workload
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import Quality, State

if TYPE_CHECKING:
    from resctrlctl.units.unit_status import Run, UnitStatus

# The lines of a workload that status has, after those about the unit: Watched has its baseline.
_LINES = (
    *("state", "created_at", "completed_at", "cpu_time_ns", "class_", "path", "priority", "memory", "companion"),
    *("part_of", "nested", "loss", "members"),
)
# Labels that differ from those of show, where the lines of the unit would be confused with them.
_LABELS = {"state": "Workload", "path": "Group"}
_OF_RUNS = (("mbm_total_bytes", "TRAFFIC", "B"), ("core_energy", "ENERGY", "J"))
_QUALITY_TONES = {Quality.EXACT: Tone.NORMAL, Quality.LATE: Tone.NORMAL}


def blocks(found: UnitStatus) -> list[Block]:
    """Return the unit and its workload, what this used and why that is not exact, and the runs that have ended."""
    description = found.unit.description
    title = printable(found.unit.name) + (f" - {printable(description)}" if description else "")
    values = {label: tuple(map(format_message, texts)) for label, texts in _fields(found)}
    lines = [(label, texts) for label, texts in values.items() if texts]
    if found.workload is not None:
        shown = workload_lines(found.workload)
        if found.workload.created_at is None:
            shown.pop("created_at", None)
        lines += [(_LABELS.get(field, shown[field][0]), shown[field][1]) for field in _LINES if field in shown]
    if found.use is not None and (now := level_texts(found.use)):
        lines.append(("Now", now))
    result: list[Block] = [Sheet(title, tuple(lines), _tone(found), whole="Remedy")]
    if found.use is not None:
        result += render_use(found.use)
    if found.runs:
        result.append(_runs_table(found.runs))
    return result


def _fields(found: UnitStatus) -> Iterator[tuple[str, Iterable[str]]]:
    yield "Unit", _state_texts(found)
    yield "Watched", _watched_texts(found)
    yield "Remedy", _remedies(found)
    yield "Selected by", [f"{found.glob} in {found.glob_path}"] if found.glob else []
    yield "Shared", _shared_texts(found)
    yield "Profile", _profile_texts(found.workload)
    yield "Tasks", [] if found.tasks is None else [f"{found.tasks} in the group"]
    yield "Exposed", _exposed(found.workload)
    yield "Not known", found.problems


def _state_texts(found: UnitStatus) -> Iterator[str]:
    unit = found.unit
    if unit.is_missing:
        yield "not found by systemd"
    elif unit.active:
        inner = f" ({unit.sub})" if unit.sub else ""
        since = f" since {format_time(unit.since)}" if unit.since else ""
        yield f"{unit.active}{inner}{since}"
        if unit.load not in ("", "loaded"):
            yield f"its unit file is {unit.load}"


def _watched_texts(found: UnitStatus) -> Iterator[str]:
    workload = found.workload
    if found.absence is not None:
        yield f"no: {found.absence.reason}"
        if workload is not None:
            yield "its last run is below"
    elif workload is not None and workload.state is State.PENDING:
        yield "not yet: it waits for an RMID"
    elif workload is not None:
        yield _quality_text(workload)
        if found.exact_path and workload.baseline is not Quality.EXACT:
            yield f"it can be exact from its next start after a stop on, by {found.exact_path}"


def _quality_text(workload: Workload) -> str:
    if workload.baseline is Quality.EXACT:
        return "yes, from its first instruction on"
    member = _own_member(workload)
    if workload.baseline is Quality.LATE and member is not None and member.late:
        return f"yes, late: it {late_text(member)}"
    return f"yes, {workload.baseline}"


def _own_member(workload: Workload) -> Member | None:
    return next((member for member in workload.members if member.id == workload.key), None)


def _remedies(found: UnitStatus) -> Iterator[str]:
    name, workload = found.unit.name, found.workload
    if found.absence is not None:
        yield from filter(None, [found.absence.remedy])
        return
    may_be_exact = not found.exact_path and exact_units.may_be_exact(name, found.unit.file)
    if may_be_exact and workload and workload.state.has_group and workload.baseline is Quality.LATE:
        yield shlex.join(["resctrlctl", "units", "exact", name])


def _shared_texts(found: UnitStatus) -> Iterator[str]:
    if found.shared_key:
        others = format_count(found.shared_with, "other")
        yield f"with {others} in {found.shared_key}, which has their figures together"
        yield f"resctrlctl show {found.shared_key}"


def _profile_texts(workload: Workload | None) -> Iterator[str]:
    if workload is not None and workload.profile:
        yield workload.profile
        yield from filter(None, [workload.profile_source])


def _exposed(workload: Workload | None) -> Sequence[str]:
    members = workload.members if workload is not None else ()
    return [f"{member.id}: {member.exposed}" for member in members if member.exposed]


def _tone(found: UnitStatus) -> Tone:
    if found.workload is not None and found.is_watched:
        return TONES.get(found.workload.state, Tone.NORMAL)
    return Tone.WARNING if found.unit.active == "failed" else Tone.FAINT


def _runs_table(runs: Sequence[Run]) -> Table:
    events = [one for one in _OF_RUNS if any(total.event == one[0] for run in runs for total in run.totals)]
    columns = (
        Column("RUN ENDED"),
        *(Column(heading, right=True) for heading in ("TIME", *(heading for _, heading, _ in events))),
        Column("QUALITY"),
    )
    rows = [
        Row(
            (
                format_time(run.ended_at),
                format_duration(run.duration_sec),
                *(_used(run, event, unit) for event, _, unit in events),
                str(run.quality),
            ),
            _QUALITY_TONES.get(run.quality, Tone.WARNING),
        )
        for run in runs
    ]
    return Table(columns, tuple(rows), f"{format_count(len(rows), 'ended run')}, the newest last.")


def _used(run: Run, event: str, unit: str) -> str:
    value = next((total.value for total in run.totals if total.event == event), None)
    return "-" if value is None else shorten(Decimal(value), unit)
