# SPDX-License-Identifier: Apache-2.0
"""Asking resctrlmond over its varlink socket; what it refuses becomes a sentence and an exit status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from resctrlctl.figures import prose
from resctrlmond.api.errors import DENIED, FAILURE, NOT_RUNNING, exit_code
from resctrlmond.api.varlink.client import Client, NotRunning
from resctrlmond.api.varlink.messages import ProtocolError, VarlinkError

INTERFACE = "org.resctrlmon.Manager"
SOCKET = f"/run/resctrlmond/{INTERFACE}"

# resctrlmond.api.errors has the other exit statuses, with their errors.
OK = 0
USAGE = 2

# Assign sweeps a large control group until nothing new is found, which takes seconds.
_TIMEOUT_S = 30.0

# The errors of org.varlink.service for a call that the server does not understand.
_NOT_KNOWN = frozenset(
    f"org.varlink.service.{name}" for name in ("InterfaceNotFound", "MethodNotFound", "MethodNotImplemented")
)
_OTHER_VERSION = "If resctrlmond was updated, restart it: systemctl restart resctrlmond"

_T = TypeVar("_T", bound=msgspec.Struct)


class Failure(Exception):
    """An error message of one sentence, and the exit status of resctrlctl.

    ``name`` is the varlink error's name without its interface, "" where it was none.
    """

    def __init__(self, message: str, status: int = FAILURE, name: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.name = name


class DaemonDown(Failure):
    """Nobody listens on the socket."""


class Disconnected(Failure):
    """The daemon closed the connection before its reply: it was stopped, or it refuses further connections."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """resctrlmond behind its socket; each call is a connection of its own, and takes ``timeout_s`` at most."""

    socket: str = SOCKET
    timeout_s: float = _TIMEOUT_S

    def call(
        self,
        what: str,
        method: str,
        parameters: msgspec.Struct | None,
        reply: type[_T],
        descriptors: Sequence[int] = (),
    ) -> _T:
        """Call ``method`` of the manager; ``what`` says in words what it is for ("release 'web'").

        The daemon gets a copy of each of ``descriptors``. Raises DaemonDown, Disconnected, or Failure with the
        daemon's reason.
        """
        # The client connects within the call, so that the time of both is limited.
        with self._explaining(what), contextlib.closing(Client(self.socket, self.timeout_s)) as client:
            return client.call(f"{INTERFACE}.{method}", parameters, reply=reply, descriptors=descriptors)

    def stream(self, what: str, method: str, parameters: msgspec.Struct | None, reply: type[_T]) -> list[_T]:
        """As ``call``, for a method that answers with any number of replies."""
        with self._explaining(what), Client(self.socket, self.timeout_s) as client:
            return list(client.stream(f"{INTERFACE}.{method}", parameters, reply=reply, timeout_s=self.timeout_s))

    @contextlib.contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        try:
            yield
        except NotRunning as error:
            raise DaemonDown(
                f"cannot {what}: resctrlmond is not running: nothing listens on {self.socket}. {_start(self.socket)}",
                NOT_RUNNING,
            ) from error
        except PermissionError as error:
            raise Failure(
                f"cannot {what}: access to {self.socket} is denied. Only root and the members of the group "
                "resctrlmon may use it: run resctrlctl as one of them",
                DENIED,
                "PermissionDenied",
            ) from error
        except VarlinkError as error:
            name = error.name.rpartition(".")[2]
            remedy = f". {_OTHER_VERSION}" if error.name in _NOT_KNOWN else ""
            raise Failure(f"cannot {what}: {reason(error)}{remedy}", exit_code(error.name), name) from error
        except TimeoutError as error:
            raise Failure(
                f"cannot {what}: no answer from {self.socket} within {self.timeout_s:.0f} s. "
                "See: systemctl status resctrlmond.service"
            ) from error
        except ConnectionError as error:
            raise Disconnected(
                f"cannot {what}: {self.socket}: {error.strerror or error}. See: journalctl -u resctrlmond"
            ) from error
        except (ProtocolError, msgspec.ValidationError) as error:
            raise Failure(f"cannot {what}: {self.socket}: {error}. {_OTHER_VERSION}") from error
        except OSError as error:
            raise Failure(
                f"cannot {what}: {self.socket}: {error.strerror or error}. Check --socket and RESCTRLMOND_SOCKET"
            ) from error


def _start(socket: str) -> str:
    if socket == SOCKET:
        return "Start it: systemctl start resctrlmond.socket resctrlmond.service"
    return "Start the daemon of that socket, or leave out --socket and RESCTRLMOND_SOCKET for the one of this machine"


def reason(error: VarlinkError) -> str:
    """The error's own words: what failed, path, errno, what the kernel said, and the remedy."""
    fields = {name: value for name, value in error.parameters.items() if isinstance(value, str) and value}
    text = fields.get("message") or error.name
    if (path := fields.get("path")) and path not in text:
        text = f"{path}: {text}"
    if number := fields.get("errno"):
        text += f" ({number})"
    if status := fields.get("status"):
        text += f"; the kernel says: {status}"
    if parameter := fields.get("parameter"):
        text += f" (parameter {parameter})"
    return prose(f"{text}. {fields['remedy']}" if "remedy" in fields else text)
