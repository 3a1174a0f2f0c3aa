# SPDX-License-Identifier: Apache-2.0
"""Emit signals for workloads that were added, removed or changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from resctrlmond.api import types
from resctrlmond.api.dbus import interfaces as names
from resctrlmond.api.dbus import values
from resctrlmond.api.dbus.interfaces import INTERFACES
from resctrlmond.api.dbus.library import Message, MessageType
from resctrlmond.api.dbus.objects import workload_properties, workloads_by_key
from resctrlmond.api.service import Service
from resctrlmond.api.workers import Lane
from resctrlmond.workloads.model.workload import Workload

_log = logging.getLogger(__name__)

# The changes of a workload within this time become one signal, and the verb that made them is answered before.
_BATCH_S = 0.01


class Announcer:
    """Emits the signals of one connection to the bus between ``start`` and ``stop``.

    Several changes of a workload before a signal is sent become one signal with the current state. So the number of
    pending signals never exceeds the number of workloads.
    """

    def __init__(
        self, service: Service, post: Callable[[Message], None], flush: Callable[[], Awaitable[None]]
    ) -> None:
        self._service = service
        self._post = post
        self._flush = flush
        self._known: dict[str, types.Workload] = {}
        self._changed: dict[str, Workload | None] = {}
        self._awake = asyncio.Event()
        self._is_started = False
        self._emitting = asyncio.Lock()

    async def start(self) -> None:
        """Emit signals for each change from now on."""
        # Before the workloads are read, so that no change is missed.
        self._is_started = True
        async with self._emitting:
            known = await self._workloads_of(self._service.manager.context.store.all())
            self._known = known if self._is_started else {}

    def stop(self) -> None:
        """Emit no signals until the next start."""
        self._is_started = False
        self._known, self._changed = {}, {}

    def changed(self, key: str, workload: Workload | None) -> None:
        """Record a change. Call this in the event loop."""
        if self._is_started:
            self._changed[key] = workload
            self._awake.set()

    async def run(self) -> None:
        """Emit signals until cancelled."""
        while True:
            await self._awake.wait()
            await asyncio.sleep(_BATCH_S)
            self._awake.clear()
            try:
                async with self._emitting:
                    await self._emit_changes()
                # While the bus does not read, further changes of a workload become one.
                await self._flush()
            except Exception:
                _log.exception("cannot send a signal to the bus")

    async def _emit_changes(self) -> None:
        changed, self._changed = self._changed, {}
        workloads = await self._workloads_of([workload for workload in changed.values() if workload is not None])
        if not self._is_started:
            return
        for key in changed:
            self._emit_change(key, self._known.get(key), workloads.get(key))

    async def _workloads_of(self, workloads: list[Workload]) -> dict[str, types.Workload]:
        service = self._service
        return await service.workers.run(Lane.RECORDS, workloads_by_key, service.manager, workloads)

    def _emit_change(self, key: str, before: types.Workload | None, now: types.Workload | None) -> None:
        path = names.workload_path(key)
        if now is None:
            if self._known.pop(key, None) is not None:
                self._emit(names.ROOT, names.OBJECT_MANAGER, "InterfacesRemoved", path, [names.WORKLOAD])
                self._emit(names.ROOT, names.MANAGER, "WorkloadRemoved", key, path)
            return
        self._known[key] = now
        if before is None:
            self._emit(
                names.ROOT, names.OBJECT_MANAGER, "InterfacesAdded", path, {names.WORKLOAD: workload_properties(now)}
            )
            self._emit(names.ROOT, names.MANAGER, "WorkloadAdded", key, path)
            return
        changed = {names.property_name(field): field for field in values.changed(before, now)}
        if not changed:
            return
        invalidated = [name for name in changed if name in INTERFACES[names.WORKLOAD].invalidated]
        properties = workload_properties(now, (field for name, field in changed.items() if name not in invalidated))
        self._emit(path, names.PROPERTIES, "PropertiesChanged", names.WORKLOAD, properties, invalidated)
        if "State" in properties:
            self._emit(names.ROOT, names.MANAGER, "WorkloadStateChanged", key, properties["State"].value)

    def _emit(self, path: str, interface: str, member: str, *body: Any) -> None:
        self._post(
            Message(
                message_type=MessageType.SIGNAL,
                path=path,
                interface=interface,
                member=member,
                signature=INTERFACES[interface].signals[member],
                body=[*body],
            )
        )
