# SPDX-License-Identifier: Apache-2.0
"""Client of resctrlmond's varlink interface for the adapter. Each call has a time limit. Calls do not overlap."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from resctrlmond.api.exit_codes import VARLINK_PREFIX
from resctrlmond.api.varlink.client import Client, DaemonUnavailable, ProtocolError, VarlinkError
from resctrlmond.service import journal
from resctrlmond.service.message_ids import MessageId

log = logging.getLogger(__name__)

T = TypeVar("T")

CLAIM = "nri"

# Errors that every call gets for a time.
_TEMPORARY_ERRORS = frozenset({"NotMounted", "MonitoringUnavailable"})


class Unavailable(Exception):
    """resctrlmond cannot handle the call now: it does not run, does not answer, or resctrl is not available."""


class Refused(Exception):
    """resctrlmond has refused the call. ``name`` is the name of the error, without its interface."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Manager:
    """Calls methods of org.resctrlmon.Manager at the socket ``path``. Each call takes at most ``timeout_s``.

    The connection stays open between calls. If it is closed, as by a restart of the daemon, the call is repeated once
    on a new connection: all calls of the adapter are idempotent.
    """

    def __init__(self, path: str, timeout_s: float = 3.0) -> None:
        self._client = Client(path, timeout_s)
        self._timeout_s = timeout_s
        # Whether the last call other than List reached its time limit: the next one may too.
        self.is_hung = False
        self._is_abandoned = False
        self._complaint = ""

    def abandon(self, *, is_hung: bool) -> None:
        """End the current call, which raises Unavailable, so that resctrlmond knows that its caller does not wait.

        ``is_hung``: the call has reached a time limit.
        """
        self._is_abandoned = True
        self.is_hung = self.is_hung or is_hung
        self._client.interrupt()

    def close(self) -> None:
        """Close the connection. A current call ends."""
        self.abandon(is_hung=False)
        self._client.close()

    async def ask(
        self, verb: str, reply: type[T], lookup: Callable[[], Mapping[str, Any]] | None = None, **parameters: Any
    ) -> T:
        """Make one call. Raises Unavailable and Refused.

        ``lookup`` returns further parameters. It runs in the thread of the call, because a read of /proc may block.
        Its errors are raised, and nothing is called.
        """

        def call(client: Client, name: str) -> list[T]:
            found = lookup() if lookup else {}
            return [client.call(name, {**parameters, **found}, reply=reply)]

        (answer,) = await self._ask(verb, call)
        return answer

    async def ask_pages(self, verb: str, reply: type[T]) -> list[T]:
        """Make one call that returns several replies. Raises Unavailable and Refused."""
        within = self._timeout_s
        return await self._ask(verb, lambda client, name: list(client.stream(name, reply=reply, timeout_s=within)))

    async def _ask(self, verb: str, call: Callable[[Client, str], list[T]]) -> list[T]:
        self._is_abandoned = False
        try:
            answer = await asyncio.to_thread(self._call, verb, call)
        except VarlinkError as error:
            name = error.name.removeprefix(VARLINK_PREFIX)
            message = str(error.parameters.get("message") or name)
            if name in _TEMPORARY_ERRORS:
                self._complain(f"{verb}: {message}", None)
                raise Unavailable(message) from error
            self._answered()
            raise Refused(name, message) from error
        except (OSError, ProtocolError) as error:
            if self._is_abandoned:
                raise Unavailable("the runtime did not wait any longer") from error
            # A List waits for its share of memory behind the lists of other callers; an Assign does not.
            if verb != "List" or not isinstance(error, TimeoutError):
                self.is_hung = isinstance(error, TimeoutError)
            text = getattr(error, "strerror", None) or str(error)
            self._complain(text, error if isinstance(error, OSError) else None)
            raise Unavailable(text) from error
        self._answered()
        return answer

    def _call(self, verb: str, call: Callable[[Client, str], list[T]]) -> list[T]:
        name = VARLINK_PREFIX + verb
        try:
            return call(self._client, name)
        except DaemonUnavailable:
            raise
        except ConnectionError:
            if self._is_abandoned:
                raise
            return call(self._client, name)

    def _answered(self) -> None:
        self.is_hung = False
        if self._complaint:
            log.log(journal.NOTICE, "resctrlmond answers again")
            self._complaint = ""

    def _complain(self, text: str, error: OSError | None) -> None:
        """Log one warning for as long as resctrlmond is away: the reason changes while its socket is removed and
        created.
        """
        if not self._complaint:
            log.warning(
                "containers start anyway, and may be unmonitored for now: %s",
                text,
                extra=journal.fields(error, message_id=MessageId.UNMONITORED),
            )
        elif text != self._complaint:
            log.info("resctrlmond is still unavailable: %s", text)
        self._complaint = text
