# SPDX-License-Identifier: Apache-2.0
"""Find unreported changes in the control groups of the pods: containers that started, and pods that ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable

from resctrlmond.nri import place
from resctrlmond.nri.manager import Unavailable
from resctrlmond.nri.messages import Container
from resctrlmond.nri.pods import Sandbox
from resctrlmond.nri.updater import Updater
from resctrlmond.service import journal
from resctrlmond.workloads.evidence.pod_cgroups import containers_in
from resctrlmond.workloads.model.errors import InvalidKey
from resctrlmond.workloads.model.pods import ContainerState

log = logging.getLogger(__name__)

# The event of a found container may still be on its way: only containers that a later search finds again are added.
CONFIRM_S = 1.0
# A pod without a control group of its own whose removal is not reported ends this long after the process of its
# sandbox and its last container. If the pod still exists, the kubelet creates a new sandbox within seconds.
EMPTY_S = 60.0


class Search:
    """Searches all sandboxes, one in each step. ``has_unconfirmed``: the last search found containers to confirm."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._pods = updater.pods
        # The IDs of unreported containers, and the time at which each was first found.
        self._unreported: dict[str, float] = {}
        # The IDs of sandboxes without processes, and the time since when.
        self._empty_since: dict[str, float] = {}
        self.has_unconfirmed = False

    async def run(self, now: float) -> AsyncIterator[None]:
        """Search, at this time of the loop's clock. Raises Unavailable."""
        log.debug("rescan of %d sandboxes", len(self._pods.sandboxes))
        found: dict[str, tuple[str, str]] = {}
        known = {*self._pods.members, *self._pods.sandboxes}
        containers: dict[str, list[Container]] = {}
        for member in self._pods.members.values():
            containers.setdefault(member.container.sandbox, []).append(member.container)
        for name, sandbox in list(self._pods.sandboxes.items()):
            try:
                there = await self._search_sandbox(name, sandbox, containers.get(name, ()), known, now)
            except Unavailable:
                raise
            except Exception:
                # An error in one pod must not prevent the search of the others.
                log.exception("pod sandbox %s could not be searched", name)
                there = {}
            found |= {container: (name, path) for container, path in there.items()}
            yield
        self._empty_since = {name: since for name, since in self._empty_since.items() if name in self._pods.sandboxes}
        self._add_unreported(found, now)
        self.has_unconfirmed = any(since == now for since in self._unreported.values())

    async def _search_sandbox(
        self, name: str, sandbox: Sandbox, containers: Iterable[Container], known: set[str], now: float
    ) -> dict[str, str]:
        """Search one sandbox. Return unreported containers in the control group of its pod, ID -> control group."""
        if not sandbox.cgroup:
            parent = sandbox.pod.cgroup_parent
            sandbox.cgroup = await asyncio.to_thread(place.pod_cgroup, sandbox.pod.pid, sandbox.key, parent)
        elif not await asyncio.to_thread(os.path.isdir, sandbox.cgroup):
            await self._end_unreported(name, "the pod's control group is gone")
            return {}
        if not sandbox.cgroup and await self._is_over(name, sandbox, containers, now):
            await self._end_unreported(name, "its processes are gone")
            return {}
        if sandbox.cgroup and not sandbox.unselected:
            return await asyncio.to_thread(_unreported, sandbox, known)
        return {}

    async def _is_over(self, name: str, sandbox: Sandbox, containers: Iterable[Container], now: float) -> bool:
        """Whether a sandbox without a pod's control group has had no process for long enough."""
        if await asyncio.to_thread(_is_left, sandbox, containers):
            self._empty_since.pop(name, None)
            return False
        return now - self._empty_since.setdefault(name, now) >= EMPTY_S

    async def _end_unreported(self, name: str, why: str) -> None:
        """Remove a sandbox whose pod is gone: containerd 1.7 and 2.1 do not report it after their own restart."""
        self._empty_since.pop(name, None)
        sandbox = self._pods.sandboxes.get(name)
        if sandbox is not None:
            gone = self._pods.remove_sandbox(name)
            if not sandbox.unselected:
                log.log(journal.NOTICE, "%s: %s, and with it sandbox %s", sandbox.key, why, name)
                await self._updater.end_sandbox(sandbox.key, name, gone)

    def _add_unreported(self, found: dict[str, tuple[str, str]], now: float) -> None:
        """Add unreported containers that were found twice."""
        self._unreported = {container: self._unreported.get(container, now) for container in found}
        for container, (sandbox, path) in found.items():
            if self._unreported[container] > now - CONFIRM_S or container in self._pods.members:
                continue
            if sandbox in self._pods.sandboxes:
                try:
                    new = Container(container, sandbox, state=ContainerState.RUNNING)
                    member = self._pods.add_member(new)
                    member.cgroup, member.is_found = path, True
                except InvalidKey as error:
                    log.warning("unmonitored: %s", error, extra=journal.fields(error))
                    continue
                log.log(
                    journal.NOTICE, "container %s started without a report of the runtime: added as late", container
                )


def _unreported(sandbox: Sandbox, known: set[str]) -> dict[str, str]:
    """Return the unreported containers in the control group of the sandbox's pod, ID -> control group."""
    # No container starts in a sandbox whose process has ended: new processes are of the sandbox that replaces it.
    if sandbox.pod.pid and not place.started(sandbox.pod.pid):
        return {}
    return containers_in(sandbox.cgroup, known)


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
