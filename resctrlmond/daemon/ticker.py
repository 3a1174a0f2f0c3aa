# SPDX-License-Identifier: Apache-2.0
"""Run the manager's ticks one after another; leave a tick that hangs in the kernel, and start the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from resctrlmond.api.workers import Lane, Workers
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.service import journal
from resctrlmond.workloads.model.clock import utc_now

log = logging.getLogger(__name__)

# A tick takes milliseconds for a workload, and a second for one with very many control groups. A tick that is longer
# with one workload hangs in a system call. It holds the lock of that workload, which the next tick therefore skips.
HANGS_S = 10.0


class Ticker:
    """Starts a tick at each call of ``step`` if no other tick is running. Belongs to the event loop.

    ``last_progress`` returns when a tick last went on to another workload (time.monotonic(), the loop's time).
    ``problem`` is a text for the administrator; "" while no tick hangs.
    """

    def __init__(
        self,
        workers: Workers,
        tick: Callable[[], None],
        hangs_s: float = HANGS_S,
        last_progress: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._workers = workers
        self._tick = tick
        self._hangs_s = hangs_s
        self._last_progress = last_progress
        self._current: asyncio.Task[None] | None = None
        self._started = 0.0
        self._hanging: set[asyncio.Task[None]] = set()
        self.problem = ""

    @property
    def is_stuck(self) -> bool:
        """Whether no thread is left for another tick. Only a restart can help then."""
        return len(self._hanging) >= Lane.UPKEEP.value[1]

    def step(self) -> None:
        """Start the next tick if the last one has ended or hangs."""
        now = asyncio.get_running_loop().time()
        if self._current is not None:
            if now - max(self._started, self._last_progress()) < self._hangs_s:
                return
            log.error(
                "the maintenance of a workload hangs: a system call has not returned for %.0f s. See: journalctl -k",
                self._hangs_s,
            )
            self._hanging.add(self._current)
            self.problem = self.problem or (
                f"the maintenance of a workload has hung since {utc_now()} in a system call. See: journalctl -k"
            )
            self._current = None
        if not self.is_stuck:
            self._started = now
            self._current = asyncio.ensure_future(self._run())
            self._current.add_done_callback(self._end)

    async def _run(self) -> None:
        try:
            await self._workers.run(Lane.UPKEEP, self._tick)
        except ResctrlError as error:
            log.error("%s", error, extra=journal.fields(error))

    def _end(self, task: asyncio.Task[None]) -> None:
        if task is self._current:
            self._current = None
        self._hanging.discard(task)
        if not self._hanging:
            self.problem = ""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a tick failed because of a defect of resctrlmond: please report it", exc_info=error)
