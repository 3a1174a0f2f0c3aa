# SPDX-License-Identifier: Apache-2.0
"""The rules by which claims end."""

from __future__ import annotations

from resctrlmond.workloads.model.clock import seconds_since_ns
from resctrlmond.workloads.model.validation import is_own_key, is_pod_uid
from resctrlmond.workloads.model.workload import Claim, EndRule, Workload

# How long a claim outlives the last member if it ends with the members: its owner saw the end too, and has this long
# to ask for the totals.
MEMBERS_LINGER_S = 10.0


def claims_over(
    workload: Workload, *, pod_is_gone: bool, group_is_empty: bool, linger_s: float, pod_linger_s: float
) -> list[str]:
    """Return the owners whose claims on the workload have ended by their rules.

    ``pod_is_gone``: the pod's control group, known by ``workload.pod_cgroup``, does not exist any more.
    ``group_is_empty``: no task is in the group (asked only if a claim ends by EndRule.TASKS).
    """
    idle = _idle_for(workload)

    def is_over(claim: Claim) -> bool:
        match claim.ends:
            case EndRule.TASKS:
                return group_is_empty
            case EndRule.MEMBERS:
                return bool(workload.members) and idle >= MEMBERS_LINGER_S
            case EndRule.CONTAINER:
                if workload.pod_cgroup:
                    return pod_is_gone and not _holds_pod(workload, claim)
                has_brought = any(member.owner == claim.owner for member in workload.members)
                is_container = any(is_own_key(workload.key, member.id) for member in workload.members)
                is_pod = is_pod_uid(workload.key) and not is_container
                return has_brought and idle >= (pod_linger_s if is_pod else linger_s)
            case EndRule.RELEASE:
                return False

    return [claim.owner for claim in workload.claims if is_over(claim)]


def _holds_pod(workload: Workload, claim: Claim) -> bool:
    """Whether a living member keeps the claim on a pod whose control group is gone.

    A member without tasks, such as a sandbox that is known by name only, keeps only the claim of its own owner: no
    other owner can end it. While the control group exists the claim lasts, because the pod's next container may start
    soon.
    """
    return any(member.owner == claim.owner or member.has_tasks for member in workload.living)


def _idle_for(workload: Workload) -> float:
    """How many seconds ago the last member ended; negative while one lives."""
    if workload.living:
        return -1.0
    return seconds_since_ns(workload.idle_ns) if workload.members else 0.0
