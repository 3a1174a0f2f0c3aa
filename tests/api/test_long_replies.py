# SPDX-License-Identifier: Apache-2.0
"""Long lists are sent in pages, and the memory for replies that callers do not read is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.api import budget as budgets
from resctrlmond.api import types
from resctrlmond.api.access import Policy
from resctrlmond.api.budget import ReplyBudget
from resctrlmond.api.lists import PAGE_BYTES, bounded, pages
from resctrlmond.api.service import Service
from resctrlmond.api.sockets import listen
from resctrlmond.api.varlink import interfaces
from resctrlmond.api.workers import Workers
from resctrlmond.client import Client, VarlinkError
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.errors import LimitExceeded
from tests.api.conftest import save_long_workloads
from tests.api.private_bus import OBJECT_MANAGER, ROOT, WORKLOAD, BusHost, eventually
from tests.api.private_bus import Client as BusClient
from tests.api.varlink_server import RawClient
from tests.wait import wait_until
from tests.workloads.builders import drop

LIST = "org.resctrlmon.Manager.List"
READ_ALL = "org.resctrlmon.Manager.ReadAll"
LIST_PODS = "org.resctrlmon.Manager.ListPods"
LIMIT_EXCEEDED = "org.resctrlmon1.Error.LimitExceeded"
COUNT = 60


@pytest.fixture
def full(manager: Manager) -> Iterator[Manager]:
    save_long_workloads(manager, COUNT)
    yield manager
    for record in manager.context.store.all():
        drop(manager.context.store, record.key)


class _ServerThread:
    """The varlink server of a manager, in a thread."""

    def __init__(self, manager: Manager, path: str) -> None:
        self._manager, self.path = manager, path
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(60)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.closing(Workers()) as workers:
            self.service = Service(self._manager, Policy(os.getegid()), workers)
            server = interfaces.server(self.service)
            await server.start(listen(self.path))
            self._ready.set()
            await self._stop.wait()
            await server.close(0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


@pytest.fixture
def server(full: Manager, tmp_path: Path) -> Iterator[_ServerThread]:
    server = _ServerThread(full, str(tmp_path / "varlink"))
    yield server
    server.close()


@pytest.mark.parametrize("method, kind", [(LIST, types.ListReply), (LIST_PODS, types.ListPodsReply)])
def test_list_of_any_length_is_sent_in_pages(server: _ServerThread, method: str, kind: Any) -> None:
    with Client(server.path) as client:
        replies = list(client.stream(method, reply=kind))
        with pytest.raises(VarlinkError, match=r"LimitExceeded.*more"):
            client.call(method)
    assert len(replies) > 5
    items = [item for reply in replies for item in (reply.workloads if kind is types.ListReply else reply.pods)]
    assert [item.key for item in items] == [f"long-{number:03}" for number in range(COUNT)]


def test_use_of_any_number_of_workloads_is_read_in_pages(server: _ServerThread) -> None:
    keys = [f"long-{number:03}" for number in range(COUNT)]
    with Client(server.path) as client:
        streamed = list(client.stream(READ_ALL, reply=types.ReadAllReply))
        called = [client.call(READ_ALL, reply=types.ReadAllReply)]
        while after := called[-1].next:
            called.append(client.call(READ_ALL, {"after": after}, reply=types.ReadAllReply))
    for replies in (streamed, called):
        assert len(replies) > 5
        assert [usage.workload.key for reply in replies for usage in reply.usages] == keys
    assert {reply.next for reply in streamed} == {""}


def test_last_page_has_fields_and_ends_the_call(server: _ServerThread) -> None:
    """A client that checks the types of the interface refuses an empty last reply."""
    with RawClient(server.path) as client:
        client.call(LIST, more=True)
        replies = [client.reply()]
        while replies[-1].get("continues"):
            replies.append(client.reply())
    assert len(replies) > 5
    assert all(reply["parameters"]["workloads"] for reply in replies)


def test_short_list_has_one_page(server: _ServerThread, full: Manager) -> None:
    for record in full.context.store.all()[3:]:
        drop(full.context.store, record.key)
    with Client(server.path) as client:
        whole = client.call(LIST, reply=types.ListReply)
        (page,) = client.stream(LIST, reply=types.ListReply)
    assert whole == page
    assert len(whole.workloads) == 3


def test_pages_are_limited_in_size_and_a_list_has_at_least_one_page() -> None:
    def reply(items: list[types.Foreign], is_first: bool) -> types.ListReply:
        return types.ListReply(workloads=[], foreign=[*items] if is_first else items)

    foreign = [types.Foreign(class_="", name=str(number), path="p" * 1000) for number in range(1000)]
    found = list(pages(foreign, reply))
    assert [group for page in found for group in page.foreign] == foreign
    assert len(found) == 4
    huge = types.Foreign(class_="", name="", path="p" * 2 * PAGE_BYTES)
    assert [len(page.foreign) for page in pages([huge, huge], reply)] == [1, 1]
    assert [len(page.foreign) for page in pages([], reply)] == [0]
    assert bounded(foreign) == foreign
    with pytest.raises(LimitExceeded, match="more than one reply may take"):
        bounded(foreign * 3)


def test_unread_lists_wait_without_memory(server: _ServerThread) -> None:
    """At any time, only a few of the replies to 40 connections that do not read are in memory."""
    unread = []
    for _ in range(40):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(server.path)
        connection.sendall(json.dumps({"method": LIST, "more": True}).encode() + b"\0")
        unread.append(connection)
    budget = server.service.budget
    wait_until(lambda: len(budget._waiters) == 38)
    assert budget.taken <= budgets.MAX_BYTES_PER_UID
    # The budget does not delay the hook and calls that change a workload.
    with Client(server.path) as client, pytest.raises(VarlinkError, match="NoSuchWorkload"):
        client.call("org.resctrlmon.Manager.Release", {"key": "not-there"})
    for connection in unread:
        connection.close()
    wait_until(lambda: budget.taken == 0)
    with Client(server.path) as client:
        assert len(list(client.stream(LIST))) > 5


def test_caller_that_disconnects_leaves_the_queue_for_memory(server: _ServerThread) -> None:
    budget = server.service.budget
    budget._has_room = lambda *_: False  # type: ignore[method-assign]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(server.path)
        connection.sendall(json.dumps({"method": LIST, "more": True}).encode() + b"\0")
        wait_until(lambda: len(budget._waiters) == 1)
    wait_until(lambda: not budget._waiters)


def test_server_reconnects_if_the_bus_accepts_no_replies(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with host.serving() as server, BusClient(host.address) as client:
            stalled = server._connection
            with monkeypatch.context() as patch:
                patch.setattr(host.module, "_FLUSH_TIMEOUT_S", 0.1, raising=False)
                patch.setattr(stalled._bus, "flush", asyncio.Event().wait)
                await client.call("List")
                assert await eventually(lambda: server.connected and server._connection is not stalled)
            assert not server._budget.taken
            assert "version" in await client.call("Status")

    asyncio.run(run())


def test_user_that_reads_nothing_delays_neither_others_nor_root() -> None:
    async def run() -> None:
        budget = ReplyBudget(most=100, most_per_uid=60)
        async with contextlib.AsyncExitStack() as stack:
            for uid in (1, 2):
                await stack.enter_async_context(budget.lease(uid, 50))
            waiting = [asyncio.create_task(_take(budget, uid)) for uid in (1, 3)]
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            await _take(budget, 0)
            await _take(budget, 3, size=0)
        await asyncio.gather(*waiting)
        assert budget.taken == 0
        async with budget.lease(1, 1000) as lease:
            assert budget.taken == 60
            lease.shrink(10)
            assert budget.taken == 10
        assert budget.taken == 0

    asyncio.run(run())


async def _take(budget: ReplyBudget, uid: int, size: int = 20) -> None:
    async with budget.lease(uid, size):
        pass


def test_reply_is_freed_at_once_and_not_by_the_garbage_collector(server: _ServerThread) -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            with Client(server.path) as client:
                for _ in client.stream(LIST):
                    pass
                with contextlib.suppress(VarlinkError):
                    client.call(LIST)
        wait_until(lambda: server.service.budget.taken == 0)
        # The server's thread may still return from the last call.
        wait_until(lambda: not any(isinstance(one, types.ListReply | types.Workload) for one in gc.get_objects()))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [value for value in gc.garbage if isinstance(value, bytes | bytearray) and len(value) > 10_000] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_dbus_refuses_a_list_that_is_too_long_without_a_traceback(
    host: BusHost, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with host.serving(), BusClient(host.address) as client:
            for call in (("List",), ("ListPods",)):
                error, text = await client.refused(*call)
                assert error == LIMIT_EXCEEDED
                assert "more than one reply may take" in text
            error, _ = await client.refused("GetManagedObjects", interface=OBJECT_MANAGER)
            assert error == LIMIT_EXCEEDED
            assert (await client.call("Get", "s", "long-007"))[0]["state"] == "pending"
            for record in host.manager.context.store.all()[20:]:
                await asyncio.to_thread(drop, host.manager.context.store, record.key)
            assert len((await client.call("List"))[0]) == 20
            objects = await client.call("GetManagedObjects", interface=OBJECT_MANAGER)
            assert objects[f"{ROOT}/workload/long_2d003"][WORKLOAD]["Key"] == "long-003"

    save_long_workloads(host.manager, COUNT)
    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_dbus_replies_are_freed_at_once(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server, BusClient(host.address) as client:
            assert len((await client.call("List"))[0]) == 20
            gc.collect()
            gc.disable()
            try:
                for _ in range(3):
                    await client.call("List")
                    await client.call("GetManagedObjects", interface=OBJECT_MANAGER)
                await client.call("Status")
                # The server keeps the announced workloads, to compare the next changes with them.
                announced = {id(workload) for workload in server._connection.announcer._known.values()}

                def left() -> list[Any]:
                    found = [
                        instance
                        for instance in gc.get_objects()
                        if isinstance(instance, types.ListReply | types.Workload)
                    ]
                    return [instance for instance in found if id(instance) not in announced]

                # The worker thread of the last reply may still hold it.
                assert await eventually(lambda: not left())
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                assert [value for value in gc.garbage if isinstance(value, str | bytes) and len(value) > 3000] == []
                # dbus-next leaves short requests, and the bus's replies to them, to the garbage collector.
                messages = [instance for instance in gc.garbage if type(instance).__name__ == "Message"]
                replies = [message for message in messages if message.message_type.name != "METHOD_CALL"]
                assert [message for message in replies if message.sender != "org.freedesktop.DBus"] == []
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

    save_long_workloads(host.manager, COUNT)
    for record in host.manager.context.store.all()[20:]:
        drop(host.manager.context.store, record.key)
    asyncio.run(run())
