# SPDX-License-Identifier: Apache-2.0
"""Watch systemd's units: assign the control group of each selected unit that runs, and release it at its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from resctrlmond.api.dbus.library import DBusError
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.daemon import alerts
from resctrlmond.daemon.systemd import NO_SUCH_UNIT, Systemd, Unit
from resctrlmond.daemon.systemd_loop import SystemdLoop
from resctrlmond.host.unit_globs import UnitGlobs, is_of_user, is_valid_name
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import LACKS, NoSuchProcess, NotRead, ResctrlError
from resctrlmond.workloads.evidence.callers import holds_callers_only
from resctrlmond.workloads.groups.units import is_overflow, is_unit
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.errors import AlreadyMonitored
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.validation import MAX_KEY_LENGTH, MAX_PRIORITY
from resctrlmond.workloads.model.workload import Member, State, Workload
from resctrlmond.workloads.profiles.profile import Choice, Watch
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.profiled import choose_for_unit, leave_out_unit
from resctrlmond.workloads.verbs.release import release

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

KIND = "unit"
# All units are looked at so often: a slice may have got its first task, and no signal reports units of users.
_LOOK_AT_ALL_S = 60.0
_LOOK_AT_USERS_S = 5.0
# The next look at a unit of which a process is about to call.
_CALL_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
# Calls wait so long for a connection, and only in this time after a start of the daemon, or the end of a connection.
_CONNECTION_WAIT_S = 2.0
_SOON_S = 15.0
# The unit of a user's service manager, below which that has created the control groups of the user's units.
_USER_MANAGER = re.compile(r"user@([0-9]{1,10})\.service")
# A user may create any number of control groups, with any names.
_MAX_UNITS_OF_USER = 256
_MAX_DIRECTORIES_OF_USER = 4096
_ENDED = "the unit is not active"
_NOT_SELECTED = "no glob selects the unit any more"
_NO_PROFILE = Choice()


@dataclass(frozen=True, slots=True)
class _RunningUnit:
    """A selected unit that runs: the key of its workload, its control group, its rank, and the user's number.

    ``choice`` is its profile.
    """

    key: str
    cgroup: str
    rank: int
    user: str = ""
    choice: Choice = _NO_PROFILE

    @property
    def priority(self) -> int:
        """The priority of its workload: that of its profile, else one below containers, in the order of the globs."""
        of_profile = self.choice.profile.priority if self.choice.profile else None
        return max(-1 - self.rank, -MAX_PRIORITY) if of_profile is None else of_profile

    @property
    def assignment(self) -> Assignment:
        """The request that brings the unit into its workload."""
        # With the prefix of the key: a user may call a unit "ssh.service".
        attributes = {"unit": self.key}
        if self.user:
            attributes["user"] = self.user
        return Assignment(
            key=self.key,
            owner=SYSTEMD,
            cgroup=self.cgroup,
            kind=KIND,
            member=self.key,
            attributes=attributes,
            priority=self.priority,
            choice=self.choice,
        )


class UnitWatch:
    """Keeps a workload with a claim of SYSTEMD for each selected unit that runs. Belongs to the event loop.

    Systemd's signals state which units to look at; all are looked at after a connection, a reload, and once a
    minute. Nothing waits for the bus: without it, workloads stay as they are. ``folder`` and ``address`` are those
    of ``Systemd.open``.
    """

    def __init__(self, manager: Manager, workers: Workers, *, folder: str, address: str | None = None) -> None:
        self._ctx = manager.context
        self._workers = workers
        self._folder = folder
        self._address = address
        self._systemd: Systemd | None = None
        self._globs = UnitGlobs(())
        # The units to look at, and whether to look at all.
        self._changed: set[str] = set()
        self._is_any_changed = False
        self._loop = SystemdLoop(manager.alerts, self._work, alert=alerts.UNITS, longest_pause_s=_LONGEST_PAUSE_S)
        # By control group: the key of the unit's workload.
        self._paths: dict[str, str] = {}
        # The units whose control group another workload has as well.
        self._contested: set[str] = set()
        # By key: when to release a unit that has ended, because of the linger of its profile (loop.time()).
        self._lingering: dict[str, float] = {}
        self._connected = asyncio.Event()
        self._unconnected_since = time.monotonic()
        # By key: the last error.
        self._failures: dict[str, str] = {}
        for workload in manager.context.store.all():
            self.changed(workload.key, workload)

    def configure(self, globs: Sequence[str]) -> None:
        """Select units by these globs from now on. Without globs, the claims on all units are released."""
        self._globs = UnitGlobs(globs)
        self._look_at("")
        self._loop.start()

    def changed(self, key: str, workload: Workload | None) -> None:
        """Release a unit whose control group a container, or a client, has assigned to another workload.

        Assign a unit again whose run has ended, for another workload of a higher priority, if it could not be queued.
        """
        if workload is None or workload.state.is_over:
            has_ended = workload is not None and workload.state is State.COMPLETED and not workload.claims
            if has_ended and not is_of_user(key) and self._globs.rank(key) is not None:
                self._look_at(key)
            return
        paths = [member.cgroup for member in workload.living if member.cgroup]
        if is_overflow(workload):
            return
        if is_unit(workload):
            self._paths.update(dict.fromkeys(paths, key))
            return
        for path in paths:
            other = self._paths.pop(path, key)
            if other != key:
                self._contested.add(other)
                self._look_at(other)

    async def connection(self) -> Systemd | None:
        """Return the connection to systemd; None if there is none.

        Soon after the start of the daemon, at boot for example, and after the end of a connection, wait for one. Not
        for long: the bus may need the service that waits, and there may be no bus.
        """
        left = self._unconnected_since + _SOON_S - time.monotonic()
        if self._systemd is None and left > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._connected.wait(), min(left, _CONNECTION_WAIT_S))
        return self._systemd

    async def assignment(self, name: str, cgroup: str) -> Assignment | None:
        """Return the request that assigns a service; None if no glob selects it, or its profile leaves it out."""
        rank = self._globs.rank(name)
        if rank is None:
            return None
        (unit,) = await self._workers.run(Lane.COMMANDS, self._with_profiles, [_RunningUnit(name, cgroup, rank)])
        return None if unit.choice.watch is Watch.NONE else unit.assignment

    async def close(self) -> None:
        """Stop watching. The claims stay for the next start."""
        await self._loop.close()

    def _look_at(self, name: str) -> None:
        if name:
            self._changed.add(name)
        else:
            self._is_any_changed = True
        self._loop.wake()

    async def _work(self) -> None:
        """Follow the changes of units until no glob is left. Raises BusUnavailable, DBusError."""
        if not self._globs.wanted:
            await self._release_all()
            self._loop.succeeded()
            await self._loop.wait()
            return
        async with await Systemd.open(self._address, self._folder, self._look_at) as systemd:
            self._systemd = systemd
            self._connected.set()
            try:
                await self._serve(systemd)
            finally:
                self._systemd = None
                self._connected.clear()
                self._unconnected_since = time.monotonic()

    async def _serve(self, systemd: Systemd) -> None:
        loop = asyncio.get_running_loop()
        all_at = users_at = loop.time()
        while self._globs.wanted:
            is_all = self._is_any_changed or loop.time() >= all_at
            names, self._changed, self._is_any_changed = self._changed, set(), False
            if is_all:
                all_at = loop.time() + _LOOK_AT_ALL_S
                await self._settle(systemd, None)
            elif names:
                await self._settle(systemd, names)
            if is_all or loop.time() >= users_at:
                is_done = await self._settle_users(systemd)
                pause = _LOOK_AT_USERS_S if self._globs.has_users else _LOOK_AT_ALL_S
                users_at = loop.time() + (pause if is_done else 0)
            for key in [key for key, due in self._lingering.items() if due <= loop.time()]:
                await self._release(key)
            self._loop.succeeded()
            await self._loop.wait(min(all_at, users_at, *self._lingering.values()) - loop.time(), systemd)

    async def _settle(self, systemd: Systemd, names: set[str] | None) -> None:
        """Assign and release the units of these names, or all (None), as systemd states. Raises BusUnavailable."""
        globs = self._globs
        selected = None if names is None else [name for name in names if globs.rank(name) is not None]
        # Before the list: a service that calls after this may have begun since the list.
        known = [key for key in self._claimed() if not is_of_user(key)] if names is None else [*names]
        commands = {key: _commands(self._find(key)[1]) for key in known}
        units = await systemd.units(globs.of_system if selected is None else selected)
        living = {unit.name: unit for unit in units if globs.rank(unit.name) is not None and not unit.has_ended}
        for key in known:
            if key in living:
                continue
            if commands[key] == _commands(self._find(key)[1]):
                await self._end(key, commands[key])
            else:
                self._look_at(key)
        if names is None:
            self._forget_failures(living, of_users=False)
            self._ctx.unwatched.keep_units(lambda key: globs.rank(key) is not None)
        running = [await self._running(systemd, unit) for unit in living.values()]
        ready = [unit for unit in running if unit.cgroup and await self._is_ready(unit)]
        await self._assign(ready)

    async def _is_ready(self, unit: _RunningUnit) -> bool:
        """Return whether to assign a unit now, if it has to be: none of its processes is about to call."""
        if _has(self._ctx.store.get(unit.key), unit) or not await self._call(_has_caller, unit.cgroup):
            return True
        asyncio.get_running_loop().call_later(_CALL_PAUSE_S, self._look_at, unit.key)
        return False

    def _find(self, key: str) -> tuple[Workload | None, Member | None]:
        workload = self._ctx.store.get(key)
        return workload, workload.member(key) if workload is not None else None

    async def _running(self, systemd: Systemd, unit: Unit) -> _RunningUnit:
        rank = self._globs.rank(unit.name)
        try:
            path = await systemd.control_group(unit)
        except DBusError as error:
            if error.type != NO_SUCH_UNIT:
                raise
            path = ""  # it has just been unloaded, which a signal reports
        return _RunningUnit(unit.name, await self._call(_path_of, path), 0 if rank is None else rank)

    async def _settle_users(self, systemd: Systemd) -> bool:
        """Assign and release the units of users, which are found by their control groups. Raises BusUnavailable.

        Return whether that is done: changes of system units do not wait for the units of users, of which each user
        may start and end any number.
        """
        found: list[_RunningUnit] = []
        if self._globs.has_users:
            for manager in await systemd.units(["user@*.service"]):
                user = _USER_MANAGER.fullmatch(manager.name)
                if user and not manager.has_ended:
                    top = await systemd.control_group(manager)
                    found += await self._call(_units_of_user, self._globs, user[1], top)
        living = {unit.key for unit in found}
        for key in self._claimed():
            if is_of_user(key) and key not in living:
                await self._end(key)
                workload = self._ctx.store.get(key)
                if self._has_changes and not (workload is not None and workload.is_claimed_by(SYSTEMD)):
                    return False
        self._forget_failures(living, of_users=True)
        return await self._assign(found, yields=True)

    def _claimed(self) -> list[str]:
        return [workload.key for workload in self._ctx.store.unfinished() if workload.is_claimed_by(SYSTEMD)]

    @property
    def _has_changes(self) -> bool:
        """Whether there is a system unit to look at."""
        return self._is_any_changed or any(self._globs.rank(name) is not None for name in self._changed)

    async def _assign(self, running: Iterable[_RunningUnit], *, yields: bool = False) -> bool:
        """Assign units that are not in their workloads yet, in the order in which they are to get RMIDs.

        ``yields``: stop after a unit that was assigned if there is a system unit to look at. Return whether all
        units are assigned.
        """
        chosen = await self._call(self._with_profiles, list(running))
        has_assigned = False
        for unit in sorted(chosen, key=lambda unit: (-unit.priority, unit.rank, unit.key)):
            if yields and has_assigned and self._has_changes:
                return False
            is_contested = unit.key in self._contested
            self._contested.discard(unit.key)
            self._lingering.pop(unit.key, None)
            if self._globs.rank(unit.key) is None:
                continue
            if unit.choice.watch is Watch.NONE:
                reason = leave_out_unit(self._ctx, unit.key, unit.cgroup, unit.choice)
                await self._release(unit.key, reason)
                continue
            self._ctx.unwatched.remove(unit.key)
            if not is_contested and _has(self._ctx.store.get(unit.key), unit):
                continue
            try:
                if await self._call(cgroups.is_populated, unit.cgroup):
                    await self._call(assign, self._ctx, unit.assignment)
            except AlreadyMonitored as error:
                # Its scope is that of a container, which has a workload of its own.
                log.debug("%s: %s", unit.key, error)
                await self._release(unit.key)
            except (cgroups.NoSuchCgroup, NoSuchProcess):
                pass  # it has just ended, which a signal reports
            except ResctrlError as error:
                self._log_failure(unit.key, error)
            else:
                # Not after a failure: the next pass would fail at the same unit, and never reach the ones behind it.
                has_assigned = True
                self._failures.pop(unit.key, None)
        return True

    def _with_profiles(self, running: Iterable[_RunningUnit]) -> list[_RunningUnit]:
        return [replace(unit, choice=choose_for_unit(self._ctx, unit.key, unit.cgroup)) for unit in running]

    async def _end(self, key: str, commands: frozenset[str] | None = None) -> None:
        """Release a unit that has ended, or is not selected any more. One that has ended may linger before.

        ``commands`` are the known processes of its commands when it had ended.
        """
        workload = self._ctx.store.get(key)
        is_claimed = workload is not None and workload.is_claimed_by(SYSTEMD)
        profile = self._ctx.config.profiles.find(workload.profile) if workload is not None and is_claimed else None
        if profile is None or not profile.linger_s or self._globs.rank(key) is None:
            await self._release(key, commands=commands)
        else:
            self._lingering.setdefault(key, asyncio.get_running_loop().time() + profile.linger_s)

    async def _release(self, key: str, reason: str = "", commands: frozenset[str] | None = None) -> None:
        """Release a unit, unless it has called since these ``commands`` were known: then it was started again."""
        self._lingering.pop(key, None)
        workload, member = self._find(key)
        if workload is None or not workload.is_claimed_by(SYSTEMD) or workload.is_finished:
            return
        if not (is_selected := self._globs.rank(key) is not None):
            commands = None
        if commands is not None and _commands(member) != commands:
            self._look_at(key)
            return
        # A unit that is not watched any more runs on.
        has_ended = is_selected and not reason
        reason = reason or (_ENDED if is_selected else _NOT_SELECTED)
        try:
            await self._call(
                release, self._ctx, key, owner=SYSTEMD, has_ended=has_ended, reason=reason, commands=commands
            )
        except ResctrlError as error:
            self._log_failure(key, error)
        if commands is not None and _commands(self._find(key)[1]) != commands:
            self._look_at(key)
            return
        for path in [path for path, of in self._paths.items() if of == key]:
            del self._paths[path]

    async def _release_all(self) -> None:
        for key in self._claimed():
            await self._release(key)

    def _log_failure(self, key: str, error: ResctrlError) -> None:
        if self._failures.get(key) != str(error):
            log.warning("%s: %s", key, error)
        self._failures[key] = str(error)

    def _forget_failures(self, living: Container[str], *, of_users: bool) -> None:
        """Forget the failures of units that do not run any more, of which there may be any number."""
        kept = {key: text for key, text in self._failures.items() if is_of_user(key) != of_users or key in living}
        self._failures = kept

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._workers.run(Lane.UNITS, function, *args, **kwargs)


def _commands(member: Member | None) -> frozenset[str]:
    return frozenset(member.commands if member is not None else ())


def _has(workload: Workload | None, unit: _RunningUnit) -> bool:
    """Whether the unit is in its workload, and nothing is to be changed there."""
    if workload is None or workload.state.is_over or not workload.is_claimed_by(SYSTEMD):
        return False
    if workload.state is State.PENDING and workload.priority != unit.priority:
        return False
    member = workload.member(unit.key)
    if member is None or member.cgroup != unit.cgroup:
        return False
    # Between two commands of an exact service, its next command calls. A sweep finds one that does not.
    return member.is_living or (member.dormant and bool(member.commands))


def _has_caller(path: str) -> bool:
    """Return whether all processes in the control group are about to call, if that is a service's and can be read."""
    try:
        return path.endswith(".service") and holds_callers_only(path)
    except NotRead:
        return False


