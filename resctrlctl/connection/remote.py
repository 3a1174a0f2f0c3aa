# SPDX-License-Identifier: Apache-2.0
"""The daemon of another host, over ssh(1): the option ``--host``.

``ssh HOST resctrlctl bridge`` connects its standard input and output to the socket of the daemon there, as
systemd-stdio-bridge(1) does for ``systemctl --host``. So sshd needs no permission to forward sockets, and each option
of the user's ssh_config(5) applies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec

from resctrlctl.base.defaults import GREETING, SOCKET
from resctrlctl.base.errors import CommandError, RemoteError
from resctrlmond.api.exit_codes import FAILURE, USAGE
from resctrlmond.client import Client, ProtocolError, VarlinkError

# Text that the shell of the other host may print before the greeting of the bridge.
_MAX_GREETING_BYTES = 65536
# How long ssh may take to end when its input has ended.
_END_S = 2.0
# ssh joins the words of the command with spaces, and the shell of the other host parses them. No shell changes
# these characters.
_PLAIN = re.compile(r"/[A-Za-z0-9_./+:,@-]*", re.ASCII)
# A port after a name, an IPv4 address, or an IPv6 address in brackets; a single IPv6 address has more colons.
_WITH_PORT = re.compile(r"(?P<host>[^:\[\]]+|(?:[^@\[\]]*@)?\[[^\[\]]+\])(?::(?P<port>[0-9]+))?", re.ASCII)
_NOT_FOUND = 127
_SSH_FAILED = 255


class Remote:
    """The daemon of another host; a context manager that connects at its start and disconnects at its end.

    ``host`` is [USER@]HOST[:PORT], ``socket`` the path of the daemon's socket there. A connection is kept for the
    next call. The first ``connections`` are opened at once, because ssh may ask for a password. Raises CommandError.
    """

    def __init__(self, host: str, socket: str = SOCKET, connections: int = 1) -> None:
        if not _PLAIN.fullmatch(socket):
            raise CommandError(
                f"argument --socket: with --host, the path of the socket begins with / and has only letters, digits "
                f"and the characters _ . / + : , @ -, because a shell on the other host parses it; not {socket!r}",
                USAGE,
            )
        self.host = host
        # The name that the host has for itself.
        self.node_name = host
        command = ["resctrlctl", "bridge", *([socket] if socket != SOCKET else [])]
        self._command = [*ssh_command(host), *command]
        self._connections = connections
        self._idle: list[_RemoteClient] = []

    def __str__(self) -> str:
        return self.host

    def __enter__(self) -> Self:
        try:
            for _ in range(self._connections):
                self._idle.append(self._open())
        except RemoteError as error:
            self.disconnect()
            raise CommandError(f"cannot connect to {self.host}: {error}", error.status) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disconnect()

    @contextlib.contextmanager
    def client(self, timeout_s: float) -> Iterator[Client]:
        """Yield a client that no other thread uses; keep its connection for the next call if it is still usable.

        Raises RemoteError if the connection cannot be opened, or ends before the reply because ssh has failed.
        """
        client = self._take_idle() or self._open()
        client.set_timeout(timeout_s)
        try:
            yield client
        except VarlinkError:
            self._keep(client)
            raise
        except BaseException as error:
            client.close()
            # Without a failure of ssh, the daemon has closed the connection.
            if isinstance(error, ConnectionError) and not isinstance(error, ProtocolError) and client.status:
                raise RemoteError(f"{_reason(client.status)} before the reply", FAILURE) from error
            raise
        else:
            self._keep(client)

    def disconnect(self) -> None:
        """End the connections that are not in use; the next call opens a new one."""
        while self._idle:
            self._idle.pop().close()

    def _keep(self, client: _RemoteClient) -> None:
        if client.is_connected:
            self._idle.append(client)
        else:
            client.close()

    def _take_idle(self) -> _RemoteClient | None:
        while self._idle:
            client = self._idle.pop()
            if client.is_alive():
                return client
            client.close()
        return None

    def _open(self) -> _RemoteClient:
        client = _RemoteClient(self._command, self.host)
        self.node_name = client.node_name or self.node_name
        return client


class _RemoteClient(Client):
    """A client whose connection is a process of ssh. Raises RemoteError if ssh or the bridge fails.

    ``status`` is the exit status of ssh, once it has ended by itself.
    """

    def __init__(self, command: list[str], host: str) -> None:
        super().__init__(host)
        ours, theirs = _socket_pair()
        self.status: int | None = None
        with contextlib.closing(theirs):
            try:
                # ssh asks for passwords on the terminal, and prints its messages on standard error, not through us.
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
            except OSError as error:
                ours.close()
                remedy = "install openssh-client" if error.errno == errno.ENOENT else "see SYSTEMD_SSH"
                raise RemoteError(f"cannot execute {command[0]}: {error.strerror}; {remedy}", FAILURE) from error
        self._socket = ours
        try:
            self.node_name = self._greeted(host)
        except BaseException:
            self.close()
            raise

    @property
    def is_connected(self) -> bool:
        """Whether no call has failed."""
        return self._socket is not None

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time that the next call may take."""
        self._timeout_s = timeout_s

    def is_alive(self) -> bool:
        """Return whether the other end has not closed the idle connection, and has sent nothing unasked."""
        if self._socket is None:
            return False
        try:
            self._socket.setblocking(False)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """End ssh and wait for its end, in a moment that it usually does not need."""
        super().close()
        if self.status is not None:
            return
        try:
            self.status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self.status = 0
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)

    def _connected(self) -> socket.socket:
        # A connection that has failed is not opened again here: Remote opens a new one.
        if self._socket is None:
            raise ConnectionError(f"{self._path}: the connection was closed")
        return self._socket

    def _greeted(self, host: str) -> str:
        """Wait for the greeting of the bridge, which has no time limit while ssh may ask; return the host's name."""
        assert self._socket is not None
        received = bytearray()
        while (line := _line(received)) is None:
            if len(received) > _MAX_GREETING_BYTES:
                raise RemoteError(
                    f"{host} sends other text than the greeting of 'resctrlctl bridge'. Check what the shell of the "
                    "user prints there when it starts",
                    FAILURE,
                )
            try:
                data = self._socket.recv(4096)
            except ConnectionError:  # ssh has ended without reading what the bridge sent
                data = b""
            if not data:
                self.close()
                raise RemoteError(_reason(self.status or 0), FAILURE)
            received += data
        try:
            greeting = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            greeting = None
        if not isinstance(greeting, dict):
            raise RemoteError(f"the greeting of 'resctrlctl bridge' on {host} is not valid", FAILURE)
        reason, status, name = (greeting.get(key) for key in ("error", "status", "host"))
        if isinstance(reason, str):
            raise RemoteError(reason, status if isinstance(status, int) and 0 < status < 256 else FAILURE)
        return name if isinstance(name, str) else ""


