# SPDX-License-Identifier: Apache-2.0
"""The verb ``machine``: what the whole machine used, by pool."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from decimal import Decimal

from msgspec.structs import replace

from resctrlctl.base.errors import OK
from resctrlctl.connection.daemon import daemon_of
from resctrlctl.screen.format import format_message, format_time, shorten
from resctrlctl.screen.layout import Block, Column, Row, Sheet, Table, Tone, full_width
from resctrlctl.screen.output import Json, Output
from resctrlctl.workloads.workload_table import CACHE, ENERGY, TRAFFIC
from resctrlmond.api import signatures
from resctrlmond.api.types import MachineReply, PoolUse
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import Pool, Quality

_EVENTS = ((ENERGY, "ENERGY", "J"), (TRAFFIC, "TRAFFIC", "B"), (CACHE, "LLC", "B"))
_BAR_WIDTH = 48
# One for each pool.
_BLOCKS, _ASCII = "█▓▒░", "#+-."
_MEANINGS = {
    Pool.TRACKED: "workloads",
    Pool.FOREIGN: "groups of other programs",
    Pool.UNTRACKED: "tasks in no group",
    Pool.UNCORE: "packages without cores",
}


def machine(args: argparse.Namespace, output: Output) -> int:
    """Print the use of the machine; return the exit status."""
    reply = daemon_of(args).call("read what the machine used", signatures.MACHINE)
    if output.json is not Json.OFF:
        output.print_json(reply)
    elif output.quiet:
        for pool in _pools(reply.pools):
            output.print_line(pool)
    else:
        output.print_blocks(blocks(reply, output.width, by_domain=args.domains))
    return OK


def blocks(reply: MachineReply, width: int | None, *, by_domain: bool = False) -> list[Block]:
    """Return the time, the table of pools, and the reasons for which figures are not exact.

    A table that is wider than ``width`` leaves out what the names of the pools mean.
    """
    times = f"{format_time(reply.since)} to {format_time(reply.read_at)}"
    found: list[Block] = [Sheet(f"Use of the machine from {times}", (), Tone.NORMAL)]
    found.append(_fitting(_table(reply.pools, by_domain=by_domain), width, by_domain=by_domain))
    reasons: dict[str, dict[str, None]] = {}
    for use in reply.pools:
        if use.reason:
            reasons.setdefault(use.pool, {}).update(dict.fromkeys(use.reason.split("; ")))
    if reasons:
        lines = tuple((pool, tuple(map(format_message, texts))) for pool, texts in reasons.items())
        found.append(Sheet("Not exact", lines, Tone.WARNING))
    return found


def shares(pools: Iterable[PoolUse], event: str) -> dict[Pool, Decimal]:
    """Return the part of each pool of an event's use, from 0 to 1; {} if nothing was used, or a figure is unknown."""
    sums: dict[Pool, Decimal] = {}
    for use in pools:
        if use.event == event:
            if use.value is None:
                return {}
            sums[use.pool] = sums.get(use.pool, Decimal(0)) + Decimal(use.value)
    total = sum(sums.values(), Decimal(0))
    return {pool: of / total for pool, of in sums.items()} if total else {}


def shares_since(pools: Iterable[PoolUse], before: Iterable[PoolUse] = ()) -> tuple[str, dict[Pool, Decimal]]:
    """Return an event, and the part of each pool of its use since ``before``: of the energy, or else of the traffic.

    ("", {}) if neither is known.
    """
    known = {(use.pool, use.domain, use.event): use.value for use in before}
    since = [replace(use, value=None if use.value is None else _since(use, known)) for use in pools]
    for event in (ENERGY, TRAFFIC):
        if parts := shares(since, event):
            return event, parts
    return "", {}


def line(event: str, parts: Mapping[Pool, Decimal]) -> str:
    """Return the shares as a sentence; "" if they are not known."""
    if not parts:
        return ""
    name = {ENERGY: "Energy", TRAFFIC: "Traffic"}[event]
    texts = [f"{pool} {part * 100:.0f} %" for pool, part in parts.items() if part or pool is not Pool.FOREIGN]
    return f"{name} of the machine: {', '.join(texts)}."


