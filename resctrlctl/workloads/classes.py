# SPDX-License-Identifier: Apache-2.0
"""The verb ``classes``: the control groups of resctrl, with the cache ways and the bandwidth that each may use.

It only reads, and asks the daemon only for the workloads.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Container, Iterable, Sequence
from decimal import Decimal

import msgspec
from msgspec.structs import replace

from resctrlctl.base.defaults import SOCKET
from resctrlctl.base.errors import OK, CommandError
from resctrlctl.connection.daemon import Daemon, daemon_of
from resctrlctl.screen.format import format_class, shorten
from resctrlctl.screen.layout import Column, Row, Table, full_width
from resctrlctl.screen.output import Json, Output
from resctrlctl.workloads.workload_table import CACHE, ENERGY, TRAFFIC
from resctrlmond.api import signatures
from resctrlmond.api.exit_codes import NOT_RUNNING
from resctrlmond.api.types import ReadAllRequest, Usage
from resctrlmond.resctrl import kernel_files
from resctrlmond.resctrl.errors import NotMounted, ResctrlError, not_read
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.resctrl.tree import DEFAULT_PATH, Tree

# The resources whose values are masks of cache ways (Documentation/filesystems/resctrl.rst, "Schemata files").
_CACHES = ("L2", "L3")
_LIMITS = ("CLASS", "MODE", "RESOURCE", "DOMAINS", "LIMIT", "SIZE", "SHARED WITH")
_USE = ("WORKLOADS", "LLC", "TRAFFIC", "ENERGY")
_RIGHT = frozenset({"SIZE", *_USE})


class Allocation(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The part of one resource that a class may use, in the ``domains`` where it is the same.

    ``value`` is the kernel's text. For a cache, ``ways`` are the numbers of its ways, ``all_ways`` how many the cache
    has, ``size`` the bytes of these ways in each domain, and ``shared_with`` the classes that may use some of them.
    """

    resource: str
    domains: tuple[int, ...]
    value: str
    ways: tuple[int, ...] = ()
    all_ways: int = 0
    size: int = 0
    shared_with: tuple[str, ...] = ()


class Class(msgspec.Struct, frozen=True, rename="camel"):
    """A control group, "" for the root, with what its present workloads used; null if that is unknown.

    ``llc`` and ``traffic`` are in bytes, ``energy`` in joules. Workloads in several classes are not in these sums.
    """

    name: str
    mode: str
    allocations: list[Allocation]
    workloads: int | None = None
    llc: str | None = None
    traffic: str | None = None
    energy: str | None = None


class ClassesReply(msgspec.Struct, frozen=True, rename="camel"):
    """The JSON output of ``classes``. ``closids``: how many classes the machine can have.

    ``hardware_ways``: the ways of each cache that other hardware, such as devices, may use too.
    ``is_in_mbps``: limits of bandwidth are in MB/s (mount option mba_MBps).
    ``in_several``: how many workloads are in several classes.
    """

    closids: int
    classes: list[Class]
    hardware_ways: dict[str, tuple[int, ...]]
    is_in_mbps: bool
    in_several: int = 0


def classes(args: argparse.Namespace, output: Output) -> int:
    """Print the classes; return the exit status."""
    place, usages = (args.root, True), None
    if args.root is None:
        place, usages = _ask(daemon_of(args), output)
    path, allow_simulation = place
    try:
        reply = read(Tree.open(path, allow_simulation=allow_simulation))
    except NotMounted as error:
        raise CommandError(f"cannot list the classes: {error}", NOT_RUNNING, "NotMounted") from error
    except ResctrlError as error:
        raise CommandError(f"cannot list the classes: {error}") from error
    if usages is not None:
        reply = with_use(reply, usages)
    if output.json is not Json.OFF:
        output.print_json(reply)
    elif output.quiet:
        for each in reply.classes:
            output.print_line(format_class(each.name))
    else:
        output.print_blocks([*blocks(reply, output.width)])
    return OK


