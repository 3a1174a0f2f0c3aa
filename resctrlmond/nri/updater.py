# SPDX-License-Identifier: Apache-2.0
"""Send pods and containers to resctrlmond: one at a time, or all that differ between the two lists."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

from resctrlmond.api import signatures, types
from resctrlmond.nri import place
from resctrlmond.nri.inventory import chunks, inventory
from resctrlmond.nri.manager import CLAIM, Manager, Refused, Unavailable
from resctrlmond.nri.pods import Member, Pods, Sandbox, attributes, container_names, facts
from resctrlmond.service import journal
from resctrlmond.workloads.model.pods import Sandbox as ReportedSandbox
from resctrlmond.workloads.model.validation import attribute_value

log = logging.getLogger(__name__)

# Errors of an end that has already happened, and of a start whose process or control group has already gone.
_ALREADY = frozenset({"NoSuchWorkload", "NoSuchGroup", "NoSuchClaim"})
_GONE = frozenset({"NoSuchProcess", "NoSuchCgroup", "ProcessChanged"})
_NOT_WATCHED = "NotWatched"
# Kata Containers and gVisor report the process of the sandbox for each container: the virtual machine, or the kernel
# of the containers.
_COUNTED_AS_SANDBOX = {"pod.counted": "as a whole: its containers run within the sandbox's process"}
# The maximum length of a pod's name in a log message. Kubernetes allows 253 characters, and 63 for the namespace.
_SHOWN_LENGTH = 320
# No key contains a slash.
_INVENTORY = "/inventory"


_Target = dict[str, int | str]


class _NotFound(Exception):
    """A container has no process and no control group that can be assigned."""


class Updater:
    """Updates of resctrlmond's workloads, each of which is idempotent.

    Every method raises Unavailable if resctrlmond cannot be called, and leaves an unfinished sandbox or container
    unsettled.
    """

    def __init__(self, manager: Manager, pods: Pods) -> None:
        self.pods = pods
        self._manager = manager
        self._refusals: dict[str, str] = {}
        # By the id of a container: whether it has the mount that its profile exposes.
        self.exposed: Mapping[str, str] = {}
        # Whether a call states that the runtime blocks the container until the reply.
        self._is_vouching = False
        # The sandboxes in the last inventory that was sent to resctrlmond, by ID.
        self._inventory: dict[str, ReportedSandbox] = {}

    @property
    def is_hung(self) -> bool:
        """Whether resctrlmond did not answer the last call."""
        return self._manager.is_hung

    def close(self) -> None:
        """Close the connection to resctrlmond."""
        self._manager.close()

    def release_hold(self, *, is_hung: bool) -> None:
        """Abandon the current call if it states that the runtime blocks the container, which is not true any longer.

        ``is_hung``: the call has reached a time limit.
        """
        if self._is_vouching:
            self._manager.abandon(is_hung=is_hung)

    async def claim_sandbox(self, sandbox_id: str) -> None:
        """Claim the sandbox's workload, and add the sandbox to it as a member."""
        sandbox = self.pods.sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.is_settled or sandbox.unselected:
            return
        try:
            create = types.CreateRequest(
                key=sandbox.key, claim=CLAIM, attributes=attributes(sandbox), facts=facts(sandbox)
            )
            await self._manager.ask(signatures.CREATE, create)
            add = types.AddMemberRequest(key=sandbox.key, member=sandbox_id, kind="sandbox", claim=CLAIM)
            await self._manager.ask(signatures.ADD_MEMBER, add)
        except Refused as error:
            sandbox.is_excluded = error.name == _NOT_WATCHED
            name = attribute_value(f"{sandbox.pod.namespace}/{sandbox.pod.name}")[:_SHOWN_LENGTH]
            self._refused(sandbox.key, f"pod {name} is unmonitored", error)
        sandbox.is_settled = True
        sandbox.cgroup = await asyncio.to_thread(
            place.pod_cgroup, sandbox.pod.pid, sandbox.key, sandbox.pod.cgroup_parent
        )

    async def assign(self, container_id: str, *, is_late: bool, is_held: Callable[[], bool] = lambda: True) -> None:
        """Put a running container into its pod's group. ``is_late``: it already runs its own program.

        ``is_held``: whether the runtime still blocks the container's start. If it does not at the end, the container
        is late.
        """
        member = self.pods.members.get(container_id)
        if member is None or member.is_settled or not member.container.is_running:
            return
        sandbox = self.pods.sandboxes.get(member.container.sandbox)
        if sandbox is None or sandbox.unselected:
            return
        target = _late_target if is_late else _early_target
        await self.claim_sandbox(member.container.sandbox)
        is_late = is_late or not is_held()
        try:
            await self._assign(member, sandbox, target, is_late=is_late)
            # The runtime may have closed the connection a moment ago.
            if not is_late and not is_held():
                await self._assign(member, sandbox, target, is_late=True)
            self._refusals.pop(container_id, None)
        except _NotFound:
            log.debug("container %s has no process that could be found", container_id)
            return
        except Refused as error:
            member.is_excluded = error.name == _NOT_WATCHED
            if error.name not in _GONE:
                self._refused(container_id, f"container {container_id} is unmonitored", error)
        member.is_settled = True

    async def _assign(
        self, member: Member, sandbox: Sandbox, target: Callable[[Member], _Target], *, is_late: bool
    ) -> None:
        # A container that is a workload of its own has the attributes of its pod, too.
        named = attributes(sandbox) | container_names(sandbox)
        if member.container.pid == sandbox.pod.pid != 0:
            named |= _COUNTED_AS_SANDBOX
        self._is_vouching = not is_late
        try:
            request = types.AssignRequest(
                key=sandbox.key,
                member=member.container.id,
                kind="container",
                claim=CLAIM,
                attributes=named,
                late=is_late,
                facts=facts(sandbox, member.container),
                exposed=self.exposed.get(member.container.id) or None,
            )
            reply = await self._manager.ask(signatures.ASSIGN, request, functools.partial(target, member))
        finally:
            self._is_vouching = False
        if not reply.workload.observed:
            member.key = reply.workload.key

    async def end(self, key: str, member: str) -> None:
        """End a member of the workload."""
        self._refusals.pop(member, None)
        try:
            request = types.RemoveMemberRequest(key=key, member=member, reason="reported by the runtime")
            await self._manager.ask(signatures.REMOVE_MEMBER, request)
        except Refused as error:
            if error.name not in _ALREADY:
                self._refused(member, f"the end of {member} was not recorded", error)

    async def end_sandbox(self, key: str, sandbox: str, containers: Iterable[str]) -> None:
        """End a sandbox that was removed, and its containers. After the pod's last sandbox, release the workload."""
        for member in (*containers, sandbox):
            await self.end(key, member)
        if self.pods.has_selected_sandbox(key):
            return
        self._refusals.pop(key, None)
        try:
            request = types.ReleaseRequest(key=key, claim=CLAIM, reason="its last sandbox was removed")
            await self._manager.ask(signatures.RELEASE, request)
        except Refused as error:
            if error.name not in _ALREADY:
                self._refused(key, f"the end of {key} was not recorded", error)

    async def resync(self) -> AsyncIterator[None]:
        """Compare the runtime's list with that of resctrlmond, and correct one difference in each step."""
        async for step in self._compare():
            yield step
        await self.send_inventory()

    async def send_inventory(self) -> None:
        """Send pods that have changed to resctrlmond, monitored or not. Send all of them to a daemon that was
        restarted.
        """
        self._forget_refusals()
        now = inventory(self.pods, self._refusals)
        changed = [sandbox for name, sandbox in now.items() if self._inventory.get(name) != sandbox]
        removed = [name for name in self._inventory if name not in now]
        try:
            if await self._report_pods(changed, removed=removed) != len(now):
                # The profiles may have changed with the restart, and the daemon lists unwatched containers again.
                self.pods.include_all()
                await self._report_pods(list(now.values()), replace_all=True)
            self._refusals.pop(_INVENTORY, None)
        except Refused as error:
            # A daemon without an inventory also refuses.
            self._refused(_INVENTORY, "resctrlctl list --pods is incomplete", error)
        self._inventory = now

    def _forget_refusals(self) -> None:
        """Delete the refusals of pods and containers that do not exist any more."""
        keys = {sandbox.key for sandbox in self.pods.sandboxes.values()}
        known = keys | self.pods.members.keys() | self.pods.sandboxes.keys() | {_INVENTORY}
        self._refusals = {name: why for name, why in self._refusals.items() if name in known}

    async def _report_pods(
        self, pods: list[ReportedSandbox], *, removed: Iterable[str] = (), replace_all: bool = False
    ) -> int:
        count = 0
        for number, chunk in enumerate(chunks(pods)):
            is_first = number == 0
            request = types.ReportPodsRequest(
                claim=CLAIM,
                sandboxes=chunk,
                removed=list(removed) if is_first else [],
                replace_all=replace_all and is_first,
            )
            reply = await self._manager.ask(signatures.REPORT_PODS, request)
            count = reply.count
        return count

    async def _compare(self) -> AsyncIterator[None]:
        pages = await self._manager.ask_list()
        workloads = [one for page in pages for one in page.workloads if not one.state.is_over]
        listed = {(one.key, member.id): member for one in workloads for member in one.members if member.lives}
        claimed = {one.key for one in workloads if any(claim.owner == CLAIM for claim in one.claims)}
        for name, sandbox in self.pods.sandboxes.items():
            sandbox.is_settled = sandbox.is_excluded or (sandbox.key in claimed and (sandbox.key, name) in listed)
        for name, member in self.pods.members.items():
            member.is_settled = member.is_excluded or (member.key, name) in listed
        yield
        for name in list(self.pods.sandboxes):
            await _isolated(name, self.claim_sandbox(name))
            yield
        for name in list(self.pods.members):
            await _isolated(name, self.assign(name, is_late=True))
            yield
        for (key, name), member_ in listed.items():
            if member_.owner == CLAIM and self.pods.has_list and not self._is_current(key, name):
                await _isolated(name, self.end(key, name))
                yield
        if not self.pods.has_list:
            # Pods that the runtime has not listed yet may still run.
            return
        keys = sorted({sandbox.key for sandbox in self.pods.sandboxes.values() if not sandbox.unselected})
        request = types.ReconcileRequest(claim=CLAIM, keys=keys)
        done = await self._manager.ask(signatures.RECONCILE, request)
        for key in done.released:
            log.log(
                journal.NOTICE,
                "%s: the pod does not exist in the runtime any more",
                key,
                extra=journal.fields(key=key),
            )

    def _is_current(self, key: str, name: str) -> bool:
        sandbox, member = self.pods.sandboxes.get(name), self.pods.members.get(name)
        if sandbox is not None:
            return sandbox.key == key and not sandbox.unselected
        if member is None or member.key != key:
            return False
        return member.container.is_running and self.pods.is_selected(member)

    def _refused(self, name: str, what: str, error: Refused) -> None:
        """Log a refusal, once for each reason: every rescan may repeat it."""
        if self._refusals.get(name) != str(error):
            level = logging.INFO if error.name == _NOT_WATCHED else logging.WARNING
            log.log(level, "%s: %s", what, error, extra=journal.fields(key=name))
        self._refusals[name] = str(error)


