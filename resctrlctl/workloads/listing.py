# SPDX-License-Identifier: Apache-2.0
"""The verb ``list``: the workloads, pods or units with what they use."""

from __future__ import annotations

import argparse
import time
from typing import TypeAlias

import msgspec

from resctrlctl.base.errors import OK
from resctrlctl.screen.layout import Block
from resctrlctl.screen.output import Json, Output
from resctrlctl.screen.width import has_blocks
from resctrlctl.workloads import unit_tree, workload_table
from resctrlctl.workloads.render import render_foreign_list, render_pods, render_unwatched
from resctrlctl.workloads.source import Source
from resctrlmond.api.types import Foreign, ListPodsReply, Unwatched, Usage
from resctrlmond.resctrl.errors import printable

_Others: TypeAlias = tuple[list[Foreign], list[Unwatched]]


# The time between the two readings of --rate.
RATE_S = 1.0


class UsageList(msgspec.Struct, frozen=True, rename="camel"):
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
            blocks.append(render_foreign_list(foreign))
        if unwatched and not args.filter:
            blocks.append(render_unwatched(unwatched))
        output.print_blocks(blocks, is_screen=bool(args.watch))


def _print_units(args: argparse.Namespace, output: Output, found: list[workload_table.Line]) -> None:
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
        output.print_blocks(render_pods(reply), is_screen=bool(args.watch))


def _nothing_listed(args: argparse.Namespace) -> str:
    """Return the footer of an empty list."""
    text = "No workload matches the filter." if args.filter else "No workload."
    return text if args.all else f"{text} 'resctrlctl list --all' also lists those that have ended."
