# SPDX-License-Identifier: Apache-2.0
"""Carries pods and containers over to resctrlmond, one at a time or all of them by comparing lists."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

from resctrlmond import journal
from resctrlmond.api import types
from resctrlmond.groups.inventory import Sandbox as NotedSandbox
from resctrlmond.groups.keys import attribute_value
from resctrlmond.nri import place
from resctrlmond.nri.door import CLAIM, Away, Door, Refused
from resctrlmond.nri.inventory import chunks, inventory
from resctrlmond.nri.pods import Member, Pods, attributes, container_names

log = logging.getLogger(__name__)

# What is over cannot be ended again, and what is gone needs no group.
_ALREADY = frozenset({"NoSuchGroup", "NoSuchClaim"})
_GONE = frozenset({"NoSuchProcess", "NoSuchCgroup", "ProcessChanged"})
# What a runtime like Kata or gVisor tells for a container is the process of its sandbox: the virtual machine, or the
# kernel that the containers are given.
_COUNTED_AS_SANDBOX = {"pod.counted": "as a whole: its containers run within the sandbox's process"}
NOTE = "NotePods"
# Of a pod's name, as much is logged: Kubernetes allows 253 characters, and 63 for the namespace.
_SHOWN_LENGTH = 320
# No key has a slash.
_INVENTORY = "/inventory"


class Carrier:
    """The steps, each idempotent. All raise Away, and leave unsettled what they did not finish."""

    def __init__(self, door: Door, pods: Pods) -> None:
        self.pods = pods
        self._door = door
        self._refusals: dict[str, str] = {}
        # What resctrlmond was told of the pods, by the sandboxes' ids.
        self._noted: dict[str, NotedSandbox] = {}

    @property
    def is_hung(self) -> bool:
        """Whether resctrlmond did not answer the last time."""
        return self._door.is_hung

    async def note(self, sandbox_id: str) -> None:
        """Claim the sandbox's workload, and note the sandbox as its member."""
        sandbox = self.pods.sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.is_settled or sandbox.unselected:
            return
        try:
            await self._door.ask(
                "Create", types.GroupReply, key=sandbox.key, claim=CLAIM, attributes=attributes(sandbox)
            )
            await self._door.ask(
                "AddMember", types.GroupReply, key=sandbox.key, member=sandbox_id, kind="sandbox", claim=CLAIM
            )
        except Refused as error:
            name = attribute_value(f"{sandbox.pod.namespace}/{sandbox.pod.name}")[:_SHOWN_LENGTH]
            self._refused(sandbox.key, f"pod {name} is unmonitored", error)
        sandbox.is_settled = True
        sandbox.cgroup = await asyncio.to_thread(
            place.pod_cgroup, sandbox.pod.pid, sandbox.key, sandbox.pod.cgroup_parent
        )

    async def assign(self, container_id: str, *, is_late: bool, is_held: Callable[[], bool] = lambda: True) -> None:
        """Put a running container into its pod's group; ``is_late``: it runs its own program already.

        ``is_held``: whether the runtime holds it back still. If it does not when all is done, the container is late.
        """
        member = self.pods.members.get(container_id)
        if member is None or member.is_settled or not member.container.is_running:
            return
        sandbox = self.pods.sandboxes.get(member.container.sandbox)
        if sandbox is None or sandbox.unselected:
            return
        await self.note(member.container.sandbox)
        target = await asyncio.to_thread(_late_target if is_late else _early_target, member)
        if container_id not in self.pods.members:
            # Removed while this waited. That step is still to come, and ends what was begun.
            return
        if not target:
            log.debug("container %s has no process that could be found", container_id)
            return
        target["attributes"] = container_names(sandbox)
        if member.container.pid == sandbox.pod.pid != 0:
            target["attributes"] |= _COUNTED_AS_SANDBOX
        try:
            vouched = target.get("late") is False
            if vouched and not is_held():
                target["late"] = True
            await self._assign(member.key, container_id, target)
            if vouched and not is_held():
                await self._assign(member.key, container_id, target | {"late": True})
            self._refusals.pop(container_id, None)
        except Refused as error:
            if error.name not in _GONE:
                self._refused(container_id, f"container {container_id} is unmonitored", error)
        member.is_settled = True

    async def _assign(self, key: str, container_id: str, target: Mapping[str, Any]) -> None:
        await self._door.ask(
            "Assign",
            types.AssignReply,
            key=key,
            member=container_id,
            kind="container",
            claim=CLAIM,
            **target,
        )

    async def end(self, key: str, member: str) -> None:
        """The member has ended."""
        self._refusals.pop(member, None)
        try:
            await self._door.ask(
                "RemoveMember", types.GroupReply, key=key, member=member, reason="the runtime says so"
            )
        except Refused as error:
            if error.name not in _ALREADY:
                self._refused(member, f"the end of {member} is not noted", error)

    async def end_sandbox(self, key: str, sandbox: str, containers: Iterable[str]) -> None:
        """The sandbox was removed, with all that was in it; with the pod's last sandbox the workload ends."""
        for member in (*containers, sandbox):
            await self.end(key, member)
        if self.pods.lives(key):
            return
        self._refusals.pop(key, None)
        try:
            await self._door.ask(
                "Release", types.ReleaseReply, key=key, claim=CLAIM, reason="its last sandbox was removed"
            )
        except Refused as error:
            if error.name not in _ALREADY:
                self._refused(key, f"the end of {key} is not noted", error)

    async def resync(self) -> AsyncIterator[None]:
        """Compare what the runtime has with what resctrlmond has, and make up for every difference, one a step."""
        async for step in self._compare():
            yield step
        await self.tell()

    async def tell(self) -> None:
        """Tell of what is new with any pod, monitored or not; of all of them to a daemon that knows none."""
        self._forget_refusals()
        now = inventory(self.pods, self._refusals)
        changed = [sandbox for name, sandbox in now.items() if self._noted.get(name) != sandbox]
        gone = [name for name in self._noted if name not in now]
        try:
            known = await self._note_pods(changed, gone=gone)
            if known != len(now):
                known = await self._note_pods(list(now.values()), fresh=True)
            self._refusals.pop(_INVENTORY, None)
        except Refused as error:
            # Also a daemon from before there was an inventory.
            self._refused(_INVENTORY, "resctrlctl list --pods is incomplete", error)
        self._noted = now

    def _forget_refusals(self) -> None:
        """Of what is known no longer, nobody asks why it was refused."""
        keys = {sandbox.key for sandbox in self.pods.sandboxes.values()}
        known = keys | self.pods.members.keys() | self.pods.sandboxes.keys() | {_INVENTORY}
        self._refusals = {name: why for name, why in self._refusals.items() if name in known}

    async def _note_pods(self, pods: list[NotedSandbox], *, gone: Iterable[str] = (), fresh: bool = False) -> int:
        known = 0
        for number, chunk in enumerate(chunks(pods)):
            is_first = number == 0
            reply = await self._door.ask(
                NOTE,
                types.NotePodsReply,
                claim=CLAIM,
                pods=chunk,
                gone=list(gone) if is_first else [],
                fresh=fresh and is_first,
            )
            known = reply.known
        return known

    async def _compare(self) -> AsyncIterator[None]:
        pages = await self._door.ask_pages("List", types.ListReply)
        groups = {group.key: group for page in pages for group in page.groups if not group.state.is_over}
        noted = {(key, one.id): one for key, group in groups.items() for one in group.members if one.lives}
        claimed = {key for key, group in groups.items() if any(claim.owner == CLAIM for claim in group.claims)}
        for name, sandbox in self.pods.sandboxes.items():
            sandbox.is_settled = sandbox.key in claimed and (sandbox.key, name) in noted
        for name, member in self.pods.members.items():
            member.is_settled = (member.key, name) in noted
        yield
        for name in list(self.pods.sandboxes):
            await _apart(name, self.note(name))
            yield
        for name in list(self.pods.members):
            await _apart(name, self.assign(name, is_late=True))
            yield
        for (key, name), one in noted.items():
            if one.owner == CLAIM and self.pods.is_whole and not self._is_here(key, name):
                await _apart(name, self.end(key, name))
                yield
        if not self.pods.is_whole:
            # Pods that nobody told of yet may live on.
            return
        keys = sorted({sandbox.key for sandbox in self.pods.sandboxes.values() if not sandbox.unselected})
        done = await self._door.ask("Reconcile", types.ReconcileReply, claim=CLAIM, keys=keys)
        for key in done.released:
            log.log(journal.NOTICE, "%s: the runtime has no such pod any more", key, extra=journal.fields(key=key))

    def _is_here(self, key: str, name: str) -> bool:
        sandbox, member = self.pods.sandboxes.get(name), self.pods.members.get(name)
        if sandbox is not None:
            return sandbox.key == key and not sandbox.unselected
        if member is None or member.key != key:
            return False
        return member.container.is_running and self.pods.is_selected(member)

    def _refused(self, name: str, what: str, error: Refused) -> None:
        """Say it once for each: every rescan may meet it again."""
        if self._refusals.get(name) != str(error):
            log.warning("%s: %s", what, error, extra=journal.fields(key=name))
        self._refusals[name] = str(error)


