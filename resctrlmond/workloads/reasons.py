# SPDX-License-Identifier: Apache-2.0
"""The reasons for which the baseline of a group is late or estimated: all sentences of ``Group.late_reasons``.

They are text for people: no code looks into them.
"""

from __future__ import annotations

from resctrlmond.workloads.model import Member


def ran_outside(member: Member) -> str:
    """Return the reason for tasks that were found outside."""
    return f"tasks of {member.id} ran outside until they were put into the group"


def ended_outside(member: Member) -> str:
    """Return the reason for a member that ended while its group waited for an RMID."""
    return f"{member.id} ran and ended before the group was created"


def never_moved(member: Member) -> str:
    """Return the reason for a member that ended after an Assign that failed and could not be undone."""
    return f"{member.id} ended before it could be put into the group"


def stayed_outside(member: Member) -> str:
    """Return the reason for tasks that could not be moved into the group. They may end before they can be."""
    return f"tasks of {member.id} stayed outside"


def not_swept_at_end(member: Member, error: Exception) -> str:
    """Return the reason for an error that kept a member's tasks from being found when the workload ended."""
    return f"tasks of {member.id} may have been outside the group at its end: {error}"
