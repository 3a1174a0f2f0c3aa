# SPDX-License-Identifier: Apache-2.0
"""The target of ``run --pid``, ``--cgroup`` and ``--unit``: a process or a control group that runs already."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from decimal import Context, Decimal, localcontext

import msgspec
from msgspec.structs import replace

from resctrlctl.base import systemd_programs
from resctrlctl.base.errors import OWN_FAILURE, CommandError
from resctrlctl.connection.daemon import Daemon
from resctrlmond.api import signatures, types
from resctrlmond.resctrl import processes
from resctrlmond.resctrl.cgroups import member_test
from resctrlmond.resctrl.errors import ResctrlError, printable
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.model.states import Quality, worst

# The mount points of the hierarchy in which systemd creates its control groups: v2 alone, v2 beside v1, and v1.
_HIERARCHIES = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")
_NOT_OWN = "only nested workloads counted it"
ENDED_EARLY = "the workload ended before the command, and later use is not counted"
# A value has up to 20 digits and 9 decimals.
_EXACTLY = Context(prec=64)


class Target(msgspec.Struct, frozen=True):
    """A process with its descendants, or a control group with all below it.

    ``pidfd`` holds the process ``pid``, and ``start_time`` identifies it; they are 0 for a control group. ``cgroup``
    is the canonical path; "" for a process.
    """

    pid: int = 0
    start_time: int = 0
    pidfd: int = 0
    cgroup: str = ""

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid else f"control group {printable(self.cgroup)}"

    def is_member(self, member: types.Member) -> bool:
        """Return whether the member is this target, or the container of which it is the first process."""
        if self.pid:
            return (member.pid, member.start_time) == (self.pid, self.start_time)
        return member.cgroup == self.cgroup

    def is_all_of(self, workload: types.Workload) -> bool:
        """Return whether this target is the only member that the workload has had.

        A process that an ended member has left may run on in the group, so ended members count too. A member with
        a control group also has the processes that joined that, which are not descendants of its first process.
        """
        members = _members(workload)
        return len(members) == 1 and self.is_member(members[0]) and not (self.pid and members[0].cgroup)


@contextlib.contextmanager
def opened(args: argparse.Namespace) -> Iterator[Target | None]:
    """Find the target of the options, and hold it within the context; None without such an option.

    Raises CommandError.
    """
    if args.pid is not None:
        try:
            process = Process.open(args.pid)
        except ResctrlError as error:
            raise CommandError(
                f"cannot measure process {args.pid}: {error}. Give the id of a running process", OWN_FAILURE
            ) from error
        with process:
            yield Target(pid=process.pid, start_time=process.start_time, pidfd=process.pidfd)
    elif args.cgroup is not None or args.unit is not None:
        path = args.cgroup if args.cgroup is not None else _cgroup_of_unit(args.unit)
        yield Target(cgroup=os.path.realpath(path))
    else:
        yield None


def _cgroup_of_unit(unit: str) -> str:
    failed = f"cannot measure unit {printable(unit)!r}"
    try:
        done = systemd_programs.run("systemctl", "show", "--property=ControlGroup", "--value", "--", unit)
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"{failed}: systemctl: {error}. Use --cgroup PATH", OWN_FAILURE) from error
    if done.returncode:
        why = printable(" ".join(done.stderr.split()).rstrip("."))
        raise CommandError(f'{failed}: systemctl: "{why}". Use --cgroup PATH', OWN_FAILURE)
    inner = done.stdout.strip()
    if not inner:
        raise CommandError(f"{failed}: it does not run. See: systemctl status {printable(unit)}", OWN_FAILURE)
    paths = [root + inner for root in _HIERARCHIES]
    return next(filter(os.path.isdir, paths), paths[0])


def read_begin(daemon: Daemon, target: Target) -> types.ReadReply | None:
    """Return the totals of the workload that consists of exactly the target; None if it is in no workload.

    Raises CommandError if the target is a part of a workload.
    """
    pages = daemon.stream(f"measure {target}", signatures.LIST)
    found = [
        workload
        for page in pages
        for workload in page.workloads
        if not workload.state.is_over and any(target.is_member(member) for member in _members(workload))
    ]
    if not found:
        return None
    key = found[0].key
    reply = with_nested(daemon.call(f"read {key!r}", signatures.READ, types.KeyRequest(key=key)))
    is_one = len(found) == 1 and target.is_all_of(reply.workload)
    if not is_one or not reply.workload.state.has_group:
        raise CommandError(f"cannot measure {target}: {_why_refused(target, reply.workload, is_one=is_one)}")
    if _may_have_others(target, reply.workload):
        raise CommandError(
            f"cannot measure {target}: the group of its workload {key!r} has other tasks too, or descendants whose "
            f"parent has ended. For the totals of all, use: resctrlctl show {key}"
        )
    return reply


def _may_have_others(target: Target, workload: types.Workload) -> bool:
    """Return whether a task in the workload's group is not of the target, or the tasks cannot be listed.

    An earlier member with the same id may have left such a task: the workload does not list that member any more.
    """
    if workload.path is None or workload.classes:
        return True
    try:
        with open(os.path.join(workload.path, "tasks"), encoding="ascii") as tasks:
            tids = [int(line) for line in tasks]
        holds = _member_test(target)
        # A task that has ended meanwhile is not a task of the group any more.
        return any(not holds(tid) and processes.stat(tid) is not None for tid in tids)
    except (OSError, ResctrlError):
        return True


def _member_test(target: Target) -> Callable[[int], bool]:
    """Return the test whether a thread is of the target now. Raises NotRead."""
    if target.cgroup:
        return member_test(target.cgroup)
    return lambda tid: processes.leader(tid) == target.pid or processes.is_descendant(tid, target.pid)


def read_around(daemon: Daemon, pid: int) -> types.ReadReply | None:
    """Return the totals of the workload in whose first group the process is; None if there is no such workload."""
    try:
        status = daemon.call("find resctrl", signatures.STATUS)
        tree = Tree.open(status.mount, allow_simulation=status.simulation is not None)
        where = tree.membership(pid)
        path = tree.full_path(GroupRef(where.class_, where.group))
        pages = daemon.stream("list the workloads", signatures.LIST)
        key = next((one.key for page in pages for one in page.workloads if where.group and one.path == path), None)
        if key is None:
            return None
        return with_nested(daemon.call("read", signatures.READ, types.KeyRequest(key=key)))
    except (CommandError, ResctrlError):
        return None


def _why_refused(target: Target, workload: types.Workload, *, is_one: bool) -> str:
    key = printable(workload.key)
    cgroup = next((member.cgroup for member in _members(workload) if target.is_member(member)), "")
    if is_one:
        return f"its workload {key!r} has no monitoring group now ({workload.state}). See: resctrlctl show {key}"
    if target.pid and cgroup:
        return (
            f"workload {key!r} has its whole control group, where other processes can be too. "
            f"Use --cgroup {printable(cgroup)}"
        )
    return f"workload {key!r} has or had other members too. For the totals of all, use: resctrlctl show {key}"


def in_other_group(target: Target) -> CommandError:
    """Return the error for a target with tasks in a monitoring group that is not the target's own."""
    return CommandError(
        f"cannot measure {target}: tasks of it are in monitoring groups of other workloads or programs, and "
        "a task is in one group only. To list these groups, use: resctrlctl list --all"
    )