def _path_of(inner: str) -> str:
    return cgroups.path_of(inner) if inner.strip("/") else ""


def _units_of_user(globs: UnitGlobs, uid: str, top: str) -> list[_RunningUnit]:
    """Return the selected units of a user's service manager that have tasks, by their control groups below ``top``.

    Units are in slices only: the control groups below a service are its own. A control group whose name, or that of
    its slice, is not that of a unit, or whose tasks cannot be found, is left out without a message: the user can
    create any number of them, and companions get their paths.
    """
    found: list[_RunningUnit] = []
    waiting = list(filter(None, [_path_of(top)]))
    room = _MAX_DIRECTORIES_OF_USER
    while waiting and room > 0 and len(found) < _MAX_UNITS_OF_USER:
        for name, path in itertools.islice(_directories(waiting.pop()), room):
            room -= 1
            key = f"user-{uid}:{name}"
            rank = globs.rank(key) if is_valid_name(name) and len(key) <= MAX_KEY_LENGTH else None
            if rank is not None and _has_tasks(path):
                found.append(_RunningUnit(key, path, rank, uid))
            if name.endswith(".slice") and is_valid_name(name):
                waiting.append(path)
    # The same one each time of those with the same name, of which systemd has one only.
    by_key = {unit.key: unit for unit in sorted(found, key=lambda unit: unit.cgroup, reverse=True)}
    return sorted(by_key.values(), key=lambda unit: unit.cgroup)[:_MAX_UNITS_OF_USER]


def _has_tasks(path: str) -> bool:
    try:
        return cgroups.is_populated(path)
    except NotRead as error:
        if error.errno in LACKS:
            raise
        return False  # for example, the path is too long


def _directories(path: str) -> Iterator[tuple[str, str]]:
    # A control group that was removed has none.
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name, entry.path
