# SPDX-License-Identifier: Apache-2.0
"""The reasons for which a figure is late, estimated or unknown: ``Reason`` declares each of them.

They are text for people. Code adds, compares and removes whole reasons, and does not read them. Most are given by
``groups.placement`` and ``groups.queue_order`` (a member ran before), ``figures.verdict`` (the witness), ``evidence``
(other programs, and tasks that join), ``figures.caveats`` (the hardware) and ``groups.ends`` (the end values).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import Quality, seconds_up_to

if TYPE_CHECKING:
    from resctrlmond.workloads.model.workload import Member


class Reason(enum.Enum):
    """A reason, with the qualities that a figure can have because of it, and its text with {names} of values.

    resctrlmond(7) lists all of them: run "make interfaces" after a change.
    """

    # A member ran before it was in the group.
    RAN_BEFORE = Quality.LATE, "{member} ran before it was put into the group"
    USED_CPU_BEFORE = (
        Quality.LATE,
        "{member} ran and had used up to {seconds} s of CPU time before it was put into the group",
    )
    DESCENDANTS_OUTSIDE = Quality.LATE, "{descendants} stayed outside"
    JOINING = Quality.LATE, "{member} is being put into its group"
    NOT_AWAITED = (
        Quality.LATE,
        "{member}: its caller did not wait for the reply, so it may have run before it was in the group",
    )
    KILLED_WHILE_JOINING = Quality.LATE, "resctrlmond was killed while {member} was put into the group"
    NEVER_MOVED = Quality.LATE, "{member} ended before it could be put into the group"
    ENDED_OUTSIDE = Quality.LATE, "{member} ran and ended before the group was created"
    RAN_BETWEEN = (
        Quality.LATE,
        "tasks of {member} started again, and ran outside the group until its control group was checked",
    )

    # Tasks of a member are, or were, outside.
    RAN_OUTSIDE = Quality.LATE, "tasks of {member} ran outside until they were put into the group"
    OUTSIDE_UNTIL_AGAIN = Quality.LATE, "tasks of {member} were outside the group until it was assigned again"
    WERE_OUTSIDE = Quality.LATE, "tasks of {member} were outside the group"
    IN_NO_GROUP = Quality.LATE, "tasks of {member} in class {class_} are in no group"
    NOT_SWEPT_AT_END = Quality.LATE, "tasks of {member} may have been outside the group at its end: {error}"
    TAKEN_OVER = Quality.LATE, "workload {key} took over one of its tasks"
    NESTED_OUTSIDE = (
        Quality.LATE,
        "tasks of the nested workload {key} may have run on after its end outside the group",
    )
    MOVED_OUT = (
        Quality.LATE,
        "another program moved tasks out of the group, and what they use outside is not counted",
    )

    # Commands of a service that runs through resctrlmon-unit-exec.
    RAN_ON = (
        Quality.ESTIMATED,
        "processes of {member} ran on after its end, and their use since then is not counted",
    )

    # Tasks may be outside unseen.
    HIDES_JOINERS = (
        Quality.LATE,
        "{member} has no control group of its own, so processes that join it from outside are not detected",
    )
    CANNOT_FIND_JOINERS = Quality.LATE, "processes that join {member} from outside are not detected: {error}"
    CANNOT_SEE_RETURN = Quality.LATE, "tasks that return to {member} are not detected: {error}"
    REMOVED_CGROUP = (
        Quality.LATE,
        "control group {member} was removed, so tasks that ran in it between two checks are not detected",
    )

    # The witness.
    USED_OUTSIDE = (
        Quality.LATE,
        "tasks in its control groups used {seconds} s of CPU time outside the group, {share} of their CPU time",
    )
    USED_BY_OTHERS = (
        Quality.ESTIMATED,
        "tasks of other control groups used up to {seconds} s of CPU time in the group, and their use is counted",
    )
    NOT_WITNESSED = (
        Quality.ESTIMATED,
        "tasks may have used CPU time outside the group, or others in it: {cause}",
    )

    # The group counted other tasks.
    NESTED_OTHERS = (
        Quality.ESTIMATED,
        "the nested workload {key} may have had tasks of others, and their use may be counted since its end",
    )
    REJECTED = (
        Quality.ESTIMATED,
        "tasks of {member} were in the group until their Assign failed, and their use there is counted",
    )
    STRANGERS = (
        Quality.ESTIMATED,
        "tasks that do not belong to it were in the group at its baseline and could not be moved out: {count}",
    )
    LEFT_CGROUP = (
        Quality.ESTIMATED,
        "tasks left the control group of {member}, and their use is counted until they were moved out of the group",
    )
    MOVED_IN = Quality.ESTIMATED, "another program moved tasks into the group, and their use is counted"
    WRITTEN = (
        Quality.ESTIMATED,
        "another program wrote to {file} of the group, or tried to, and the use of other tasks may be counted",
    )
    HAS_CPUS = (
        Quality.ESTIMATED,
        "another program gave the group CPUs ({cpus}), and the use of other tasks there is counted",
    )

    # Changes of other programs are not known.
    EVENTS_LOST = (
        Quality.ESTIMATED,
        "writes of other programs to resctrl were not seen, because they were too many or because the kernel's "
        "events could not be read: CPUs may have been given to the group, and counters reset",
    )
    DOWNGRADE_NOT_SAVED = (
        Quality.ESTIMATED,
        "resctrlmond ended before it could save a reason for which the total is not exact",
    )

    # The end values were read after the end.
    UNSEEN_END = (
        Quality.ESTIMATED,
        "it ended while resctrlmond was not running, and the use of processes that {member} had started is "
        "counted until the end values were read",
    )
    END_READ_LATE = (
        Quality.ESTIMATED,
        "its end values were not read at its end, and the use of processes that {member} had started is counted "
        "until the end values were read",
    )
    TAKEN_OUT = (
        Quality.ESTIMATED,
        "its tasks may have been moved out of the group before the end values were read",
    )

    # The hardware, or its configuration.
    REALLOCATED = (
        Quality.ESTIMATED,
        "this processor takes bandwidth counters from one RMID for another and resets them, so some use may be "
        "missing (the mode mbm_event prevents this, if info/L3_MON/mbm_assign_mode offers it)",
    )
    UNASSIGNED = (
        Quality.ESTIMATED,
        "no counter was free in {domains} when its group was created, and its use until it gets one is not "
        "counted: end other workloads, or unassign counters of groups that do not need them (mbm_L3_assignments);"
        " the workload with the highest priority gets the next free one",
    )
    CHANGED = (
        Quality.ESTIMATED,
        "which memory transactions it counts was changed during the run (info/{file})",
    )
    RESET_BY_WRITE = (
        Quality.ESTIMATED,
        "another program wrote to {file}, which may have reset the counter: some use may be missing",
    )
    SIMULATION_INEXACT = Quality.ESTIMATED, "the simulation is inexact: {cause}"

    # Other units are in the same group.
    SHARED = Quality.UNKNOWN, "shared with {others} in {group}, because no RMID is free for it"

    # One counter.
    BEGAN_AGAIN = (
        Quality.ESTIMATED,
        "{domain} began from 0 again, went back, or had no counter for a time: some use is missing",
    )
    CAME_ONLINE = Quality.ESTIMATED, "{domain} came online during the run"
    NO_BEGIN = Quality.ESTIMATED, Quality.UNKNOWN, "{domain} read {word} at the beginning"
    NOISE = Quality.ESTIMATED, "{domain} went back slightly: the use was too small to be counted"
    RESET = Quality.ESTIMATED, "{domain} went back, so it was reset during the run"
    GAP = (
        Quality.ESTIMATED,
        "{domain} had no number at a reading during the run: use at that time may be missing",
    )
    COUNTED_BEFORE_END = (
        Quality.ESTIMATED,
        "{domain} read {word} at the end: the total is what was counted before",
    )
    NO_END = Quality.UNKNOWN, "{domain} read {word} at the end"
    OFFLINE = Quality.UNKNOWN, "{domain} went offline"
    OFFLINE_SINCE = Quality.ESTIMATED, Quality.UNKNOWN, "{domain} went offline, last read at {time}"
    NO_BASELINE = Quality.UNKNOWN, "the baseline is not known"

    # Another program owns the group.
    OBSERVED = (
        Quality.ESTIMATED,
        "another program owns the group, and may have moved tasks into or out of it",
    )
    RAN_UNOBSERVED = Quality.LATE, "{member} ran before its group was read for the first time"
    COUNTED_APART = (
        Quality.LATE,
        "{member} is not included, because its runtime has its own group for it: it is a workload of its own",
    )
    EXCLUDED = Quality.LATE, "{member} is not included, because of its profile {profile}"
    LEFT_OUT = (
        Quality.LATE,
        "{member} is not included: it runs in the control group of the pod, but not in the group",
    )
    REJECTED_CONTAINER = (
        Quality.LATE,
        "{member} is not included: its Assign failed, so it may run outside the group ({error})",
    )

    # A group was lost, or could not be created.
    LOST = Quality.ESTIMATED, Quality.UNKNOWN, "{loss}; last read at {time}"
    NEVER_READ = Quality.UNKNOWN, "{loss}; never read before"
    PRIOR_RUN = (
        Quality.ESTIMATED,
        Quality.UNKNOWN,
        "its group was lost at {time} ({loss}), and its use until it had a new one is not counted",
    )
    NESTED_GAP = Quality.ESTIMATED, "nested workloads that began while its group was lost are not included"
    NESTED_UNCOUNTED = Quality.ESTIMATED, Quality.UNKNOWN, "nested workloads did not count it"
    NESTED_UNKNOWN = Quality.ESTIMATED, Quality.UNKNOWN, "what the nested workload {key} used is not known"
    CLASS_MISSING = Quality.ESTIMATED, "class {class_} is not included: {cause}"

    @property
    def qualities(self) -> tuple[Quality, ...]:
        """The qualities that a figure can have because of this reason alone."""
        return tuple(Quality(quality) for quality in self.value[:-1])

    @property
    def template(self) -> str:
        """The text, with the names of values in braces."""
        return str(self.value[-1])

    def text(self, **values: object) -> str:
        """Return the text with these values, which a record can keep: other programs choose names of groups."""
        return self.template.format(**{name: printable(str(value)) for name, value in values.items()})


def ran_before(member: Member) -> str:
    """Return the reason for a process or control group that ran before its Assign."""
    if member.cpu_time_before_ns:
        text = Reason.USED_CPU_BEFORE.text(member=member.id, seconds=seconds_up_to(member.cpu_time_before_ns))
    else:
        text = Reason.RAN_BEFORE.text(member=member.id)
    if not member.descendants_outside:
        return text
    count = member.descendants_outside
    descendants = "1 descendant" if count == 1 else f"{count} descendants"
    return f"{text}; {Reason.DESCENDANTS_OUTSIDE.text(descendants=descendants)}"
