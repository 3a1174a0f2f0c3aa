# SPDX-License-Identifier: Apache-2.0
"""The queue of the hook's calls: their order, the calls that run at once, and the hooks that are asked to wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from resctrlmond.api import hook_queue
from resctrlmond.api.access import Caller
from resctrlmond.api.hook_queue import HookQueue, QueuedCall
from resctrlmond.api.types import RunReply, RunRequest


class Hooks:
    """Calls of hooks: each runs until ``end``. ``begun`` has the container ids in the order of their begin."""

    def __init__(self, most: int = 1, timeout_s: float = 10.0) -> None:
        self.timeout_s = timeout_s
        self.queue = HookQueue(lambda: self.timeout_s, most)
        self.begun: list[str] = []
        self.gone: set[str] = set()
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def call(self, id_: str, pid: int = 0, stage: str = "createRuntime", **annotations: str) -> QueuedCall:
        state = {"ociVersion": "1", "id": id_, "status": "created", "annotations": annotations}
        # Each hook is a process of its own.
        caller = Caller(0, frozenset(), pid or 1000 + len(self._tasks), waits=lambda: id_ not in self.gone)
        call = self.queue.call(RunRequest(stage=stage, state=json.dumps(state)), caller)
        assert call is not None
        return call

    async def start(self, *ids: str, pid: int = 0, **annotations: str) -> None:
        for id_ in ids:
            self._ends[id_] = asyncio.Event()
            self._tasks[id_] = asyncio.create_task(self._run(self.call(id_, pid, **annotations), id_))
            await settled()

    async def _run(self, call: QueuedCall, id_: str) -> None:
        async with call.begun():
            self.begun.append(id_)
            await self._ends[id_].wait()

    async def end(self, *ids: str) -> None:
        for id_ in ids:
            self._ends[id_].set()
            await self._tasks[id_]
            await settled()

    async def cancel(self, id_: str) -> None:
        self._tasks[id_].cancel()
        await asyncio.wait([self._tasks[id_]])


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@in_loop
async def test_calls_begin_in_the_order_of_their_arrival() -> None:
    hooks = Hooks(most=2)
    await hooks.start("a", "b", "c", "d", "e")
    assert hooks.begun == ["a", "b"]
    await hooks.end("b", "a", "c", "d", "e")
    assert hooks.begun == ["a", "b", "c", "d", "e"]


@in_loop
async def test_calls_whose_hook_has_given_up_begin_last() -> None:
    hooks = Hooks()
    await hooks.start("a", "b", "c", "d")
    hooks.gone = {"b", "c"}
    await hooks.end("a")
    assert hooks.begun == ["a", "d"]
    await hooks.start("e")
    await hooks.end("d", "e", "b", "c")
    assert hooks.begun == ["a", "d", "e", "b", "c"]


POD = {"io.kubernetes.pod.uid": "0f8fad5b-d9cb-469f-a165-70867728950e"}


@in_loop
async def test_a_workload_whose_call_hangs_takes_one_thread() -> None:
    hooks = Hooks(most=3)
    await hooks.start("a", "b", "c", **POD)
    await hooks.start("d", "e")
    assert hooks.begun == ["a", "d", "e"]
    await hooks.end("d", "e", "a", "b", "c")
    assert hooks.begun == ["a", "d", "e", "b", "c"]


@in_loop
async def test_a_process_with_many_calls_does_not_delay_other_hooks() -> None:
    hooks = Hooks(most=2)
    await hooks.start("a", "b", "c", pid=99)
    await hooks.start("d")
    assert hooks.begun == ["a", "d"]
    await hooks.end("a", "d", "b", "c")
    assert hooks.begun == ["a", "d", "b", "c"]


@in_loop
async def test_a_call_whose_connection_was_closed_by_the_server_does_not_begin() -> None:
    hooks = Hooks()
    await hooks.start("a", "b", "c")
    await hooks.cancel("b")
    await hooks.end("a")
    assert hooks.begun == ["a", "c"]
    await hooks.cancel("c")
    await hooks.start("d")
    assert hooks.begun == ["a", "c", "d"]
    await hooks.end("d")


@in_loop
async def test_a_hook_is_asked_to_wait_if_its_call_cannot_begin() -> None:
    hooks = Hooks(most=2, timeout_s=2.5)
    await hooks.start("a")
    assert hooks.call("b").notice() is None
    assert hooks.call("a").notice() == RunReply(queue_timeout_ms=2500)
    await hooks.start("b")
    assert hooks.call("c").notice() == RunReply(queue_timeout_ms=2500)
    hooks.timeout_s = 0
    assert hooks.call("c").notice() is None
    await hooks.end("a", "b")


def test_a_hook_is_not_asked_to_wait_for_calls_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(hook_queue.time, "monotonic", lambda: now)

    async def run() -> None:
        nonlocal now
        hooks = Hooks(most=2)
        await hooks.start("a")
        now = hook_queue.PROGRESS_S
        assert hooks.call("a").notice() is None
        await hooks.start("b")
        assert hooks.call("b").notice() is not None
        # A call has begun a moment ago, so another one may soon.
        assert hooks.call("c").notice() is not None
        now += hook_queue.PROGRESS_S
        assert hooks.call("c").notice() is None
        await hooks.end("a", "b")

    asyncio.run(run())


@in_loop
async def test_calls_that_change_nothing_are_not_queued() -> None:
    queue = Hooks().queue
    caller = Caller(0, frozenset(), 1)
    valid = '{"ociVersion":"1","id":"a","status":"created"}'
    for stage, state in (("poststart", valid), ("createRuntime", "{}"), ("poststop", '{"id":".."}')):
        assert queue.call(RunRequest(stage=stage, state=state), caller) is None
    assert queue.call(RunRequest(stage="poststop", state=valid), caller) is not None
