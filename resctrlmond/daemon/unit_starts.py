# SPDX-License-Identifier: Apache-2.0
"""Handle org.resctrlmon.Unit.AssignSelf: put the process of a service's command into the group before it executes it.

Any user may call, at any time and many times. The caller names nothing: the kernel states its process and its control
group, and systemd whether it has started just this process for a command of just this service. Any other caller is
refused, and after some refusals callers from that control group are refused without asking systemd.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Collection

import msgspec

from resctrlmond.api.access import Caller
from resctrlmond.api.dbus.library import BusUnavailable, DBusError
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.daemon import unit_commands
from resctrlmond.daemon.systemd import Systemd
from resctrlmond.daemon.unit_commands import CallsSeen, Command, Service
from resctrlmond.host.unit_exec import LONGEST_WAIT_S
from resctrlmond.host.unit_globs import is_valid_name
from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import NoSuchProcess, PermissionDenied, ResctrlError, printable
from resctrlmond.resctrl.processes import Descriptor
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.errors import LimitExceeded, NotWatched
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.profiles.requests import Assignment, UnitCommand
from resctrlmond.workloads.verbs.assign import assign

# The control group of commands other than ExecStart= in a service with Delegate= (systemd.exec(5)).
_CONTROL = "/.control"
# A caller does not wait longer for systemd: its command must begin.
_SYSTEMD_TIMEOUT_S = LONGEST_WAIT_S / 3
# A process that calls so long after its start was not held by the program. It calls at once.
_OLDEST_S = 30.0
# A caller that has used more CPU time has executed something before: a service can execute its command without a
# call, and then the program. systemd needs some 10 ms to prepare a command.
_MOST_CPU_NS = 2 * 10**9
_MAX_REFUSALS, _REFUSALS_S = 16, 10.0
# From so many services on, those that have ended are forgotten.
_MOST_SEEN = 1024


class UnitStarts:
    """Assigns the processes of commands. Belongs to the event loop.

    ``connection`` returns that of the watch to systemd, if there is one. ``assignment`` returns the request by which
    the watch would assign a unit with that control group; None if it would not. ``seen`` is shared with the watch.
    """

    def __init__(
        self,
        ctx: Context,
        workers: Workers,
        connection: Callable[[], Awaitable[Systemd | None]],
        assignment: Callable[[str, str], Awaitable[Assignment | None]],
        seen: CallsSeen,
    ) -> None:
        self._ctx = ctx
        self._workers = workers
        self._connection = connection
        self._assignment = assignment
        # The calls of one service run one after another. A lock exists as long as one of them runs.
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._seen = seen
        # By service: the time of the first refusal in a row, and their number; the oldest first.
        self._refusals: dict[str, tuple[float, int]] = {}

    async def assign(self, caller: Caller) -> Workload:
        """Put the caller's process into the workload of its service, and return that. Raises ResctrlError."""
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
            member = workload.member(name) if workload is not None and not workload.state.is_over else None
            is_known = member is not None and _is_known(member.commands, caller.pid)
            if workload is not None and is_known and await self._is_inside(workload, caller.pid):
                return workload
            if len(self._seen) >= _MOST_SEEN:
                self._seen.keep({one.key for one in self._ctx.store.unfinished()})
            has_all = name in self._seen
            self._seen.watch(name)
            self._seen.remove(name)
            state = self._seen.state(name)
            known = member.commands if member is not None else ()
            try:
                self._check_refusals(name)
                try:
                    service, command = await self._stated(name, inner, caller)
                except ResctrlError:
                    self._count_refusal(name)
                    raise
                jobs = self._seen.ended_jobs(name), self._seen.open_jobs(name)
                service = service.with_callers(time.monotonic())
                workload = await self._assign(caller, assignment, service, command, known, jobs=jobs, has_all=has_all)
            except BaseException:
                self._seen.miss(name)
                raise
            member = workload.member(name)
            knows_all = member is not None and service.knows_all(member.commands)
            self._seen.handle(name, state, knows_all=knows_all)
            if knows_all:
                self._seen.explain(name, jobs[0])
                if service.is_last_of_job(command):
                    self._seen.explain_running(name, service.job)
            return workload

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

    async def _assign(
        self,
        caller: Caller,
        assignment: Assignment,
        service: Service,
        command: Command,
        known: tuple[str, ...],
        *,
        jobs: tuple[Collection[int], Collection[int]],
        has_all: bool,
    ) -> Workload:
        """Assign the caller. ``has_all``: each call of its service before this one was handled.

        ``jobs`` are those of its service that have ended, and those that have not, if no process of them has called.
        """
        now, name = time.monotonic(), service.name
        running = self._ctx.store.get(name)
        is_first = running is None or running.state.is_over
        reasons: list[str] = []
        if unit_commands.is_other_start(service, known):
            previous = self._ctx.store.known(name).member(name)
            reasons += unit_commands.reasons_of_stop(previous) if previous is not None else []
            # The job of this start has ended before the call, with Type=simple, or it has not.
            if not has_all or sum(map(len, jobs)) > 1:
                reasons.append(Reason.START_UNSEEN.text(member=name))
            known = ()
        elif known and (not has_all or jobs[0]) and (command.is_repeated or service.is_forgotten):
            reasons.append(Reason.COMMAND_UNSEEN.text(member=name))
        if not known and unit_commands.has_forgotten_before(service, command):
            reasons.append(Reason.COMMAND_UNSEEN.text(member=name))
        current = unit_commands.kept(service, known, command)
        reasons += unit_commands.reasons(service, name, current)
        has_run = any(other.ran_outside(current) for other in service.commands)
        request = dataclasses.replace(
            assignment,
            cgroup=None,
            own_cgroup=assignment.cgroup or "",
            late=has_run or now - command.started_s > _OLDEST_S,
            is_awaited=caller.waits,
            unit_command=UnitCommand(
                commands=current,
                at_stop=service.at_stop,
                reasons=tuple(reasons),
            ),
        )
        return await self._workers.run(Lane.COMMANDS, _assign_held, self._ctx, request, caller, is_first)

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


