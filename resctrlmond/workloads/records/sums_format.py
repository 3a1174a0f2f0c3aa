# SPDX-License-Identifier: Apache-2.0
"""The format of the file of the sums."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, localcontext

import msgspec

from resctrlmond.resctrl.counters import EXACTLY
from resctrlmond.workloads.figures.accounting import digits
from resctrlmond.workloads.model.states import NameKind, Quality
from resctrlmond.workloads.records.sums_entries import (
    MAX_NAME_LENGTH,
    MAX_NAMES,
    Amounts,
    Counted,
    Names,
    NameSums,
    Number,
    Run,
    RunUse,
)

VERSION = 1
_NUMBER = re.compile(r"[0-9]{1,60}(\.[0-9]{1,9})?", re.ASCII)


class Unusable(Exception):
    """The file cannot be used, although it can be read."""


class Contents(msgspec.Struct):
    """The content of the file. ``since``, ``reset`` and ``lost`` are those of ``SumsUse``.

    ``counted`` are the runs in the sums whose records do not state that yet. ``renamed``: the amounts of running
    workloads that had other names, which cannot be computed again.
    """

    since: str
    reset: str
    lost: int
    names: dict[NameKind, dict[str, NameSums]]
    counted: dict[Run, Counted]
    renamed: dict[Run, RunUse]


class _Version(msgspec.Struct):
    version: int


class _NameInFile(msgspec.Struct):
    ends: dict[Quality, int]
    amounts: dict[str, dict[Quality, str]]
    missing: int = 0


class _PartInFile(msgspec.Struct):
    names: tuple[str, str, str, str]
    amounts: dict[str, str]


class _RunInFile(msgspec.Struct):
    key: str
    generation: int
    nonce: int
    names: tuple[str, str, str, str]
    lost: bool
    qualities: dict[str, Quality]
    parts: list[_PartInFile]
    has_run: bool = False


class _File(msgspec.Struct, rename="camel"):
    boot_id: str
    since: str
    reset: str
    lost: int
    sums: dict[NameKind, dict[str, _NameInFile]]
    counted: list[_RunInFile]
    renamed: list[_RunInFile] = []


# Created by the import, as in ``nested``.
_VERSION_DECODER = msgspec.json.Decoder(_Version)
_DECODER = msgspec.json.Decoder(_File)


def decode(data: bytes, boot_id: str) -> Contents:
    """Return the content of a file. Raises Unusable, ValueError and msgspec.DecodeError."""
    version = _VERSION_DECODER.decode(data).version
    if version != VERSION:
        raise Unusable(f"written by another version of resctrlmond (format {version}, not {VERSION})")
    found = _DECODER.decode(data)
    if found.boot_id != boot_id:
        raise Unusable("written before this boot")
    return Contents(
        found.since,
        found.reset,
        found.lost,
        {grouping: _names_from(found.sums.get(grouping, {})) for grouping in NameKind},
        {_run_of(one): Counted(_use_from(one), 0, one.lost) for one in found.counted},
        {_run_of(one): _use_from(one) for one in found.renamed},
    )


def encode(contents: Contents, boot_id: str) -> bytes:
    """Return the content of the file. Only the names that have changed are encoded."""
    since, reset, lost = contents.since, contents.reset, contents.lost
    head = {"version": VERSION, "bootId": boot_id, "since": since, "reset": reset, "lost": lost}
    parts = [msgspec.json.encode(head)[:-1], b',\n"sums":{']
    for number, (grouping, names) in enumerate(contents.names.items()):
        parts.append(b'%b\n"%b":{\n' % (b"," if number else b"", grouping.encode()))
        parts.append(b",\n".join([of.encoded or _encode(name, of) for name, of in names.items()]))
        parts.append(b"}")
    counted = [_encoded_run(run, counted.use, counted.had_loss) for run, counted in contents.counted.items()]
    renamed = [_encoded_run(run, use) for run, use in contents.renamed.items()]
    runs = msgspec.json.encode(counted), msgspec.json.encode(renamed)
    parts.append(b'},\n"counted":%b,\n"renamed":%b}\n' % runs)
    return b"".join(parts)


def _encode(name: str, of: NameSums) -> bytes:
    amounts = {
        event: {quality: digits(number) for quality, number in by_quality.items()}
        for event, by_quality in of.amounts.items()
    }
    content = {"ends": of.ends, "amounts": amounts, "missing": of.missing}
    of.encoded = b"%b:%b" % (msgspec.json.encode(name), msgspec.json.encode(content))
    return of.encoded


def _encoded_run(run: Run, use: RunUse, had_loss: bool = False) -> _RunInFile:
    parts = [
        _PartInFile(_as_in_file(names), {event: digits(number) for event, number in part.items()})
        for names, part in use.parts.items()
    ]
    return _RunInFile(*run, _as_in_file(use.names), had_loss, use.qualities, parts, use.has_run)


def _as_in_file(names: Names) -> tuple[str, str, str, str]:
    """Return the names as a tuple of four, which is their type in the file."""
    namespace, slice_, user, profile = names
    return namespace, slice_, user, profile


def _names_from(names: Mapping[str, _NameInFile]) -> dict[str, NameSums]:
    if len(names) > MAX_NAMES + 2 or any(len(name) > MAX_NAME_LENGTH for name in names):
        raise Unusable("it has too many names, or names that are too long")
    return {name: NameSums(of.ends, _amounts_from(of.amounts), of.missing) for name, of in names.items()}


def _amounts_from(amounts: dict[str, dict[Quality, str]]) -> Amounts:
    return {event: {quality: _number(text) for quality, text in of.items()} for event, of in amounts.items()}


def _run_of(one: _RunInFile) -> Run:
    return one.key, one.generation, one.nonce


def _use_from(one: _RunInFile) -> RunUse:
    parts: dict[Names, dict[str, Number]] = {
        part.names: {event: _number(text) for event, text in part.amounts.items()} for part in one.parts
    }
    return RunUse(one.names, one.has_run, None, parts, one.qualities)


def _number(text: str) -> Number:
    if not _NUMBER.fullmatch(text):
        raise Unusable(f"{text[:64]!r} is not a number")
    with localcontext(EXACTLY):
        return Decimal(text) if "." in text else int(text)
