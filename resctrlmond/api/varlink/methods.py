# SPDX-License-Identifier: Apache-2.0
"""The declaration of varlink interfaces and methods, and the interface that describes them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from resctrlmond.api.access import Caller
from resctrlmond.api.varlink import messages as wire
from resctrlmond.api.varlink.frames import VarlinkError

P = TypeVar("P", bound=msgspec.Struct)

_SERVICE_DESCRIPTION = """\
# The description that every varlink service gives of itself.
interface org.varlink.service

# The vendor, product and version of the service, and the names of its interfaces.
method GetInfo() -> (
  vendor: string,
  product: string,
  version: string,
  url: string,
  interfaces: []string
)

# The description of one interface, as a varlink interface definition.
method GetInterfaceDescription(interface: string) -> (description: string)

# The service has no such interface.
error InterfaceNotFound (interface: string)

# The interface has no such method.
error MethodNotFound (method: string)

# The method is described, but this service does not offer it.
error MethodNotImplemented (method: string)

# The parameter is unknown, missing, of the wrong type or out of bounds.
error InvalidParameter (parameter: string)

# The caller may not do this.
error PermissionDenied ()

# The method answers with several replies: call it with "more".
error ExpectedMore ()
"""


class Queued(Protocol):
    """A call that may have to wait for other calls before its handler begins."""

    def begun(self, announce: Callable[[Any], None]) -> AbstractAsyncContextManager[None]:
        """Wait until the handler may begin. It has ended when the context ends.

        ``announce`` sends a reply, with ``continues``, to a call with ``more``.
        """


class Method(msgspec.Struct, Generic[P], frozen=True):
    """A method: the type of its parameters and its handler.

    ``parameters`` is a struct that forbids unknown fields. ``check`` fails if the caller may not call the method; it
    runs before the parameters are decoded. ``handler`` returns the reply (None: no fields). ``stream``, if there is
    one, handles calls with ``more``: each item is a reply, and all but the last have ``continues``; with
    ``is_endless`` all have it, and each is sent at once. The server closes a stream when the client closes the
    connection, and when the server stops. All three raise VarlinkError or ResctrlError for an error reply. ``queue``
    returns the place of a call in a queue, None if it begins at once; a server that stops closes the connections of
    calls that wait there. ``reply_bytes`` are reserved in the server's budget before the call, until the client has
    read the reply.
    """

    parameters: type[P]
    handler: Callable[[P, Caller], Awaitable[msgspec.Struct | None]]
    stream: Callable[[P, Caller], AsyncGenerator[msgspec.Struct, None]] | None = None
    is_endless: bool = False
    check: Callable[[Caller], None] | None = None
    reply_bytes: int = 0
    queue: Callable[[P, Caller], Queued | None] | None = None

    def __post_init__(self) -> None:
        if not self.parameters.__struct_config__.forbid_unknown_fields:
            raise TypeError(f"{self.parameters.__name__} must be declared with forbid_unknown_fields=True")


class Interface(msgspec.Struct, frozen=True):
    """An interface: its full name, its description (the text of its ``.varlink`` file) and its methods by name."""

    name: str
    description: str
    methods: Mapping[str, Method[Any]]


class Info(msgspec.Struct, frozen=True):
    """The reply of GetInfo."""

    vendor: str
    product: str
    version: str
    url: str
    interfaces: list[str]


class _NoParameters(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _InterfaceName(msgspec.Struct, forbid_unknown_fields=True):
    interface: str


class _Description(msgspec.Struct):
    description: str


def with_service(
    interfaces: Iterable[Interface], *, vendor: str, product: str, version: str, url: str
) -> dict[str, Interface]:
    """Return the interfaces by name, with ``org.varlink.service``, which describes them and itself."""
    described: dict[str, Interface] = {}

    async def get_info(_parameters: _NoParameters, _caller: Caller) -> Info:
        return Info(vendor, product, version, url, list(described))

    async def get_interface_description(parameters: _InterfaceName, _caller: Caller) -> _Description:
        if parameters.interface not in described:
            raise VarlinkError(wire.INTERFACE_NOT_FOUND, {"interface": parameters.interface})
        return _Description(described[parameters.interface].description)

    methods: dict[str, Method[Any]] = {
        "GetInfo": Method(_NoParameters, get_info),
        "GetInterfaceDescription": Method(_InterfaceName, get_interface_description),
    }
    for interface in (Interface(wire.SERVICE, _SERVICE_DESCRIPTION, methods), *interfaces):
        described[interface.name] = interface
    return described
