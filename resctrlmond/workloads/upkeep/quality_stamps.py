# SPDX-License-Identifier: Apache-2.0
"""Stamps of the files ``quality`` that are up to date when the daemon stops, so that the next start keeps them.

A start computes the file of each workload again, because a daemon that was killed between the write of the file and
that of the record may have left one that is better than the record. That is most of the time of a start with many
workloads. A daemon that stops with no call running leaves the stamps of the files from which it computed: after them,
nothing was written. Each write replaces a file by a new one, so any later write changes a stamp. Without the stamps,
or if one differs, the start computes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.workloads.evidence.run_state import Stamp
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.records.atomic_files import read_file, write_file

log = logging.getLogger(__name__)

_FILE = "quality-stamps.json"
_MODE = 0o640


class _Stamps(msgspec.Struct, frozen=True):
    """The stamps of each workload's files, by key, and that of the folder with the code that has computed them."""

    code: Stamp
    files: dict[str, list[Stamp]]


# Created by the import, as in ``nested``.
_DECODER = msgspec.json.Decoder(_Stamps)


def save(ctx: Context) -> None:
    """Write the stamps of all workloads whose file is up to date. No call may run. Errors are only logged."""
    stamped = (workload for workload in ctx.store.unfinished() if _is_up_to_date(ctx, workload))
    found = {workload.key: stamps for workload in stamped if (stamps := _stamps(ctx, workload)) is not None}
    if not found or ctx.memory.code is None:
        return
    try:
        write_file(_path(ctx), msgspec.json.encode(_Stamps(ctx.memory.code, found)), mode=_MODE)
    except OSError as error:
        log.debug("the next start computes all qualities again: %s", error)


def take(ctx: Context) -> None:
    """Read the stamps that the last daemon has left, and remove their file. They are not valid after an update.

    To be called when the records are loaded.
    """
    path = _path(ctx)
    try:
        # Now, not at the stop: an update may replace the files while this daemon runs.
        ctx.memory.code = _code()
        stamps = _DECODER.decode(read_file(path))
        os.unlink(path)
    except (OSError, ResctrlError, msgspec.DecodeError, UnicodeError) as error:
        log.debug("this start computes all qualities again: %s", error)
        return
    if stamps.code == ctx.memory.code:
        for workload in ctx.store.unfinished():
            ctx.runs.of(workload.key).stamps = stamps.files.get(workload.key)


def note(ctx: Context, workload: Workload) -> None:
    """Remember the stamps of a workload whose file was computed just now. No call may run."""
    if stamps := _stamps(ctx, workload):
        ctx.runs.of(workload.key).stamps = stamps


def is_kept(ctx: Context, workload: Workload) -> bool:
    """Return whether the record and the files of the workload are those of the stamps."""
    known = ctx.runs.of(workload.key).stamps
    return known is not None and known == _stamps(ctx, workload)


def _is_up_to_date(ctx: Context, workload: Workload) -> bool:
    """Return whether the file has the qualities of the record and of each group's checkpoint, and no link is stale.

    The former is known if nothing was written since the start, or since a tick has updated the file with these
    checkpoints (``counters.checkpoint``). Each later change of the workload updates it too
    (``QualityFiles.before_save``).
    """
    if workload.state.is_over or workload.key in ctx.store.unsaved:
        return False
    run = ctx.runs.of(workload.key)
    if any(run.of_group(group).has_stale_links for group in workload.groups):
        return False
    numbers = [ctx.snapshots.checkpoint_number(workload.subfolder(group)) for group in workload.groups]
    return is_kept(ctx, workload) or (all(numbers) and run.kept_numbers == numbers)


def _stamps(ctx: Context, workload: Workload) -> list[Stamp] | None:
    """Return the stamps of the record, the file and each group's checkpoint; None if one is missing."""
    folders = [ctx.snapshots.path(workload.subfolder(group)) for group in workload.groups]
    paths = [ctx.store.path(workload.key), f"{folders[0]}/quality", *(f"{folder}/checkpoint" for folder in folders)]
    try:
        return [_stamp(path) for path in paths]
    except OSError:
        return None


def _code() -> Stamp:
    """Return the number of the rooms and their last change: an update of the package replaces files in them."""
    rooms = [room for room in Path(__file__).parents[1].iterdir() if room.is_dir()]
    return len(rooms), max(room.stat().st_ctime_ns for room in rooms)


def _stamp(path: str) -> Stamp:
    status = os.lstat(path)
    return status.st_ino, status.st_ctime_ns


def _path(ctx: Context) -> str:
    return os.path.join(os.path.dirname(ctx.store.folder), _FILE)
