# SPDX-License-Identifier: Apache-2.0
"""Queue the calls of the OCI hook: they begin in the order of their arrival, as soon as threads are free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from time import monotonic

import msgspec

from resctrlmond.api.access import Caller
from resctrlmond.api.oci_hook import key_of
from resctrlmond.api.oci_state import used_part
from resctrlmond.api.types import RunReply, RunRequest
from resctrlmond.api.workers import Lane

# How long a hook waits without news. Hooks do not wait for a call that has run for so long, because it may hang.
PATIENCE_S = 10.0
# Seconds between two notices to a hook that waits.
_RENEWAL_S = 2.0


class HookQueue:
    """Decides when a call of Hook.Run begins. Belongs to the event loop.

    ``most`` calls run at once: at most one for each workload, because a second one would wait for the first in a
    thread, and at most one for each calling process, because the hook of a container is a process with one call, and
    a process with many calls must not delay it. Calls whose caller has given up begin last: their containers run
    already. ``timeout_s`` returns how long a hook may wait in all; with 0, no hook gets a notice. ``on_end`` is
    called with the duration of each call that began, with its time in the queue (s).
    """

    def __init__(
        self,
        timeout_s: Callable[[], float],
        most: int = Lane.HOOKS.value[1],
        on_end: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._most = most
        self._on_end = on_end
        # Dictionaries without values are ordered sets.
        self._waiting: dict[QueuedCall, None] = {}
        self._given_up: dict[QueuedCall, None] = {}
        self._running: dict[QueuedCall, float] = {}

    def call(self, request: RunRequest, caller: Caller) -> QueuedCall | None:
        """Return the call, which has not joined the queue yet; None if it changes no workload.

        Reduces the state in the request to what is used: hundreds may wait, and a state may have megabytes.
        """
        msgspec.structs.force_setattr(request, "state", used_part(request.state))
        key = key_of(request)
        return None if key is None else QueuedCall(self, key, caller)

    def join(self, call: QueuedCall) -> None:
        """Append a call to the queue."""
        self._waiting[call] = None
        self._advance()

    def leave(self, call: QueuedCall) -> None:
        """Remove a call that has ended, or whose connection was closed before it began."""
        if self._running.pop(call, None) is not None:
            self._on_end(monotonic() - call.joined)
        for calls in (self._waiting, self._given_up):
            calls.pop(call, None)
        self._advance()

    def timeout_ms(self, call: QueuedCall) -> int:
        """Return how long the hook of a waiting call may last (ms), counted from its call; 0 to send no notice.

        While calls begin, that time is extended, so that hooks give up soon if this process hangs.
        """
        now = monotonic()
        blocking = [begun for other, begun in self._running.items() if other.excludes(call)]
        if not blocking:
            blocking = [max(self._running.values(), default=now)]
        is_moving = all(now - begun < PATIENCE_S for begun in blocking)
        return round(1000 * min(self._timeout_s(), now - call.joined + PATIENCE_S)) if is_moving else 0

    def _advance(self) -> None:
        for call in tuple(self._waiting):
            if not self._has_thread():
                return
            if self._may_begin(call):
                del self._waiting[call]
                if call.caller.waits():
                    self._begin(call)
                else:
                    self._given_up[call] = None
        for call in tuple(self._given_up):
            if not self._has_thread():
                return
            if self._may_begin(call):
                del self._given_up[call]
                self._begin(call)

    def _has_thread(self) -> bool:
        return len(self._running) < self._most

    def _may_begin(self, call: QueuedCall) -> bool:
        return not any(other.excludes(call) for other in self._running)

    def _begin(self, call: QueuedCall) -> None:
        self._running[call] = monotonic()
        call.turn.set()


class QueuedCall:
    """A call of Hook.Run with the workload that it names. ``turn`` is set when the call may begin."""

    def __init__(self, queue: HookQueue, key: str, caller: Caller) -> None:
        self._queue = queue
        self._key = key
        self.caller = caller
        self.turn = asyncio.Event()
        self.joined = monotonic()

    def excludes(self, other: QueuedCall) -> bool:
        """Return whether the two calls must not run at once."""
        return self._key == other._key or self.caller.pid == other.caller.pid

    @contextlib.asynccontextmanager
    async def begun(self, announce: Callable[[RunReply], None]) -> AsyncIterator[None]:
        """Wait until the call may begin. ``announce`` sends how long the hook may wait. The context ends the call."""
        self._queue.join(self)
        try:
            while not self.turn.is_set():
                if timeout_ms := self._queue.timeout_ms(self):
                    announce(RunReply(queue_timeout_ms=timeout_ms))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RENEWAL_S):
                        await self.turn.wait()
            yield
        finally:
            self._queue.leave(self)
