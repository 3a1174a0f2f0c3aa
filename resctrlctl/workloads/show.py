# SPDX-License-Identifier: Apache-2.0
"""The verb ``show``: one workload, foreign group or class, with its counters."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from resctrlctl.base.errors import OK, CommandError, print_error
from resctrlctl.screen.output import Json, Output, to_json
from resctrlctl.workloads.render import render_workload
from resctrlctl.workloads.selectors import call_for
from resctrlctl.workloads.source import Source
from resctrlmond.api.exit_codes import NO_SUCH_WORKLOAD, USAGE
from resctrlmond.api.types import Proof, ReadReply
from resctrlmond.resctrl.errors import ResctrlError, printable

if TYPE_CHECKING:
    from resctrlctl.workloads.directories import ClassReport, ForeignReport


class ProvenReply(ReadReply, frozen=True, kw_only=True):
    """A workload with its counters, and with the proofs on which its quality rests, as ``Get`` returns them."""

    proofs: list[Proof]


Report: TypeAlias = "ReadReply | ForeignReport | ClassReport"


def show(args: argparse.Namespace, output: Output) -> int:
    """Print each workload, foreign group or class with its counters; return the status of the first that fails."""
    source = Source(args, output)
    # A rate needs a second reading, so a script that asks for other properties does not wait for it.
    with_rates = not args.property or any(name.endswith(".rate") for name in args.property)
    result = OK
    printed = False
    for key in args.key:
        try:
            reports = _read(source, key, with_rates=with_rates)
            if args.why:
                reports = [_with_proofs(source, report) for report in reports]
        except CommandError as error:
            print_error(str(error))
            result = result or error.status
            continue
        for report in reports:
            if args.property:
                _print_properties(properties(report), args.property, output, is_value=args.value)
                continue
            if output.json is not Json.OFF:
                output.print_json(report)
                continue
            if printed:
                output.print_line("")
            printed = True
            if isinstance(report, ReadReply):
                proofs = report.proofs if isinstance(report, ProvenReply) else ()
                output.print_blocks(render_workload(report, proofs, is_raw=args.raw))
            else:
                from resctrlctl.workloads import render_directory  # noqa: PLC0415 - see _read_directories()

                output.print_blocks(render_directory.blocks(report, output.width))
    return result


def _with_proofs(source: Source, report: Report) -> Report:
    if not isinstance(report, ReadReply):
        return report
    return ProvenReply(**msgspec.structs.asdict(report), proofs=source.proofs(report.workload.key))


def properties(report: Report) -> dict[str, str]:
    """Return the properties of a workload, a foreign group or a class, by name: unknown values are "".

    They are the attributes of a workload, the scalar fields of the report, the value, the unit and the quality of
    each total, the limits of a class, and the value of each counter.
    """
    if isinstance(report, ReadReply):
        # Callers choose the attributes: they must not hide a field.
        found = report.workload.attributes | _scalars(report.workload)
        for total in report.totals:
            found[total.event] = total.value or ""
            found[f"{total.event}.unit"] = total.unit
            found[f"{total.event}.quality"] = str(total.quality)
    else:
        from resctrlctl.workloads import render_directory  # noqa: PLC0415 - see _read_directories()

        found = render_directory.properties(report)
    return found | {f"{reading.domain}/{reading.event}": reading.value or "" for reading in report.readings}


def _scalars(subject: msgspec.Struct) -> dict[str, str]:
    """Return the texts, numbers and truth values among the fields, with those that are absent in JSON."""
    found = {}
    for field in msgspec.structs.fields(subject):
        value = getattr(subject, field.name)
        if value is None and field.type in (str | None, int | None, float | None):
            value = ""
        if isinstance(value, (str, int, float)):
            found[field.encode_name] = str(value) if isinstance(value, str) else to_json(value)
    return found


def _print_properties(found: dict[str, str], names: Sequence[str], output: Output, *, is_value: bool) -> None:
    for name in names:
        if name not in found:
            known = ", ".join(map(printable, sorted(found)))
            raise CommandError(f"there is no property {name!r}. The properties are: {known}", USAGE)
        value = printable(found[name])
        output.print_line(value if is_value else f"{name}={value}")


def _read(source: Source, key: str, *, with_rates: bool) -> Sequence[Report]:
    """Return the workload with that key or selector, or else the foreign groups and the class of that name."""
    try:
        return [call_for(key, source.read, lambda: source.workloads().workloads, is_change=False)]
    except CommandError as error:
        # The path of a directory is not a valid key.
        if error.name not in ("NoSuchWorkload", "InvalidKey") or not key:
            raise
        return _read_directories(source, key, error, with_rates=with_rates)


def _read_directories(source: Source, text: str, unknown: CommandError, *, with_rates: bool) -> Sequence[Report]:
    # A workload is shown without the layers that read the resctrl filesystem, which double the time of the verb.
    from resctrlctl.workloads import directories  # noqa: PLC0415

    listed = source.workloads()
    found: list[Report] = [
        directories.read_foreign(
            group, functools.partial(source.read_foreign, group), with_rates=with_rates, is_here=source.is_here
        )
        for group in listed.foreign
        if directories.is_named(group, text)
    ]
    if not source.is_here:
        if not found:
            raise CommandError(
                f"{unknown}. No foreign group has this name or path either, and classes are shown only on their host",
                NO_SUCH_WORKLOAD,
                unknown.name,
            )
        return found
    try:
        tree = source.tree()
        if (class_ := directories.class_of(tree, text)) is not None:
            usages = source.usages(with_ended=False)
            found.append(directories.read_class(tree, class_, listed, usages, with_rates=with_rates))
    except ResctrlError as error:
        if not found:
            message = f"{unknown}. The classes cannot be read: {error}"
            raise CommandError(message, NO_SUCH_WORKLOAD, unknown.name) from error
    if not found:
        raise CommandError(
            f"cannot show {text!r}: no workload, no foreign group and no class has this key, name or path. "
            "See: resctrlctl list --all, resctrlctl classes",
            NO_SUCH_WORKLOAD,
            "NoSuchWorkload",
        )
    return found
