# SPDX-License-Identifier: Apache-2.0
"""One connection to a container runtime: register the plugin, and respond to every call of the runtime in time."""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from resctrlmond.nri import messages, mux, ttrpc
from resctrlmond.nri.plugin import Plugin
from resctrlmond.workloads.model.validation import attribute_value

log = logging.getLogger(__name__)

T = TypeVar("T")

# A runtime closes the connection when its time limit is reached (2 s by default). A container whose start gets its
# response before resctrlmond is updated is late.
ANSWER_S = 1.5
ANSWER_PART = 0.75
_RECEIVE_BYTES = 262144
# The limit for unread bytes of responses, each of which has less than a hundred. The writer does not wait for the
# runtime to read, because nothing but the runtime could end that wait.
MAX_UNREAD = 1 << 20
# The limit for the runtime's description of itself in a log message.
_SHOWN_LENGTH = 256
# How often to look whether a connection that is to end is idle.
_END_S = 0.1


class Session:
    """Serves NRI on a connected socket until it closes. ``configured`` receives the runtime's name and version.

    ``is_only``: no other connection can follow, so this one is kept although the profiles need other events.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        plugin: Plugin,
        configured: Callable[[str], None],
        *,
        is_only: bool = False,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._plugin = plugin
        self._server = ttrpc.Server()
        self._caller = ttrpc.Caller()
        # The events without a response: what each waits for, and the timer that ends the wait.
        self._unanswered: dict[asyncio.Future[Any], asyncio.TimerHandle] = {}
        self._configured = configured
        self._is_only = is_only
        # Whether the log states that this connection lacks events.
        self._has_warned = False
        self._is_over = False
        # Whether this side has ended the connection.
        self._is_ended = False
        # Whether the runtime reports creations on this connection; None until it configures the plugin.
        self._has_creations: bool | None = None
        # The timer of the next attempt to end the connection.
        self._next_attempt: asyncio.TimerHandle | None = None
        self._frames = mux.Demultiplexer()
        self._readers = {mux.PLUGIN: ttrpc.Reader(), mux.RUNTIME: ttrpc.Reader()}

    @property
    def _transport(self) -> asyncio.Transport:
        return cast(asyncio.Transport, self._writer.transport)

    def _is_connected(self) -> bool:
        """Whether the connection is open: the runtime closes it when it stops waiting for a response."""
        if self._is_over or self._transport.is_closing():
            return False
        # poll() reports POLLHUP without a request, even if there is still data to read.
        return not self._poll(0)

    def _poll(self, events: int) -> bool:
        socket = select.poll()
        socket.register(self._writer.get_extra_info("socket").fileno(), events)
        return bool(socket.poll(0))

    # -- other events than those that the runtime reports

    def _resubscribe(self) -> None:
        """End the connection if the profiles need other events than it has, as soon as the connection is idle."""
        if not self._is_outdated():
            return
        if self._is_only:
            if not self._has_creations and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the profiles set memory limits or mounts from now on, but the runtime does not report "
                    "containers before it creates them: restart the runtime, which launches this plugin again"
                )
            return
        # Received data is in the buffer of the reader, or the task that reads it is about to run: first receive no
        # more, and then let that task run.
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._end)

    def _is_outdated(self) -> bool:
        """Whether the profiles need other events than those that the runtime was asked for."""
        is_open = not self._is_over and not self._is_ended
        return is_open and self._has_creations not in (None, self._plugin.is_adjusting)

    def _end(self) -> None:
        if self._is_outdated() and self._is_idle():
            self._is_ended = True
            self._transport.abort()
            return
        self._transport.resume_reading()
        if self._is_outdated() and self._next_attempt is None:
            self._next_attempt = asyncio.get_running_loop().call_later(_END_S, self._attempt_again)

    def _attempt_again(self) -> None:
        self._next_attempt = None
        self._resubscribe()

    def _is_idle(self) -> bool:
        """Whether no message is on its way: a container whose start waits for a response would be late."""
        return (
            not self._unanswered
            and not self._transport.get_write_buffer_size()
            and not self._transport.is_reading()
            and self._frames.is_between_frames
            and all(reader.is_between_messages for reader in self._readers.values())
            and not self._poll(select.POLLIN)
        )

    # -- messages

    async def run(self, name: str, index: str) -> None:
        """Register with a name and an index, and serve.

        Return if the profiles need other events, which the next connection has. Raises MuxError, ConnectionError and
        EOFError at any other end.
        """
        self._plugin.begin()
        self._plugin.is_connected = self._is_connected
        self._plugin.resubscribe = self._resubscribe
        # The runtime may call from here on: it does not wait until its response is read.
        payload = messages.registration(name, index)
        self._send(mux.RUNTIME, self._caller.request(messages.RUNTIME_SERVICE, "RegisterPlugin", payload))
        try:
            while data := await self._reader.read(_RECEIVE_BYTES):
                for connection, piece in self._frames.feed(data):
                    # Data for a connection that was not opened is dropped, as by the Go implementation.
                    if connection in self._readers:
                        for message in self._readers[connection].feed(piece):
                            self._receive(connection, message)
                if self._transport.get_write_buffer_size() > MAX_UNREAD:
                    raise ConnectionError("the runtime does not read the responses")
            if not self._is_ended:
                is_whole = self._frames.is_between_frames
                raise EOFError("the runtime closed the connection" + ("" if is_whole else " within a frame"))
        finally:
            self._is_over = True
            for done, timer in self._unanswered.items():
                timer.cancel()
                done.cancel()
            # Abort: an orderly close would wait for a runtime that does not read.
            self._transport.abort()

    def _receive(self, connection: int, message: ttrpc.Message) -> None:
        if connection == mux.RUNTIME:
            answer = self._caller.decode(message)
            if answer is not None and answer.code != ttrpc.OK:
                raise ConnectionError(f"the runtime refused the plugin: {_shown(answer.text)} (code {answer.code})")
            return
        call = self._server.decode(message)
        if isinstance(call, bytes):
            self._send(mux.PLUGIN, call)
        elif call is not None:
            self._serve(call)

    def _serve(self, call: ttrpc.Call) -> None:
        try:
            request = messages.decode(call.method, call.payload) if call.service == messages.PLUGIN_SERVICE else None
        except messages.Unreadable as error:
            log.warning("%s", error)
            # A failed event would fail the container's start. A failed list only ends the connection.
            if call.method in ("Configure", "Synchronize"):
                self._send(mux.PLUGIN, ttrpc.refusal(call.stream, ttrpc.INVALID_ARGUMENT, str(error)))
            else:
                self._send(mux.PLUGIN, ttrpc.response(call.stream, b""))
            return
        if request is None:
            text = f"{call.service}/{call.method} is not implemented"
            self._send(mux.PLUGIN, ttrpc.refusal(call.stream, ttrpc.UNIMPLEMENTED, text))
            return
        if isinstance(request, messages.Creation):
            adjustment = asyncio.ensure_future(self._plugin.adjust(request, _time_for(call)))
            self._answer_later(call, adjustment, partial(self._answer_creation, call.stream))
            return
        try:
            done = self._handle(request)
        except Exception:
            # The container must start after any failure.
            log.exception("%s could not be handled", call.method)
            done = None
        has_creations = self._plugin.is_adjusting
        if isinstance(request, messages.Configure):
            self._has_creations = has_creations
        answer = ttrpc.response(call.stream, messages.answer(request, has_creations=has_creations))
        if done is None or done.done():
            self._send(mux.PLUGIN, answer)
        else:
            self._answer_later(call, done, partial(self._answer, answer))

    def _answer_later(
        self, call: ttrpc.Call, done: asyncio.Future[T], answer: Callable[[asyncio.Future[T]], None]
    ) -> None:
        """Answer when the future is done, or cancel it at the time limit and answer then."""
        self._unanswered[done] = asyncio.get_running_loop().call_later(_time_for(call), done.cancel)
        done.add_done_callback(answer)

    def _handle(self, request: messages.Notification) -> asyncio.Future[None] | None:
        """Handle a call. Return the future that the response must wait for."""
        match request:
            case messages.Configure():
                if request.config:
                    self._plugin.configure(request.config)
                self._configured(_shown(f"{request.runtime} {request.version}"))
            case messages.Synchronize():
                self._plugin.synchronize(request)
            case messages.EventReport():
                return self._plugin.handle_event(request)
            case messages.Shutdown():
                log.info("the runtime shuts down")
        return None

    def _answer(self, answer: bytes, done: asyncio.Future[None]) -> None:
        self._unanswered[done].cancel()
        if not done.cancelled():
            self._send_last(done, answer)
        elif not self._is_over:
            log.warning("an event was answered before resctrlmond was updated: resctrlmond is slow")
            # After the other callbacks of the cancellation, by which the daemon learns that nothing holds the
            # container: they abort the call, and asyncio closes the socket in the next pass of the loop.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._send_last, done, answer)

    def _answer_creation(
        self, stream: int, done: asyncio.Future[tuple[dict[str, str], messages.Mount | None]]
    ) -> None:
        self._unanswered[done].cancel()
        files: dict[str, str] = {}
        mount = None
        if done.cancelled():
            log.warning("a container is created without the settings of its profile: the host is slow")
        elif error := done.exception():
            # The container must start after any failure.
            log.error("a container is created without the settings of its profile", exc_info=error)
        else:
            files, mount = done.result()
        self._send_last(done, ttrpc.response(stream, messages.adjustment(files, mount)))

    def _send_last(self, done: asyncio.Future[Any], answer: bytes) -> None:
        """Send the response of an event that waited, unless the connection is over."""
        del self._unanswered[done]
        if not self._is_over:
            self._send(mux.PLUGIN, answer)
            if not self._unanswered:
                self._resubscribe()

    def _send(self, connection: int, message: bytes) -> None:
        # In one piece: frames of two messages must not mix.
        self._writer.write(mux.frames(connection, message))


def _shown(text: str) -> str:
    """Return text of the runtime in a form that is safe for the log."""
    return attribute_value(text)[:_SHOWN_LENGTH]


def _time_for(call: ttrpc.Call) -> float:
    """Return the time limit of the response in seconds: less than the runtime's own, which each call states."""
    return ANSWER_PART * call.timeout_ns / 1e9 if call.timeout_ns > 0 else ANSWER_S
