# SPDX-License-Identifier: Apache-2.0
"""Watch: changes in their order, each end with its totals, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from _collections_abc import dict_items
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from resctrlmond.api import types, watches
from resctrlmond.api.access import Caller, Policy
from resctrlmond.api.service import Service
from resctrlmond.api.verbs import VERBS
from resctrlmond.api.watches import Watches
from resctrlmond.api.workers import Workers
from resctrlmond.resctrl.counters import event
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.changes import ChangeKind
from resctrlmond.workloads.model.errors import InvalidRequest, LimitExceeded, TooSlow
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Claim, EndRule, State, Workload
from tests.workloads.builders import drop, save, workload

ROOT = Caller(uid=0, groups=frozenset({0}), pid=1)
READER = Caller(uid=1000, groups=frozenset({77}), pid=1)
CLAIM = Claim("me", "2026-03-04T05:06:07Z", EndRule.RELEASE)
TOTALS = [Total(event("core_energy"), 5, Quality.EXACT)]


class Reader:
    """A client that watches. ``run`` calls are not limited here."""

    def __init__(self, service: Service, caller: Caller = ROOT) -> None:
        self.replies: AsyncGenerator[types.Reply, None] = service.follow(VERBS["Watch"], types.NoParameters(), caller)

    async def reply(self) -> types.WatchReply:
        async with asyncio.timeout(60):
            found = await anext(self.replies)
        # As a client gets it: the changes are encoded already.
        return msgspec.json.decode(msgspec.json.encode(found), type=types.WatchReply)

    async def changes(self, count: int) -> list[types.Change]:
        found: list[types.Change] = []
        while len(found) < count:
            found += (await self.reply()).changes
        assert len(found) == count
        return found

    async def listed(self) -> list[str]:
        """Read what is present."""
        found: list[str] = []
        while not (reply := await self.reply()).listed:
            assert {change.change for change in reply.changes} == {ChangeKind.PRESENT}
            found += [change.key for change in reply.changes]
        assert reply.changes == []
        return found


@contextlib.asynccontextmanager
async def watched(manager: Manager, *, count: int = 1) -> AsyncIterator[tuple[Watches, list[Reader]]]:
    with contextlib.closing(Workers()) as workers:
        service = Service(manager, Policy(77), workers)
        readers = [Reader(service) for _ in range(count)]
        for reader in readers:
            await reader.listed()
        yield service.watches, readers
        for reader in readers:
            await reader.replies.aclose()


def told(changes: Sequence[types.Change]) -> list[tuple[str, str, int]]:
    return [(change.change, change.key, change.workload.generation if change.workload else 0) for change in changes]


@pytest.fixture(autouse=True)
def _totals(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager.context.quality, "final_totals", lambda _workload: TOTALS)


def over(key: str, **fields: Any) -> Workload:
    return workload(key, State.COMPLETED, **fields)


def test_each_run_of_a_key_is_reported_though_they_end_at_once(manager: Manager) -> None:
    async def run() -> list[types.Change]:
        async with watched(manager) as (hub, [reader]):
            for generation in (1, 2, 3):
                hub.changed("k", workload("k", generation=generation))
                hub.ended(over("k", generation=generation))
                await asyncio.sleep(0)
                hub.changed("k", over("k", generation=generation))
            hub.changed("other", workload("other", State.PENDING))
            return await reader.changes(7)

    changes = asyncio.run(run())
    runs = [(kind, "k", generation) for generation in (1, 2, 3) for kind in ("added", "ended")]
    assert told(changes) == [*runs, ("pending", "other", 1)]
    for change in changes[1:6:2]:
        assert change.workload is not None and change.workload.state is State.COMPLETED
        assert change.totals is not None and [total.value for total in change.totals] == ["5"]


def test_kinds_of_changes(manager: Manager) -> None:
    async def run() -> list[types.Change]:
        found: list[types.Change] = []
        async with watched(manager) as (hub, [reader]):
            for state in (State.IDLE, State.ACTIVE, State.PENDING, State.LOST, State.ACTIVE):
                hub.changed("k", workload("k", state, claims=(CLAIM,)))
                found += await reader.changes(1)
            hub.changed("k", workload("k"))
            found += await reader.changes(1)
            # Nothing that a client can see.
            hub.changed("k", workload("k", idle_ns=5))
            hub.changed("k", None)
            hub.changed("unknown", None)
            found += await reader.changes(1)
        return found

    kinds = [change.change for change in asyncio.run(run())]
    assert kinds == ["added", "changed", "pending", "lost", "changed", "changed", "removed"]


def test_workloads_are_present_or_added_never_both(manager: Manager) -> None:
    save(manager.context.store, workload("first"))
    save(manager.context.store, over("ended"))

    async def run() -> None:
        with contextlib.closing(Workers()) as workers:
            service = Service(manager, Policy(77), workers)
            early = Reader(service)
            assert await early.listed() == ["first"]
            service.watches.changed("second", workload("second"))
            late = Reader(service)
            assert await late.listed() == ["first"]
            for reader in (early, late):
                assert told(await reader.changes(1)) == [("added", "second", 1)]
            last = Reader(service)
            assert await last.listed() == ["first", "second"]
            service.watches.changed("first", None)
            for reader in (early, late, last):
                assert told(await reader.changes(1)) == [("removed", "first", 0)]
                await reader.replies.aclose()

    try:
        asyncio.run(run())
    finally:
        drop(manager.context.store, "first")
        drop(manager.context.store, "ended")


def test_event_loop_does_not_walk_over_the_workloads(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands have ended, and a client may call Watch over and over."""
    threads: list[threading.Thread] = []

    class Watched(dict[str, Workload]):
        def copy(self) -> Watched:
            return self

        def items(self) -> dict_items[str, Workload]:
            threads.append(threading.current_thread())
            return super().items()

    monkeypatch.setattr(manager.context.store, "by_key", lambda: Watched({"a": over("a"), "b": workload("b")}))

    async def run() -> list[list[str]]:
        with contextlib.closing(Workers()) as workers:
            service = Service(manager, Policy(77), workers)
            readers = [Reader(service), Reader(service)]
            found = [await reader.listed() for reader in readers]
            for reader in readers:
                await reader.replies.aclose()
            return found

    assert asyncio.run(run()) == [["b"], ["b"]]
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_slow_client_loses_its_own_stream(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "MAX_WAITING_BYTES", 4000)

    async def run() -> None:
        async with watched(manager, count=2) as (hub, [reader, slow]):
            for number in range(100):
                hub.changed("k", workload("k", priority=number))
                assert len(await reader.changes(1)) == 1
            with pytest.raises(TooSlow, match="were waiting") as caught:
                await slow.reply()
            assert "Call Watch again" in (caught.value.remedy or "")
            hub.changed("k", None)
            assert told(await reader.changes(1)) == [("removed", "k", 0)]

    asyncio.run(run())


