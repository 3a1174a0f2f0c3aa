# SPDX-License-Identifier: Apache-2.0
"""Offer the verbs as the varlink interfaces org.resctrlmon.Manager and org.resctrlmon.Hook."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from importlib import resources
from typing import Any

import msgspec

from resctrlmond import __version__
from resctrlmond.api.access import Caller
from resctrlmond.api.errors import name_of, parameters
from resctrlmond.api.varlink.server import Interface, Method, Peer, Server, VarlinkError
from resctrlmond.api.verbs import HOOK, MANAGER, VERBS, Service, Verb
from resctrlmond.resctrl.errors import ResctrlError

URL = "https://github.com/resctrlmon/resctrlmond"


def description(interface: str) -> str:
    """Return the description of an interface in varlink's interface definition language."""
    return resources.files("resctrlmond.api").joinpath(f"{interface}.varlink").read_text(encoding="utf-8")


def server(service: Service) -> Server:
    """Return a varlink server with both interfaces. The caller starts it with a listening socket."""
    interfaces = [
        Interface(
            name=interface,
            description=description(interface),
            methods={
                verb.name: Method(
                    verb.request,
                    _verb(service, verb.name),
                    _stream(service, verb.name) if verb.pages else None,
                    _check(service, verb),
                    verb.reply_bytes,
                )
                for verb in VERBS.values()
                if verb.interface == interface
            },
        )
        for interface in (MANAGER, HOOK)
    ]
    return Server(
        interfaces,
        vendor="resctrlmond",
        product="resctrlmond",
        version=__version__,
        url=URL,
        budget=service.budget,
    )


def _check(service: Service, verb: Verb) -> Callable[[Peer], None]:
    def check(peer: Peer) -> None:
        try:
            service.policy.check(caller_of(peer), verb.access, verb.name)
        except ResctrlError as error:
            raise reply_of(error) from error

    return check


def _verb(service: Service, name: str) -> Callable[[Any, Peer], Awaitable[msgspec.Struct]]:
    async def call(request: Any, peer: Peer) -> msgspec.Struct:
        try:
            return await service.call(name, request, caller_of(peer))
        except ResctrlError as error:
            raise reply_of(error) from error

    return call


def _stream(service: Service, name: str) -> Callable[[Any, Peer], AsyncGenerator[msgspec.Struct, None]]:
    async def stream(_request: Any, peer: Peer) -> AsyncGenerator[msgspec.Struct, None]:
        try:
            async for page in service.stream(name, caller_of(peer)):
                yield page
        except ResctrlError as error:
            raise reply_of(error) from error

    return stream


def caller_of(peer: Peer) -> Caller:
    """Return the caller with the credentials of the connection."""
    return Caller(
        uid=peer.uid,
        gid=peer.gid,
        groups=peer.groups | {peer.gid},
        pid=peer.pid,
        pid_namespaces=peer.pid_namespaces,
        descriptors=peer.descriptors,
        waits=peer.presence.waits,
    )


def reply_of(error: ResctrlError) -> VarlinkError:
    """Return the error reply for an error of the manager."""
    return VarlinkError(name_of(error).varlink, parameters(error))
