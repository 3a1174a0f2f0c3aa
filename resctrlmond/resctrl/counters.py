# SPDX-License-Identifier: Apache-2.0
"""Read the counters in mon_data, and describe the monitoring events that they count."""

from __future__ import annotations

import enum
import errno
import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Context, Decimal, localcontext

import msgspec

from resctrlmond.resctrl.errors import LACKS
from resctrlmond.resctrl.kinds import Kind, Status

# Declared in a module that clients can import without this one.
__all__ = ["Kind", "Status"]


class Unavailable(enum.Enum):
    """The meaning of ``Unavailable`` in an event's file."""

    # The register of the RMID has no valid bit (intel_aet.c): the RMID has used nothing on this package since boot.
    NEVER_ACTIVE = "nothing was used, as long as no number was ever read"
    # IA32_QM_CTR has the bit "unavailable", on AMD while the hardware does not track the RMID.
    NOT_COUNTED = "what is used meanwhile is not counted, and the counter may begin from 0 afterwards"


class Event(msgspec.Struct, frozen=True):
    """An event that the kernel can count; ``unit`` is "" if a count has no unit."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    source: str
    unavailable: Unavailable = Unavailable.NOT_COUNTED

    @property
    def restarts(self) -> bool:
        """Whether it counts from 0 again after its domain was offline: traffic does, telemetry continues.

        domain_setup_l3_mon_state() in fs/resctrl/rdtgroup.c creates the state of all groups again. These are also the
        events whose hardware counters can be taken from one RMID and assigned to another.
        """
        return self.kind is Kind.CUMULATIVE and self.source == _L3

    @property
    def lags(self) -> bool:
        """Whether cores may report their counts some milliseconds later, as those of telemetry."""
        return self.source != _L3


_L3 = "Documentation/filesystems/resctrl.rst, L3_MON"
_AET = "Documentation/filesystems/resctrl.rst, PERF_PKG_MON (Linux 7.0)"
_PERF = "arch/x86/kernel/cpu/resctrl/intel_aet.c (Linux 7.0)"

_NEVER_ACTIVE, _NOT_COUNTED = Unavailable.NEVER_ACTIVE, Unavailable.NOT_COUNTED

# Each event is one row.
_TABLE = (
    ("llc_occupancy", Kind.GAUGE, "bytes", "last-level cache held right now", _L3, _NOT_COUNTED),
    ("mbm_total_bytes", Kind.CUMULATIVE, "bytes", "memory traffic of this L3, local and remote", _L3, _NOT_COUNTED),
    ("mbm_local_bytes", Kind.CUMULATIVE, "bytes", "memory traffic of this L3 to its own memory", _L3, _NOT_COUNTED),
    ("core_energy", Kind.CUMULATIVE, "joules", "energy of the core logic with its L1 and L2", _AET, _NEVER_ACTIVE),
    ("activity", Kind.CUMULATIVE, "farads", "dynamic capacitance switched by the core logic", _AET, _NEVER_ACTIVE),
    ("stalls_llc_hit", Kind.CUMULATIVE, "cycles", "stalls that the last-level cache served", _PERF, _NEVER_ACTIVE),
    ("stalls_llc_miss", Kind.CUMULATIVE, "cycles", "stalls on a miss of the last-level cache", _PERF, _NEVER_ACTIVE),
    ("c1_res", Kind.CUMULATIVE, "cycles", "residency in C1", _PERF, _NEVER_ACTIVE),
    ("c6_res", Kind.CUMULATIVE, "cycles", "residency in C6", _PERF, _NEVER_ACTIVE),
    ("unhalted_core_cycles", Kind.CUMULATIVE, "cycles", "core cycles while not halted", _PERF, _NEVER_ACTIVE),
    ("unhalted_ref_cycles", Kind.CUMULATIVE, "cycles", "reference cycles while not halted", _PERF, _NEVER_ACTIVE),
    ("uops_retired", Kind.CUMULATIVE, "", "micro-operations retired", _PERF, _NEVER_ACTIVE),
)
EVENTS = {row[0]: Event(*row) for row in _TABLE}


def event(name: str) -> Event:
    """Return the event of that name; an event that is not in the table has an unknown kind and unit."""
    return EVENTS.get(name) or Event(name, Kind.UNKNOWN, "", "not known to this version", "")


def offered(mon_features: str) -> tuple[str, ...]:
    """List the events in the text of ``info/*_MON/mon_features``.

    With AMD's BMEC, an event's line is followed by a line for its file ``<event>_config``, which is skipped.
    """
    names = mon_features.split()
    return tuple(name for name in names if name.removesuffix("_config") == name)


class Value(msgspec.Struct, frozen=True):
    """A counter's text, and its exact number in the event's unit, if it is one."""

    status: Status
    text: str
    number: int | Decimal | None = None

    def is_never_active(self, of: Event) -> bool:
        """Whether the value shows that the RMID has used nothing on this package since boot."""
        return self.status is Status.UNAVAILABLE and of.unavailable is Unavailable.NEVER_ACTIVE

    def is_active(self, of: Event) -> bool:
        """Whether the value shows that the RMID has been active on this package since boot."""
        return self.number is not None and of.unavailable is Unavailable.NEVER_ACTIVE


# The three words are the kernel's own (fs/resctrl/ctrlmondata.c, rdtgroup_mondata_show()).
_WORDS = {
    "Unavailable": Status.UNAVAILABLE,
    "Error": Status.ERROR,
    "Unassigned": Status.UNASSIGNED,
}
# A value has up to 20 digits and 9 decimals. The default of 28 digits would round a sum.
EXACTLY = Context(prec=64)
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,9})?", re.ASCII)


def parse_value(text: str) -> Value:
    """Parse a counter's text: an integer, a decimal, or one of the kernel's words.

    For any other text, return ``Status.ERROR`` with the first 100 characters of the text.
    """
    text = text.removesuffix("\n")
    if word := _WORDS.get(text):
        return Value(word, text)
    number = _NUMBER.fullmatch(text)
    if not number:
        return Value(Status.ERROR, text[:100])
    return Value(Status.OK, text, Decimal(text) if number[1] else int(text))


def added_values(values: Sequence[Value]) -> Value:
    """Add one event's values of several groups or nodes. Returns the first that is not a number, if there is one."""
    without = next((value for value in values if value.number is None), None)
    if without is not None or len(values) == 1:
        return without or values[0]
    with localcontext(EXACTLY):
        number = sum((value.number for value in values if value.number is not None), start=0)
    return Value(Status.OK, f"{number:f}" if isinstance(number, Decimal) else str(number), number)


def repeated(counters: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Return those of these domains and events that may count again what the domains of another resource count.

    The resource of ``mon_L3_00`` is "mon_L3". Of several resources with the same event, the first one in alphabetical
    order counts: no file states how they relate, and a sum of both may count the same use twice.
    """
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for domain, name in counters:
        found.setdefault(name, {}).setdefault(resource_of(domain), []).append((domain, name))
    return frozenset(
        counter
        for by_resource in found.values()
        for other in sorted(by_resource)[1:]
        for counter in by_resource[other]
    )


def resource_of(domain: str) -> str:
    """Return the name of a domain, or of one in it, without its number."""
    return domain.partition("/")[0].rpartition("_")[0]


class Reading(msgspec.Struct, frozen=True, eq=False):
    """The value of one event in one domain.

    ``domain`` is the path below mon_data: ``mon_L3_00``, ``mon_PERF_PKG_01``, and with Sub-NUMA Clustering also
    ``mon_L3_00/mon_sub_L3_01``, whose values are included in the outer domain's. ``inode`` is the inode number of
    the domain's directory, 0 if unknown: a domain that was offline has a new one (kernfs assigns the numbers in a
    circle, __kernfs_new_node() in fs/kernfs/dir.c).
    """

    domain: str
    event: str
    value: Value
    inode: int = 0

    def __eq__(self, other: object) -> bool:
        # Without the inode: two readings of one group differ in their values only.
        if not isinstance(other, Reading):
            return NotImplemented
        return (self.domain, self.event, self.value) == (other.domain, other.event, other.value)

    def __hash__(self) -> int:
        return hash((self.domain, self.event, self.value))

    @property
    def is_part(self) -> bool:
        """Whether another reading of the same group includes this one."""
        return "/" in self.domain


# The sort key of readings: by domain and event.
IN_ORDER = operator.attrgetter("domain", "event")

# A counter's text has at most a few dozen bytes; a longer file is not a counter. Python allocates this much to read.
_TEXT_LIMIT = 256


class Directory(msgspec.Struct, frozen=True):
    """The names in one directory of mon_data: ``domain`` as in ``Reading``, the events, the number of directories."""

    domain: str
    events: tuple[str, ...]
    directories: int


# The directories of mon_data in order of domain, the outermost ("") first.
Layout = tuple[Directory, ...]


def read_mon_data(group: int, known: Layout = ()) -> tuple[list[Reading], Layout]:
    """Read every counter below the group directory open as ``group``, in order of domain and event.

    Returns the layout too, which is that of all groups of the mount: with it as ``known``, no directory is listed as
    long as the layout is the same. A domain or file that disappears meanwhile (its CPUs went offline) is skipped. A
    file that cannot be read for another reason becomes a reading with ``Status.ERROR`` and the reason. Raises OSError
    if a directory cannot be read, or memory or descriptors are lacking; with ENOENT, ENODEV or ESTALE the group was
    removed.
    """
    fd = os.open("mon_data", _DIRECTORY, dir_fd=group)
    try:
        readings, layout = _read_known(fd, known), known
        if readings is None:
            found: list[Directory] = []
            readings = sorted(_walk(fd, "", found), key=IN_ORDER)
            layout = tuple(sorted(found, key=_DOMAIN))
        # If the group was removed meanwhile, the counters read so far are incomplete.
        os.stat("mon_data", dir_fd=group)
        return _with_sums(readings), layout
    finally:
        os.close(fd)


_GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.ESTALE})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DOMAIN = operator.attrgetter("domain")

# The deepest file of the kernel is mon_data/mon_L3_00/mon_sub_L3_00/llc_occupancy.
_DEPTH = 2


def _with_sums(readings: list[Reading]) -> list[Reading]:
    """Return the readings with the sum of the Sub-NUMA nodes as the value of their L3 cache.

    Without Linux commit 594902c986e2 ("Remove inappropriate references to cacheinfo"), the file of the cache reads 0
    after the first CPU of a node was offline.
    """
    parts: dict[tuple[str, str], list[Value]] = {}
    for reading in readings:
        if reading.is_part:
            parts.setdefault((reading.domain.partition("/")[0], reading.event), []).append(reading.value)
    if not parts:
        return readings
    return [
        msgspec.structs.replace(reading, value=added_values(of))
        if (of := parts.get((reading.domain, reading.event)))
        else reading
        for reading in readings
    ]


def _read_known(mon_data: int, known: Layout) -> list[Reading] | None:
    """Read the counters by their known names; None if anything is not as known. Raises OSError.

    A domain that came shows in the link count of the outer directory, which is 2 more than that of its directories
    (kernfs_refresh_inode() in fs/kernfs/inode.c); one that went cannot be opened. With both, all directories are
    known. The events of a domain never change: domain_add_cpu_mon() creates the files with the directory.
    """
    if not known:
        return None
    readings: list[Reading] = []
    try:
        for directory in known:
            domain = directory.domain
            fd = os.open(domain, _DIRECTORY, dir_fd=mon_data) if domain else mon_data
            try:
                status = os.fstat(fd)
                if status.st_nlink != directory.directories + 2:
                    return None
                inode = status.st_ino
                readings += [_read(fd, domain, name, inode) for name in directory.events]
            finally:
                if domain:
                    os.close(fd)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return readings


def _walk(directory: int, domain: str, layout: list[Directory], depth: int = 0) -> Iterator[Reading]:
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    events = sorted(name for name, is_directory in found if not is_directory)
    layout.append(Directory(domain, tuple(events), len(found) - len(events)))
    inode = os.fstat(directory).st_ino
    for name, is_directory in found:
        try:
            if not is_directory:
                yield _read(directory, domain, name, inode)
            elif depth < _DEPTH:
                fd = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    yield from _walk(fd, f"{domain}/{name}" if domain else name, layout, depth + 1)
                finally:
                    os.close(fd)
        except OSError as error:
            if error.errno not in _GONE:
                raise


def _read(directory: int, domain: str, name: str, inode: int) -> Reading:
    try:
        value = parse_value(_read_text(directory, name))
    except OSError as error:
        # A lack of resources is not a value of a counter.
        if error.errno in _GONE or error.errno in LACKS:
            raise
        value = Value(Status.ERROR, os.strerror(error.errno or 0))
    return Reading(domain, name, value, inode)


def _read_text(directory: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, _TEXT_LIMIT).decode("utf-8", "replace")
    finally:
        os.close(fd)
