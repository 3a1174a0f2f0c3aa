# SPDX-License-Identifier: Apache-2.0
"""Offer the varlink interfaces: the verbs as org.resctrlmon.Manager and org.resctrlmon.Hook; io.systemd.Metrics."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from resctrlmond import __version__
from resctrlmond.api import definitions
from resctrlmond.api.access import Caller
from resctrlmond.api.varlink import metrics
from resctrlmond.api.varlink.messages import EXPECTED_MORE
from resctrlmond.api.varlink.server import Interface, Method, Server, VarlinkError
from resctrlmond.api.verbs import HOOK, MANAGER, VERBS, Service, Verb
from resctrlmond.api.workers import Lane

URL = "https://github.com/resctrlmon/resctrlmond"


def description(interface: str) -> str:
    """Return the description of an interface in varlink's interface definition language."""
    return definitions.read(f"{interface}.varlink")


def server(service: Service) -> Server:
    """Return a varlink server with all interfaces. The caller starts it with listening sockets."""
    interfaces = [
        Interface(
            name=interface,
            description=description(interface),
            methods={verb.name: _method(service, verb) for verb in VERBS.values() if verb.interface == interface},
        )
        for interface in (MANAGER, HOOK)
    ]
    return Server(
        [*interfaces, metrics.interface(service)],
        vendor="resctrlmond",
        product="resctrlmond",
        version=__version__,
        url=URL,
        budget=service.budget,
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
        queue=service.hooks.call if verb.lane is Lane.HOOKS else None,
    )


async def _expect_more(_parameters: Any, _caller: Caller) -> NoReturn:
    raise VarlinkError(EXPECTED_MORE)