def _ask(daemon: Daemon, output: Output) -> tuple[tuple[str, bool], list[Usage] | None]:
    """Return where resctrl is, whether it may be a simulator, and the use of the workloads, None without a daemon."""
    action = "list the classes"
    try:
        status = daemon.call(action, signatures.STATUS)
        pages = daemon.stream(action, signatures.READ_ALL, ReadAllRequest())
    except CommandError as error:
        # The daemon of another socket does not serve this machine's resctrl.
        if daemon.socket != SOCKET:
            raise
        output.note(f"{error}. The use of the classes is left out")
        return (DEFAULT_PATH, False), None
    return (status.mount, status.simulation is not None), [usage for page in pages for usage in page.usages]


def read(tree: Tree) -> ClassesReply:
    """Read the classes of a tree. Raises NotMounted, NotRead."""
    names = tree.classes()
    schemata = {name: _pairs(_text(tree, name, "schemata")) for name in names}
    sizes = {name: _pairs(_text(tree, name, "size")) for name in names}
    resources = sorted({resource for of in schemata.values() for resource, _ in of})
    all_ways = {name: len(_ways(_text(tree, f"info/{name}", "cbm_mask"))) for name in resources if _is_cache(name)}
    found = []
    for name in names:
        # Domains with the same allocation are in one.
        parts: dict[Allocation, list[int]] = {}
        for (resource, domain), value in schemata[name].items():
            allocation = Allocation(resource, (), value)
            if _is_cache(resource):
                size = sizes[name].get((resource, domain), "")
                others = (
                    other
                    for other in names
                    if other != name and _mask(schemata[other].get((resource, domain), "")) & _mask(value)
                )
                allocation = Allocation(
                    resource,
                    (),
                    value,
                    _ways(value),
                    all_ways[resource],
                    int(size) if size.isdecimal() else 0,
                    tuple(others),
                )
            parts.setdefault(allocation, []).append(domain)
        allocations = [replace(each, domains=tuple(domains)) for each, domains in parts.items()]
        found.append(Class(name, _text(tree, name, "mode").strip(), allocations))
    closids = [int(text) for name in resources if (text := _text(tree, f"info/{name}", "num_closids")).strip()]
    hardware = {name: _ways(_text(tree, f"info/{name}", "shareable_bits")) for name in resources if _is_cache(name)}
    hardware = {name: ways for name, ways in hardware.items() if ways}
    return ClassesReply(min(closids, default=1), found, hardware, _is_in_mbps(tree.path))


def with_use(reply: ClassesReply, usages: Iterable[Usage]) -> ClassesReply:
    """Return the classes with the number of their workloads, and with what these used."""
    of: dict[str, list[Usage]] = {each.name: [] for each in reply.classes}
    counts = dict.fromkeys(of, 0)
    in_several = 0
    for usage in usages:
        names = tuple(usage.workload.classes or (usage.workload.class_,))
        in_several += len(names) > 1
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        if len(names) == 1:
            of.setdefault(names[0], []).append(usage)
    found = [
        replace(
            each,
            workloads=counts[each.name],
            llc=_sum(level.value for usage in of[each.name] for level in usage.levels if level.event == CACHE),
            traffic=_sum(total.value for usage in of[each.name] for total in usage.totals if total.event == TRAFFIC),
            energy=_sum(total.value for usage in of[each.name] for total in usage.totals if total.event == ENERGY),
        )
        for each in reply.classes
    ]
    return replace(reply, classes=found, in_several=in_several)


def blocks(reply: ClassesReply, width: int | None) -> list[Table]:
    """Return the table; if it is too wide, a table of the limits and one of the use, because nothing is cut."""
    whole = table(reply)
    if width is None or full_width(whole) <= width:
        return [whole]
    use = {index for index, column in enumerate(whole.columns) if column.heading in _USE}
    of_classes = tuple(row for row in whole.rows if row.cells[0])
    return [
        _part(replace(whole, footer=""), {*range(len(whole.columns))} - use),
        _part(replace(whole, rows=of_classes), {0, *use}),
    ]


def _part(of: Table, indices: Container[int]) -> Table:
    """Return some of the columns."""
    columns = tuple(column for index, column in enumerate(of.columns) if index in indices)
    rows = tuple(
        Row(tuple(cell for index, cell in enumerate(row.cells) if index in indices), row.tone) for row in of.rows
    )
    return Table(columns, rows, of.footer)


