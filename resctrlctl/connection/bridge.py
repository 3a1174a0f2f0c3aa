# SPDX-License-Identifier: Apache-2.0
"""``resctrlctl bridge [SOCKET]``: connect standard input and output to the daemon's socket, for ``--host``.

The first line on standard output is the greeting: a JSON object with the name of this host, or with an error and the
exit status of resctrlctl for it. All other bytes are those of the varlink connection.
"""

from __future__ import annotations

import json
import os
import socket
import threading

from resctrlctl.base.defaults import GREETING, SOCKET
from resctrlctl.base.errors import OK, PROGRAM, CommandError, print_error
from resctrlctl.connection.daemon import TIMEOUT_S, connected
from resctrlmond import __version__
from resctrlmond.api.exit_codes import USAGE

_BYTES = 65536


def bridge(arguments: list[str]) -> int:
    """Copy in both directions until one end closes; return the exit status."""
    if len(arguments) > 1 or any(word.startswith("-") for word in arguments):
        print_error(f"bridge: the only argument is the path of the socket. See: man {PROGRAM}")
        return USAGE
    path = arguments[0] if arguments else os.environ.get("RESCTRLMOND_SOCKET") or SOCKET
    try:
        connection = connected(path, TIMEOUT_S)
    except CommandError as error:
        _greet({"error": str(error), "status": error.status})
        return error.status
    _greet({"version": __version__, "host": os.uname().nodename})
    # The process ends with the first direction that ends, so neither waits for the other.
    threading.Thread(target=_send, args=(connection,), name="sender", daemon=True).start()
    while data := connection.recv(_BYTES):
        _write(data)
    return OK


def _send(connection: socket.socket) -> None:
    """Copy standard input to the daemon. At its end, the caller has gone: end the process, and so the connection."""
    try:
        while data := os.read(0, _BYTES):
            connection.sendall(data)
    finally:
        os._exit(OK)


def _greet(greeting: dict[str, object]) -> None:
    _write(GREETING + json.dumps(greeting).encode() + b"\n")


def _write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]
