# SPDX-License-Identifier: Apache-2.0
"""The format of record files: one JSON object for each workload, with its version."""

from __future__ import annotations

import os

import msgspec

from resctrlmond.workloads.figures.reasons import InvalidDoubt, check_doubts
from resctrlmond.workloads.model.errors import InvalidClass, InvalidKey
from resctrlmond.workloads.model.validation import canonical_key, valid_class
from resctrlmond.workloads.model.workload import ROOT_FOLDER, Workload

# A record of another version is not changed.
VERSION = 1
# The end of a record's file name.
SUFFIX = ".json"


class UnreadableRecord(Exception):
    """A record file that is damaged, or of another version. ``key`` is the workload's key by the file's name."""

    def __init__(self, path: str, why: str, *, is_of_other_version: bool = False) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.key = os.path.basename(path).removesuffix(SUFFIX)
        self.is_of_other_version = is_of_other_version


def encode(workload: Workload) -> bytes:
    """Return the content of a record file: one JSON object and a newline."""
    data = b'{"version":%d,%b' % (VERSION, msgspec.json.encode(workload)[1:])
    return msgspec.json.format(data, indent=1) + b"\n"


def decode(data: bytes, path: str) -> Workload:
    """Return the workload of a record file. ``path`` is only named in errors.

    Raises UnreadableRecord if it is damaged, or of another version.
    """
    try:
        version = _VERSION_DECODER.decode(data).version
        if version != VERSION:
            raise UnreadableRecord(
                path,
                f"written by another version of resctrlmond (record format {version}, not {VERSION}), and not "
                "changed: install that version to continue with it, or remove the file and restart this one to "
                "give it up",
                is_of_other_version=True,
            )
        workload = _DECODER.decode(data)
        _check_names(workload)
        for group in workload.groups:
            check_doubts(group.doubts)
    except (msgspec.DecodeError, UnicodeError, RecursionError, InvalidKey, InvalidClass, InvalidDoubt) as error:
        raise UnreadableRecord(path, f"not a valid record: {error}") from error
    return workload


def _check_names(workload: Workload) -> None:
    """Raise InvalidKey or InvalidClass for a name that must not become a part of a path."""
    canonical_key(workload.key)
    if not workload.groups or workload.first.folder:
        raise InvalidKey(f"{workload.key} has no first group")
    folders = [group.folder for group in workload.groups]
    if len(set(folders)) < len(folders):
        raise InvalidKey(f"two groups of {workload.key} have the same folder")
    for group in workload.groups:
        if not valid_class(group.name):
            raise InvalidKey(f"a group of {workload.key} has no name")
        valid_class(group.class_)
        if group.folder != ROOT_FOLDER:
            valid_class(group.folder)


class _Version(msgspec.Struct):
    version: int


# Created by the import, as in ``nested``.
_VERSION_DECODER = msgspec.json.Decoder(_Version)
_DECODER = msgspec.json.Decoder(Workload)
