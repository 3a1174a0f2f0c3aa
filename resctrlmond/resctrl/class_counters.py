# SPDX-License-Identifier: Apache-2.0
"""Read the counters of a class apart from those of its monitoring groups.

The kernel's value for a class is the sum over the RMID of the class and those of its *current* groups
(rdtgroup_mondata_show() and mon_event_read() in fs/resctrl): it falls when a group is removed, and rises by what the
RMID of a new group has counted for former owners. The difference between that sum and the values of the groups is the
class's own use, and only rises, if all of them were read while the set of groups was the same.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, localcontext

import msgspec

from resctrlmond.resctrl import kernel_files
from resctrlmond.resctrl.counters import EXACTLY, Kind, Value, added_values, event, parse_value, repeated
from resctrlmond.resctrl.errors import LACKS, NoSuchGroup, not_read

# A domain and an event, such as ("mon_L3_00", "llc_occupancy").
Counter = tuple[str, str]

# Reading one event of 500 groups takes some milliseconds, in which few groups are created or removed. If the set of
# groups changed, the pass is repeated, up to as often in all as there are counters, and at least so often. Without a
# limit, a reading would not end while groups come and go faster than a pass takes.
_REPEATS = 8
_MON_GROUPS = "mon_groups"
# The answers of the kernel for the files of a directory that was removed (rdtgroup_kn_lock_live()).
_GONE = (errno.ENOENT, errno.ENODEV)


class _Changed(Exception):
    """The set of groups changed during the reading."""


class Own(msgspec.Struct, frozen=True):
    """The own use of a class at the reading: between ``low`` and ``low + width``, in the event's unit.

    The counters run on while they are read one after the other, hence the width. ``low`` is None if the kernel has no
    number; ``reason`` says why, or why the number may be wrong. Without ``is_read``, the set of groups changed
    during each try, and values of groups may be missing too.
    """

    low: int | Decimal | None
    width: int | Decimal = 0
    reason: str = ""
    is_read: bool = True


class GroupCounters(msgspec.Struct):
    """A monitoring group of the class. ``gid`` is its mark, ``nonce`` its directory's mtime in ns.

    One that was created or removed during the reading has values of some counters only.
    """

    path: str
    gid: int
    nonce: int
    values: dict[Counter, Value] = msgspec.field(default_factory=dict)


class ClassCounters(msgspec.Struct):
    """A class, read apart from its groups, which are by the inode number of their directories.

    ``inode`` is that of the class's directory, and ``domains`` has those of its domains and of their Sub-NUMA nodes,
    such as "mon_L3_00/mon_sub_L3_00", which are new after a domain was offline.
    """

    inode: int
    domains: dict[str, int] = msgspec.field(default_factory=dict)
    own: dict[Counter, Own] = msgspec.field(default_factory=dict)
    groups: dict[int, GroupCounters] = msgspec.field(default_factory=dict)

    def is_whole(self, group: GroupCounters) -> bool:
        """Return whether the group has a value of each counter that was read: it was there all the time."""
        return all(counter in group.values for counter, own in self.own.items() if own.is_read)


def read_class(tree: str, class_: str) -> ClassCounters:
    """Read a class of the resctrl mounted at ``tree``; its name is "" for the root.

    Outer domains only: the value of an L3 cache is the sum of its Sub-NUMA nodes, as in ``counters``. Raises
    NoSuchGroup if the class was removed, and NotRead.
    """
    path = os.path.join(tree, class_) if class_ else tree
    try:
        found = ClassCounters(os.stat(path).st_ino)
        counters: deque[Counter] = deque()
        for domain, inodes, names in _domains(path):
            found.domains |= inodes
            counters += [(domain, name) for name in names]
        again = repeated(counters)
        counters = deque(counter for counter in counters if counter not in again)
        _read_counters(path, found, counters)
        if os.stat(path).st_ino != found.inode:
            raise NoSuchGroup("was replaced while it was read", path=path)
    except OSError as error:
        if error.errno in _GONE:
            raise NoSuchGroup("was removed while it was read", path=path) from error
        raise not_read(error, "read the counters of the class", path) from error
    return found


def _read_counters(path: str, found: ClassCounters, left: deque[Counter]) -> None:
    """Read the counters ``left``. Those that fail are repeated in turn, so that all have the same chance."""
    known: dict[int, GroupCounters] = {}
    partial: dict[Counter, dict[int, Value]] = {}
    repeats = max(len(left), _REPEATS)
    failures = 0  # one after the other
    for _ in range(len(left) + repeats):
        if not left or failures == repeats:
            break
        counter = left.popleft()
        try:
            own, partial[counter] = _read_apart(path, counter, _nodes(found, counter[0]), known)
        except FileNotFoundError:  # the domain went offline
            found.domains.pop(counter[0], None)
            for other in [other for other in left if other[0] == counter[0]]:
                left.remove(other)
            continue
        if own is None:
            failures += 1
            left.append(counter)
        else:
            failures = 0
            _keep(found, known, counter, own, partial[counter])
    for counter in left:
        own = Own(None, reason="groups were created and removed during each reading", is_read=False)
        _keep(found, known, counter, own, partial[counter])


def _nodes(found: ClassCounters, domain: str) -> list[str]:
    """Return the Sub-NUMA nodes of a domain, or the domain itself if it has none."""
    return [node for node in found.domains if node.startswith(f"{domain}/")] or [domain]


def _keep(
    found: ClassCounters, known: Mapping[int, GroupCounters], counter: Counter, own: Own, values: Mapping[int, Value]
) -> None:
    found.own[counter] = own
    for inode, value in values.items():
        found.groups[inode] = known[inode]
        found.groups[inode].values[counter] = value


def _domains(class_: str) -> Iterable[tuple[str, dict[str, int], list[str]]]:
    """Yield each domain with the inodes of its directory and of its nodes, and the names of its events."""
    top = os.path.join(class_, "mon_data")
    for domain in sorted(os.listdir(top)):
        try:
            with os.scandir(os.path.join(top, domain)) as entries:
                names, nodes = [], [domain]
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        nodes.append(os.path.join(domain, entry.name))
                    else:
                        names.append(entry.name)
            yield domain, {node: os.stat(os.path.join(top, node)).st_ino for node in nodes}, sorted(names)
        except FileNotFoundError:
            continue


def _read_apart(
    class_: str, counter: Counter, nodes: Sequence[str], known: dict[int, GroupCounters]
) -> tuple[Own | None, dict[int, Value]]:
    """Return the class's own use, None if the set of groups changed, and the values of the groups that are there.

    ``known``: the groups that earlier calls found; those that this one finds are added.
    """
    values: dict[int, Value] = {}
    is_same = True
    try:
        # One that goes before it is listed is not in the values of the class either.
        before = _list_groups(class_, known, is_complete=False)
        first = _value(class_, nodes, counter[1])
        for inode, group in before.items():
            try:
                values[inode] = _value(group.path, nodes, counter[1])
            except OSError as error:
                _check_nodes(class_, nodes, error)
                is_same = False
        second = _value(class_, nodes, counter[1])
        if not is_same or _list_groups(class_, known, is_complete=True).keys() != before.keys():
            return None, values
    except _Changed:
        return None, values
    except OSError as error:
        _check_nodes(class_, nodes, error)
        return None, values
    with localcontext(EXACTLY):
        own = _difference(counter, first, second, values)
    # A group that came after the first listing and went before the last one shows here.
    return own if own.low is None or own.width >= 0 else None, values


def _check_nodes(class_: str, nodes: Iterable[str], error: OSError) -> None:
    """Raise FileNotFoundError if the class lacks one of these, which went offline, and errors of other kinds."""
    if error.errno not in _GONE:
        raise error
    for node in nodes:
        os.stat(os.path.join(class_, "mon_data", node))


def _list_groups(class_: str, known: dict[int, GroupCounters], *, is_complete: bool) -> dict[int, GroupCounters]:
    """Return the groups of the class, and add them to ``known``.

    Raises _Changed if one goes meanwhile; unless ``is_complete``, it is left out.
    """
    top = os.path.join(class_, _MON_GROUPS)
    found = {}
    with os.scandir(top) as entries:
        for entry in entries:
            inode, before = entry.inode(), known.get(entry.inode())
            if before is None or before.path != entry.path:
                try:
                    status = os.stat(entry.path, follow_symlinks=False)
                except FileNotFoundError as error:
                    if is_complete:
                        raise _Changed from error
                    continue
                before = GroupCounters(entry.path, status.st_gid, status.st_mtime_ns, before.values if before else {})
                known[inode] = before
            found[inode] = before
    return found


def _value(directory: str, nodes: Iterable[str], name: str) -> Value:
    values = []
    for node in nodes:
        try:
            text = kernel_files.read(os.path.join(directory, "mon_data", node, name)).decode("utf-8", "replace")
        except OSError as error:
            if error.errno in LACKS or error.errno in _GONE:
                raise
            text = os.strerror(error.errno or 0)
        values.append(parse_value(text))
    return added_values(values)


def _difference(counter: Counter, first: Value, second: Value, groups: Mapping[int, Value]) -> Own:
    of = event(counter[1])
    numbers: list[int | Decimal] = []
    without: list[str] = []
    for value in (first, second, *groups.values()):
        if value.number is None and not value.is_never_active(of):
            without.append(value.text)
        numbers.append(value.number or 0)
    reason = f'the kernel has no number for a group or the class, but "{without[0]}"' if without else ""
    if first.number is None and not first.is_never_active(of):
        return Own(None, reason=reason)
    low = numbers[0] - sum(numbers[2:])
    width = numbers[1] - numbers[0]
    if of.kind is Kind.GAUGE:
        return Own(max(low, 0), width if width >= 0 else -width, reason)
    # The kernel rounds each decimal to its last digit (print_event_value() in fs/resctrl/ctrlmondata.c).
    rounding = (len(groups) + 1) * _last_digit(first.number)
    return Own(low - rounding, width + 2 * rounding if width >= 0 else width, reason)


def _last_digit(number: int | Decimal | None) -> int | Decimal:
    """Return the value of the last digit of a number with decimals; 0 for an integer, which is not rounded."""
    exponent = number.as_tuple().exponent if isinstance(number, Decimal) else 0
    return Decimal(1).scaleb(exponent) if isinstance(exponent, int) and exponent < 0 else 0
