# SPDX-License-Identifier: Apache-2.0
"""The verbs that change a workload: ``create``, ``assign``, ``release`` and ``move``."""

from __future__ import annotations

import argparse
import contextlib
import os

from resctrlctl.base.errors import OK
from resctrlctl.connection.daemon import Daemon, daemon_of
from resctrlctl.screen.format import format_class, format_count
from resctrlctl.screen.output import Json, Output
from resctrlctl.workloads.render import describe_state, render_totals
from resctrlctl.workloads.selectors import call_for
from resctrlmond.api import signatures, types
from resctrlmond.resctrl.errors import printable
from resctrlmond.resctrl.processes import Descriptor
from resctrlmond.workloads.model.states import FOLLOW, seconds_up_to

_IN_OTHER_GROUPS = "they are in other monitoring groups. Use --take-over to take them out"
_STAY_IN_CLASS = (
    "the tasks stay in their class, where the workload has a further group; its totals are the sums of its groups. "
    "To move tasks to a class, name it with --class, and use --allow-class-change"
)


def create(args: argparse.Namespace, output: Output) -> int:
    """Create a workload with an empty group; return the exit status."""
    request = types.CreateRequest(
        key=args.key,
        class_=args.class_,
        claim=args.claim,
        attributes=dict(args.attribute) or None,
        allow_pending=False if args.no_pending else None,
        priority=args.priority,
    )
    reply = daemon_of(args).change(f"create {args.key!r}", signatures.CREATE, request)
    if output.json is not Json.OFF:
        output.print_json(reply)
    else:
        output.confirm(describe_state(reply.workload))
    return OK


def assign(args: argparse.Namespace, output: Output) -> int:
    """Move a process or a control group into the workload's group; return the exit status."""
    # ssh passes no descriptors, and the process is on the other host.
    pidfd = None if args.host is not None else _open_pidfd(args.pid)
    request = types.AssignRequest(
        key=args.key,
        pid=args.pid if pidfd is None else None,
        pid_fd=None if pidfd is None else 0,
        cgroup=args.cgroup,
        include_descendants=args.tree or None,
        class_=args.class_,
        allow_class_change=args.allow_class_change or None,
        take_over=args.take_over or None,
        claim=args.claim,
        member=args.member,
        attributes=dict(args.attribute) or None,
        allow_pending=False if args.no_pending else None,
        priority=args.priority,
    )
    tasks = f"process {args.pid}" if args.pid is not None else printable(args.cgroup)
    with contextlib.closing(pidfd) if pidfd is not None else contextlib.nullcontext():
        descriptors = [] if pidfd is None else [pidfd.fileno()]
        reply = daemon_of(args).change(f"assign {tasks} to {args.key!r}", signatures.ASSIGN, request, descriptors)
    member = _assigned_member(reply.workload, args)
    if output.json is not Json.OFF:
        output.print_json(reply)
    else:
        output.confirm(describe_state(reply.workload))
        output.confirm(f"{format_count(reply.moved, 'task')} moved in {_format_passes(reply.passes)}.")
        if member is not None and member.cpu_time_before_ns:
            used = f"{seconds_up_to(member.cpu_time_before_ns)} s of CPU time"
            output.confirm(
                f"The member had used up to {used} before, which is not counted: the totals of the workload are late."
            )
    if reply.tasks_outside:
        reason = (member.reason if member is not None else "") or reply.workload.reason or _IN_OTHER_GROUPS
        output.note(f"{format_count(reply.tasks_outside, 'task')} stayed outside: {printable(reason)}")
    if member is not None and member.snapshot_folder and args.class_ in (None, FOLLOW):
        output.note(_STAY_IN_CLASS)
    if reply.descendants_outside:
        descendants = format_count(reply.descendants_outside, "descendant")
        output.note(f"{descendants} of the process stayed outside: use --tree to move them too")
    return OK


def _open_pidfd(pid: int | None) -> Descriptor | None:
    """Return a pidfd of the process, which identifies it in every PID namespace; None if there is none.

    The daemon then reports the error of the pid.
    """
    if pid is None:
        return None
    try:
        return Descriptor(os.pidfd_open(pid))
    except OSError:
        # ESRCH: the process has ended. EINVAL or ENOENT: a thread, whose process the daemon can find.
        return None


def release(args: argparse.Namespace, output: Output) -> int:
    """End a claim and print the totals; return the exit status."""
    daemon = daemon_of(args)

    def call(key: str) -> types.ReleaseReply:
        request = types.ReleaseRequest(key=key, claim=args.claim, reason=args.reason)
        return daemon.change(f"release {key!r}", signatures.RELEASE, request)

    reply = call_for(args.key, call, lambda: _workloads(daemon))
    if output.json is not Json.OFF:
        output.print_json(reply)
    else:
        if reply.completed:
            output.confirm(describe_state(reply.workload))
        else:
            others = ", ".join(printable(claim.owner) for claim in reply.workload.claims)
            output.confirm(f"{printable(reply.workload.key)}: still claimed by {others or 'its members'}")
        if reply.totals:
            output.confirm("")
            inside = reply.nested or []
            output.print_blocks(render_totals(reply.totals, inside)[: 1 + bool(inside) if args.quiet else None])
    return OK


def move(args: argparse.Namespace, output: Output) -> int:
    """Move a workload's group to another class, with its RMID and counters; return the exit status."""
    daemon = daemon_of(args)

    def call(key: str) -> types.WorkloadReply:
        request = types.MoveRequest(key=key, class_=args.class_)
        return daemon.change(f"move {key!r} to class {format_class(args.class_)}", signatures.MOVE, request)

    reply = call_for(args.key, call, lambda: _workloads(daemon))
    if output.json is not Json.OFF:
        output.print_json(reply)
    else:
        output.confirm(describe_state(reply.workload))
    return OK


def _workloads(daemon: Daemon) -> list[types.Workload]:
    pages = daemon.stream("list the workloads", signatures.LIST)
    return [workload for page in pages for workload in page.workloads]


def _assigned_member(workload: types.Workload, args: argparse.Namespace) -> types.Member | None:
    """Return the member that the call assigned, found by its id."""
    of_cgroup = ""
    if args.cgroup is not None:
        # A link of the other host cannot be resolved here.
        of_cgroup = os.path.basename((os.path.realpath if args.host is None else os.path.normpath)(args.cgroup))
    member_id = args.member or of_cgroup or f"pid-{args.pid}"
    return next((member for member in workload.members if member.id == member_id), None)


def _format_passes(number: int) -> str:
    return "1 pass" if number == 1 else f"{number} passes"
