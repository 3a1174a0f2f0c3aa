# SPDX-License-Identifier: Apache-2.0
"""The plugin: what the runtime tells, carried over to resctrlmond, and never in the way of a container's start.

An event changes the state at once and is then carried over by one worker, in the order of events. Whoever told it is
answered when that is done, or when the time is up. What could not be carried over is made up for later, from
resctrlmond's own list: the same steps that follow the runtime's list at the beginning of a connection.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from resctrlmond import journal
from resctrlmond.config import ConfigError
from resctrlmond.groups.errors import InvalidKey
from resctrlmond.groups.inventory import ContainerState
from resctrlmond.message_ids import MessageId
from resctrlmond.nri import place, settings
from resctrlmond.nri.carrier import Carrier
from resctrlmond.nri.door import Away
from resctrlmond.nri.messages import MAX_MEMBERS, MAX_SANDBOXES, Container, Event, Happened, Pod, Synchronize
from resctrlmond.nri.search import STRANGER_S, Search

log = logging.getLogger(__name__)

# After a failure, and each time twice as long, up to the last.
RETRY_S = (0.2, 5.0)
# What is in neither the runtime's list nor an event is found in the pods' control groups: what started between the
# two (runtimes hold such starts back only in their newer versions), or was restored from a checkpoint.
FIRST_RESCAN_S = 1.0
RESCAN_S = 10.0
# A runtime gives its list at once or, to a plugin that it launched, never: so long an event is newer than the list.
LIST_S = 10.0
# Events that wait to be carried over. What a runtime tells beyond them, without waiting for an answer to any, is in
# the state, and made up for from there.
MAX_STEPS = 1000
# After an event, resctrlmond is told how the pods stand now: one word for the several events of a start.
TELL_S = 0.2

Step = Callable[[], Awaitable[None]]

_BEGINNINGS = (Event.RUN_POD_SANDBOX, Event.POST_CREATE_CONTAINER, Event.START_CONTAINER, Event.POST_START_CONTAINER)


class Plugin:
    """The state, and the worker that carries it over. ``run`` works until it is cancelled."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._pods = carrier.pods
        self._listed_pods: list[Pod] = []
        self._listed_containers: list[Container] = []
        self._steps: collections.deque[tuple[Step, asyncio.Future[None]]] = collections.deque()
        self._woken = asyncio.Event()
        self._search = Search(carrier)
        # When to carry everything over again, by the loop's clock; None while there is no need.
        self._resync_at: float | None = None
        self._rescan_at: float | None = None
        self._tell_at: float | None = None
        self._list_until: float | None = None
        self._retry_s = RETRY_S[0]
        # The answer that the worker's step is for; cancelled when it was given before the step was done.
        self._carried: asyncio.Future[None] | None = None
        # Whether the runtime is at the other end still.
        self.is_connected: Callable[[], bool] = lambda: False

    # -- told by the runtime

    def begin(self) -> None:
        """A connection begins."""
        self._forget_list()
        self._pods.begin()
        now = time.monotonic()
        self._list_until = now + LIST_S
        self._rescan_at = min(self._rescan_at or now + RESCAN_S, self._list_until)
        self._woken.set()

    def configure(self, text: str) -> None:
        """Select pods by what the runtime hands over, in the place of our own file's."""
        try:
            selection = settings.parse(text.encode(), "the runtime's configuration of this plugin")
        except ConfigError as error:
            log.error("%s; pods are selected as before", error, extra=journal.fields(error))
            return
        self._pods.select(selection)
        self._resync_at = time.monotonic()
        self._woken.set()

    def synchronize(self, chunk: Synchronize) -> None:
        """A part of the runtime's list; with the last one the list is the truth."""
        # A list without an end must not fill the memory: one more than is taken says that there are too many.
        self._listed_pods += chunk.pods[: MAX_SANDBOXES + 1 - len(self._listed_pods)]
        self._listed_containers += chunk.containers[: MAX_MEMBERS + 1 - len(self._listed_containers)]
        self._list_until = time.monotonic() + LIST_S
        if chunk.more:
            return
        pods, containers = self._listed_pods, self._listed_containers
        self._list_until = None
        for wrong in self._pods.replace_all(pods, containers):
            log.warning("unmonitored: %s", wrong, extra=journal.fields(message_id=MessageId.UNMONITORED))
        for member in self._pods.members.values():
            member.started = member.started or place.started(member.container.pid)
        log.info("the runtime listed its pods (%d) and containers (%d)", len(pods), len(containers))
        self._forget_list()
        now = time.monotonic()
        self._resync_at, self._rescan_at = now, now + FIRST_RESCAN_S
        self._woken.set()

    def _forget_list(self) -> None:
        self._listed_pods, self._listed_containers = [], []

    def happened(self, told: Happened) -> asyncio.Future[None]:
        """An event; the future is done when it is carried over, or has failed to be.

        Who answers the runtime before that cancels it first: from then on a container is not held back any more.
        """
        future = asyncio.get_running_loop().create_future()
        step = self._take(told)
        self._tell_at = self._tell_at or time.monotonic() + TELL_S
        self._woken.set()
        if step is not None and len(self._steps) >= MAX_STEPS:
            self._retry_later()
            step = None
        if step is None:
            future.set_result(None)
            return future
        self._steps.append((step, future))
        return future

    def _take(self, told: Happened) -> Step | None:
        pod, container = told.pod, told.container
        log.debug("%s of %s %s", told.event, pod.id if pod else "no pod", container.id if container else "")
        try:
            # An end that is told late must not bring back what was removed.
            if pod is not None and told.event in _BEGINNINGS:
                self._pods.add_sandbox(pod)
                self._pods.tell(pod.id)
            match told.event:
                case Event.RUN_POD_SANDBOX if pod is not None:
                    return lambda: self._carrier.note(pod.id)
                case Event.REMOVE_POD_SANDBOX if pod is not None:
                    return self._take_removal(pod.id)
                case Event.STOP_CONTAINER | Event.REMOVE_CONTAINER if container is not None:
                    return self._take_end(container, is_removed=told.event is Event.REMOVE_CONTAINER)
                case Event.POST_CREATE_CONTAINER | Event.START_CONTAINER | Event.POST_START_CONTAINER if container:
                    return self._take_start(container, told.event)
        except InvalidKey as error:
            log.warning("unmonitored: %s", error, extra=journal.fields(error, message_id=MessageId.UNMONITORED))
        return None

    def _take_start(self, container: Container, event: Event) -> Step | None:
        member = self._pods.add_member(container)
        self._pods.tell(container.id)
        if event is Event.POST_CREATE_CONTAINER:
            return None
        member.container = replace(member.container, state=ContainerState.RUNNING)
        # While the runtime waits for us, the number is the container's.
        member.started = member.started or place.started(container.pid)
        if event is Event.START_CONTAINER:
            # A restart of containerd may bring the same event for what is known; asked again, resctrlmond says so.
            member.is_settled = False
        is_late = event is not Event.START_CONTAINER
        return lambda: self._carrier.assign(container.id, is_late=is_late, is_held=self._is_held)

    def _take_end(self, container: Container, *, is_removed: bool) -> Step | None:
        self._pods.tell(container.id)
        member = self._pods.members.get(container.id)
        if member is None:
            return None
        is_noted = member.container.is_running and self._pods.is_selected(member)
        member.container = replace(member.container, state=ContainerState.STOPPED)
        if is_removed:
            del self._pods.members[container.id]
        return (lambda: self._carrier.end(member.key, container.id)) if is_noted else None

    def _take_removal(self, sandbox: str) -> Step | None:
        self._pods.tell(sandbox)
        known = self._pods.sandboxes.get(sandbox)
        gone = self._pods.remove_sandbox(sandbox)
        self._pods.tell(*gone)
        if known is None or known.unselected:
            return None
        return lambda: self._carrier.end_sandbox(known.key, sandbox, gone)

    # -- carried over to resctrlmond

    async def run(self) -> None:
        """Work: events first, and between them whatever else is due."""
        work: AsyncIterator[None] | None = None
        while True:
            if self._steps:
                await self._carry(*self._steps.popleft())
                continue
            if work is None:
                work = self._due()
            if work is None:
                await self._sleep()
            elif not await self._advance(work):
                work = None

    def _is_held(self) -> bool:
        """Whether the runtime waits for the answer to the event that is carried over, which was not given yet."""
        return self._carried is not None and not self._carried.cancelled() and self.is_connected()

    async def _carry(self, step: Step, future: asyncio.Future[None]) -> None:
        self._carried = future
        try:
            # With a daemon that hangs, each start would be held up for nothing.
            if self._carrier.is_hung:
                self._retry_later()
            else:
                await step()
        except Away:
            self._retry_later()
        except Exception:
            # Whatever is wrong with us, the container starts.
            log.exception("an event was not carried over")
            self._retry_later()
        finally:
            self._carried = None
            if not future.done():
                future.set_result(None)

    def _due(self) -> AsyncIterator[None] | None:
        now = time.monotonic()
        if self._resync_at is not None and self._resync_at <= now:
            self._resync_at = None
            return self._carrier.resync()
        if self._rescan_at is not None and self._rescan_at <= now:
            self._rescan_at = None
            return self._rescan()
        if self._tell_at is not None and self._tell_at <= now:
            self._tell_at = None
            return self._tell()
        return None

    async def _tell(self) -> AsyncIterator[None]:
        await self._carrier.tell()
        yield

    async def _advance(self, work: AsyncIterator[None]) -> bool:
        """One step of what is due; whether there may be another."""
        try:
            await anext(work)
            return True
        except StopAsyncIteration:
            self._retry_s = RETRY_S[0]
        except Away:
            self._retry_later()
        except Exception:
            log.exception("pods were not carried over")
            self._retry_later()
        return False

    def _retry_later(self) -> None:
        if self._resync_at is None:
            self._resync_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_S[1])

    async def _sleep(self) -> None:
        self._woken.clear()
        due = [at for at in (self._resync_at, self._rescan_at, self._tell_at) if at is not None]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), wait_s)

    async def _rescan(self) -> AsyncIterator[None]:
        """Look at the pods' control groups for what nobody told, and whether resctrlmond still knows all the rest."""
        now = time.monotonic()
        # Also where this one does not come to its end.
        self._rescan_at = now + RESCAN_S
        if self._list_until is not None and self._list_until <= now:
            self._pods.await_no_list()
            self._list_until = None
        async for step in self._search.run(now):
            yield step
        self._resync_at = self._resync_at or time.monotonic()
        self._rescan_at = time.monotonic() + (2 * STRANGER_S if self._search.has_new else RESCAN_S)
