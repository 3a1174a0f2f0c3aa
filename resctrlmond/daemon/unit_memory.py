# SPDX-License-Identifier: Apache-2.0
"""Apply the memory settings of profiles to units of systemd that run, and put the values from before back.

Nothing waits for this. The file (``unit_memory_file``) is written before and after each change, so that the next
start of the daemon continues after a kill (``workloads.unit_memory``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from resctrlmond.api.dbus.library import NO_REPLY, BusUnavailable, DBusError
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.daemon import alerts
from resctrlmond.daemon.systemd import Systemd
from resctrlmond.daemon.systemd_loop import Retries, SystemdLoop
from resctrlmond.daemon.unit_memory_file import UnitMemoryFile
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import ResctrlError, printable
from resctrlmond.service import journal
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.profiles.unit_memory import (
    PROPERTIES,
    Change,
    Changes,
    Outcome,
    Wanted,
    step,
    text_of,
    wanted_by,
)

log = logging.getLogger(__name__)

# The socket of the connection in the daemon's folder, beside those of the other connections.
_ENTRANCE = ".memory"
_RESTORE_ALL_S = 30.0
_NO_CHANGES = Changes({})


class _Refused(Exception):
    """The settings cannot be applied to the unit; another try would fail as well."""


class UnitSettings:
    """Changes units, and keeps the record of that. ``call`` runs a blocking function in another thread."""

    def __init__(self, file: UnitMemoryFile, call: Callable[..., Any]) -> None:
        self._file = file
        self._call = call
        self.changes: dict[str, Changes] = {}

    async def read(self) -> None:
        """Read the record. Raises ResctrlError."""
        self.changes = await self._call(self._file.read)

    async def settle(self, systemd: Systemd, unit: str, wanted: Wanted | None) -> dict[str, int]:
        """Give a unit the values that are wanted, and those from before where none is; write the record.

        Returns the values that another program has set meanwhile, which stay. Raises _Refused, BusUnavailable,
        DBusError, ResctrlError.
        """
        found = await systemd.loaded(unit)
        if found is None:
            await self._save(unit, _NO_CHANGES)
            if wanted is not None:
                raise _Refused(f"systemd has no unit {unit}")
            return {}
        known = self.changes.get(unit, _NO_CHANGES)
        invocation = bytes(found["InvocationID"]).hex()
        if found["Transient"] and known.invocation != invocation:
            known = _NO_CHANGES  # another unit of the same name, which has never been changed
        if wanted is not None:
            await self._check(found, wanted)
        values = wanted.values if wanted is not None else {}
        steps = {
            name: step(known.properties.get(name), int(found[name]), values.get(name)) for name in PROPERTIES.values()
        }
        new = {name: ("t", one.value) for name, one in steps.items() if one.outcome is Outcome.SET}
        if new:
            first = {name: one.first for name, one in steps.items()}
            await self._save(unit, _changes(first, invocation))
            await systemd.set_properties(unit, [(name, *value) for name, value in new.items()])
        await self._save(unit, _changes({name: one.then for name, one in steps.items()}, invocation))
        return {name: one.value for name, one in steps.items() if one.outcome is Outcome.FOREIGN}

    async def _check(self, found: Mapping[str, Any], wanted: Wanted) -> None:
        """Raise _Refused if the unit is not that of the workload, or not systemd's to limit."""
        path = str(found["ControlGroup"])
        if not path or await self._call(cgroups.path_of, path) != wanted.cgroup:
            raise _Refused(f"its control group {wanted.cgroup} is not that of the unit {wanted.unit}")
        user = str(found.get("User", ""))
        if found.get("Delegate") and user not in ("", "root", "0"):
            raise _Refused(f"systemd has delegated its control group to the user {printable(user)}")

    async def _save(self, unit: str, changes: Changes) -> None:
        """Write the record of a unit, if it has changed. Raises ResctrlError."""
        if self.changes.get(unit, _NO_CHANGES) == changes:
            return
        new = {name: of for name, of in self.changes.items() if name != unit}
        if changes.properties:
            new[unit] = changes
        await self._call(self._file.write, new)
        self.changes = new