async def _isolated(name: str, step: Awaitable[None]) -> None:
    """Run one of many steps. Log an unexpected error, so that the other steps still run."""
    try:
        await step
    except Unavailable:
        raise
    except Exception:
        log.exception("%s: resctrlmond was not updated", name)


def _early_target(member: Member) -> _Target:
    """Return the target of a container whose start the runtime blocks: its only process. Raises _NotFound."""
    container = member.container
    pid = container.pid or place.first_process(place.declared_cgroup(container.cgroups_path, container.id))
    if pid and (own := place.own_cgroup(pid, container.id)):
        return {"pid": pid, "own_cgroup": own}
    # The runtime may have given up, and the pid may belong to another process.
    if not pid or _is_reused(member):
        raise _NotFound
    return {"pid": pid}


def _late_target(member: Member) -> _Target:
    """Return the target of a running container: its control group, with all processes that it has started.

    Raises _NotFound.
    """
    container = member.container
    own = place.own_cgroup(container.pid, container.id) if container.pid else member.cgroup
    own = own or place.declared_cgroup(container.cgroups_path, container.id)
    if own:
        return {"cgroup": own}
    # Only the pid is left without a control group, and it may belong to another process.
    if not container.pid or container.cgroups_path or _is_reused(member):
        raise _NotFound
    return {"pid": container.pid}


def _is_reused(member: Member) -> bool:
    return bool(member.started) and place.started(member.container.pid) != member.started
