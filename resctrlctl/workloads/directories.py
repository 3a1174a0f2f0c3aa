# SPDX-License-Identifier: Apache-2.0
"""Read the directories of resctrl that ``show`` prints and that belong to no workload.

They are classes, and monitoring groups of other programs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Hashable, Iterable
from decimal import Decimal

import msgspec

from resctrlctl.workloads import classes
from resctrlctl.workloads.tree_view import as_replies
from resctrlmond.api.types import Foreign, ListReply, ReadForeignReply, Reading, Usage
from resctrlmond.resctrl.kinds import Kind
from resctrlmond.resctrl.tree import Tree

# The time between the two readings of a rate.
_RATE_S = 1.0
_SIX_DIGITS = Decimal("0.000001")


class Rate(msgspec.Struct, frozen=True, rename="camel"):
    """How much a counter rose per second, in the unit of its reading; null if that is unknown, with the reason."""

    domain: str
    event: str
    value: str | None
    reason: str = ""


class ForeignReport(msgspec.Struct, frozen=True, rename="camel"):
    """A group of another program: the reply of ReadForeign, how many tasks it has, and the rates of its counters."""

    foreign: Foreign
    readings: list[Reading]
    rates: list[Rate]
    tasks: int | None = None


class ClassReport(msgspec.Struct, frozen=True, rename="camel"):
    """A class as in ``classes``, and its counters, which include those of its groups.

    ``groups`` is the number of its monitoring groups, ``foreign`` how many of them other programs created. ``tasks``
    includes those of the groups; null if the kernel does not list them. ``is_in_mbps`` is that of ``classes``.
    """

    class_: classes.Class = msgspec.field(name="class")
    path: str
    is_in_mbps: bool
    groups: int
    foreign: int
    readings: list[Reading]
    rates: list[Rate]
    tasks: int | None = None


def class_of(tree: Tree, text: str) -> str | None:
    """Return the class that the text names, by ``/`` (the root) or a path in the tree; None if there is none."""
    path = tree.path if text == "/" else os.path.normpath(os.path.join(tree.path, text))
    return next((name for name in tree.classes() if _path(tree, name) == path), None)


def is_named(foreign: Foreign, text: str) -> bool:
    """Return whether the text is the name of a foreign group, its path, or its path in the tree."""
    return text in (foreign.name, foreign.path, os.path.join(foreign.class_, "mon_groups", foreign.name))


def read_class(tree: Tree, name: str, listed: ListReply, usages: Iterable[Usage], *, with_rates: bool) -> ClassReport:
    """Read a class of the tree. Raises ResctrlError."""
    path = _path(tree, name)

    def groups() -> frozenset[Hashable]:
        with os.scandir(os.path.join(path, "mon_groups")) as entries:
            return frozenset(_identity(entry.path) for entry in entries)

    def identify() -> Hashable:
        try:
            return _identity(path), groups()
        except OSError:
            return None

    def read() -> list[Reading]:
        return as_replies(tree.read(name))

    every = classes.with_use(classes.read(tree), usages)
    found = next((each for each in every.classes if each.name == name), None)
    if found is None:
        raise tree.no_such_class(name)
    readings, rates = _sampled(read, identify, "groups came or went meanwhile", with_rates=with_rates)
    return ClassReport(
        class_=found,
        path=path,
        is_in_mbps=every.is_in_mbps,
        groups=sum(group.class_ == name for group in tree.groups()),
        foreign=sum(group.class_ == name for group in listed.foreign),
        readings=readings,
        rates=rates,
        tasks=_count_tasks(tree, name),
    )


def read_foreign(
    foreign: Foreign, read: Callable[[], ReadForeignReply], *, with_rates: bool, is_here: bool
) -> ForeignReport:
    """Return the report on a foreign group. ``read`` reads its counters.

    The directory of a group on another host is not read: so its tasks and rates are not known.
    """
    if not is_here:
        reply = read()
        return ForeignReport(reply.foreign, reply.readings, [], None)
    replies = []

    def read_counters() -> list[Reading]:
        replies.append(read())
        return replies[-1].readings

    readings, rates = _sampled(
        read_counters,
        lambda: _identity(foreign.path),
        "the group was removed or replaced meanwhile",
        with_rates=with_rates,
    )
    tasks = None
    with contextlib.suppress(OSError), open(os.path.join(foreign.path, "tasks"), encoding="ascii") as opened:
        tasks = len(opened.read().split())
    return ForeignReport(replies[-1].foreign, readings, rates, tasks)


def _count_tasks(tree: Tree, name: str) -> int | None:
    number = len(tree.tasks(name))
    # The kernel lists no task of the root if the processor only monitors (rdtgroup_tasks_show() in fs/resctrl).
    return number if number or name else None


def _path(tree: Tree, name: str) -> str:
    return os.path.join(tree.path, name) if name else tree.path


def _identity(path: str) -> Hashable:
    """Return what a new directory at the path would not have; None if there is no directory."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _sampled(
    read: Callable[[], list[Reading]], identify: Callable[[], Hashable], reason: str, *, with_rates: bool
) -> tuple[list[Reading], list[Rate]]:
    """Read the counters, twice for rates. ``reason``: why they are unknown if ``identify`` returns something else."""
    before, begin = identify(), time.monotonic()
    first = read()
    if not with_rates or before is None:
        return first, []
    time.sleep(_RATE_S)
    seconds = Decimal(time.monotonic() - begin)
    readings = read()
    is_same = identify() == before
    known = {(reading.domain, reading.event): reading.value for reading in first}
    rates = []
    for reading in readings:
        if reading.kind is not Kind.CUMULATIVE:
            continue
        earlier = known.get((reading.domain, reading.event))
        value = None
        if reading.value is None or earlier is None:
            why = "the kernel has no number"
        elif not is_same:
            why = reason
        elif (rise := Decimal(reading.value) - Decimal(earlier)) < 0:
            why = "the counter was reset"
        else:
            value, why = f"{(rise / seconds).quantize(_SIX_DIGITS):f}", ""
        rates.append(Rate(reading.domain, reading.event, value, why))
    return readings, rates
