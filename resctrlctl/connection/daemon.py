# SPDX-License-Identifier: Apache-2.0
"""Call resctrlmond over its varlink socket. Each error becomes a message of one sentence and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from resctrlctl.base.defaults import SOCKET
from resctrlctl.base.errors import CommandError, DaemonDown, Disconnected, NoAnswer, RemoteError, print_error
from resctrlctl.connection.remote import Remote
from resctrlctl.screen.format import format_message
from resctrlmond.api.exit_codes import DENIED, NOT_RUNNING, exit_code
from resctrlmond.api.signatures import Q, R, Signature
from resctrlmond.client import Client, DaemonUnavailable, ProtocolError, VarlinkError
from resctrlmond.client.synchronous import connect

TIMEOUT_S = 5.0
# Assign lists a large control group repeatedly until it finds no new task, which takes seconds.
_CHANGE_S = 30.0
# The kernel creates it only if the processor can control or monitor resources.
_RESCTRL = "/sys/fs/resctrl"

# The daemon answers it without a thread or a lock.
_QUESTION = "org.varlink.service.GetInfo"
# The errors of org.varlink.service for a call that the server does not understand.
_UNKNOWN_CALL = frozenset(
    f"org.varlink.service.{name}" for name in ("InterfaceNotFound", "MethodNotFound", "MethodNotImplemented")
)
_OTHER_VERSION = "If resctrlmond was updated, restart it: systemctl restart resctrlmond"


class Daemon(msgspec.Struct, frozen=True):
    """resctrlmond behind its socket, or that of another host. Each call takes at most ``timeout_s``.

    On this machine, each call has a connection of its own. ``notes_waits``: a message on standard error states that a
    call waits for longer than usual.
    """

    socket: str | Remote = SOCKET
    timeout_s: float = TIMEOUT_S
    notes_waits: bool = False

    def call(
        self,
        action: str,
        method: Signature[Q, R],
        request: Q | None = None,
        descriptors: Sequence[int] = (),
    ) -> R:
        """Call a method; return its reply.

        ``action`` completes the error message "cannot ...", as in "release 'web'". The daemon gets a copy of each of
        ``descriptors``. Raises DaemonDown, Disconnected, NoAnswer, or CommandError with the daemon's message.
        """
        # The client connects within the call, so that the timeout covers both.
        with translated_errors(f"cannot {action}: ", self), self._client() as client:
            return client.call(method, request, descriptors=descriptors)

    def change(
        self,
        action: str,
        method: Signature[Q, R],
        request: Q,
        descriptors: Sequence[int] = (),
    ) -> R:
        """Call a method that may take longer than a question, if the daemon answers a question in ``timeout_s``.

        Raises the same errors as ``call``.
        """
        with translated_errors(f"cannot {action}: ", self), self._client() as client:
            client.call(_QUESTION)
        try:
            return self.patient.call(action, method, request, descriptors)
        except NoAnswer as error:
            raise NoAnswer(f"{error}. When resctrlmond continues, it may still {action}") from error

    def stream(self, action: str, method: Signature[Q, R], request: Q | None = None) -> list[R]:
        """Call a method that returns several replies; return all of them. Raises the same errors as ``call``."""
        with translated_errors(f"cannot {action}: ", self), self._client() as client:
            return list(client.stream(method, request, timeout_s=self.timeout_s))

    def follow(self, action: str, method: Signature[Q, R], request: Q | None = None) -> Iterator[R]:
        """Call a method that replies without end; yield each reply as it comes. Raises the errors of ``call``."""
        with translated_errors(f"cannot {action}: ", self), self._client() as client:
            yield from client.stream(method, request)

    def disconnect(self) -> None:
        """Open a new connection to another host for the next call."""
        if not isinstance(self.socket, str):
            self.socket.disconnect()

    @property
    def patient(self) -> Daemon:
        """The same daemon, with the time that a change may take."""
        return replace(self, timeout_s=_CHANGE_S)

    @property
    def host(self) -> str:
        """The name of the daemon's host."""
        return os.uname().nodename if isinstance(self.socket, str) else self.socket.node_name

    @contextlib.contextmanager
    def _client(self) -> Iterator[Client]:
        if isinstance(self.socket, str):
            with contextlib.closing(Client(self.socket, self.timeout_s)) as client:
                client.on_wait = self._note_wait if self.notes_waits else None
                yield client
        else:
            with self.socket.client(self.timeout_s) as client:
                client.on_wait = self._note_wait if self.notes_waits else None
                yield client

    def _note_wait(self) -> None:
        print_error(f"waiting for resctrlmond ({self.socket}) to answer, for {self.timeout_s:.0f} s at most")


