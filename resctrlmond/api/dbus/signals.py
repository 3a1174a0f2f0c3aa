# SPDX-License-Identifier: Apache-2.0
"""Tells the bus what changed: workloads that came, went, or have other properties than before."""

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
from resctrlmond.api.dbus.objects import described, group_properties
from resctrlmond.api.verbs import Service
from resctrlmond.api.workers import Lane
from resctrlmond.workloads.model import Workload

_log = logging.getLogger(__name__)


class Announcer:
    """Emits the signals of one connection to the bus.

    Changes of one workload that come faster than they can be told become one: what is held is bounded by the
    number of workloads, and a signal always speaks of what stands.
    """

    def __init__(
        self, service: Service, post: Callable[[Message], None], flush: Callable[[], Awaitable[None]]
    ) -> None:
        self._service = service
        self._post = post
        self._flush = flush
        self._known: dict[str, types.Group] = {}
        self._changed: dict[str, Workload | None] = {}
        self._awake = asyncio.Event()

    def changed(self, key: str, workload: Workload | None) -> None:
        """Note a change; from the event loop."""
        self._changed[key] = workload
        self._awake.set()

    async def run(self) -> None:
        """Tell changes until cancelled; those before the start are not told."""
        self._known = await self._described(self._service.manager.workloads())
        while True:
            await self._awake.wait()
            self._awake.clear()
            try:
                await self._tell_all()
                # While the bus takes nothing, further changes of one workload become one.
                await self._flush()
            except Exception:
                _log.exception("cannot send a signal to the bus")

    async def _tell_all(self) -> None:
        changed, self._changed = self._changed, {}
        standing = await self._described([workload for workload in changed.values() if workload is not None])
        for key in changed:
            self._tell(key, self._known.get(key), standing.get(key))

    async def _described(self, workloads: list[Workload]) -> dict[str, types.Group]:
        service = self._service
        return await service.workers.run(Lane.RECORDS, described, service.manager, workloads)

    def _tell(self, key: str, before: types.Group | None, now: types.Group | None) -> None:
        path = names.group_path(key)
        if now is None:
            if self._known.pop(key, None) is not None:
                self._emit(names.ROOT, names.OBJECT_MANAGER, "InterfacesRemoved", path, [names.GROUP])
                self._emit(names.ROOT, names.MANAGER, "GroupRemoved", key, path)
            return
        self._known[key] = now
        if before is None:
            self._emit(
                names.ROOT, names.OBJECT_MANAGER, "InterfacesAdded", path, {names.GROUP: group_properties(now)}
            )
            self._emit(names.ROOT, names.MANAGER, "GroupAdded", key, path)
            return
        changed = {names.property_name(field): field for field in values.changed(before, now)}
        if not changed:
            return
        invalidated = [name for name in changed if name in INTERFACES[names.GROUP].invalidated]
        told = group_properties(now, (field for name, field in changed.items() if name not in invalidated))
        self._emit(path, names.PROPERTIES, "PropertiesChanged", names.GROUP, told, invalidated)
        if "State" in told:
            self._emit(names.ROOT, names.MANAGER, "GroupStateChanged", key, told["State"].value)

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
