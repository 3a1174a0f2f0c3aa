# SPDX-License-Identifier: Apache-2.0
"""Find unreported changes in the control groups of the pods: containers that started, and pods that ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable

from resctrlmond import journal
from resctrlmond.nri import place
from resctrlmond.nri.manager import Away
from resctrlmond.nri.messages import Container
from resctrlmond.nri.pods import Sandbox
from resctrlmond.nri.updater import Updater
from resctrlmond.workloads.errors import InvalidKey
from resctrlmond.workloads.pods import ContainerState

log = logging.getLogger(__name__)

# The event of a found container may still be on its way: only containers that a later search finds again are added.
STRANGER_S = 1.0
# A pod without a control group of its own whose removal is not reported ends this long after the process of its
# sandbox and its last container. If the pod still exists, the kubelet creates a new sandbox within seconds.
UNTOLD_S = 60.0


class Search:
    """Searches all sandboxes, one in each step. ``has_new``: the last search found containers to confirm."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._pods = updater.pods
        # The IDs of unreported containers, and the time at which each was first found.
        self._strangers: dict[str, float] = {}
        # The IDs of sandboxes without processes, and the time since when.
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
                # An error in one pod must not prevent the search of the others.
                log.exception("pod sandbox %s could not be searched", name)
                there = {}
            found |= {stranger: (name, path) for stranger, path in there.items()}
            yield
        self._emptied = {name: since for name, since in self._emptied.items() if name in self._pods.sandboxes}
        self._take_in(found, now)
        self.has_new = any(since == now for since in self._strangers.values())

    async def _look(
        self, name: str, sandbox: Sandbox, containers: Iterable[Container], known: set[str], now: float
    ) -> dict[str, str]:
        """Search one sandbox. Return unreported containers in the control group of its pod, ID -> control group."""
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
        """Whether a sandbox without a pod's control group has had no process for long enough."""
        if await asyncio.to_thread(_is_left, sandbox, containers):
            self._emptied.pop(name, None)
            return False
        return now - self._emptied.setdefault(name, now) >= UNTOLD_S

    async def _end_untold(self, name: str, why: str) -> None:
        """Remove a sandbox whose pod is gone: containerd 1.7 and 2.1 do not report it after their own restart."""
        self._emptied.pop(name, None)
        sandbox = self._pods.sandboxes.get(name)
        if sandbox is not None:
            gone = self._pods.remove_sandbox(name)
            if not sandbox.unselected:
                log.log(journal.NOTICE, "%s: %s, and with it sandbox %s", sandbox.key, why, name)
                await self._updater.end_sandbox(sandbox.key, name, gone)

    def _take_in(self, found: dict[str, tuple[str, str]], now: float) -> None:
        """Add unreported containers that were found twice."""
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
                log.log(
                    journal.NOTICE, "container %s started without a report of the runtime: added as late", stranger
                )


def _is_left(sandbox: Sandbox, containers: Iterable[Container]) -> bool:
    """Whether the process of the sandbox or any process of its containers still exists.

    If the runtime did not report the process of the sandbox, it is taken to exist, unless the pod had a control group
    of its own: this is called only if there is none now.
    """
    pid = sandbox.pod.pid
    started = place.started(pid)
    sandbox.started = sandbox.started or started
    if started and started == sandbox.started:
        return True
    if not pid and not place.pod_path(sandbox.pod.cgroup_parent, sandbox.key):
        return True
    return any(each.is_running and place.is_left(each.pid, each.id, each.cgroups_path) for each in containers)