async def _apart(name: str, step: Awaitable[None]) -> None:
    """One step of many: what is wrong with it keeps the others from nothing."""
    try:
        await step
    except Away:
        raise
    except Exception:
        log.exception("%s was not carried over", name)


def _early_target(member: Member) -> dict[str, Any]:
    """What to assign of a container that the runtime holds back until we answer: its one process."""
    container = member.container
    pid = container.pid or place.first_process(place.declared_cgroup(container.cgroups_path, container.id))
    if not pid:
        return {}
    own = place.own_cgroup(pid, container.id)
    if own:
        return {"pid": pid, "ownCgroup": own, "late": False}
    # The runtime may have waited in vain, and the number may be another process's by now.
    return {} if _is_reused(member) else {"pid": pid, "late": False}


def _late_target(member: Member) -> dict[str, Any]:
    """What to assign of a container that runs: its control group, with all that it has started by now."""
    container = member.container
    own = place.own_cgroup(container.pid, container.id) if container.pid else member.cgroup
    own = own or place.declared_cgroup(container.cgroups_path, container.id)
    if own:
        return {"cgroup": own}
    # Without one there is only the number to go by, which may be another process's by now.
    if not container.pid or container.cgroups_path or _is_reused(member):
        return {}
    return {"pid": container.pid, "late": True}


def _is_reused(member: Member) -> bool:
    return bool(member.started) and place.started(member.container.pid) != member.started
