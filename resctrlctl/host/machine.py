# SPDX-License-Identifier: Apache-2.0
"""The verb ``machine``: what the whole machine used, by pool."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from decimal import Decimal

import msgspec
from msgspec.structs import replace

from resctrlctl.base.errors import OK
from resctrlctl.connection.daemon import daemon_of
from resctrlctl.screen.format import format_message, format_time, shorten
from resctrlctl.screen.layout import Block, Column, Row, Sheet, Table, Tone, full_width
from resctrlctl.screen.output import Json, Output
from resctrlctl.workloads.workload_table import CACHE, ENERGY, TRAFFIC, seconds_between
from resctrlmond.api import signatures
from resctrlmond.api.types import MachineReply, PoolUse
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import Pool, Quality

_EVENTS = ((ENERGY, "ENERGY", "J"), (TRAFFIC, "TRAFFIC", "B"), (CACHE, "LLC", "B"))
_RATES = ((ENERGY, "POWER", "W"), (TRAFFIC, "BANDWIDTH", "B/s"))
# The time between the two readings without --watch.
_RATE_S = 0.5
_BAR_WIDTH = 48
# One for each pool.
_BLOCKS, _ASCII = "█▓▒░", "#+-."
_MEANINGS = {
    Pool.TRACKED: "workloads",
    Pool.FOREIGN: "groups of other programs",
    Pool.UNTRACKED: "tasks in no group",
    Pool.UNCORE: "packages without cores",
}


class PoolRate(msgspec.Struct, frozen=True, rename="camel"):
    """The use of a pool per second, and its parts, from 0 to 1, of that of all pools; each with 6 decimals.

    ``domain`` is None for the sums over all domains. None: the figure is not known, or not counted there.
    """

    pool: Pool
    domain: str | None
    watts: str | None
    watts_share: str | None
    bytes_per_second: str | None
    bytes_per_second_share: str | None


class MachineRates(MachineReply, frozen=True, kw_only=True):
    """The JSON output of ``machine --rate``: the last reply, and the rates in the seconds before it."""

    interval_s: float
    rates: list[PoolRate]


def machine(args: argparse.Namespace, output: Output) -> int:
    """Print the use of the machine; return the exit status."""
    daemon = daemon_of(args)
    action = "read what the machine used"
    reply = daemon.call(action, signatures.MACHINE)
    is_text = output.json is Json.OFF
    # A script that asks for totals does not wait for rates.
    while args.rate or args.watch or (is_text and not output.quiet):
        before = reply
        time.sleep(args.watch or _RATE_S)
        reply = daemon.call(action, signatures.MACHINE)
        seconds, rates = rates_since(reply, before)
        if is_text:
            found = blocks(reply, output.width, by_domain=args.domains, seconds=seconds, rates=rates)
            output.print_blocks(found, is_screen=bool(args.watch))
        else:
            output.print_json(_with_rates(reply, seconds, rates))
        if not args.watch:
            return OK
    if is_text:
        for pool in _pools(reply.pools):
            output.print_line(pool)
    else:
        output.print_json(reply)
    return OK


def _with_rates(reply: MachineReply, seconds: float, rates: Sequence[PoolUse]) -> MachineRates:
    found = []
    for pool in _pools(rates):
        for domain in (None, *sorted({use.domain for use in rates if use.pool is pool})):
            uses = [use for use in rates if domain in (None, use.domain)]
            figures = (figure for event, _, _ in _RATES for figure in _figures(uses, event, pool))
            found.append(PoolRate(pool, domain, *figures))
    return MachineRates(
        since=reply.since, read_at=reply.read_at, pools=reply.pools, interval_s=round(seconds, 6), rates=found
    )


def _figures(uses: Sequence[PoolUse], event: str, pool: Pool) -> tuple[str | None, str | None]:
    """Return the sum of a pool's use of an event, and its share; None for what is not known."""
    total = sums((use for use in uses if use.pool is pool), event).get(pool)
    share = shares(uses, event).get(pool)
    return None if total is None else f"{total:.6f}", None if share is None else f"{share:.6f}"


def blocks(
    reply: MachineReply,
    width: int | None,
    *,
    by_domain: bool = False,
    seconds: float = 0.0,
    rates: Sequence[PoolUse] = (),
) -> list[Block]:
    """Return the present ``rates``, the table of pools since counting began, and the reasons for inexact figures.

    A table that is wider than ``width`` leaves out what the names of the pools mean.
    """
    found: list[Block] = []
    if rates:
        found.append(Sheet(f"Use per second, in {seconds:.1f} s: {line(rates, has_shares=False)}", (), Tone.NORMAL))
        found.append(_fitting(_table(rates, _RATES, by_domain=by_domain), width, by_domain=by_domain))
    times = f"{format_time(reply.since)} to {format_time(reply.read_at)}"
    found.append(Sheet(f"Use of the machine from {times}", (), Tone.NORMAL))
    found.append(_fitting(_table(reply.pools, _EVENTS, by_domain=by_domain), width, by_domain=by_domain))
    reasons: dict[str, dict[str, None]] = {}
    for use in reply.pools:
        if use.reason:
            reasons.setdefault(use.pool, {}).update(dict.fromkeys(use.reason.split("; ")))
    if reasons:
        lines = tuple((pool, tuple(map(format_message, texts))) for pool, texts in reasons.items())
        found.append(Sheet("Not exact", lines, Tone.WARNING))
    return found


