# SPDX-License-Identifier: Apache-2.0
"""The client of asyncvarlink, another implementation of the protocol, gets on with the server."""

# No annotations from __future__: asyncvarlink reads them as they are.
import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TypedDict

import asyncvarlink
import pytest
from asyncvarlink.serviceinterface import VarlinkServiceInterface

from tests.api.varlink_lab import NAME, RunningServer, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running(str(tmp_path / "socket")) as server:
        yield server


class Number(TypedDict):
    number: int


class Lab(asyncvarlink.VarlinkInterface, name=NAME):
    """The test interface as asyncvarlink declares one; only the signatures matter."""

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


async def converse(path: str) -> None:
    transport, protocol = await asyncvarlink.connect_unix_varlink(asyncvarlink.VarlinkClientProtocol, path)
    service = protocol.make_proxy(VarlinkServiceInterface)
    info = await service.GetInfo()
    assert info["interfaces"] == ["org.varlink.service", NAME]
    described = await service.GetInterfaceDescription(interface=NAME)
    assert "method Echo" in described["description"]
    with pytest.raises(asyncvarlink.serviceerrors.InterfaceNotFound):
        await service.GetInterfaceDescription(interface="org.example.Other")
    lab = protocol.make_proxy(Lab)
    assert await lab.Echo(text="größer") == {"text": "größer"}
    await lab.Echo.oneway(text="quiet")
    assert [reply["number"] async for reply in lab.Count(to=3)] == [0, 1, 2]
    with pytest.raises(asyncvarlink.VarlinkErrorReply) as caught:
        await lab.Fail(how="wanted")
    assert caught.value.name == f"{NAME}.Wanted"
    transport.close()
    await asyncio.sleep(0)


def test_asyncvarlink_calls_us(server: RunningServer) -> None:
    asyncio.run(converse(server.path))
    assert server.lab.echoed == ["größer", "quiet"]
