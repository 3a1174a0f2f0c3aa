# SPDX-License-Identifier: Apache-2.0
"""The ledger: one entry in the journal for each ended workload, which ``resctrlctl report`` reads.

The entry is sent after the end values are complete and before the record of the workload is closed, so a normal end
costs no further write. An entry that the journal does not accept at once is kept as a file until it does. After a
kill between the two steps, the next start finds the record not closed: it keeps that entry as a file too, and asks
the journal whether it has the entry already.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from resctrlmond.configuration.config import Config
from resctrlmond.daemon.startup import Setup
from resctrlmond.resctrl.counters import Kind
from resctrlmond.resctrl.errors import NotRead, ResctrlError
from resctrlmond.service.journal import NOTICE, fields, printable_fields
from resctrlmond.service.message_ids import MessageId
from resctrlmond.workloads.figures.accounting import Total, digits
from resctrlmond.workloads.figures.verdict import cpu_time
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.names import names_of
from resctrlmond.workloads.model.states import Quality, worst
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.records.atomic_files import read_file, write_file, writing
from resctrlmond.workloads.records.totals import shown

log = logging.getLogger(__name__)

# The files are in memory, as all of /run/resctrlmond: a page each, more for an entry with long reasons.
MAX_WAITING = 1000
# Entries that were sent whose record could not be saved yet. Only a full /run delays that.
_MAX_RECORDED = 4096
# journalctl --sync waits for the journal, which may hang.
_JOURNALCTL_S = 10
_JOURNALCTL = "journalctl"
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_DECIMAL = ("", "k", "M", "G", "T", "P")
# The totals that MESSAGE states, with their names in it.
_NAMED = {"core_energy": "core energy", "mbm_total_bytes": "memory traffic"}


class Journal(Protocol):
    """A socket of the journal. ``deliver`` returns whether the journal accepted the entry, and never waits."""

    def deliver(self, entry: dict[str, str], /) -> bool: ...


class Ledger:
    """Sends the entry of each ended workload to the journal exactly once.

    ``totals`` returns the totals of an ended workload. ``folder`` has the files of entries that the journal has not
    accepted. ``recorded_runs`` returns which of these runs have an entry; None if the journal cannot be read. Until
    ``started``, every entry becomes a file: the daemon before this one may have sent it.
    """

    def __init__(
        self,
        folder: str,
        boot_id: str,
        journal: Journal,
        totals: Callable[[Workload], Sequence[Total]],
        recorded_runs: Callable[[Collection[str]], set[str] | None] | None = None,
    ) -> None:
        self._folder = folder
        self._boot_id = boot_id
        self._journal = journal
        self._totals = totals
        self._recorded_runs = recorded_runs or recorded_in_journal
        self._lock = threading.Lock()
        self._is_starting = True
        # In the order of their arrival, as dictionaries without values: the runs that this daemon recorded, and those
        # with a file that only has to be sent.
        self._recorded: dict[str, None] = {}
        self._waiting: dict[str, None] = {}
        # The runs with a file that the daemon before this one may have sent.
        self._unsettled: set[str] = set()
        self._lost = 0

    def record(self, workload: Workload) -> None:
        """Send the entry of a workload that has ended, unless this daemon has recorded it already.

        Raises NotWritten if the entry can neither be sent nor kept: the record must not be closed then.
        """
        run = run_of(workload, self._boot_id)
        with self._lock:
            if run in self._recorded:
                return
            self._recorded[run] = None
            if len(self._recorded) > _MAX_RECORDED:
                del self._recorded[next(iter(self._recorded))]
            try:
                entry = entry_of(workload, run, *self._used(workload))
                if self._is_starting:
                    if self._keep(run, entry):
                        self._unsettled.add(run)
                elif not self._journal.deliver(entry) and self._keep(run, entry):
                    self._waiting[run] = None
            except NotWritten:
                del self._recorded[run]
                raise
            except Exception:
                # A defect here must not keep a workload from ending.
                self._lost += 1
                log.exception("%s: the entry of the ended workload could not be written", workload.key)

    def _used(self, workload: Workload) -> tuple[Sequence[Total], str]:
        """Return the totals, or none and the reason."""
        try:
            return shown(workload, self._totals(workload)), ""
        except (ResctrlError, OSError) as error:
            return (), f"the totals cannot be read: {error}"

    def _keep(self, run: str, entry: dict[str, str]) -> bool:
        """Write the entry as a file. If there are too many files, count it as lost. Raises NotWritten."""
        if len(self._waiting) + len(self._unsettled) >= MAX_WAITING:
            self._lost += 1
            return False
        path = self._path(run)
        with writing(path):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            write_file(path, json.dumps(entry).encode(), mode=0o600)
        return True

    def _path(self, run: str) -> str:
        return os.path.join(self._folder, run)

    def started(self) -> None:
        """Send entries at once from now on. Call ``settle`` afterwards."""
        with self._lock:
            self._is_starting = False
            try:
                names = os.listdir(self._folder)
                self._unsettled.update(name for name in names if re.fullmatch("[0-9a-f]{32}", name))
            except FileNotFoundError:
                pass
            except OSError as error:
                log.error("cannot read the entries of ended workloads that wait: %s", error, extra=fields(error))

    def settle(self) -> None:
        """Ask the journal which entries the daemon before this one sent, and send the others. May wait 20 seconds."""
        with self._lock:
            asked = set(self._unsettled)
        if not asked:
            return
        known = self._recorded_runs(asked)
        with self._lock:
            for run in asked:
                self._unsettled.discard(run)
                if known is None:
                    self._mark_possible_second(run)
                if known is not None and run in known:
                    self._remove(run)
                else:
                    self._waiting[run] = None
        self.retry()

    def _mark_possible_second(self, run: str) -> None:
        with contextlib.suppress(OSError, ValueError, ResctrlError):
            entry = json.loads(read_file(self._path(run)))
            entry["RESCTRLMON_POSSIBLE_SECOND"] = "1"
            write_file(self._path(run), json.dumps(entry).encode(), mode=0o600)

    def retry(self) -> None:
        """Send the entries that wait, until the journal refuses one."""
        with self._lock:
            for run in list(self._waiting):
                try:
                    entry = json.loads(read_file(self._path(run)))
                except NotRead:
                    continue  # descriptors or memory are lacking; the next call tries again
                except (OSError, ValueError) as error:
                    log.error("the entry of an ended workload is lost: %s: %s", self._path(run), error)
                    self._lost += 1
                else:
                    if not self._journal.deliver(entry):
                        return
                del self._waiting[run]
                self._remove(run)

    def _remove(self, run: str) -> None:
        # If this fails, the next start asks the journal.
        with contextlib.suppress(OSError):
            os.unlink(self._path(run))

    def describe(self) -> str:
        """Return the present problem as a sentence; "" if there is none."""
        texts = []
        if self._waiting:
            texts.append(
                f"the journal does not accept entries: those of ended workloads ({len(self._waiting)}) wait in "
                f"{self._folder}. See: systemctl status systemd-journald"
            )
        if self._lost:
            texts.append(
                f"the journal lacks entries of ended workloads ({self._lost}): it did not accept them, and they "
                "could not be kept"
            )
        return "; ".join(texts)


def ledger_of(config: Config, setup: Setup, journal: Journal) -> Ledger:
    """Return the ledger of a daemon, with its files in the daemon's folder."""
    ctx = setup.manager.context
    folder = os.path.join(config.runtime_dir, "ledger")
    return Ledger(folder, ctx.mark.boot_id, journal, ctx.quality.final_totals)


