# SPDX-License-Identifier: Apache-2.0
"""The properties of the wire for any bytes: one check, for hypothesis and for make fuzz."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from resctrlmond.nri import messages, mux, nri_pb2, ttrpc
from resctrlmond.nri.exposure import why_not_among


def understood(pieces: Sequence[bytes]) -> list[object]:
    """Return everything that the layers decode from the bytes of a socket, in the given pieces."""
    frames, server, caller = mux.Demultiplexer(), ttrpc.Server(), ttrpc.Caller()
    readers = {mux.PLUGIN: ttrpc.Reader(), mux.RUNTIME: ttrpc.Reader()}
    found: list[object] = []
    for piece in pieces:
        try:
            for connection, data in frames.feed(piece):
                if connection not in readers:
                    continue
                found.extend(
                    _taken(server, caller, connection, message) for message in readers[connection].feed(data)
                )
        except mux.MuxError as error:
            found.append(str(error))
            break
    return found


def _taken(server: ttrpc.Server, caller: ttrpc.Caller, connection: int, message: ttrpc.Message) -> object:
    if connection == mux.RUNTIME:
        return caller.decode(message)
    call = server.decode(message)
    if not isinstance(call, ttrpc.Call):
        assert call is None or len(call) <= mux.FIRST_PAYLOAD
        return call
    try:
        decoded = messages.decode(call.method, call.payload)
    except messages.Unreadable as error:
        return str(error)
    if isinstance(decoded, messages.Creation):
        assert isinstance(why_not_among(decoded.container.mounts or ()), str)
    if decoded is not None:
        assert len(mux.frames(mux.PLUGIN, ttrpc.response(call.stream, messages.answer(decoded)))) < mux.FIRST_PAYLOAD
    return decoded


def check(data: bytes, cuts: Sequence[int]) -> int:
    """Check that the result does not depend on the pieces, and that only the declared errors are raised."""
    whole = understood([data])
    ends = [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    starts = [0, *ends[:-1]]
    assert understood([data[start:end] for start, end in zip(starts, ends, strict=True)]) == whole
    return len(whole)


def request(stream: int, method: str, payload: bytes, service: str = messages.PLUGIN_SERVICE) -> bytes:
    """Return a ttrpc request as Go encodes it."""
    data = nri_pb2.Request(service=service, method=method, payload=payload, timeout_nano=2 * 10**9)
    return packed(stream, 1, data.SerializeToString())


def packed(stream: int, kind: int, data: bytes) -> bytes:
    """Return a ttrpc message."""
    return struct.pack(">IIBB", len(data), stream, kind, 0) + data


def pod(name: str = "a") -> nri_pb2.PodSandbox:
    """Return a pod with all fields."""
    return nri_pb2.PodSandbox(
        id=name * 64,
        uid="0f1e2d3c-4b5a-4697-8877-66554433221" + name[0],
        name=f"web-{name}",
        namespace="shop",
        labels={"app": "web", "tier": "x"},
        annotations=[nri_pb2.Annotation(name=b"example.com/team", value=b"sea")],
        pid=4242,
    )


def container(name: str = "c", sandbox: str = "a") -> nri_pb2.Container:
    """Return a container with all fields."""
    return nri_pb2.Container(
        id=name * 64,
        pod_sandbox_id=sandbox * 64,
        name="app",
        state=3,
        mounts=[
            nri_pb2.Mount(destination="/run", type="tmpfs", source="tmpfs", options=["nosuid", "mode=755"]),
            nri_pb2.Mount(destination="/run/resctrlmon", type="bind", source="/x", options=["ro"]),
        ],
        linux=nri_pb2.LinuxContainer(cgroups_path=f"kubepods-pod1.slice:cri-containerd:{name * 64}"),
        pid=4243,
    )


def conversation() -> bytes:
    """Return the runtime's side of a connection, from the response to RegisterPlugin on."""
    happened = nri_pb2.StateChangeEvent(event=6, pod=pod(), container=container())
    dedicated = nri_pb2.EventRequest(pod=pod(), container=container())
    configure = nri_pb2.ConfigureRequest(runtime_name="containerd", runtime_version="v1.7.24")
    listed = nri_pb2.SynchronizeRequest(pods=[pod()], containers=[container()])
    calls = [
        request(1, "Configure", configure.SerializeToString()),
        request(5, "Synchronize", listed.SerializeToString()),
        request(7, "StateChange", happened.SerializeToString()),
        request(9, "StartContainer", dedicated.SerializeToString()),
        request(11, "Nothing", b""),
        request(13, "CreateContainer", dedicated.SerializeToString()),
        request(15, "Shutdown", b""),
    ]
    first = mux.frames(mux.RUNTIME, ttrpc.response(1, b""))
    return first + b"".join(mux.frames(mux.PLUGIN, call) for call in calls)
