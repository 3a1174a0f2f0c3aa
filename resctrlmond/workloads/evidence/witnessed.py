# SPDX-License-Identifier: Apache-2.0
"""Ask the witness, and keep in the record of a run what is needed to weigh what it has seen (``figures.verdict``).

The witness knows the tasks of a workload by control groups if each member has one of its own. For others, it shows
which tasks were moved into the groups and out of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import LACKS, NotRead, ResctrlError
from resctrlmond.resctrl.tree import Tree
from resctrlmond.resctrl.witness import Move, Moves, Seen, Witness, Write
from resctrlmond.workloads.evidence.foreign_writes import with_writes
from resctrlmond.workloads.evidence.pod_cgroups import MONITOR, container_in
from resctrlmond.workloads.figures.verdict import (
    NOT_LOADED,
    entered_now,
    is_news,
    unknown,
    weighed,
    with_cause,
    with_cgroup,
    with_ids,
    with_new_cgroup,
)
from resctrlmond.workloads.model.clock import boot_ns
from resctrlmond.workloads.model.workload import Group, Member, Proof, Workload, replace

log = logging.getLogger(__name__)

# The inode number of the first PID namespace (include/linux/proc_ns.h, PROC_PID_INIT_INO).
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
# Earlier daemons whose processes the record of a run has.
_MOST_MOVERS = 8


class Look(NamedTuple):
    """All that the witness had seen, the time before the look (``clock.boot_ns``), and the process of this daemon.

    ``writes`` are those of other programs that the ``moves`` have. ``at_paths`` are the control groups that there
    have been at the paths of the workloads (``Witness.at_paths``).
    """

    seen: Seen
    moves: Moves
    writes: Sequence[Write]
    at_ns: int
    mover: int
    at_paths: Mapping[str, Mapping[int, int]]


class Proofs:
    """The proofs of runs, from the witness of a tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._witness = Witness(tree, self._mover)
        # The processes of earlier daemons, and the time at which this one began (``clock.boot_ns``).
        self._earlier: frozenset[int] = frozenset()
        self._begun_ns = boot_ns()
        tree.on_many_writes = self._read_moves

    @property
    def trouble(self) -> str:
        """A text for the administrator if the witness cannot be asked; "" if it can."""
        try:
            self._witness.watch()
        except NotRead as error:
            why = self._witness.why_unavailable() or error
            what = f"no new run is exact without resctrlmond-witness: {why}"
            return f"{what}. Load it: systemctl start resctrlmond-witness.service"
        return ""

    def begin(self) -> Proof:
        """Return the proof of a run that begins now."""
        at_ns = boot_ns()
        try:
            watch, last_move = self._witness.watch_and_last_move()
            return Proof(watch=watch, until_ns=at_ns, moves=last_move, movers=tuple(filter(None, [self._mover()])))
        except NotRead as error:
            log.debug("no witness: %s", error)
            return Proof()

    def continued(self, workload: Workload) -> Workload:
        """Return the workload with the moves that earlier daemons have made, and with this daemon as its mover.

        The PID of an earlier one may be given to another program.
        """
        proof, mover = workload.proof, self._mover()
        self._earlier |= frozenset(proof.movers) - {mover}
        if proof.movers[-1:] == (mover,):
            return workload
        if proof.cgroups:
            # A look takes some ms. The writes of the earlier daemons are known by their time (``writes``).
            return replace(workload, proof=replace(proof, movers=(*proof.movers[-_MOST_MOVERS:], mover)))
        try:
            look = self._look_at_moves()
            seen = self.weighed(workload, look)
        except NotRead:
            return workload  # the next look decides
        if seen.proof.until_ns != look.at_ns:
            return seen
        return replace(seen, proof=replace(seen.proof, moves=look.moves.last, movers=(look.mover,)))

    def entered(
        self,
        workload: Workload,
        member: Member,
        sandbox: str = "",
        *,
        moved: bool = True,
        before_ns: int | None = None,
        last: Workload | None = None,
    ) -> Workload:
        """Return the workload with the control group of a member whose tasks have just been moved into the group.

        ``sandbox`` is the id of the container that keeps the namespaces of the pod, if it is known. ``moved``: a task
        was moved. The tasks must still wait. What the control group has used until now was used outside, and is not
        missing, unless it is more than a runtime needs; of a service, that is so only for what the process of its
        command has used (``before_ns``), and for what its ``last`` run had seen. For a workload that is not known by
        control groups, only the IDs of its groups are looked up.
        """
        if member.commands and (before_ns is None or not moved):
            before_ns = 0
        is_known_by_cgroup = bool(member.cgroup or workload.proof.cgroups)
        if not member.has_tasks:
            return workload
        try:
            if is_known_by_cgroup:
                return self._entered(workload, member, sandbox, before_ns, last)
            # Now, because another program may rename the group before the next look: then its IDs are not found.
            seen = self.weighed(workload, self._look_at_moves())
            if moved and not seen.proof.cause and seen.proof.watch and seen.group_of(member).ids is None:
                seen = unknown(seen, f"the witness has not seen the move of {member.id} into the group")
            return seen if is_news(workload, seen) else workload
        except NotRead as error:
            if not is_known_by_cgroup:
                return workload  # the next look decides
            # Not a reason to leave its tasks out of the group.
            return replace(workload, proof=with_cause(workload.proof, str(error)))

    def _entered(
        self, workload: Workload, member: Member, sandbox: str, before_ns: int | None, last: Workload | None
    ) -> Workload:
        proof = workload.proof
        without = [known.id for known in workload.members if known.pid and not known.cgroup]
        if without:
            return replace(workload, proof=with_cause(proof, f"{without[0]} has no control group of its own"))
        inode, pod = cgroups.inode(member.cgroup), _pod_of(workload, member)
        home = inode if not pod else cgroups.inode(pod)
        if cause := _why_not_known(workload, member, has_cgroups=inode is not None and home is not None):
            proof = with_cause(proof, cause)
        # Assigned again, or below a member that has entered: what it used before was outside.
        above = () if pod else cgroups.inodes_to(member.cgroup)
        is_known = inode in proof.entered or any(other in proof.entered for _, other in above)
        if inode is None or home is None or (is_known and before_ns is None):
            return replace(workload, proof=proof)
        if not (pod or member.pid or member.commands) and self._has_replaced(proof, member.cgroup):
            return replace(workload, proof=with_new_cgroup(proof, inode, member.id))
        of_runtime, sandboxes = _helpers(workload, pod, member, sandbox) if pod else ([], [])
        helpers = dict.fromkeys((*proof.helpers, *of_runtime))
        idle = dict.fromkeys(sandboxes, 0) | proof.idle
        is_first = not proof.cgroups
        # The control group of a pod has what its earlier runs used.
        is_again = bool(pod) and home not in proof.cgroups and workload.generation > 1
        if is_first:
            # No look since the run began was at this control group: use in one below may have been dropped.
            proof = replace(proof, until_ns=workload.first.created_ns)
        if home not in proof.cgroups:
            proof = with_cgroup(proof, home) if before_ns is None else with_new_cgroup(proof, home, member.id)
        if proof.cause:
            return replace(workload, proof=proof)
        path = pod or member.cgroup
        paths = proof.paths | {path: member.id} if member.commands else {path: ""} | proof.paths
        workload = replace(workload, proof=replace(proof, helpers=tuple(helpers), idle=idle, paths=paths))
        # With the RMID of an earlier run, tasks there may have used it too.
        inodes = [home, inode] if is_again else [inode]
        found = self._moved_in(workload, self._witness.moves())
        seen = self._witness.look([home], [moved[-1].new[1] for moved in found.values()])
        workload = _with_history(workload, found, seen)
        if before_ns is not None and is_first and last is not None:
            before_ns += _used_in_last_run(last, inode, workload, seen)
        # No task of a container that has run since before this run has entered.
        living = frozenset(_below(pod)) if is_again else frozenset()
        proof = entered_now(
            workload.proof,
            inodes,
            workload.groups,
            seen,
            before_ns=before_ns,
            has_run=member.is_late,
            living=living,
        )
        return replace(workload, proof=proof)

    def weighed(self, workload: Workload, look: Look | None = None, *, is_last: bool = False) -> Workload:
        """Return the workload with what the witness has seen of it until now, or until a look.

        ``is_last``: the run ends, and no later look can see a move that is still being recorded.
        """
        proof = workload.proof
        if proof.watch is None or workload.is_observed:
            return workload
        try:
            has_use = proof.cgroups and not proof.cause
            now = look or (self._look([workload]) if has_use else self._look_at_moves())
            workload = with_writes(workload, now.moves, now.writes, self._directory)
            if proof.cause:
                return workload
            if not proof.cgroups and not proof.movers:
                return unknown(workload, "resctrlmond cannot distinguish its own moves from those of other programs")
            workload = _with_cgroups(workload, now.at_paths)
            # The numbers of another watch began again.
            found = self._moved_in(workload, now.moves) if now.seen.watch == proof.watch else {}
            found_now = _with_history(workload, found, now.seen)
            found_now = weighed(found_now, now.seen, now.moves, now.at_ns, now.mover)
            # A move is recorded when it has happened, other writes before they change something.
            if is_last and not proof.cgroups and not now.moves.is_whole:
                return unknown(found_now, "the witness was still recording a move")
            return found_now
        except NotRead as error:
            if error.errno in LACKS:
                raise
            return unknown(workload, str(error))

    def look(self, workloads: Iterable[Workload]) -> Look | None:
        """Look at the witness for several workloads; None if that fails: then the look at each states why."""
        try:
            return self._look(workloads)
        except NotRead:
            return None

    def _look(self, workloads: Iterable[Workload]) -> Look:
        at_ns = boot_ns()
        paths = {path for workload in workloads if workload.proof.cgroups for path in _paths(workload)}
        at_paths = self._witness.at_paths(paths) if paths else {}
        seen = self._witness.look()
        return Look(seen, *self.writes(), at_ns, self._mover(), at_paths)

    def _look_at_moves(self) -> Look:
        """Look at the moves only, which takes less time."""
        at_ns = boot_ns()
        moves, writes = self.writes()
        return Look(Seen(self._witness.watch(), ()), moves, writes, at_ns, self._mover(), {})

    def writes(self) -> tuple[Moves, Sequence[Write]]:
        """Return all that was written to resctrl, and the writes of other programs. Raises NotRead."""
        moves = self._witness.moves()
        foreign = [
            write for write in moves.others if write.until_ns > self._begun_ns or write.writer not in self._earlier
        ]
        return moves, foreign

    def _read_moves(self) -> None:
        with contextlib.suppress(NotRead):  # the next look states why
            self._witness.moves()

    def _mover(self) -> int:
        """Return the ID of this process as the witness states it; 0 if that is not known."""
        is_known = self._tree.simulation is not None or os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
        return os.getpid() if is_known else 0

    def _moved_in(self, workload: Workload, moves: Moves) -> dict[str, list[Move]]:
        """Return what was moved into groups whose IDs were not known before, by folder. Raises NotRead."""
        proof, found = workload.proof, dict[str, list[Move]]()
        if not proof.cgroups and moves.before > proof.moves:
            raise NotRead(
                "the witness has overwritten moves that resctrlmond had not read", path=self._witness.folder
            )
        counting = {workload.group_of(member).folder for member in workload.members if member.has_tasks}
        for group in workload.existing_groups:
            if group.ids is not None:
                continue
            if (directory := self._directory(group)) is not None:
                moved = moves.into(directory, group.created_ns)
                if moved:
                    found[group.folder] = moved
                elif proof.cgroups and group.folder in counting and moves.since_ns > group.created_ns:
                    raise NotRead("the witness has overwritten the moves into the group", path=self._witness.folder)
        return found

    def _has_replaced(self, proof: Proof, path: str) -> bool:
        """Return whether a control group at the path has entered in this run, and was removed. Raises NotRead."""
        return any(inode in proof.entered for inode in self._witness.at_paths([path]).get(path, ()))

    def _directory(self, group: Group) -> int | None:
        try:
            found = self._tree.find(group.ref)
        except NotRead:
            raise
        except ResctrlError as error:
            raise NotRead(error.message, path=error.path, errno=error.errno) from error
        return found.inode if found is not None and found.nonce == group.nonce else None


