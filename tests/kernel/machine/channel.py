# SPDX-License-Identifier: Apache-2.0
"""The host's end of the agent's port: many requests at a time, each with its reply."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .inside.agent import HEAD


@dataclass(frozen=True)
class Reply:
    """The result of one command; outputs as bytes."""

    returncode: int
    timed_out: bool
    stdout: bytes
    stderr: bytes


class Channel:
    """Sends requests and passes the replies to the waiting callers; inside/agent.py describes the frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._waiting: dict[int, Future[Reply]] = {}
        self._last = 0
        self._reader = threading.Thread(target=self._receive, name="agent replies", daemon=True)
        self._reader.start()

    def request(self, command: str, stdin: bytes, timeout: float) -> Future[Reply]:
        """Send a command, killed after *timeout* seconds; the future fails with EOFError if the guest ends."""
        future: Future[Reply] = Future()
        with self._sending:
            self._last += 1
            number = self._last
            self._waiting[number] = future
            header = json.dumps({"id": number, "command": command, "timeout": timeout}).encode()
            try:
                self._connection.sendall(HEAD.pack(len(header), len(stdin)) + header + stdin)
            except OSError as error:
                self._waiting.pop(number, None)
                raise EOFError(str(error)) from error
            if not self._reader.is_alive():
                self._fail()  # it ended before this request was registered
        return future

    def close(self) -> None:
        """Stop receiving; callers that still wait get EOFError. The connection stays open."""
        with contextlib.suppress(OSError):  # QEMU may have closed it first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join(5)

    def _receive(self) -> None:
        try:
            while True:
                lengths = HEAD.unpack(self._read(HEAD.size))
                header: dict[str, Any] = json.loads(self._read(lengths[0]))
                body = self._read(lengths[1])
                out = header["stdout"]
                reply = Reply(header["returncode"], header["timed_out"], body[:out], body[out:])
                self._waiting.pop(header["id"]).set_result(reply)
        except (EOFError, OSError):
            self._fail()

    def _fail(self) -> None:
        for number in list(self._waiting):
            if future := self._waiting.pop(number, None):
                future.set_exception(EOFError("the agent's port was closed"))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._connection.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)
