# SPDX-License-Identifier: Apache-2.0
"""Detection, by CPU time, of containers of a pod that started outside its group and ended while no daemon ran.

cpu.stat of the control group of a pod (v2) has the CPU time of every task that ever ran in it or below, also in
control groups that were removed since. Its increase since the last daemon is compared with that of the control groups
of known containers. The rest was used by a container that was never assigned, or by a known one that ended meanwhile.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.workloads.evidence.pod_cgroups import container_in, list_below, pod_cgroup
from resctrlmond.workloads.evidence.run_state import RunStates
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import canonical_key, is_pod_uid
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.records.atomic_files import read_file, write_file, writing

# The start of a container takes some milliseconds of CPU time in its control group, before its program runs.
_SLACK_NS = 1_000_000
# Files cannot be read at once. While no task of the pod stops and no clock tick comes, they do not change.
_TRIES = 30
# Next to the records, which end in ".json".
_SUFFIX = ".cpu"
_MODE = 0o640


class PodTime(msgspec.Struct, frozen=True, rename="camel"):
    """The CPU time (ns) of the control group ``path`` of a pod, when its first group had that ``nonce``.

    ``inode`` is that of the control group: cgroup v2 does not use a number again until the next boot (kernfs_ino()).
    ``used_ns`` is without control groups of containers that are not known yet. ``below_ns`` is that of the other
    control groups in it, by name.
    """

    nonce: int
    path: str
    inode: int
    used_ns: int
    below_ns: dict[str, int]


# Created by the import, as in ``nested``.
_DECODER = msgspec.json.Decoder(PodTime)


class PodTimes:
    """The CPU times of exact pods, in a file for each in ``folder``. Each needs the transaction of its workload.

    A reading may be older than the record. Then more CPU time is not explained, and never less.
    """

    def __init__(self, folder: str, runs: RunStates) -> None:
        self._folder = folder
        self._runs = runs

    def is_noted(self, workload: Workload) -> bool:
        """Whether the pod is unchanged since it was read last. True for a workload that is not an exact pod.

        If pods were read each time, an idle minute with 500 of them would take 1.08 times the CPU time.
        """
        return not is_exact_pod(workload) or self._runs.of(workload.key).timed_pod is workload

    def note(self, workload: Workload) -> None:
        """Read and write the CPU times of an exact pod. Raises NotRead, NotWritten."""
        path = cgroup_of_pod(workload) if is_exact_pod(workload) else ""
        # Before the CPU time: if the control group is created again meanwhile, the inode is that of the removed one.
        inode = cgroups.inode(path) if path else None
        read = _read(path, workload) if inode is not None else None
        if inode is None or read is None:
            return
        used, unknown, _, below = read
        now = PodTime(workload.first.nonce, path, inode, used - sum(unknown.values()), below)
        file = self._file(workload.key)
        with writing(file):
            write_file(file, msgspec.json.encode(now), mode=_MODE)
        self._runs.of(workload.key).timed_pod = workload

    def why_late(self, workload: Workload) -> str:
        """Return why an exact pod may lack containers that ended since it was read last; "" if it does not.

        Raises NotRead.
        """
        if not is_exact_pod(workload):
            return ""
        last = self._last(workload)
        path = cgroup_of_pod(workload) or last.path
        if not path:
            return ""
        inode = cgroups.inode(path)
        if inode is None or last.inode not in (0, inode):
            return Reason.POD_REMOVED_UNSEEN.text()
        read = _read(path, workload)
        if read is None:
            return Reason.CANNOT_FIND_CONTAINERS.text(error="its control group does not count CPU time")
        used, _, below, _ = read
        explained = sum(ns - last.below_ns.get(name, 0) for name, ns in below.items())
        rest = used - last.used_ns - explained
        return Reason.POD_RAN_UNSEEN.text(seconds=f"{rest / 1e9:.3f}") if rest > _SLACK_NS else ""

    def remove(self, key: str) -> None:
        """Remove the file of a workload that has ended. Raises NotWritten."""
        file = self._file(key)
        with writing(file), contextlib.suppress(FileNotFoundError):
            os.unlink(file)

    def prune(self) -> None:
        """Remove the files of workloads that have no record. Raises NotWritten."""
        with writing(self._folder):
            names = set(os.listdir(self._folder))
        for key in [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]:
            if f"{key}.json" not in names:
                self.remove(key)

    def _last(self, workload: Workload) -> PodTime:
        """Return the last reading of this run. If there is none, the pod has used nothing before."""
        none = PodTime(workload.first.nonce, "", 0, 0, {})
        try:
            last = _DECODER.decode(read_file(self._file(workload.key)))
        except (NotRead, OSError, msgspec.DecodeError, UnicodeError, RecursionError):
            return none
        return last if last.nonce == workload.first.nonce else none

    def _file(self, key: str) -> str:
        return os.path.join(self._folder, key + _SUFFIX)


def is_exact_pod(workload: Workload) -> bool:
    """Whether the workload is a pod that runs, and no task of it is known to have run outside its group."""
    is_running = workload.state in (State.ACTIVE, State.IDLE)
    return is_running and is_pod_uid(workload.key) and workload.first.baseline is Quality.EXACT


def cgroup_of_pod(workload: Workload) -> str:
    """Return the control group of the pod; "" if no container of it is known to be in one."""
    if workload.pod_cgroup:
        return workload.pod_cgroup
    pods = (pod_cgroup(member.cgroup) for member in reversed(workload.members))
    return next((path for path, uid in pods if uid == canonical_key(workload.key)), "")


def _read(path: str, workload: Workload) -> tuple[int, dict[str, int], dict[str, int], dict[str, int]] | None:
    """Return the CPU time of the control group of a pod, and that of the control groups in it, by name.

    These are those of containers that are not known, those of the others before ``path`` was read, and after it. None
    if it is not counted, or the control group was removed. Raises NotRead.
    """
    ids = {member.id for member in workload.members}
    names = {member.cgroup.removeprefix(path + "/").partition("/")[0] for member in workload.members if member.cgroup}
    best = None
    before = _below(path)
    for _ in range(_TRIES):
        used, after = cgroups.cpu_time_ns(path), _below(path)
        if used is None:
            return None
        increase = sum(ns - before.get(name, 0) for name, ns in after.items())
        if best is None or abs(increase) < abs(best[0]):
            best = increase, used, before, after
        if before == after:
            break
        before = after
    assert best is not None
    _, used, before, after = best
    unknown = {name for name in after if name not in names and container_in(name) not in (None, *ids)}
    return (
        used,
        {name: ns for name, ns in after.items() if name in unknown},
        {name: ns for name, ns in before.items() if name not in unknown},
        {name: ns for name, ns in after.items() if name not in unknown},
    )


def _below(path: str) -> dict[str, int]:
    found = ((name, cgroups.cpu_time_ns(os.path.join(path, name))) for name in list_below(path))
    return {name: ns for name, ns in found if ns is not None}
