# SPDX-License-Identifier: Apache-2.0
"""The book of all records: on disk first, then in memory, where a reader finds the last whole one at once."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

from resctrlmond.groups.errors import LimitExceeded
from resctrlmond.groups.record import (
    MAX_CLAIMS,
    MAX_LIVING_MEMBERS,
    MAX_RECORD_BYTES,
    Record,
    Records,
    UnreadableRecord,
    encode,
)
from resctrlmond.resctrl.errors import NoSuchGroup

# What all records may grow to, those of ended runs included: ten thousand pods. A record in memory takes three times
# as much, and a list of them once more. The reserve is for the runtime's hook, which nobody can crowd out.
MAX_BYTES = 32 * 1024 * 1024
MAX_BYTES_WITH_RESERVE = 48 * 1024 * 1024


class Book:
    """Every record, by key, with one lock for each key.

    Records are frozen: a reader takes the one that stands and never waits for a writer. ``watch`` is told of every
    change after it is on disk: the new record, or the key alone when it was dropped.
    """

    def __init__(self, records: Records, watch: Callable[[str, Record | None], None] | None = None) -> None:
        self._store = records
        self._records: dict[str, Record] = {}
        self._sizes: dict[str, int] = {}
        # A lock lives as long as somebody holds it or waits for it: keys come and go by the thousand.
        self._locks: weakref.WeakValueDictionary[str, threading.RLock] = weakref.WeakValueDictionary()
        self._guard = threading.Lock()
        self.watch = watch or (lambda _key, _record: None)
        # Called with the record that stands and the one that is about to be written in its place.
        self.before_put: Callable[[Record | None, Record], None] = lambda _before, _record: None

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """Hold the key: whoever changes its record or its group does it in here, one at a time."""
        with self._guard:
            lock = self._locks.setdefault(key, threading.RLock())
        with lock:
            yield

    @contextlib.contextmanager
    def writing_if_free(self, key: str) -> Iterator[bool]:
        """Hold the key if nobody else does; whether it is held. For who must not wait: its holder may hang."""
        with self._guard:
            lock = self._locks.setdefault(key, threading.RLock())
        held = lock.acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                lock.release()

    def get(self, key: str) -> Record | None:
        """The record of that key as it stands."""
        return self._records.get(key)

    def known(self, key: str) -> Record:
        """The record of that key as it stands. Raises NoSuchGroup."""
        record = self.get(key)
        if record is None:
            raise NoSuchGroup(f"there is no workload {key}", remedy="'resctrlctl list' shows the workloads")
        return record

    def all(self) -> list[Record]:
        """Every record as it stands, in order of the key."""
        return [record for _, record in sorted(self._records.copy().items())]

    def put(self, record: Record) -> Record:
        """Write the record down; when this returns, no crash forgets it. Raises NotWritten.

        One of a further group goes into the record of its workload.
        """
        if record.part:
            self.put(self._records[record.key].with_group(record))
            return record
        if self._records.get(record.key) == record:
            return record
        self.before_put(self._records.get(record.key), record)
        self._sizes[record.key] = self._store.save(record)
        self._records[record.key] = record
        self.watch(record.key, record)
        return record

    def checked(self, record: Record, *, use_reserve: bool = False) -> Record:
        """The record itself, if it and all records together keep to the limits. Raises LimitExceeded.

        For what callers add; the daemon's own notes, such as an end, are never refused.
        """
        if len(record.claims) > MAX_CLAIMS:
            raise LimitExceeded(
                f"{record.key} has {MAX_CLAIMS} claims already", remedy="Release claims that are no longer needed"
            )
        if len(record.living) > MAX_LIVING_MEMBERS:
            raise LimitExceeded(
                f"{record.key} has {MAX_LIVING_MEMBERS} living members already",
                remedy="Assign their control group instead, or remove those that have ended",
            )
        size = len(encode(record))
        if size > MAX_RECORD_BYTES:
            raise LimitExceeded(
                f"the record of {record.key} would take {size} bytes, more than {MAX_RECORD_BYTES}",
                remedy="Assign control groups instead of many members",
            )
        everything = sum(self._sizes.copy().values()) - self._sizes.get(record.key, 0) + size
        most = MAX_BYTES_WITH_RESERVE if use_reserve else MAX_BYTES
        if everything > most and size > self._sizes.get(record.key, 0):
            raise LimitExceeded(
                f"the records of all workloads would take {everything} bytes, more than {most}",
                remedy="Release workloads that are not needed ('resctrlctl list' shows their claims)",
            )
        return record

    def drop(self, key: str) -> None:
        """Forget a record."""
        self._store.delete(key)
        self._sizes.pop(key, None)
        if self._records.pop(key, None) is not None:
            self.watch(key, None)

    def prune(self, ttl_s: float) -> list[str]:
        """Remove unreadable records that were set aside longer than ``ttl_s`` ago; their paths. Raises NotWritten."""
        return self._store.prune(ttl_s)

    def load(self) -> list[UnreadableRecord]:
        """Read what an earlier daemon wrote; what cannot be read is left alone and returned."""
        unreadable = []
        for item in self._store.load():
            if isinstance(item, UnreadableRecord):
                unreadable.append(item)
            else:
                self._records[item.key] = item
                self._sizes[item.key] = len(encode(item))
        return unreadable
