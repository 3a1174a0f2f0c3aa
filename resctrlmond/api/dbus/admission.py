# SPDX-License-Identifier: Apache-2.0
"""Decide which calls from the bus are decoded, and when: calls of root at once, calls of readers one user at a time.

The checks of a call, in order:

0. The bus: only root and the members of the groups of readers may send messages to the daemon
   (``systemd/org.resctrlmon1.dbus.conf``).
1. ``gate.Gate``: the length and the form of the header.
2. ``Admission``, before the body is read: the caller expects a reply or changes something; the length of the body;
   the number of calls of the sender. If the credentials of the sender are known already, for readers: a reply is
   expected; unread replies of the user; the rights, the method and the signature.
3. ``Admission``, when the body is complete: the number of descriptors; the credentials, asked from the bus if
   necessary; for readers the checks of step 2 again, and the queue of the user. While many senders are unknown, the
   calls of senders that have left the bus are dropped first, also those in queues.
4. The D-Bus library decodes the message.
5. ``objects.Objects.resolve``: the object, the interface, the method and its signature; the rights
   (``access.Policy``). This check decides: that of steps 2 and 3 only keeps calls from being decoded.
6. ``server._Connection``: for calls that only read, unread replies of the user and ``budget.ReplyBudget``.
7. ``values.request``: the types of the arguments.
8. ``service.Service``: for readers a free thread (``workers.Lane``).
9. The function of the verb: owner, PID namespace and descriptors. The manager checks keys, classes and paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from resctrlmond.api.access import Caller, is_privileged
from resctrlmond.api.dbus.callers import Callers
from resctrlmond.api.dbus.gate import MAX_LARGE_BODY, Gate, Header, HeldCall
from resctrlmond.api.dbus.library import NO_REPLY, BusUnavailable, DBusError
from resctrlmond.api.dbus.objects import Objects
from resctrlmond.api.dbus.unread import LIMITS_EXCEEDED, NAME_HAS_NO_OWNER, Unread
from resctrlmond.resctrl.processes import Descriptor

# The arguments of a reader's call are the key of a workload, or the names of an interface and a property.
MAX_SMALL_BODY = 16 * 1024
# The most calls without a reply of one connection, and in the queue of one reader's user.
MOST_CALLS = 64
_MOST_QUEUED = 256
# The most calls of one reader's user that are decoded and answered concurrently.
_MOST_AT_ONCE = 4
_MAX_QUEUED_BYTES = 1024 * 1024
# The credentials of at most this many senders are asked from the bus concurrently. While more wait, there is a pause
# before each batch, and the calls of senders that have left meanwhile are dropped: otherwise connections that send
# one call and leave would delay the calls of root, and every other thread.
_MOST_LOOKUPS = 32
_FLOOD_PAUSE_S = 0.05
# The calls that wait for the credentials of their senders: beyond the first number a sender may have a few, beyond
# the second none. The bus has at most 2048 connections, so only calls of departed senders can reach the second. The
# limits of their bytes, of all senders and of one, are for large calls only: small calls of root never fail because
# of large calls of other users.
_MANY_UNKNOWN = 1024
_FEW_CALLS = 4
_MOST_UNKNOWN = 8192
# The most descriptors of one call: Assign uses one. Those of all calls that wait must be fewer than LimitNOFILE= in
# resctrlmond.service.
_MOST_DESCRIPTORS = 4
_MAX_UNKNOWN_BYTES = 8 * 1024 * 1024
_MAX_UNKNOWN_BYTES_OF_ONE = 2 * 1024 * 1024


class Admitted(msgspec.Struct, frozen=True):
    """An admitted call, which the library decodes, with the credentials of its sender."""

    caller: Caller
    sender: str
    descriptors: tuple[Descriptor, ...]


class Admission:
    """Admits the calls of one connection to the bus by their headers and credentials.

    Belongs to the event loop. Calls of privileged callers pass at once. Calls of readers are checked first, and wait
    in the queue of the reader's user, so that a flood costs only the parsing of its headers. ``refuse`` is called
    with the header and the reason of a call that is not admitted. Calls of a user with too many unread replies are
    dropped without a reply.
    """

    def __init__(
        self,
        gate: Gate,
        callers: Callers,
        objects: Objects,
        *,
        unread: Unread,
        refuse: Callable[[Header, Exception], None],
    ) -> None:
        self._gate = gate
        self._callers = callers
        self._objects = objects
        self._unread = unread
        self._refuse = refuse
        # By sender: the number of all calls that have not ended; calls without credentials yet; calls in the library.
        self._calls: Counter[str] = Counter()
        self._unknown: dict[str, list[HeldCall]] = {}
        self._unknown_calls = 0
        self._unknown_bytes = 0
        self._identifying: asyncio.Task[None] | None = None
        self._forwarded: dict[str, deque[Admitted]] = {}
        # By user: queued calls of readers, and the number of their calls that are running.
        self._queues: dict[int, deque[tuple[HeldCall, Caller]]] = {}
        self._running: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        gate.wants_call = self._wants
        gate.on_call = self._take

    def begin(self, sender: str) -> Admitted:
        """Return the admission of the call of ``sender`` that the library decoded. Call this once for each call."""
        calls = self._forwarded[sender]
        admitted = calls.popleft()
        if not calls:
            del self._forwarded[sender]
        return admitted

    def end(self, admitted: Admitted) -> None:
        """Record the end of a call, and admit the next one of the same user."""
        self._forget(admitted.sender)
        uid = admitted.caller.uid
        if is_privileged(admitted.caller.uid):
            return
        self._running[uid] -= 1
        self._next(uid)

    async def close(self) -> None:
        """Admit no further calls. The bus sends an error to callers without a reply when the connection ends."""
        self._gate.wants_call = lambda _header: False
        self._gate.on_call = lambda _call: None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _wants(self, header: Header) -> bool:
        if not header.wants_reply and not self._objects.changes(header):
            return False  # no effect and no reply
        caller = self._callers.known(header.sender)
        if caller is not None and self._is_useless(header, caller):
            return False
        error: Exception | None = self._limit(header, caller)
        if error is None and caller is not None and not is_privileged(caller.uid):
            error = self._denial(header, caller)
        # An unknown caller, which may be root, must not fill the bus with error replies either.
        if error is not None and (caller is not None or not self._unread.is_flooded(None)):
            self._refuse(header, error)
        return error is None

    def _take(self, call: HeldCall) -> None:
        sender = call.header.sender
        if len(call.descriptors) > _MOST_DESCRIPTORS:
            why = f"{len(call.descriptors)} file descriptors came with the call, more than {_MOST_DESCRIPTORS}"
            self._refuse(call.header, DBusError(LIMITS_EXCEEDED, why))
            return
        self._calls[sender] += 1
        # If earlier calls of the sender wait for its credentials, this one waits after them.
        caller = self._callers.known(sender) if sender not in self._unknown else None
        if caller is not None:
            self._admit(call, caller)
            return
        self._unknown_calls += 1
        self._unknown_bytes += call.size
        if sender in self._unknown:
            self._unknown[sender].append(call)
        else:
            self._unknown[sender] = [call]
        if self._identifying is None or self._identifying.done():
            self._identifying = self._start(self._identify_senders())

    async def _identify_senders(self) -> None:
        """Get the credentials of all unknown senders, and admit or drop their calls."""
        lookups: dict[str, asyncio.Task[None]] = {}
        listing: asyncio.Task[None] | None = None
        while self._unknown:
            if len(self._unknown) > _MOST_LOOKUPS and self._callers.can_list:
                if listing is None or listing.done():
                    await asyncio.sleep(_FLOOD_PAUSE_S)
                    listing = self._start(self._drop_departed())
                # Not for long: the list may never come, and senders must not pile up meanwhile.
                await asyncio.wait([listing], timeout=_FLOOD_PAUSE_S)
            waiting = (sender for sender in self._unknown if sender not in lookups)
            for sender in itertools.islice(waiting, _MOST_LOOKUPS - len(lookups)):
                lookups[sender] = self._start(self._identify(sender))
            if lookups:
                # Neither for all nor without limit: a lost reply must not delay the lookups of further senders.
                await asyncio.wait(lookups.values(), timeout=_FLOOD_PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
            lookups = {sender: lookup for sender, lookup in lookups.items() if not lookup.done()}

    async def _drop_departed(self) -> None:
        """Drop the unknown and the queued calls of senders that have left the bus: they need no reply."""
        senders = {*self._unknown, *(call.header.sender for queue in self._queues.values() for call, _ in queue)}
        with contextlib.suppress(BusUnavailable, DBusError, TimeoutError):
            departed = set(await self._callers.find_departed(senders))
            for sender in departed & self._unknown.keys():
                for call in self._pop_unknown(sender):
                    self._drop(call, None)
            for queue in self._queues.values():
                for queued in [queued for queued in queue if queued[0].header.sender in departed]:
                    queue.remove(queued)
                    self._drop(queued[0], None)

    async def _identify(self, sender: str) -> None:
        """Get the credentials of a sender, and admit or drop its calls."""
        caller: Caller | None = None
        problem: Exception | None = None
        try:
            caller = await self._find(sender)
        except Exception as error:
            # A sender that has left the bus needs no reply.
            is_gone = isinstance(error, DBusError) and error.type == NAME_HAS_NO_OWNER
            problem = None if is_gone or isinstance(error, BusUnavailable) else error
        for call in self._pop_unknown(sender):
            try:
                if caller is None:
                    self._drop(call, problem)
                else:
                    self._admit(call, caller)
            except Exception as error:
                self._drop(call, error)

    async def _find(self, sender: str) -> Caller:
        try:
            return await self._callers.find(sender)
        except DBusError as error:
            if error.type != NO_REPLY:
                raise
        return await self._callers.find(sender)

    def _pop_unknown(self, sender: str) -> list[HeldCall]:
        calls = self._unknown.pop(sender, [])
        self._unknown_calls -= len(calls)
        self._unknown_bytes -= sum(call.size for call in calls)
        return calls

    def _admit(self, call: HeldCall, caller: Caller) -> None:
        if is_privileged(caller.uid):
            self._forward(call, caller)
            return
        if self._is_useless(call.header, caller):
            self._drop(call, None)
            return
        # Only Assign uses descriptors.
        call = msgspec.structs.replace(call, descriptors=())
        queue = self._queues.get(caller.uid, ())
        error = self._denial(call.header, caller)
        size = call.size + sum(queued.size for queued, _ in queue)
        if error is None and (len(queue) >= _MOST_QUEUED or size > _MAX_QUEUED_BYTES):
            error = DBusError(LIMITS_EXCEEDED, f"too many calls of user {caller.uid} already wait for their replies")
        if error is not None:
            self._drop(call, error)
            return
        self._queues.setdefault(caller.uid, deque()).append((call, caller))
        self._next(caller.uid)

    def _next(self, uid: int) -> None:
        queue = self._queues.get(uid)
        while queue and self._running[uid] < _MOST_AT_ONCE:
            call, caller = queue.popleft()
            self._running[uid] += 1
            self._forward(call, caller)
        if not queue:
            self._queues.pop(uid, None)
        if not self._running[uid]:
            del self._running[uid]

    def _forward(self, call: HeldCall, caller: Caller) -> None:
        sender = call.header.sender
        self._forwarded.setdefault(sender, deque()).append(Admitted(caller, sender, call.descriptors))
        self._start(self._gate.deliver(call.data))

    def _drop(self, call: HeldCall, error: Exception | None) -> None:
        self._forget(call.header.sender)
        if error is not None:
            self._refuse(call.header, error)

    def _forget(self, sender: str) -> None:
        self._calls[sender] -= 1
        if not self._calls[sender]:
            del self._calls[sender]

    def _is_useless(self, header: Header, caller: Caller) -> bool:
        """Return whether a call is dropped without a reply: a reader's that wants none, or of a flooded reader."""
        if is_privileged(caller.uid):
            return False
        return not header.wants_reply or self._unread.is_flooded(caller.uid)

    def _limit(self, header: Header, caller: Caller | None) -> DBusError | None:
        """Return the error for a call that is too long or exceeds a limit on the number of calls; otherwise None."""
        size = header.body_bytes
        if size > MAX_LARGE_BODY:
            return DBusError(LIMITS_EXCEEDED, f"the arguments take {size} bytes, more than {MAX_LARGE_BODY}")
        if self._calls[header.sender] >= MOST_CALLS:
            return DBusError(LIMITS_EXCEEDED, f"{MOST_CALLS} calls of this connection already wait for their replies")
        if caller is not None:
            return None
        of_one = sum(call.size for call in self._unknown.get(header.sender, ()))
        is_too_much = size > MAX_SMALL_BODY and (
            of_one + size > _MAX_UNKNOWN_BYTES_OF_ONE or self._unknown_bytes + size > _MAX_UNKNOWN_BYTES
        )
        is_new = len(self._unknown.get(header.sender, ())) < _FEW_CALLS
        most = _MOST_UNKNOWN if is_new else _MANY_UNKNOWN
        if is_too_much or self._unknown_calls >= most:
            return DBusError(LIMITS_EXCEEDED, "too many calls wait for the credentials of their senders")
        return None

    def _denial(self, header: Header, caller: Caller) -> Exception | None:
        """Return the error for a call of a reader that is too long or not permitted; otherwise None."""
        if header.body_bytes > MAX_SMALL_BODY:
            why = f"the arguments take more than {MAX_SMALL_BODY} bytes, which only root may send"
            return DBusError(LIMITS_EXCEEDED, why)
        try:
            self._objects.check(header, caller)
        except Exception as error:
            return error
        return None

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