def test_number_of_watchers_is_limited_for_others_but_not_by_them(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "MAX_WATCHERS", 5)
    monkeypatch.setattr(watches, "MAX_OF_OTHERS", 3)
    monkeypatch.setattr(watches, "MAX_OF_ONE_UID", 2)
    other = Caller(uid=1001, groups=frozenset({77}), pid=1)

    async def run() -> list[str]:
        with contextlib.closing(Workers()) as workers:
            service = Service(manager, Policy(77), workers)
            readers = []
            refused = []
            for caller in (READER, READER, READER, other, other, ROOT, ROOT, ROOT):
                readers.append(Reader(service, caller))
                try:
                    await readers[-1].listed()
                except LimitExceeded as error:
                    refused.append(str(error))
            await readers[0].replies.aclose()
            again = Reader(service, other)
            await again.listed()
            for reader in (*readers, again):
                await reader.replies.aclose()
            return refused

    refused = asyncio.run(run())
    assert [text.partition(". ")[0] for text in refused] == [
        "2 clients watch workloads already, 2 of them of uid 1000",
        "3 clients watch workloads already, 1 of them of uid 1001",
        "5 clients watch workloads already, 2 of them of uid 0",
    ]


def test_nothing_is_done_while_nobody_watches(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    async def run() -> None:
        async with watched(manager) as (hub, _):
            pass
        monkeypatch.setattr(manager.context.quality, "final_totals", fail)
        monkeypatch.setattr(manager.context.store, "by_key", fail)
        hub.changed("k", workload("k"))
        hub.ended(over("k"))
        await asyncio.sleep(0.05)
        assert not hub._items and not hub._known

    asyncio.run(run())


@pytest.mark.parametrize("failure", [ZeroDivisionError("a bug"), NotRead("no file"), OSError(5, "EIO")])
def test_workload_ends_though_its_totals_cannot_be_read(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """``ended`` is called within the transaction that ends the run."""

    def fail(_workload: Workload) -> None:
        raise failure

    monkeypatch.setattr(manager.context.quality, "final_totals", fail)

    async def run() -> types.Change:
        async with watched(manager) as (hub, [reader]):
            hub.changed("k", workload("k"))
            await reader.changes(1)
            hub.ended(over("k"))
            return (await reader.changes(1))[0]

    change = asyncio.run(run())
    assert (change.change, change.totals) == ("ended", None)
    assert (change.error or "").startswith("the totals cannot be read: ")


@pytest.mark.parametrize("generation", [1, 2], ids=["its own files", "files of the next run"])
def test_end_that_was_under_way_when_the_watch_began_is_reported_once(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, generation: int
) -> None:
    now = over("k", generation=generation)
    monkeypatch.setattr(manager.context.store, "by_key", lambda: {"k": workload("k")})
    monkeypatch.setattr(manager.context.store, "get", lambda _key: now)
    monkeypatch.setattr("resctrlmond.api.watches.read", lambda _ctx, _key: (now, [], TOTALS))

    async def run() -> list[types.Change]:
        async with watched(manager) as (hub, [reader]):
            hub.changed("k", over("k"))
            [change] = await reader.changes(1)
            hub.ended(over("k"))
            hub.changed("other", workload("other"))
            return [change, *await reader.changes(1)]

    changes = asyncio.run(run())
    assert told(changes) == [("ended", "k", 1), ("added", "other", 1)]
    assert bool(changes[0].totals) is (generation == 1)
    assert changes[0].error == (None if generation == 1 else "the totals cannot be read: the key has been used again")


@pytest.mark.parametrize("is_sent", [False, True], ids=["not sent yet", "sent already"])
def test_next_run_that_is_seen_before_the_end_of_the_last_one(manager: Manager, is_sent: bool) -> None:
    """The thread that ends a run may begin the next one before the event loop runs."""

    async def run() -> list[types.Change]:
        async with watched(manager) as (hub, [reader]):
            hub.changed("k", workload("k"))
            found = await reader.changes(1)
            hub.changed("k", workload("k", generation=2))
            if is_sent:
                found += await reader.changes(1)
            hub.ended(over("k"))
            await asyncio.sleep(0)
            hub.changed("k", workload("k", State.PENDING, generation=2))
            return found + await reader.changes(2)

    changes = asyncio.run(run())
    assert [change.totals is not None for change in changes].count(True) == 1
    if is_sent:
        assert told(changes) == [("added", "k", 1), ("added", "k", 2), ("ended", "k", 1), ("pending", "k", 2)]
    else:
        assert told(changes) == [("added", "k", 1), ("ended", "k", 1), ("pending", "k", 2)]


def test_end_whose_record_could_not_be_saved_is_reported_once(manager: Manager) -> None:
    async def run() -> list[types.Change]:
        async with watched(manager) as (hub, [reader]):
            found: list[types.Change] = []
            hub.changed("k", workload("k"))
            hub.ended(over("k"))
            found += await reader.changes(2)
            hub.changed("k", workload("k", reason="its record could not be saved"))
            hub.ended(over("k"))
            await asyncio.sleep(0)
            hub.changed("k", workload("k", generation=2))
            return found + await reader.changes(1)

    assert told(asyncio.run(run())) == [("added", "k", 1), ("ended", "k", 1), ("added", "k", 2)]


@pytest.mark.parametrize("is_removal_seen", [False, True], ids=["removal not seen", "removal seen"])
@pytest.mark.parametrize("is_over", [False, True], ids=["it runs", "it ends at once"])
def test_run_of_a_removed_key_is_reported_though_its_generation_is_the_same(
    manager: Manager, is_over: bool, is_removal_seen: bool
) -> None:
    """Generations begin again with the removal. The event loop may see the next run before, or without, that."""

    async def run() -> list[types.Change]:
        async with watched(manager) as (hub, [reader]):
            hub.changed("k", workload("k", nonce=1))
            hub.ended(over("k", nonce=1))
            await asyncio.sleep(0)
            hub.changed("k", over("k", nonce=1))
            await reader.changes(2)
            if is_removal_seen:
                hub.changed("k", None)
            hub.changed("k", workload("k", nonce=2))
            if is_over:
                hub.ended(over("k", nonce=2))
                await asyncio.sleep(0)
                hub.changed("k", over("k", nonce=2))
            return await reader.changes(is_removal_seen + 1 + is_over)

    kinds = [change.change for change in asyncio.run(run())]
    assert kinds == ["removed"] * is_removal_seen + ["added"] + ["ended"] * is_over


@pytest.mark.parametrize("state", [State.COMPLETED, State.LOST])
def test_end_is_not_repeated_if_the_start_of_the_next_run_is_undone(manager: Manager, state: State) -> None:
    """Assign has failed: the run before is the current one again."""
    last = workload("k", state, claims=(CLAIM,) if state is State.LOST else ())

    async def run() -> list[types.Change]:
        async with watched(manager) as (hub, [reader]):
            for before in (workload("k"), last):
                hub.changed("k", before)
                await reader.changes(1)
            hub.changed("k", workload("k", State.PENDING, generation=2))
            found = await reader.changes(1)
            hub.changed("k", last)
            return found + await reader.changes(1)

    assert told(asyncio.run(run())) == [("pending", "k", 2), ("changed", "k", 1)]


def test_defect_ends_the_streams_and_later_ones_work(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with watched(manager, count=2) as (hub, readers):
            with monkeypatch.context() as patched:
                patched.setattr(hub, "_kinds", lambda *_: 1 / 0)
                hub.changed("k", workload("k"))
                for reader in readers:
                    with pytest.raises(NotRead, match="division by zero"):
                        await reader.reply()
        async with watched(manager) as (hub, [reader]):
            hub.changed("k", workload("k"))
            assert told(await reader.changes(1)) == [("added", "k", 1)]

    asyncio.run(run())


def test_watch_has_no_single_reply(manager: Manager) -> None:
    async def run() -> None:
        with contextlib.closing(Workers()) as workers:
            service = Service(manager, Policy(77), workers)
            with pytest.raises(InvalidRequest, match="several replies"):
                await service.call(VERBS["Watch"], types.NoParameters(), ROOT)

    asyncio.run(run())


def test_large_lists_and_changes_are_sent_in_pages(manager: Manager) -> None:
    attributes = {f"n{index}": "v" * 4000 for index in range(15)}
    many = [workload(f"k{number:02}", attributes=attributes) for number in range(20)]

    async def run() -> None:
        async with watched(manager) as (hub, [reader]):
            for one in many:
                hub.changed(one.key, one)
            sizes: list[int] = []
            while sum(sizes) < len(many):
                sizes.append(len((await reader.reply()).changes))
            assert len(sizes) > 3 and max(sizes) <= 256 * 1024 // 60000

    asyncio.run(run())
