# SPDX-License-Identifier: Apache-2.0
"""The verb ``top``: show what workloads use now, again and again, on the whole terminal or as lines of text."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

import msgspec

from resctrlctl.base.errors import OK, CommandError
from resctrlctl.connection.daemon import Daemon
from resctrlctl.host import machine
from resctrlctl.live.top_view import Painted, screen
from resctrlctl.screen.output import Json, Output
from resctrlctl.screen.width import has_blocks
from resctrlctl.workloads import workload_table
from resctrlctl.workloads.entries import By, Entry, View, entries
from resctrlctl.workloads.workload_table import ENERGY, TRAFFIC, Line
from resctrlmond.api import signatures
from resctrlmond.api.types import (
    MachineReply,
    PoolUse,
    ReadAllRequest,
    StatusReply,
    Usage,
)
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.states import Pool


class Sample(msgspec.Struct, frozen=True):
    """The state of the daemon and the use of all workloads at one time.

    ``rates`` are what the machine's pools used per second between their last two readings; () if this is not known.
    """

    status: StatusReply
    lines: list[Line]
    rates: Sequence[PoolUse] = ()

    @property
    def machine(self) -> str:
        """The use of the whole machine, in words."""
        return machine.line(self.rates)


class TopRow(msgspec.Struct, frozen=True, rename="camel"):
    """A row in the JSON output of ``top``: the fields of ``Entry``; power and bandwidth with 6 decimals."""

    name: str
    workloads: int
    power: str | None
    bandwidth: str | None
    llc: str | None
    energy: str | None
    age_s: float | None
    quality: str


class TopReply(msgspec.Struct, frozen=True, rename="camel"):
    """The JSON output of ``top``: one for each interval. See ``StatusReply`` for the numbers of RMIDs.

    ``read_at`` is the time of the reading (RFC 3339, UTC). ``pools`` has the part of each pool of the machine, from 0
    to 1 with 6 decimals, of the use of ``pools_event`` in the interval; ``pools_watts`` and
    ``pools_bytes_per_second`` what each used. They are null if they are unknown.
    """

    read_at: str
    rmids: int
    rmids_used: int
    pending: int
    in_limbo: bool | None
    pools_event: str | None
    pools: dict[Pool, str] | None
    pools_watts: dict[Pool, str] | None
    pools_bytes_per_second: dict[Pool, str] | None
    by: By
    rows: Sequence[TopRow]


class Sampler:
    """Reads the use of all workloads. Power and bandwidth of a sample are those since the one before."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._daemon = Daemon(args.socket)
        self._filters = args.filter
        self._before: list[Usage] = []
        self._pools = _Pools(self._daemon, args.delay)

    def take(self) -> Sample:
        """Read now. Raises CommandError."""
        action = "read what the workloads use"
        self._pools.begin()
        status = self._daemon.call(action, signatures.STATUS)
        pages = self._daemon.stream(action, signatures.READ_ALL, ReadAllRequest(domains=True))
        usages = [usage for page in pages for usage in page.usages]
        lines = workload_table.lines(usages, self._before)
        self._before = usages
        return Sample(status, workload_table.selected(lines, self._filters), self._pools.rates())


class _Pools:
    """Reads the pools of the machine beside the workloads.

    The daemon repeats a reading while groups are created and removed, and the figures of the workloads do not wait
    for that.
    """

    def __init__(self, daemon: Daemon, wait_s: float) -> None:
        self._daemon = daemon
        self._wait_s = wait_s
        self._before: MachineReply | None = None
        self._rates: Sequence[PoolUse] = ()
        self._reader: threading.Thread | None = None

    def begin(self) -> None:
        """Begin to read, unless an earlier reading has not ended."""
        if self._reader is None or not self._reader.is_alive():
            # A daemon thread, because the interpreter does not wait for it at its exit.
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()

    def rates(self) -> Sequence[PoolUse]:
        """Return what the pools used per second between the last two readings. Wait for one interval at most."""
        assert self._reader is not None
        self._reader.join(self._wait_s)
        return self._rates

    def _read(self) -> None:
        try:
            reply = self._daemon.call("read what the machine used", signatures.MACHINE)
            _, self._rates = machine.rates_since(reply, self._before)
            self._before = reply
        except (CommandError, ArithmeticError):
            self._rates = ()  # the daemon cannot read them now, or has a number that is not valid


def top(args: argparse.Namespace, output: Output) -> int:
    """Show what the workloads use until the user quits, or ``args.iterations`` times; return the exit status."""
    view = View(By(args.by), args.sort, args.reverse, has_blocks=has_blocks())
    sampler = Sampler(args)
    if not args.batch and output.json is Json.OFF and _is_terminal():
        # curses takes longer to import than all that the other forms need.
        from resctrlctl.live.top_terminal import run  # noqa: PLC0415

        return run(sampler.take, view, args.delay, args.iterations)
    return _print(sampler.take, view, args, output)


def _print(take: Callable[[], Sample], view: View, args: argparse.Namespace, output: Output) -> int:
    take()
    left = args.iterations
    is_first = True
    while left is None or left > 0:
        time.sleep(args.delay)
        sample = take()
        rows = entries(sample.lines, view)
        if output.json is not Json.OFF:
            output.print_json(_reply(sample, view.by, rows))
        else:
            if not is_first:
                output.print_line("")
            lines = screen(rows, sample.status, view, output.width, machine=sample.machine)
            if not output.legend:
                del lines[: [line.is_heading for line in lines].index(True) + 1]
            _print_lines(lines, output)
        is_first = False
        left = None if left is None else left - 1
    return OK


def _reply(sample: Sample, by: By, rows: Sequence[Entry]) -> TopReply:
    status = sample.status
    event, parts = machine.main_shares(sample.rates)
    return TopReply(
        read_at=utc_now(),
        rmids=status.rmids,
        rmids_used=status.rmids_used,
        pending=status.pending,
        in_limbo=status.in_limbo,
        pools_event=event or None,
        pools=_with_decimals(parts),
        pools_watts=_with_decimals(machine.sums(sample.rates, ENERGY)),
        pools_bytes_per_second=_with_decimals(machine.sums(sample.rates, TRAFFIC)),
        by=by,
        rows=[_row(entry) for entry in rows],
    )


def _with_decimals(figures: Mapping[Pool, Decimal]) -> dict[Pool, str] | None:
    return {pool: f"{figure:.6f}" for pool, figure in figures.items()} or None


def _row(entry: Entry) -> TopRow:
    power, bandwidth = (None if rate is None else f"{rate:.6f}" for rate in (entry.power, entry.bandwidth))
    llc, energy = (None if total is None else f"{total:f}" for total in (entry.llc, entry.energy))
    return TopRow(entry.name, entry.workloads, power, bandwidth, llc, energy, entry.age_s, entry.quality)


def _print_lines(lines: Sequence[Painted], output: Output) -> None:
    for line in lines:
        output.print_line(line.text.rstrip())


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
