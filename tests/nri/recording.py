# SPDX-License-Identifier: Apache-2.0
"""Recorded sessions of real containerds with the adapter, frame by frame.

1.7.24 was recorded in the test machine (make record), 2.1.9 by the same steps on a host with control groups of
version 1.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from resctrlmond.nri import nri_pb2

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json"))


@dataclass(frozen=True)
class Frame:
    """One frame of the multiplexer, as it was sent over the socket."""

    is_runtimes: bool
    data: bytes

    @property
    def connection(self) -> int:
        """The connection: 1 is the plugin's service, 2 the runtime's."""
        return int(struct.unpack_from(">I", self.data)[0])


@dataclass(frozen=True)
class Call:
    """A call of the runtime, decoded from its frames."""

    method: str
    payload: bytes


def sessions(recording: Path) -> list[list[Frame]]:
    """Return the connections of a recording in their order, without those that have no frames."""
    found: dict[int, list[Frame]] = {}
    for line in recording.read_text(encoding="ascii").splitlines():
        number, sender, data = json.loads(line)
        found.setdefault(number, []).append(Frame(sender == "runtime", base64.b64decode(data)))
    return [frames for frames in found.values() if any(frame.is_runtimes for frame in frames)]


def calls(frames: list[Frame]) -> Iterator[Call]:
    """Yield the calls of the plugin's service in their order."""
    stream = b"".join(frame.data[8:] for frame in frames if frame.is_runtimes and frame.connection == 1)
    while stream:
        length, _, kind, _ = struct.unpack_from(">IIBB", stream)
        assert kind == 1
        request = nri_pb2.Request.FromString(stream[10 : 10 + length])
        stream = stream[10 + length :]
        yield Call(request.method, request.payload)
