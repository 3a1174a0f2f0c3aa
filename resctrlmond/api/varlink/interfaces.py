# SPDX-License-Identifier: Apache-2.0
"""Offer the varlink interfaces: the verbs as org.resctrlmon.Manager, Hook and Unit; io.systemd.Metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from resctrlmond import __version__
from resctrlmond.api import definitions
from resctrlmond.api.access import Access, Caller
from resctrlmond.api.service import Service
from resctrlmond.api.signatures import HOOK, MANAGER, UNIT
from resctrlmond.api.types import NoParameters
from resctrlmond.api.varlink import metrics
from resctrlmond.api.varlink.messages import EXPECTED_MORE
from resctrlmond.api.varlink.server import Interface, Limits, Method, Server, VarlinkError
from resctrlmond.api.verbs import VERBS, Verb
from resctrlmond.api.workers import Lane

URL = "https://github.com/resctrlmon/resctrlmond"


def description(interface: str) -> str:
    """Return the description of an interface in varlink's interface definition language."""
    return definitions.read(f"{interface}.varlink")


# Seconds between two notices; resctrlmon-unit-exec waits 2 s for the next one.
_NOTICE_S = 0.5
# Any user may connect to the socket of org.resctrlmon.Unit. The program sends its short call at once, and few
# services of one user start at the same time.
_UNIT_LIMITS = Limits(
    message_bytes=4096,
    message_bytes_of_others=4096,
    connections=512,
    connections_per_uid=16,
    reserved_for_root=256,
    connections_per_process=16,
    idle_s=1.0,
    receive_timeout_s=2.0,
    send_timeout_s=2.0,
)


def server(service: Service) -> Server:
    """Return a varlink server with all interfaces but Unit. The caller starts it with listening sockets."""
    return _server(service, (MANAGER, HOOK), [metrics.interface(service)])


def unit_server(service: Service) -> Server:
    """Return a varlink server with the interface Unit, for a socket to which every user may connect."""
    return _server(service, (UNIT,), limits=_UNIT_LIMITS, holds_all=True)


def _server(
    service: Service,
    names: tuple[str, ...],
    others: Iterable[Interface] = (),
    *,
    limits: Limits | None = None,
    holds_all: bool = False,
) -> Server:
    interfaces = [
        Interface(
            name=interface,
            description=description(interface),
            methods={verb.name: _method(service, verb) for verb in VERBS.values() if verb.interface == interface},
        )
        for interface in names
    ]
    return Server(
        [*interfaces, *others],
        vendor="resctrlmond",
        product="resctrlmond",
        version=__version__,
        url=URL,
        budget=service.budget,
        limits=limits,
        holds_all=holds_all,
    )


def _method(service: Service, verb: Verb) -> Method[Any]:
    stream = service.follow if verb.follow else service.stream if verb.pages else None
    return Method(
        verb.request,
        handler=_expect_more if verb.follow else partial(service.call, verb),
        stream=partial(stream, verb) if stream else None,
        is_endless=verb.follow is not None,
        check=partial(service.policy.check, access=verb.access, verb=verb.name),
        reply_bytes=verb.reply_bytes,
        queue=service.hooks.call if verb.lane is Lane.HOOKS else _notified if verb.access is Access.SELF else None,
    )


class _Notified:
    """A call that begins at once. Its caller gets notices until the reply, and waits only for the next one."""

    @contextlib.asynccontextmanager
    async def begun(self, announce: Callable[[Any], None]) -> AsyncIterator[None]:
        async def notify() -> None:
            while True:
                announce(NoParameters())
                await asyncio.sleep(_NOTICE_S)

        notices = asyncio.create_task(notify())
        try:
            yield
        finally:
            notices.cancel()


def _notified(_parameters: Any, _caller: Caller) -> _Notified:
    return _Notified()


async def _expect_more(_parameters: Any, _caller: Caller) -> NoReturn:
    raise VarlinkError(EXPECTED_MORE)
