# SPDX-License-Identifier: Apache-2.0
"""The multiplexer and ttrpc: byte by byte, at their limits, and with arbitrary input."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resctrlmond.nri import messages, mux, nri_pb2, ttrpc
from tests.nri import hostile
from tests.nri.hostile import conversation, packed, request

CUTS = st.lists(st.integers(0, 1 << 16), max_size=12)


def frame(connection: int, payload: bytes) -> bytes:
    return struct.pack(">II", connection, len(payload)) + payload


def lengths(written: bytes) -> list[int]:
    """Return the lengths of the payloads of frames."""
    found = []
    while written:
        (length,) = struct.unpack_from(">I", written, 4)
        found.append(length)
        written = written[8 + length :]
    return found


# -- outbound


@pytest.mark.parametrize(
    ("size", "frames"),
    [
        (10, [10]),
        (4096, [4096]),
        (4097, [4096, 1]),
        (20_000, [4096, 15_904]),
        (4096 + mux.MAX_PAYLOAD + 1, [4096, mux.MAX_PAYLOAD, 1]),
    ],
)
def test_no_frame_at_a_message_start_is_longer_than_4096(size: int, frames: list[int]) -> None:
    assert lengths(mux.frames(1, bytes(size))) == frames


def test_each_message_of_the_adapter_has_one_frame() -> None:
    for message in (
        ttrpc.Caller().request(messages.RUNTIME_SERVICE, "RegisterPlugin", messages.registration("n" * 64, "90")),
        ttrpc.response(1, messages.answer(messages.Configure("containerd", "v1.7.24"))),
        ttrpc.refusal(1, ttrpc.UNIMPLEMENTED, "x" * 100_000),
        ttrpc.refusal(1, ttrpc.UNIMPLEMENTED, "\N{GRINNING FACE}" * 100_000),
    ):
        assert len(lengths(mux.frames(1, message))) == 1


# -- inbound: frames


def test_single_bytes_are_decoded_like_whole_messages() -> None:
    data = conversation()
    whole = hostile.understood([data])
    assert hostile.understood([bytes([byte]) for byte in data]) == whole
    assert [type(one) for one in whole] == [
        ttrpc.Answer,
        messages.Configure,
        messages.Synchronize,
        messages.EventReport,
        messages.EventReport,
        type(None),
        messages.Creation,
        messages.Shutdown,
    ]


def test_frame_of_the_greatest_length_is_accepted() -> None:
    message = packed(1, 1, bytes(ttrpc.MAX_DATA))
    assert len(message) == mux.MAX_PAYLOAD
    [(connection, payload)] = mux.Demultiplexer().feed(frame(1, message))
    assert (connection, len(payload)) == (1, mux.MAX_PAYLOAD)


def test_a_frame_of_an_impossible_length_ends_the_connection_before_it_is_read() -> None:
    with pytest.raises(mux.MuxError):
        list(mux.Demultiplexer().feed(struct.pack(">II", 1, mux.MAX_INBOUND + 1)))


def test_end_within_a_frame_is_detected() -> None:
    frames = mux.Demultiplexer()
    assert frames.is_between_frames
    for byte in frame(1, b"x")[:-1]:
        list(frames.feed(bytes([byte])))
        assert not frames.is_between_frames
    list(frames.feed(b"x"))
    assert frames.is_between_frames


# -- inbound: messages


def test_messages_of_two_frames_and_frames_of_two_messages_are_accepted() -> None:
    first, second = packed(1, 1, b"a" * 9000), packed(3, 1, b"b")
    stream = first + second
    reader = ttrpc.Reader()
    found = [message for piece in (stream[:4096], stream[4096:]) for message in reader.feed(piece)]
    assert [(message.stream, len(message.data)) for message in found] == [(1, 9000), (3, 1)]


@pytest.mark.parametrize("size", [ttrpc.MAX_DATA + 1, ttrpc.MAX_DATA + 100_000])
@pytest.mark.parametrize("piece", [1 << 14, 1 << 30])
def test_an_oversize_message_is_refused_and_the_next_is_served(size: int, piece: int) -> None:
    stream = packed(1, 1, bytes(size)) + packed(3, 1, b"")
    reader, server = ttrpc.Reader(), ttrpc.Server()
    pieces = [stream[at : at + piece] for at in range(0, len(stream), piece)]
    refused, call = [server.decode(message) for part in pieces for message in reader.feed(part)]
    assert isinstance(refused, bytes)
    status = nri_pb2.Response.FromString(refused[10:]).status
    assert (status.code, status.message) == (
        ttrpc.RESOURCE_EXHAUSTED,
        f"message length {size} exceed maximum message size of 4194304",
    )
    assert isinstance(call, ttrpc.Call)
    assert call.stream == 3


def code(answer: ttrpc.Call | bytes | None) -> int:
    assert isinstance(answer, bytes)
    return nri_pb2.Response.FromString(answer[10:]).status.code


def test_stream_ids_may_skip_but_not_be_even_or_fall() -> None:
    server = ttrpc.Server()

    def take(stream: int) -> ttrpc.Call | bytes | None:
        return server.decode(ttrpc.Message(stream, ttrpc.REQUEST, b""))

    assert isinstance(take(1), ttrpc.Call)
    assert isinstance(take(5), ttrpc.Call)
    for stream in (0, 4, 5, 3, 6):
        assert code(take(stream)) == ttrpc.INVALID_ARGUMENT
    assert isinstance(take(7), ttrpc.Call)


def test_request_that_is_not_protobuf_is_refused() -> None:
    server = ttrpc.Server()
    assert code(server.decode(ttrpc.Message(1, ttrpc.REQUEST, b"\xff"))) == ttrpc.INVALID_ARGUMENT
    assert isinstance(server.decode(ttrpc.Message(3, ttrpc.REQUEST, b"")), ttrpc.Call)


@pytest.mark.parametrize("kind", [0, 2, 3, 4, 255])
def test_message_that_is_not_a_request_is_skipped(kind: int) -> None:
    assert ttrpc.Server().decode(ttrpc.Message(1, kind, b"")) is None


def test_calls_have_odd_rising_stream_ids_and_responses_in_any_order() -> None:
    caller = ttrpc.Caller()
    streams = [struct.unpack_from(">I", caller.request("s", "m", b""), 4)[0] for _ in range(3)]
    assert streams == [1, 3, 5]
    response = nri_pb2.Response(status=nri_pb2.Status(code=5, message="no"))
    answers = [
        caller.decode(ttrpc.Message(stream, ttrpc.RESPONSE, response.SerializeToString())) for stream in (5, 1)
    ]
    assert [(answer.stream, answer.code, answer.text) for answer in answers if answer] == [(5, 5, "no"), (1, 5, "no")]
    assert caller.decode(ttrpc.Message(3, ttrpc.REQUEST, b"")) is None
    bad = caller.decode(ttrpc.Message(3, ttrpc.RESPONSE, b"\xff"))
    assert bad is not None
    assert bad.code != ttrpc.OK


# -- arbitrary input


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), CUTS)
def test_any_bytes(data: bytes, cuts: list[int]) -> None:
    hostile.check(data, cuts)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.integers(0, 9), st.integers(0, 4), st.binary(max_size=200), CUTS)
def test_any_bytes_in_a_frame_and_in_a_message(
    connection: int, stream: int, kind: int, data: bytes, cuts: list[int]
) -> None:
    hostile.check(frame(connection, data) + frame(connection, packed(stream, kind, data)), cuts)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["Configure", "Synchronize", "StateChange", "StartContainer", "CreateContainer"]),
    st.binary(max_size=200),
    CUTS,
)
def test_any_bytes_in_a_payload(method: str, payload: bytes, cuts: list[int]) -> None:
    assert hostile.check(frame(1, request(1, method, payload)), cuts) == 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_conversation_with_bytes_changed(data: st.DataObject) -> None:
    changed = bytearray(conversation())
    for _ in range(data.draw(st.integers(0, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    hostile.check(bytes(changed), data.draw(CUTS))
