# SPDX-License-Identifier: Apache-2.0
"""Run blocking calls in threads. Each kind of work has its own threads, so that one kind never waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from resctrlmond.resctrl.errors import not_read

P = ParamSpec("P")
T = TypeVar("T")


class Lane(enum.Enum):
    """A kind of work, with the number of its threads.

    A system call on resctrl waits for the kernel's rdtgroup_mutex, which may take for ever. A thread that hangs is
    missing only in its own lane.
    """

    CHANGE = ("change", 8)  # verbs that write
    HOOKS = ("hooks", 8)  # calls of the hook, which hook_queue.HookQueue lets begin
    COUNTERS = ("counters", 4)  # verbs that read counters
    RECORDS = ("records", 4)  # verbs that are answered from memory
    ENDS = ("ends", 4)  # detected ends of members and pods
    UNITS = ("units", 1)  # starts and ends of systemd units
    COMMANDS = ("commands", 4)  # commands of systemd services, which wait for the reply
    UPKEEP = ("upkeep", 4)  # ticks; several run only if one hangs


# The lanes of calls that change one workload. Other calls change many, and may hang at one of them.
_SHORT = frozenset({Lane.CHANGE, Lane.HOOKS, Lane.ENDS, Lane.COMMANDS})


class Workers:
    """A thread pool for each lane. Threads start when they are needed."""

    def __init__(self) -> None:
        # In a thread that makes a short call: what the loop is to call after it.
        self._of_thread = threading.local()
        self._pools = {lane: ThreadPoolExecutor(lane.value[1], thread_name_prefix=lane.value[0]) for lane in Lane}
        self._turns = {lane: asyncio.Semaphore(lane.value[1]) for lane in Lane}
        self._running: set[Future[Any]] = set()
        self._guard = threading.Lock()

    async def run(self, lane: Lane, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in a thread of the lane. Raises its errors; an unexpected OSError becomes NotRead."""
        loop = asyncio.get_running_loop()
        later = _Later(loop) if lane in _SHORT else None

        def call() -> T:
            self._of_thread.later = later
            return function(*args, **kwargs)

        future = self._pools[lane].submit(call)
        with self._guard:
            self._running.add(future)
        future.add_done_callback(self._ended)
        try:
            return await asyncio.wrap_future(future, loop=loop)
        except OSError as error:
            # Expected errors got their type where they were raised. This one has at least its path and errno.
            raise not_read(error, "carry out the call") from error
        finally:
            if later is not None:
                later.begin()
            # The error refers to this frame by its traceback, and the future to the error: this cycle would keep the
            # objects of the call until the garbage collector runs.
            del future

    async def run_in_turn(self, lane: Lane, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As ``run``, but submit the call only when fewer such calls run than the lane has threads.

        Until then the caller waits, and the loop goes on. Each submit may make the loop wait for Python's lock while
        other threads compute: hundreds at once block it for seconds, and on a starved machine for longer than the
        watchdog waits.
        """
        async with self._turns[lane]:
            return await self.run(lane, function, *args, **kwargs)

    def call_later(self, loop: asyncio.AbstractEventLoop, function: Callable[[str], object], key: str) -> None:
        """Have the loop call the function, after the caller has the result of the short call that this thread makes.

        The loop is then woken once, and no reply waits for the function. Can be called from any thread.
        """
        later: _Later | None = getattr(self._of_thread, "later", None)
        if later is None or not later.add(function, key):
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(function, key)

    def _ended(self, future: Future[Any]) -> None:
        with self._guard:
            self._running.discard(future)

    def close(self, grace_s: float = 5.0) -> int:
        """Refuse further calls, wait ``grace_s`` for running ones, and return the number that still runs."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + grace_s
        while (hanging := self._hanging()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return hanging

    def _hanging(self) -> int:
        with self._guard:
            return len(self._running)


class _Later:
    """Calls that the loop makes after a call in a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._guard = threading.Lock()
        self._calls: list[tuple[Callable[[str], object], str]] | None = []

    def add(self, function: Callable[[str], object], key: str) -> bool:
        """Add a call; False if the time for them has come, because the caller has stopped waiting for the thread."""
        with self._guard:
            if self._calls is None:
                return False
            self._calls.append((function, key))
            return True

    def begin(self) -> None:
        """Have the loop make the calls after what it is doing now. Belongs to the loop."""
        with self._guard:
            calls, self._calls = self._calls, None
        for function, key in calls or ():
            self._loop.call_soon(function, key)
