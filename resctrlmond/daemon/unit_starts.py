# SPDX-License-Identifier: Apache-2.0
"""Handle org.resctrlmon.Unit.AssignSelf: put the process of a service's command into the group before it executes it.

Any user may call, at any time and many times. The caller names no process and no service: the kernel states its
process and its control group, and systemd whether it has started just this process for a command of just this
service. Any other caller is refused, and after some refusals callers from that control group are refused without
asking systemd.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
import weakref
from collections.abc import Awaitable, Callable

from resctrlmond.api.access import Caller
from resctrlmond.api.dbus.library import BusUnavailable, DBusError
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.daemon.systemd import Systemd
from resctrlmond.daemon.unit_commands import Command, Service, kept
from resctrlmond.host.unit_exec import LONGEST_WAIT_S
from resctrlmond.host.unit_globs import is_valid_name
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import NoSuchProcess, PermissionDenied, ResctrlError, printable
from resctrlmond.resctrl.processes import Descriptor
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.errors import LimitExceeded, NotWatched
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.profiles.requests import Assignment, UnitCommand
from resctrlmond.workloads.verbs.assign import assign

# The control group of commands such as ExecReload= in a service with Delegate= (systemd.resource-control(5)).
_CONTROL = "/.control"
# A caller does not wait longer for systemd: its command must begin.
_SYSTEMD_TIMEOUT_S = LONGEST_WAIT_S / 3
# A caller has executed only systemd's own code before it is in the group, which takes some 10 ms, and seconds on an
# emulated processor. If it has used more, or calls so long after its start, it has executed something else: a service
# can execute its command without a call, and then the program.
_OLDEST_S = 30.0
_MOST_CPU_NS = 5 * 10**9
_MAX_REFUSALS, _REFUSALS_S = 16, 10.0


class UnitStarts:
    """Assigns the processes of commands. Belongs to the event loop.

    ``connection`` returns that of the watch to systemd, if there is one. ``assignment`` returns the request by which
    the watch would assign a unit with that control group; None if it would not.
    """

    def __init__(
        self,
        ctx: Context,
        workers: Workers,
        connection: Callable[[], Awaitable[Systemd | None]],
        assignment: Callable[[str, str], Awaitable[Assignment | None]],
    ) -> None:
        self._ctx = ctx
        self._workers = workers
        self._connection = connection
        self._assignment = assignment
        # The calls of one service run one after another. A lock exists as long as one of them runs.
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        # By service: the time of the first refusal in a row, and their number; the oldest first.
        self._refusals: dict[str, tuple[float, int]] = {}

    async def assign(self, caller: Caller, children_ns: int = 0) -> Workload:
        """Put the caller's process into the workload of its service, and return that. Raises ResctrlError.

        ``children_ns`` is the CPU time of the children that it has waited for, as it says.
        """
        path, inner = await self._workers.run(Lane.COMMANDS, _cgroup_of, caller)
        name = os.path.basename(inner).removeprefix("_")
        is_service = name.endswith(".service") and is_valid_name(name) and not _is_below_a_unit(inner)
        assignment = await self._assignment(name, path) if is_service else None
        if assignment is None:
            raise NotWatched(
                f"the control group of process {caller.pid} is not that of a service that is watched: "
                f"{printable(path) or '/'}",
                remedy="Select the service: resctrlctl units enable NAME.service",
            )
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            workload = self._ctx.store.get(name)
            last = workload.member(name) if workload is not None else None
            member = last if workload is not None and not workload.state.is_over else None
            # A process can call again in the next run.
            is_known = last is not None and _is_known(last.commands, caller.pid)
            if workload is not None and is_known and await self._is_inside(workload, caller.pid):
                return workload
            self._check_refusals(name)
            try:
                service, command = await self._stated(name, inner, caller)
            except ResctrlError:
                self._count_refusal(name)
                raise
            commands = kept(service, member.commands if member is not None else (), command)
            # With 0, what it has used is missing. One that has called before may have used it in the group.
            is_new = not is_known and time.monotonic() - command.started_s <= _OLDEST_S
            most_ns = _MOST_CPU_NS if is_new else 0
            unit_command = UnitCommand(commands=commands, most_before_ns=most_ns, children_ns=children_ns)
            request = dataclasses.replace(
                assignment,
                cgroup=None,
                own_cgroup=assignment.cgroup or "",
                late=False,
                is_awaited=caller.waits,
                unit_command=unit_command,
            )
            return await self._workers.run(Lane.COMMANDS, _assign_held, self._ctx, request, caller)

    async def _is_inside(self, workload: Workload, pid: int) -> bool:
        """Return whether a known process is in a group: an earlier process may have had its number.

        Raises NoSuchProcess.
        """
        where = await self._workers.run(Lane.COMMANDS, self._ctx.tree.membership, pid)
        return where in workload.memberships

    async def _stated(self, name: str, inner: str, caller: Caller) -> tuple[Service, Command]:
        """Return what systemd states about the caller. Raises PermissionDenied, NotWatched."""
        systemd = await self._connection()
        if systemd is None:
            raise NotWatched("systemd is not connected to resctrlmond now", remedy="See: resctrlctl doctor")
        try:
            async with asyncio.timeout(_SYSTEMD_TIMEOUT_S):
                service = await systemd.service(name)
        except (BusUnavailable, DBusError, TimeoutError) as error:
            why = str(error) or f"no reply within {_SYSTEMD_TIMEOUT_S:g} s"
            raise NotWatched(f"systemd does not describe {name}: {why}") from error
        command = service.command_of(caller.pid) if service.cgroup == inner else None
        if command is None:
            raise PermissionDenied(
                f"process {caller.pid} is not one that systemd has started through resctrlmon-unit-exec for {name}"
            )
        return service, command

    def _check_refusals(self, name: str) -> None:
        since, count = self._refusals.get(name, (0.0, 0))
        if count >= _MAX_REFUSALS and time.monotonic() - since < _REFUSALS_S:
            raise LimitExceeded(f"processes of {name} have called AssignSelf too often without a right to it")

    def _count_refusal(self, name: str) -> None:
        now = time.monotonic()
        # There may be any number of names: each connection to a socket with Accept= has a service of its own.
        for old in itertools.takewhile(lambda old: now - self._refusals[old][0] >= _REFUSALS_S, [*self._refusals]):
            del self._refusals[old]
        since, count = self._refusals.get(name, (now, 0))
        self._refusals[name] = since, count + 1


def _cgroup_of(caller: Caller) -> tuple[str, str]:
    """Return the control group of the caller's process, of a service also if the process is in ``_CONTROL``.

    As an absolute path, and relative to the root. Raises NoSuchProcess, PermissionDenied, NotRead.
    """
    if not caller.is_held:
        raise PermissionDenied("the kernel does not identify the calling process (Linux before 6.5), or it has ended")
    path = cgroups.cgroup_of(caller.pid).removesuffix(_CONTROL)
    return path, cgroups.below_mount(path)


def _is_below_a_unit(inner: str) -> bool:
    """Return whether the control group is below that of a service or scope: its user or a container can name it.

    The service manager of a user, for example, is a service. Those of systemd's own services are in slices only.
    """
    return any(part.endswith((".service", ".scope")) for part in os.path.dirname(inner).split("/"))


def _assign_held(ctx: Context, request: Assignment, caller: Caller) -> Workload:
    try:
        pidfd = Descriptor(os.pidfd_open(caller.pid))
    except OSError as error:
        raise NoSuchProcess(f"process {caller.pid} has ended", errno=error.errno or 0) from error
    try:
        # The number was that of the caller when it was opened, because the caller has not ended since.
        if not caller.waits():
            raise NoSuchProcess(f"process {caller.pid} has ended, or does not wait for the reply")
        return assign(ctx, dataclasses.replace(request, pidfd=pidfd)).workload
    finally:
        pidfd.close()


def _is_known(commands: tuple[str, ...], pid: int) -> bool:
    return any(name.endswith(f"={pid}") for name in commands)
