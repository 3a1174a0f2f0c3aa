# SPDX-License-Identifier: Apache-2.0
"""Run all checks, and print what they found."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from resctrlctl.base.defaults import SOCKET
from resctrlctl.base.errors import DOCTOR_ERROR, DOCTOR_WARNING, OK
from resctrlctl.doctor import energy, exact_units, kernel, resctrl, rivals, runtimes, service
from resctrlctl.doctor.finding import Finding, Report, Severity
from resctrlctl.doctor.host import Host
from resctrlctl.screen.format import format_count
from resctrlctl.screen.layout import Block, Column, Row, Sheet, Table, Tone
from resctrlctl.screen.output import Json, Output
from resctrlmond.resctrl.errors import ResctrlError, printable

# From the processor to the figure. The name completes "... was not examined".
CHECKS: tuple[tuple[str, Callable[[Host], Iterator[Finding]]], ...] = (
    ("resctrl", resctrl.check_support),
    ("kernel-parameter", kernel.check_rdt_parameter),
    ("mount", resctrl.check_mount),
    ("events", resctrl.check_events),
    ("kernel-mode", resctrl.check_kernel_mode),
    ("energy", energy.check),
    ("rmids", resctrl.check_rmids),
    ("configuration", service.check_configuration),
    ("daemon", service.check_unit),
    ("space", service.check_space),
    ("socket", service.check_socket),
    ("bus", service.check_bus),
    ("exact-units", exact_units.check),
    ("hooks", runtimes.check_hooks),
    ("nri", runtimes.check_nri),
    ("runtime-groups", runtimes.check_runtime_groups),
    ("runtime-classes", runtimes.check_runtime_classes),
    ("rivals", rivals.check),
)
_STATUS = {Severity.WARNING: DOCTOR_WARNING, Severity.ERROR: DOCTOR_ERROR}
_TONES = {Severity.NOTE: Tone.NORMAL, Severity.WARNING: Tone.WARNING, Severity.ERROR: Tone.BAD}
# The labels "Why:" and "Fix:" with their indentation.
_INDENT = 7
# Between the columns of a table.
_GAP = 2


def doctor(args: argparse.Namespace, output: Output) -> int:
    """Examine this machine, print the findings, and return the exit status for the worst one."""
    report = examine(Host(socket="" if args.socket == SOCKET else args.socket))
    if output.json is not Json.OFF:
        output.print_json(report)
    else:
        # The lines are wrapped already. A command must not be cut.
        replace(output, full=True).print_blocks(blocks(report, output.width, is_quiet=output.quiet))
    return _STATUS.get(report.worst, OK)


def examine(host: Host) -> Report:
    """Run all checks; for a daemon of another socket, only that of the socket."""
    # The daemon of another socket, such as that of a simulation, does not serve this machine's resctrl.
    checks = (("socket", service.check_socket),) if host.socket else CHECKS
    findings = [finding for name, check in checks for finding in _found(name, check, host)]
    return Report(max((finding.severity for finding in findings), key=lambda each: each.rank), findings)


def _found(name: str, check: Callable[[Host], Iterator[Finding]], host: Host) -> Iterator[Finding]:
    try:
        yield from check(host)
    except PermissionError as error:
        yield _not_examined(name, f"{error.filename}: {error.strerror}", ("sudo resctrlctl doctor",))
    except (OSError, ResctrlError, ValueError) as error:
        yield _not_examined(name, str(error), ())


def _not_examined(name: str, reason: str, fix: tuple[str, ...]) -> Finding:
    return Finding(Severity.NOTE, name, f"{name} was not examined: {reason}", "", fix)


def blocks(report: Report, width: int | None, *, is_quiet: bool = False) -> list[Block]:
    """Return a sheet for each finding, the worst first, and a table of what works.

    With ``is_quiet``, return only warnings and errors.
    """
    in_order = sorted(report.findings, key=lambda finding: -finding.severity.rank)
    least = Severity.WARNING if is_quiet else Severity.NOTE
    result: list[Block] = [_sheet(finding, width) for finding in in_order if finding.severity.rank >= least.rank]
    if not is_quiet:
        names = [finding.check for finding in in_order if finding.severity is Severity.OK]
        room = None if width is None else width - max(map(len, names), default=0) - _GAP
        rows = tuple(
            Row((finding.check if index == 0 else "", line))
            for finding in in_order
            if finding.severity is Severity.OK
            for index, line in enumerate(_wrapped(finding.what, room))
        )
        result.append(Table((Column("OK"), Column("FINDING")), rows, _summary(report)))
    return result


def _sheet(finding: Finding, width: int | None) -> Sheet:
    room = None if width is None else width - _INDENT
    lines = [*_wrapped(f"{finding.severity}: {finding.what}", width)]
    fields = [("Why", tuple(_wrapped(finding.why, room))), ("Fix", tuple(map(printable, finding.fix)))]
    title = "\n".join(lines)
    shown = tuple((label, values) for label, values in fields if values)
    return Sheet(title, shown, _TONES[finding.severity], whole="Fix")


def _wrapped(text: str, width: int | None) -> list[str]:
    """Return the lines of a text. Paths and other long words are not broken."""
    if width is None:
        return [printable(text)] if text else []
    return textwrap.wrap(printable(text), max(width, 20), break_long_words=False, break_on_hyphens=False)


def _summary(report: Report) -> str:
    counts = Counter(finding.severity for finding in report.findings)
    words = [
        format_count(counts[severity], severity.value)
        for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE)
        if counts[severity]
    ]
    return f"{', '.join([*words, f'{counts[Severity.OK]} ok'])}."
