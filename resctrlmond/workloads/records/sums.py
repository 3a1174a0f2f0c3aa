# SPDX-License-Identifier: Apache-2.0
"""The sums: what all workloads used since the boot, by namespace, slice, user and profile.

They are in the file ``sums.json`` and in memory. A run is added in the step that ends it: first to the file, then its
record states the end. For each run whose record does not state the end yet, the file also holds the amounts of that
run that it includes, so a daemon that is killed between the two steps counts no run twice. If the file cannot be
written, the run ends nevertheless: its record states that the file lacks it (``Workload.uncounted``), and a tick
writes the file later. If that record is replaced or removed before, the file is renamed, which needs no space: a
daemon that finds it under the other name would lack a run without knowing which, and begins the sums again.

The sums have all use of each run that has not ended at ``since``, also its use before.

The amounts of running workloads are added when a caller asks. Amounts that a caller has got are not taken back: a
counter that falls would look like a new start. If a running workload gets another name, only what it uses from then
on is added to that name. What was added to the former names is in the file too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import localcontext

import msgspec

from resctrlmond.resctrl.counters import EXACTLY
from resctrlmond.resctrl.errors import NotRead, ResctrlError
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.names import names_of
from resctrlmond.workloads.model.states import NameKind, Quality
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.records.atomic_files import read_file, write_file, writing
from resctrlmond.workloads.records.sums_entries import (
    MAX_NAME_LENGTH,
    MAX_NAMES,
    Amounts,
    Counted,
    Names,
    NameSums,
    Run,
    RunUse,
)
from resctrlmond.workloads.records.sums_format import Contents, Unusable, decode, encode
from resctrlmond.workloads.records.usage import Usage

log = logging.getLogger(__name__)

# Names beyond the limits of a grouping. Not a namespace of Kubernetes, nor a slice, a user or a profile.
OTHER = "(other)"

_MODE = 0o640
_SET_ASIDE = ".unreadable"
_OUTDATED = ".outdated"
# So many ends are kept for readings that began before them, and each for at least so long: a reading takes less.
_MOST_ENDS = 4096
_KEEP_ENDS_S = 120.0


class NameUse(msgspec.Struct, frozen=True):
    """The use of all workloads of one name: of those that ended, and of those that run until now.

    ``ends`` is how many runs ended, by the worst quality of their totals. ``running`` is how many have not ended.
    """

    name: str
    ends: dict[Quality, int]
    running: int
    amounts: Amounts


class SumsUse(msgspec.Struct, frozen=True):
    """The sums by grouping, each in order of the name, from one reading.

    ``since`` and ``read_at`` are times (RFC 3339, UTC). ``reset`` is the reason for which the sums began again after
    the boot; "" if they did not. ``lost`` is how many of the ended runs had lost a group.
    """

    since: str
    read_at: str
    reset: str
    lost: int
    names: dict[NameKind, list[NameUse]]


class Sums:
    """The sums in the file ``path``. ``final_totals`` returns the totals of a run that has ended. Thread-safe.

    The guard is held while numbers are added, never during an access to a file.
    """

    def __init__(self, path: str, boot_id: str, final_totals: Callable[[Workload], Sequence[Total]]) -> None:
        self._path = path
        self._boot_id = boot_id
        self._final_totals = final_totals
        self._guard = threading.Lock()
        self._writing = threading.Lock()
        self._since, self._reset, self._lost = utc_now(), "", 0
        self._names: dict[NameKind, dict[str, NameSums]] = {grouping: {} for grouping in NameKind}
        # The runs in the sums whose records do not state that yet.
        self._counted: dict[Run, Counted] = {}
        # The ended runs that are missing in the sums, because their totals could not be read.
        self._unread: set[Run] = set()
        # By key: the amounts of running workloads that a caller has got.
        self._shown: dict[str, RunUse] = {}
        # By key: the run of amounts in ``_shown`` that the file of the last daemon has.
        self._restored: dict[str, Run] = {}
        # By key: when a run ended (time.monotonic()). Readings that began before are about that run.
        self._ends: dict[str, float] = {}
        # The version of the sums in memory, and that of the file.
        self._version, self._written = 1, 0
        # A file may have the other name, because the records of these runs are gone, or about to go.
        self._may_be_outdated = False
        self._going: set[Run] = set()
        self._problem = ""

    # -- start

    def load(self) -> str:
        """Read the file of the last daemon. Return why the sums begin again, as a sentence; "" if they do not.

        A file that cannot be used is set aside. Raises NotRead if it is not known what the file holds.
        """
        path = self._path
        try:
            self._take(self._read())
            self._remove_outdated()
        except FileNotFoundError:
            path += _OUTDATED
            if not os.path.lexists(path):
                return ""
            why = "it lacks a run whose record was replaced or removed while the file could not be written"
        except (Unusable, OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
            why = str(error)
        except NotRead as error:
            if error.errno != errno.EIO:
                raise
            why = str(error)
        else:
            return ""
        try:
            os.rename(path, self.set_aside_path)
        except OSError as error:
            rest = f"the file could not be kept as {self.set_aside_path}: {error.strerror}"
        else:
            rest = f"the file is kept as {self.set_aside_path}: remove it if it is not needed"
        self._since, self._reset = utc_now(), why
        return f"{self._path}: {why}. The sums begin again; {rest}"

    @property
    def set_aside_path(self) -> str:
        """The path of a file that could not be used."""
        return self._path + _SET_ASIDE

    def _remove_outdated(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path + _OUTDATED)

    def _read(self) -> bytes:
        try:
            return read_file(self._path)
        except NotRead as error:
            if error.errno != errno.EIO:
                raise
        return read_file(self._path)  # an error that passes must not cost the sums

    def _take(self, data: bytes) -> None:
        """Replace the sums in memory by those of the file. Raises Unusable and ValueError, before any change."""
        found = decode(data, self._boot_id)
        self._since, self._reset, self._lost = found.since, found.reset, found.lost
        self._names, self._counted, self._written = found.names, found.counted, self._version
        self._shown = {run[0]: use for run, use in found.renamed.items()}
        self._restored = {run[0]: run for run in found.renamed}
        for use in self._shown.values():
            for known in (use.names, *use.parts):
                for grouping, name in zip(NameKind, known, strict=True):
                    self._names[grouping].setdefault(name, NameSums())

    def recover(self, workloads: Mapping[str, Workload], unreadable: Collection[str]) -> None:
        """Compare with the records of the last daemon, and write the file.

        ``unreadable`` are the keys of further records.
        """
        if not self._written and not self._reset and (workloads or unreadable):
            self._reset = "the file is missing"
            log.warning("%s is missing: the sums begin again", self._path)
        for run in list(self._counted):
            workload = workloads.get(run[0])
            is_open = run[0] in unreadable if workload is None else run_of(workload) == run and _is_open(workload)
            if not is_open:
                del self._counted[run]
        with localcontext(EXACTLY):
            for key, run in self._restored.items():
                workload = workloads.get(key)
                is_gone = workload is None or (run_of(workload) != run and workload.prior_runs is None)
                if is_gone and key not in unreadable:
                    self._keep_discarded(key)
                else:
                    self._shown[key].workload = workload
        self._restored.clear()
        for workload in workloads.values():
            if workload.uncounted and workload.is_finished:
                self._count(workload)  # also if the file has it: its totals may not have been read
        self.write()

    # -- ends

    def count(self, workload: Workload) -> bool:
        """Add a run that has ended, or replace what was added of it before. Return whether the file has it.

        Raises nothing: an end must not fail because of the sums.
        """
        return self._count(workload) and self.write()

    def _count(self, workload: Workload) -> bool:
        """Add a run to the sums in memory. Return False if its totals cannot be read: it is missing until then."""
        run = run_of(workload)
        totals: Sequence[Total] = ()
        problem = ""
        try:
            totals = self._final_totals(workload)
        except (ResctrlError, OSError) as error:
            problem = f"the sums lack a run of {workload.key}: {error}"
        except Exception:
            # A defect here must not keep a workload from ending.
            log.exception("%s: the totals of the ended run cannot be computed for the sums", workload.key)
        with self._guard, localcontext(EXACTLY):
            if problem:
                self._unread.add(run)
                self._problem = problem
            else:
                self._unread.discard(run)
            known = self._counted.get(run)
            if known is None:
                use = self._shown.pop(workload.key, None) or RunUse(())
                use.names = self._slots(_names(workload))
            else:
                use = known.use.copy()
            use.take(totals)
            use.downgrade_except({total.event.name for total in totals})
            use.workload, use.has_run = None, use.has_run or bool(workload.members or problem)
            self._ends[workload.key] = time.monotonic()
            if len(self._ends) > _MOST_ENDS:
                self._forget_ends(time.monotonic() - _KEEP_ENDS_S)
            counted = Counted(use, self._version + 1, _had_loss(workload))
            if known is not None:
                counted.version = known.version
                if (known.use, known.had_loss) == (use, counted.had_loss):
                    return not problem
                counted.version = self._version + 1
                self._add(known, -1)
            self._add(counted, 1)
            self._counted[run] = counted
            self._version += 1
        return not problem

    def saved(self, workload: Workload) -> None:
        """Forget the amounts of a run whose record now states the end, and that the file has it."""
        with self._guard:
            # A reading that began since count() may have found it running.
            self._ends[workload.key] = time.monotonic()
            if not workload.uncounted:
                self._counted.pop(run_of(workload), None)

    def lacks(self, workload: Workload) -> bool:
        """Return whether the file lacks an ended run."""
        run = run_of(workload)
        with self._guard:
            counted = self._counted.get(run)
            return run in self._unread or (counted is not None and counted.version > self._written)

    def unsettled(self) -> list[Run]:
        """Return the ended runs whose records may state that the file lacks them."""
        with self._guard:
            # A run that could not be read may be counted too, by what was shown of it.
            return [*dict.fromkeys([*self._unread, *self._counted])]

    def settle(self, workload: Workload | None, run: Run) -> bool:
        """Count a run of ``unsettled`` again if its totals could not be read. Return whether the file has it now.

        ``workload`` is the present one of its key. A run that has no record any more is forgotten.
        """
        if workload is None or run_of(workload) != run:
            with self._guard:
                self._unread.discard(run)
                counted = self._counted.get(run)
                if counted is not None and counted.version <= self._written:
                    del self._counted[run]
            return False
        if not workload.is_finished or (run in self._unread and not self._count(workload)):
            return False
        return self.write()

    def prepare_removal(self, workload: Workload) -> None:
        """Write the file, which lacks an ended run whose record is about to be replaced or removed.

        If that fails, rename the file: the next daemon must not believe it. Raises nothing. If the record remains,
        call ``cancel_removal``.
        """
        run = run_of(workload)
        if run in self._unread:
            self._count(workload)
        if self.write():
            return
        with self._writing:
            with self._guard:
                counted = self._counted.get(run)
                is_written = counted is None or counted.version <= self._written
            if is_written:
                return
            self._may_be_outdated = True
            self._going.add(run)
            try:
                os.rename(self._path, self._path + _OUTDATED)
            except FileNotFoundError:
                pass  # renamed before, or never written
            except OSError as error:
                log.error("the sums lack a run of %s if resctrlmond is killed: %s", workload.key, error)

    def cancel_removal(self, workload: Workload) -> None:
        """Take the file's name back if no other record has gone: that of this run is on the disk."""
        run = run_of(workload)
        with self._writing:
            if run not in self._going:
                return
            self._going.remove(run)
            if not self._going:
                # If this fails, the next start begins the sums again.
                with contextlib.suppress(OSError):
                    os.rename(self._path + _OUTDATED, self._path)

    def _add(self, counted: Counted, sign: int) -> None:
        """Add a run to its names, or subtract it with the ``sign`` -1."""
        use, quality = counted.use, counted.use.quality
        for grouping, name in zip(NameKind, use.names, strict=True):
            of = self._name(grouping, name)
            of.ends[quality] = of.ends.get(quality, 0) + sign
            of.missing += sign * use.is_missing
        for names, event, of_amount, number in use.amounts():
            for grouping, name in zip(NameKind, names, strict=True):
                amounts = self._name(grouping, name).amounts.setdefault(event, {})
                amounts[of_amount] = amounts.get(of_amount, 0) + sign * number
        self._lost += sign * counted.had_loss

    def _name(self, grouping: NameKind, name: str) -> NameSums:
        """Return the sums of a name, which is about to change."""
        of = self._names[grouping].setdefault(name, NameSums())
        of.encoded = None
        return of

    def _slots(self, names: Names) -> Names:
        """Return the names under which a run with these names is counted, and reserve them."""
        return tuple(self._slot(grouping, name) for grouping, name in zip(NameKind, names, strict=True))

    def _slot(self, grouping: NameKind, name: str) -> str:
        """Return the name under which this one is counted, itself or OTHER, and reserve it."""
        known = self._names[grouping]
        if name in known:
            return name
        if name and (len(name) > MAX_NAME_LENGTH or sum(map(_takes_slot, known)) >= MAX_NAMES):
            name = OTHER
        if name not in known:
            known[name] = NameSums()
            self._version += 1
        return name

    # -- file

    def write(self) -> bool:
        """Write the file if it is out of date. Return whether it is up to date now. One write serves several ends."""
        with self._guard:
            needed = self._version
        with self._writing:
            if self._written >= needed:
                return True
            try:
                with self._guard:
                    version, data = self._version, self._encoded()
                with writing(self._path):
                    write_file(self._path, data, mode=_MODE)
            except NotWritten as error:
                self._report(f"the sums are out of date: {error}")
                return False
            except Exception:
                log.exception("the sums cannot be written")
                self._report("the sums are out of date: see the log of resctrlmond")
                return False
            if self._may_be_outdated:
                self._remove_outdated()
                self._may_be_outdated = False
            self._going.clear()
            with self._guard:
                self._written = version
                if not self._unread:
                    self._problem = ""
            return True

    def _report(self, problem: str) -> None:
        with self._guard:
            if self._problem != problem:
                log.warning("%s", problem)
            self._problem = problem

    @property
    def problem(self) -> str:
        """The present problem as a sentence; "" if there is none."""
        return self._problem

    def _encoded(self) -> bytes:
        # The amounts of former names cannot be computed again.
        renamed = {
            run_of(use.workload): use
            for use in self._shown.values()
            if use.workload is not None and any(names != use.names for names in use.parts)
        }
        contents = Contents(self._since, self._reset, self._lost, self._names, self._counted, renamed)
        return encode(contents, self._boot_id)

    # -- reading

    def read(
        self,
        usages: Iterable[Usage],
        begun: float,
        find: Callable[[str], Workload | None],
        groupings: Collection[NameKind],
    ) -> SumsUse:
        """Return the sums of these groupings with the ``usages`` of a reading that began at ``begun``.

        ``begun`` is of time.monotonic(). ``find`` returns the present workload of a key. The calls come in the order
        of their readings.
        """
        read = set()
        with localcontext(EXACTLY):
            for usage in usages:
                read.add(usage.workload.key)
                with self._guard:  # for each, so that an end does not wait for all of them
                    self._show(usage, begun)
        with self._guard, localcontext(EXACTLY):
            for key in self._shown.keys() - read:
                workload = find(key)
                if workload is None or workload.is_finished:
                    self._keep_discarded(key)
            names = {
                grouping: {name: of.copy() for name, of in self._names[grouping].items()} for grouping in groupings
            }
            running: dict[tuple[NameKind, str], int] = {}
            for use in self._shown.values():
                for grouping, name in zip(NameKind, use.names, strict=True):
                    if grouping in names:
                        running[grouping, name] = running.get((grouping, name), 0) + 1
                        names[grouping][name].missing += use.is_missing
                for of_names, event, quality, number in use.amounts():
                    for grouping, name in zip(NameKind, of_names, strict=True):
                        if grouping in names:
                            amounts = names[grouping][name].amounts.setdefault(event, {})
                            amounts[quality] = amounts.get(quality, 0) + number
            _add_missing(names)
            found = {
                grouping: [
                    NameUse(name, of.ends, running.get((grouping, name), 0), of.amounts)
                    for name, of in sorted(of_grouping.items())
                ]
                for grouping, of_grouping in names.items()
            }
            return SumsUse(self._since, utc_now(), self._reset, self._lost, found)

    def _show(self, usage: Usage, begun: float) -> None:
        """Add the use of a running workload to the shown amounts, unless the sums have its end already."""
        workload = usage.workload
        if self._ends.get(workload.key, -1.0) >= begun:
            return
        is_ending = workload.state is State.ENDING or workload.state.is_over
        if is_ending and run_of(workload) in self._counted:
            return
        use = self._shown.setdefault(workload.key, RunUse(()))
        if use.workload is not workload:
            names = self._slots(_names(workload))
            if use.parts and names != use.names:
                self._version += 1
            use.workload, use.names = workload, names
            use.has_run = use.has_run or bool(workload.members)
        use.take(usage.totals)
        if usage.error:
            use.downgrade_except(())

    def _keep_discarded(self, key: str) -> None:
        """Keep the amounts that a caller has got of a run that a failed call has undone since then."""
        use = self._shown.pop(key)
        for names, event, quality, number in use.amounts():
            for grouping, name in zip(NameKind, names, strict=True):
                if quality is not Quality.UNKNOWN and number:
                    amounts = self._name(grouping, name).amounts.setdefault(event, {})
                    amounts[Quality.ESTIMATED] = amounts.get(Quality.ESTIMATED, 0) + number
                    self._version += 1

    def _forget_ends(self, before: float) -> None:
        self._ends = {key: then for key, then in self._ends.items() if then >= before}


def run_of(workload: Workload) -> Run:
    """Return the identity of a run."""
    return workload.key, workload.generation, workload.first.nonce


def _is_open(workload: Workload) -> bool:
    """Whether the record does not state yet that the run has ended and is in the file."""
    return not workload.is_finished or workload.uncounted


def _had_loss(workload: Workload) -> bool:
    return workload.state is State.LOST or workload.prior_runs is not None


def _names(workload: Workload) -> Names:
    """Return the names of a workload, in the order of NameKind."""
    found = names_of(workload.attributes, [*(member.cgroup for member in workload.members), workload.pod_cgroup])
    return found.namespace, found.slice, found.user, workload.profile


def _takes_slot(name: str) -> bool:
    return name not in ("", OTHER)


def _add_missing(names: Mapping[NameKind, Mapping[str, NameSums]]) -> None:
    """Count the runs without any total as runs without a number of each event that the machine has."""
    every = [of for of_grouping in names.values() for of in of_grouping.values()]
    events = dict.fromkeys(event for of in every for event in of.amounts)
    for of in every:
        for event in events if of.missing else ():
            amounts = of.amounts.setdefault(event, {})
            amounts[Quality.UNKNOWN] = amounts.get(Quality.UNKNOWN, 0) + of.missing
