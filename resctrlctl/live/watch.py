# SPDX-License-Identifier: Apache-2.0
"""The verb ``watch``: what happens to workloads, a line each, until it is interrupted."""

from __future__ import annotations

import argparse
import os
import select
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal

from resctrlctl.connection.daemon import Daemon
from resctrlctl.live.recording import is_selected
from resctrlctl.screen.format import format_duration, format_message, format_time, shorten
from resctrlctl.screen.output import Json, Output
from resctrlctl.workloads import workload_table
from resctrlctl.workloads.selectors import name_of
from resctrlctl.workloads.workload_table import ENERGY, TRAFFIC, Line
from resctrlmond.api import signatures
from resctrlmond.api.exit_codes import FAILURE
from resctrlmond.api.types import Change, Usage, Workload
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.changes import ChangeKind
from resctrlmond.workloads.model.states import Quality

_NAMED = ((ENERGY, "core energy"), (TRAFFIC, "memory traffic"))
_KIND_WIDTH = max(map(len, ChangeKind))


def watch(args: argparse.Namespace, output: Output) -> int:
    """Print each change as a line of text or JSON. Raises CommandError when the daemon ends the stream."""
    selection = _Selection(args)
    _exit_with_the_reader()
    for reply in Daemon(args.socket).follow("watch the workloads", signatures.WATCH):
        for change in reply.changes:
            if (line := selection.line(change)) is None:
                continue
            if output.json is not Json.OFF:
                output.print_json(change)
            elif output.quiet:
                output.print_line(printable(change.key))
            else:
                output.print_line(text(change, line))
    raise AssertionError("a stream without end")


def _exit_with_the_reader() -> None:
    """Exit when the program that reads the output ends. The next change, whose write would fail, may be far off."""
    poll = select.poll()
    # Without events, poll(2) returns only for POLLERR and POLLHUP, and never for a file.
    poll.register(sys.stdout.fileno(), 0)

    def wait() -> None:
        poll.poll()
        os._exit(FAILURE)

    threading.Thread(target=wait, name="reader", daemon=True).start()


class _Selection:
    """The workloads and the kinds of changes that the command line names."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._patterns: list[str] = args.key
        self._filters = args.filter
        self._kinds = set(args.change) or set(ChangeKind)
        # By key: the workloads that were chosen, as they were last: a removed one comes without its record.
        self._chosen: dict[str, Line] = {}

    def line(self, change: Change) -> Line | None:
        """Return the workload of a change that is to be printed, with its totals; None for another change."""
        before = line = self._chosen.pop(change.key, None)
        if change.workload is not None:
            line = _line(change, change.workload)
            # A filter, such as state=active, may not match the end of a run that it matched before.
            if not (before and before.workload.generation == line.workload.generation) and not self._is_chosen(line):
                return None
            self._chosen[change.key] = line
        return line if change.change in self._kinds else None

    def _is_chosen(self, line: Line) -> bool:
        names = (line.workload.key, name_of(line.workload.attributes), line.attribute("container.name"))
        return is_selected(self._patterns, names) and bool(workload_table.selected([line], self._filters))


def _line(change: Change, workload: Workload) -> Line:
    usage = Usage(
        workload=workload,
        read_at=workload.completed_at,
        read_ns=workload.completed_ns,
        totals=change.totals or [],
        levels=[],
        error=change.error,
    )
    return Line(usage, name_of(workload.attributes) or workload.key)


def text(change: Change, line: Line) -> str:
    """Return a change as a line of text: ``TIME KIND NAME: DETAILS``."""
    details = "; ".join(_ended(line) if change.change is ChangeKind.ENDED else _details(change, line))
    name = printable(line.selector)
    return f"{format_time(change.at)}  {change.change:{_KIND_WIDTH}}  {name}{': ' if details else ''}{details}"


def _details(change: Change, line: Line) -> Iterator[str]:
    workload = change.workload
    if workload is None:
        return
    yield workload.state
    classes = [class_ for class_ in workload_table.class_names(workload) if class_ != "/"]
    if classes:
        yield f"class {' '.join(classes)}"
    if line.reason:
        yield format_message(line.reason)


def _ended(line: Line) -> Iterator[str]:
    age = "" if line.age_s is None else f" in {format_duration(line.age_s)}"
    found = {total.event: total for total in line.usage.totals}
    used = [
        f"{shorten(Decimal(total.value), 'J' if event == ENERGY else 'B')} {name}"
        + ("" if total.quality is Quality.EXACT else f" ({total.quality})")
        for event, name in _NAMED
        if (total := found.get(event)) is not None and total.value is not None
    ]
    yield f"{', '.join(used)}{age}" if used else f"no known use{age}"
    if line.reason:
        yield format_message(line.reason)
