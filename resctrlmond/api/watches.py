# SPDX-License-Identifier: Apache-2.0
"""Send the changes of workloads to clients that watch, in order, with the totals of each run that ends.

All watchers get the same changes, which are converted and encoded once. A watcher that does not read has its own end:
the daemon never waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from resctrlmond.api import translate, types
from resctrlmond.api.access import Caller, is_privileged
from resctrlmond.api.lists import PAGE_BYTES
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.resctrl.errors import NotRead, ResctrlError
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.changes import ChangeKind
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.errors import LimitExceeded, TooSlow
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.records.totals import shown
from resctrlmond.workloads.verbs.read import read

# As ``service.Service.run``.
Run: TypeAlias = Callable[..., Awaitable[Any]]

_log = logging.getLogger(__name__)

# The changes of a workload within this time become one, but for its end.
_BATCH_S = 0.01
# As JSON, of one watcher. All watchers get the same objects, so this is also the most for all of them.
MAX_WAITING_BYTES = 8 * 1024 * 1024
# Each watcher of another user is one of 64 connections that such a user may have.
MAX_WATCHERS, MAX_OF_OTHERS, MAX_OF_ONE_UID = 128, 64, 16


class _Item(msgspec.Struct, eq=False):
    """A workload to report: as it is after changes, None once it is removed; or ``end``, the encoded end of a run.

    ``has_new_status``: a field that is not in its record has changed.
    """

    key: str
    at: str
    workload: Workload | None
    end: bytes = b""
    has_new_status: bool = False


class _Watcher:
    """The changes that one client has not been sent yet, encoded. Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._awake = asyncio.Event()
        self._error: ResctrlError | None = None

    def add(self, changes: Iterable[bytes]) -> None:
        if self._error is not None:
            return
        for change in changes:
            self._waiting.append(change)
            self._bytes += len(change)
        if self._bytes > MAX_WAITING_BYTES:
            self.fail(
                TooSlow(
                    f"changes were not read in time: {len(self._waiting)} were waiting",
                    remedy="Call Watch again, which lists the workloads first, and read without pauses",
                )
            )
        self._awake.set()

    def fail(self, error: ResctrlError) -> None:
        """Have the next ``get`` raise an error."""
        self._error = self._error or error
        self._waiting.clear()
        self._bytes = 0
        self._awake.set()

    async def get(self) -> list[bytes]:
        """Wait for changes, and return the next ones, of a page in size or a single one. Raises ResctrlError."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._awake.clear()
            await self._awake.wait()
        found: list[bytes] = []
        size = 0
        while self._waiting and (not found or size + len(self._waiting[0]) <= PAGE_BYTES):
            size += len(self._waiting[0])
            found.append(self._waiting.popleft())
        self._bytes -= size
        return found


class Watches:
    """The clients that watch workloads. Belongs to the event loop, but for ``ended``.

    ``report`` converts a workload to the type of the interfaces. It may read files.
    """

    def __init__(self, ctx: Context, workers: Workers, report: Callable[[Workload], types.Workload]) -> None:
        self._ctx = ctx
        self._workers = workers
        self._report = report
        # With their user ids.
        self._watchers: dict[_Watcher, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sender: asyncio.Task[None] | None = None
        # By key: the workloads as the watchers know them. Empty without watchers.
        self._known: dict[str, Workload] = {}
        # Not sent yet, in their order; and, by key, the last item of a workload if further changes can be part of it.
        self._items: list[_Item] = []
        self._open: dict[str, _Item] = {}
        self._awake = asyncio.Event()

    # -- what happens

    def changed(self, key: str, workload: Workload | None, *, has_new_status: bool = False) -> None:
        """Record that a workload was added or changed, or removed (None).

        ``has_new_status``: what the daemon keeps about it beside its record has changed.
        """
        if not self._watchers:
            return
        if (item := self._open.get(key)) is not None and item.workload is not None:
            item.workload = workload
            item.has_new_status |= has_new_status
            return
        self._open[key] = item = _Item(key, utc_now(), workload, has_new_status=has_new_status)
        self._items.append(item)
        self._awake.set()

    def ended(self, workload: Workload) -> None:
        """Record that a run has ended. Call this in its transaction, when the end values are written.

        Several runs of a key may end before the first one is sent: unlike other changes, each is reported.
        """
        loop = self._loop
        if loop is None or not self._watchers:
            return
        item = _Item(workload.key, utc_now(), workload)
        try:
            item.end = self._end(item, lambda over: shown(over, self._ctx.quality.final_totals(over)))
        except Exception:
            # A defect here must not keep a workload from ending.
            _log.exception("%s: the end cannot be reported to the clients that watch", workload.key)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._add_end, item)

    def _add_end(self, item: _Item) -> None:
        if not self._watchers:
            return
        self._awake.set()
        if (last := self._open.get(item.key)) is not None and _generation(last) > _generation(item):
            # The next run began before the event loop came to this call.
            self._items.insert(self._items.index(last), item)
            return
        self._open.pop(item.key, None)
        self._items.append(item)

    # -- the streams

    async def stream(self, caller: Caller, run: Run) -> AsyncGenerator[types.WatchReply, None]:
        """Yield the workloads that have not ended, and then their changes, without end.

        ``run`` runs a call in a thread as the rights of the caller allow. Raises LimitExceeded if too many clients
        watch, and TooSlow if the caller does not read.
        """
        with self._watching(caller) as watcher:
            # All changes that come are relative to the workloads known now. Thousands of them have ended, and
            # each reader may call this over and over: the event loop must not walk over them.
            present = _present(self._known.copy())
            while page := await run(caller, Lane.RECORDS, self._page, present):
                yield _reply(page)
            yield _reply([], listed=True)
            while True:
                yield _reply(await watcher.get())

    @contextlib.contextmanager
    def _watching(self, caller: Caller) -> Iterator[_Watcher]:
        self._check_room(caller.uid)
        watcher = _Watcher()
        if not self._watchers:
            self._start()
        self._watchers[watcher] = caller.uid
        try:
            yield watcher
        finally:
            del self._watchers[watcher]
            if not self._watchers:
                self._stop()

    def _check_room(self, uid: int) -> None:
        by_uid = Counter(self._watchers.values())
        others = sum(count for other, count in by_uid.items() if not is_privileged(other))
        if by_uid.total() < MAX_WATCHERS and is_privileged(uid):
            return
        if by_uid.total() < MAX_WATCHERS and others < MAX_OF_OTHERS and by_uid[uid] < MAX_OF_ONE_UID:
            return
        raise LimitExceeded(
            f"{by_uid.total()} clients watch workloads already, {by_uid[uid]} of them of uid {uid}",
            remedy=f"End some of them: at most {MAX_WATCHERS} may, {MAX_OF_OTHERS} of all users other than root"
            f" and {MAX_OF_ONE_UID} of each",
        )

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._known = self._ctx.store.by_key()
        self._sender = self._loop.create_task(self._send())

    def _stop(self) -> None:
        assert self._sender is not None
        self._sender.cancel()
        self._known, self._items, self._open = {}, [], {}

    # -- what is sent

    async def _send(self) -> None:
        while True:
            await self._awake.wait()
            await asyncio.sleep(_BATCH_S)
            self._awake.clear()
            items, self._items, self._open = self._items, [], {}
            try:
                changes, known = await self._workers.run(Lane.RECORDS, self._changes, items, self._known)
            except Exception as error:
                _log.exception("cannot report changes to the clients that watch")
                # Later streams begin with the workloads as they are now.
                self._known = self._ctx.store.by_key()
                for watcher in self._watchers:
                    watcher.fail(NotRead(f"changes could not be reported: {error}", remedy="Call Watch again"))
                continue
            for key, workload in known.items():
                if workload is None:
                    self._known.pop(key, None)
                else:
                    self._known[key] = workload
            for watcher in self._watchers:
                watcher.add(changes)

    def _page(self, present: Iterator[_Item]) -> list[bytes]:
        """Encode the next workloads that are present, of a page in size."""
        found: list[bytes] = []
        size = 0
        for item in present:
            found.append(self._encoded(ChangeKind.PRESENT, item))
            size += len(found[-1])
            if size >= PAGE_BYTES:
                break
        return found

    def _changes(
        self, items: Iterable[_Item], known: Mapping[str, Workload]
    ) -> tuple[list[bytes], dict[str, Workload | None]]:
        """Encode the changes, and return the workloads as they are known after that, None for removed ones."""
        found: list[bytes] = []
        now_known: dict[str, Workload | None] = {}
        for item in items:
            before = now_known[item.key] if item.key in now_known else known.get(item.key)
            if _is_repeated(before, item.workload):
                continue
            if before is not None and item.end and before.generation > _generation(item):
                found.append(item.end)
                continue
            now_known[item.key] = item.workload
            for kind in (ChangeKind.CHANGED,) if _is_undone(before, item) else self._kinds(before, item):
                if kind is ChangeKind.ENDED:
                    found.append(item.end or self._end(item, self._totals))
                else:
                    found.append(self._encoded(kind, item))
        return found, now_known

    def _kinds(self, before: Workload | None, item: _Item) -> tuple[ChangeKind, ...]:
        """Return what has happened to a workload; nothing if a client cannot see it."""
        now = item.workload
        if now is None:
            return () if before is None else (ChangeKind.REMOVED,)
        if before is None or _run(before) != _run(now):
            first = ChangeKind.PENDING if now.state is State.PENDING else ChangeKind.ADDED
            return (first, ChangeKind.ENDED) if now.is_finished else (first,)
        if now.is_finished and not before.is_finished:
            return (ChangeKind.ENDED,)
        for state, kind in ((State.PENDING, ChangeKind.PENDING), (State.LOST, ChangeKind.LOST)):
            if now.state is state and before.state is not state:
                return (kind,)
        # Both reports have the status of now.
        is_visible = item.has_new_status or self._report(before) != self._report(now)
        return (ChangeKind.CHANGED,) if is_visible else ()

    def _end(self, item: _Item, read: Callable[[Workload], Sequence[Total]]) -> bytes:
        """Encode the end of a run with the totals that ``read`` returns, or with the reason for which it cannot."""
        assert item.workload is not None
        try:
            return self._encoded(ChangeKind.ENDED, item, totals=[translate.total(of) for of in read(item.workload)])
        except (ResctrlError, OSError) as error:
            return self._encoded(ChangeKind.ENDED, item, error=f"the totals cannot be read: {error}")

    def _totals(self, ended: Workload) -> Sequence[Total]:
        """Return the totals of a run after its transaction: its key may have been used again. Raises NotRead."""
        now = self._ctx.store.get(ended.key)
        if now is not None and now.generation == ended.generation:
            workload, _, totals = read(self._ctx, ended.key)
            if workload.generation == ended.generation:
                return totals
        raise NotRead("the key has been used again")

    def _encoded(
        self, kind: ChangeKind, item: _Item, totals: list[types.Total] | None = None, error: str | None = None
    ) -> bytes:
        workload = None if item.workload is None else self._report(item.workload)
        return msgspec.json.encode(
            types.Change(change=kind, at=item.at, key=item.key, workload=workload, totals=totals, error=error)
        )


def _present(known: Mapping[str, Workload]) -> Iterator[_Item]:
    for key, workload in sorted(known.items()):
        if not workload.is_finished:
            yield _Item(key, utc_now(), workload)


def _generation(item: _Item) -> int:
    return 0 if item.workload is None else item.workload.generation


def _run(workload: Workload) -> tuple[int, int]:
    """Return what identifies a run of the key: after a removal, the generations begin again."""
    return workload.generation, workload.first.nonce


def _is_repeated(before: Workload | None, now: Workload | None) -> bool:
    """Whether the end of the run was reported, but its record could not be saved: the end is tried again."""
    if before is None or now is None or _run(before) != _run(now):
        return False
    return before.is_finished and not now.is_finished


def _is_undone(before: Workload | None, item: _Item) -> bool:
    """Whether the start of a run has failed, so that the run that ended before it is the current one again."""
    now = item.workload
    if before is None or now is None or item.end:
        return False
    return now.state.is_over and now.generation < before.generation


def _reply(changes: Iterable[bytes], *, listed: bool = False) -> types.WatchReply:
    # Encoded already, for all watchers: as Raw, it becomes a part of the reply as it is.
    raw = [msgspec.Raw(change) for change in changes]
    return types.WatchReply(changes=cast(list[types.Change], raw), listed=listed)
