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
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace

from resctrlmond import journal
from resctrlmond.config import ConfigError
from resctrlmond.groups.errors import InvalidKey
from resctrlmond.groups.inventory import ContainerState
from resctrlmond.message_ids import MessageId
from resctrlmond.nri import place, settings
from resctrlmond.nri.carrier import Carrier
from resctrlmond.nri.door import Away
from resctrlmond.nri.messages import Container, Event, Happened, Synchronize
from resctrlmond.nri.pods import Sandbox

log = logging.getLogger(__name__)

# After a failure, and each time twice as long, up to the last.
RETRY_S = (0.2, 5.0)
# What is in neither the runtime's list nor an event is found in the pods' control groups: what started between the
# two (runtimes hold such starts back only in their newer versions), or was restored from a checkpoint.
FIRST_RESCAN_S = 1.0
RESCAN_S = 10.0
# An event may be on its way to tell of what a rescan finds: only what it finds again, that much later, is taken in.
STRANGER_S = 1.0

# A runtime gives its list at once or, to a plugin that it launched, never: so long an event is newer than the list.
LIST_S = 10.0
# A pod without a control group of its own, whose removal nobody tells, counts as gone so long after the process that
# held its namespaces and the last of its containers. A pod that it keeps, the kubelet gives a new sandbox in seconds.
UNTOLD_S = 60.0
# After an event, resctrlmond is told how the pods stand now: one word for the several events of a start.
TELL_S = 0.2

Step = Callable[[], Awaitable[None]]

_BEGINNINGS = (Event.RUN_POD_SANDBOX, Event.POST_CREATE_CONTAINER, Event.START_CONTAINER, Event.POST_START_CONTAINER)


