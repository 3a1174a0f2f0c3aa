# SPDX-License-Identifier: Apache-2.0
"""The manager's ticks, one after another; one that hangs in the kernel is left behind, and the next goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from resctrlmond import journal
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.groups.times import utc_now
from resctrlmond.resctrl.errors import ResctrlError

log = logging.getLogger(__name__)

# A tick takes milliseconds for a workload, and a second for one with control groups without end. What takes so long
# on one hangs in a system call, with that workload locked: the next tick passes it over.
HANGS_S = 10.0


class Ticking:
    """Starts a tick whenever ``step`` is called and none is at work. Lives in the event loop.

    ``went_on`` tells when a tick last went on to another workload, by time.monotonic(), which is the loop's time.
    """

    def __init__(
        self,
        workers: Workers,
        tick: Callable[[], None],
        hangs_s: float = HANGS_S,
        went_on: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._workers = workers
        self._tick = tick
        self._hangs_s = hangs_s
        self._went_on = went_on
        self._current: asyncio.Task[None] | None = None
        self._begun = 0.0
        self._hanging: set[asyncio.Task[None]] = set()
        self.trouble = ""

    @property
    def is_stuck(self) -> bool:
        """Whether no thread is left for a further tick: only a restart can help, if anything."""
        return len(self._hanging) >= Lane.UPKEEP.value[1]

    def step(self) -> None:
        """Start the next tick if the last one has ended, or hangs."""
        now = asyncio.get_running_loop().time()
        if self._current is not None:
            if now - max(self._begun, self._went_on()) < self._hangs_s:
                return
            log.error("upkeep hangs: a system call has not come back for %.0f s", self._hangs_s)
            self._hanging.add(self._current)
            self.trouble = self.trouble or f"upkeep of a workload has hung since {utc_now()}, in a system call"
            self._current = None
        if not self.is_stuck:
            self._begun = now
            self._current = asyncio.ensure_future(self._run())
            self._current.add_done_callback(self._ended)

    async def _run(self) -> None:
        try:
            await self._workers.run(Lane.UPKEEP, self._tick)
        except ResctrlError as error:
            log.error("%s", error, extra=journal.fields(error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task is self._current:
            self._current = None
        self._hanging.discard(task)
        if not self._hanging:
            self.trouble = ""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a tick failed in a way that it should not", exc_info=error)
