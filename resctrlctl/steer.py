# SPDX-License-Identifier: Apache-2.0
"""The verbs ``create``, ``assign``, ``release`` and ``move``."""

from __future__ import annotations

import argparse
import contextlib
import os

from resctrlctl.ask import OK, Daemon
from resctrlctl.figures import count
from resctrlctl.render import class_name, state_sentence, totals_table
from resctrlctl.screen import Json, Screen
from resctrlmond.api import types
from resctrlmond.resctrl.errors import printable
from resctrlmond.resctrl.processes import Descriptor

# The owner of claims that a person makes.
CLAIM = "cli"

_ELSEWHERE = "they are in other monitoring groups. Use --take-over to take them out"


_OWN_CLASS = (
    "the tasks stay in their class, where the workload has a further group; its totals are the sums of its groups. "
    "To move tasks to a class, name it with --class, and use --allow-class-change"
)


def create(args: argparse.Namespace, screen: Screen) -> int:
    """Make a workload's group, without a task yet."""
    request = types.CreateRequest(
        key=args.key,
        class_=args.class_,
        claim=args.claim,
        attributes=dict(args.attribute) or None,
        allow_pending=False if args.no_pending else None,
        priority=args.priority,
    )
    reply = Daemon(args.socket).call(f"create {args.key!r}", "Create", request, types.GroupReply)
    if screen.json is not Json.OFF:
        screen.answer(reply)
    else:
        screen.confirm(state_sentence(reply.group))
    return OK


def assign(args: argparse.Namespace, screen: Screen) -> int:
    """Put a process or a control group into the workload's group."""
    pidfd = _pidfd(args.pid)
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
    whom = f"process {args.pid}" if args.pid is not None else printable(args.cgroup)
    with contextlib.closing(pidfd) if pidfd is not None else contextlib.nullcontext():
        descriptors = [] if pidfd is None else [pidfd.fileno()]
        reply = Daemon(args.socket).call(
            f"assign {whom} to {args.key!r}", "Assign", request, types.AssignReply, descriptors
        )
    member = _member(reply.group, args)
    if screen.json is not Json.OFF:
        screen.answer(reply)
    else:
        screen.confirm(state_sentence(reply.group))
        screen.confirm(f"{count(reply.moved, 'task')} moved in {_passes(reply.passes)}.")
        if member is not None and member.cpu_time_before_ns:
            used = f"{member.cpu_time_before_ns / 1e9:.3f} s of CPU time"
            screen.confirm(f"It had used up to {used} before, which is not counted: its totals are late.")
    if reply.tasks_outside:
        reason = (member.reason if member is not None else "") or reply.group.reason or _ELSEWHERE
        screen.note(f"{count(reply.tasks_outside, 'task')} stayed outside: {printable(reason)}")
    if member is not None and member.snapshot_folder and args.class_ in (None, types.FOLLOW):
        screen.note(_OWN_CLASS)
    if reply.descendants_outside:
        below = count(reply.descendants_outside, "descendant")
        screen.note(f"{below} of the process stayed outside: use --tree to move them too")
    return OK


def _pidfd(pid: int | None) -> Descriptor | None:
    """The pidfd of a process, which names it in every PID namespace; None for the daemon to explain what is wrong."""
    if pid is None:
        return None
    try:
        return Descriptor(os.pidfd_open(pid))
    except OSError:
        # ESRCH: it has ended. EINVAL, ENOENT: it is a thread, by which the daemon finds the process.
        return None


def release(args: argparse.Namespace, screen: Screen) -> int:
    """End a claim; with the last one, print what the workload used."""
    request = types.ReleaseRequest(key=args.key, claim=args.claim, reason=args.reason)
    reply = Daemon(args.socket).call(f"release {args.key!r}", "Release", request, types.ReleaseReply)
    if screen.json is not Json.OFF:
        screen.answer(reply)
    else:
        if reply.completed:
            screen.confirm(state_sentence(reply.group))
        else:
            others = ", ".join(printable(claim.owner) for claim in reply.group.claims)
            screen.confirm(f"{printable(args.key)}: still claimed by {others or 'its members'}")
        if reply.totals:
            screen.confirm("")
            screen.show([totals_table(reply.totals)])
    return OK


def move(args: argparse.Namespace, screen: Screen) -> int:
    """Move the whole group to another class, with its RMID and counters."""
    request = types.MoveRequest(key=args.key, class_=args.class_)
    what = f"move {args.key!r} to class {class_name(args.class_)}"
    reply = Daemon(args.socket).call(what, "Move", request, types.GroupReply)
    if screen.json is not Json.OFF:
        screen.answer(reply)
    else:
        screen.confirm(state_sentence(reply.group))
    return OK


def _member(group: types.Group, args: argparse.Namespace) -> types.Member | None:
    """The member that was just assigned."""
    of_cgroup = os.path.basename(os.path.realpath(args.cgroup)) if args.cgroup is not None else ""
    name = args.member or of_cgroup or f"pid-{args.pid}"
    return next((member for member in group.members if member.id == name), None)


def _passes(number: int) -> str:
    return "1 pass" if number == 1 else f"{number} passes"
