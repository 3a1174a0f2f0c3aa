# SPDX-License-Identifier: Apache-2.0
"""Call the manager when inotify reports that another program wrote to resctrl."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
from collections.abc import Callable

from resctrlmond.api.workers import Lane, Workers
from resctrlmond.resctrl.errors import ResctrlError

log = logging.getLogger(__name__)

# A write raises several events. A task that is moved may end soon after that.
_BATCH_S = 0.001
_AFTER_FAILURE_S = 1.0


class Reaction:
    """Calls ``react`` in a thread of its own, once at a time, when ``fd`` is readable or ``wake`` is called.

    ``react`` returns after how many seconds it is to be called again, 0 if only after the next event. ``rest_s``
    returns for how many seconds it is not to be called at all after a call. It is not called if a verb has read the
    events meanwhile. Belongs to the event loop. Without a descriptor (-1) only the ticks react.
    """

    def __init__(self, workers: Workers, react: Callable[[], float], rest_s: Callable[[], float], fd: int) -> None:
        self._workers = workers
        self._react = react
        self._rest_s = rest_s
        self._fd = -1
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False
        self._is_woken = False
        self._not_before = 0.0
        self.wait_for(fd)

    def wait_for(self, fd: int) -> None:
        """Wait for another descriptor from now on. The former one, if any, must still be open."""
        if fd == self._fd:
            return
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self._fd = fd
        if fd >= 0 and self._task is None:
            self._listen()

    def wake(self) -> None:
        """Call ``react`` soon. Can be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._begin_now)

    def close(self) -> None:
        """Stop waiting for events."""
        self.wait_for(-1)
        if self._task is not None:
            self._task.cancel()

    def _listen(self) -> None:
        try:
            self._loop.add_reader(self._fd, self._begin)
        except OSError as error:
            log.error("cannot wait for events about what other programs write to resctrl: %s", error.strerror)
            self._loop.call_later(_AFTER_FAILURE_S, self._begin)

    def _begin_now(self) -> None:
        self._is_woken = True
        self._begin()

    def _is_readable(self) -> bool:
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def _begin(self) -> None:
        if self._fd < 0:
            return
        self._is_wanted = True
        # Readable until a thread has read the events.
        self._loop.remove_reader(self._fd)
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        pause = 0.0
        while pause or self._is_wanted:
            await asyncio.sleep(max(pause, _BATCH_S, self._not_before - self._loop.time()))
            is_due = pause or self._is_woken or self._is_readable()
            self._is_wanted = self._is_woken = False
            if not is_due:
                continue  # a verb has read the events, which were its own
            try:
                pause = await self._workers.run(Lane.WRITES, self._react)
            except ResctrlError as error:
                log.error("cannot detect what another program wrote to resctrl: %s", error)
                pause = _AFTER_FAILURE_S
            except Exception:
                log.exception("unexpected error while detecting what another program wrote to resctrl")
                pause = _AFTER_FAILURE_S
            self._not_before = self._loop.time() + self._rest_s()
        self._task = None
        if self._fd >= 0:
            self._listen()
