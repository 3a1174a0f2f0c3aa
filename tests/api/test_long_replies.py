# SPDX-License-Identifier: Apache-2.0
"""Long lists come in pages, and what callers do not read is bounded in memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.api import budget as budgets
from resctrlmond.api import types
from resctrlmond.api.access import Policy
from resctrlmond.api.budget import ReplyBudget
from resctrlmond.api.lists import PAGE_BYTES, bounded, pages
from resctrlmond.api.sockets import listen
from resctrlmond.api.varlink.client import Client, VarlinkError
from resctrlmond.api.varlink.interfaces import server
from resctrlmond.api.verbs import Service
from resctrlmond.api.workers import Workers
from resctrlmond.workloads.errors import LimitExceeded
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model import State
from tests.api.dbus_lab import GROUP, ROOT, Lab, eventually
from tests.api.dbus_lab import Client as BusClient
from tests.api.varlink_lab import Wire
from tests.wait import wait_until
from tests.workloads.builders import drop, save, workload

LIST = "org.resctrlmon.Manager.List"
LIST_PODS = "org.resctrlmon.Manager.ListPods"
LIMIT_EXCEEDED = "org.resctrlmon1.Error.LimitExceeded"
COUNT = 60


def _fill(manager: Manager) -> None:
    """Save workloads with the largest attributes that callers may give, together more than one reply takes."""
    for number in range(COUNT):
        save(
            manager.context.store,
            workload(
                f"long-{number:03}",
                State.PENDING,
                attributes={"pod.uid": "x"} | {f"n{one}": "v" * 4000 for one in range(15)},
            ),
        )


@pytest.fixture
def full(manager: Manager) -> Iterator[Manager]:
    _fill(manager)
    yield manager
    for record in manager.workloads():
        drop(manager.context.store, record.key)


class _Server:
    """The varlink door in a thread."""

    def __init__(self, manager: Manager, path: str) -> None:
        self._manager, self.path = manager, path
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(60)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.closing(Workers()) as workers:
            self.service = Service(self._manager, Policy(readers=os.getegid()), workers)
            door = server(self.service)
            await door.start(listen(self.path))
            self._ready.set()
            await self._stop.wait()
            await door.close(0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


@pytest.fixture
def door(full: Manager, tmp_path: Path) -> Iterator[_Server]:
    running = _Server(full, str(tmp_path / "varlink"))
    yield running
    running.close()


@pytest.mark.parametrize("method, kind", [(LIST, types.ListReply), (LIST_PODS, types.ListPodsReply)])
def test_a_list_of_any_length_comes_in_pages(door: _Server, method: str, kind: Any) -> None:
    with Client(door.path) as client:
        replies = list(client.stream(method, reply=kind))
        with pytest.raises(VarlinkError, match=r"LimitExceeded.*more"):
            client.call(method)
    assert len(replies) > 5
    items = [one for reply in replies for one in (reply.groups if kind is types.ListReply else reply.pods)]
    assert [one.key for one in items] == [f"long-{number:03}" for number in range(COUNT)]


def test_last_page_has_fields_and_ends_the_call(door: _Server) -> None:
    """The last reply was empty, which a client that checks the types of the interface refuses."""
    with Wire(door.path) as wire:
        wire.call(LIST, more=True)
        replies = [wire.reply()]
        while replies[-1].get("continues"):
            replies.append(wire.reply())
    assert len(replies) > 5
    assert all(reply["parameters"]["groups"] for reply in replies)


def test_a_short_list_needs_no_pages(door: _Server, full: Manager) -> None:
    for record in full.workloads()[3:]:
        drop(full.context.store, record.key)
    with Client(door.path) as client:
        whole = client.call(LIST, reply=types.ListReply)
        (page,) = client.stream(LIST, reply=types.ListReply)
    assert whole == page
    assert len(whole.groups) == 3


def test_pages_are_bounded_and_there_is_one_at_least() -> None:
    def reply(items: list[types.Foreign], is_first: bool) -> types.ListReply:
        return types.ListReply(groups=[], foreign=[*items] if is_first else items)

    foreign = [types.Foreign(class_="", name=str(number), path="p" * 1000) for number in range(1000)]
    found = list(pages(foreign, reply))
    assert [one for page in found for one in page.foreign] == foreign
    assert len(found) == 4
    huge = types.Foreign(class_="", name="", path="p" * 2 * PAGE_BYTES)
    assert [len(page.foreign) for page in pages([huge, huge], reply)] == [1, 1]
    assert [len(page.foreign) for page in pages([], reply)] == [0]
    assert bounded(foreign) == foreign
    with pytest.raises(LimitExceeded, match="more than one reply may take"):
        bounded(foreign * 3)


def test_lists_that_nobody_reads_wait_without_memory(door: _Server) -> None:
    """40 connections whose client reads nothing: few of their replies exist at a time."""
    unread = []
    for _ in range(40):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(door.path)
        connection.sendall(json.dumps({"method": LIST, "more": True}).encode() + b"\0")
        unread.append(connection)
    budget = door.service.budget
    wait_until(lambda: len(budget._waiters) == 38)
    assert budget.taken <= budgets.MAX_BYTES_PER_UID
    # What changes something, and the hook, take no part.
    with Client(door.path) as client, pytest.raises(VarlinkError, match="NoSuchGroup"):
        client.call("org.resctrlmon.Manager.Release", {"key": "not-there"})
    for connection in unread:
        connection.close()
    wait_until(lambda: budget.taken == 0)
    with Client(door.path) as client:
        assert len(list(client.stream(LIST))) > 5


def test_a_caller_that_hangs_up_while_it_waits_for_memory_is_forgotten(door: _Server) -> None:
    budget = door.service.budget
    budget._has_room = lambda *_: False  # type: ignore[method-assign]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(door.path)
        connection.sendall(json.dumps({"method": LIST, "more": True}).encode() + b"\0")
        wait_until(lambda: len(budget._waiters) == 1)
    wait_until(lambda: not budget._waiters)


def test_a_bus_that_takes_no_replies_is_left(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with lab.door() as door, BusClient(lab.address) as client:
            stalled = door._connection
            with monkeypatch.context() as patch:
                patch.setattr(lab.module, "_FLUSH_TIMEOUT_S", 0.1, raising=False)
                patch.setattr(stalled._bus, "flush", asyncio.Event().wait)
                await client.call("List")
                assert await eventually(lambda: door.connected and door._connection is not stalled)
            assert not door._budget.taken
            assert "version" in await client.call("Status")

    asyncio.run(run())


def test_a_user_that_reads_nothing_delays_neither_others_nor_root() -> None:
    async def run() -> None:
        budget = ReplyBudget(most=100, most_per_uid=60)
        async with contextlib.AsyncExitStack() as stack:
            for uid in (1, 2):
                await stack.enter_async_context(budget.lease(uid, 50))
            waiting = [asyncio.create_task(_taken(budget, uid)) for uid in (1, 3)]
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            await _taken(budget, 0)
            await _taken(budget, 3, size=0)
        await asyncio.gather(*waiting)
        assert budget.taken == 0
        async with budget.lease(1, 1000) as lease:
            assert budget.taken == 60
            lease.shrink(10)
            assert budget.taken == 10
        assert budget.taken == 0

    asyncio.run(run())


async def _taken(budget: ReplyBudget, uid: int, size: int = 20) -> None:
    async with budget.lease(uid, size):
        pass


def test_a_reply_is_freed_at_once_and_not_by_the_garbage_collector(door: _Server) -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            with Client(door.path) as client:
                for _ in client.stream(LIST):
                    pass
                with contextlib.suppress(VarlinkError):
                    client.call(LIST)
        wait_until(lambda: door.service.budget.taken == 0)
        time.sleep(0.1)
        left = [one for one in gc.get_objects() if isinstance(one, types.ListReply | types.Group)]
        assert left == []
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [one for one in gc.garbage if isinstance(one, bytes | bytearray) and len(one) > 10_000] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_d_bus_refuses_a_list_that_is_too_long_without_a_traceback(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with lab.door(), BusClient(lab.address) as client:
            for call in (("List",), ("ListPods",)):
                error, text = await client.refused(*call)
                assert error == LIMIT_EXCEEDED
                assert "more than one reply may take" in text
            manager = "org.freedesktop.DBus.ObjectManager"
            error, _ = await client.refused("GetManagedObjects", interface=manager)
            assert error == LIMIT_EXCEEDED
            assert (await client.call("Get", "s", "long-007"))["state"] == "pending"
            for record in lab.manager.workloads()[20:]:
                await asyncio.to_thread(drop, lab.manager.context.store, record.key)
            assert len((await client.call("List"))[0]) == 20
            objects = await client.call("GetManagedObjects", interface=manager)
            assert objects[f"{ROOT}/group/long_2d003"][GROUP]["Key"] == "long-003"

    _fill(lab.manager)
    asyncio.run(run())
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


def test_d_bus_replies_are_freed_at_once(lab: Lab) -> None:
    async def run() -> None:
        async with lab.door() as door, BusClient(lab.address) as client:
            assert len((await client.call("List"))[0]) == 20
            gc.collect()
            gc.disable()
            try:
                for _ in range(3):
                    await client.call("List")
                    await client.call("GetManagedObjects", interface="org.freedesktop.DBus.ObjectManager")
                await client.call("Status")
                # The signals are made from the groups that were announced before.
                announced = {id(group) for group in door._connection.announcer._known.values()}

                def left() -> list[Any]:
                    found = [one for one in gc.get_objects() if isinstance(one, types.ListReply | types.Group)]
                    return [one for one in found if id(one) not in announced]

                # A thread may still return from the call whose reply it has made.
                assert await eventually(lambda: not left())
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                assert [one for one in gc.garbage if isinstance(one, str | bytes) and len(one) > 3000] == []
                # dbus-next leaves short requests, and the bus's answers to them, to the collector.
                messages = [one for one in gc.garbage if type(one).__name__ == "Message"]
                replies = [one for one in messages if one.message_type.name != "METHOD_CALL"]
                assert [one for one in replies if one.sender != "org.freedesktop.DBus"] == []
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

    _fill(lab.manager)
    for record in lab.manager.workloads()[20:]:
        drop(lab.manager.context.store, record.key)
    asyncio.run(run())