def sums(pools: Iterable[PoolUse], event: str) -> dict[Pool, Decimal]:
    """Return each pool's use of an event; {} if a figure is unknown."""
    found: dict[Pool, Decimal] = {}
    for use in pools:
        if use.event == event:
            if use.value is None:
                return {}
            found[use.pool] = found.get(use.pool, Decimal(0)) + Decimal(use.value)
    return found


def shares(pools: Iterable[PoolUse], event: str) -> dict[Pool, Decimal]:
    """Return the part of each pool of an event's use, from 0 to 1; {} if nothing was used, or a figure is unknown."""
    found = sums(pools, event)
    total = sum(found.values(), Decimal(0))
    return {pool: of / total for pool, of in found.items()} if total else {}


def main_shares(pools: Sequence[PoolUse]) -> tuple[str, dict[Pool, Decimal]]:
    """Return an event, and the part of each pool of its use: of the energy, or else of the traffic.

    ("", {}) if neither is known.
    """
    for event in (ENERGY, TRAFFIC):
        if parts := shares(pools, event):
            return event, parts
    return "", {}


def rates_since(reply: MachineReply, before: MachineReply | None) -> tuple[float, list[PoolUse]]:
    """Return the seconds since ``before``, and what each pool used per second of energy and traffic since then.

    Without ``before``, or if counting began again after it, these are the seconds and averages since counting began.
    (0, []) if no time has passed.
    """
    # Counting begins again if resctrl is mounted again.
    if before is not None and before.since != reply.since:
        before = None
    seconds = seconds_between(reply.since if before is None else before.read_at, reply.read_at)
    if not seconds:
        return 0.0, []
    known = {(use.pool, use.domain, use.event): use.value for use in before.pools} if before is not None else {}
    return seconds, [
        replace(use, value=_rate(use.value, known.get((use.pool, use.domain, use.event), "0"), seconds))
        for use in reply.pools
        if use.event in (ENERGY, TRAFFIC)
    ]


def _rate(value: str | None, before: str | None, seconds: float) -> str | None:
    if value is None or before is None:
        return None
    # Counting can have begun again meanwhile, because the state of the pools was lost.
    return str(max(Decimal(value) - Decimal(before), Decimal(0)) / Decimal(seconds))


def line(rates: Sequence[PoolUse], *, has_shares: bool = True) -> str:
    """Return the power and the bandwidth of the machine, the first of them with its shares; "" if none is known."""
    event, parts = main_shares(rates) if has_shares else ("", {})
    texts = [f"{pool} {part * 100:.0f} %" for pool, part in parts.items() if part or pool is not Pool.FOREIGN]
    found = []
    for name, _, unit in _RATES:
        text = _sum([use for use in rates if use.event == name], unit)
        if text != "-":
            found.append(f"{text} ({', '.join(texts)})" if name == event else text)
    return ", ".join(found)


def bar(pools: Sequence[PoolUse], *, has_blocks: bool) -> tuple[str, ...]:
    """Return the shares of the energy, or else of the traffic, and a bar of them; () if they are not known."""
    event, found = main_shares(pools)
    parts = {pool: part for pool, part in found.items() if part or pool is not Pool.FOREIGN}
    if not parts:
        return ()
    marks = dict(zip(Pool, _BLOCKS if has_blocks else _ASCII, strict=True))
    texts = [f"{marks[pool]} {pool} {part * 100:.0f} %" for pool, part in parts.items()]
    ends = [round(sum(list(parts.values())[: index + 1]) * _BAR_WIDTH) for index in range(len(parts))]
    drawn = "".join(marks[pool] * (end - begin) for pool, begin, end in zip(parts, [0, *ends], ends, strict=False))
    return f"{'energy' if event == ENERGY else 'traffic'}: {', '.join(texts)}", drawn


def _table(pools: Sequence[PoolUse], columns: Iterable[tuple[str, str, str]], *, by_domain: bool) -> Table:
    events = [each for each in columns if any(use.event == each[0] for use in pools)]
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
    return Table(tuple(Column(heading, right=heading not in texts) for heading in headings), tuple(rows))


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
