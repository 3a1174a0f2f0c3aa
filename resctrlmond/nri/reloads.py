# SPDX-License-Identifier: Apache-2.0
"""Read the profiles at the start and at each reload, in a thread: their disk may not respond."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from resctrlmond.nri.plugin import Plugin
from resctrlmond.service.notify import Notify

log = logging.getLogger("resctrlmond.nri")

# How long the start waits: containers that start before the plugin is registered are late.
START_S = 2.0
# How long a reload lasts at most: systemd waits 90 s. Many rules take a second, and the network may be asked for the
# name of a user.
RELOAD_S = 30.0
_NOTHING = "the adapter sets no limits of memory and mounts nothing"


class Reloads:
    """Reads the profiles of the plugin, one time after another, and notifies the service manager of each reload."""

    def __init__(self, plugin: Plugin, notify: Notify) -> None:
        self._plugin = plugin
        self._notify = notify
        self._loading = asyncio.Lock()
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Read the profiles for the first time. Return after START_S at the latest, and continue to read them."""
        if not await self._is_loaded(_NOTHING, START_S):
            log.warning("the profiles could not be read in %.0f s: %s until they are read", START_S, _NOTHING)

    def begin(self) -> None:
        """Begin a reload, after those that run."""
        self._task(self._reload())

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reload(self) -> None:
        async with self._reloading:
            self._notify.reloading()
            try:
                if not await self._is_loaded("the old ones stay in use", RELOAD_S, "profiles reloaded"):
                    log.warning(
                        "the profiles could not be read in %.0f s: the old ones stay in use until they are read",
                        RELOAD_S,
                    )
            finally:
                # systemd waits for this message.
                self._notify.ready()

    async def _is_loaded(self, otherwise: str, limit_s: float, success: str = "") -> bool:
        """Read the profiles. Return whether that has ended within the limit; it continues after the limit."""
        done, _ = await asyncio.wait([self._task(self._load(otherwise, success))], timeout=limit_s)
        return bool(done)

    async def _load(self, otherwise: str, success: str) -> None:
        async with self._loading:
            try:
                is_loaded = await _call_in_daemon_thread(self._plugin.memory.load, otherwise)
            except Exception:
                log.exception("the profiles could not be read, and %s", otherwise)
                return
        if is_loaded and success:
            log.info("%s", success)
        self._plugin.resubscribe()


async def _call_in_daemon_thread(function: Callable[[str], bool], argument: str) -> bool:
    """Return the function's result. Unlike threads of asyncio, the thread does not delay the end of the process."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[bool] = loop.create_future()

    def settle(value: bool, error: Exception | None) -> None:
        if result.cancelled():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def call() -> None:
        value, failure = False, None
        try:
            value = function(argument)
        except Exception as error:
            failure = error
        # The loop may be closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=call, name="profiles", daemon=True).start()
    return await result
