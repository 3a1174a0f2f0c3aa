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
from resctrlmond.api.hook_queue import PATIENCE_S, HookQueue, QueuedCall
from resctrlmond.api.types import RunRequest
from tests.hook.test_oci_state import CONTAINERD, CRIO, UID


class Hooks:
    """Calls of hooks: each runs until ``end``. ``begun`` has the container ids in the order of their begin."""

    def __init__(self, most: int = 1, timeout_s: float = 10.0) -> None:
        self.timeout_s = timeout_s
        self.durations: list[float] = []
        self.queue = HookQueue(lambda: self.timeout_s, most, self.durations.append)
        self.begun: list[str] = []
        self.gone: set[str] = set()
        self.notices: dict[str, list[int | None]] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def call(self, id_: str, pid: int = 0, stage: str = "createRuntime", pod: str = "") -> QueuedCall:
        annotations = {"io.kubernetes.pod.uid": pod} if pod else {}
        state = {"ociVersion": "1", "id": id_, "status": "created", "annotations": annotations}
        # Each hook is a process of its own.
        caller = Caller(0, frozenset(), pid or 1000 + len(self._tasks), waits=lambda: id_ not in self.gone)
        call = self.queue.call(RunRequest(stage=stage, state=json.dumps(state)), caller)
        assert call is not None
        return call

    async def start(self, *ids: str, pid: int = 0, pod: str = "") -> None:
        for id_ in ids:
            self._ends[id_] = asyncio.Event()
            self._tasks[id_] = asyncio.create_task(self._run(self.call(id_, pid, pod=pod), id_))
            await settled()

    async def _run(self, call: QueuedCall, id_: str) -> None:
        notices = self.notices.setdefault(id_, [])
        async with call.begun(lambda notice: notices.append(notice.queue_timeout_ms)):
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


POD = "0f8fad5b-d9cb-469f-a165-70867728950e"


@in_loop
async def test_a_workload_whose_call_hangs_takes_one_thread() -> None:
    hooks = Hooks(most=3)
    await hooks.start("a", "b", "c", pod=POD)
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the queue, which the test sets; the queue renews its notices all the time."""
    clock = Clock()
    monkeypatch.setattr(hook_queue, "monotonic", lambda: clock.now)
    monkeypatch.setattr(hook_queue, "_RENEWAL_S", 0.001)
    return clock


class Clock:
    now = 1000.0


async def renewed(hooks: Hooks, id_: str) -> int | None:
    """Wait for two more notices, and return the last."""
    count = len(hooks.notices[id_])
    while len(hooks.notices[id_]) < count + 2:
        await asyncio.sleep(0.001)
    return hooks.notices[id_][-1]


def test_hook_gets_a_notice_while_its_call_cannot_begin(clock: Clock) -> None:
    async def run() -> None:
        hooks = Hooks(most=2, timeout_s=15)
        await hooks.start("a", "b", "c")
        assert (hooks.notices["a"], hooks.notices["b"], hooks.notices["c"][0]) == ([], [], 10_000)
        clock.now += 4
        assert await renewed(hooks, "c") == 14_000
        clock.now += 4
        assert await renewed(hooks, "c") == 15_000
        await hooks.start("d", pod=POD)
        assert hooks.notices["d"][0] == 10_000
        await hooks.end("a", "b", "c", "d")

    asyncio.run(run())


def test_duration_of_a_call_has_its_time_in_the_queue(clock: Clock) -> None:
    async def run() -> None:
        hooks = Hooks(most=1)
        await hooks.start("a", "b", "c")
        clock.now += 4
        await hooks.cancel("c")
        await hooks.end("a")
        clock.now += 1
        await hooks.end("b")
        assert hooks.durations == [4.0, 5.0]

    asyncio.run(run())


def test_hook_gets_a_notice_while_another_call_of_its_workload_runs(clock: Clock) -> None:
    async def run() -> None:
        hooks = Hooks(most=2, timeout_s=15)
        await hooks.start("a", "b", pod=POD)
        assert hooks.notices["b"][0] == 10_000
        hooks.timeout_s = 0
        await hooks.start("c", pod=POD)
        assert hooks.notices["c"] == []
        await hooks.end("a", "b", "c")

    asyncio.run(run())


def test_hook_gets_no_notice_while_calls_hang(clock: Clock) -> None:
    async def run() -> None:
        hooks = Hooks(most=2, timeout_s=60)
        await hooks.start("a", pod=POD)
        clock.now += PATIENCE_S
        await hooks.start("b")
        await hooks.start("e", pod=POD)
        await hooks.start("c")
        # A call has begun a moment ago, so another one may soon.
        assert hooks.notices["c"][0] == 10_000
        assert hooks.notices["e"] == []
        clock.now += PATIENCE_S
        await hooks.start("d")
        assert hooks.notices["d"] == []
        count = len(hooks.notices["c"])
        await asyncio.sleep(0.05)
        assert len(hooks.notices["c"]) == count
        await hooks.end("a", "b", "c", "d", "e")

    asyncio.run(run())


@in_loop
async def test_calls_that_change_nothing_are_not_queued() -> None:
    queue = Hooks().queue
    caller = Caller(0, frozenset(), 1)
    valid = '{"ociVersion":"1","id":"a","status":"created"}'
    for stage, state in (("poststart", valid), ("createRuntime", "{}"), ("poststop", '{"id":".."}')):
        assert queue.call(RunRequest(stage=stage, state=state), caller) is None
    assert queue.call(RunRequest(stage="poststop", state=valid), caller) is not None


@pytest.mark.parametrize("name", ["other", "io.kubernetes.cri-o.Annotations", "profile.resctrlmon.orgx"])
def test_state_of_a_call_in_the_queue_has_only_what_is_used(name: str) -> None:
    """110 states with one letter beyond U+FFFF took a gigabyte."""
    used = dict.fromkeys((*CRIO, *CONTAINERD, "profile.resctrlmon.org/a", "io.kubernetes.cri-o.ImageName"), "a")
    used |= {"io.container.manager": "libpod", "io.kubernetes.cri-o.SandboxID": "b", "io.kubernetes.pod.uid": UID}
    # Named by CRI-O, and not used.
    del used["io.kubernetes.cri-o.ContainerName"]
    state = {"ociVersion": "1", "id": "a", "status": "created", "pid": 7, "bundle": "/b", "annotations": used}
    text = json.dumps({**state, "annotations": {**used, name: "\U0001f600" * 1000}, "owner": "x"})
    request = RunRequest(stage="createRuntime", state=text)
    assert Hooks().queue.call(request, Caller(0, frozenset(), 1)) is not None
    assert json.loads(request.state) == state


@pytest.mark.parametrize("text", ["", "{", '{"id":7}', json.dumps({"annotations": None})])
def test_state_that_cannot_be_read_stays_as_it_is(text: str) -> None:
    request = RunRequest(stage="createRuntime", state=text)
    assert Hooks().queue.call(request, Caller(0, frozenset(), 1)) is None
    assert request.state == text
