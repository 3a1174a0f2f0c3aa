# SPDX-License-Identifier: Apache-2.0
"""The verb report: what ended workloads used, from the entries of resctrlmond in the journal."""

from __future__ import annotations

import argparse
import contextlib
import csv
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Context, Decimal, localcontext
from typing import Any

import msgspec

from resctrlctl.base.defaults import SOCKET
from resctrlctl.base.errors import OK, CommandError
from resctrlctl.screen.format import format_count, format_duration, format_time, shorten
from resctrlctl.screen.layout import Column, Row, Table
from resctrlctl.screen.output import Json, Output
from resctrlmond.api.exit_codes import DENIED, USAGE
from resctrlmond.resctrl.counters import EVENTS, Kind
from resctrlmond.resctrl.errors import printable
from resctrlmond.service.message_ids import MessageId
from resctrlmond.workloads.model.states import Quality, worst

UNIT = "resctrlmond.service"
JOURNALCTL = "journalctl"
# Journal files that are kept over a boot.
_PERSISTENT = "/var/log/journal/*/*.journal"
_QUALITIES = tuple(Quality)
_ENERGY, _TRAFFIC = "core_energy", "mbm_total_bytes"
_COUNTED = tuple(name for name, event in EVENTS.items() if event.kind is Kind.CUMULATIVE)
FIELDS = (
    *("_SYSTEMD_UNIT", "_UID", "MESSAGE_ID"),
    *(
        f"RESCTRLMON_{name}"
        for name in ("RUN", "KEY", "CLASS", "NAMESPACE", "POD", "UNIT", "USER", "DURATION_USEC", "QUALITY")
    ),
    *(f"RESCTRLMON_{kind}_{name.upper()}" for name in _COUNTED for kind in ("TOTAL", "QUALITY")),
)
_RUN = re.compile("[0-9a-f]{32}")
_INTEGER = re.compile("[0-9]{1,18}")
_NUMBER = re.compile(r"[0-9]{1,24}(\.[0-9]{1,9})?")
# A total has up to 24 digits and 9 decimals: the default of 28 digits would round a sum.
_EXACTLY = Context(prec=64)


class Entry(msgspec.Struct, frozen=True):
    """The run of a workload that has ended: its totals by event, None if unknown, each with its quality."""

    run: str
    names: dict[str, str]
    seconds: float
    quality: Quality
    totals: dict[str, tuple[Decimal | None, Quality]]


class EventSum(msgspec.Struct, frozen=True, rename="camel"):
    """The sum of an event over runs: of those with a number, whose count is ``runs``."""

    event: str
    unit: str
    value: str | None
    quality: Quality
    runs: int
    unknown_runs: int


class Group(msgspec.Struct, frozen=True, rename="camel"):
    """The runs of one namespace, unit, user, key, class or pod."""

    name: str
    runs: int
    duration_sec: float
    quality: Quality
    totals: list[EventSum]

    def total(self, event: str) -> EventSum | None:
        """Return the sum of an event; None if no run has it."""
        return next((total for total in self.totals if total.event == event), None)


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """The use of ended workloads. ``journal_since`` is the oldest entry of the journal, None if it is empty.

    ``invalid_entries`` are not counted, and ``duplicate_entries`` only once.
    """

    by: str
    groups: list[Group]
    invalid_entries: int
    duplicate_entries: int
    journal_since: str | None
    journal_is_volatile: bool


def report(args: argparse.Namespace, output: Output) -> int:
    """Print the sums over the workloads that ended in a time. Return the exit status."""
    times = [f"--{name}={value}" for name in ("since", "until") if (value := getattr(args, name)) is not None]
    entries: dict[str, Entry] = {}
    invalid = duplicates = 0
    for fields in journal_entries(*times):
        entry = entry_of(fields)
        if entry is None:
            invalid += 1
        elif entry.run in entries:
            duplicates += 1
        else:
            entries[entry.run] = entry
    found = Report(
        by=args.by,
        groups=grouped(entries.values(), args.by),
        invalid_entries=invalid,
        duplicate_entries=duplicates,
        journal_since=_journal_since(),
        journal_is_volatile=not glob.glob(_PERSISTENT),
    )
    if output.json is not Json.OFF:
        output.print_json(found)
    elif args.csv:
        _print_csv(found, legend=output.legend)
    else:
        output.print_blocks([table(found)])
    if args.socket != SOCKET:
        output.note(f"the journal has only the workloads of {UNIT}, not those of the daemon at {args.socket}")
    if invalid:
        output.note(f"not counted: {format_count(invalid, 'entry', 'entries')} of the journal with invalid fields")
    return OK


