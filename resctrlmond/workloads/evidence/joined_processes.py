# SPDX-License-Identifier: Apache-2.0
"""Detection, by CPU time, of processes that joined a container from outside and ended before a sweep found them.

cpu.stat of the container's control group has the CPU time of every process that ever ran in the control group.
/proc/PID/stat has that of the container's init and of its descendants. The difference was used by processes that did
not descend from the init, such as an exec session, and that were not in the monitoring group.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from resctrlmond.resctrl import cgroups, cpu_time
from resctrlmond.resctrl.cpu_time import TreeTime
from resctrlmond.resctrl.errors import LACKS, ResctrlError
from resctrlmond.resctrl.processes import Process
from resctrlmond.workloads.evidence.run_state import RunStates
from resctrlmond.workloads.figures.reasons import Reason, joined_unseen
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Member, Workload, replace

log = logging.getLogger(__name__)

# A walk through the process tree misses a process whose parent changes meanwhile. Three walks do not all miss it.
_WALKS = 3
# The smallest amount (ns) that joined_unseen() can state.
_CENTISECOND = 10_000_000


class JoinedProcesses:
    """The CPU times by which unseen processes of members are detected. A group with such processes becomes late.

    Each method that returns a workload needs a transaction of that workload, in which the caller saves the result,
    and raises NotRead without descriptors or memory.
    """

    def __init__(self, runs: RunStates) -> None:
        self._runs = runs

    def begin(self, workload: Workload, member: Member, process: Process | None) -> Workload:
        """Record the CPU time that the control group of a new member used before, without that of the member's init.

        ``process`` is that init, if the caller has opened it. Make the group late if the control group has no CPU
        time (cgroup v1). The processes of a service whose commands begin in the group have no common parent to tell
        them from others: systemd states what it has started (``daemon.unit_commands``).
        """
        if not member.cgroup or member.commands or member.id in workload.other_cpu_ns:
            return workload
        tree = self._tree(member, opened=process) if member.pid else cpu_time.NOTHING
        # Read after the tree: CPU time that is used in between counts as earlier use, not as theirs.
        used = cgroups.cpu_time_ns(member.cgroup)
        if used is None and cgroups.is_there(member.cgroup):
            if workload.group_of(member).baseline is not Quality.EXACT:
                return workload
            return workload.with_late(member, Reason.UNCOUNTED_CGROUP.text(member=member.id))
        if tree is None or (used is None and member.pid):
            return workload
        # Negative if the init used CPU time before it entered the control group.
        return self._with_other(workload, member, (used or 0) - tree.ns)

    def look_at_empty(self, workload: Workload, member: Member) -> Workload:
        """Make the group late if tasks ran unseen in the control group of a member that has no process.

        The caller knows that the control group has no task, or has a task that was not moved.
        """
        before = workload.other_cpu_ns.get(member.id)
        if before is None or member.pid or workload.group_of(member).baseline is not Quality.EXACT:
            return workload
        used = cgroups.cpu_time_ns(member.cgroup) or 0
        if used < before or not cgroups.is_there(member.cgroup):
            why = Reason.REMOVED_CGROUP.text(member=member.id)
        elif used > before:
            why = Reason.RAN_UNSEEN.text(member=member.id, seconds=f"{(used - before) / 1e9:.6f}")
        else:
            return workload
        log.info("%s: %s", workload.key, why)
        return workload.with_late(member, why)

    def look(self, workload: Workload, member: Member) -> Workload:
        """Make the member's group late if processes from outside used CPU time in the member's control group.

        These are processes other than the member's init and its descendants.
        """
        before = workload.other_cpu_ns.get(member.id)
        if not member.pid:
            # A task that is in the control group now was moved, and the move made the group late.
            is_empty = before is not None and not cgroups.is_populated(member.cgroup)
            return self.look_at_empty(workload, member) if is_empty else workload
        home = workload.group_of(member)
        # An amount of another group that the member counted in before does not count.
        is_exact = home.baseline is Quality.EXACT
        found_ns = None if is_exact else workload.joined_ns.get(member.id)
        if before is None or not (is_exact or found_ns is not None):
            return workload
        bound = before
        if found_ns is not None:
            if member.late:
                return workload  # a process that joined later was moved into the group, so its use is counted
            # Each new amount writes the record and sends a signal, so report it only if it has doubled.
            bound += max(2 * found_ns, found_ns + _CENTISECOND)
        last = self._runs.of(workload.key).cpu_times
        now = cgroups.cpu_time_ns(member.cgroup) or 0
        last_used, last_other = last.get(member.id, (0, 0))
        # A smaller value belongs to a new control group at the same path.
        if now >= last_used > 0 and last_other + now - last_used - cpu_time.SLACK <= bound:
            return workload  # the use since then is within the rounding error
        other = None
        for _ in range(_WALKS):
            # Read before the tree: CPU time that the tree uses in between must not count as that of a joined process.
            used = cgroups.cpu_time_ns(member.cgroup)
            tree = self._tree(member)
            if tree is None or used is None:
                return workload
            last[member.id] = used, used - tree.ns
            # The slack may be rounding: joined processes used at least the rest.
            least = used - tree.ns - tree.slack
            if least <= bound:
                return workload if found_ns is not None else self._look_outside(workload, member, before, tree)
            other = least if other is None else min(other, least)
        assert other is not None
        why = joined_unseen(member, other - before)
        if found_ns is None:
            log.info("%s: %s", workload.key, why)
        else:
            earlier = joined_unseen(member, found_ns)
            others = tuple(reason for reason in home.baseline_reasons if reason != earlier)
            workload = workload.with_group(replace(home, baseline_reasons=others))
        workload = replace(workload, joined_ns={**workload.joined_ns, member.id: other - before})
        return workload.with_late(member, why)

    def _look_outside(self, workload: Workload, member: Member, before: int, tree: TreeTime) -> Workload:
        """Make the group late if the member's processes used CPU time outside its control group.

        CPU time inside the control group is in both amounts, so their difference decreases only by use outside.
        """
        # The slack is the largest error of the earlier amount: rounding, and use during the reading.
        lowest = before - 2 * cpu_time.SLACK
        if (cgroups.cpu_time_ns(member.cgroup) or 0) - tree.ns >= lowest:
            return workload
        least = self._tree(member, cpu_time.of_tree_at_least)
        # Read after the tree, so that the tree is not ahead of the control group.
        used = cgroups.cpu_time_ns(member.cgroup)
        if least is None or used is None or used - least.ns >= lowest:
            return workload
        why = Reason.OUTSIDE_CGROUP.text(member=member.id, seconds=f"{(lowest - used + least.ns) / 1e9:.2f}")
        log.info("%s: %s", workload.key, why)
        return workload.with_late(member, why)

    def forget_member(self, workload: Workload, member_id: str) -> Workload:
        """Drop the CPU times of a member that is assigned again, because its control group may count from 0 again."""
        if (known := workload.member(member_id)) is not None:
            workload = self.look_at_empty(workload, known)
        self._runs.of(workload.key).cpu_times.pop(member_id, None)
        return replace(
            workload, other_cpu_ns={name: used for name, used in workload.other_cpu_ns.items() if name != member_id}
        )

    def _with_other(self, workload: Workload, member: Member, used_ns: int) -> Workload:
        return replace(workload, other_cpu_ns={**workload.other_cpu_ns, member.id: used_ns})

    def _tree(
        self,
        member: Member,
        of: Callable[[Process], TreeTime | None] | None = None,
        *,
        opened: Process | None = None,
    ) -> TreeTime | None:
        try:
            with contextlib.ExitStack() as stack:
                process = opened or stack.enter_context(Process.open(member.pid, member.start_time))
                return (of or cpu_time.of_tree)(process)
        except ResctrlError as error:
            if error.errno in LACKS:
                raise
            return None  # the process has ended, or cannot be read
