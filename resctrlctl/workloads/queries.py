# SPDX-License-Identifier: Apache-2.0
"""The verbs that only read workloads, groups and classes: ``list`` and ``show``."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence

from resctrlctl.base.errors import OK, CommandError, print_error
from resctrlctl.base.structs import Struct, to_json
from resctrlctl.connection.replies import ReadReply, Usage
from resctrlctl.screen.layout import Block
from resctrlctl.screen.output import Json, Output
from resctrlctl.screen.width import has_blocks
from resctrlctl.workloads import workload_table
from resctrlctl.workloads.selectors import call_for
from resctrlctl.workloads.source import Source
from resctrlmond.api.exit_codes import NO_SUCH_WORKLOAD, USAGE
from resctrlmond.resctrl.errors import ResctrlError, printable

TYPE_CHECKING = False  # importing typing takes longer than this module
if TYPE_CHECKING:
    from typing import TypeAlias

    from resctrlctl.connection.host_replies import Foreign, ListPodsReply, Unwatched
    from resctrlctl.workloads.directories import ClassReport, ForeignReport

    _Others: TypeAlias = tuple[list[Foreign], list[Unwatched]]
    Report: TypeAlias = ReadReply | ForeignReport | ClassReport


# The time between the two readings of --rate.
RATE_S = 1.0


class UsageList(Struct):
    """The JSON output of ``list``."""

    usages: list[Usage]
    foreign: list[Foreign]
    unwatched: list[Unwatched]


def list_workloads(args: argparse.Namespace, output: Output) -> int:
    """Print the workloads with what they use; return the exit status."""
    source = Source(args, output)
    if args.pods:
        return _list_pods(args, source, output)
    if output.quiet and output.json is Json.OFF and not (args.filter or args.sort or args.watch or args.units):
        # Completion asks for the keys with each key that is pressed: no counter is read for them.
        for workload in sorted(source.workloads().workloads, key=lambda workload: workload.key):
            if args.all or not workload.state.is_over:
                output.print_line(printable(workload.key))
        return OK
    if args.units:
        from resctrlctl.workloads import unit_tree  # noqa: PLC0415 - a list of workloads does not need it

        unit_tree.view(args.sort)  # a wrong name is reported before anything is read
    else:
        workload_table.check_columns([*args.columns, *filter(None, [args.sort])])
    before = source.usages(with_ended=args.all) if args.rate or args.watch else None
    while True:
        if before is not None:
            time.sleep(args.watch or RATE_S)
            source.refresh()
        usages = source.usages(with_ended=args.all)
        others = (source.workloads().foreign, source.unwatched()) if args.all else ([], [])
        _print_list(args, output, usages, before or [], others)
        if not args.watch:
            return OK
        before = usages


def _print_list(
    args: argparse.Namespace, output: Output, usages: list[Usage], before: list[Usage], others: _Others
) -> None:
    foreign, unwatched = others
    found = workload_table.selected(workload_table.lines(usages, before), args.filter)
    if args.units:
        _print_units(args, output, found)
        return
    if args.sort:
        found = workload_table.in_order(found, args.sort)
    if output.json is not Json.OFF:
        output.print_json(UsageList([line.usage for line in found], foreign, unwatched))
    elif output.quiet:
        for line in found:
            output.print_line(printable(line.workload.key))
    else:
        blocks: list[Block] = [workload_table.table(found, args.columns, output.width, nothing=_nothing_listed(args))]
        if foreign and not args.filter:
            from resctrlctl.workloads.render import render_foreign_list  # noqa: PLC0415 - a list of workloads does not need it

            blocks.append(render_foreign_list(foreign))
        if unwatched and not args.filter:
            from resctrlctl.workloads.render import render_unwatched  # noqa: PLC0415

            blocks.append(render_unwatched(unwatched))
        output.print_blocks(blocks, is_screen=bool(args.watch))


def _print_units(args: argparse.Namespace, output: Output, found: list[workload_table.Line]) -> None:
    from resctrlctl.workloads import unit_tree  # noqa: PLC0415 - a list of workloads does not need it

    order = unit_tree.view(args.sort)
    if output.json is not Json.OFF:
        output.print_json(unit_tree.uses(found, order))
    elif output.quiet:
        for use in unit_tree.uses(found, order).units:
            if use.path:
                output.print_line(use.path[-1])
    else:
        block = unit_tree.table(found, order, has_blocks=has_blocks(), nothing=_nothing_listed(args))
        output.print_blocks([block], is_screen=bool(args.watch))


def _list_pods(args: argparse.Namespace, source: Source, output: Output) -> int:
    _print_pods(args, source.pods(), output)
    while args.watch:
        time.sleep(args.watch)
        source.refresh()
        _print_pods(args, source.pods(), output)
    return OK


def _print_pods(args: argparse.Namespace, reply: ListPodsReply, output: Output) -> None:
    if output.json is not Json.OFF:
        output.print_json(reply)
    elif output.quiet:
        for pod in reply.pods:
            output.print_line(printable(pod.key))
    else:
        from resctrlctl.workloads.render import render_pods  # noqa: PLC0415 - a list of workloads does not need it

        output.print_blocks(render_pods(reply), is_screen=bool(args.watch))


def _nothing_listed(args: argparse.Namespace) -> str:
    """Return the footer of an empty list."""
    text = "No workload matches the filter." if args.filter else "No workload."
    return text if args.all else f"{text} 'resctrlctl list --all' also lists those that have ended."


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
                from resctrlctl.workloads.render import render_workload  # noqa: PLC0415 - list does not need it

                output.print_blocks(render_workload(report, is_raw=args.raw))
            else:
                from resctrlctl.workloads import render_directory  # noqa: PLC0415 - see _read_directories()

                output.print_blocks(render_directory.blocks(report, output.width))
    return result


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


def _scalars(subject: Struct) -> dict[str, str]:
    """Return the texts, numbers and truth values among the fields, with those that are absent in JSON."""
    found = {}
    for name, kind in type(subject).__annotations__.items():
        value = getattr(subject, name)
        if value is None and kind in ("str | None", "int | None", "float | None"):
            value = ""
        if isinstance(value, (str, int, float)):
            found[subject.json_names[name]] = str(value) if isinstance(value, str) else to_json(value)
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
    from resctrlctl.workloads import directories  # noqa: PLC0415 - imports the daemon's lower layers, see _open()

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
