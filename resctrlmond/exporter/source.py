# SPDX-License-Identifier: Apache-2.0
"""Read the daemon's figures over varlink, within a time limit, once for all scrapes that wait."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from resctrlmond.api.types import MachineReply, ReadAllReply, StatusReply, Usage
from resctrlmond.api.varlink.client import Client, ProtocolError, VarlinkError

log = logging.getLogger(__name__)

_MANAGER = "org.resctrlmon.Manager"
VERBS = ("Status", "ReadAll", "Machine")
# The end of a series that was interrupted.
_GRACE_S = 1.0


@dataclass(slots=True)
class Observation:
    """The replies of the daemon to one series of calls; None for a call that failed, whose error is in ``errors``."""

    status: StatusReply | None = None
    usages: list[Usage] | None = None
    machine: MachineReply | None = None
    errors: dict[str, str] = field(default_factory=dict)
    duration_s: float = 0.0


class Source:
    """Reads from the daemon's socket at ``path``. At most one series of calls runs, in a thread of its own."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._guard = threading.Lock()
        self._running: Future[Observation] | None = None
        self._reported: dict[str, str] = {}

    def observe(self, timeout_s: float) -> Observation:
        """Return an observation, which scrapes at the same time share; one with errors if it is late.

        A series of calls ends after ``timeout_s``, whatever the daemon does, and has the replies until then.
        """
        with self._guard:
            running, wait_s = self._running, timeout_s
            if running is None or running.done():
                running, wait_s = Future(), timeout_s + _GRACE_S
                self._running = running
                threading.Thread(target=self._run, args=(running, timeout_s), name="read", daemon=True).start()
        try:
            return running.result(wait_s)
        except TimeoutError:
            return Observation(errors=dict.fromkeys(VERBS, _late(self._path, timeout_s)), duration_s=timeout_s)

    def _run(self, running: Future[Observation], timeout_s: float) -> None:
        try:
            found = self._read(timeout_s)
            self._report(found.errors)
        except BaseException as error:  # the scrapes that wait must get it
            running.set_exception(error)
        else:
            running.set_result(found)

    def _read(self, timeout_s: float) -> Observation:
        found, begun = Observation(), time.monotonic()
        client = Client(self._path, timeout_s)
        # A daemon that sends replies without end, or one byte a second, is interrupted too.
        limit = threading.Timer(timeout_s, client.interrupt)
        limit.daemon = True
        limit.start()
        done = ""
        try:
            with client:
                for verb in VERBS:
                    try:
                        _call(client, verb, found, timeout_s)
                    except VarlinkError as error:
                        found.errors[verb] = f"{verb}: {error.parameters.get('message', error.name)}"
                    done = verb
        except (OSError, ProtocolError) as error:
            is_late = time.monotonic() - begun >= timeout_s
            text = _late(self._path, timeout_s) if is_late else str(error)
            found.errors |= dict.fromkeys(VERBS[VERBS.index(done) + 1 if done else 0 :], text)
        finally:
            limit.cancel()
        found.duration_s = time.monotonic() - begun
        return found

    def _report(self, errors: dict[str, str]) -> None:
        """Log each error when it appears, not at each scrape, and that all calls succeed again."""
        for text in dict.fromkeys(text for verb, text in errors.items() if self._reported.get(verb) != text):
            log.warning("cannot read from resctrlmond: %s", text)
        if self._reported and not errors:
            log.info("resctrlmond answers again")
        self._reported = errors


def _call(client: Client, verb: str, found: Observation, timeout_s: float) -> None:
    method = f"{_MANAGER}.{verb}"
    match verb:
        case "Status":
            found.status = client.call(method, reply=StatusReply)
        case "ReadAll":
            parameters = {"withEnded": True, "domains": True}
            pages = client.stream(method, parameters, reply=ReadAllReply, timeout_s=timeout_s)
            found.usages = [usage for page in pages for usage in page.usages]
        case _:
            found.machine = client.call(method, reply=MachineReply)


def _late(path: str, timeout_s: float) -> str:
    return f"{path}: resctrlmond did not answer within {timeout_s:g} s"
