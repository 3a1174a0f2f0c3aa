# SPDX-License-Identifier: Apache-2.0
"""The verb ``sums``: what all workloads used since the boot, by namespace, slice, user or profile."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from decimal import Context, Decimal, localcontext

from resctrlctl.base.errors import OK
from resctrlctl.connection.daemon import daemon_of
from resctrlctl.screen.format import format_count, format_message, format_time, shorten
from resctrlctl.screen.layout import Block, Column, Row, Sheet, Table, Tone
from resctrlctl.screen.output import Json, Output
from resctrlctl.workloads.workload_table import ENERGY, TRAFFIC
from resctrlmond.api import signatures
from resctrlmond.api.types import NameSums, Sum, SumsReply, SumsRequest
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import NameKind, Quality

_EVENTS = ((ENERGY, "ENERGY", "J"), (TRAFFIC, "TRAFFIC", "B"))
# A sum has more digits than the default of 28 keeps.
_EXACTLY = Context(prec=64)
# The names have at least so many columns. A longer one has a line of its own.
_NAME_WIDTH = 12


def sums(args: argparse.Namespace, output: Output) -> int:
    """Print the sums of one grouping; return the exit status."""
    request = SumsRequest(by=NameKind(args.by))
    reply = daemon_of(args).call("read the sums", signatures.SUMS, request)
    if output.json is not Json.OFF:
        output.print_json(reply)
    elif output.quiet:
        for of in in_order(reply.names):
            output.print_line(printable(of.name))
    else:
        output.print_blocks(blocks(reply, args.by))
    return OK


def in_order(names: Iterable[NameSums]) -> list[NameSums]:
    """Return the names, the one with most energy first, then the one with most traffic."""

    def key(of: NameSums) -> tuple[Decimal, Decimal, str]:
        energy, traffic = (-_value(of, event) for event in (ENERGY, TRAFFIC))
        return energy, traffic, of.name

    return sorted(names, key=key)


def blocks(reply: SumsReply, by: str) -> list[Block]:
    """Return the time and the table of one grouping."""
    title = f"Use of all workloads from {format_time(reply.since)} to {format_time(reply.read_at)}"
    reset = (("Begun again", (format_message(reply.reset),)),) if reply.reset else ()
    return [Sheet(title, reset, Tone.WARNING if reset else Tone.NORMAL), _table(reply, by)]


def _table(reply: SumsReply, by: str) -> Table:
    events = [each for each in _EVENTS if any(_sum_of(of, each[0]) for of in reply.names)]
    columns = [Column(by.upper(), name_width=_NAME_WIDTH), Column("ENDED", right=True), Column("RUNNING", right=True)]
    for _, heading, _ in events:
        columns += [Column(heading, right=True), Column("INEXACT", right=True)]
    columns.append(Column("UNKNOWN", right=True))
    rows = []
    for of in in_order(reply.names):
        cells = [printable(of.name) or "-", str(sum(count.runs for count in of.ends)), str(of.running)]
        for event, _, unit in events:
            cells += _cells(_sum_of(of, event), unit)
        unknown = max((each.unknown_runs for each in of.sums), default=0)
        cells.append(str(unknown) if unknown else "-")
        is_exact = not unknown and all(map(_is_exact, of.sums))
        rows.append(Row(tuple(cells), Tone.NORMAL if is_exact else Tone.WARNING))
    return Table(tuple(columns), tuple(rows), _footer(reply))


def _cells(of: Sum | None, unit: str) -> Sequence[str]:
    """Return the number, and the share of it that is not exact."""
    if of is None or of.value is None:
        return "-", "-"
    with localcontext(_EXACTLY):
        value, inexact = Decimal(of.value), Decimal(of.late or 0) + Decimal(of.estimated or 0)
        # Runs that are not exact may have used something, although they have counted nothing.
        share = "-" if _is_exact(of) else f"{inexact / value * 100 if value else 100:.0f} %"
        return shorten(value, unit), share


def _is_exact(of: Sum) -> bool:
    return of.late is None and of.estimated is None


def _sum_of(of: NameSums, event: str) -> Sum | None:
    return next((each for each in of.sums if each.event == event), None)


def _value(of: NameSums, event: str) -> Decimal:
    found = _sum_of(of, event)
    return Decimal(found.value) if found is not None and found.value is not None else Decimal(-1)


def _footer(reply: SumsReply) -> str:
    ended = dict.fromkeys(Quality, 0)
    for of in reply.names:
        for count in of.ends:
            ended[count.quality] += count.runs
    total = sum(ended.values())
    texts = [f"{runs} {quality}" for quality, runs in ended.items() if runs]
    qualities = f" ({', '.join(texts)})" if texts else ""
    running = sum(of.running for of in reply.names)
    now = {0: "No workload is running", 1: "1 workload is running"}.get(running, f"{running} workloads are running")
    text = f"{format_count(total, 'run')} ended{qualities}. {now}."
    return text + (f" {format_count(reply.lost, 'run')} lost a group." if reply.lost else "")