def ssh_command(host: str) -> list[str]:
    """Return the beginning of the command line of ssh for [USER@]HOST[:PORT]. Raises CommandError.

    The program is that of the variable SYSTEMD_SSH, as for systemctl(1).
    """
    options = ["-x", "-T", "-e", "none", "-o", "ClearAllForwardings=yes"]
    found = _WITH_PORT.fullmatch(host)
    if found and found["port"]:
        options += ["-p", found["port"]]
    name = found["host"].replace("[", "").replace("]", "") if found else host
    if not name or name.startswith("-") or not name.isprintable():
        raise CommandError(f"argument --host: {host!r} is not [USER@]HOST[:PORT]", USAGE)
    return [os.environ.get("SYSTEMD_SSH") or "ssh", *options, "--", name]


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def _line(received: bytearray) -> bytes | None:
    """Return the rest of the line that begins with the greeting; None if it is not complete."""
    begin = received.find(GREETING)
    end = received.find(b"\n", begin)
    return None if begin < 0 or end < 0 else bytes(received[begin + len(GREETING) : end])


def _reason(status: int) -> str:
    """Return why ssh has ended, from its exit status (ssh(1), EXIT STATUS)."""
    if status == _SSH_FAILED:
        return f"ssh failed with exit status {status} (its message is above)"
    if status == _NOT_FOUND:
        return f"resctrlctl was not found there (exit status {status}): install resctrlmond on that host"
    if status < 0:
        return f"signal {-status} ended ssh"
    return (
        f"'resctrlctl bridge' ended with exit status {status} there: see its message above, and install the same "
        "version of resctrlmond on both hosts"
    )
