# SPDX-License-Identifier: Apache-2.0
"""The varlink server speaks the protocol: calls, errors, introspection, more, oneway, order."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resctrlmond.api.varlink.server import Interface, Server
from resctrlmond.api.varlink.service import Method
from tests.api.varlink_lab import DESCRIPTION, NAME, Echo, RunningServer, Wire, running, works
from tests.wait import wait_until

SERVICE = "org.varlink.service"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running(str(tmp_path / "socket")) as server:
        yield server


@pytest.fixture
def wire(server: RunningServer) -> Iterator[Wire]:
    with Wire(server.path) as wire:
        yield wire


def test_call_and_reply(wire: Wire) -> None:
    wire.call(f"{NAME}.Echo", {"text": "größer\u0000", "someNumber": 1, "nested": {"a": {"number": 2}}})
    assert wire.reply() == {"parameters": {"text": "größer\u0000"}}


@pytest.mark.parametrize(
    "envelope", ["", ',"parameters":null', ',"parameters":{}', ',"parameters": null ,"more":null']
)
def test_parameters_may_be_omitted_null_or_empty(wire: Wire, envelope: str) -> None:
    wire.send(b'{"method":"org.example.Lab.Either"%s}\0' % envelope.encode())
    assert wire.reply() == {"parameters": {"number": 1}}


def test_an_empty_reply_has_no_parameters(wire: Wire) -> None:
    wire.call(f"{NAME}.Fail", {"how": "not"})
    assert wire.reply() == {}


def test_get_info(wire: Wire) -> None:
    wire.call(f"{SERVICE}.GetInfo")
    assert wire.reply()["parameters"] == {
        "vendor": "Example",
        "product": "lab",
        "version": "1",
        "url": "https://example.org",
        "interfaces": [SERVICE, NAME],
    }


def test_get_interface_description(wire: Wire) -> None:
    wire.call(f"{SERVICE}.GetInterfaceDescription", {"interface": NAME})
    assert wire.reply()["parameters"] == {"description": DESCRIPTION}
    wire.call(f"{SERVICE}.GetInterfaceDescription", {"interface": SERVICE})
    assert "interface org.varlink.service" in wire.reply()["parameters"]["description"]
    wire.call(f"{SERVICE}.GetInterfaceDescription", {"interface": "org.example.Other"})
    assert wire.reply() == {
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
def test_unknown_method_and_interface(wire: Wire, method: str, error: str, parameters: Any) -> None:
    wire.call(method)
    assert wire.reply() == {"error": f"{SERVICE}.{error}", "parameters": parameters}


@pytest.mark.parametrize(
    ("parameters", "at_fault"),
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
def test_invalid_parameter_is_named(wire: Wire, parameters: Any, at_fault: str) -> None:
    wire.call(f"{NAME}.Echo", parameters)
    assert wire.reply() == {"error": f"{SERVICE}.InvalidParameter", "parameters": {"parameter": at_fault}}
    wire.call(f"{NAME}.Echo", {"text": "the connection lives"})
    assert wire.reply() == {"parameters": {"text": "the connection lives"}}


def test_typed_errors(wire: Wire) -> None:
    wire.call(f"{NAME}.Fail", {"how": "wanted"})
    assert wire.reply() == {"error": f"{NAME}.Wanted", "parameters": {"why": "asked for"}}
    wire.call(f"{NAME}.Fail", {"how": "bare"})
    assert wire.reply() == {"error": f"{NAME}.Wanted"}


@pytest.mark.parametrize(
    "how", ["unexpected", "exhausted", "cancelled", "surrogate", "error-surrogate", "disconnect"]
)
def test_unexpected_failure_is_logged_not_leaked(wire: Wire, caplog: pytest.LogCaptureFixture, how: str) -> None:
    wire.call(f"{NAME}.Fail", {"how": how})
    assert wire.reply() == {"error": f"{NAME}.InternalError"}
    record = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert record.getMessage().startswith(f"{NAME}.Fail failed for process ")
    assert record.exc_info is not None
    wire.call(f"{NAME}.Echo", {"text": "the connection lives"})
    assert wire.reply() == {"parameters": {"text": "the connection lives"}}


def test_oneway_has_no_reply_not_even_an_error(server: RunningServer, wire: Wire) -> None:
    wire.call(f"{NAME}.Echo", {"text": "quiet"}, oneway=True)
    wire.call(f"{NAME}.Fail", {"how": "wanted"}, oneway=True)
    wire.call(f"{NAME}.Echo", {}, oneway=True)
    wire.call(f"{NAME}.Missing", oneway=True)
    wire.call(f"{NAME}.Count", {"to": 3}, oneway=True)
    wire.call(f"{NAME}.Echo", {"text": "loud"})
    assert wire.reply() == {"parameters": {"text": "loud"}}
    assert server.lab.echoed == ["quiet", "loud"]


def test_oneway_is_served_though_the_client_left_at_once(server: RunningServer) -> None:
    with Wire(server.path) as wire:
        wire.call(f"{NAME}.Sleep", {"seconds": 0.05}, oneway=True)
        wire.call(f"{NAME}.Echo", {"text": "left behind"}, oneway=True)
    wait_until(lambda: server.lab.echoed == ["left behind"])


def test_oneway_with_more_is_cut(wire: Wire) -> None:
    wire.call(f"{NAME}.Count", {"to": 1}, oneway=True, more=True)
    assert wire.is_cut()


def test_upgrade_is_refused(wire: Wire) -> None:
    wire.call(f"{NAME}.Either", upgrade=True)
    method = f"{NAME}.Either"
    assert wire.reply() == {"error": f"{SERVICE}.MethodNotImplemented", "parameters": {"method": method}}
    wire.call(f"{NAME}.Either", upgrade=False)
    assert wire.reply() == {"parameters": {"number": 1}}


def test_more_marks_all_but_the_last_reply(wire: Wire) -> None:
    wire.call(f"{NAME}.Count", {"to": 3}, more=True)
    assert [wire.reply() for _ in range(3)] == [
        {"parameters": {"number": 0}, "continues": True},
        {"parameters": {"number": 1}, "continues": True},
        {"parameters": {"number": 2}},
    ]


def test_an_empty_stream_is_one_empty_reply(wire: Wire) -> None:
    wire.call(f"{NAME}.Count", {"to": 0}, more=True)
    assert wire.reply() == {}


def test_an_error_ends_a_stream(wire: Wire) -> None:
    wire.call(f"{NAME}.Count", {"to": 1, "fail": True}, more=True)
    assert wire.reply() == {"parameters": {"number": 0}, "continues": True}
    assert wire.reply() == {"error": f"{NAME}.Wanted", "parameters": {"why": "at the end"}}
    wire.call(f"{NAME}.Refused", more=True)
    assert wire.reply() == {"error": f"{SERVICE}.PermissionDenied"}
    wire.call(f"{NAME}.Either", more=False)
    assert wire.reply() == {"parameters": {"number": 1}}


def test_one_method_with_a_reply_and_a_stream(wire: Wire) -> None:
    wire.call(f"{NAME}.Either")
    assert wire.reply() == {"parameters": {"number": 1}}
    wire.call(f"{NAME}.Either", more=True)
    assert wire.reply() == {"parameters": {"number": 1}, "continues": True}
    assert wire.reply() == {"parameters": {"number": 2}}


def test_more_on_a_method_with_one_reply(wire: Wire) -> None:
    wire.call(f"{NAME}.Echo", {"text": "one"}, more=True)
    assert wire.reply() == {"parameters": {"text": "one"}}


def test_pipelined_calls_are_answered_in_order(server: RunningServer, wire: Wire) -> None:
    calls = [json.dumps({"method": f"{NAME}.Sleep", "parameters": {"seconds": 0.1}}).encode()]
    calls += [
        json.dumps({"method": f"{NAME}.Echo", "parameters": {"text": str(number)}}).encode() for number in range(500)
    ]
    wire.send(b"\0".join(calls) + b"\0")
    assert wire.reply() == {"parameters": {"slept": 0.1}}
    assert [wire.reply()["parameters"]["text"] for _ in range(500)] == [str(number) for number in range(500)]


def test_connections_are_served_concurrently(server: RunningServer, wire: Wire) -> None:
    wire.call(f"{NAME}.Sleep", {"seconds": 1.0})
    assert works(server.path)
    assert server.lab.slept == []


def test_half_close_still_gets_its_replies(server: RunningServer) -> None:
    with Wire(server.path) as wire:
        wire.call(f"{NAME}.Sleep", {"seconds": 0.1})
        wire.call(f"{NAME}.Count", {"to": 2, "pause": 0.1}, more=True)
        wire.call(f"{NAME}.Echo", {"text": "last"})
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.reply() == {"parameters": {"slept": 0.1}}
        assert [wire.reply()["parameters"]["number"] for _ in range(2)] == [0, 1]
        assert wire.reply() == {"parameters": {"text": "last"}}
        with pytest.raises(EOFError):
            wire.reply()


def test_a_stream_ends_when_its_client_goes_away(server: RunningServer) -> None:
    with Wire(server.path) as wire:
        wire.call(f"{NAME}.Count", {"to": 2, "pause": 60.0}, more=True)
        time.sleep(0.1)
        assert server.lab.closed_streams == 0
    wait_until(lambda: server.lab.closed_streams == 1)


def test_messages_may_arrive_byte_by_byte(wire: Wire) -> None:
    for byte in b'{"method":"org.example.Lab.Either"}\0':
        wire.send(bytes([byte]))
    assert wire.reply() == {"parameters": {"number": 1}}


def test_close_finishes_the_call_in_flight(server: RunningServer) -> None:
    with Wire(server.path) as busy, Wire(server.path) as idle, Wire(server.path) as watcher:
        busy.call(f"{NAME}.Sleep", {"seconds": 0.5})
        busy.call(f"{NAME}.Echo", {"text": "never begun"})
        watcher.call(f"{NAME}.Count", {"to": 9, "pause": 60.0}, more=True)
        time.sleep(0.2)
        took = server.close()
        assert busy.reply() == {"parameters": {"slept": 0.5}}
        assert busy.is_cut()
        assert idle.is_cut()
        assert watcher.is_cut()
        assert took < 3
    assert server.lab.echoed == []
    assert server.lab.closed_streams == 1


def test_close_cuts_what_does_not_finish(server: RunningServer) -> None:
    with Wire(server.path) as wire:
        wire.call(f"{NAME}.Sleep", {"seconds": 60.0})
        time.sleep(0.2)
        assert server.close(grace_s=0.1) < 3
        assert wire.is_cut()
    assert server.lab.slept == []


def test_several_sockets(tmp_path: Path) -> None:
    from resctrlmond.api.sockets import listen

    with running(str(tmp_path / "one")) as server:
        second = listen(str(tmp_path / "two"))
        asyncio.run_coroutine_threadsafe(server.server.start(second), server.loop).result(5)
        assert works(str(tmp_path / "one"))
        assert works(str(tmp_path / "two"))


def test_a_tcp_socket_is_refused() -> None:
    server = Server([], vendor="", product="", version="", url="")
    with socket.create_server(("127.0.0.1", 0)) as tcp, pytest.raises(ValueError, match="unix stream socket"):
        asyncio.run(server.start(tcp))
    with socket.socket(socket.AF_UNIX) as quiet, pytest.raises(ValueError, match="does not listen"):
        asyncio.run(server.start(quiet))


def test_methods_that_would_let_unknown_fields_pass_are_refused() -> None:
    class Loose(msgspec.Struct):
        pid: int

    async def handler(parameters: Any, peer: Any) -> None:
        pass

    with pytest.raises(TypeError, match="forbid_unknown_fields"):
        Interface("a.b", "", {"C": Method(Loose, handler)})
    with pytest.raises(TypeError, match="handler"):
        Method(Echo)