def _changes(properties: Mapping[str, Change | None], invocation: str) -> Changes:
    kept = {name: change for name, change in properties.items() if change is not None}
    return Changes(kept, invocation) if kept else _NO_CHANGES


class UnitMemory:
    """Keeps the memory settings of units as the profiles want them. Belongs to the event loop.

    Without systemd or the bus, units are changed later. ``folder`` is the folder of the daemon, ``address`` that of
    the bus (None: the system bus). ``on_status`` is called with the key of a workload whose text in
    ``manager.unit_memory`` has changed.
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
        self._file = UnitMemoryFile(folder)
        self._settings = UnitSettings(self._file, self._call)
        self._is_read = False
        # By unit: the key of the workload that wants it changed, and what it wants.
        self._wanted: dict[str, tuple[str, Wanted]] = {}
        # By unit: what became of its settings.
        self._texts: dict[str, str] = {}
        # By unit: what it was settled for. A unit that is missing has to be settled.
        self._settled: dict[str, Wanted] = {}
        # By unit: the changes that have failed.
        self._retries = Retries()
        self._loop = SystemdLoop(manager.alerts, self._work, alert=alerts.UNIT_MEMORY, on_error=self._on_error)

    def configure(self) -> None:
        """Apply the profiles, which may have changed, to all workloads."""
        for key in {key for key, _ in self._wanted.values()}:
            self._follow(key, self._ctx.store.get(key))
        for workload in self._ctx.store.unfinished():
            self._follow(workload.key, workload)
        self._loop.start()

    def changed(self, key: str, workload: Workload | None) -> None:
        """Change the unit of a workload that has changed, soon."""
        if self._loop.has_started and self._follow(key, workload):
            self._loop.wake()

    async def close(self) -> None:
        """Stop this work. The units stay as they are, and the next start continues."""
        await self._loop.close()

    def _follow(self, key: str, workload: Workload | None) -> bool:
        """Note what a workload wants now; return whether a unit is to be settled for that."""
        wanted = {one.unit: one for one in wanted_by(workload, self._ctx.config.profiles)}
        before = {unit: one for unit, (of, one) in self._wanted.items() if of == key}
        if wanted == before:
            return False
        for unit in before.keys() - wanted.keys():
            del self._wanted[unit]
            self._texts.pop(unit, None)
        for unit, one in wanted.items():
            if before.get(unit) != one:
                self._wanted[unit] = key, one
        for unit in before.keys() | wanted.keys():
            self._retries.remove(unit)
        self._publish(key)
        return True

    async def _work(self) -> None:
        """Settle the units that are due. Raises BusUnavailable, DBusError, ResctrlError."""
        if not self._is_read:
            await self._settings.read()
            self._is_read = True
        if due := self._due():
            async with await Systemd.open(self._address, self._folder, lambda _name: None, _ENTRANCE) as systemd:
                await self._settle_all(systemd, due)
        self._loop.succeeded()
        await self._loop.wait(self._retries.seconds)

    def _due(self) -> list[str]:
        """Return the units to settle now."""
        units = {*self._wanted, *self._settings.changes}
        self._settled = {unit: wanted for unit, wanted in self._settled.items() if unit in self._wanted}
        self._retries.keep(units.__contains__)
        return [unit for unit in sorted(units) if not self._is_settled(unit) and self._retries.is_due(unit)]

    def _is_settled(self, unit: str) -> bool:
        return unit in self._wanted and self._settled.get(unit) == self._wanted[unit][1]

    async def _settle_all(self, systemd: Systemd, units: list[str]) -> None:
        """Settle units. A unit that cannot be settled keeps no other from it. Raises BusUnavailable, DBusError."""
        for unit in units:
            key, wanted = self._wanted.get(unit, ("", None))
            try:
                foreign = await self._settle(systemd, unit, wanted)
            except _Refused as error:
                self._done(unit, key, wanted, f"not set: {error}")
            except DBusError as error:
                if error.type == NO_REPLY:
                    raise
                self._fail(unit, f"systemd refused the change: {error}")
            except ResctrlError as error:
                self._fail(unit, str(error))
            else:
                self._done(unit, key, wanted, _text(wanted, foreign))
                if foreign and wanted is None:
                    log.info("%s: another program has set %s, which stays", unit, text_of(foreign))

    async def _settle(self, systemd: Systemd, unit: str, wanted: Wanted | None) -> dict[str, int]:
        if wanted is None or not wanted.refusal:
            return await self._settings.settle(systemd, unit, wanted)
        if unit in self._settings.changes:
            await self._settings.settle(systemd, unit, None)
        raise _Refused(wanted.refusal)

    def _done(self, unit: str, key: str, wanted: Wanted | None, text: str) -> None:
        self._retries.remove(unit)
        if wanted is None:
            log.info("%s: its memory settings are those from before", unit)
            return
        self._settled[unit] = wanted
        if self._wanted.get(unit) == (key, wanted) and self._report(unit, text):
            level = logging.INFO if text.startswith("set: ") else logging.WARNING
            log.log(level, "%s: memory settings: %s", key, text, extra=journal.fields(key=key))

    def _fail(self, unit: str, reason: str) -> None:
        is_first = unit not in self._retries
        self._retries.add(unit)
        is_new = self._report(unit, f"not set: {reason}") if unit in self._wanted else is_first
        if is_new:
            log.warning("%s: its memory settings are not changed: %s", unit, reason)

    def _on_error(self, error: str) -> None:
        for unit in self._wanted if error else ():
            if not self._is_settled(unit):
                self._report(unit, f"not set: {error}")

    def _report(self, unit: str, text: str) -> bool:
        """Publish the text about a unit that is wanted to be changed, and return whether it is a new one."""
        if self._texts.get(unit) == text:
            return False
        self._texts[unit] = text
        self._publish(self._wanted[unit][0])
        return True

    def _publish(self, key: str) -> None:
        """Publish the texts about the units of a workload."""
        texts = {
            unit: self._texts[unit] for unit, (of, _) in self._wanted.items() if of == key and unit in self._texts
        }
        lines = [*texts.values()] if len(texts) == 1 else [f"{unit}: {text}" for unit, text in sorted(texts.items())]
        text = "; ".join(lines)
        if text == self._manager.unit_memory.get(key, ""):
            return
        if text:
            self._manager.unit_memory[key] = text
        else:
            del self._manager.unit_memory[key]
        self._on_status(key)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._workers.run(Lane.UNITS, function, *args)


def _text(wanted: Wanted | None, foreign: Mapping[str, int]) -> str:
    """Return what became of the settings of a workload."""
    if wanted is None:
        return ""
    values = wanted.values
    kept = {name: value for name, value in values.items() if foreign.get(name, value) == value}
    others = {name: foreign[name] for name in values if name not in kept}
    parts = [f"set: {text_of(kept)}"] if kept else []
    if others:
        parts.append(f"not set, because another program has set it since then: {text_of(others)}")
    return "; ".join(parts)


async def restore_all(folder: str, address: str | None = None) -> str:
    """Put all values from before back, while no daemon runs. Return the problem, "" if there is none."""
    file = UnitMemoryFile(folder)
    if not file.exists:
        return ""
    problems = []
    try:
        async with asyncio.timeout(_RESTORE_ALL_S):
            settings = UnitSettings(file, _call_here)
            await settings.read()
            async with await Systemd.open(address, folder, lambda _name: None, _ENTRANCE) as systemd:
                for unit in sorted(settings.changes):
                    try:
                        await settings.settle(systemd, unit, None)
                    except DBusError as error:
                        if error.type == NO_REPLY:
                            raise
                        problems.append(f"{unit}: {error}")
    except TimeoutError:
        problems.append(f"systemd has not changed all units within {_RESTORE_ALL_S:.0f} s")
    except (BusUnavailable, DBusError, ResctrlError) as error:
        problems.append(str(error))
    if not problems:
        return ""
    return f"the memory settings of units: {'; '.join(problems)}. {file.path} has the values from before"


async def _call_here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