def bar(pools: Iterable[PoolUse], *, has_blocks: bool) -> tuple[str, ...]:
    """Return the shares of the energy, or else of the traffic, and a bar of them; () if they are not known."""
    known = list(pools)
    for event, name in ((ENERGY, "energy"), (TRAFFIC, "traffic")):
        parts = {pool: part for pool, part in shares(known, event).items() if part or pool is not Pool.FOREIGN}
        if not parts:
            continue
        marks = dict(zip(Pool, _BLOCKS if has_blocks else _ASCII, strict=True))
        texts = [f"{marks[pool]} {pool} {part * 100:.0f} %" for pool, part in parts.items()]
        ends = [round(sum(list(parts.values())[: index + 1]) * _BAR_WIDTH) for index in range(len(parts))]
        drawn = "".join(
            marks[pool] * (end - begin) for pool, begin, end in zip(parts, [0, *ends], ends, strict=False)
        )
        return f"{name}: {', '.join(texts)}", drawn
    return ()


def _since(use: PoolUse, known: Mapping[tuple[Pool, str, str], str | None]) -> str:
    # Counting can have begun again meanwhile: resctrl was mounted again, or the state of the pools was lost.
    return str(max(Decimal(use.value or 0) - Decimal(known.get((use.pool, use.domain, use.event)) or 0), Decimal(0)))


def _table(pools: list[PoolUse], *, by_domain: bool) -> Table:
    events = [each for each in _EVENTS if any(use.event == each[0] for use in pools)]
    headings = ["POOL", "", *(["DOMAIN"] if by_domain else [])]
    for _, heading, _ in events:
        headings += [heading, "SHARE"]
    headings.append("QUALITY")
    parts = {event: shares(pools, event) for event, _, _ in events}
    rows = []
    for pool in _pools(pools):
        of_pool = [use for use in pools if use.pool is pool]
        domains = sorted({use.domain for use in of_pool if use.event in parts}) if by_domain else [""]
        for index, domain in enumerate(domains):
            of = [use for use in of_pool if not by_domain or use.domain == domain]
            cells = [pool, _MEANINGS[pool]] if index == 0 else ["", ""]
            cells += [printable(domain)] if by_domain else []
            for event, _, unit in events:
                uses = [use for use in of if use.event == event]
                share = shares((use for use in pools if use.domain == domain), event) if by_domain else parts[event]
                cells += [_sum(uses, unit), f"{share[pool] * 100:.0f} %" if uses and pool in share else "-"]
            shown = {use.quality for use in of if any(use.event == event for event, _, _ in events)}
            quality = next((each for each in reversed(Quality) if each in shown), Quality.EXACT)
            cells.append(quality)
            rows.append(Row(tuple(cells), Tone.NORMAL if quality is Quality.EXACT else Tone.WARNING))
    texts = ("POOL", "", "DOMAIN", "QUALITY")
    columns = (Column(heading, right=heading not in texts) for heading in headings)
    return Table(tuple(columns), tuple(rows))


def _fitting(table: Table, width: int | None, *, by_domain: bool) -> Table:
    """Return the table without the meanings if it is too wide, and with the pools above their domains."""
    if width is None or full_width(table) <= width:
        return table
    if not by_domain:
        rows = [Row((row.cells[0], *row.cells[2:]), row.tone) for row in table.rows]
        return Table((table.columns[0], *table.columns[2:]), tuple(rows))
    rows = []
    for row in table.rows:
        pool, _, *cells = row.cells
        rows += [Row((pool, *("" for _ in cells[1:])))] if pool else []
        rows.append(Row((f"  {cells[0]}", *cells[1:]), row.tone))
    return Table((Column("POOL"), *table.columns[3:]), tuple(rows))


def _pools(pools: Iterable[PoolUse]) -> list[Pool]:
    present = {use.pool for use in pools}
    return [pool for pool in Pool if pool in present]


def _sum(uses: list[PoolUse], unit: str) -> str:
    values = [use.value for use in uses]
    known = [Decimal(value) for value in values if value is not None]
    return shorten(sum(known, Decimal(0)), unit) if known and len(known) == len(values) else "-"
