# SPDX-License-Identifier: Apache-2.0
"""Call resctrlmond over its varlink socket. Each error becomes a message of one sentence and an exit status."""

from __future__ import annotations

import contextlib

from resctrlctl.client import Client
from resctrlctl.defaults import INTERFACE, SOCKET
from resctrlctl.errors import CommandError, DaemonDown, Disconnected
from resctrlctl.format import format_message
from resctrlctl.structs import Struct
from resctrlmond.api.exit_codes import DENIED, NOT_RUNNING, exit_code
from resctrlmond.api.varlink.base_client import DaemonUnavailable
from resctrlmond.api.varlink.frames import ProtocolError, VarlinkError

TYPE_CHECKING = False  # importing typing takes longer than this module
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeVar

    _T = TypeVar("_T", bound=Struct)

# Assign lists a large control group repeatedly until it finds no new task, which takes seconds.
_TIMEOUT_S = 30.0

# The errors of org.varlink.service for a call that the server does not understand.
_UNKNOWN_CALL = frozenset(
    f"org.varlink.service.{name}" for name in ("InterfaceNotFound", "MethodNotFound", "MethodNotImplemented")
)
_OTHER_VERSION = "If resctrlmond was updated, restart it: systemctl restart resctrlmond"


class Daemon(Struct):
    """resctrlmond behind its socket. Each call has a connection of its own, and takes at most ``timeout_s``."""

    socket: str = SOCKET
    timeout_s: float = _TIMEOUT_S

    def call(
        self,
        action: str,
        method: str,
        parameters: Struct | None,
        reply: type[_T],
        descriptors: Sequence[int] = (),
    ) -> _T:
        """Call a method of org.resctrlmon.Manager; return its reply.

        ``action`` completes the error message "cannot ...", as in "release 'web'". The daemon gets a copy of each of
        ``descriptors``. Raises DaemonDown, Disconnected, or CommandError with the daemon's message.
        """
        # The client connects within the call, so that the timeout covers both.
        with self._translated_errors(action), contextlib.closing(Client(self.socket, self.timeout_s)) as client:
            return client.call(f"{INTERFACE}.{method}", parameters, reply=reply, descriptors=descriptors)

    def stream(self, action: str, method: str, parameters: Struct | None, reply: type[_T]) -> list[_T]:
        """Call a method that returns several replies; return all of them. Raises the same errors as ``call``."""
        with self._translated_errors(action), Client(self.socket, self.timeout_s) as client:
            return list(client.stream(f"{INTERFACE}.{method}", parameters, reply=reply, timeout_s=self.timeout_s))

    def follow(self, action: str, method: str, parameters: Struct | None, reply: type[_T]) -> Iterator[_T]:
        """Call a method that replies without end; yield each reply as it comes. Raises the errors of ``call``."""
        with self._translated_errors(action), Client(self.socket, self.timeout_s) as client:
            yield from client.stream(f"{INTERFACE}.{method}", parameters, reply=reply)

    @contextlib.contextmanager
    def _translated_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except DaemonUnavailable as error:
            raise DaemonDown(
                f"cannot {action}: resctrlmond is not running: nothing listens on {self.socket}. "
                f"{_start_remedy(self.socket)}",
                NOT_RUNNING,
            ) from error
        except PermissionError as error:
            raise CommandError(
                f"cannot {action}: access to {self.socket} is denied. Only root and the members of the group "
                "resctrlmon may use it: run resctrlctl as one of them",
                DENIED,
                "PermissionDenied",
            ) from error
        except VarlinkError as error:
            name = error.name.rpartition(".")[2]
            remedy = f". {_OTHER_VERSION}" if error.name in _UNKNOWN_CALL else ""
            raise CommandError(
                f"cannot {action}: {describe_error(error)}{remedy}", exit_code(error.name), name
            ) from error
        except TimeoutError as error:
            raise CommandError(
                f"cannot {action}: no answer from {self.socket} within {self.timeout_s:.0f} s. "
                "See: systemctl status resctrlmond.service"
            ) from error
        except ProtocolError as error:
            raise CommandError(f"cannot {action}: {self.socket}: {error}. {_OTHER_VERSION}") from error
        except ConnectionError as error:
            raise Disconnected(
                f"cannot {action}: {self.socket}: {error.strerror or error}. See: journalctl -u resctrlmond"
            ) from error
        except OSError as error:
            raise CommandError(
                f"cannot {action}: {self.socket}: {error.strerror or error}. Check --socket and RESCTRLMOND_SOCKET"
            ) from error


def _start_remedy(socket: str) -> str:
    if socket == SOCKET:
        return "Start it: systemctl start resctrlmond.socket resctrlmond.service"
    return "Start the daemon of that socket, or omit --socket and RESCTRLMOND_SOCKET to use the one of this machine"


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
