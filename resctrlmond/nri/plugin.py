# SPDX-License-Identifier: Apache-2.0
"""Keep the state that the runtime reports, and update resctrlmond without a delay of container starts.

An event changes the state at once. One worker then updates resctrlmond, in the order of the events. The runtime gets
its response when the update is done, or when the time limit is reached. A failed update is repeated later, by a
comparison with resctrlmond's own list, as after the runtime's list at the beginning of a connection.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.nri import place, settings
from resctrlmond.nri.exposure import Exposure
from resctrlmond.nri.manager import Unavailable
from resctrlmond.nri.memory import Memory
from resctrlmond.nri.messages import (
    MAX_MEMBERS,
    MAX_SANDBOXES,
    Container,
    Creation,
    Event,
    EventReport,
    Mount,
    Pod,
    Synchronize,
)
from resctrlmond.nri.search import CONFIRM_S, Search
from resctrlmond.nri.updater import Updater
from resctrlmond.service import journal
from resctrlmond.service.message_ids import MessageId
from resctrlmond.workloads.model.errors import InvalidKey
from resctrlmond.workloads.model.pods import ContainerState

log = logging.getLogger(__name__)

# The delay after a failure: the first one, doubled for each further failure up to the last one.
RETRY_S = (0.2, 5.0)
# A search of the pods' control groups finds containers that are neither in the runtime's list nor in an event: those
# that started between the two (only newer runtimes block such starts), or were restored from a checkpoint.
FIRST_RESCAN_S = 1.0
RESCAN_S = 10.0
# A runtime sends its list at once, or never to a plugin that it launched. Until then, events are newer than the list.
LIST_S = 10.0
# The limit for events that wait for the worker. Further events of a runtime that does not wait for responses are only
# in the state, and a resync sends them.
MAX_STEPS = 1000
# The delay after an event before the inventory is sent: one call for the several events of a start.
INVENTORY_DELAY_S = 0.2
# The part of the time for the response to CreateContainer that the mount may take: the other settings need the rest.
_MOUNT_PART = 0.6

Step = Callable[[], Awaitable[None]]

_BEGINNINGS = (Event.RUN_POD_SANDBOX, Event.POST_CREATE_CONTAINER, Event.START_CONTAINER, Event.POST_START_CONTAINER)


class Plugin:
    """The state of the runtime's pods, and the worker that updates resctrlmond. ``run`` works until cancelled.

    Without ``memory``, nothing is set when a container is created, and without ``exposure``, nothing is mounted.
    """

    def __init__(self, updater: Updater, memory: Memory | None = None, exposure: Exposure | None = None) -> None:
        self._updater = updater
        self.memory = memory or Memory(())
        self._exposure = exposure
        if exposure is not None:
            updater.exposed = exposure.texts
        self._pods = updater.pods
        self._listed_pods: list[Pod] = []
        self._listed_containers: list[Container] = []
        self._steps: collections.deque[tuple[Step, asyncio.Future[None]]] = collections.deque()
        self._woken = asyncio.Event()
        self._search = Search(updater)
        # The time of the next resync on the loop's clock; None if none is needed.
        self._resync_at: float | None = None
        self._rescan_at: float | None = None
        self._inventory_at: float | None = None
        self._list_until: float | None = None
        self._retry_s = RETRY_S[0]
        # The future of the current step; it is cancelled when the runtime does not wait for the step any longer.
        self._current: asyncio.Future[None] | None = None
        # Whether the runtime has not closed the connection.
        self.is_connected: Callable[[], bool] = lambda: False
        # Connects to the runtime again if the profiles need other events than the connection has.
        self.resubscribe: Callable[[], None] = lambda: None

    # -- calls of the runtime

    def begin(self) -> None:
        """Start a connection."""
        self._forget_list()
        self._pods.begin()
        if self._exposure is not None:
            self._exposure.begin()
        now = time.monotonic()
        self._list_until = now + LIST_S
        self._rescan_at = min(self._rescan_at or now + RESCAN_S, self._list_until)
        self._woken.set()

    def configure(self, text: str) -> None:
        """Select pods by the configuration of the runtime instead of the adapter's own file."""
        try:
            selection = settings.parse(text.encode(), "the runtime's configuration of this plugin")
        except ConfigError as error:
            log.error("%s; pods are selected as before", error, extra=journal.fields(error))
            return
        self._pods.select(selection)
        self._resync_at = time.monotonic()
        self._woken.set()

    @property
    def is_adjusting(self) -> bool:
        """Whether the runtime is to ask before it creates a container."""
        is_exposing = self._exposure is not None and self._exposure.is_wanted(self.memory.profiles)
        return self.memory.is_wanted or is_exposing

    async def adjust(self, creation: Creation, within_s: float) -> tuple[dict[str, str], Mount | None]:
        """Return the files to set for a container that is being created, and the mount to add; None for no mount.

        Cancel it to end the wait. The mount takes at most a part of ``within_s``. A failure of one leaves the other.
        """
        mounting = asyncio.ensure_future(self._mount(creation, _MOUNT_PART * within_s))
        try:
            files = await self.memory.files(creation.pod, creation.container)
        except BaseException as error:
            if not isinstance(error, Exception):
                mounting.cancel()
                raise
            log.exception("a container is created without the memory settings of its profile")
            files = {}
        return files, await mounting

    async def _mount(self, creation: Creation, within_s: float) -> Mount | None:
        if self._exposure is None or not self._exposure.is_wanted(self.memory.profiles):
            return None
        pod, container = creation.pod, creation.container
        try:
            # In a thread: many rules take time.
            choice = await asyncio.to_thread(self.memory.choose, pod, container)
            unselected = self._pods.why_unselected(pod)
            return await self._exposure.mount(pod, container, choice, unselected=unselected, within_s=within_s)
        except Exception:
            # The container must start after any failure.
            log.exception("a container is created without the mount of its figures")
            return None

    def synchronize(self, chunk: Synchronize) -> None:
        """Add a part of the runtime's list. The last part replaces the state."""
        # Keep one more than the limit to detect an excess: an endless list must not fill the memory.
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

    def handle_event(self, report: EventReport) -> asyncio.Future[None]:
        """Handle an event. The future is done when resctrlmond is updated, or the update has failed.

        To respond earlier, cancel the future, and respond after its callbacks have run: from then on, the container
        runs, and resctrlmond must know that before.
        """
        future = asyncio.get_running_loop().create_future()
        step = self._apply(report)
        self._inventory_at = self._inventory_at or time.monotonic() + INVENTORY_DELAY_S
        self._woken.set()
        # A daemon that does not answer would delay each start.
        if step is not None and (self._updater.is_hung or len(self._steps) >= MAX_STEPS):
            self._retry_later()
            step = None
        if step is None:
            future.set_result(None)
            return future
        self._steps.append((step, future))
        return future

    def _apply(self, report: EventReport) -> Step | None:
        pod, container = report.pod, report.container
        log.debug("%s of %s %s", report.event, pod.id if pod else "no pod", container.id if container else "")
        try:
            # A late end must not add a removed pod again.
            if pod is not None and report.event in _BEGINNINGS:
                self._pods.add_sandbox(pod)
                self._pods.record_ids(pod.id)
            match report.event:
                case Event.RUN_POD_SANDBOX if pod is not None:
                    return lambda: self._updater.claim_sandbox(pod.id)
                case Event.REMOVE_POD_SANDBOX if pod is not None:
                    return self._apply_removal(pod.id)
                case Event.STOP_CONTAINER | Event.REMOVE_CONTAINER if container is not None:
                    return self._apply_end(container, is_removed=report.event is Event.REMOVE_CONTAINER)
                case Event.POST_CREATE_CONTAINER | Event.START_CONTAINER | Event.POST_START_CONTAINER if container:
                    return self._apply_start(container, report.event)
        except InvalidKey as error:
            log.warning("unmonitored: %s", error, extra=journal.fields(error, message_id=MessageId.UNMONITORED))
        return None

    def _apply_start(self, container: Container, event: Event) -> Step | None:
        if self._exposure is not None:
            self._exposure.created(container.id)
        member = self._pods.add_member(container)
        self._pods.record_ids(container.id)
        if event is Event.POST_CREATE_CONTAINER:
            return None
        member.container = replace(member.container, state=ContainerState.RUNNING)
        # The pid belongs to the container as long as the runtime waits for the response.
        member.started = member.started or place.started(container.pid)
        if event is Event.START_CONTAINER:
            # A restart of containerd may repeat the event of a known container; Assign is idempotent.
            member.is_settled = False
        is_late = event is not Event.START_CONTAINER
        return lambda: self._updater.assign(container.id, is_late=is_late, is_held=self._is_held)

    def _apply_end(self, container: Container, *, is_removed: bool) -> Step | None:
        self._pods.record_ids(container.id)
        if is_removed and self._exposure is not None:
            self._exposure.removed(container.id)
        member = self._pods.members.get(container.id)
        if member is None:
            return None
        is_member = member.container.is_running and self._pods.is_selected(member)
        member.container = replace(member.container, state=ContainerState.STOPPED)
        if is_removed:
            del self._pods.members[container.id]
        return (lambda: self._updater.end(member.key, container.id)) if is_member else None

    def _apply_removal(self, sandbox: str) -> Step | None:
        self._pods.record_ids(sandbox)
        known = self._pods.sandboxes.get(sandbox)
        gone = self._pods.remove_sandbox(sandbox)
        self._pods.record_ids(*gone)
        if known is None or known.unselected:
            return None
        return lambda: self._updater.end_sandbox(known.key, sandbox, gone)

    # -- updates of resctrlmond

    async def run(self) -> None:
        """Run steps: events first, and other due work between them."""
        work: AsyncIterator[None] | None = None
        try:
            while True:
                if self._steps:
                    await self._run_step(*self._steps.popleft())
                    continue
                if work is None:
                    work = self._due()
                if work is None:
                    await self._sleep()
                elif not await self._advance(work):
                    work = None
        finally:
            self._updater.close()

    def _is_held(self) -> bool:
        """Whether the runtime still waits for the response to the event of the current step."""
        return self._current is not None and not self._current.cancelled() and self.is_connected()

    def _release_hold(self, future: asyncio.Future[None]) -> None:
        if future is self._current and future.cancelled():
            # With the connection open, only the time limit ends the wait.
            self._updater.release_hold(is_hung=self.is_connected())

    async def _run_step(self, step: Step, future: asyncio.Future[None]) -> None:
        self._current = future
        future.add_done_callback(self._release_hold)
        try:
            # The daemon may have hung since the event.
            if self._updater.is_hung:
                self._retry_later()
            else:
                await step()
        except Unavailable:
            self._retry_later()
        except Exception:
            # The container must start after any failure.
            log.exception("an event could not be processed: resctrlmond was not updated")
            self._retry_later()
        finally:
            self._current = None
            if not future.done():
                future.set_result(None)

    def _due(self) -> AsyncIterator[None] | None:
        now = time.monotonic()
        if self._resync_at is not None and self._resync_at <= now:
            self._resync_at = None
            return self._updater.resync()
        if self._rescan_at is not None and self._rescan_at <= now:
            self._rescan_at = None
            return self._rescan()
        if self._inventory_at is not None and self._inventory_at <= now:
            self._inventory_at = None
            return self._send_inventory()
        return None

    async def _send_inventory(self) -> AsyncIterator[None]:
        await self._updater.send_inventory()
        yield

    async def _advance(self, work: AsyncIterator[None]) -> bool:
        """Run one step of the due work. Return whether there may be another one."""
        try:
            await anext(work)
            return True
        except StopAsyncIteration:
            self._retry_s = RETRY_S[0]
        except Unavailable:
            self._retry_later()
        except Exception:
            log.exception("resctrlmond was not updated")
            self._retry_later()
        return False

    def _retry_later(self) -> None:
        # The daemon may be restarted with other profiles.
        self._pods.include_all()
        if self._resync_at is None:
            self._resync_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_S[1])

    async def _sleep(self) -> None:
        self._woken.clear()
        due = [moment for moment in (self._resync_at, self._rescan_at, self._inventory_at) if moment is not None]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._woken.wait()

    async def _rescan(self) -> AsyncIterator[None]:
        """Search the control groups of the pods for unreported changes, and then schedule a resync."""
        now = time.monotonic()
        # Also if this search does not complete.
        self._rescan_at = now + RESCAN_S
        if self._list_until is not None and self._list_until <= now:
            self._pods.await_no_list()
            self._list_until = None
        async for step in self._search.run(now):
            yield step
        self._resync_at = self._resync_at or time.monotonic()
        self._rescan_at = time.monotonic() + (2 * CONFIRM_S if self._search.has_unconfirmed else RESCAN_S)
