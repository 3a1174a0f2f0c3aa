# SPDX-License-Identifier: Apache-2.0
"""Read workloads from the resctrl filesystem and the daemon's records, if the daemon does not run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import grp
import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from resctrlctl.base.errors import CommandError
from resctrlmond.api import translate, types
from resctrlmond.api.errors import name_of
from resctrlmond.api.exit_codes import NO_SUCH_WORKLOAD
from resctrlmond.api.levels import levels
from resctrlmond.api.pods import pods_of
from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import NotMounted, NotRead, ResctrlError
from resctrlmond.resctrl.tree import DEFAULT_PATH, SIMULATION_FSTYPE, Found, Tree
from resctrlmond.workloads.figures.verdict import unknown
from resctrlmond.workloads.groups import nested
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.states import Quality, State
from resctrlmond.workloads.model.workload import Group, Workload, replace
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store
from resctrlmond.workloads.records.totals import Live, LiveReadings, shown, summed, used

MARK = "resctrlmon"
# The machine's own resctrl filesystem, and the daemon's directory with its records.
ROOT = DEFAULT_PATH
RUN = "/run/resctrlmond"
_NOT_A_ROOT = f"Name a mount point of resctrl or of a simulator. To list them: findmnt -t resctrl,{SIMULATION_FSTYPE}"


@dataclass(frozen=True, slots=True)
class TreeView:
    """A resctrl filesystem with the records of its workloads. It is only read.

    ``gid`` is the Unix group that marks the daemon's groups; None if it is unknown: all groups are then foreign.
    ``run`` is the daemon's directory with the records; "" if the filesystem is neither the machine's own nor a
    simulation of a daemon.
    """

    tree: Tree
    gid: int | None
    records: dict[str, Workload] = field(default_factory=dict)
    run: str = ""
    # The workloads with their groups, by what identifies the directory of the group: thousands of records must
    # not be searched for each directory.
    _owners: dict[Hashable, tuple[Workload, Group]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for workload in self.records.values():
            for group in workload.groups:
                if not group.observed:
                    self._owners.setdefault(group.nonce, (workload, group))
                elif group.state.has_directory:
                    self._owners.setdefault((group.ref, group.nonce), (workload, group))

    @classmethod
    def open(cls, root: str, *, simulation: bool = False, run: str = RUN) -> tuple[TreeView, list[str]]:
        """Open the resctrl filesystem at ``root``; return it with notes on records that cannot be read.

        The records of a simulation are those of the daemon that runs on it. Raises CommandError if ``root`` is not a
        resctrl filesystem.
        """
        try:
            tree = Tree.open(root, allow_simulation=simulation)
        except ResctrlError as error:
            if isinstance(error, NotMounted) and root != ROOT:
                # To mount resctrl on a directory that was named by mistake would hide what is in it.
                error.remedy = _NOT_A_ROOT
            raise _command_error("read the groups", error) from error
        if tree.simulation is not None:
            run = _run_beside(root)
        records, notes = _records(run) if run else ({}, [])
        return cls(tree, _mark(run), records, run), notes

    def refreshed(self) -> TreeView:
        """Return the view with the present records, which change as soon as the daemon runs again."""
        records, _ = _records(self.run) if self.run else ({}, [])
        return dataclasses.replace(self, gid=_mark(self.run), records=records)

    def workloads(self) -> types.ListReply:
        """Return the reply of ``List``. Raises CommandError."""
        try:
            scanned = self.tree.scan()
            every = [(found, *self._owner(found)) for found in scanned]
            # A workload in several classes is listed once, with its first group.
            listed = [
                self._reported(found, workload)
                for found, workload, group in every
                if (workload is None and found.gid == self.gid)
                or (workload is not None and group is not None and not group.folder)
            ]
        except ResctrlError as error:
            raise _command_error("list the workloads", error) from error
        keys = {workload.key for workload in listed}
        listed += [_from_workload(workload) for key, workload in self.records.items() if key not in keys]
        foreign = [
            translate.foreign(found) for found, workload, _ in every if found.gid != self.gid and workload is None
        ]
        return types.ListReply(workloads=listed, foreign=foreign)

    def pods(self) -> types.ListPodsReply:
        """Return the reply of ``ListPods``, with only the pods that have a group. Raises CommandError."""
        return types.ListPodsReply(pods=pods_of((), self.workloads().workloads), reported=[])

    def read(self, key: str) -> types.ReadReply:
        """Return the reply of ``Read``. Raises CommandError, with status 4 if there is no such workload."""
        action = f"show {key!r}"
        try:
            scanned = self.tree.scan()
            for found in scanned:
                workload, _ = self._owner(found)
                is_ours = workload is not None or found.gid == self.gid
                if is_ours and key == (workload.key if workload else found.ref.name):
                    return self._read(found, workload, scanned)
        except ResctrlError as error:
            raise _command_error(action, error) from error
        if workload := self.records.get(key):
            return self._reply(_from_workload(workload), workload, {})
        raise CommandError(
            f"cannot {action}: there is no such workload. See: resctrlctl list", NO_SUCH_WORKLOAD, "NoSuchWorkload"
        )

    def usages(self, *, with_ended: bool) -> list[types.Usage]:
        """Return the use of each workload, as ``ReadAll`` does. Raises CommandError."""
        return [
            self._usage(workload)
            for workload in sorted(self.workloads().workloads, key=lambda workload: workload.key)
            if with_ended or not workload.state.is_over
        ]

    def _usage(self, workload: types.Workload) -> types.Usage:
        try:
            reply = self.read(workload.key)
        except CommandError as error:
            return types.Usage(workload=workload, totals=[], levels=[], error=str(error))
        return types.Usage(
            workload=reply.workload,
            read_at=reply.workload.completed_at or utc_now(),
            read_ns=reply.read_ns,
            totals=reply.totals,
            levels=levels(reply.readings),
            domains=reply.domains,
        )

    def read_foreign(self, foreign: types.Foreign) -> types.ReadForeignReply:
        """Return the reply of ``ReadForeign`` for a group of ``workloads()``. Raises CommandError."""
        try:
            for found in self.tree.scan():
                if found.gid != self.gid and translate.foreign(found) == foreign:
                    readings = as_replies(self.tree.read(found.ref))
                    return types.ReadForeignReply(foreign=foreign, readings=readings)
        except ResctrlError as error:
            raise _command_error(f"show {foreign.name!r}", error) from error
        raise CommandError(
            f"cannot show {foreign.name!r}: the group was removed. See: resctrlctl list",
            NO_SUCH_WORKLOAD,
            "NoSuchWorkload",
        )

    def _read(self, found: Found, workload: Workload | None, scanned: list[Found]) -> types.ReadReply:
        live: Live = {found.ref.name: LiveReadings(self.tree.read(found.ref))}
        if workload:
            owned = [(other, *self._owner(other)) for other in scanned]
            live = {
                workload.subfolder(group): LiveReadings(self.tree.read(other.ref))
                for other, owner, group in owned
                if group is not None and owner is workload
            }
        return self._reply(self._reported(found, workload), workload, live)

    def _reply(self, reported: types.Workload, workload: Workload | None, live: Live) -> types.ReadReply:
        values = summed(one.readings for one in live.values())
        readings = [one for one in values if workload is None or workload.shows(one.event)]
        snapshots = self._snapshots()
        workload = nested.with_ended(snapshots, self.records.get, workload) if workload else None
        totals = shown(workload, used(snapshots, workload, live)) if workload else []
        names = [total.event.name for total in totals]
        inside = shown(workload, nested.totals_on_disk(workload, names)) if workload else []
        return types.ReadReply(
            workload=reported,
            read_ns=reported.completed_ns or boot_ns(),
            readings=[translate.reading(reading) for reading in readings],
            totals=[translate.total(total) for total in totals],
            domains=translate.domain_uses(totals, readings) or None,
            nested=[translate.total(total) for total in inside] or None,
        )

    def _snapshots(self) -> Snapshots:
        return Snapshots(f"{self.run}/groups", f"{self.run}/completed")

    def _owner(self, found: Found) -> tuple[Workload | None, Group | None]:
        """Return the workload and its group whose directory was found, by the rules of the daemon; else None.

        With the mark, the nonce decides whether a record is about this directory. Without it, it may be observed.
        """
        identity: Hashable = found.nonce if found.gid == self.gid else (found.ref, found.inode)
        return self._owners.get(identity, (None, None))

    def _reported(self, found: Found, workload: Workload | None) -> types.Workload:
        if workload is not None:
            return _from_workload(workload, found)
        return types.Workload(
            key=found.ref.name,
            class_=found.ref.class_,
            state=State.ACTIVE if self.tree.tasks(found.ref) else State.IDLE,
            reason="its record cannot be read",
            path=found.path,
            generation=1,
            baseline=Quality.UNKNOWN,
            claims=(),
            members=(),
            attributes={},
        )


def as_replies(readings: Iterable[Reading]) -> list[types.Reading]:
    """Return readings as the daemon sends them."""
    return [translate.reading(reading) for reading in readings]


def _from_workload(workload: Workload, found: Found | None = None) -> types.Workload:
    if found is not None:
        workload = workload.with_group(replace(workload.first, class_=found.ref.class_))
    return translate.workload_of(workload, found.path if found else None)


def _run_beside(root: str) -> str:
    """Return the daemon's directory of ``resctrlmond --simulate`` (daemon/simulated.py); "" if there is none."""
    top, name = os.path.split(os.path.realpath(root))
    run = os.path.join(top, "run")
    return run if name == "resctrl" and os.path.isdir(os.path.join(run, "records")) else ""


