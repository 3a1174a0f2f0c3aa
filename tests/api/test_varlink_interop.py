# SPDX-License-Identifier: Apache-2.0
"""The client of asyncvarlink, another implementation of the protocol, can call the server."""

# Without "from __future__ import annotations", because asyncvarlink evaluates the annotations.
import asyncio
from collections.abc import AsyncIterator
from typing import TypedDict

import asyncvarlink
import pytest
from asyncvarlink.serviceinterface import VarlinkServiceInterface

from tests.api.varlink_server import NAME, RunningServer


class Number(TypedDict):
    number: int


class Interface(asyncvarlink.VarlinkInterface, name=NAME):
    """The interface for tests, declared for asyncvarlink; only the signatures are used."""

    @asyncvarlink.varlinkmethod(return_parameter="text")
    def Echo(self, *, text: str) -> str:  # noqa: N802
        raise NotImplementedError

    @asyncvarlink.varlinkmethod
    def Fail(self, *, how: str) -> None:  # noqa: N802
        raise NotImplementedError

    @asyncvarlink.varlinkmethod
    async def Count(self, *, to: int) -> AsyncIterator[Number]:  # noqa: N802
        raise NotImplementedError
        yield


async def call_each_method(path: str) -> None:
    transport, protocol = await asyncvarlink.connect_unix_varlink(asyncvarlink.VarlinkClientProtocol, path)
    service = protocol.make_proxy(VarlinkServiceInterface)
    info = await service.GetInfo()
    assert info["interfaces"] == ["org.varlink.service", NAME]
    described = await service.GetInterfaceDescription(interface=NAME)
    assert "method Echo" in described["description"]
    with pytest.raises(asyncvarlink.serviceerrors.InterfaceNotFound):
        await service.GetInterfaceDescription(interface="org.example.Other")
    proxy = protocol.make_proxy(Interface)
    assert await proxy.Echo(text="größer") == {"text": "größer"}
    await proxy.Echo.oneway(text="quiet")
    assert [reply["number"] async for reply in proxy.Count(to=3)] == [0, 1, 2]
    with pytest.raises(asyncvarlink.VarlinkErrorReply) as caught:
        await proxy.Fail(how="wanted")
    assert caught.value.name == f"{NAME}.Wanted"
    transport.close()
    await asyncio.sleep(0)


def test_client_of_asyncvarlink_can_call_each_method(server: RunningServer) -> None:
    asyncio.run(call_each_method(server.path))
    assert server.handlers.echoed == ["größer", "quiet"]
