# SPDX-License-Identifier: Apache-2.0
"""The service of the interfaces: it runs their verbs in threads."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from resctrlmond.api import translate, types
from resctrlmond.api.access import Access, Caller, Policy, is_privileged
from resctrlmond.api.budget import ReplyBudget
from resctrlmond.api.hook_queue import HookQueue
from resctrlmond.api.watches import Watches
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.states import CallKind
from resctrlmond.workloads.model.workload import Workload

if TYPE_CHECKING:
    from resctrlmond.api.verbs import Verb  # its table names functions that take a Service

P = ParamSpec("P")
T = TypeVar("T")

# The most concurrent calls of all readers, and of one reader's user. The lanes of these calls have four threads.
_READERS, _OF_ONE_READER = 3, 2


class Service:
    """Runs verbs for the interfaces: waits for a thread, and calls the function of the verb.

    Each interface checks the access of the caller, in one place (``varlink.connection.Connection._resolve`` and
    ``dbus.objects.Objects.resolve``), before it calls a method of this class.
    """

    def __init__(self, manager: Manager, policy: Policy, workers: Workers) -> None:
        self.manager = manager
        self.policy = policy
        self.workers = workers
        self.budget = ReplyBudget()
        self.hooks = HookQueue(
            lambda: manager.context.config.settings.hook_queue_timeout_s,
            on_end=partial(manager.latencies.add, CallKind.HOOK),
        )
        # Set by the daemon if it watches units: put the process of a caller into the workload of its unit.
        self.assign_unit: Callable[[Caller, int], Awaitable[Workload]] | None = None
        self.watches = Watches(manager.context, workers, partial(reported, manager))
        self._readers = asyncio.Semaphore(_READERS)
        # A semaphore exists as long as a call of its user runs.
        self._by_uid: weakref.WeakValueDictionary[int, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def call(self, verb: Verb, request: types.Request, caller: Caller) -> types.Reply:
        """Run a verb for a caller that may call it. Raises ResctrlError."""
        begun = time.monotonic()
        try:
            if verb.handle is not None:
                return await verb.handle(self, request, caller)
            return await self.run(caller, verb.lane, verb.run, self.manager, request, caller)
        finally:
            if verb.lane is not Lane.HOOKS:  # the queue counts these
                kind = CallKind.READ if verb.access is Access.READ else CallKind.CHANGE
                self.manager.latencies.add(kind, time.monotonic() - begun)

    def follow(self, verb: Verb, _request: types.Request, caller: Caller) -> AsyncGenerator[types.Reply, None]:
        """Run a verb that follows, for a caller that may call it: yield replies until it is closed."""
        assert verb.follow is not None
        return verb.follow(self, caller)

    async def stream(self, verb: Verb, request: types.Request, caller: Caller) -> AsyncGenerator[types.Reply, None]:
        """Run a verb that has pages for a caller that may call it, and yield the pages. Raises ResctrlError."""
        assert verb.pages is not None
        found = verb.pages(self.manager, request)
        while True:
            page = await self.run(caller, verb.lane, next, found, None)
            if page is None:
                return
            yield page

    async def run(self, caller: Caller, lane: Lane, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in a thread of the lane. Raises its errors.

        Calls of readers wait: one thread stays free for root and one for other users.
        """
        if is_privileged(caller.uid):
            return await self.workers.run(lane, function, *args, **kwargs)
        async with self._by_uid.setdefault(caller.uid, asyncio.Semaphore(_OF_ONE_READER)), self._readers:
            return await self.workers.run(lane, function, *args, **kwargs)


def reported(manager: Manager, workload: Workload) -> types.Workload:
    """Convert a workload to the type of the interfaces, with its current path and snapshot."""
    ctx = manager.context
    path = ctx.tree.full_path(workload.first.ref) if workload.state.has_group else None
    snapshot, companion = ctx.snapshots.path_if_exists(workload.key), manager.companions.get(workload.key)
    return translate.workload_of(workload, path, snapshot, companion, manager.unit_memory.get(workload.key, ""))
