# SPDX-License-Identifier: Apache-2.0
"""The reasons for which a figure is late, estimated or unknown: ``Reason`` declares each of them.

``figures.verdict`` gives those that follow from the record: of the members, of the proof and of the doubts, which
are recorded as they occur. ``figures.accounting`` gives those of the counters.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import Quality, seconds_up_to
from resctrlmond.workloads.model.workload import Doubt, Member


class Reason(enum.Enum):
    """A reason, with the qualities that a figure can have because of it, and its text with {names} of values.

    resctrlmond(7) lists all of them: run "make interfaces" after a change.
    """

    # Tasks ran before they were in the group, or outside.
    RAN_BEFORE = Quality.LATE, "{member} ran{used} before it was put into the group{descendants}"
    MAY_HAVE_RUN = Quality.LATE, "{member} may have run before it was in the group: {cause}"
    USED_OUTSIDE = (
        Quality.LATE,
        "tasks in its control groups used {seconds} s of CPU time outside the group, {share} of their CPU time",
    )
    MOVED_OUT = Quality.LATE, "tasks were moved out of the group, and their use outside is not counted: {by}"
    NESTED_OUTSIDE = (
        Quality.LATE,
        "tasks of the nested workload {key} may have run on after its end outside the group",
    )
    NOT_INCLUDED = Quality.LATE, "{member} is not included: {cause}"

    # The group counted other tasks.
    USED_BY_OTHERS = (
        Quality.ESTIMATED,
        "tasks of other control groups used up to {seconds} s of CPU time in the group, and their use is counted",
    )
    MOVED_IN = Quality.ESTIMATED, "tasks of others were moved into the group, and their use is counted: {by}"
    NESTED_OTHERS = (
        Quality.ESTIMATED,
        "the nested workload {key} may have had tasks of others, and their use may be counted since its end",
    )
    HAS_CPUS = (
        Quality.ESTIMATED,
        "another program gave the group CPUs, and the use of other tasks there may be counted",
    )

    # It is not known which tasks it counted.
    NOT_WITNESSED = (
        Quality.ESTIMATED,
        "tasks may have used CPU time outside the group, or others in it: {cause}",
    )
    OBSERVED = (
        Quality.ESTIMATED,
        "another program owns the group, and may have moved tasks into or out of it",
    )
    CHANGES_UNKNOWN = (
        Quality.ESTIMATED,
        "other programs may have given CPUs to the group, or reset counters: {cause}",
    )

    # The end values were not read at its end.
    RAN_ON = (
        Quality.ESTIMATED,
        "processes of {member} ran on after its end, and their use since then is not counted",
    )
    END_READ_LATE = Quality.ESTIMATED, "its end values were not read at its end: {cause}"

    # The hardware, or its configuration.
    REALLOCATED = (
        Quality.ESTIMATED,
        "this processor takes bandwidth counters from one RMID for another and resets them, so some use may be "
        "missing (the mode mbm_event prevents this, if a file mbm_assign_mode below info offers it)",
    )
    UNASSIGNED = (
        Quality.ESTIMATED,
        "no counter was free in {domains} when its group was created, and its use until it gets one is not "
        "counted: end other workloads, or unassign counters of groups that do not need them (such as "
        "mbm_L3_assignments); the workload with the highest priority gets the next free one",
    )
    CHANGED = (
        Quality.ESTIMATED,
        "which memory transactions it counts was changed during the run (info/{file})",
    )
    RESET_BY_WRITE = (
        Quality.ESTIMATED,
        "another program wrote to {file}, which may have reset the counter: some use may be missing",
    )
    KERNEL_WORK = Quality.ESTIMATED, "the kernel may have counted its work for the tasks in another group: {cause}"
    REPEATED = (
        Quality.ESTIMATED,
        "the domains of {others} count it too, perhaps the same use, so only those of {resource} are included",
    )
    SIMULATION_INEXACT = Quality.ESTIMATED, "the simulation is inexact: {cause}"

    # One counter.
    WENT_BACK = Quality.ESTIMATED, "{domain} went back: {cause}"
    NO_NUMBER = Quality.ESTIMATED, Quality.UNKNOWN, "{domain} had no number {when}: {cause}"
    OFFLINE = Quality.ESTIMATED, Quality.UNKNOWN, "{domain} went offline{since}"

    # A group was lost, or could not be created.
    NO_BASELINE = Quality.UNKNOWN, "the baseline is not known"
    SHARED = Quality.UNKNOWN, "shared with {others} in {group}, because no RMID is free for it"
    LOST = Quality.ESTIMATED, Quality.UNKNOWN, "{loss}; last read: {time}"
    PRIOR_RUN = (
        Quality.ESTIMATED,
        Quality.UNKNOWN,
        "its group was lost at {time} ({loss}), and its use until it had a new one is not counted",
    )
    NESTED_UNKNOWN = Quality.ESTIMATED, Quality.UNKNOWN, "the use of nested workloads is not known: {cause}"

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


def doubt(reason: Reason, *, events: Iterable[str] = (), **values: object) -> Doubt:
    """Return a doubt about the totals of a group, or of these events of it."""
    texts = {name: printable(str(value)) for name, value in values.items()}
    return Doubt(reason.name, texts, tuple(events))


class InvalidDoubt(Exception):
    """A doubt whose reason is not declared, or whose values are not those of the reason."""


def check_doubts(doubts: Iterable[Doubt]) -> None:
    """Raise InvalidDoubt for a doubt that has no text."""
    for doubted in doubts:
        try:
            text_of(doubted)
        except KeyError as error:
            raise InvalidDoubt(f"a doubt of the reason {doubted.reason!r} lacks {error}") from error


def text_of(doubted: Doubt) -> str:
    """Return the text of a doubt."""
    return Reason[doubted.reason].text(**doubted.values)


def why_late(member: Member) -> str:
    """Return the reason for which a member is late, or because it is being put into its group."""
    if cause := "it is being put into it" if member.joining else member.may_have_run:
        return Reason.MAY_HAVE_RUN.text(member=member.id, cause=cause)
    used_ns, count = member.cpu_time_before_ns, member.descendants_outside
    used = f" and had used up to {seconds_up_to(used_ns)} s of CPU time" if used_ns else ""
    descendants = f", and {count} descendant{'s' if count > 1 else ''} stayed outside" if count else ""
    return Reason.RAN_BEFORE.text(member=member.id, used=used, descendants=descendants)