def is_of_service(fields: dict[str, Any]) -> bool:
    """Whether the entry is of resctrlmond, by the fields that journald sets itself: each user can send the others."""
    trusted = fields.get("_SYSTEMD_UNIT"), fields.get("_UID"), fields.get("MESSAGE_ID")
    return trusted == (UNIT, "0", MessageId.ENDED)


def entry_of(fields: dict[str, Any]) -> Entry | None:
    """Return the entry; None if a field is missing or invalid."""
    # journalctl prints a field that is binary as a list of numbers, and one that was sent twice as a list of texts.
    if not all(isinstance(fields.get(name, ""), str) for name in FIELDS):
        return None
    run, key, micros = (fields.get(f"RESCTRLMON_{name}", "") for name in ("RUN", "KEY", "DURATION_USEC"))
    qualities = {name: fields.get(f"RESCTRLMON_QUALITY_{name.upper()}", "") for name in _COUNTED}
    numbers = {name: fields.get(f"RESCTRLMON_TOTAL_{name.upper()}", "") for name in _COUNTED}
    is_valid = (
        _RUN.fullmatch(run)
        and key
        and _INTEGER.fullmatch(micros)
        and fields.get("RESCTRLMON_QUALITY") in _QUALITIES
        and all(quality in ("", *_QUALITIES) for quality in qualities.values())
        and all(not number or (qualities[name] and _NUMBER.fullmatch(number)) for name, number in numbers.items())
    )
    if not is_valid:
        return None
    names = {name: fields.get(f"RESCTRLMON_{name.upper()}", "") for name in ("namespace", "pod", "unit", "user")}
    pod = f"{names['namespace']}/{names['pod']}" if names["pod"] else ""
    return Entry(
        run,
        names | {"key": key, "class": fields.get("RESCTRLMON_CLASS", ""), "pod": pod},
        int(micros) / 1e6,
        Quality(fields["RESCTRLMON_QUALITY"]),
        {
            name: (Decimal(numbers[name]) if numbers[name] else None, Quality(quality))
            for name, quality in qualities.items()
            if quality
        },
    )


def grouped(entries: Iterable[Entry], by: str) -> list[Group]:
    """Return the sums by a name of the entries, that with most energy first, then that with most traffic and time."""
    parts: dict[str, list[Entry]] = {}
    for entry in entries:
        parts.setdefault(entry.names[by], []).append(entry)
    groups = [_group(name, part) for name, part in parts.items()]
    return sorted(groups, key=lambda group: (*(-_value(group, event) for event in (_ENERGY, _TRAFFIC)), group.name))


def _value(group: Group, event: str) -> Decimal:
    total = group.total(event)
    return Decimal(total.value) if total and total.value is not None else Decimal(-1)


def _group(name: str, entries: Sequence[Entry]) -> Group:
    events = [event for event in _COUNTED if any(event in entry.totals for entry in entries)]
    return Group(
        name=name,
        runs=len(entries),
        duration_sec=round(sum(entry.seconds for entry in entries), 6),
        quality=worst(*(entry.quality for entry in entries)),
        totals=[_sum(event, entries) for event in events],
    )


def _sum(event: str, entries: Iterable[Entry]) -> EventSum:
    # A run without any total, such as one that never had an RMID, may have used everything.
    parts = [
        entry.totals.get(event, (None, Quality.UNKNOWN))
        for entry in entries
        if event in entry.totals or not entry.totals
    ]
    numbers = [number for number, _ in parts if number is not None]
    with localcontext(_EXACTLY):
        value = f"{sum(numbers, Decimal(0)):f}" if numbers else None
    quality = worst(*(quality for _, quality in parts))
    return EventSum(event, EVENTS[event].unit, value, quality, len(numbers), len(parts) - len(numbers))


# -- output


