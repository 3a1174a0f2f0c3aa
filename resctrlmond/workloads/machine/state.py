# SPDX-License-Identifier: Apache-2.0
"""The state of the pools of the machine, and the file that keeps it over restarts of the daemon.

The file ``machine.json`` is written after each reading, before a caller gets it, and in each step that ends a group,
before the group is removed, because nothing else has its use afterwards. Without the file, the pools begin again. An
older one than the state in memory would give wrong figures, so a file that cannot be written is removed.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from decimal import Decimal, localcontext
from typing import TypeVar

import msgspec

from resctrlmond.resctrl.class_counters import Counter
from resctrlmond.resctrl.counters import EXACTLY, Kind, Value, event, parse_value
from resctrlmond.resctrl.errors import NotRead, printable
from resctrlmond.resctrl.mounts import Mounting
from resctrlmond.resctrl.package_energy import Zone
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Pool
from resctrlmond.workloads.records.atomic_files import read_file, write_file, writing

log = logging.getLogger(__name__)

VERSION = 1
_MODE = 0o640
# The largest machine known has 4096 RMIDs and 32 L3 caches with two counters each. If other programs have all groups,
# their first and last readings are 524160 numbers: 8 MiB with 15 digits each.
_LIMIT = 16 * 1024 * 1024
# So many reasons are stated, and then that there are more.
_MAX_REASONS = 4
_MORE = "and more of that kind"
# The file keeps only the last removed groups: no more removals than these lack their record at any time.
_MAX_KEPT_REMOVED = 64
# No counter is larger, and the kernel writes at most 9 decimals.
_MOST, _DECIMALS = 10**40, 9

Number = int | Decimal
Reasons = dict[str, None]
_K = TypeVar("_K")
_V = TypeVar("_V")


class Sum(msgspec.Struct, array_like=True):
    """A part of the use of a pool, which differs from the true number by at most ``skew``."""

    number: Number = 0
    skew: Number = 0
    is_known: bool = False
    reasons: Reasons = msgspec.field(default_factory=dict)

    def add(self, number: Number | None, skew: Number = 0, reason: str = "") -> None:
        """Add a further part; None is one without a number."""
        if number is not None:
            self.number += number
            self.skew += skew
            self.is_known = True
        if reason:
            add_reason(self.reasons, reason)


Sums = dict[Counter, Sum]


class OwnUse(msgspec.Struct, array_like=True):
    """The own use of a class: the reading that it is counted from, and the largest number found since."""

    base: Number
    base_width: Number
    highest: Number
    width: Number = 0
    reasons: Reasons = msgspec.field(default_factory=dict)


class ClassUse(msgspec.Struct):
    """A class, by the inode of its directory."""

    inode: int
    own: dict[Counter, OwnUse] = msgspec.field(default_factory=dict)


# A reading of a group as the file has it, in the order of ``MachineState.counters``: each value is an integer, or the
# kernel's text if it is not one; None if the reading has no such counter. Files of many groups stay small so, and are
# written in a fraction of the time.
Packed = list[int | str | None]


class OtherGroup(msgspec.Struct, array_like=True):
    """A group of another program, from its first reading to its last one."""

    first: Packed
    last: Packed


class MachineState(msgspec.Struct):
    """The state since ``since`` (RFC 3339, UTC; "" before counting begins).

    ``domains`` are those of the root at that time. ``counters`` are those of the readings in ``others`` and ``base``,
    with the place of their values. ``others`` has the groups of other programs, by the inode of their
    directories, and ``base`` the readings from which the groups of workloads count that existed at that time, by
    nonce. ``ended`` is the use of what is gone.

    ``counted`` has the groups of workloads, by nonce, that were read for the last time, and are about to be removed.
    Those that were removed since are in ``removed``: a reading may have found them before.

    ``flaws``, ``domain_flaws`` and ``event_flaws`` say why all figures of a pool, of a domain or of an event are not
    exact from then on. ``transactions`` are the memory transactions that each event counted at ``since``.

    ``unseen`` are directories that other programs created, until a reading finds them. The file has none of them.

    ``shown`` is the largest number that a caller has got. ``while_beginning`` is the energy of each package while the
    cores were read at ``since``.
    """

    since: str = ""
    domains: dict[str, int] = {}
    classes: dict[str, ClassUse] = {}
    counters: dict[Counter, int] = {}
    others: dict[int, OtherGroup] = {}
    base: dict[int, Packed] = {}
    ended: dict[Pool, Sums] = msgspec.field(default_factory=lambda: {pool: {} for pool in Pool})
    counted: dict[int, Sums] = {}
    removed: dict[int, None] = {}
    flaws: dict[Pool, Reasons] = msgspec.field(default_factory=lambda: {pool: {} for pool in Pool})
    domain_flaws: dict[str, str] = {}
    event_flaws: dict[str, str] = {}
    transactions: dict[str, str] = {}
    unseen: dict[str, None] = {}
    shown: dict[tuple[Pool, str, str], Number] = {}
    while_beginning: dict[int, Decimal] = {}

    def pack(self, values: Mapping[Counter, Value]) -> Packed:
        """Return a reading as it is kept. Gauges have no use to be added up, and are left out."""
        packed: Packed = []
        self.update(packed, values)
        return packed

    def update(self, packed: Packed, values: Mapping[Counter, Value]) -> None:
        """Replace the values of these counters in a reading, and keep the others."""
        for counter, value in values.items():
            if event(counter[1]).kind is not Kind.CUMULATIVE:
                continue
            place = self.counters.setdefault(counter, len(self.counters))
            packed.extend([None] * (place + 1 - len(packed)))
            packed[place] = value.number if isinstance(value.number, int) else value.text

    def unpack(self, packed: Packed) -> dict[Counter, Value]:
        """Return the values of a reading."""
        found = zip(self.counters, packed, strict=False)
        return {counter: parse_value(str(value)) for counter, value in found if value is not None}


def add_reason(reasons: Reasons, reason: str) -> bool:
    """Add a reason, unless there are many: other programs can cause any number of them. Return whether it is new.

    They choose the names of classes and groups too.
    """
    reason = printable(reason)
    before = len(reasons)
    reasons[reason if reason in reasons or before < _MAX_REASONS else _MORE] = None
    return len(reasons) > before


class MachineFile:
    """The file ``path`` of the boot ``boot_id``. One thread at a time may call its methods."""

    def __init__(self, path: str, boot_id: str) -> None:
        self._path = path
        self._boot_id = boot_id
        # A file that is older than the state in memory could not be removed.
        self.is_outdated = False
        # The present problem, which is logged once.
        self._problem = ""

    def load(self, root: Mounting) -> tuple[MachineState, dict[str, Zone], str] | None:
        """Return the state of the last daemon, and that of the packages; None if there is no valid one.

        ``root`` is ``mounts.superblock_at`` of resctrl. The last part is why the energy may be wrong. Raises NotRead
        if it is not known what the file holds.
        """
        try:
            return self._decode(read_file(self._path, _LIMIT), root)
        except FileNotFoundError:
            return None
        except NotRead as error:
            if error.errno != errno.EIO:
                raise
            log.warning("%s. The pools of the machine begin again", error)
        except (_Unusable, OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
            log.warning("%s: %s. The pools of the machine begin again", self._path, error)
        self.remove()
        return None

    def _decode(self, data: bytes, root: Mounting) -> tuple[MachineState, dict[str, Zone], str]:
        version = _VERSION_DECODER.decode(data).version
        if version != VERSION:
            raise _Unusable(f"written by another version of resctrlmond (format {version}, not {VERSION})")
        found = _DECODER.decode(data)
        if found.boot_id != self._boot_id:
            raise _Unusable("written before this boot")
        if found.root != root or root == (0, 0):
            raise _Unusable("resctrl was mounted again since it was written")
        for number in found.numbers():
            _check(number)
        found.check_readings()
        return found.to_state(), found.zones, found.energy_missed

    def encode(self, state: MachineState, root: Mounting, zones: dict[str, Zone], energy_missed: str) -> bytes:
        """Return the content of the file for this state."""
        with localcontext(EXACTLY):
            return msgspec.json.encode(_File.of(state, self._boot_id, root, zones, energy_missed)) + b"\n"

    def write(self, data: bytes) -> None:
        """Replace the content, or remove the file if it cannot be written. Raises nothing: an end must not fail."""
        try:
            with writing(self._path):
                write_file(self._path, data, mode=_MODE, limit=_LIMIT)
        except NotWritten as error:
            self._report(f"cannot keep the pools of the machine for the next start: {error}")
            self.remove()
        else:
            self.is_outdated, self._problem = False, ""

    def remove(self) -> None:
        """Remove the file, if there is one. Raises nothing."""
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            self.is_outdated = False
        except OSError as error:
            self.is_outdated = True
            self._report(f"cannot remove {self._path}, which is out of date: {error}")
        else:
            self.is_outdated = False

    def _report(self, problem: str) -> None:
        if self._problem != problem:
            log.warning("%s", problem)
        self._problem = problem


class _Unusable(Exception):
    """The file cannot be used, although it can be read."""


def _check(number: Number) -> None:
    if isinstance(number, Decimal):
        exponent = number.as_tuple().exponent
        if not isinstance(exponent, int) or not -_DECIMALS <= exponent <= 0:
            raise _Unusable(f"{number!s:.64} is not a number of a counter")
    if not -_MOST <= number <= _MOST:
        raise _Unusable("a number is larger than any counter")


# Keys of objects in JSON are texts, so what is kept by counter is a list of pairs.
_Pairs = list[tuple[Counter, Sum]]


class _ClassInFile(msgspec.Struct):
    inode: int
    own: list[tuple[Counter, OwnUse]]


class _File(msgspec.Struct, rename="camel"):
    version: int
    boot_id: str
    root: Mounting
    since: str
    domains: dict[str, int]
    classes: dict[str, _ClassInFile]
    counters: list[Counter]
    others: dict[int, OtherGroup]
    base: dict[int, Packed]
    ended: dict[Pool, _Pairs]
    counted: dict[int, _Pairs]
    removed: list[int]
    flaws: dict[Pool, list[str]]
    domain_flaws: dict[str, str]
    event_flaws: dict[str, str]
    transactions: dict[str, str]
    shown: list[tuple[Pool, str, str, Number]]
    while_beginning: dict[int, Decimal]
    zones: dict[str, Zone]
    energy_missed: str

    @classmethod
    def of(
        cls, state: MachineState, boot_id: str, root: Mounting, zones: dict[str, Zone], energy_missed: str
    ) -> _File:
        return cls(
            version=VERSION,
            boot_id=boot_id,
            root=root,
            since=state.since,
            domains=state.domains,
            classes={_text(name): _ClassInFile(of.inode, list(of.own.items())) for name, of in state.classes.items()},
            counters=list(state.counters),
            others=state.others,
            base=state.base,
            ended=_listed(state.ended),
            counted=_listed(state.counted),
            removed=list(state.removed)[-_MAX_KEPT_REMOVED:],
            flaws={pool: list(reasons) for pool, reasons in state.flaws.items()},
            domain_flaws=state.domain_flaws,
            event_flaws=state.event_flaws,
            transactions=state.transactions,
            shown=[(*of, number) for of, number in state.shown.items()],
            while_beginning=state.while_beginning,
            zones=zones,
            energy_missed=energy_missed,
        )

    def to_state(self) -> MachineState:
        return MachineState(
            since=self.since,
            domains=self.domains,
            classes={_name(text): ClassUse(of.inode, dict(of.own)) for text, of in self.classes.items()},
            counters={counter: place for place, counter in enumerate(self.counters)},
            others=self.others,
            base=self.base,
            ended={pool: dict(self.ended.get(pool, ())) for pool in Pool},
            counted={nonce: dict(sums) for nonce, sums in self.counted.items()},
            removed=dict.fromkeys(self.removed),
            flaws={pool: dict.fromkeys(self.flaws.get(pool, ())) for pool in Pool},
            domain_flaws=self.domain_flaws,
            event_flaws=self.event_flaws,
            transactions=self.transactions,
            shown={(pool, domain, name): number for pool, domain, name, number in self.shown},
            while_beginning=self.while_beginning,
        )

    def numbers(self) -> Iterator[Number]:
        """Yield all numbers that are added up."""
        for of_class in self.classes.values():
            for _, own in of_class.own:
                yield from (own.base, own.base_width, own.highest, own.width)
        for pairs in (*self.ended.values(), *self.counted.values()):
            for _, of in pairs:
                yield from (of.number, of.skew)
        for packed in self._readings():
            yield from (value for value in packed if isinstance(value, int))
        yield from (number for *_, number in self.shown)
        yield from self.while_beginning.values()
        for zone in self.zones.values():
            yield from (zone.range_uj, zone.last_uj, zone.used_uj)

    def check_readings(self) -> None:
        """Raise _Unusable if it is unknown of which counter a value is."""
        known = len(self.counters)
        if len(set(self.counters)) < known or any(len(packed) > known for packed in self._readings()):
            raise _Unusable("its values do not fit its counters")

    def _readings(self) -> Iterator[Packed]:
        yield from self.base.values()
        for other in self.others.values():
            yield from (other.first, other.last)


def _listed(by: Mapping[_K, Mapping[Counter, _V]]) -> dict[_K, list[tuple[Counter, _V]]]:
    return {key: list(of.items()) for key, of in by.items()}


def _text(name: str) -> str:
    """Return the name of a class, which may have any bytes, as a text."""
    return os.fsencode(name).decode("latin-1")


def _name(text: str) -> str:
    return os.fsdecode(text.encode("latin-1"))


class _Version(msgspec.Struct):
    version: int


# Created by the import, as in ``nested``.
_VERSION_DECODER = msgspec.json.Decoder(_Version)
_DECODER = msgspec.json.Decoder(_File)
