# SPDX-License-Identifier: Apache-2.0
"""Ask the witness, and keep in the record of a run what is needed to weigh what it has seen (``figures.verdict``).

Only workloads of which each member has a control group of its own can be weighed: the witness knows tasks by these.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import LACKS, NotRead
from resctrlmond.resctrl.tree import Tree
from resctrlmond.resctrl.witness import Entry, Seen, Witness
from resctrlmond.workloads.evidence.pod_cgroups import container_in
from resctrlmond.workloads.figures.verdict import entered_now, unknown, weighed, with_cause, with_ids
from resctrlmond.workloads.model.clock import boot_ns
from resctrlmond.workloads.model.workload import Group, Member, Proof, Workload, replace

log = logging.getLogger(__name__)

# CRI-O runs a monitor for each container, in a control group beside that of the container.
_MONITOR = "crio-conmon-"


# All that the witness had seen, and the time before the look (``clock.boot_ns``).
Look = tuple[Seen, int]


class Proofs:
    """The proofs of runs, from the witness of a tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._witness = Witness(tree)

    @property
    def trouble(self) -> str:
        """A text for the administrator if the witness cannot be asked; "" if it can."""
        try:
            self._witness.watch()
        except NotRead as error:
            why = self._witness.why_unavailable() or error
            what = f"no new run of a container, pod or control group is exact without resctrlmond-witness: {why}"
            return f"{what}. Load it: systemctl start resctrlmond-witness.service"
        return ""

    def begin(self) -> Proof:
        """Return the proof of a run that begins now."""
        try:
            return Proof(watch=self._witness.watch())
        except NotRead as error:
            log.debug("no witness: %s", error)
            return Proof()

    def entered(self, workload: Workload, member: Member, sandbox: str = "") -> Workload:
        """Return the workload with the control group of a member whose tasks have just been moved into the group.

        ``sandbox`` is the id of the container that keeps the namespaces of the pod, if it is known.
        The tasks must wait still. What the control group has used until now, was used outside. A service is known by
        its commands, and its processes are not weighed.
        """
        if member.commands or not member.has_tasks or not (member.cgroup or workload.proof.cgroups):
            return workload
        try:
            return self._entered(workload, member, sandbox)
        except NotRead as error:
            # Not a reason to leave its tasks out of the group.
            return replace(workload, proof=with_cause(workload.proof, str(error)))

    def _entered(self, workload: Workload, member: Member, sandbox: str) -> Workload:
        proof = workload.proof
        without = [known.id for known in workload.members if known.pid and not known.cgroup]
        if without:
            return replace(workload, proof=with_cause(proof, f"{without[0]} has no control group of its own"))
        inode, pod = cgroups.inode(member.cgroup), _pod_of(workload, member)
        home = inode if not pod else cgroups.inode(pod)
        if proof.watch is None:
            proof = with_cause(proof, "resctrlmond-witness had not been loaded when the run began")
        elif workload.nested.count:
            proof = with_cause(proof, "workloads are nested in it")
        elif inode is None or home is None:
            proof = with_cause(proof, f"the control group of {member.id} was removed")
        elif cgroups.cpu_time_ns(member.cgroup) is None:
            proof = with_cause(proof, f"the control group of {member.id} does not count CPU time, as in version 1")
        if inode is None or home is None or inode in proof.entered:
            return replace(workload, proof=proof)  # assigned again: what it has used since then is known
        helpers = dict.fromkeys((*proof.helpers, *(_helpers(workload, pod, member, sandbox) if pod else ())))
        # The control group of a pod has what its earlier runs used.
        is_again = bool(pod) and home not in proof.cgroups and workload.generation > 1
        cgroups_now = proof.cgroups if home in proof.cgroups else (*proof.cgroups, home)
        workload = replace(workload, proof=replace(proof, helpers=tuple(helpers), cgroups=cgroups_now))
        if proof.cause:
            return workload
        # With the RMID of an earlier run, tasks there may have used it too.
        inodes = [home, inode] if is_again else [inode]
        found, at_ns = self._entries(workload), boot_ns()
        seen = self._witness.look([home], [entry.ids for entry in found.values()])
        workload = _with_ids(workload, found, seen, at_ns)
        return replace(workload, proof=entered_now(workload.proof, inodes, workload.groups, seen))

    def weighed(self, workload: Workload, look: Look | None = None) -> Workload:
        """Return the workload with what the witness has seen of it until now, or until a look."""
        if not workload.proof.cgroups or workload.proof.cause:
            return workload
        try:
            seen, at_ns = look or self._look()
            return weighed(_with_ids(workload, self._entries(workload), seen, at_ns), seen, at_ns)
        except NotRead as error:
            if error.errno in LACKS:
                raise
            return unknown(workload, str(error))

    def look(self) -> Look | None:
        """Look at the witness for several workloads; None if that fails: then the look at each states why."""
        try:
            return self._look()
        except NotRead:
            return None

    def _look(self) -> Look:
        at_ns = boot_ns()
        return self._witness.look(), at_ns

    def _entries(self, workload: Workload) -> dict[str, Entry]:
        """Return what has entered groups whose IDs were not known before, by folder. Raises NotRead."""
        counting = {workload.group_of(member).folder for member in workload.members if member.has_tasks}
        new = [group for group in workload.existing_groups if group.ids is None and group.folder in counting]
        found = ((group.folder, self._entry(group)) for group in new)
        return {folder: entry for folder, entry in found if entry is not None}

    def _entry(self, group: Group) -> Entry | None:
        if (found := self._tree.find(group.ref)) is None:
            raise NotRead("does not exist, so its RMID is not known", path=self._tree.full_path(group.ref))
        return self._witness.entry(found.inode, group.created_ns)


def _with_ids(workload: Workload, found: Mapping[str, Entry], seen: Seen, at_ns: int) -> Workload:
    for group in workload.groups:
        if entry := found.get(group.folder):
            workload = workload.with_group(with_ids(group, entry, workload.proof, seen, at_ns))
    return workload


def _pod_of(workload: Workload, member: Member) -> str:
    """Return the control group of the pod that the key names, whatever form a UID has; "" if it names none."""
    if workload.pod_cgroup:
        return workload.pod_cgroup
    path = os.path.dirname(member.cgroup)
    while path.strip("/"):
        name = os.path.basename(path).removesuffix(".slice").replace("_", "").replace("-", "")
        if name.endswith("pod" + workload.key.replace("_", "").replace("-", "")):
            return path
        path = os.path.dirname(path)
    return ""


def _helpers(workload: Workload, pod: str, member: Member, sandbox: str) -> Iterator[int]:
    """Yield the control groups in that of a pod whose tasks are the runtime's: monitors, and a sandbox that is idle.

    The process of a sandbox (pause) waits for its end, and uses nothing but its own start.
    """
    inside = {known.cgroup for known in (*workload.members, member) if known.cgroup}
    idle = {sandbox, *(known.id for known in workload.members if known.kind == "sandbox" and not known.cgroup)}
    try:
        names = os.listdir(pod)
    except OSError:
        return
    for name in names:
        path = os.path.join(pod, name)
        is_helper = name.startswith(_MONITOR) or container_in(name) in idle
        if is_helper and path not in inside and (inode := cgroups.inode(path)) is not None:
            yield inode