def table(found: Report) -> Table:
    """Return the table, with the columns of the events that an entry has."""
    events = [
        (event, heading, unit)
        for event, heading, unit in ((_TRAFFIC, "TRAFFIC", "B"), (_ENERGY, "ENERGY", "J"))
        if any(group.total(event) for group in found.groups)
    ]
    columns = (
        Column(found.by.upper()),
        *(Column(heading, right=True) for heading in ("RUNS", "TIME", *(head for _, head, _ in events))),
        Column("QUALITY"),
    )
    rows = [
        Row(
            (
                printable(group.name) or "-",
                str(group.runs),
                format_duration(group.duration_sec),
                *(_cell(group.total(event), unit) for event, _, unit in events),
                str(group.quality),
            )
        )
        for group in found.groups
    ]
    return Table(columns, tuple(rows), _footer(found))


def _cell(total: EventSum | None, unit: str) -> str:
    return "-" if total is None or total.value is None else shorten(Decimal(total.value), unit)


def _footer(found: Report) -> str:
    runs = sum(group.runs for group in found.groups)
    ended = "No ended workload was found." if not runs else f"{format_count(runs, 'run')} ended."
    since = "The journal is empty."
    if found.journal_since is not None:
        since = f"The journal begins at {format_time(found.journal_since)}."
    return f"{ended} {since}" + (" It is not kept across reboots." if found.journal_is_volatile else "")


def _print_csv(found: Report, *, legend: bool) -> None:
    events = [event for event in _COUNTED if any(group.total(event) for group in found.groups)]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if legend:
        heads = (head for event in events for head in (event, f"{event}_quality"))
        writer.writerow([found.by, "runs", "duration_sec", "quality", *heads])
    for group in found.groups:
        cells: list[object] = [printable(group.name), group.runs, f"{group.duration_sec:f}", group.quality]
        for event in events:
            total = group.total(event)
            cells += ("", "") if total is None else (total.value or "", total.quality)
        writer.writerow(cells)


# -- the journal


def journal_entries(*arguments: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of resctrlmond about ended workloads, the oldest first. Raises CommandError.

    ``arguments`` are further ones of journalctl(1).
    """
    matches = (f"_SYSTEMD_UNIT={UNIT}", "_UID=0", f"MESSAGE_ID={MessageId.ENDED}")
    fields = f"--output-fields={','.join(FIELDS)}"
    with tempfile.TemporaryFile() as errors:
        with _journalctl("--all", fields, *arguments, *matches, stderr=errors.fileno()) as process:
            assert process.stdout is not None
            for line in process.stdout:
                # It prints "-- No entries --" if there are none.
                if line.startswith(b"{") and is_of_service(found := _decoded(line)):
                    yield found
        errors.seek(0)
        message = errors.read(10000).decode("utf-8", "replace").strip()
    if "not seeing messages from" in message or "insufficient permissions" in message:
        raise CommandError(
            "cannot read the entries of resctrlmond in the journal: this user has no access. Run resctrlctl as root, "
            "or add the user to the group systemd-journal",
            DENIED,
        )
    if process.returncode:
        wrong_time = "parse timestamp" in message or "--since" in message
        reason = printable(" ".join(message.splitlines())) or f"exit status {process.returncode}"
        if wrong_time:
            raise CommandError(
                f'the time of --since or --until is not valid: journalctl: "{reason}". See systemd.time(7)',
                USAGE,
            )
        raise CommandError(f'cannot read the journal: journalctl: "{reason}". Check it with: journalctl --verify')


def _decoded(line: bytes) -> dict[str, Any]:
    """Return the fields of a line; of one that is not valid JSON, those by which it is counted as invalid."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    trusted = {"_SYSTEMD_UNIT": UNIT, "_UID": "0", "MESSAGE_ID": MessageId.ENDED}
    return fields if isinstance(fields, dict) else trusted


def _journal_since() -> str | None:
    """Return the time of the oldest entry of the journal (RFC 3339, UTC); None if there is none."""
    with _journalctl("--output-fields=MESSAGE_ID", stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        micros = int(json.loads(line)["__REALTIME_TIMESTAMP"])
        return datetime.fromtimestamp(micros // 10**6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return None


def _journalctl(*arguments: str, stderr: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [JOURNALCTL, "--output=json", "--no-pager", *arguments],
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    except OSError as error:
        raise CommandError(
            f"cannot read the journal: {JOURNALCTL}: {error.strerror}. Install systemd, which has it"
        ) from error
