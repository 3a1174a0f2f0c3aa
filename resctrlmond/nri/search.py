# SPDX-License-Identifier: Apache-2.0
"""What nobody told, found in the pods' control groups: containers that started unseen, pods that are gone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable

from resctrlmond import journal
from resctrlmond.groups.errors import InvalidKey
from resctrlmond.groups.inventory import ContainerState
from resctrlmond.nri import place
from resctrlmond.nri.carrier import Carrier
from resctrlmond.nri.door import Away
from resctrlmond.nri.messages import Container
from resctrlmond.nri.pods import Sandbox

log = logging.getLogger(__name__)

# An event may be on its way to tell of what a search finds: only what it finds again, that much later, is taken in.
STRANGER_S = 1.0
# A pod without a control group of its own, whose removal nobody tells, counts as gone so long after the process that
# held its namespaces and the last of its containers. A pod that it keeps, the kubelet gives a new sandbox in seconds.
UNTOLD_S = 60.0


class Search:
    """Looks through all sandboxes, one a step. ``has_new``: the last search found what is to be looked at again."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._pods = carrier.pods
        # Containers that nobody told of, and when they were found first.
        self._strangers: dict[str, float] = {}
        # Sandboxes that seem to be gone, and since when.
        self._emptied: dict[str, float] = {}
        self.has_new = False

    async def run(self, now: float) -> AsyncIterator[None]:
        """Search, at this time of the loop's clock. Raises Away."""
        log.debug("rescan of %d sandboxes", len(self._pods.sandboxes))
        found: dict[str, tuple[str, str]] = {}
        known = {*self._pods.members, *self._pods.sandboxes}
        containers: dict[str, list[Container]] = {}
        for member in self._pods.members.values():
            containers.setdefault(member.container.sandbox, []).append(member.container)
        for name, sandbox in list(self._pods.sandboxes.items()):
            try:
                there = await self._look(name, sandbox, containers.get(name, ()), known, now)
            except Away:
                raise
            except Exception:
                # What is wrong with one pod keeps the others from nothing.
                log.exception("pod sandbox %s could not be looked for", name)
                there = {}
            found |= {stranger: (name, path) for stranger, path in there.items()}
            yield
        self._emptied = {name: at for name, at in self._emptied.items() if name in self._pods.sandboxes}
        self._take_in(found, now)
        self.has_new = any(since == now for since in self._strangers.values())

    async def _look(
        self, name: str, sandbox: Sandbox, containers: Iterable[Container], known: set[str], now: float
    ) -> dict[str, str]:
        """Look at one sandbox; containers in its pod's control group that nobody told of, id -> control group."""
        if not sandbox.cgroup:
            parent = sandbox.pod.cgroup_parent
            sandbox.cgroup = await asyncio.to_thread(place.pod_cgroup, sandbox.pod.pid, sandbox.key, parent)
        elif not await asyncio.to_thread(os.path.isdir, sandbox.cgroup):
            await self._end_untold(name, "the pod's control group is gone")
            return {}
        if not sandbox.cgroup and await self._is_over(name, sandbox, containers, now):
            await self._end_untold(name, "its processes are gone")
            return {}
        if sandbox.cgroup and not sandbox.unselected:
            return await asyncio.to_thread(place.containers_in, sandbox.cgroup, known)
        return {}

    async def _is_over(self, name: str, sandbox: Sandbox, containers: Iterable[Container], now: float) -> bool:
        """Whether nothing of a sandbox without a pod's control group is left, and has not been for long enough."""
        if await asyncio.to_thread(_is_left, sandbox, containers):
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
                try:
                    found_one = Container(stranger, sandbox, state=ContainerState.RUNNING)
                    member = self._pods.add_member(found_one)
                    member.cgroup, member.is_found = path, True
                except InvalidKey as error:
                    log.warning("unmonitored: %s", error, extra=journal.fields(error))
                    continue
                log.log(journal.NOTICE, "container %s was started and nobody told: taken in late", stranger)


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
