# SPDX-License-Identifier: Apache-2.0
"""The reasons for which a group is late or estimated: each sentence in ``Group.baseline_reasons`` is declared here.

They are text for people. Code adds, compares and removes whole reasons, and does not read them.
"""

from __future__ import annotations

from resctrlmond.workloads.model import Member

# -- a member ran before it was in the group


def ran_before(member: Member) -> str:
    """Return the reason for a process or control group that ran before its Assign."""
    used = (
        f" and had used up to {member.cpu_time_before_ns / 1e9:.3f} s of CPU time"
        if member.cpu_time_before_ns
        else ""
    )
    text = f"{member.id} ran{used} before it was put into the group"
    if not member.descendants_outside:
        return text
    count = member.descendants_outside
    return f"{text}; {'1 descendant' if count == 1 else f'{count} descendants'} stayed outside"


def joins(member: Member) -> str:
    """Return the reason for an Assign that has not ended: its caller may have let the process run."""
    return f"{member.id} is being put into its group"


def not_awaited(member: Member) -> str:
    """Return the reason for an Assign whose caller did not wait: it may have let the process run."""
    return f"{member.id}: its caller did not wait for the reply, so it may have run before it was in the group"


def killed_while_joining(member: Member) -> str:
    """Return the reason for an Assign that a kill of the daemon cut short."""
    return f"resctrlmond was killed while {member.id} was put into the group"


def never_moved(member: Member) -> str:
    """Return the reason for a member that ended after an Assign that failed and could not be undone."""
    return f"{member.id} ended before it could be put into the group"


def ended_outside(member: Member) -> str:
    """Return the reason for a member that ended while its group waited for an RMID."""
    return f"{member.id} ran and ended before the group was created"


def ran_between(member: Member) -> str:
    """Return the reason for a control group that has tasks again, for example after the restart of a service."""
    return f"tasks of {member.id} started again, and ran outside the group until its control group was checked"


# -- tasks of a member are, or were, outside


def ran_outside(member: Member) -> str:
    """Return the reason for tasks that were found outside."""
    return f"tasks of {member.id} ran outside until they were put into the group"


def outside_until_again(member: Member) -> str:
    """Return the reason for tasks that were found outside when their member was assigned again."""
    return f"tasks of {member.id} were outside the group until it was assigned again"


def stayed_outside(member: Member) -> str:
    """Return the reason for tasks that could not be moved into the group. They may end before they can be."""
    return f"tasks of {member.id} stayed outside"


def in_no_group(member: Member, class_: str) -> str:
    """Return the reason for tasks in a class where the workload cannot have a group."""
    return f"tasks of {member.id} in class {class_ or '/'} are in no group"


def not_swept_at_end(member: Member, error: Exception) -> str:
    """Return the reason for an error that kept a member's tasks from being found when the workload ended."""
    return f"tasks of {member.id} may have been outside the group at its end: {error}"


def taken_over(key: str) -> str:
    """Return the reason for a task that the workload ``key`` took over."""
    return f"workload {key} took over one of its tasks"


# -- tasks may be outside unseen


def hides_joiners(member: Member) -> str:
    """Return the reason for a container without a control group, by which its processes are found."""
    return f"{member.id} has no control group of its own, so processes that join it from outside are not detected"


def cannot_find_joiners(member: Member, error: Exception) -> str:
    """Return the reason for a control group that cannot be listed."""
    return f"processes that join {member.id} from outside are not detected: {error}"


def cannot_see_return(member: Member, error: Exception) -> str:
    """Return the reason for an empty control group that cannot be checked for new tasks."""
    return f"tasks that return to {member.id} are not detected: {error}"


def uncounted_cgroup(member: Member) -> str:
    """Return the reason for a control group whose CPU time is not known."""
    return (
        f"the control group of {member.id} does not count CPU time, as in version 1, so tasks that join it and end "
        "between two checks are not detected"
    )


def removed_cgroup(member: Member) -> str:
    """Return the reason for a control group that was removed, and with it its CPU time."""
    return f"control group {member.id} was removed, so tasks that ran in it between two checks are not detected"


def ran_unseen(member: Member, used_ns: int) -> str:
    """Return the reason for CPU time of a control group that was empty at each check."""
    return (
        f"tasks ran and ended in control group {member.id} between two checks, and used {used_ns / 1e9:.6f} s of CPU "
        "time outside the group"
    )


def joined_unseen(member: Member, used_ns: int) -> str:
    """Return the reason for CPU time of processes that were not started by the member's first process."""
    return (
        f"processes that joined {member.id} from outside and ended used at least {used_ns / 1e9:.2f} s of CPU time: "
        "their use is not counted"
    )


def outside_cgroup(member: Member, used_ns: int) -> str:
    """Return the reason for processes outside their control group, whose CPU time hides that of others in it."""
    return (
        f"processes of {member.id} used at least {used_ns / 1e9:.2f} s of CPU time outside its control group, which "
        "hides processes that join it from outside and end"
    )


# -- the group counted other tasks


def rejected(member: Member) -> str:
    """Return the reason for tasks that a failed Assign had moved into the group."""
    return f"tasks of {member.id} were in the group until their Assign failed, and their use there is counted"


def strangers(count: int) -> str:
    """Return the reason for tasks that were in a new group, and could not be moved out."""
    return f"tasks that do not belong to it were in the group at its baseline and could not be moved out: {count}"


# -- another program changed the group


def not_inspected(error: Exception) -> str:
    """Return the reason for an error that kept tasks from being found that another program may have moved."""
    return f"another program wrote to resctrl, and a task that it may have moved cannot be found: {error}"


MOVED_OUT = "another program moved tasks out of the group, and what they use outside is not counted"
MOVED_IN = "another program moved tasks into the group, and their use is counted"
DOWNGRADE_NOT_SAVED = "resctrlmond ended before it could save a reason for which the total is not exact"
EVENTS_LOST = (
    "writes of other programs to resctrl were not seen, because they were too many or because the kernel's events "
    "could not be read; a task may have been moved"
)


def written(file: str) -> str:
    """Return the reason for a write to a file of the group: ``tasks`` or ``cpus``."""
    return f"another program wrote to {file} of the group, and the use of other tasks may be counted"


def has_cpus(cpus: str) -> str:
    """Return the reason for CPUs that another program gave to the group."""
    return f"another program gave the group CPUs ({cpus}), and the use of other tasks there is counted"


def moved_unseen(path: str) -> str:
    """Return the reason for a write to a tasks file whose task had ended before it was found."""
    return (
        f"another program wrote to {path}, and a task that it moved had ended before it could be seen; it may have "
        "been one of this workload"
    )


def removed_unseen(path: str) -> str:
    """Return the reason for a directory that was removed before its tasks were listed."""
    return (
        f"another program removed {path} before resctrlmond could see which tasks were moved there; one of this "
        "workload may have been"
    )