class Plugin:
    """The state, and the worker that carries it over. ``run`` works until it is cancelled."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._pods = carrier.pods
        self._chunks: list[Synchronize] = []
        self._steps: collections.deque[tuple[Step, asyncio.Future[None]]] = collections.deque()
        self._woken = asyncio.Event()
        self._strangers: dict[str, float] = {}
        # Sandboxes that seem to be gone, and since when.
        self._emptied: dict[str, float] = {}
        # When to carry everything over again, by the loop's clock; None while there is no need.
        self._resync_at: float | None = None
        self._rescan_at: float | None = None
        self._tell_at: float | None = None
        self._list_until: float | None = None
        self._retry_s = RETRY_S[0]

    # -- told by the runtime

    def begin(self) -> None:
        """A connection begins."""
        self._chunks.clear()
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
        self._chunks.append(chunk)
        self._list_until = time.monotonic() + LIST_S
        if chunk.more:
            return
        pods = [pod for part in self._chunks for pod in part.pods]
        containers = [container for part in self._chunks for container in part.containers]
        self._chunks.clear()
        self._list_until = None
        for wrong in self._pods.replace_all(pods, containers):
            log.warning("unmonitored: %s", wrong, extra=journal.fields(message_id=MessageId.UNMONITORED))
        for member in self._pods.members.values():
            member.started = member.started or place.started(member.container.pid)
        log.info("the runtime has %d pods and %d containers", len(pods), len(containers))
        now = time.monotonic()
        self._resync_at, self._rescan_at = now, now + FIRST_RESCAN_S
        self._woken.set()

    def happened(self, told: Happened) -> asyncio.Future[None]:
        """An event; the future is done when it is carried over, or has failed to be."""
        future = asyncio.get_running_loop().create_future()
        step = self._take(told)
        self._tell_at = self._tell_at or time.monotonic() + TELL_S
        self._woken.set()
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
                self._pods.tell(pod.id)
                self._pods.add_sandbox(pod)
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
        self._pods.tell(container.id)
        member = self._pods.add_member(container)
        if event is Event.POST_CREATE_CONTAINER:
            return None
        member.container = replace(member.container, state=ContainerState.RUNNING)
        # While the runtime waits for us, the number is the container's.
        member.started = member.started or place.started(container.pid)
        if event is Event.START_CONTAINER:
            # A restart of containerd may bring the same event for what is known; asked again, resctrlmond says so.
            member.is_settled = False
        is_late = event is not Event.START_CONTAINER
        return lambda: self._carrier.assign(container.id, is_late=is_late)

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

    async def _carry(self, step: Step, future: asyncio.Future[None]) -> None:
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
        log.debug("rescan of %d sandboxes", len(self._pods.sandboxes))
        now = time.monotonic()
        if self._list_until is not None and self._list_until <= now:
            self._pods.await_no_list()
            self._list_until = None
        found: dict[str, tuple[str, str]] = {}
        for name, sandbox in list(self._pods.sandboxes.items()):
            if not sandbox.cgroup:
                parent = sandbox.pod.cgroup_parent
                sandbox.cgroup = await asyncio.to_thread(place.pod_cgroup, sandbox.pod.pid, sandbox.key, parent)
            elif not await asyncio.to_thread(os.path.isdir, sandbox.cgroup):
                await self._end_untold(name, "the pod's control group is gone")
                yield
                continue
            if not sandbox.cgroup and await self._is_over(name, sandbox, now):
                await self._end_untold(name, "its processes are gone")
                yield
                continue
            if sandbox.cgroup and not sandbox.unselected:
                known = {*self._pods.members, *self._pods.sandboxes}
                there = await asyncio.to_thread(place.containers_in, sandbox.cgroup, known)
                found |= {stranger: (name, path) for stranger, path in there.items()}
            yield
        self._emptied = {name: at for name, at in self._emptied.items() if name in self._pods.sandboxes}
        self._take_in(found, now)
        self._resync_at = self._resync_at or time.monotonic()
        is_new = any(since == now for since in self._strangers.values())
        self._rescan_at = time.monotonic() + (2 * STRANGER_S if is_new else RESCAN_S)

    async def _is_over(self, name: str, sandbox: Sandbox, now: float) -> bool:
        """Whether nothing of a sandbox without a pod's control group is left, and has not been for long enough."""
        members = [one.container for one in self._pods.members.values() if one.container.sandbox == name]
        if await asyncio.to_thread(_is_left, sandbox, members):
            self._emptied.pop(name, None)
            return False
        return now - self._emptied.setdefault(name, now) >= UNTOLD_S

    async def _end_untold(self, name: str, why: str) -> None:
        """A sandbox whose pod is gone: containerd (1.7, 2.1) tells no end of those from before its own restart."""
        self._emptied.pop(name, None)
        sandbox = self._pods.sandboxes.get(name)
        if sandbox is not None:
            gone = self._pods.remove_sandbox(name)
            if not sandbox.unselected:
                log.log(journal.NOTICE, "%s: %s, and with it sandbox %s", sandbox.key, why, name)
                await self._carrier.end_sandbox(sandbox.key, name, gone)

    def _take_in(self, found: dict[str, tuple[str, str]], now: float) -> None:
        """Containers that are in no list and of no event, once they were found twice."""
        self._strangers = {stranger: self._strangers.get(stranger, now) for stranger in found}
        for stranger, (sandbox, path) in found.items():
            if self._strangers[stranger] > now - STRANGER_S or stranger in self._pods.members:
                continue
            if sandbox in self._pods.sandboxes:
                log.log(journal.NOTICE, "container %s was started and nobody told: taken in late", stranger)
                found_one = Container(stranger, sandbox, state=ContainerState.RUNNING)
                self._pods.add_member(found_one).cgroup = path


def _is_left(sandbox: Sandbox, containers: Iterable[Container]) -> bool:
    """Whether the process that held a sandbox's namespaces is left, or anything of its containers.

    Of a sandbox whose process nobody told, it cannot be known, and it is taken to be left, unless its pod has had a
    control group of its own: this is asked only where there is none.
    """
    pid = sandbox.pod.pid
    started = place.started(pid)
    sandbox.started = sandbox.started or started
    if started and started == sandbox.started:
        return True
    if not pid and not place.pod_path(sandbox.pod.cgroup_parent, sandbox.key):
        return True
    return any(one.is_running and place.is_left(one.pid, one.id, one.cgroups_path) for one in containers)