def table(reply: ClassesReply) -> Table:
    """Return the table: a line for each allocation of a class, the first of them with the name of the class."""
    headings = [*_LIMITS, *_USE]
    rows = []
    for each in reply.classes:
        use = (
            "-" if each.workloads is None else str(each.workloads),
            *(_number(value, unit) for value, unit in ((each.llc, "B"), (each.traffic, "B"), (each.energy, "J"))),
        )
        for index, allocation in enumerate(each.allocations or [Allocation("-", (), "-")]):
            head = (format_class(each.name), each.mode or "-") if index == 0 else ("", "")
            rows.append((*head, *_cells(allocation, reply), *(use if index == 0 else ("",) * len(use))))
    known = [
        index
        for index, heading in enumerate(headings)
        if heading in ("CLASS", "RESOURCE", "LIMIT") or any(row[index] not in ("", "-") for row in rows)
    ]
    return Table(
        tuple(Column(headings[index], right=headings[index] in _RIGHT) for index in known),
        tuple(Row(tuple(row[index] for index in known)) for row in rows),
        _footer(reply),
    )


def _cells(allocation: Allocation, reply: ClassesReply) -> tuple[str, ...]:
    domains = _ranges(allocation.domains)
    if not allocation.all_ways:
        is_percent = not reply.is_in_mbps and allocation.value.isdecimal() and int(allocation.value) <= 100
        unit = " MB/s" if reply.is_in_mbps else " %" if is_percent else ""
        return allocation.resource, domains, f"{allocation.value}{unit}", "", ""
    ways = f"ways {_ranges(allocation.ways)} ({len(allocation.ways)} of {allocation.all_ways})"
    shared = " ".join(map(format_class, allocation.shared_with)) or "-"
    return allocation.resource, domains, ways, _number(str(allocation.size), "B"), shared


def _footer(reply: ClassesReply) -> str:
    if not any(each.allocations for each in reply.classes):
        return "This machine allocates neither cache nor bandwidth: the root class is the only one."
    used = len(reply.classes)
    free = max(reply.closids - used, 0)
    texts = [f"CLOSIDs: {used} of {reply.closids} used, {free} free."]
    for name, ways in reply.hardware_ways.items():
        texts.append(f"Other hardware may use ways {_ranges(ways)} of {name} too.")
    if reply.in_several:
        texts.append(f"What workloads in several classes used is not included: {reply.in_several}.")
    return " ".join(texts)


def _number(value: str | None, unit: str) -> str:
    return "-" if value is None else shorten(Decimal(value), unit)


def _sum(values: Iterable[str | None]) -> str | None:
    known = [Decimal(value) for value in values if value is not None]
    return f"{sum(known[1:], start=known[0]):f}" if known else None


def _is_cache(resource: str) -> bool:
    return resource.startswith(_CACHES)


def _mask(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _ways(text: str) -> tuple[int, ...]:
    mask = _mask(text.strip() or "0")
    return tuple(number for number in range(mask.bit_length()) if mask >> number & 1)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``0-3,7`` for 0, 1, 2, 3 and 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts) or "-"


def _pairs(text: str) -> dict[tuple[str, int], str]:
    """Parse lines such as ``L3:0=ff;1=f0``; skip what is not such a line, as that of a group that is being locked."""
    found = {}
    for line in text.splitlines():
        resource, _, values = line.partition(":")
        for part in values.split(";"):
            domain, equals, value = part.partition("=")
            if equals and domain.strip().isdecimal():
                found[resource.strip(), int(domain)] = value.strip()
    return found


def _text(tree: Tree, folder: str, name: str) -> str:
    """Return the content of a file, "" if this machine does not have it. Raises NotRead."""
    path = os.path.join(tree.path, folder, name)
    try:
        return kernel_files.read(path).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise not_read(error, "read the classes", path) from error


def _is_in_mbps(path: str) -> bool:
    return any(mount.point == path and "mba_MBps" in mount.options for mount in mounts())
