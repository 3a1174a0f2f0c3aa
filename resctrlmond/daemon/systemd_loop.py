# SPDX-License-Identifier: Apache-2.0
"""Repeat work that needs systemd: after each change, and after a failure with pauses that grow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from resctrlmond.api.dbus.library import BusUnavailable, DBusError
from resctrlmond.daemon.alerts import Alert
from resctrlmond.daemon.systemd import Systemd
from resctrlmond.resctrl.errors import ResctrlError

log = logging.getLogger(__name__)

# Changes come in bursts: a start changes a unit several times.
_BATCH_S = 0.05
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0


class SystemdLoop:
    """Calls ``work`` again and again in a task of its own. Belongs to the event loop. Nothing waits for it.

    ``work`` connects to systemd, and returns to be called again at once. It raises BusUnavailable, DBusError or
    ResctrlError to be called again after a pause, and calls ``succeeded`` to have no error and the first pause again.
    The error is in ``alerts`` (``Manager.alerts``) and in the log, with the words of ``alert``. ``on_error`` gets
    that text after each error, and "" after a success.
    """

    def __init__(
        self,
        alerts: dict[str, str],
        work: Callable[[], Awaitable[None]],
        *,
        alert: Alert,
        on_error: Callable[[str], None] = lambda _text: None,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        self._alerts = alerts
        self._work = work
        self._alert = alert
        self._on_error = on_error
        self._longest_pause_s = longest_pause_s
        self._error = ""
        self._pause_s = _FIRST_PAUSE_S
        self._woken = asyncio.Event()
        self._started = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def has_started(self) -> bool:
        """Whether ``start`` was called."""
        return self._task is not None

    def start(self) -> None:
        """Begin, or try again at once: the configuration may have changed."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self.wake()
        self._started.set()

    def wake(self) -> None:
        """End ``wait``, because something has changed. A pause after a failure goes on.

        A busy host has many changes, and each would be another try.
        """
        self._woken.set()

    def succeeded(self) -> None:
        """Report that the work can be done."""
        self._pause_s = _FIRST_PAUSE_S
        self._report("")

    async def wait(self, seconds: float | None = None, systemd: Systemd | None = None) -> None:
        """Wait for a change, or for some time. Raises BusUnavailable if the connection has ended."""
        woken = asyncio.create_task(self._woken.wait())
        ended = asyncio.create_task(systemd.until_disconnected()) if systemd is not None else None
        waiting = [woken] if ended is None else [woken, ended]
        timeout = None if seconds is None else max(seconds, 0)
        try:
            await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if ended is not None and ended.done():
            raise BusUnavailable(ended.result())
        self._woken.clear()
        await asyncio.sleep(_BATCH_S)

    async def close(self) -> None:
        """Stop the work where it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            self._started.clear()
            try:
                await self._work()
                continue
            except (BusUnavailable, DBusError, ResctrlError) as error:
                self._report(self._alert.text(error))
            except Exception as error:
                log.exception("%s, because of a defect of resctrlmond: please report it", self._alert.failure)
                self._report(self._alert.text(f"a defect of resctrlmond: {error!r}"))
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._longest_pause_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self._started.wait()
            except TimeoutError:
                pass

    def _report(self, error: str) -> None:
        if error and error != self._error:
            log.warning("%s", error)
        elif self._error and not error:
            log.info("%s", self._alert.success)
        self._error = self._alerts[self._alert.key] = error
        self._on_error(error)


class Retries:
    """When to try again what has failed for a key: each pause is twice the one before. Belongs to the event loop."""

    def __init__(self) -> None:
        # By key: the time of the next try (loop.time()), and the pause after that.
        self._by_key: dict[str, tuple[float, float]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def add(self, key: str) -> None:
        """Try again after a pause, because a try has just failed."""
        _, pause = self._by_key.get(key, (0.0, _FIRST_PAUSE_S))
        self._by_key[key] = asyncio.get_running_loop().time() + pause, min(2 * pause, _LONGEST_PAUSE_S)

    def remove(self, key: str) -> None:
        """Forget the failures of a key."""
        self._by_key.pop(key, None)

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Forget the failures of all other keys."""
        self._by_key = {key: retry for key, retry in self._by_key.items() if is_kept(key)}

    def is_due(self, key: str) -> bool:
        """Return whether to try now; also if no try has failed."""
        at, _ = self._by_key.get(key, (0.0, 0.0))
        return at <= asyncio.get_running_loop().time()

    @property
    def due(self) -> list[str]:
        """The keys to try again now."""
        return [key for key in self._by_key if self.is_due(key)]

    @property
    def seconds(self) -> float | None:
        """The time until the next try, which may be over; None if none has failed."""
        next_at = min([at for at, _ in self._by_key.values()], default=None)
        return None if next_at is None else next_at - asyncio.get_running_loop().time()