def daemon_of(args: argparse.Namespace) -> Daemon:
    """Return the daemon that the options name. On a terminal, a message states that a call waits."""
    return Daemon(args.socket, notes_waits=sys.stderr.isatty() and not args.quiet)


def connected(path: str, timeout_s: float) -> socket.socket:
    """Connect to the socket at ``path``. Raises CommandError with the reason only."""
    with translated_errors("", Daemon(path, timeout_s)):
        return connect(path, timeout_s)


@contextlib.contextmanager
def translated_errors(begin: str, daemon: Daemon) -> Iterator[None]:
    """Raise each error of a call as CommandError whose message begins with ``begin``."""
    try:
        yield
    except DaemonUnavailable as error:
        raise DaemonDown(
            f"{begin}resctrlmond is not running: nothing listens on {daemon.socket}. "
            f"{_start_remedy(str(daemon.socket))}",
            NOT_RUNNING,
        ) from error
    except RemoteError as error:
        kind = DaemonDown if error.status == NOT_RUNNING else CommandError
        raise kind(f"{begin}{daemon.socket}: {error}", error.status) from error
    except PermissionError as error:
        raise CommandError(
            f"{begin}access to {daemon.socket} is denied. {_access_remedy(str(daemon.socket))}",
            DENIED,
            "PermissionDenied",
        ) from error
    except VarlinkError as error:
        remedy = f". {_OTHER_VERSION}" if error.name in _UNKNOWN_CALL else ""
        text = f"{begin}{describe_error(error)}{remedy}"
        raise CommandError(text, exit_code(error.name), error.short_name) from error
    except TimeoutError as error:
        raise NoAnswer(
            f"{begin}no answer from {daemon.socket} within {daemon.timeout_s:.0f} s. "
            "See: systemctl status resctrlmond.service"
        ) from error
    except ProtocolError as error:
        raise CommandError(f"{begin}{daemon.socket}: {error}. {_OTHER_VERSION}") from error
    except ConnectionError as error:
        raise Disconnected(
            f"{begin}{daemon.socket}: {error.strerror or error}. See: journalctl -u resctrlmond"
        ) from error
    except OSError as error:
        raise CommandError(
            f"{begin}{daemon.socket}: {error.strerror or error}. Check --socket and RESCTRLMOND_SOCKET"
        ) from error


def _start_remedy(socket: str) -> str:
    if socket == SOCKET:
        if not os.path.isdir(_RESCTRL):
            return (
                f"It cannot run on this machine, which has no {_RESCTRL}; for the cause, see: resctrlctl doctor. To "
                "try the commands on a simulated machine: resctrlmond --simulate /tmp/sim"
            )
        return "Start it: systemctl start resctrlmond.socket resctrlmond.service"
    return "Start the daemon of that socket, or omit --socket and RESCTRLMOND_SOCKET to use the one of this machine"


def _access_remedy(socket: str) -> str:
    if socket == SOCKET:
        return (
            "Only root and the members of the groups resctrlmon and resctrlmon-read may read, and only root may "
            "change anything: run resctrlctl as one of them"
        )
    return "Run resctrlctl as root or as the user who started that daemon"


def describe_error(error: VarlinkError) -> str:
    """Return a varlink error as text: the path, the message, the errno, the kernel's explanation and the remedy."""
    fields = {name: value for name, value in error.parameters.items() if isinstance(value, str) and value}
    text = fields.get("message") or error.name
    if (path := fields.get("path")) and path not in text:
        text = f"{path}: {text}"
    if errno_name := fields.get("errno"):
        text += f" ({errno_name})"
    if status := fields.get("status"):
        text += f"; the kernel says: {status}"
    if parameter := fields.get("parameter"):
        text += f" (parameter {parameter})"
    return format_message(f"{text}. {fields['remedy']}" if "remedy" in fields else text)
