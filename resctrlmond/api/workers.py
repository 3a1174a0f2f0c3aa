# SPDX-License-Identifier: Apache-2.0
"""The threads that make blocking calls: each kind of work has its own, so that none waits for another's."""

from __future__ import annotations

import asyncio
import enum
import functools
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

    A system call on resctrl waits for the kernel's rdtgroup_mutex, and a kernel that hangs lets it wait for ever.
    Threads that hang are lost to their own lane alone.
    """

    CHANGE = ("change", 8)  # verbs that write, and the hook
    COUNTERS = ("counters", 4)  # verbs that read counters
    RECORDS = ("records", 4)  # what is answered from memory, whatever the kernel does
    ENDS = ("ends", 4)  # ends that were seen
    WRITES = ("writes", 1)  # what other programs wrote to resctrl
    UPKEEP = ("upkeep", 4)  # ticks: more than one only where one hangs


class Workers:
    """One pool of threads for each lane; a thread is made when there is work for it."""

    def __init__(self) -> None:
        self._pools = {lane: ThreadPoolExecutor(lane.value[1], thread_name_prefix=lane.value[0]) for lane in Lane}
        self._running: set[Future[Any]] = set()
        self._guard = threading.Lock()

    async def run(self, lane: Lane, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a blocking call; its errors are raised here, an OSError that nobody expected as NotRead."""
        future = self._pools[lane].submit(_typed, functools.partial(function, *args, **kwargs))
        with self._guard:
            self._running.add(future)
        future.add_done_callback(self._ended)
        try:
            return await asyncio.wrap_future(future)
        finally:
            # An error's traceback holds this frame, and the future the error: a cycle that would keep all that the
            # call had at hand until the oldest generation is collected.
            del future

    def _ended(self, future: Future[Any]) -> None:
        with self._guard:
            self._running.discard(future)

    def close(self, grace_s: float = 5.0) -> int:
        """Take no more work and wait ``grace_s`` for what runs; how many calls still hang then."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + grace_s
        while (hanging := self._hanging()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return hanging

    def _hanging(self) -> int:
        with self._guard:
            return len(self._running)


def _typed(call: Callable[[], T]) -> T:
    try:
        return call()
    except OSError as error:
        # What is expected was given its type where it came from; this has at least its path and its name.
        raise not_read(error, "carry out the call") from error
