# SPDX-License-Identifier: Apache-2.0
"""The store of all workloads: one record file for each under /run, and a copy in memory for readers.

A workload is changed in a transaction only, and each change is on disk before it is visible, with three exceptions:
a doubt about the totals of a group or a late member, the undo of a failed call, and the path of a group that another
program renamed. If these cannot be written, for example because /run is full, they are kept in memory,
and are in each later record. Until then, the mode of the record file states that it lacks one: a change of mode needs
no space.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator

import msgspec

from resctrlmond.resctrl.errors import NotRead, ResctrlError, reading
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.model.clock import boot_ns, seconds_since_ns
from resctrlmond.workloads.model.errors import LimitExceeded, NoSuchWorkload
from resctrlmond.workloads.model.workload import (
    Group,
    GroupState,
    Workload,
    replace,
)
from resctrlmond.workloads.records.atomic_files import read_file, write_file, writing
from resctrlmond.workloads.records.record_format import SUFFIX, UnreadableRecord, decode, encode
from resctrlmond.workloads.records.sums import Sums, run_of

_SET_ASIDE = ".unreadable"
_MODE = 0o640
# Set while the record lacks a doubt of the workload, or the undo of a failed call.
_IS_OUTDATED = stat.S_ISVTX
# More than any pod or unit has. A runtime or an agent that never ends its members reaches it.
MAX_LIVING_MEMBERS = 1000
MAX_CLAIMS = 64
# The limit of a record for what callers add. The ends of its members and groups add some more, and a file of 4 MiB
# can still be read back.
MAX_RECORD_BYTES = 1024 * 1024
# The limit of all records together, those of ended runs included: ten thousand pods. In memory a record takes three
# times as much, and a list of all records as much again. The reserve is for the runtime's hook.
MAX_BYTES = 32 * 1024 * 1024
MAX_BYTES_WITH_RESERVE = 48 * 1024 * 1024
_NOT_SAVED = "resctrlmond ended before it could save what it had seen"


class Limit(enum.Enum):
    """The limit of all records together, for what a caller adds."""

    NORMAL = "for every caller"
    WITH_RESERVE = "for the hook of a runtime"


class Transaction(msgspec.Struct, frozen=True, eq=False):
    """The exclusive right to change one workload and its groups. Only ``Store.transaction`` creates one.

    ``workload`` is what was saved last, also after an exception.
    """

    _store: Store
    key: str

    def find(self) -> Workload | None:
        """Return the workload; None if there is none under the key."""
        return self._store._workloads.get(self.key)

    @property
    def workload(self) -> Workload:
        """The workload. Raises NoSuchWorkload."""
        return self.find() or self._store.known(self.key)

    def save(self, workload: Workload, limit: Limit | None = None) -> Workload:
        """Write the workload's record. Does nothing if it is unchanged. Raises NotWritten.

        Return the workload as written: with the doubts that could not be written before. When this returns, the
        change survives a crash. ``limit``: raise LimitExceeded if a caller has added too much. What the daemon adds
        itself, such as an end, has no limit.
        """
        return self._save(workload, limit, is_undo=False)

    def restore(self, workload: Workload) -> Workload:
        """Write the workload as it was before a call that fails now, or as another program renamed its group.

        As ``save``, but the workload is kept in memory if it cannot be written: the record has what the call saved
        first, or the former path, and must not be acted on.
        """
        return self._save(workload, None, is_undo=True)

    def _save(self, workload: Workload, limit: Limit | None, *, is_undo: bool) -> Workload:
        assert workload.key == self.key
        store, before, unsaved = self._store, self.find(), self._store._unsaved.get(self.key)
        if unsaved is not None:
            workload = _with_doubts(workload, unsaved.doubted)
        elif before == workload:
            return workload
        data = encode(workload)
        if limit is not None:
            store.check_limits(workload, limit, len(data))
        path = store.path(self.key)
        try:
            if before is not None:
                store.before_save(before if unsaved is None else unsaved.on_disk, workload)
                is_end = workload.is_finished and not before.is_finished and not is_undo
                if is_end:
                    store.before_finish(workload)
                counted = store.counted(before, workload, is_end=is_end)
                if counted is not workload:
                    workload, data = counted, encode(counted)
            with writing(path):
                if path in store._unreadable:
                    store._keep_unreadable(path)
                write_file(path, data, mode=_MODE)
        except ResctrlError:
            store.not_replaced(before if unsaved is None else unsaved.on_disk)
            if before == workload:
                return workload  # it is kept already
            if before is not None:
                store._keep_unsaved(before, workload if is_undo else _with_doubts(before, workload))
            raise
        store._unsaved.pop(self.key, None)
        if store.sums is not None and workload.is_finished:
            store.sums.saved(workload)
        store.not_replaced(workload)  # a call that failed may have written it again
        store._keep(workload, len(data))
        store.on_change(self.key, workload)
        return workload

    def save_group(self, group: Group) -> Group:
        """Write the workload's record with that group in it. Return the group as written (see ``save``).

        Raises NotWritten.
        """
        saved = self.save(self.workload.with_group(group)).group(group.folder)
        assert saved is not None
        return saved

    def drop(self) -> None:
        """Remove the workload and its record. Raises NotWritten."""
        store, path = self._store, self._store.path(self.key)
        before = self.find()
        if store.sums is not None and before is not None and before.uncounted:
            store.sums.prepare_removal(before)
        try:
            with writing(path):
                if path in store._unreadable:
                    store._keep_unreadable(path)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        except ResctrlError:
            unsaved = store._unsaved.get(self.key)
            store.not_replaced(before if unsaved is None else unsaved.on_disk)
            raise
        if store._forget(self.key):
            store.on_change(self.key, None)


class Store:
    """All workloads, by key. Readers never wait for a transaction: workloads are frozen.

    A record file that could not be read is left alone. If its key is used again, it is kept as
    ``KEY.json.unreadable`` until ``prune`` removes it.

    ``on_change`` is called after each change with the key and the workload, or None if it was dropped.
    ``before_save`` is called before a record is replaced, with the workload of the last record and the new one.
    ``before_finish`` is called before a record is saved in which the run has finished, and again if that save failed.
    If it raises NotWritten, the record is not saved. ``on_unsaved`` is called with the key of a workload that is kept
    in memory only, and ``on_dropped`` with that of one that was dropped. ``sums`` counts each run that ends.
    ``on_end`` is called with the key after each transaction,
    whether or not it changed the workload.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.on_change: Callable[[str, Workload | None], None] = lambda _key, _workload: None
        self.before_save: Callable[[Workload, Workload], None] = lambda _before, _workload: None
        self.before_finish: Callable[[Workload], None] = lambda _workload: None
        self.on_unsaved: Callable[[str], None] = lambda _key: None
        self.on_dropped: Callable[[str], None] = lambda _key: None
        self.on_end: Callable[[str], None] = lambda _key: None
        self.sums: Sums | None = None
        self._workloads: dict[str, Workload] = {}
        # How often a workload was saved or removed. Read it before the workloads.
        self.changes = 0
        # By key: the workloads that are kept in memory only.
        self._unsaved: dict[str, _Unsaved] = {}
        # The keys of the workloads with a group that waits for an RMID, or is being created. With a search instead, a
        # createRuntime takes 1.15 times the CPU time with 500 workloads.
        self._pending: set[str] = set()
        # Those of the workloads with a group that lacks bandwidth counters. With a search, an idle minute takes 1.15
        # times the CPU time.
        self._without_counters: set[str] = set()
        # Runs are kept for a time after their end, thousands on a busy host: what is done each second, or for each
        # verb, must not walk over them. The others; and these, as a dictionary without values, in the order in which
        # they finished. With a search in 800 workloads, each list of the unfinished ones takes 2.7 ms and not 0.1.
        self._unfinished: set[str] = set()
        self._finished: dict[str, None] = {}
        # By group that has a directory in resctrl: the keys of its workloads. Two records can name one group, if one
        # of them is older than a crash. A search in 500 workloads takes 0.2 ms, and this 7 us.
        self._owners: dict[GroupRef, frozenset[str]] = {}
        # The keys of the runs that have finished, or were dropped, since the last take_ended().
        self._ended: set[str] = set()
        # The size of each record in bytes, and the sum.
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        # A lock is removed with its last user, because keys come and go.
        self._locks: weakref.WeakValueDictionary[str, threading.RLock] = weakref.WeakValueDictionary()
        self._guard = threading.Lock()
        self._unreadable: set[str] = set()
        # When this daemon set aside, or found, a file that could not be read (clock.boot_ns()).
        self._set_aside: dict[str, int] = {}

    @contextlib.contextmanager
    def transaction(self, key: str) -> Iterator[Transaction]:
        """Lock the key, and change its workload. A thread can nest transactions of the same key."""
        with self._guard:
            lock = self._locks.setdefault(key, threading.RLock())
        try:
            with lock:
                yield Transaction(self, key)
        finally:
            self.on_end(key)

    @contextlib.contextmanager
    def transaction_if_free(self, key: str) -> Iterator[Transaction | None]:
        """Like ``transaction``, but return None if another thread has locked the key. It may hang in the kernel."""
        with self._guard:
            lock = self._locks.setdefault(key, threading.RLock())
        is_locked = lock.acquire(blocking=False)
        try:
            yield Transaction(self, key) if is_locked else None
        finally:
            if is_locked:
                lock.release()
                self.on_end(key)

    # -- read

    def get(self, key: str) -> Workload | None:
        """Return the workload of that key, if there is one."""
        return self._workloads.get(key)

    def known(self, key: str) -> Workload:
        """Return the workload of that key. Raises NoSuchWorkload."""
        workload = self._workloads.get(key)
        if workload is None:
            raise NoSuchWorkload(f"there is no workload {key}", remedy="'resctrlctl list' shows the workloads")
        return workload

    def by_key(self) -> dict[str, Workload]:
        """Return all workloads by key, in any order: thousands in less than a millisecond."""
        return self._workloads.copy()

    def all(self) -> list[Workload]:
        """Return all workloads, in order of the key."""
        return [workload for _, workload in sorted(self.by_key().items())]

    def unfinished(self) -> list[Workload]:
        """Return the workloads that are not finished, all that have a group among them, in order of the key."""
        found = map(self._workloads.get, sorted(self._unfinished.copy()))
        return [workload for workload in found if workload is not None]

    def finished(self) -> Iterator[Workload]:
        """Yield the finished workloads, the one that finished first at the beginning."""
        return (workload for key in self._finished.copy() if (workload := self._workloads.get(key)) is not None)

    def take_ended(self) -> set[str]:
        """Return the keys of the runs that have finished, or were dropped, since the last call."""
        with self._guard:
            ended, self._ended = self._ended, set()
            return ended

    def add_ended(self, key: str) -> None:
        """Add a key that the next ``take_ended`` returns again."""
        with self._guard:
            self._ended.add(key)

    def refs(self) -> set[GroupRef]:
        """Return the locations of all groups that have a directory in resctrl."""
        return {group.ref for workload in self.unfinished() for group in workload.existing_groups}

    def owner_of(self, ref: GroupRef) -> Workload | None:
        """Return the workload that is not finished whose group that is. The cost does not grow with the workloads."""
        owners = map(self._workloads.get, sorted(self._owners.get(ref, ())))
        return next((one for one in owners if one and not one.is_finished and one.group_at(ref) is not None), None)

    def pending(self) -> list[Workload]:
        """Return the workloads with a group that waits for an RMID, or is being created, in order of the key."""
        found = (self._workloads.get(key) for key in sorted(self._pending.copy()))
        return [workload for workload in found if workload is not None]

    def without_counters(self) -> list[Workload]:
        """Return the workloads with a group that lacks bandwidth counters, in order of the key."""
        found = (self._workloads.get(key) for key in sorted(self._without_counters.copy()))
        return [workload for workload in found if workload is not None]

    def check_limits(self, workload: Workload, limit: Limit = Limit.NORMAL, size: int | None = None) -> None:
        """Raise LimitExceeded if the workload, or all of them with it, would be too large.

        ``size`` is that of its record in bytes, if known.
        """
        if len(workload.claims) > MAX_CLAIMS:
            raise LimitExceeded(
                f"{workload.key} has {MAX_CLAIMS} claims already",
                remedy="Release claims that are no longer needed",
            )
        if sum(member.is_living for member in workload.members) > MAX_LIVING_MEMBERS:
            raise LimitExceeded(
                f"{workload.key} has {MAX_LIVING_MEMBERS} living members already",
                remedy="Assign their control group instead, or remove those that have ended",
            )
        size = len(encode(workload)) if size is None else size
        if size > MAX_RECORD_BYTES:
            raise LimitExceeded(
                f"the record of {workload.key} would take {size} bytes, more than {MAX_RECORD_BYTES}",
                remedy="Assign control groups instead of many members",
            )
        before = self._sizes.get(workload.key, 0)
        total = self._bytes - before + size
        most = MAX_BYTES_WITH_RESERVE if limit is Limit.WITH_RESERVE else MAX_BYTES
        if total > most and size > before:
            raise LimitExceeded(
                f"the records of all workloads would take {total} bytes, more than {most}",
                remedy="Release workloads that are not needed ('resctrlctl list' shows their claims)",
            )

    # -- write

    def counted(self, before: Workload, workload: Workload, *, is_end: bool) -> Workload:
        """Add a run that ends to the sums. Return the workload that states whether their file lacks the run."""
        sums = self.sums
        if sums is None:
            return workload
        if before.uncounted and run_of(before) != run_of(workload):
            sums.prepare_removal(before)
        is_lacking = workload.is_finished and (not sums.count(workload) if is_end else sums.lacks(workload))
        return workload if workload.uncounted == is_lacking else replace(workload, uncounted=is_lacking)

    def not_replaced(self, on_disk: Workload | None) -> None:
        """Take back what ``counted`` and ``drop`` have prepared for the removal of the record of an ended run."""
        if self.sums is not None and on_disk is not None and on_disk.uncounted:
            self.sums.cancel_removal(on_disk)

    def path(self, key: str) -> str:
        """Return the path of a record."""
        return f"{self.folder}/{key}{SUFFIX}"

    def _keep(self, workload: Workload, size: int) -> None:
        """Keep the workload as it is in its record, which has ``size`` bytes."""
        with self._guard:
            self._bytes += size - self._sizes.get(workload.key, 0)
            self._sizes[workload.key] = size
        self._show(workload)

    def _show(self, workload: Workload) -> None:
        """Make the workload visible to readers."""
        key = workload.key
        with self._guard:
            # Readers do not take the guard. While one workload replaces the other, the index has the groups of both:
            # a task of a group without an owner could be taken, and the totals of that group would remain exact.
            before, now = self._refs(key), {group.ref for group in workload.existing_groups}
            for ref in now - before:
                self._owners[ref] = self._owners.get(ref, frozenset()) | {key}
            self._workloads[key] = workload
            self._remove_owner(key, before - now)
            if any(group.state is GroupState.PENDING for group in workload.groups):
                self._pending.add(key)
            else:
                self._pending.discard(key)
            if any(group.unassigned for group in workload.existing_groups):
                self._without_counters.add(key)
            else:
                self._without_counters.discard(key)
            if workload.is_finished:
                if key not in self._finished:
                    self._finished[key] = None
                    self._ended.add(key)
                self._unfinished.discard(key)
            else:
                self._finished.pop(key, None)
                self._unfinished.add(key)
            self.changes += 1

    def _refs(self, key: str) -> set[GroupRef]:
        """Return the groups of the present workload of that key. The caller holds the guard."""
        workload = self._workloads.get(key)
        return {group.ref for group in workload.existing_groups} if workload is not None else set()

    def _remove_owner(self, key: str, refs: set[GroupRef]) -> None:
        """Remove the key from the owners of these groups. The caller holds the guard."""
        for ref in refs:
            others = self._owners.get(ref, frozenset()) - {key}
            if others:
                self._owners[ref] = others
            else:
                self._owners.pop(ref, None)

    def _forget(self, key: str) -> bool:
        """Forget the workload. Return whether there was one."""
        with self._guard:
            self._remove_owner(key, self._refs(key))
            self._bytes -= self._sizes.pop(key, 0)
            self._pending.discard(key)
            self._without_counters.discard(key)
            self._unfinished.discard(key)
            self._finished.pop(key, None)
            self._ended.add(key)
        self._unsaved.pop(key, None)
        is_known = self._workloads.pop(key, None) is not None
        self.on_dropped(key)
        with self._guard:
            self.changes += 1
        return is_known

    @property
    def unsaved(self) -> list[str]:
        """The keys of the workloads that are kept in memory only (see the module). The next save writes them."""
        return list(self._unsaved)

    def _keep_unsaved(self, before: Workload, kept: Workload) -> None:
        """Keep a workload in memory whose doubts, or undo of a failed call, could not be saved."""
        if kept == before:
            return
        unsaved = self._unsaved.get(before.key)
        self._unsaved[before.key] = _Unsaved(before if unsaved is None else unsaved.on_disk, kept)
        self._show(kept)
        with contextlib.suppress(OSError):
            os.chmod(self.path(before.key), _MODE | _IS_OUTDATED)
        with contextlib.suppress(ResctrlError):
            self.on_unsaved(before.key)
        self.on_change(before.key, kept)

    def _keep_unreadable(self, path: str) -> None:
        os.rename(path, path + _SET_ASIDE)
        self._unreadable.remove(path)
        self._set_aside[path + _SET_ASIDE] = boot_ns()

    def note_loss_of_unreadable(self, name: str) -> None:
        """State that the record that could not be read, and whose group has that name, lacks a doubt.

        A version that can read it then makes its groups estimated. Does nothing if there is none. Raises NotWritten.
        """
        for path in self._unreadable.copy():
            # The name is the key, after the prefix of the configuration.
            if name.endswith(os.path.basename(path).removesuffix(SUFFIX)):
                with writing(path), contextlib.suppress(FileNotFoundError):
                    os.chmod(path, _MODE | _IS_OUTDATED)

    def prune(self, ttl_s: float) -> list[str]:
        """Remove unreadable records that were set aside longer than ``ttl_s`` ago. Return their paths.

        Raises NotWritten.
        """
        removed = []
        for path, then in sorted(self._set_aside.items()):
            if seconds_since_ns(then) < ttl_s:
                continue
            with writing(path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                removed.append(path)
            del self._set_aside[path]
        return removed

    def load(self) -> list[UnreadableRecord]:
        """Read the records of the last daemon. Return those that cannot be read. Raises NotRead."""
        unreadable = []
        for item in self.read_all():
            if isinstance(item, UnreadableRecord):
                unreadable.append(item)
            else:
                self._keep(self._with_unsaved_doubts(item), len(encode(item)))
        with self._guard:
            self._finished = dict.fromkeys(
                sorted(self._finished, key=lambda key: self._workloads[key].first.completed_ns)
            )
        return unreadable

    def _with_unsaved_doubts(self, workload: Workload) -> Workload:
        """Return a workload of the last daemon. If that could not write a doubt, all groups are estimated."""
        path = self.path(workload.key)
        with reading("look at a record", path):
            is_outdated = os.stat(path).st_mode & _IS_OUTDATED
        if not is_outdated:
            return workload
        doubted, unknown = workload, doubt(Reason.CHANGES_UNKNOWN, cause=_NOT_SAVED)
        for group in workload.groups:
            if group.state is not GroupState.PENDING:
                doubted = doubted.doubted(group, unknown)
        self._unsaved[workload.key] = _Unsaved(workload, doubted)
        return doubted

    def read_all(self) -> Iterator[Workload | UnreadableRecord]:
        """Read all records, in order of the key, without keeping them.

        Raises NotRead if it cannot be known what the folder holds: a record that counts as missing would lose its
        group.
        """
        with reading("list the records", self.folder):
            names = sorted(os.listdir(self.folder))
        for name in names:
            if name.endswith(SUFFIX + _SET_ASIDE):
                self._set_aside.setdefault(os.path.join(self.folder, name), boot_ns())
            if name.startswith(".") or not name.endswith(SUFFIX):
                continue
            path = os.path.join(self.folder, name)
            try:
                workload = decode(_read(path), path)
                if workload.key + SUFFIX != name:
                    raise UnreadableRecord(path, f"is about another workload, {workload.key!r}")
            except (UnreadableRecord, NotRead, OSError) as error:
                # A lack of memory or descriptors passes. A page of /run that is lost (EIO again) stays lost, and must
                # not keep the other workloads from being served.
                if isinstance(error, NotRead) and error.errno != errno.EIO:
                    raise
                self._unreadable.add(path)
                yield error if isinstance(error, UnreadableRecord) else UnreadableRecord(path, str(error))
            else:
                yield workload


class _Unsaved(msgspec.Struct, frozen=True):
    """The workload of the last record, and the one in memory, whose doubts and late members this record lacks."""

    on_disk: Workload
    doubted: Workload


def _with_doubts(workload: Workload, doubted: Workload) -> Workload:
    """Return the workload with the doubts about its groups, and with the late members, of ``doubted``."""
    for group in workload.groups:
        # A group that waits for an RMID has no begin values that could be doubted.
        is_same = (other for other in doubted.groups if other.nonce == group.nonce != 0)
        other = next(is_same, None)
        if other is None or GroupState.PENDING in (group.state, other.state):
            continue
        is_reallocated = group.is_reallocated or other.is_reallocated
        workload = workload.with_group(replace(group.doubted(*other.doubts), is_reallocated=is_reallocated))
    for member in doubted.members:
        known = workload.member(member.id)
        if known is not None and member.late and not known.late:
            workload = workload.with_member(replace(known, late=True, may_have_run=member.may_have_run))
    return workload


def _read(path: str) -> bytes:
    """Return the content of a record, read a second time after EIO. Raises NotRead.

    An error that passes must not cost a workload its group: a group without a record and without tasks is removed.
    """
    try:
        return read_file(path)
    except NotRead as error:
        if error.errno != errno.EIO:
            raise
    return read_file(path)
