# SPDX-License-Identifier: Apache-2.0
"""States, end rules and qualities of workloads, and how their bounds are written.

Clients import this module, so it imports little.
"""

from __future__ import annotations

import enum

# In place of a class: that of the workload's first task.
FOLLOW = "follow"


class State(enum.StrEnum):
    """The state of a workload."""

    PENDING = "pending"
    """The workload waits for its group, most often because no RMID is free; see *reason* and *inLimbo* of *Workload*.
    The daemon retries by itself.
    """
    ACTIVE = "active"
    """The workload has a group and members."""
    IDLE = "idle"
    """The workload has a group but no members."""
    ENDING = "ending"
    """The end values are being written."""
    COMPLETED = "completed"
    """The workload has ended. The end values are written, and kept for _snapshot_ttl_."""
    LOST = "lost"
    """The run has ended because another program removed the group or unmounted resctrl. The values that were read
    last are the end values. While the workload is claimed, the daemon begins another run.
    """
    FAILED = "failed"
    """The run has ended because the group could not be created; see *reason* of *Workload*."""

    @property
    def has_group(self) -> bool:
        """Whether a workload in this state has a directory in resctrl."""
        return self in (State.ACTIVE, State.IDLE, State.ENDING)

    @property
    def is_over(self) -> bool:
        """Whether the run is over: only its snapshot and totals remain."""
        return self in (State.COMPLETED, State.LOST, State.FAILED)


class EndRule(enum.StrEnum):
    """The rule by which a claim ends. Every claim also ends when its owner releases it."""

    RELEASE = "release"
    """The claim ends only when its owner releases it."""
    MEMBERS = "members"
    """The claim ends 10 seconds after the workload's last member, so that the owner has time to release the claim and
    get the totals. *resctrlctl run* uses this rule.
    """
    CONTAINER = "container"
    """A claim on a pod ends with the pod's control group, or, if that is not known, _pod_linger_ after the last
    member. A claim on another workload ends _linger_ after the last member. The end of the last member does not end
    the claim of an owner that has added no member. The hook uses this rule.
    """
    TASKS = "tasks"
    """The claim ends with the last task in the group. The daemon uses this rule for a group whose record was lost,
    and refuses it in a request.
    """


class Pool(enum.StrEnum):
    """A part of the machine's use. What the cores used is the sum of the first three."""

    TRACKED = "tracked"
    """The groups of all workloads, those that have ended included."""
    FOREIGN = "foreign"
    """The monitoring groups of other programs."""
    UNTRACKED = "untracked"
    """The tasks of the root and of all classes that are in no monitoring group."""
    UNCORE = "uncore"
    """What the processor packages used beyond their cores. Absent where the host does not show their energy."""


class NameKind(enum.StrEnum):
    """A kind of names, by which the sums add up workloads."""

    NAMESPACE = "namespace"
    """The namespace of Kubernetes."""
    SLICE = "slice"
    """The outermost systemd slice of its control groups, such as _system.slice_."""
    USER = "user"
    """The number of the user whose slice has its control groups."""
    PROFILE = "profile"
    """Its profile, see *resctrlmond-profiles*(5)."""


class CallKind(enum.StrEnum):
    """A kind of calls, whose durations are counted together."""

    HOOK = "hook"
    """The calls of the OCI hook that put a container into its group, with the time in their queue."""
    READ = "read"
    """The calls that change nothing, with one reply."""
    CHANGE = "change"
    """The other calls."""


class Quality(enum.StrEnum):
    """How far a total can be trusted."""

    EXACT = "exact"
    """Everything was counted, from before the first task until the counters were read."""
    LATE = "late"
    """Some use is missing: the workload, or a task that joined it from outside, had already run when it was put into
    the group, or a task was outside the group.
    """
    ESTIMATED = "estimated"
    """The figure may be too high or too low: a reading is missing, the counter may not be right, other tasks may be
    counted, or *resctrlmond-witness*(8) does not show where the tasks were; see *reason* of *Total*.
    """
    UNKNOWN = "unknown"
    """There is no number."""


class ProofKind(enum.StrEnum):
    """A proof on which the quality of a workload rests; see *QUALITY* in *resctrlmond*(7)."""

    ENTERED = "entered"
    """The first task of a member was in the group before it ran, because its caller waited."""
    CLOSED = "closed"
    """Since then, its tasks used at most 1 ms of CPU time outside its groups. For a command or process: no other
    program moved a task out of them.
    """
    ALONE = "alone"
    """Other tasks used at most 1 ms of CPU time with the RMID of each of its groups. For a command or process: no
    other program moved a task into them. No other program gave them CPUs.
    """
    READ = "read"
    """Every counter had a number at the begin, and at the last reading or at the end."""
    WATCHED = "watched"
    """*resctrlmond-witness*(8) has counted without a gap since the begin. *closed* and *alone* rest on it."""


# From best to worst, as declared: a sum has the quality of its worst part.
_RANKS = {quality: rank for rank, quality in enumerate(Quality)}


def worst(*qualities: Quality) -> Quality:
    """Return the worst of these qualities."""
    return max(qualities, key=_RANKS.__getitem__)


class CompanionState(enum.StrEnum):
    """Where a companion is in its life."""

    WAITING = "waiting"
    """It has not been started: the workload has no group yet, systemd cannot be reached, or the previous
    companion has not ended."""
    STARTING = "starting"
    """systemd starts it, or starts it again after a failure."""
    RUNNING = "running"
    """Its process runs."""
    EXITED = "exited"
    """Its process has ended with success."""
    STOPPING = "stopping"
    """systemd stops it: the workload has ended, or its profile has no companion any more."""
    STOPPED = "stopped"
    """Another program has stopped it."""
    FAILED = "failed"
    """It could not be started, or its process has failed."""


def seconds_up_to(ns: int) -> str:
    """Return an upper bound (ns) in seconds, with three digits, rounded up: it is still an upper bound."""
    milliseconds = -(-ns // 10**6)
    return f"{milliseconds // 1000}.{milliseconds % 1000:03}"
