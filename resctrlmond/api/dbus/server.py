# SPDX-License-Identifier: Apache-2.0
"""Serve org.resctrlmon1 on the bus: own the name, answer calls, and connect again after the bus was restarted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from resctrlmond.api.access import Caller, is_privileged
from resctrlmond.api.budget import MAX_DBUS_BYTES, MAX_DBUS_BYTES_PER_UID, ReplyBudget
from resctrlmond.api.dbus import values
from resctrlmond.api.dbus.admission import Admission, Admitted
from resctrlmond.api.dbus.callers import Callers
from resctrlmond.api.dbus.gate import Header
from resctrlmond.api.dbus.interfaces import NAME
from resctrlmond.api.dbus.library import BUS_NAME, Bus, BusUnavailable, DBusError, Message, MessageType, wants_reply
from resctrlmond.api.dbus.objects import Answer, LogControl, Objects
from resctrlmond.api.dbus.pace import Pace
from resctrlmond.api.dbus.signals import Announcer
from resctrlmond.api.dbus.subscribers import Subscribers
from resctrlmond.api.dbus.unread import Unread
from resctrlmond.api.errors import ERRORS, name_of
from resctrlmond.api.exit_codes import DBUS_PREFIX
from resctrlmond.api.service import Service
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.workloads.model.workload import Workload

_log = logging.getLogger(__name__)

INTERNAL_ERROR = f"{DBUS_PREFIX}InternalError"

# After this time the caller counts as gone: the default time-out of libdbus, sd-bus and GDBus is 25 s.
PATIENCE_S = 20.0
# The thread that asks the bus whether a caller is connected holds the lock of a workload. Without a reply, the caller
# counts as gone, so its member is late.
_PRESENCE_TIMEOUT_S = 1.0

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_GRACE_S = 5.0
# A bus that reads no reply for this time has stalled. Varlink clients have the same time.
_FLUSH_TIMEOUT_S = 30.0
# The most error replies that wait to be sent. Further calls get no reply.
_MOST_REFUSALS = 1024
_REFUSALS_AT_ONCE = 32


class NameTaken(ResctrlError):
    """Another process owns the name on the bus."""


class DBusServer:
    """The service on one bus, by default the system bus (or $DBUS_SYSTEM_BUS_ADDRESS, if it is set).

    Belongs to the event loop. Log levels and ``log_target`` are those of ``resctrlmond.service.journal``. While it
    connects, there is a socket in ``folder``.
    """

    def __init__(
        self,
        service: Service,
        *,
        set_log_level: Callable[[str], None],
        get_log_level: Callable[[], str],
        log_target: str = "console",
        folder: str,
        address: str | None = None,
    ) -> None:
        self._service = service
        self._folder = folder
        self._address = address
        self._objects = Objects(service, LogControl(get_log_level, set_log_level, log_target))
        self._budget = ReplyBudget(MAX_DBUS_BYTES, MAX_DBUS_BYTES_PER_UID)
        self._pace = Pace()
        self._connection: _Connection | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Return whether the service is on the bus and owns its name."""
        return self._connection is not None

    async def start(self) -> None:
        """Connect to the bus, or later, as soon as there is one. Raises NameTaken."""
        trouble = None
        try:
            self._connection = await self._connect()
        except (BusUnavailable, DBusError) as error:
            trouble = str(error)
            _log.warning("%s is not on the bus yet: %s", NAME, error)
        self._keeper = asyncio.create_task(self._keep(trouble))

    async def close(self) -> None:
        """Disconnect. Running calls get their replies first if they take at most 5 s."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def changed(self, key: str, workload: Workload | None) -> None:
        """Signal a change of a workload; None is its removal. Does nothing without a bus."""
        if self._connection is not None:
            self._connection.announcer.changed(key, workload)

    async def _connect(self) -> _Connection:
        bus = await Bus.open(self._address, self._folder)
        connection = _Connection(bus, self._service, self._objects, self._budget, self._pace)
        try:
            await connection.take_name()
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _keep(self, trouble: str | None) -> None:
        """Connect again whenever the connection ends. ``trouble`` is the error that was logged already."""
        pause = _FIRST_PAUSE_S
        while True:
            if self._connection is not None:
                cause = await self._connection.until_ended()
                self._connection = None
                _log.warning(
                    "%s lost its connection to the bus (%s), and connects again when the bus is back", NAME, cause
                )
                pause, trouble = _FIRST_PAUSE_S, None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                self._connection = await self._connect()
                _log.info("%s is on the bus", NAME)
            except (BusUnavailable, DBusError, NameTaken) as error:
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("%s is not on the bus: %s", NAME, error)


class _Connection:
    """One connection to the bus, with its calls."""

    def __init__(self, bus: Bus, service: Service, objects: Objects, budget: ReplyBudget, pace: Pace) -> None:
        self._bus = bus
        self._budget = budget
        self._service = service
        self._objects = objects
        self._callers = Callers(bus)
        self._calls: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._refusals: deque[tuple[Header, Exception]] = deque()
        self._has_refusals = asyncio.Event()
        self._unread = Unread(bus, self._callers)
        self._pace = pace
        self._admission = Admission(bus.gate, self._callers, objects, unread=self._unread, refuse=self._refuse)
        self.announcer = Announcer(service, bus.post, self._settle_signals)
        self._subscribers = Subscribers(bus, self.announcer.start, self.announcer.stop)
        bus.add_message_handler(self._on_message)
        self._tasks = [asyncio.create_task(work) for work in (self.announcer.run(), self._send_refusals())]

    async def take_name(self) -> None:
        """Own the name. Raises NameTaken, DBusError if the policy of the bus refuses it, BusUnavailable."""
        await self._unread.start()
        if not await self._bus.own(NAME):
            owner = await self._bus.ask("GetNameOwner", "s", NAME)
            caller = await self._callers.find(owner)
            raise NameTaken(
                f"the name {NAME} belongs to process {caller.pid} of user {caller.uid} ({owner})",
                remedy="There can be one resctrlmond on a bus: stop the other one",
            )

    async def until_ended(self) -> str:
        """Wait until the connection has ended, and return the cause."""
        await self._bus.until_disconnected()
        await self._stop_tasks()
        return self._bus.cause

    async def close(self) -> None:
        """Wait for the replies to running calls, and disconnect."""
        self._is_closing = True
        await self._admission.close()
        if self._calls:
            await asyncio.wait(self._calls, timeout=_GRACE_S)
        await self._stop_tasks()
        await self._bus.close()

    async def _stop_tasks(self) -> None:
        await self._admission.close()
        await self._unread.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_message(self, message: Message) -> bool:
        """Handle a message; return False to leave it to the library: replies."""
        if message.message_type is MessageType.METHOD_CALL and message.sender:
            if self._is_closing:
                # The bus sends an error when the connection ends. The library would reply that there is no method.
                return True
            admitted = self._admission.begin(message.sender)
            task = asyncio.create_task(self._answer(message, admitted))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            return True
        if (message.sender, message.member) == (BUS_NAME, "NameLost") and message.body == [NAME]:
            _log.warning("the name %s on the bus was lost", NAME)
            self._bus.disconnect()
        if (message.sender, message.member) == (BUS_NAME, "NameOwnerChanged"):
            name, _, new_owner = message.body
            if not new_owner:
                self._subscribers.remove(name)
        return False

    def _refuse(self, call: Header, error: Exception) -> None:
        if call.wants_reply and len(self._refusals) < _MOST_REFUSALS:
            self._refusals.append((call, error))
            self._has_refusals.set()

    async def _send_refusals(self) -> None:
        """Send error replies to refused calls, in batches, and only as fast as the bus reads them."""
        while True:
            await self._has_refusals.wait()
            for _ in range(min(_REFUSALS_AT_ONCE, len(self._refusals))):
                call, error = self._refusals.popleft()
                name, text = _error_reply(error, f"{call.interface}.{call.member}")
                self._bus.post(
                    Message(
                        message_type=MessageType.ERROR,
                        destination=call.sender,
                        reply_serial=call.serial,
                        error_name=name,
                        signature="s",
                        body=[values.text(text)],
                    )
                )
            if not self._refusals:
                self._has_refusals.clear()
            await self._flush()
            await asyncio.sleep(0)

    async def _answer(self, call: Message, admitted: Admitted) -> None:
        sender = admitted.sender
        try:
            waits = self._presence(call, sender, time.monotonic())
            caller = replace(admitted.caller, waits=waits, descriptors=admitted.descriptors)
            target = self._objects.resolve(call, caller)
            size = target.reply_bytes
            # Calls that change something never wait for unread replies.
            async with self._lease(caller.uid, size) if size else contextlib.nullcontext():
                if target.is_subscription:
                    signature, body = await self._answer_subscription(call, caller)
                else:
                    signature, body = await self._objects.answer(target, call, caller)
                paced = not is_privileged(caller.uid)
                async with self._pace.turn(self._bus, body) if paced else contextlib.nullcontext():
                    if wants_reply(call):
                        self._bus.post(Message.new_method_return(call, signature, body))
                    del body
                    await self._flush()
        except BusUnavailable:
            _log.debug("the connection to the bus was lost during a call of %s", sender)
        except Exception as error:
            name, text = _error_reply(error, f"{call.interface}.{call.member}")
            if wants_reply(call):
                self._bus.post(Message.new_error(call, name, values.text(text)))
            await self._flush()
        finally:
            self._admission.end(admitted)

    async def _answer_subscription(self, call: Message, caller: Caller) -> Answer:
        assert call.sender is not None
        if call.member == "Subscribe":
            await self._subscribers.add(call.sender, caller)
        else:
            self._subscribers.remove(call.sender)
        return "", []

    @contextlib.asynccontextmanager
    async def _lease(self, uid: int, size: int) -> AsyncIterator[None]:
        """Reserve memory for a reply, after the user has read enough earlier replies. Raises DBusError."""
        while True:
            # Before the memory is reserved, which other users need.
            await self._unread.room(uid)
            async with self._budget.lease(uid, size):
                if self._unread.is_full(uid):
                    continue  # other replies were sent to the user meanwhile
                yield
                return

    async def _flush(self) -> None:
        """Wait until the bus has read all replies. Disconnect from a stalled bus; the server connects again."""
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                await self._bus.flush()
        except TimeoutError:
            if self._bus.connected:
                _log.warning("the bus has taken no reply for %d s: disconnecting from it", _FLUSH_TIMEOUT_S)
                self._bus.disconnect()

    async def _settle_signals(self) -> None:
        """Wait until the bus has read all signals. Connect again before unread ones make it stop reading."""
        await self._flush()
        if await self._unread.is_bus_full():
            _log.warning("subscribers of %s do not read its signals: connecting to the bus anew", NAME)
            if self._calls:
                await asyncio.wait(self._calls, timeout=_GRACE_S)
            self._bus.disconnect()

    def _presence(self, call: Message, sender: str, begun: float) -> Callable[[], bool]:
        """Return a function for other threads that returns whether the caller still waits for the reply.

        The bus reports that a caller has left. It does not report that a caller's library stopped waiting, after 25
        s.
        """
        loop = asyncio.get_running_loop()

        def waits() -> bool:
            if not wants_reply(call) or time.monotonic() - begun > PATIENCE_S:
                return False
            request = asyncio.run_coroutine_threadsafe(self._bus.ask("NameHasOwner", "s", sender), loop)
            try:
                return bool(request.result(_PRESENCE_TIMEOUT_S))
            except (DBusError, BusUnavailable, TimeoutError, concurrent.futures.CancelledError):
                request.cancel()
                return False

        return waits


def _error_reply(error: Exception, what: str) -> tuple[str, str]:
    """Return the name and text of the error reply for an exception. Log an unexpected one."""
    if isinstance(error, DBusError):
        return error.type, error.text
    if isinstance(error, ResctrlError) and type(error) in ERRORS:
        return name_of(error).dbus, str(error)
    _log.error("%s failed unexpectedly", what, exc_info=error)
    return INTERNAL_ERROR, "resctrlmond failed: see its journal"
