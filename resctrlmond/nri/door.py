# SPDX-License-Identifier: Apache-2.0
"""resctrlmond as the adapter sees it: its varlink door, asked within a bounded time, and never twice at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from resctrlmond import journal
from resctrlmond.api.client import Client, ProtocolError, VarlinkError
from resctrlmond.api.errors import VARLINK_PREFIX
from resctrlmond.message_ids import MessageId

log = logging.getLogger(__name__)

T = TypeVar("T")

CLAIM = "nri"

# What stands in the way of every call, and may pass.
_PASSING = frozenset({"NotMounted", "MonitoringUnavailable"})


class Away(Exception):
    """resctrlmond cannot do it now: it does not run, does not answer, or something passing is in its way."""


class Refused(Exception):
    """resctrlmond will not do it. ``name`` is the error's, without its interface."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Door:
    """Calls of org.resctrlmon.Manager at the socket ``path``, each of at most ``timeout_s``."""

    def __init__(self, path: str, timeout_s: float = 3.0) -> None:
        self._path = path
        self._timeout_s = timeout_s
        # Whether the last call other than List ran into its time-out: the next one may too.
        self.is_hung = False
        self._complaint = ""

    async def ask(self, verb: str, reply: type[T], **parameters: Any) -> T:
        """Make one call. Raises Away and Refused."""
        (answer,) = await self._ask(verb, lambda client, name: [client.call(name, parameters, reply=reply)])
        return answer

    async def ask_pages(self, verb: str, reply: type[T]) -> list[T]:
        """Make one call that answers with any number of replies. Raises Away and Refused."""
        within = self._timeout_s
        return await self._ask(verb, lambda client, name: list(client.stream(name, reply=reply, timeout_s=within)))

    async def _ask(self, verb: str, call: Callable[[Client, str], list[T]]) -> list[T]:
        try:
            answer = await asyncio.to_thread(self._call, verb, call)
        except VarlinkError as error:
            name = error.name.removeprefix(VARLINK_PREFIX)
            message = str(error.parameters.get("message") or name)
            if name in _PASSING:
                self._complain(f"{verb}: {message}", None)
                raise Away(message) from error
            self._answered()
            raise Refused(name, message) from error
        except (OSError, ProtocolError) as error:
            # A List waits for its share of memory behind other callers' lists, which an Assign does not.
            if verb != "List" or not isinstance(error, TimeoutError):
                self.is_hung = isinstance(error, TimeoutError)
            text = getattr(error, "strerror", None) or str(error)
            self._complain(text, error if isinstance(error, OSError) else None)
            raise Away(text) from error
        self._answered()
        return answer

    def _call(self, verb: str, call: Callable[[Client, str], list[T]]) -> list[T]:
        # A connection for each call: none is kept that a restart of the daemon would have cut.
        with Client(self._path, self._timeout_s) as client:
            return call(client, VARLINK_PREFIX + verb)

    def _answered(self) -> None:
        self.is_hung = False
        if self._complaint:
            log.log(journal.NOTICE, "resctrlmond serves again")
            self._complaint = ""

    def _complain(self, text: str, error: OSError | None) -> None:
        """Warn once for as long as it lasts: a socket that goes and comes back has a reason for each moment."""
        if not self._complaint:
            log.warning(
                "containers start unmonitored for now: %s",
                text,
                extra=journal.fields(error, message_id=MessageId.UNMONITORED),
            )
        elif text != self._complaint:
            log.info("resctrlmond is still away: %s", text)
        self._complaint = text
