# SPDX-License-Identifier: Apache-2.0
"""A varlink server on unix sockets. Limits keep a client from blocking others or exhausting resources."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable

from resctrlmond.api.access import Caller, is_privileged
from resctrlmond.api.budget import ReplyBudget
from resctrlmond.api.connections import HangupWatch, has_left
from resctrlmond.api.peer import caller_of, credentials
from resctrlmond.api.varlink.connection import Connection, Limits
from resctrlmond.api.varlink.frames import VarlinkError
from resctrlmond.api.varlink.methods import Interface, Method, with_service

__all__ = ["Interface", "Limits", "Method", "Server", "VarlinkError"]

_log = logging.getLogger(__name__)

# Connections that are accepted before other work of the event loop runs.
_ACCEPT_BATCH = 64
_ACCEPT_PAUSE_S = 0.5
# After a refusal, further connections of the user are refused for this time: the search for an idle one is slow.
_FULL_S = 0.1
# A warning of the same kind is logged once in this time.
_WARNING_INTERVAL_S = 60.0


class Server:
    """Answers varlink calls of ``interfaces`` and of ``org.varlink.service``.

    Calls of one connection are answered one after another, calls of different connections concurrently. An unexpected
    exception of a handler is logged; the reply is the error ``internal_error`` without details. Belongs to one event
    loop: call ``start`` and ``close`` there.
    """

    def __init__(
        self,
        interfaces: Iterable[Interface],
        *,
        vendor: str,
        product: str,
        version: str,
        url: str,
        limits: Limits | None = None,
        internal_error: str = "org.resctrlmon.Manager.InternalError",
        budget: ReplyBudget | None = None,
        holds_all: bool = False,
    ) -> None:
        """Create the server. ``holds_all`` is that of ``caller_of``."""
        self._holds_all = holds_all
        self._budget = budget or ReplyBudget()
        self._interfaces = with_service(interfaces, vendor=vendor, product=product, version=version, url=url)
        self._limits = limits or Limits()
        self._internal_error = internal_error
        self._hangups: HangupWatch | None = None
        self._listeners: dict[socket.socket, asyncio.TimerHandle | None] = {}
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._by_uid: Counter[int] = Counter()
        self._by_process: Counter[int] = Counter()
        # The time of the last refusal, by user.
        self._full: dict[int, float] = {}
        self._warned: dict[str, float] = {}

    async def start(self, listener: socket.socket) -> None:
        """Serve a listening unix socket, which the server owns from now on. Can be called for several sockets.

        Does not call ``listen``, which would overwrite the backlog that systemd set. Raises ValueError if it is not a
        listening unix stream socket.
        """
        kind = (listener.family, listener.type)
        if kind != (socket.AF_UNIX, socket.SOCK_STREAM):
            raise ValueError(f"varlink needs a unix stream socket, to identify its peers, not {listener}")
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ValueError(f"{listener} does not listen")
        if self._hangups is None:
            self._hangups = HangupWatch()
        listener.setblocking(False)
        self._resume(listener)

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop accepting connections, and end all of them.

        Idle connections and streams end at once. A call that is running has ``grace_s`` to finish, then its handler
        is cancelled. Further calls of its connection are not started.
        """
        loop = asyncio.get_running_loop()
        for listener, pause in self._listeners.items():
            loop.remove_reader(listener)
            if pause is not None:
                pause.cancel()
            listener.close()
        self._listeners.clear()
        for task, connection in self._connections.items():
            connection.drain(task)
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._hangups is not None:
            self._hangups.close()
            self._hangups = None

    def _resume(self, listener: socket.socket) -> None:
        self._listeners[listener] = None
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                connection, _address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Mostly EMFILE or ENFILE. The connection stays in the backlog, so the listener stays readable, and
                # without the pause the loop would never wait.
                self._warn("accept", f"cannot accept connections, and will retry: {error}")
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                self._listeners[listener] = loop.call_later(_ACCEPT_PAUSE_S, self._resume, listener)
                return
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        # The cheapest checks first: connections of a flood come before those of root in the kernel's queue.
        try:
            connection.setblocking(False)
            peer = pid, uid, _ = credentials(connection)
            if not is_privileged(uid) and has_left(connection):
                connection.close()
                return
            if not self._has_room(pid, uid):
                self._warn("full", f"refused a connection of uid {uid}: too many are open")
                connection.close()
                return
            caller, presence = caller_of(connection, peer, holds_all=self._holds_all)
        except OSError as error:
            self._warn("credentials", f"refused a connection: its peer is unknown: {error}")
            connection.close()
            return
        assert self._hangups is not None
        served = Connection(
            connection,
            caller,
            presence,
            interfaces=self._interfaces,
            limits=self._limits,
            hangups=self._hangups,
            internal_error=self._internal_error,
            budget=self._budget,
        )
        task = asyncio.get_running_loop().create_task(served.serve())
        self._connections[task] = served
        self._by_uid[caller.uid] += 1
        self._by_process[caller.pid] += 1
        task.add_done_callback(self._ended)

    def _has_room(self, pid: int, uid: int) -> bool:
        """Return whether to accept one more connection; close an idle connection if there is no room otherwise."""
        is_candidate = self._candidates(pid, uid)
        if is_candidate is None:
            return True
        now = asyncio.get_running_loop().time()
        if uid and now - self._full.get(uid, -math.inf) < _FULL_S:
            return False
        if self._close_idle(is_candidate, self._limits.idle_s):
            return True
        if uid == 0 and len(self._connections) >= self._limits.connections:
            largest, most = self._by_process.most_common(1)[0]
            if most > self._by_process[pid] + 1:
                return self._close_idle(lambda other: other.pid == largest, 0.0)
        self._full[uid] = now
        return False

    def _candidates(self, pid: int, uid: int) -> Callable[[Caller], bool] | None:
        """Select the callers whose idle connection may be closed for one of this process; None if there is room."""
        limits = self._limits
        if uid == 0:
            if self._by_process[pid] >= limits.connections_per_process:
                return lambda other: other.pid == pid
            return (lambda _other: True) if len(self._connections) >= limits.connections else None
        if self._by_uid[uid] >= limits.connections_per_uid:
            return lambda other: other.uid == uid
        if len(self._connections) >= limits.connections - limits.reserved_for_root:
            return lambda other: other.uid != 0
        return None

    def _close_idle(self, is_candidate: Callable[[Caller], bool], idle_s: float) -> bool:
        """Close the candidate that has been idle longest. Return False if none has been idle for ``idle_s``."""
        before = asyncio.get_running_loop().time() - idle_s
        idle = [
            (connection.idle_since, task)
            for task, connection in self._connections.items()
            if connection.idle_since is not None
            and connection.idle_since <= before
            and is_candidate(connection.caller)
        ]
        if not idle:
            return False
        _, task = min(idle, key=lambda one: one[0])
        self._connections[task].drain(task)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        connection = self._connections.pop(task)
        uid = connection.caller.uid
        self._by_uid[uid] -= 1
        if not self._by_uid[uid]:
            del self._by_uid[uid]
        pid = connection.caller.pid
        self._by_process[pid] -= 1
        if not self._by_process[pid]:
            del self._by_process[pid]
        connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection of uid %d ended with an unexpected error", uid, exc_info=error)

    def _warn(self, about: str, text: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned.get(about, -math.inf) >= _WARNING_INTERVAL_S:
            self._warned[about] = now
            _log.warning("%s", text)