def _why_not_known(workload: Workload, member: Member, *, has_cgroups: bool) -> str:
    """Return why the tasks of the workload cannot be known by control groups, as those of the member; "" if they can.

    ``has_cgroups``: its control group exists, and that of its pod.
    """
    proof = workload.proof
    if proof.watch is None:
        return NOT_LOADED
    if workload.nested.count or workload.part_of:
        # A task that leaves the control group and the group is in neither workload. Moves are not looked up.
        return "it has a control group, and is nested or has nested workloads"
    if not proof.cgroups and any(group.ids is not None for group in workload.groups):
        return f"the control group of {member.id} was not known from the beginning"
    if not has_cgroups:
        return f"the control group of {member.id} was removed"
    if cgroups.cpu_time_ns(member.cgroup) is None:
        return f"the control group of {member.id} does not count CPU time, as in version 1"
    return ""


def _with_cgroups(workload: Workload, at_paths: Mapping[str, Mapping[int, int]]) -> Workload:
    """Return the workload with each control group that its members, or its pod, have had since its run began.

    A start that did not reach resctrlmond can have had one that was removed since. Tasks in a new one of a container
    may be about to enter, those of a service have called.
    """
    proof = workload.proof
    for path, service in _paths(workload).items():
        for inode, removed_ns in at_paths.get(path, {}).items():
            if removed_ns < workload.first.created_ns or inode in proof.cgroups or inode in proof.entered:
                continue
            proof = with_new_cgroup(proof, inode, service) if service else with_cgroup(proof, inode)
    return replace(workload, proof=proof) if proof is not workload.proof else workload


