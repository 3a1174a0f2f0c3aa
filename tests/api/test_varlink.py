# SPDX-License-Identifier: Apache-2.0
"""The varlink server implements the protocol: calls, errors, introspection, more, oneway, order of replies."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resctrlmond.api.varlink.methods import Method
from resctrlmond.api.varlink.server import Interface, Server
from tests.api.varlink_server import DESCRIPTION, NAME, Echo, RawClient, RunningServer, is_serving, running
from tests.wait import wait_until

SERVICE = "org.varlink.service"


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.path) as client:
        yield client


def test_call_and_reply(client: RawClient) -> None:
    client.call(f"{NAME}.Echo", {"text": "größer\u0000", "someNumber": 1, "nested": {"a": {"number": 2}}})
    assert client.reply() == {"parameters": {"text": "größer\u0000"}}


@pytest.mark.parametrize(
    "envelope", ["", ',"parameters":null', ',"parameters":{}', ',"parameters": null ,"more":null']
)
def test_parameters_may_be_omitted_null_or_empty(client: RawClient, envelope: str) -> None:
    client.send(b'{"method":"org.example.Test.Either"%s}\0' % envelope.encode())
    assert client.reply() == {"parameters": {"number": 1}}


def test_empty_reply_has_no_parameters(client: RawClient) -> None:
    client.call(f"{NAME}.Fail", {"how": "not"})
    assert client.reply() == {}


def test_get_info(client: RawClient) -> None:
    client.call(f"{SERVICE}.GetInfo")
    assert client.reply()["parameters"] == {
        "vendor": "Example",
        "product": "tests",
        "version": "1",
        "url": "https://example.org",
        "interfaces": [SERVICE, NAME],
    }


def test_get_interface_description(client: RawClient) -> None:
    client.call(f"{SERVICE}.GetInterfaceDescription", {"interface": NAME})
    assert client.reply()["parameters"] == {"description": DESCRIPTION}
    client.call(f"{SERVICE}.GetInterfaceDescription", {"interface": SERVICE})
    assert "interface org.varlink.service" in client.reply()["parameters"]["description"]
    client.call(f"{SERVICE}.GetInterfaceDescription", {"interface": "org.example.Other"})
    assert client.reply() == {
        "error": f"{SERVICE}.InterfaceNotFound",
        "parameters": {"interface": "org.example.Other"},
    }


@pytest.mark.parametrize(
    ("method", "error", "parameters"),
    [
        (f"{NAME}.Missing", "MethodNotFound", {"method": f"{NAME}.Missing"}),
        ("org.example.Other.Echo", "InterfaceNotFound", {"interface": "org.example.Other"}),
        ("Echo", "InterfaceNotFound", {"interface": ""}),
        ("", "InterfaceNotFound", {"interface": ""}),
        (f"{NAME}.", "MethodNotFound", {"method": f"{NAME}."}),
        (f"{NAME}.__class__", "MethodNotFound", {"method": f"{NAME}.__class__"}),
    ],
)
def test_unknown_method_and_interface(client: RawClient, method: str, error: str, parameters: Any) -> None:
    client.call(method)
    assert client.reply() == {"error": f"{SERVICE}.{error}", "parameters": parameters}


@pytest.mark.parametrize(
    ("parameters", "invalid"),
    [
        ({"text": 5}, "text"),
        ({}, "text"),
        ({"text": None}, "text"),
        ({"text": "a", "someNumber": "5"}, "someNumber"),
        ({"text": "a", "someNumber": 1.5}, "someNumber"),
        ({"text": "a", "some_number": 5}, "some_number"),
        ({"text": "a", "pid": 1}, "pid"),
        ({"text": "a", "two\nlines": 1}, "two\nlines"),
        ({"text": "a", "nested": {"x.y": {"number": "z"}}}, "nested"),
        ({"text": "a", "nested": {"x": {}}}, "nested"),
        ({"text": "a", "nested": {"x": {"number": 1, "more": 2}}}, "nested"),
    ],
)
def test_invalid_parameter_is_named(client: RawClient, parameters: Any, invalid: str) -> None:
    client.call(f"{NAME}.Echo", parameters)
    assert client.reply() == {"error": f"{SERVICE}.InvalidParameter", "parameters": {"parameter": invalid}}
    client.call(f"{NAME}.Echo", {"text": "still connected"})
    assert client.reply() == {"parameters": {"text": "still connected"}}


def test_typed_errors(client: RawClient) -> None:
    client.call(f"{NAME}.Fail", {"how": "wanted"})
    assert client.reply() == {"error": f"{NAME}.Wanted", "parameters": {"why": "asked for"}}
    client.call(f"{NAME}.Fail", {"how": "bare"})
    assert client.reply() == {"error": f"{NAME}.Wanted"}


@pytest.mark.parametrize(
    "how", ["unexpected", "exhausted", "cancelled", "surrogate", "error-surrogate", "disconnect"]
)
def test_unexpected_error_is_logged_and_not_sent(
    client: RawClient, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    client.call(f"{NAME}.Fail", {"how": how})
    assert client.reply() == {"error": f"{NAME}.InternalError"}
    record = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert record.getMessage().startswith(f"{NAME}.Fail failed for process ")
    assert record.exc_info is not None
    client.call(f"{NAME}.Echo", {"text": "still connected"})
    assert client.reply() == {"parameters": {"text": "still connected"}}


def test_oneway_has_no_reply_not_even_an_error(server: RunningServer, client: RawClient) -> None:
    client.call(f"{NAME}.Echo", {"text": "oneway"}, oneway=True)
    client.call(f"{NAME}.Fail", {"how": "wanted"}, oneway=True)
    client.call(f"{NAME}.Echo", {}, oneway=True)
    client.call(f"{NAME}.Missing", oneway=True)
    client.call(f"{NAME}.Count", {"to": 3}, oneway=True)
    client.call(f"{NAME}.Echo", {"text": "normal"})
    assert client.reply() == {"parameters": {"text": "normal"}}
    assert server.handlers.echoed == ["oneway", "normal"]


def test_oneway_call_is_served_after_its_client_disconnected(server: RunningServer) -> None:
    with RawClient(server.path) as client:
        client.call(f"{NAME}.Sleep", {"seconds": 0.05}, oneway=True)
        client.call(f"{NAME}.Echo", {"text": "client has left"}, oneway=True)
    wait_until(lambda: server.handlers.echoed == ["client has left"])


def test_oneway_with_more_closes_the_connection(client: RawClient) -> None:
    client.call(f"{NAME}.Count", {"to": 1}, oneway=True, more=True)
    assert client.is_closed()


def test_upgrade_is_refused(client: RawClient) -> None:
    client.call(f"{NAME}.Either", upgrade=True)
    method = f"{NAME}.Either"
    assert client.reply() == {"error": f"{SERVICE}.MethodNotImplemented", "parameters": {"method": method}}
    client.call(f"{NAME}.Either", upgrade=False)
    assert client.reply() == {"parameters": {"number": 1}}


def test_all_replies_to_more_but_the_last_have_continues(client: RawClient) -> None:
    client.call(f"{NAME}.Count", {"to": 3}, more=True)
    assert [client.reply() for _ in range(3)] == [
        {"parameters": {"number": 0}, "continues": True},
        {"parameters": {"number": 1}, "continues": True},
        {"parameters": {"number": 2}},
    ]


def test_empty_stream_is_sent_as_an_empty_reply(client: RawClient) -> None:
    client.call(f"{NAME}.Count", {"to": 0}, more=True)
    assert client.reply() == {}


def test_an_error_ends_a_stream(client: RawClient) -> None:
    client.call(f"{NAME}.Count", {"to": 1, "fail": True}, more=True)
    assert client.reply() == {"parameters": {"number": 0}, "continues": True}
    assert client.reply() == {"error": f"{NAME}.Wanted", "parameters": {"why": "at the end"}}
    client.call(f"{NAME}.Refused", more=True)
    assert client.reply() == {"error": f"{SERVICE}.PermissionDenied"}
    client.call(f"{NAME}.Either", more=False)
    assert client.reply() == {"parameters": {"number": 1}}


def test_method_with_a_reply_and_a_stream(client: RawClient) -> None:
    client.call(f"{NAME}.Either")
    assert client.reply() == {"parameters": {"number": 1}}
    client.call(f"{NAME}.Either", more=True)
    assert client.reply() == {"parameters": {"number": 1}, "continues": True}
    assert client.reply() == {"parameters": {"number": 2}}


def test_more_on_a_method_without_a_stream_gets_its_reply(client: RawClient) -> None:
    client.call(f"{NAME}.Echo", {"text": "one"}, more=True)
    assert client.reply() == {"parameters": {"text": "one"}}


def test_pipelined_calls_are_answered_in_order(server: RunningServer, client: RawClient) -> None:
    calls = [json.dumps({"method": f"{NAME}.Sleep", "parameters": {"seconds": 0.1}}).encode()]
    calls += [
        json.dumps({"method": f"{NAME}.Echo", "parameters": {"text": str(number)}}).encode() for number in range(500)
    ]
    client.send(b"\0".join(calls) + b"\0")
    assert client.reply() == {"parameters": {"slept": 0.1}}
    assert [client.reply()["parameters"]["text"] for _ in range(500)] == [str(number) for number in range(500)]


def test_connections_are_served_concurrently(server: RunningServer, client: RawClient) -> None:
    client.call(f"{NAME}.Sleep", {"seconds": 60.0})
    assert is_serving(server.path)
    assert server.handlers.slept == []
    server.end_sleeps()


def test_client_that_shut_down_writing_gets_its_replies(server: RunningServer) -> None:
    with RawClient(server.path) as client:
        client.call(f"{NAME}.Sleep", {"seconds": 0.1})
        client.call(f"{NAME}.Count", {"to": 2, "pause": 0.1}, more=True)
        client.call(f"{NAME}.Echo", {"text": "last"})
        client.socket.shutdown(socket.SHUT_WR)
        assert client.reply() == {"parameters": {"slept": 0.1}}
        assert [client.reply()["parameters"]["number"] for _ in range(2)] == [0, 1]
        assert client.reply() == {"parameters": {"text": "last"}}
        with pytest.raises(EOFError):
            client.reply()


def test_stream_ends_when_its_client_disconnects(server: RunningServer) -> None:
    with RawClient(server.path) as client:
        client.call(f"{NAME}.Count", {"to": 2, "pause": 60.0}, more=True)
        wait_until(lambda: server.handlers.begun == 1)
        assert server.handlers.closed_streams == 0
    wait_until(lambda: server.handlers.closed_streams == 1)


def test_message_that_arrives_byte_by_byte_is_served(client: RawClient) -> None:
    for byte in b'{"method":"org.example.Test.Either"}\0':
        client.send(bytes([byte]))
    assert client.reply() == {"parameters": {"number": 1}}


def test_close_waits_for_the_running_call(server: RunningServer) -> None:
    with RawClient(server.path) as busy, RawClient(server.path) as idle, RawClient(server.path) as streaming:
        busy.call(f"{NAME}.Sleep", {"seconds": 60.0})
        busy.call(f"{NAME}.Echo", {"text": "never started"})
        streaming.call(f"{NAME}.Count", {"to": 9, "pause": 60.0}, more=True)
        wait_until(lambda: server.handlers.begun == 2)
        closing = threading.Thread(target=server.close, kwargs={"grace_s": 60.0})
        closing.start()
        assert idle.is_closed()
        assert streaming.is_closed()
        server.end_sleeps()
        assert busy.reply() == {"parameters": {"slept": 60.0}}
        assert busy.is_closed()
        closing.join()
    assert server.handlers.echoed == []
    assert server.handlers.closed_streams == 1


def test_close_cancels_a_call_that_does_not_finish(server: RunningServer) -> None:
    with RawClient(server.path) as client:
        client.call(f"{NAME}.Sleep", {"seconds": 60.0})
        wait_until(lambda: server.handlers.begun == 1)
        assert server.close(grace_s=0.1) < 30
        assert client.is_closed()
    assert server.handlers.slept == []


def test_message_takes_no_memory_while_its_call_runs(server: RunningServer) -> None:
    """The states of many containers wait for the turn of their hooks."""
    message = b'{"method":"%b.Sleep","parameters":{%b"seconds":60}}\0' % (NAME.encode(), b" " * 1_500_000)
    with RawClient(server.path) as client:
        tracemalloc.start()
        try:
            client.send(message)
            wait_until(lambda: server.handlers.begun == 1)
            assert tracemalloc.get_traced_memory()[0] < len(message) / 2
        finally:
            tracemalloc.stop()
        server.close(grace_s=0.1)


def test_server_listens_on_several_sockets(tmp_path: Path) -> None:
    from resctrlmond.api.sockets import listen

    with running(str(tmp_path / "first")) as server:
        second = listen(str(tmp_path / "second"))
        asyncio.run_coroutine_threadsafe(server.server.start(second), server.loop).result(60)
        assert is_serving(str(tmp_path / "first"))
        assert is_serving(str(tmp_path / "second"))


def test_tcp_socket_is_refused() -> None:
    server = Server([], vendor="", product="", version="", url="")
    with socket.create_server(("127.0.0.1", 0)) as tcp, pytest.raises(ValueError, match="unix stream socket"):
        asyncio.run(server.start(tcp))
    with socket.socket(socket.AF_UNIX) as unbound, pytest.raises(ValueError, match="does not listen"):
        asyncio.run(server.start(unbound))


def test_methods_that_accept_unknown_fields_are_refused() -> None:
    class Parameters(msgspec.Struct):
        pid: int

    async def handler(parameters: Any, peer: Any) -> None:
        pass

    with pytest.raises(TypeError, match="forbid_unknown_fields"):
        Interface("a.b", "", {"C": Method(Parameters, handler)})
    with pytest.raises(TypeError, match="handler"):
        Method(Echo)  # type: ignore[call-arg]  # the error that the test expects
