# SPDX-License-Identifier: Apache-2.0
"""Workloads read straight from resctrl and the records, for when the daemon does not run. Changes nothing."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
from dataclasses import dataclass, field

from resctrlctl.ask import Failure
from resctrlmond.api import translate
from resctrlmond.api.errors import NO_SUCH_WORKLOAD, name_of
from resctrlmond.api.types import Foreign, Group, ListReply, ReadForeignReply, ReadReply, Total
from resctrlmond.resctrl.errors import NotRead, ResctrlError
from resctrlmond.resctrl.tree import Found, Tree
from resctrlmond.workloads.accounting import Quality
from resctrlmond.workloads.model import State, Workload, replace
from resctrlmond.workloads.snapshot import Snapshots
from resctrlmond.workloads.store import Store
from resctrlmond.workloads.totals import Live, summed, used

MARK = "resctrlmon"
RUN = "/run/resctrlmond"


@dataclass(frozen=True, slots=True)
class TreeView:
    """A resctrl tree with what the records say of it.

    ``gid`` marks the groups that are ours (None: it is not known, and no group is). ``run`` is the daemon's
    folder under /run; "" where the tree is not the machine's own and no workload speaks of it.
    """

    tree: Tree
    gid: int | None
    records: dict[str, Workload] = field(default_factory=dict)
    run: str = ""

    @classmethod
    def open(cls, root: str, *, simulation: bool = False, run: str = RUN) -> tuple[TreeView, list[str]]:
        """The tree at ``root``, and notes on what could not be read. Raises Failure where it is no resctrl."""
        try:
            tree = Tree.open(root, allow_simulation=simulation)
        except ResctrlError as error:
            raise _failure("read the groups", error) from error
        records, notes = _records(run) if run else ({}, [])
        return cls(tree, _mark(run), records, run), notes

    def groups(self) -> ListReply:
        """What ``List`` would answer. Raises Failure."""
        try:
            found = self.tree.scan()
            ours = [group for group in found if group.gid == self.gid]
            known = [(group, self._workload(group)) for group in ours]
            # A workload in several classes is told once, by its first group.
            listed = [
                self._group(group, one) for group, one in known if one is None or one.first.nonce == group.nonce
            ]
        except ResctrlError as error:
            raise _failure("list the groups", error) from error
        standing = {group.key for group in listed}
        listed += [_from_workload(workload) for key, workload in self.records.items() if key not in standing]
        foreign = [translate.foreign(group) for group in found if group.gid != self.gid]
        return ListReply(groups=listed, foreign=foreign)

    def read(self, key: str) -> ReadReply:
        """What ``Read`` would answer. Raises Failure, with status 4 where there is no such workload."""
        what = f"show {key!r}"
        try:
            scanned = self.tree.scan()
            for found in scanned:
                workload = self._workload(found)
                if found.gid == self.gid and key == (workload.key if workload else found.ref.name):
                    return self._read(found, workload, scanned)
        except ResctrlError as error:
            raise _failure(what, error) from error
        if workload := self.records.get(key):
            return ReadReply(group=_from_workload(workload), readings=[], totals=self._totals(workload, {}))
        raise Failure(
            f"cannot {what}: there is no such workload. See: resctrlctl list", NO_SUCH_WORKLOAD, "NoSuchGroup"
        )

    def read_foreign(self, foreign: Foreign) -> ReadForeignReply:
        """What ``ReadForeign`` would answer for a group of ``groups()``. Raises Failure."""
        try:
            for found in self.tree.scan():
                if found.gid != self.gid and translate.foreign(found) == foreign:
                    readings = [translate.reading(reading) for reading in self.tree.read(found.ref)]
                    return ReadForeignReply(foreign=foreign, readings=readings)
        except ResctrlError as error:
            raise _failure(f"show {foreign.name!r}", error) from error
        raise Failure(
            f"cannot show {foreign.name!r}: the group was removed. See: resctrlctl list",
            NO_SUCH_WORKLOAD,
            "NoSuchGroup",
        )

    def _read(self, found: Found, workload: Workload | None, scanned: list[Found]) -> ReadReply:
        live: Live = {found.ref.name: self.tree.read(found.ref)}
        if workload:
            places = {group.nonce: workload.place(group) for group in workload.groups}
            ours = [one for one in scanned if one.gid == self.gid and one.nonce in places]
            live = {places[one.nonce]: self.tree.read(one.ref) for one in ours}
        return ReadReply(
            group=self._group(found, workload),
            readings=[translate.reading(reading) for reading in summed(live)],
            totals=self._totals(workload, live) if workload else [],
        )

    def _totals(self, workload: Workload, live: Live) -> list[Total]:
        return [translate.total(total) for total in used(self._snapshots(), workload, live)]

    def _snapshots(self) -> Snapshots:
        return Snapshots(f"{self.run}/groups", f"{self.run}/completed")

    def _workload(self, found: Found) -> Workload | None:
        # As the daemon decides it: the nonce says whether a record is about this very directory.
        return next(
            (
                workload
                for workload in self.records.values()
                if found.gid == self.gid and found.nonce in {group.nonce for group in workload.groups}
            ),
            None,
        )

    def _group(self, found: Found, workload: Workload | None) -> Group:
        if workload is not None:
            return _from_workload(workload, found)
        return Group(
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


def _from_workload(workload: Workload, found: Found | None = None) -> Group:
    if found is not None:
        workload = workload.with_group(replace(workload.first, class_=found.ref.class_))
    return translate.group(workload, found.path if found else None)


def _records(run: str) -> tuple[dict[str, Workload], list[str]]:
    folder = f"{run}/records"
    try:
        loaded = list(Store(folder).read_all())
    except NotRead as error:
        if error.errno == errno.ENOENT:
            return {}, []  # it has not run since the boot
        if error.errno == errno.EACCES:
            return {}, [f"{folder} is for root and the group {MARK} only: names, claims and members are not shown"]
        return {}, [f"{error}. Names, claims and members are not shown"]
    records = {workload.key: workload for workload in loaded if isinstance(workload, Workload)}
    return records, [str(damaged) for damaged in loaded if not isinstance(damaged, Workload)]


def _mark(run: str) -> int | None:
    """The Unix group of our monitoring groups: that of the records, which has it since the daemon's last start."""
    if run:
        with contextlib.suppress(OSError):
            return os.stat(f"{run}/records").st_gid
    try:
        return grp.getgrnam(MARK).gr_gid
    except KeyError:
        return None


def _failure(what: str, error: ResctrlError) -> Failure:
    row = name_of(error)
    return Failure(f"cannot {what}: {error}", row.exit_code, row.name)