def _assign_held(ctx: Context, request: Assignment, caller: Caller, is_first: bool) -> Workload:
    """Assign the caller. ``is_first``: no process of its service has been assigned since the service began."""
    try:
        pidfd = Descriptor(os.pidfd_open(caller.pid))
    except OSError as error:
        raise NoSuchProcess(f"process {caller.pid} has ended", errno=error.errno or 0) from error
    try:
        # The number was that of the caller when it was opened, because the caller has not ended since.
        if not caller.waits():
            raise NoSuchProcess(f"process {caller.pid} has ended, or does not wait for the reply")
        if not request.late:
            request = _with_use_before(request, caller.pid, is_first=is_first)
        return assign(ctx, dataclasses.replace(request, pidfd=pidfd)).workload
    finally:
        pidfd.close()


def _with_use_before(request: Assignment, pid: int, *, is_first: bool) -> Assignment:
    """Return the request with the reason that the caller has executed something before its call, if it has.

    With ``is_first``, the control group has only what the caller has used, also by processes that have left it.
    """
    of_service = cgroups.cpu_time_ns(request.own_cgroup) if is_first else None
    used_ns = max(of_service or 0, processes.family_cpu_time_ns(pid))
    if used_ns <= _MOST_CPU_NS or request.unit_command is None:
        return request
    seconds = f"{used_ns // 10**7 / 100:.2f}"
    why = Reason.WORKED_BEFORE.text(member=request.member or request.key, seconds=seconds)
    known = request.unit_command
    command = msgspec.structs.replace(known, reasons=(*known.reasons, why))
    return dataclasses.replace(request, unit_command=command)


def _is_known(commands: tuple[str, ...], pid: int) -> bool:
    return any(name.endswith(f"={pid}") for name in commands)
