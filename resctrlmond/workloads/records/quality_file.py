# SPDX-License-Identifier: Apache-2.0
"""The file ``groups/KEY/quality``: the quality of each total of a workload, for readers of files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from resctrlmond.resctrl.counters import Reading
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.reasons import why_late
from resctrlmond.workloads.figures.verdict import Verdict, verdict
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Quality, worst
from resctrlmond.workloads.model.workload import GroupState, Workload, replace
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.totals import End, Live, LiveReadings, shown, used

log = logging.getLogger(__name__)


# The runs that end at the same time.
_MOST_FINAL = 16
_Relevant = tuple[Workload, Verdict]


class QualityFiles:
    """The ``quality`` files. Each is written before the record or reply with the same quality.

    A caller with a transaction of the workload writes the current qualities, by its record. A caller that only reads
    counters, without a transaction, can make the file only worse, and saves in the checkpoint which readings had no
    number. What only such a caller has seen of the witness is not in the record. So the next checkpoint can make the
    file better than that reply, until a sweep has saved it. The final file is that of the end values and the record.
    """

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._lock = snapshots.lock
        # By key: what the final totals of a run depend on, from the last write of the file until the run is over.
        self._sealed: dict[str, _Relevant] = {}
        # By key: the same, and the final totals of the runs that ended last. Without it, the end of a container takes
        # 1.13 times the CPU time.
        self._final: dict[str, tuple[_Relevant, list[Total]]] = {}

    def before_save(self, before: Workload, workload: Workload) -> None:
        """Update the file if a quality changes when ``workload`` replaces ``before``. See ``update``.

        While a member is put into its group no total is exact, which needs no readings. A run that
        begins with that has no file until its member is in the group.
        """
        joining, was_joining = (
            next((member for member in of.living if member.joining), None) for of in (workload, before)
        )
        if joining and (before.first.state, workload.first.state) == (GroupState.PENDING, GroupState.CREATED):
            return
        relevant, was_relevant = _relevant(workload), _relevant(before)
        if self._sealed and self._sealed.get(workload.key) == relevant:
            # The run is over now, and its file is written last: see ``sealing``.
            del self._sealed[workload.key]
            return
        if relevant == was_relevant:
            return
        if not joining or was_joining or relevant[0] != was_relevant[0]:
            self.update(workload)
        else:
            known = self._snapshots.quality(workload.key)
            names = [line.partition(" ")[0] for line in known.splitlines()]
            late = "".join(f"{name} {Quality.LATE} {why_late(joining)}\n" for name in names)
            if (now := worse(known, late)) != known:
                self._snapshots.write_quality(workload.key, now)

    def update(self, workload: Workload, found: Mapping[str, Sequence[Reading]] | None = None) -> None:
        """Write the qualities up to the last readings on disk. The caller has a transaction.

        ``found`` are the readings that the caller has just kept, by subfolder: a domain without any went offline.
        Raises NotWritten, NotRead.
        """
        with self._lock:
            if not self._snapshots.exists(workload.key):
                return
            # Not with the checkpoint of these readings: another reader may have found a gap since.
            live = {
                subfolder: LiveReadings(readings, self._snapshots.last_read(subfolder) or None)
                for subfolder, readings in (found or {}).items()
            }
            self._write(workload.key, text(shown(workload, used(self._snapshots, workload, live, up_to_last=True))))

    @contextlib.contextmanager
    def sealing(self, workload: Workload, end: End) -> Iterator[None]:
        """Write the final qualities of a run whose end values, of the first group ``end``, are all written."""
        with self._lock:
            totals = used(self._snapshots, workload, {}, end)
            self._write(workload.key, text(shown(workload, totals)))
            yield
            relevant = self._sealed[workload.key] = _relevant(workload)
            self._final.pop(workload.key, None)
            self._final[workload.key] = relevant, totals
            if len(self._final) > _MOST_FINAL:
                del self._final[next(iter(self._final))]

    def final_totals(self, workload: Workload) -> list[Total]:
        """Return the totals of a run whose end values are written: those of the file, if it ended just now.

        Events that its profile leaves out are among them.

        Raises NotRead.
        """
        relevant, totals = self._final.get(workload.key, (None, []))
        return totals if relevant == _relevant(workload) else used(self._snapshots, workload, {})

    def witness(self, workload: Workload, live: Live, totals: Iterable[Total]) -> None:
        """Make the file at least as bad as these totals, before they are returned to a caller.

        Needs no transaction. If the file cannot be written, it is removed, because it would contradict the reply.
        Raises NotRead.
        """
        now = text(shown(workload, totals))
        if not self._snapshots.exists(workload.key) or self._snapshots.quality(workload.key) == now:
            return
        with self._lock:
            files = self._snapshots
            # Since the counters were read, the run may have ended and the next run begun.
            if files.is_complete(workload.key) or files.created_at(workload.key) != workload.first.created_at:
                return
            try:
                for group in workload.groups:
                    if (subfolder := workload.subfolder(group)) in live:
                        files.note_gaps(subfolder, live[subfolder].readings, group.inodes)
                self._write(workload.key, worse(files.quality(workload.key), now))
            except NotWritten as error:
                log.warning("%s: %s", workload.key, error)
                files.remove_quality(workload.key)

    def _write(self, subfolder: str, now: str) -> None:
        if self._snapshots.quality(subfolder) != now:
            self._snapshots.write_quality(subfolder, now)


def text(totals: Iterable[Total]) -> str:
    """Return the file's text: one line for each total, with the event, the quality and the reason, if any."""
    return "".join(
        " ".join([total.event.name, total.quality.value, *total.reason.split()]) + "\n" for total in totals
    )


def worse(one: str, other: str) -> str:
    """Merge two texts: return, for each event, the line with the worse quality; that of ``one`` if both are equal."""
    lines: dict[str, str] = {}
    for line in [*one.splitlines(), *other.splitlines()]:
        name = line.partition(" ")[0]
        known = lines.setdefault(name, line)
        if worst(_quality(known), _quality(line)) is not _quality(known):
            lines[name] = line
    return "".join(f"{lines[name]}\n" for name in sorted(lines))


def _quality(line: str) -> Quality:
    """Return the quality in a line; ``exact`` for an invalid line, so that a worse line replaces it."""
    words = line.split()
    try:
        return Quality(words[1])
    except (IndexError, ValueError):
        return Quality.EXACT


def _relevant(workload: Workload) -> _Relevant:
    """Return the workload with only what its totals by the counters depend on, and the verdict."""
    groups = [
        replace(
            group,
            state=GroupState.CREATED if group.state.has_directory else group.state,
            reason=group.reason if group.state.is_over else "",
            unassigned=(),
            completed_at="",
            completed_ns=0,
        )
        for group in workload.groups
    ]
    core = Workload(
        key=workload.key,
        groups=tuple(groups),
        generation=workload.generation,
        prior_runs=workload.prior_runs,
    )
    return core, verdict(workload)
