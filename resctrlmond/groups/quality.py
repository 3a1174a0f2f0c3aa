# SPDX-License-Identifier: Apache-2.0
"""``groups/KEY/quality``: how far each total of a workload can be trusted, for readers that have files alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

import msgspec

from resctrlmond.groups.accounting import Quality, Total, worst
from resctrlmond.groups.errors import NotWritten
from resctrlmond.groups.record import Record, State
from resctrlmond.groups.snapshot import Snapshots
from resctrlmond.groups.usage import Live, remembered, used

log = logging.getLogger(__name__)

_STANDING = (State.ACTIVE, State.IDLE, State.ENDING)


class QualityFiles:
    """Writes the files, each before the record or the reply that says the same: a file is never the better one.

    A caller that holds the workload's key writes what is true. One that only reads counters, without the key, makes
    the file worse at most, and keeps in the checkpoint which readings had no number.
    """

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._lock = snapshots.lock

    def before_put(self, before: Record | None, record: Record) -> None:
        """Update the file if ``record``, which is about to replace ``before``, changes a quality. See ``update``."""
        # The baseline of the first group has just been written, with its qualities.
        is_begun = before is not None and before.state is State.PENDING and record.state is State.IDLE
        if before is not None and not is_begun and _rests_on(before) != _rests_on(record):
            self.update(record)

    def update(self, record: Record, live: Live | None = None) -> None:
        """Write the qualities up to the ``live`` readings, or up to the last ones. For who holds the key.

        Raises NotWritten, NotRead.
        """
        with self._lock:
            if not self._snapshots.exists(record.place):
                return
            found = used(self._snapshots, record, remembered(self._snapshots, record) | dict(live or {}))
            self._write(record.place, text(found))

    @contextlib.contextmanager
    def sealing(self, record: Record, completed_at: str) -> Iterator[None]:
        """Write the final qualities of a run whose end values, read at ``completed_at``, are all written."""
        with self._lock:
            self._write(record.place, text(used(self._snapshots, record, {}, completed_at)))
            yield

    def witness(self, record: Record, live: Live, totals: Iterable[Total]) -> None:
        """Make the file no better than these totals, which a caller is about to get. Needs no key. Raises NotRead.

        If it cannot be written, it is removed: a reader of files is not to believe what a caller is told otherwise.
        """
        now = text(totals)
        if not self._snapshots.exists(record.place) or self._snapshots.quality(record.place) == now:
            return
        with self._lock:
            files = self._snapshots
            # It may have ended, and even begun again, since its counters were read.
            if files.is_complete(record.place) or files.created_at(record.place) != record.created_at:
                return
            try:
                for group in record.groups:
                    if group.place in live:
                        files.note_gaps(group.place, live[group.place], group.inodes)
                self._write(record.place, worse(files.quality(record.place), now))
            except NotWritten as error:
                log.warning("%s: %s", record.key, error)
                files.remove_quality(record.place)

    def _write(self, place: str, now: str) -> None:
        if self._snapshots.quality(place) != now:
            self._snapshots.write_quality(place, now)


def text(totals: Iterable[Total]) -> str:
    """The file's text: a line for each event, in order of the name, with the reason where there is one."""
    return "".join(
        " ".join([total.event.name, total.quality.value, *total.reason.split()]) + "\n" for total in totals
    )


def worse(one: str, other: str) -> str:
    """Of each event the line with the worse quality, by two texts; ``one`` where they are the same."""
    lines: dict[str, str] = {}
    for line in [*one.splitlines(), *other.splitlines()]:
        name = line.partition(" ")[0]
        known = lines.setdefault(name, line)
        if worst(_quality(known), _quality(line)) is not _quality(known):
            lines[name] = line
    return "".join(f"{lines[name]}\n" for name in sorted(lines))


def _quality(line: str) -> Quality:
    """The quality that a line has; what somebody else wrote there is to be replaced."""
    words = line.split()
    try:
        return Quality(words[1])
    except (IndexError, ValueError):
        return Quality.EXACT


def _rests_on(record: Record) -> Record:
    """The record without what no total depends on."""
    record = record.as_reported()
    return msgspec.structs.replace(
        record,
        state=State.ACTIVE if record.state in _STANDING else record.state,
        reason=record.reason if record.state.is_over else "",
        claims=(),
        members=(),
        attributes={},
        attribute_owners={},
        priority=0,
        pod_cgroup="",
        follows=False,
        idle_ns=0,
        unassigned=(),
        further=tuple(map(_rests_on, record.further)),
    )
