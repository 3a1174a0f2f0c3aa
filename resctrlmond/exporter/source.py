# SPDX-License-Identifier: Apache-2.0
"""Read the daemon's figures over varlink, within a time limit, once for all scrapes that wait."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from resctrlmond.api import signatures
from resctrlmond.api.types import (
    MachineReply,
    ReadAllRequest,
    StatusReply,
    SumsReply,
    Unwatched,
    Usage,
)
from resctrlmond.client import Client, ProtocolError, UnexpectedReply, VarlinkError

log = logging.getLogger(__name__)

# Sums just after ReadAll, whose reading of the counters it uses.
VERBS = ("Status", "ReadAll", "Sums", "Machine", "ListUnwatched")


@dataclass(slots=True)
class Observation:
    """The replies of the daemon to one series of calls; None for a call that failed, whose error is in ``errors``."""

    status: StatusReply | None = None
    usages: list[Usage] | None = None
    machine: MachineReply | None = None
    sums: SumsReply | None = None
    unwatched: list[Unwatched] | None = None
    errors: dict[str, str] = field(default_factory=dict)
    duration_s: float = 0.0
    # Identifies the series of calls; copies made by so_far() have the same object.
    _series: object = field(default_factory=object, repr=False, compare=False)

    @property
    def replies(self) -> tuple[object, frozenset[str]]:
        """Return the identity of the replies: the series of calls, and the calls without a reply."""
        return self._series, frozenset(self.errors)


@dataclass(frozen=True, slots=True)
class _Series:
    """A series of calls: what was read so far, and its end."""

    found: Observation = field(default_factory=Observation)
    begun: float = field(default_factory=time.monotonic)
    end: Future[None] = field(default_factory=Future)

    def so_far(self, late: str) -> Observation:
        """Return what was read so far, with the error ``late`` for each call that has not succeeded or failed."""
        found = replace(self.found, duration_s=time.monotonic() - self.begun)
        replies = (found.status, found.usages, found.machine, found.sums, found.unwatched)
        missing = [verb for verb, reply in zip(VERBS, replies, strict=True) if reply is None]
        return replace(found, errors=dict.fromkeys(missing, late) | found.errors)


class Source:
    """Reads from the daemon's socket at ``path``. At most one series of calls runs, in a thread of its own.

    A series ends after ``timeout_s``, whatever the daemon does. No client can shorten it, because others wait for it.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._guard = threading.Lock()
        self._running: _Series | None = None
        self._reported: dict[str, str] = {}

    def observe(self, wait_s: float) -> Observation:
        """Return the replies that there are after ``wait_s`` at most. Calls at the same time share one series."""
        try:
            series = self._running_or_new()
        except RuntimeError as error:  # no thread is left
            return Observation(errors=dict.fromkeys(VERBS, str(error)))
        try:
            series.end.result(wait_s)
        except TimeoutError:
            return series.so_far(_late(self._path, wait_s))
        return series.found

    def _running_or_new(self) -> _Series:
        """Return the series that runs, or start one. Raises RuntimeError if no thread can be started."""
        with self._guard:
            running = self._running
            if running is None or running.end.done():
                running = _Series()
                threading.Thread(target=self._run, args=(running,), name="read", daemon=True).start()
                self._running = running
            return running

    def _run(self, series: _Series) -> None:
        try:
            self._read(series.found)
            self._report(series.found.errors)
        except BaseException as error:  # the scrapes that wait must get it
            series.end.set_exception(error)
        else:
            series.end.set_result(None)

    def _read(self, found: Observation) -> None:
        """Make all calls, and add the reply or the error of each to ``found`` as it arrives."""
        begun, timeout_s = time.monotonic(), self._timeout_s
        client = Client(self._path, timeout_s)
        # The client limits the wait for each reply; a daemon that sends replies without end is interrupted too.
        limit = threading.Timer(timeout_s, client.interrupt)
        limit.daemon = True
        limit.start()
        waiting = list(VERBS)
        try:
            with client:
                for verb in VERBS:
                    try:
                        _call(client, verb, found, timeout_s)
                    except VarlinkError as error:
                        found.errors |= {verb: f"{verb}: {error.message}"}
                    except UnexpectedReply as error:
                        # A daemon of another version may have a state, for example, that this version does not know.
                        found.errors |= {verb: f"{error}; install the same version of resctrlmond and the exporter"}
                        # The stream of replies was closed: the next call would use a connection without a limit.
                        if time.monotonic() - begun >= timeout_s:
                            raise
                    waiting.remove(verb)
        except (OSError, ProtocolError) as error:
            is_late = time.monotonic() - begun >= timeout_s
            text = _late(self._path, timeout_s) if is_late else _text(error)
            found.errors |= dict.fromkeys(waiting, text)
        finally:
            limit.cancel()
        found.duration_s = time.monotonic() - begun

    def _report(self, errors: dict[str, str]) -> None:
        """Log each error when it appears, not at each scrape, and that all calls succeed again."""
        for text in dict.fromkeys(text for verb, text in errors.items() if self._reported.get(verb) != text):
            log.warning("cannot read from resctrlmond: %s", text)
        if self._reported and not errors:
            log.info("resctrlmond answers again")
        self._reported = errors


def _text(error: Exception) -> str:
    """Return the message of an error without the number that OSError puts in front of it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _call(client: Client, verb: str, found: Observation, timeout_s: float) -> None:
    """Call the verb, and add its reply to ``found``. Raises the errors of the client."""
    match verb:
        case "Status":
            found.status = client.call(signatures.STATUS)
        case "ReadAll":
            request = ReadAllRequest(with_ended=True, domains=True)
            pages = client.stream(signatures.READ_ALL, request, timeout_s=timeout_s)
            found.usages = [usage for page in pages for usage in page.usages]
        case "Machine":
            found.machine = client.call(signatures.MACHINE)
        case "Sums":
            found.sums = client.call(signatures.SUMS)
        case "ListUnwatched":
            found.unwatched = client.call(signatures.LIST_UNWATCHED).containers


def _late(path: str, timeout_s: float) -> str:
    return f"{path}: resctrlmond did not answer within {timeout_s:g} s"
