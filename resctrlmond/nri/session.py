# SPDX-License-Identifier: Apache-2.0
"""One connection to a container runtime: registered, and every call of the runtime answered, in time and well."""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable

from resctrlmond.groups.keys import attribute_value
from resctrlmond.nri import messages, mux, ttrpc
from resctrlmond.nri.plugin import Plugin

log = logging.getLogger(__name__)

# A runtime gives up on us when its time is over (2 s unless configured otherwise), and closes the connection. What a
# call brought is worked on after its answer as well.
ANSWER_S = 1.5
ANSWER_PART = 0.75
_RECEIVE_BYTES = 262144
# Runtimes wait for each answer before they call again. One that does not is read no further until some are given.
MAX_UNANSWERED = 64
# Bytes of answers, of which one has less than a hundred. Not waited for: nothing would end that but the runtime.
MAX_UNREAD = 1 << 20
# Of what a runtime says about itself, as much is shown.
_SHOWN_LENGTH = 256


class Session:
    """Speaks NRI on a connected socket until that ends; ``configured`` hears the runtime's name and version."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        plugin: Plugin,
        configured: Callable[[str], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._plugin = plugin
        self._server = ttrpc.Server()
        self._caller = ttrpc.Caller()
        # The tasks that answer events, each with what it waits for.
        self._answers: dict[asyncio.Task[None], asyncio.Future[None]] = {}
        self._configured = configured
        self._is_over = False

    def _is_connected(self) -> bool:
        """Whether the runtime has the connection open: it closes that when it gives up on an answer."""
        if self._is_over or self._writer.transport.is_closing():
            return False
        ends = select.poll()
        # The hang-up comes unasked, also while it is still to be read.
        ends.register(self._writer.get_extra_info("socket").fileno(), 0)
        return not ends.poll(0)

    async def run(self, name: str, index: str) -> None:
        """Register under a name and an index, and serve. Raises MuxError, ConnectionError and EOFError at its end."""
        self._plugin.begin()
        self._plugin.is_connected = self._is_connected
        # From here on the runtime may call: it does not wait until we have read its answer.
        payload = messages.registration(name, index)
        self._send(mux.RUNTIME, self._caller.request(messages.RUNTIME_SERVICE, "RegisterPlugin", payload))
        frames = mux.Demultiplexer()
        readers = {mux.PLUGIN: ttrpc.Reader(), mux.RUNTIME: ttrpc.Reader()}
        try:
            while data := await self._reader.read(_RECEIVE_BYTES):
                for connection, piece in frames.feed(data):
                    # What goes to a connection that nobody has opened is dropped, as Go's end does it.
                    if connection in readers:
                        for message in readers[connection].feed(piece):
                            self._take(connection, message)
                            while len(self._answers) >= MAX_UNANSWERED:
                                await asyncio.wait(self._answers, return_when=asyncio.FIRST_COMPLETED)
                if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
                    raise ConnectionError("the runtime does not read what it is answered")
            raise EOFError(
                "the runtime closed the connection" + ("" if frames.is_between_frames else " within a frame")
            )
        finally:
            self._is_over = True
            for task, done in self._answers.items():
                task.cancel()
                # Not left to the task: one that has not begun to run never sees that it is cancelled.
                done.cancel()
            # At once: closed in good order, it would stay open for what a runtime does not read.
            self._writer.transport.abort()

    def _take(self, connection: int, message: ttrpc.Message) -> None:
        if connection == mux.RUNTIME:
            answer = self._caller.take(message)
            if answer is not None and answer.code != ttrpc.OK:
                raise ConnectionError(
                    f"the runtime refuses us as a plugin: {_shown(answer.text)} (code {answer.code})"
                )
            return
        call = self._server.take(message)
        if isinstance(call, bytes):
            self._send(mux.PLUGIN, call)
        elif call is not None:
            self._serve(call)

    def _serve(self, call: ttrpc.Call) -> None:
        try:
            told = messages.decode(call.method, call.payload) if call.service == messages.PLUGIN_SERVICE else None
        except messages.Unreadable as error:
            log.warning("%s", error)
            # An event's failure would fail the container's start: that of a list only ends the connection.
            if call.method in ("Configure", "Synchronize"):
                self._send(mux.PLUGIN, ttrpc.refusal(call.stream, ttrpc.INVALID_ARGUMENT, str(error)))
            else:
                self._send(mux.PLUGIN, ttrpc.response(call.stream, b""))
            return
        if told is None:
            text = f"{call.service}/{call.method} is not implemented"
            self._send(mux.PLUGIN, ttrpc.refusal(call.stream, ttrpc.UNIMPLEMENTED, text))
            return
        try:
            done = self._act(told)
        except Exception:
            # Whatever is wrong with us, the container starts.
            log.exception("%s was not taken", call.method)
            done = None
        answer = ttrpc.response(call.stream, messages.answer(told))
        if done is None or done.done():
            self._send(mux.PLUGIN, answer)
        else:
            task = asyncio.ensure_future(self._answer_later(answer, done, _time_for(call)))
            self._answers[task] = done
            task.add_done_callback(self._answers.pop)

    def _act(self, told: messages.Told) -> asyncio.Future[None] | None:
        """Do what a call asks; what it must wait for."""
        match told:
            case messages.Configure():
                if told.config:
                    self._plugin.configure(told.config)
                self._configured(_shown(f"{told.runtime} {told.version}"))
            case messages.Synchronize():
                self._plugin.synchronize(told)
            case messages.Happened():
                return self._plugin.happened(told)
            case messages.Shutdown():
                log.info("the runtime shuts down")
        return None

    async def _answer_later(self, answer: bytes, done: asyncio.Future[None], time_s: float) -> None:
        finished, _ = await asyncio.wait((done,), timeout=time_s)
        if not finished:
            log.warning("an event is answered before it is carried over: resctrlmond takes its time")
            done.cancel()
        self._send(mux.PLUGIN, answer)

    def _send(self, connection: int, message: bytes) -> None:
        # In one piece: frames of two messages must not mix.
        self._writer.write(mux.frames(connection, message))


def _shown(text: str) -> str:
    """A runtime's words as they may stand in the log."""
    return attribute_value(text)[:_SHOWN_LENGTH]


def _time_for(call: ttrpc.Call) -> float:
    """How long the answer may take, in seconds: less than the runtime waits, which it tells with each call."""
    return ANSWER_PART * call.timeout_ns / 1e9 if call.timeout_ns > 0 else ANSWER_S