def run_of(workload: Workload, boot_id: str) -> str:
    """Return the identifier of a run: 32 hexadecimal digits, different for each run on each boot."""
    first = workload.first
    identity = (boot_id, workload.key, str(workload.generation), first.created_at, str(first.nonce))
    return hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]


def entry_of(workload: Workload, run: str, totals: Iterable[Total], problem: str = "") -> dict[str, str]:
    """Return the fields of the entry. ``problem`` is the reason for which there are no totals."""
    counted = [total for total in totals if total.event.kind is not Kind.GAUGE]
    first = workload.first
    seconds = max(first.completed_ns - first.created_ns, 0) / 1e9
    quality = worst(*(total.quality for total in counted)) if counted else Quality.UNKNOWN
    reasons = dict.fromkeys(total.reason for total in counted if total.reason)
    names, used = names_of(workload.attributes, (member.cgroup for member in workload.members)), cpu_time(workload)
    values: dict[str, str | int] = {
        "run": run,
        "key": workload.key,
        "generation": workload.generation,
        "class": " ".join(group.class_ or "/" for group in workload.groups),
        "namespace": names.namespace,
        "pod": names.pod,
        "container": names.container,
        "unit": names.unit,
        "user": names.user,
        "observed": 1 if workload.is_observed else "",
        "state": workload.state,
        "end_reason": workload.reason,
        "created": first.created_at,
        "ended": first.completed_at,
        "duration_usec": int(seconds * 1e6),
        "cpu_time_usec": "" if used is None else used.inside_ns // 1000,
        "cpu_time_outside_usec": "" if used is None else used.outside_ns // 1000,
        "quality": quality,
        "quality_reason": problem or "; ".join(reasons) or ("" if counted else workload.reason),
    }
    for total in counted:
        name = re.sub("[^a-z0-9_]", "_", total.event.name.lower())
        if total.number is not None:
            values[f"total_{name}"] = digits(total.number)
        values[f"quality_{name}"] = total.quality
    entry = fields(**values, message_id=MessageId.ENDED)["fields"]
    if names.unit_of_members:
        # journalctl -u and systemctl status show entries of root with this field as those of the unit.
        entry["OBJECT_SYSTEMD_UNIT"] = names.unit_of_members
    text = message(workload, counted, seconds, problem)
    return printable_fields(entry | {"MESSAGE": text, "PRIORITY": "6", "SYSLOG_IDENTIFIER": "resctrlmond"})


