# SPDX-License-Identifier: Apache-2.0
"""A container runtime's end of NRI, scripted: it writes like Go, and fails where Go fails."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Self

from resctrlmond.nri import nri_pb2
from resctrlmond.nri.messages import PLUGIN_SERVICE, Event

PLUGIN, RUNTIME = 1, 2
REQUEST, RESPONSE = 1, 2
# The default of bufio: the buffer of a Go reader for the beginning of a message.
GO_READER = 4096
TIMEOUT_S = 60.0

METHODS = {
    Event.RUN_POD_SANDBOX: "RunPodSandbox",
    Event.STOP_POD_SANDBOX: "StopPodSandbox",
    Event.REMOVE_POD_SANDBOX: "RemovePodSandbox",
    Event.POST_CREATE_CONTAINER: "PostCreateContainer",
    Event.START_CONTAINER: "StartContainer",
    Event.POST_START_CONTAINER: "PostStartContainer",
    Event.STOP_CONTAINER: "StopContainer",
    Event.REMOVE_CONTAINER: "RemoveContainer",
}


class GoneError(Exception):
    """The plugin closed the connection."""


class Runtime:
    """Listens in the place of a runtime. Each ``accept`` returns a plugin that has connected."""

    def __init__(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(8)
        self._listener.settimeout(TIMEOUT_S)

    def accept(self) -> Plugin:
        """Return the next plugin that connects."""
        connection, _ = self._listener.accept()
        connection.settimeout(TIMEOUT_S)
        return Plugin(connection)

    def close(self) -> None:
        """Stop the runtime. Its socket file remains, as containerd's does."""
        self._listener.close()


class Plugin:
    """A connected plugin, as seen by the runtime."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.name = ""
        self.stream = -1
        # Send pieces of this number of bytes; None sends everything at once.
        self.piece: int | None = None
        self.dedicated = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    # -- the beginning

    def greet(self, pods: Sequence[Any] = (), containers: Sequence[Any] = ()) -> int:
        """Accept the registration, configure the plugin, and send the list. Return the mask of events."""
        self.registered()
        mask = self.configure()
        self.synchronize(nri_pb2.SynchronizeRequest(pods=pods, containers=containers))
        return mask

    def registered(self) -> None:
        """Read RegisterPlugin and respond to it."""
        stream, kind, data = self._message(RUNTIME)
        request = nri_pb2.Request.FromString(data)
        assert (stream, kind) == (1, REQUEST)
        assert (request.service, request.method) == ("nri.pkg.api.v1alpha1.Runtime", "RegisterPlugin")
        sent = nri_pb2.RegisterPluginRequest.FromString(request.payload)
        self.name = f"{sent.plugin_idx}-{sent.plugin_name}"
        self.write(RUNTIME, _packed(1, RESPONSE, nri_pb2.Response().SerializeToString()))

    def configure(self) -> int:
        """Send Configure and return the mask of events."""
        request = nri_pb2.ConfigureRequest(runtime_name="containerd", runtime_version="v1.7.24")
        answer = self.call("Configure", request.SerializeToString())
        assert answer.status.code == 0
        return nri_pb2.ConfigureResponse.FromString(answer.payload).events

    def synchronize(self, *chunks: nri_pb2.SynchronizeRequest) -> None:
        """Send the list in chunks, and check the response to each as Go does."""
        for number, chunk in enumerate(chunks, start=1):
            chunk.more = number < len(chunks)
            answer = self.call("Synchronize", chunk.SerializeToString())
            assert answer.status.code == 0
            assert nri_pb2.SynchronizeResponse.FromString(answer.payload).more == chunk.more

    # -- events

    def send_event(self, event: Event, pod: Any = None, container: Any = None) -> None:
        """Send an event, by StateChange or by its own method. Any response but success would fail the container."""
        if self.dedicated:
            payload = nri_pb2.EventRequest(pod=pod, container=container).SerializeToString()
            answer = self.call(METHODS[event], payload)
        else:
            change = nri_pb2.StateChangeEvent(event=int(event), pod=pod, container=container)
            answer = self.call("StateChange", change.SerializeToString())
        assert answer.status.code == 0, answer.status.message

    # -- calls

    def call(self, method: str, payload: bytes, service: str = PLUGIN_SERVICE, skip: int = 0) -> nri_pb2.Response:
        """Make one call and return its response."""
        stream = self.send(method, payload, service, skip)
        answered, kind, data = self._message(PLUGIN)
        assert (answered, kind) == (stream, RESPONSE)
        return nri_pb2.Response.FromString(data)

    def send(self, method: str, payload: bytes, service: str = PLUGIN_SERVICE, skip: int = 0) -> int:
        """Make one call without waiting for its response. Return its stream ID."""
        self.stream += 2 + skip
        request = nri_pb2.Request(service=service, method=method, payload=payload, timeout_nano=2 * 10**9)
        self.write(PLUGIN, _packed(self.stream, REQUEST, request.SerializeToString()))
        return self.stream

    def answer(self) -> tuple[int, nri_pb2.Response]:
        """Return the next response, to any call."""
        stream, _, data = self._message(PLUGIN)
        return stream, nri_pb2.Response.FromString(data)

    def write(self, connection: int, message: bytes) -> None:
        """Write one message in frames as a Go writer does: its buffer first, then the rest."""
        parts = [message[:GO_READER], message[GO_READER:]] if len(message) > GO_READER else [message]
        self.raw(b"".join(struct.pack(">II", connection, len(part)) + part for part in parts))

    def raw(self, data: bytes) -> None:
        """Write the bytes unchanged, in pieces if ``piece`` is set."""
        piece = self.piece or len(data) or 1
        for at in range(0, len(data), piece):
            self.socket.sendall(data[at : at + piece])

    def is_closed(self) -> bool:
        """Whether the plugin has closed the connection, after all that it wrote is read."""
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(1 << 16):
                pass
        return True

    # -- reading, as strict as Go

    def _message(self, connection: int) -> tuple[int, int, bytes]:
        frame = self._frame(connection)
        assert len(frame) <= GO_READER, "a Go reader drops the connection here"
        length, stream, kind, flags = struct.unpack_from(">IIBB", frame)
        assert flags == 0
        data = frame[10:]
        while len(data) < length:
            data += self._frame(connection)
        assert len(data) == length, "a Go reader loses the next message here"
        return stream, kind, data

    def _frame(self, connection: int) -> bytes:
        found, length = struct.unpack(">II", self._exactly(8))
        assert found == connection
        return self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            try:
                piece = self.socket.recv(length - len(data))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise GoneError
            data += piece
        return data


def _packed(stream: int, kind: int, data: bytes) -> bytes:
    return struct.pack(">IIBB", len(data), stream, kind, 0) + data
