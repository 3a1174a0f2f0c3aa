# SPDX-License-Identifier: Apache-2.0
"""Client of resctrlmond's varlink interface for the adapter. Each call has a time limit. Calls do not overlap."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from resctrlmond.api import signatures, types
from resctrlmond.api.exit_codes import VARLINK_PREFIX
from resctrlmond.api.signatures import Q, R, Signature
from resctrlmond.client import VarlinkError
from resctrlmond.client.asynchronous import AsyncClient
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
        self._client = AsyncClient(path, timeout_s, repeats=True)
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
        self._client.close()

    def close(self) -> None:
        """Close the connection. A current call ends."""
        self.abandon(is_hung=False)

    async def ask(
        self, verb: Signature[Q, R], request: Q, lookup: Callable[[], Mapping[str, Any]] | None = None
    ) -> R:
        """Make one call. Raises Unavailable and Refused.

        ``lookup`` returns further fields of the request. It runs in a thread, because a read of /proc may block. Its
        errors are raised, and nothing is called.
        """

        async def call() -> R:
            found = await asyncio.to_thread(lookup) if lookup else {}
            if self._is_abandoned:
                raise ConnectionError
            return await self._client.call(verb, msgspec.structs.replace(request, **found))

        return await self._ask(verb, call)

    async def ask_list(self) -> list[types.ListReply]:
        """Call List. Raises Unavailable and Refused."""
        return await self._ask(signatures.LIST, lambda: self._client.pages(signatures.LIST))

    async def _ask(self, verb: Signature[Any, Any], call: Callable[[], Awaitable[T]]) -> T:
        self._is_abandoned = False
        try:
            answer = await call()
        except VarlinkError as error:
            name = error.name.removeprefix(VARLINK_PREFIX)
            if name in _TEMPORARY_ERRORS:
                self._complain(f"{verb.name}: {error.message}", None)
                raise Unavailable(error.message) from error
            self._answered()
            raise Refused(name, error.message) from error
        except OSError as error:
            if self._is_abandoned:
                raise Unavailable("the runtime did not wait any longer") from error
            # A List waits for its share of memory behind the lists of other callers; an Assign does not.
            if verb is not signatures.LIST or not isinstance(error, TimeoutError):
                self.is_hung = isinstance(error, TimeoutError)
            text = error.strerror or str(error)
            self._complain(text, error)
            raise Unavailable(text) from error
        self._answered()
        return answer

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