def message(workload: Workload, totals: Sequence[Total], seconds: float, problem: str = "") -> str:
    """Return the sentence for people: ``shop/web-1: Used 12.3 J core energy, 4.5 GiB memory traffic in 3min 2s.``."""
    attributes = workload.attributes
    pod = attributes.get("pod.name", "")
    name = f"{attributes.get('pod.namespace', '')}/{pod}" if pod else workload.key
    texts = [
        f"{_scaled(total)} {_NAMED[total.event.name]}"
        + ("" if total.quality is Quality.EXACT else f" ({total.quality})")
        for event_name in _NAMED
        for total in totals
        if total.event.name == event_name and total.number is not None
    ]
    if texts:
        return f"{name}: Used {', '.join(texts)} in {duration(seconds)}."
    if any(total.number is not None for total in totals):
        return f"{name}: Ended after {duration(seconds)}."
    return f"{name}: Ended after {duration(seconds)}, with unknown use: {problem or workload.reason or 'no number'}."


def duration(seconds: float) -> str:
    """Return a duration as systemd writes it: ``412ms``, ``3min 2s``, ``1h 5min``, ``2d 3h``."""
    if seconds < 1:
        return f"{int(seconds * 1000)}ms"
    rest, parts = int(seconds), []
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if rest >= size:
            parts.append(f"{rest // size}{name}")
        rest %= size
    return " ".join(parts[:2])


def _scaled(total: Total) -> str:
    assert total.number is not None
    is_bytes = total.event.unit == "bytes"
    step, prefixes = (1024, _BINARY) if is_bytes else (1000, _DECIMAL)
    number, power = float(total.number), 0
    while number >= step and power < len(prefixes) - 1:
        number /= step
        power += 1
    shown = f"{number:.0f}" if is_bytes and not power else f"{number:.1f}"
    return f"{shown} {prefixes[power]}{'B' if is_bytes else 'J'}"


def recorded_in_journal(runs: Collection[str]) -> set[str] | None:
    """Return which of these runs have an entry in the journal; None if it cannot be read. Takes bounded time."""
    matches = [f"RESCTRLMON_RUN={run}" for run in runs]
    query = ["--output=json", "--output-fields=RESCTRLMON_RUN", "--no-pager", "--quiet", "_UID=0"]
    try:
        # Entries that the journal has accepted, but not yet processed, are not in its files.
        _journalctl("--sync")
        lines = _journalctl(*query, f"MESSAGE_ID={MessageId.ENDED}", *matches).splitlines()
        return {str(json.loads(line).get("RESCTRLMON_RUN")) for line in lines}
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        log.log(NOTICE, "cannot read the journal, so entries of ended workloads may be in it twice: %s", error)
        return None


def _journalctl(*arguments: str) -> str:
    done = subprocess.run(
        [_JOURNALCTL, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_JOURNALCTL_S,
        check=True,
    )
    return done.stdout.decode("utf-8", "replace")