def _paths(workload: Workload) -> dict[str, str]:
    """Return the paths of all control groups of the workload, each with the service that it belongs to, or ""."""
    found = (workload.pod_cgroup, *(member.cgroup for member in workload.members))
    return dict.fromkeys(filter(None, found), "") | workload.proof.paths


def _with_history(workload: Workload, found: Mapping[str, list[Move]], seen: Seen) -> Workload:
    for group in workload.groups:
        if moved := found.get(group.folder):
            workload = workload.with_group(with_ids(group, moved, workload.proof, seen))
    return workload


def _used_in_last_run(last: Workload, inode: int, workload: Workload, seen: Seen) -> int:
    """Return the CPU time (ns) in the control group of a service that its last run had seen, and is outside now.

    A service with RemainAfterExit= keeps its control group. The group may have the IDs of any earlier run.
    """
    if last.proof.cgroups != (inode,) or last.proof.watch != workload.proof.watch:
        return 0
    # A control group below may have been removed since then, and its use dropped: it is not outside now.
    there = {use.cgroups[0] for use in seen.of_cgroups([inode])}
    known = last.proof.inside, last.proof.outside.get(inode, {})
    return sum(ns for used in known for cgroup, ns in used.items() if cgroup in there)


def _pod_of(workload: Workload, member: Member) -> str:
    """Return the control group of the pod that the key names, whatever form a UID has; "" if it names none."""
    if workload.pod_cgroup and member.cgroup.startswith(workload.pod_cgroup.rstrip("/") + "/"):
        return workload.pod_cgroup
    path = os.path.dirname(member.cgroup)
    while path.strip("/"):
        name = os.path.basename(path).removesuffix(".slice").replace("_", "").replace("-", "")
        if name.endswith("pod" + workload.key.replace("_", "").replace("-", "")):
            return path
        path = os.path.dirname(path)
    return ""


def _below(folder: str) -> Iterator[int]:
    """Yield the inode numbers of all control groups below one."""
    for path, names, _ in os.walk(folder):
        for name in names:
            if (inode := cgroups.inode(os.path.join(path, name))) is not None:
                yield inode


def _helpers(workload: Workload, pod: str, member: Member, sandbox: str) -> tuple[list[int], list[int]]:
    """Return the control groups in that of a pod whose tasks are the runtime's: of monitors, and of idle sandboxes.

    The process of a sandbox (pause) waits for its end, and uses nothing but its own start.
    """
    inside = {known.cgroup for known in (*workload.members, member) if known.cgroup}
    sandboxes = {sandbox, *(known.id for known in workload.members if known.kind == "sandbox" and not known.cgroup)}
    helpers, idle = list[int](), list[int]()
    try:
        names = os.listdir(pod)
    except OSError:
        return helpers, idle
    for name in names:
        path = os.path.join(pod, name)
        is_helper, is_sandbox = name.startswith(MONITOR), container_in(name) in sandboxes
        if (is_helper or is_sandbox) and path not in inside and (inode := cgroups.inode(path)) is not None:
            (helpers if is_helper else idle).append(inode)
    return helpers, idle