def _records(run: str) -> tuple[dict[str, Workload], list[str]]:
    """Return the records of workloads by key, and notes on records that cannot be read."""
    folder = f"{run}/records"
    try:
        loaded = list(Store(folder).read_all())
    except NotRead as error:
        if error.errno == errno.ENOENT:
            return {}, []  # the daemon has not run since the boot
        if error.errno == errno.EACCES:
            return {}, [f"only root and the group {MARK} can read {folder}: names, claims and members are not shown"]
        return {}, [f"{error}. Names, claims and members are not shown"]
    records = {workload.key: _unseen(workload) for workload in loaded if isinstance(workload, Workload)}
    return records, [str(damaged) for damaged in loaded if not isinstance(damaged, Workload)]


def _unseen(workload: Workload) -> Workload:
    """Return the workload without what its record has about its tasks: this may be older than the counters."""
    return workload if workload.state.is_over else unknown(workload, "read without resctrlmond")


def _mark(run: str) -> int | None:
    """Return the Unix group that marks the daemon's groups: the owning group of the records, which it also marks."""
    if run:
        with contextlib.suppress(OSError):
            return os.stat(f"{run}/records").st_gid
    try:
        return grp.getgrnam(MARK).gr_gid
    except KeyError:
        return None


def _command_error(action: str, error: ResctrlError) -> CommandError:
    row = name_of(error)
    return CommandError(f"cannot {action}: {error}", row.exit_code, row.name)