def difference(begin: types.ReadReply, end: types.ReadReply) -> list[types.Total]:
    """Return what the workload used between two readings. No total is better than the worse of its two readings.

    Raises CommandError if the workload began again between them.
    """
    first, last = begin.workload, end.workload
    if (first.generation, first.created_at) != (last.generation, last.created_at):
        raise CommandError(
            f"cannot measure workload {last.key!r}: it ended and began again while the command ran. "
            "Run the command again"
        )
    before = {total.event: total for total in begin.totals}
    totals = [_difference(before.get(total.event), total) for total in end.totals]
    if list(map(_identity, _members(first))) != list(map(_identity, _members(last))):
        totals = downgraded(totals, Quality.ESTIMATED, "other members joined the workload, and their use is counted")
    return totals


def downgraded(totals: Sequence[types.Total], quality: Quality, reason: str) -> list[types.Total]:
    """Return the totals with no better quality than this one, and with the reason."""
    return [
        replace(total, quality=worst(total.quality, quality), reason="; ".join(filter(None, (total.reason, reason))))
        for total in totals
    ]


def with_nested(reply: types.ReadReply) -> types.ReadReply:
    """Return a reading with totals that include the nested workloads."""
    return replace(reply, totals=together(reply.totals, reply.nested or ()), nested=None)


def together(totals: Sequence[types.Total], nested: Sequence[types.Total]) -> list[types.Total]:
    """Return the sums of the totals of a workload and of those of its nested workloads, with the worse quality."""
    inside = {total.event: total for total in nested}
    own = {total.event for total in totals}
    found = [_sum(total, inside[total.event]) if total.event in inside else total for total in totals]
    # The workload itself has not counted these: the sums are lower bounds.
    lower = downgraded([total for total in nested if total.event not in own], Quality.ESTIMATED, _NOT_OWN)
    return found + lower


def _sum(own: types.Total, nested: types.Total) -> types.Total:
    known = [Decimal(total.value) for total in (own, nested) if total.value is not None]
    reasons = dict.fromkeys(total.reason for total in (own, nested) if total.reason)
    quality = worst(own.quality, nested.quality)
    if len(known) == 1:
        quality = Quality.ESTIMATED  # a lower bound
    with localcontext(_EXACTLY):
        value = f"{sum(known):f}" if known else None
    return replace(own, value=value, quality=quality, reason="; ".join(reasons) or None)


def as_known(reply: types.ReadReply) -> types.ReadReply:
    """Return a reading during a run, with nested workloads: late if it has ended, because the command still runs."""
    reply = with_nested(reply)
    if not reply.workload.state.is_over:
        return reply
    return replace(reply, totals=downgraded(reply.totals, Quality.LATE, ENDED_EARLY))


def _difference(begin: types.Total | None, end: types.Total) -> types.Total:
    reasons = dict.fromkeys(total.reason for total in (begin, end) if total is not None and total.reason)
    reason = "; ".join(reasons)
    if begin is None or begin.value is None or end.value is None:
        reason = reason or "it was not counted when the command began"
        return types.Total(event=end.event, unit=end.unit, quality=Quality.UNKNOWN, reason=reason)
    with localcontext(_EXACTLY):
        used = Decimal(end.value) - Decimal(begin.value)
    if used < 0:
        reason = "; ".join(filter(None, (reason, "the total of the workload decreased while the command ran")))
        return types.Total(event=end.event, unit=end.unit, quality=Quality.UNKNOWN, reason=reason)
    quality = worst(begin.quality, end.quality)
    return types.Total(event=end.event, unit=end.unit, value=f"{used:f}", quality=quality, reason=reason or None)


def _members(workload: types.Workload) -> list[types.Member]:
    """Return the members that have, or had, tasks."""
    return [member for member in workload.members if member.pid or member.cgroup]


def _identity(member: types.Member) -> tuple[str, int, int, str]:
    return member.id, member.pid, member.start_time, member.cgroup
