# SPDX-License-Identifier: Apache-2.0
"""Processes that joined a container from outside and ended before a sweep: found by the CPU time that they used.

cpu.stat of the container's control group has the CPU time of all that ever ran in it. Its init and what that has
started have theirs in /proc/PID/stat. What is left over ran in the control group and is not of the init: an exec
session, which the daemon did not put into the monitoring group.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.lifecycle import replace
from resctrlmond.groups.record import Member, Record
from resctrlmond.resctrl import cgroups, cpu_time
from resctrlmond.resctrl.cpu_time import TreeTime
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.processes import Process

log = logging.getLogger(__name__)

# A process that gets another parent during one walk through the tree is missed by it, and not by all of three.
_WALKS = 3
_FOUND = (
    "processes that joined {} from outside and ended used at least {:.2f} s of CPU time: their use is not counted"
)
_OUTSIDE = (
    "processes of {} used at least {:.2f} s of CPU time outside its control group, which hides processes that join "
    "it from outside and end"
)
_NOT_COUNTED = (
    "the control group of {} does not count CPU time, as in version 1, so tasks that join it and end between two "
    "checks are not detected"
)
_AMOUNT = re.compile(r" used (?:about|at least) (\d+\.\d\d) s ")
# The smallest amount (ns) that _FOUND can state.
_CENTISECOND = 10_000_000
_RAN = "tasks ran and ended in control group {} between two checks, and used {:.6f} s of CPU time outside the group"
_REMOVED = "control group {} was removed, so tasks that ran in it between two checks are not detected"


class Joiners:
    """Marks groups as late whose members were joined by processes that nobody saw. Whoever calls holds the key."""

    def __init__(self) -> None:
        # Per key and member: the CPU time (ns) of its control group at the last look, and what was not of its init.
        self._last: dict[str, dict[str, tuple[int, int]]] = {}

    def begin(self, record: Record, member: Member) -> Record:
        """Record what the member's control group has used by now that is not of its init: this ran before.

        Mark the group late if that is not counted.
        """
        if not member.cgroup or member.id in record.other_cpu_ns:
            return record
        used = cgroups.cpu_time_ns(member.cgroup)
        if used is None and cgroups.is_there(member.cgroup):
            is_exact = record.home(member).baseline is Quality.EXACT
            return record.with_late(member, _NOT_COUNTED.format(member.id)) if is_exact else record
        if not member.pid:
            return self._with_other(record, member, used or 0)
        tree = self._tree(member)
        # After the tree: what is used in between is taken for what ran before, and not for what joined.
        used = cgroups.cpu_time_ns(member.cgroup)
        if tree is None or used is None:
            return record
        # Negative if the init has used more before it was in the control group.
        return self._with_other(record, member, used - tree.ns)

    def look_at_empty(self, record: Record, member: Member) -> Record:
        """Mark the group late if tasks ran in the control group of a member that is nothing else.

        The caller has seen that no task is in the control group, or that one that is there has not been moved.
        """
        before = record.other_cpu_ns.get(member.id)
        if before is None or member.pid or record.home(member).baseline is not Quality.EXACT:
            return record
        used = cgroups.cpu_time_ns(member.cgroup) or 0
        if used < before or not cgroups.is_there(member.cgroup):
            why = _REMOVED.format(member.id)
        elif used > before:
            why = _RAN.format(member.id, (used - before) / 1e9)
        else:
            return record
        log.info("%s: %s", record.key, why)
        return record.with_late(member, why)

    def look(self, record: Record, member: Member) -> Record:
        """Mark the member's group as late if others than its init and what that started have used CPU time."""
        before = record.other_cpu_ns.get(member.id)
        if not member.pid:
            # A task that is in the control group now has been moved, and marked by that.
            is_empty = before is not None and not cgroups.is_populated(member.cgroup)
            return self.look_at_empty(record, member) if is_empty else record
        home = record.home(member)
        about = _FOUND.partition(" used")[0].format(member.id)
        found = next((reason for reason in home.late_reasons if reason.startswith(about)), "")
        if before is None or (home.baseline is not Quality.EXACT and not found):
            return record
        bound = before
        if amount := _AMOUNT.search(found):
            if member.late:
                return record  # one that joined later was taken in: what it uses is in the figures
            # Each new amount writes the record and signals its change, so it has to be twice the one that is there.
            found_ns = round(float(amount[1]) * 1e9)
            bound += max(2 * found_ns, found_ns + _CENTISECOND)
        last = self._last.setdefault(record.key, {})
        now = cgroups.cpu_time_ns(member.cgroup) or 0
        last_used, last_other = last.get(member.id, (0, 0))
        # Less than before is of a new control group under the same path.
        if now >= last_used > 0 and last_other + now - last_used - cpu_time.SLACK <= bound:
            return record  # whatever ran since then, it was too little to be told from rounding
        other = None
        for _ in range(_WALKS):
            # Before the tree: what the tree uses in between is not taken for somebody else's.
            used = cgroups.cpu_time_ns(member.cgroup)
            tree = self._tree(member)
            if tree is None or used is None:
                return record
            last[member.id] = used, used - tree.ns
            # Rounding can account for the slack: what others used is at least this.
            least = used - tree.ns - tree.slack
            if least <= bound:
                return record if found else self._look_outside(record, member, before, tree)
            other = least if other is None else min(other, least)
        assert other is not None
        why = _FOUND.format(member.id, (other - before) / 1e9)
        if not found:
            log.info("%s: %s", record.key, why)
        others = tuple(reason for reason in home.late_reasons if not reason.startswith(about))
        return record.with_group(replace(home, late_reasons=others)).with_late(member, why)

    def _look_outside(self, record: Record, member: Member, before: int, tree: TreeTime) -> Record:
        """Mark the group late if the member's processes have used CPU time outside its control group.

        What they use in it is in both amounts, so their difference never falls but by what they use elsewhere.
        """
        # By that much the amount from before is too high: rounding, and what was used while it was taken.
        lowest = before - 2 * cpu_time.SLACK
        if (cgroups.cpu_time_ns(member.cgroup) or 0) - tree.ns >= lowest:
            return record
        least = self._tree(member, cpu_time.of_tree_at_least)
        # After the tree, which then is not ahead of it.
        used = cgroups.cpu_time_ns(member.cgroup)
        if least is None or used is None or used - least.ns >= lowest:
            return record
        why = _OUTSIDE.format(member.id, (lowest - used + least.ns) / 1e9)
        log.info("%s: %s", record.key, why)
        return record.with_late(member, why)

    def forget_member(self, record: Record, member_id: str) -> Record:
        """Drop the CPU times of a member that comes anew: its control group may count from 0 again."""
        if (known := record.member(member_id)) is not None:
            record = self.look_at_empty(record, known)
        self._last.get(record.key, {}).pop(member_id, None)
        return replace(
            record, other_cpu_ns={name: used for name, used in record.other_cpu_ns.items() if name != member_id}
        )

    def forget(self, key: str) -> None:
        """Drop what is known of a workload that is over."""
        self._last.pop(key, None)

    def _with_other(self, record: Record, member: Member, used_ns: int) -> Record:
        return replace(record, other_cpu_ns={**record.other_cpu_ns, member.id: used_ns})

    def _tree(self, member: Member, of: Callable[[Process], TreeTime | None] | None = None) -> TreeTime | None:
        try:
            with Process.open(member.pid, member.start_time) as process:
                return (of or cpu_time.of_tree)(process)
        except ResctrlError:
            return None  # it has ended, or cannot be looked at now
