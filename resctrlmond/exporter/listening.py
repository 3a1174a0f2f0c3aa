# SPDX-License-Identifier: Apache-2.0
"""The addresses on which the exporter listens: a port of a host, or a unix socket."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from resctrlmond.api import sockets

# The list of default ports of the Prometheus project has no free one from 9100 to 9999, and continues from 10000.
PORT = 10133
DEFAULT = f"127.0.0.1:{PORT}"


@dataclass(frozen=True, slots=True)
class Address:
    """The path of a unix socket, or else a host, by name or number, and a port."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        """Return the address as ``parse`` accepts it."""
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


def parse(text: str) -> Address:
    """Return the address of "/PATH", "HOST:PORT" or "[HOST]:PORT". Raises ValueError."""
    if text.startswith("/"):
        return Address(path=text)
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is neither HOST:PORT nor the absolute path of a socket")
    return Address(host=host, port=int(port))


def listen(address: Address) -> socket.socket:
    """Return a socket that listens there. Raises OSError that names the address."""
    try:
        if address.path:
            return sockets.listen(address.path)
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, where = found[0]
        # A link-local address of IPv6 has its interface in the last of four parts.
        return socket.create_server(where, family=family)
    except OSError as error:
        # create_server() puts the address into the text of the error; a failed look-up has a negative number.
        is_errno = not address.path and (error.errno or 0) > 0
        why = os.strerror(error.errno or 0) if is_errno else error.strerror
        raise OSError(f"cannot listen on {address}: {why}. Choose another address with --listen") from error
