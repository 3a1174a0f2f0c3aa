# SPDX-License-Identifier: Apache-2.0
"""Start the companion of each workload whose profile has one, as a transient unit of systemd, and stop it at the end.

systemd supervises, limits and logs the process, and remembers it while no daemon runs. A unit stays loaded after its
process has ended (RemainAfterExit=) or failed, until the workload ends: a unit that is loaded was started already.
The folder of the companion has the name of the run (``run_of``) for which its unit was started. It is written before
the unit is created, and only while none is loaded, so a daemon that is killed in between starts no companion twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterable
from typing import Any

from resctrlmond.api.dbus.library import NO_REPLY, BusUnavailable, DBusError
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.daemon import alerts
from resctrlmond.daemon.companion_files import CompanionFiles
from resctrlmond.daemon.systemd import UNIT_EXISTS, Systemd, Unit
from resctrlmond.daemon.systemd_loop import Retries, SystemdLoop
from resctrlmond.host.unit_globs import COMPANION_PREFIX
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.service import journal
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.states import CompanionState
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.profiles.companion_settings import Companion, Rendered, TemplateError, render
from resctrlmond.workloads.profiles.companions import (
    CompanionStatus,
    companion_of,
    is_ready,
    run_of,
    unit_of,
    values_of,
)
from resctrlmond.workloads.profiles.memory_settings import UNLIMITED

log = logging.getLogger(__name__)

SLICE = "resctrlmon-companions.slice"
_PATTERN = f"{COMPANION_PREFIX}*.service"
# The socket of the connection in the daemon's folder, beside those of the other connections.
_ENTRANCE = ".companions"
_LOOK_AT_ALL_S = 60.0
_STOP_ALL_S = 30.0
_USEC = 1_000_000
_INFINITY = (1 << 64) - 1
_EXEC_FAILED = 203  # EXIT_EXEC of systemd.exec(5)
# siginfo_t.si_code of a process that has exited.
_CLD_EXITED = 1


class Companions:
    """Keeps a companion for each workload that is to have one. Belongs to the event loop.

    Nothing waits for systemd or the bus: without them, companions are started later. ``folder`` is the folder of the
    daemon, ``address`` that of the bus (None: the system bus). ``on_status`` is called with the key of a workload
    whose companion has another state; ``manager.companions`` has the states.
    """

    def __init__(
        self,
        manager: Manager,
        workers: Workers,
        *,
        folder: str,
        address: str | None = None,
        on_status: Callable[[str], None] = lambda _key: None,
    ) -> None:
        self._ctx = manager.context
        self._manager = manager
        self._workers = workers
        self._folder = folder
        self._address = address
        self._on_status = on_status
        self._files = CompanionFiles(folder)
        # By key: the run of each folder. None until the folders are read.
        self._runs: dict[str, str] | None = None
        # The runs whose unit was loaded at some time while this daemon ran, by key.
        self._loaded: dict[str, str] = {}
        # By key: the starts that have failed.
        self._retries = Retries()
        # By unit: the key of its workload.
        self._keys: dict[str, str] = {}
        # The units without a workload that systemd did not stop.
        self._strays: set[str] = set()
        self._changed: set[str] = set()
        self._is_any_changed = False
        self._loop = SystemdLoop(manager.alerts, self._work, alert=alerts.COMPANIONS, on_error=self._on_error)

    def configure(self) -> None:
        """Apply the profiles, which may have changed, to all workloads."""
        has_some = any(profile.companion for profile in self._ctx.config.profiles.by_name.values())
        self._is_any_changed = True
        if self._loop.has_started or has_some or self._files.exists:
            self._loop.start()

    def changed(self, key: str, workload: Workload | None) -> None:
        """Start or stop the companion of a workload that has changed, soon."""
        if self._loop.has_started and (self._is_known(key) or companion_of(workload, self._ctx.config.profiles)):
            self._look_at(key)

    async def close(self) -> None:
        """Stop this work. The companions run on, and the next start finds them."""
        await self._loop.close()

    def _is_known(self, key: str) -> bool:
        return key in (self._runs or ()) or key in self._manager.companions

    def _look_at(self, key: str) -> None:
        self._changed.add(key)
        self._loop.wake()

    def _on_unit(self, name: str) -> None:
        if not name:
            self._is_any_changed = True
            self._loop.wake()
        elif name in self._keys:
            self._look_at(self._keys[name])

    async def _work(self) -> None:
        """Start and stop companions until there are none. Raises BusUnavailable, DBusError, ResctrlError."""
        if self._runs is None:
            self._runs = await self._call(self._files.runs)
        if not self._runs and not self._wanted():
            self._loop.succeeded()
            self._forget_statuses()
            await self._loop.wait()
            return
        async with await Systemd.open(self._address, self._folder, self._on_unit, _ENTRANCE) as systemd:
            await self._serve(systemd)

    async def _serve(self, systemd: Systemd) -> None:
        loop = asyncio.get_running_loop()
        all_at = loop.time()
        while self._runs or self._wanted():
            keys, self._changed = self._changed.union(self._retries.due), set()
            if self._is_any_changed or loop.time() >= all_at:
                self._is_any_changed, all_at = False, loop.time() + _LOOK_AT_ALL_S
                await self._settle_all(systemd)
            else:
                await self._settle(systemd, keys)
            self._loop.succeeded()
            waits = (all_at - loop.time(), self._retries.seconds)
            await self._loop.wait(min(wait for wait in waits if wait is not None), systemd)

    def _on_error(self, error: str) -> None:
        if not error:
            return
        known = self._manager.companions
        for key in self._wanted():
            if key not in known or known[key].state is CompanionState.WAITING:
                self._report(key, CompanionState.WAITING, error)

    # -- workloads

    def _wanted(self) -> list[str]:
        """Return the keys of the workloads that are to have a companion."""
        profiles = self._ctx.config.profiles
        return [of.key for of in self._ctx.store.unfinished() if companion_of(of, profiles)]

    async def _settle_all(self, systemd: Systemd) -> None:
        """Start and stop companions so that each workload has its own. Raises BusUnavailable, DBusError."""
        assert self._runs is not None
        units = {unit.name: unit for unit in await systemd.units([_PATTERN])}
        keys = {*self._wanted(), *self._runs, *self._manager.companions}
        self._keys = {unit_of(key): key for key in keys}
        for unit in units.values():
            if unit.name not in self._keys:
                await self._stop_stray(systemd, unit)
        await self._settle_each(systemd, keys, units)

    async def _stop_stray(self, systemd: Systemd, unit: Unit) -> None:
        """Stop a unit without a workload. One that systemd does not stop keeps no companion from it.

        Raises BusUnavailable, DBusError if systemd does not answer.
        """
        try:
            await _stop(systemd, unit)
        except DBusError as error:
            if error.type == NO_REPLY:
                raise
            if unit.name not in self._strays:
                log.warning("cannot stop %s, which has the name of a companion: %s", unit.name, error)
            self._strays.add(unit.name)
        else:
            self._strays.discard(unit.name)

    async def _settle(self, systemd: Systemd, keys: set[str]) -> None:
        if keys:
            names = {unit_of(key): key for key in keys}
            self._keys |= names
            units = {unit.name: unit for unit in await systemd.units([*names])}
            await self._settle_each(systemd, keys, units)

    async def _settle_each(self, systemd: Systemd, keys: Iterable[str], units: dict[str, Unit]) -> None:
        """Settle workloads. One that cannot be settled keeps no other from it. Raises BusUnavailable."""
        for key in sorted(keys):
            try:
                await self._settle_one(systemd, key, units.get(unit_of(key)))
            except DBusError as error:
                if error.type == NO_REPLY:
                    raise
                self._fail(key, f"systemd refused the request: {error}", is_retried=True)
            except ResctrlError as error:
                self._fail(key, str(error), is_retried=True)

    async def _settle_one(self, systemd: Systemd, key: str, unit: Unit | None) -> None:
        """Do the next step for one workload. ``unit`` is its unit as it is loaded now."""
        assert self._runs is not None
        workload = self._ctx.store.get(key)
        companion = companion_of(workload, self._ctx.config.profiles)
        run = run_of(workload) if workload is not None and companion else ""
        if unit is not None:
            if run and self._runs.get(key) == run:
                self._loaded[key] = run
                await self._observe(systemd, key, unit)
            else:
                await self._stop(systemd, key, unit, is_followed=bool(run))
        elif workload is None or companion is None:
            await self._forget(key)
        elif not is_ready(workload):
            self._report(key, CompanionState.WAITING, f"the workload is {workload.state}")
        elif self._loaded.get(key) == run:
            self._report(key, CompanionState.STOPPED, "another program has stopped its unit")
        else:
            if self._retries.is_due(key):
                await self._start(systemd, workload, companion)
            return
        # A retry that stays due would end each wait at once.
        self._retries.remove(key)

    async def _start(self, systemd: Systemd, workload: Workload, companion: Companion) -> None:
        """Write the files of a companion, and create its unit. Raises BusUnavailable, DBusError, ResctrlError."""
        assert self._runs is not None
        key, run, unit = workload.key, run_of(workload), unit_of(workload.key)
        # Before the first write, so that what a failure leaves is removed at the end.
        self._runs.setdefault(key, "")
        try:
            rendered = await self._call(self._prepare, workload, companion)
        except TemplateError as error:
            # The next change of the workload may give it the value.
            self._fail(key, str(error), is_retried=False)
            return
        self._runs[key] = run
        properties = properties_of(workload, companion, rendered, self._files.path(key))
        try:
            await systemd.start_transient(unit, properties)
        except DBusError as error:
            if error.type != UNIT_EXISTS:
                raise
            # A unit file of an administrator, perhaps; one that has just been created is found by the next try.
            self._fail(key, f"there is a unit {unit} already", is_retried=True)
        else:
            log.info("%s: started its companion %s", key, unit, extra=journal.fields(key=key))
            self._loaded[key] = run
            self._retries.remove(key)
            self._report(key, CompanionState.STARTING)

    def _prepare(self, workload: Workload, companion: Companion) -> Rendered:
        """Write the files of a companion. Raises TemplateError, ResctrlError, OSError."""
        key, ctx = workload.key, self._ctx
        values = values_of(
            workload,
            group=ctx.tree.full_path(workload.first.ref),
            snapshot=ctx.snapshots.path_if_exists(key) or "",
            folder=self._files.path(key),
        )
        rendered = render(companion, values)
        self._files.write(key, run_of(workload), companion.format.file_name, rendered.text)
        return rendered

    async def _stop(self, systemd: Systemd, key: str, unit: Unit, *, is_followed: bool) -> None:
        """Stop a companion that the workload is not to have. ``is_followed``: it is to have another one.

        A process that ignores SIGTERM runs on for a while. Raises BusUnavailable, DBusError.
        """
        assert self._runs is not None
        await _stop(systemd, unit)
        # A reload may give this run a companion again before the unit has ended.
        if key in self._runs:
            self._runs[key] = ""
        self._loaded.pop(key, None)
        if is_followed:
            self._report(key, CompanionState.WAITING, "systemd stops the previous companion")
        elif not unit.has_ended:
            self._report(key, CompanionState.STOPPING)

    async def _forget(self, key: str) -> None:
        """Remove the files of a companion whose unit is gone."""
        assert self._runs is not None
        if key in self._runs:
            await self._call(self._files.remove, key)
            del self._runs[key]
        self._loaded.pop(key, None)
        self._retries.remove(key)
        self._keys.pop(unit_of(key), None)
        if self._manager.companions.pop(key, None) is not None:
            self._on_status(key)

    def _forget_statuses(self) -> None:
        for key in list(self._manager.companions):
            del self._manager.companions[key]
            self._on_status(key)

    async def _observe(self, systemd: Systemd, key: str, unit: Unit) -> None:
        match unit.active_state, unit.sub_state:
            case "failed", _:
                self._fail(key, await _failure(systemd, unit), is_retried=False)
            case "active", "exited":
                self._report(key, CompanionState.EXITED)
            case "activating", "auto-restart":
                self._report(key, CompanionState.STARTING, f"again: {await _failure(systemd, unit)}")
            case "activating", _:
                self._report(key, CompanionState.STARTING)
            case "deactivating", _ if unit.job_type:
                self._report(key, CompanionState.STOPPED, "another program stops its unit")
            case "deactivating", _:
                # Its main process has failed, and systemd ends the others.
                self._fail(key, await _failure(systemd, unit), is_retried=False)
            case _:
                self._report(key, CompanionState.RUNNING)

    def _fail(self, key: str, reason: str, *, is_retried: bool) -> None:
        if is_retried:
            self._retries.add(key)
        else:
            self._retries.remove(key)
        if self._report(key, CompanionState.FAILED, reason):
            log.warning("%s: its companion failed: %s", key, reason, extra=journal.fields(key=key))

    def _report(self, key: str, state: CompanionState, reason: str = "") -> bool:
        """Publish the state of a companion, and return whether it is a new one."""
        status = CompanionStatus(state, reason, unit_of(key))
        if self._manager.companions.get(key) == status:
            return False
        self._manager.companions[key] = status
        self._on_status(key)
        return True

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._workers.run(Lane.UNITS, function, *args)


async def stop_all(folder: str, address: str | None = None) -> str:
    """Stop all companions, and remove their files, while no daemon runs. Return the problem, "" if there is none."""
    files = CompanionFiles(folder)
    if not files.exists:
        return ""
    try:
        async with asyncio.timeout(_STOP_ALL_S):
            changed = asyncio.Event()
            async with await Systemd.open(address, folder, lambda _name: changed.set(), _ENTRANCE) as systemd:
                while units := await systemd.units([_PATTERN]):
                    for unit in units:
                        await _stop(systemd, unit)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), 1)
                    changed.clear()
                await systemd.stop(SLICE)
        for key in files.runs():
            files.remove(key)
    except TimeoutError:
        return f"companions: systemd has not stopped all of them within {_STOP_ALL_S:.0f} s: systemctl stop {SLICE}"
    except (BusUnavailable, DBusError, OSError) as error:
        return f"companions: {error}: systemctl stop {SLICE}"
    return ""


async def _stop(systemd: Systemd, unit: Unit) -> None:
    """Have systemd stop and forget a unit. A signal reports when it is gone. Raises BusUnavailable, DBusError."""
    if unit.active_state in ("failed", "inactive"):
        await systemd.reset_failed(unit.name)
    elif unit.job_type != "stop" and unit.active_state != "deactivating":
        await systemd.stop(unit.name)


async def _failure(systemd: Systemd, unit: Unit) -> str:
    """Return why the process of a unit has failed. Raises BusUnavailable, DBusError."""
    result = str(await systemd.property_of(unit, "Result"))
    code = int(await systemd.property_of(unit, "ExecMainCode"))
    status = int(await systemd.property_of(unit, "ExecMainStatus"))
    return failure_text(result, code, status, unit.name)


def failure_text(result: str, code: int, status: int, unit: str) -> str:
    """Return a sentence for the properties Result, ExecMainCode and ExecMainStatus of a service."""
    if code == _CLD_EXITED and status == _EXEC_FAILED:
        text = "systemd cannot execute its program"
    elif result == "oom-kill":
        text = "the kernel killed it, because its memory was used up (memory_max)"
    elif code == _CLD_EXITED and status:
        text = f"it exited with status {status}"
    elif code > _CLD_EXITED:
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(status).name}. See: journalctl -u '{unit}'"
        text = f"it was killed by signal {status}"
    else:
        text = f"systemd reports {result}"
    return f"{text}. See: journalctl -u '{unit}'"


def properties_of(
    workload: Workload, companion: Companion, rendered: Rendered, folder: str
) -> list[tuple[str, str, Any]]:
    """Return the properties of a companion's unit: their names, D-Bus signatures and values.

    Over D-Bus, systemd takes each argument as it is, except for "$", which ``no-env-expand`` turns off.
    """
    program = rendered.arguments[0]
    return [
        ("Description", "s", f"Companion of {workload.key} (profile {workload.profile})"),
        ("Documentation", "as", ["man:resctrlmond-profiles(5)"]),
        ("Slice", "s", SLICE),
        # A program that cannot be executed is then a failure of the start.
        ("Type", "s", "exec"),
        ("ExecStartEx", "a(sasas)", [[program, [*rendered.arguments], ["no-env-expand"]]]),
        ("WorkingDirectory", "s", folder),
        ("UMask", "u", 0o077),
        ("RemainAfterExit", "b", True),
        ("Restart", "s", str(companion.restart)),
        ("RestartUSec", "t", 5 * _USEC),
        ("StartLimitIntervalUSec", "t", 300 * _USEC),
        ("StartLimitBurst", "u", 5),
        ("TimeoutStartUSec", "t", 30 * _USEC),
        ("TimeoutStopUSec", "t", 10 * _USEC),
        ("MemoryMax", "t", _INFINITY if companion.memory_max >= UNLIMITED else companion.memory_max),
        ("CPUQuotaPerSecUSec", "t", companion.cpu_quota * _USEC // 100),
        ("TasksMax", "t", companion.tasks_max),
        # The workload comes first: a companion gets what is left of the processors, and is the first to be killed.
        ("CPUWeight", "t", 20),
        ("OOMScoreAdjust", "i", 500),
        ("LogRateLimitIntervalUSec", "t", 30 * _USEC),
        ("LogRateLimitBurst", "u", 200),
    ]
