# SPDX-License-Identifier: Apache-2.0
"""``run``: a command in a monitoring group of its own, and what it used."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TextIO, TypeAlias

import msgspec

from resctrlctl.ask import Daemon, Disconnected, Failure
from resctrlctl.child import KILLED, OWN_FAILURE, CannotExecute, Ended, HeldChild
from resctrlctl.figures import count, prose
from resctrlctl.layout import Column, Row, Table, plain
from resctrlctl.render import class_name, total_figure
from resctrlctl.screen import Json, Screen, complain, encode
from resctrlmond.api import types
from resctrlmond.api.translate import text
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model import EndRule
from resctrlmond.workloads.validation import attribute_value

# resctrlmond itself ends this claim some time after the command, should resctrlctl be killed before it does.
CLAIM = "run"

# A signal that comes together with the end of the command needs no note.
_NOTE_AFTER_S = 1.0
# How long the last look at a group may take: its totals do not depend on it.
_LOOK_S = 5.0

_COLUMNS = (Column("EVENT"), Column("TOTAL", right=True), Column("QUALITY"))


class Report(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """What ``run --json`` prints: how the command ended, and the daemon's reply to Release.

    ``elapsed``, ``user`` and ``system`` are seconds. ``tasks_left``: tasks of the command that were still running
    when it had ended, null if that is not known. ``problem``: why there are no totals; ``group`` is null then if the
    command was not monitored, else the group as it was when the command began.
    """

    command: list[str]
    exit_status: int
    elapsed: float
    user: float
    system: float
    tasks_left: int | None
    completed: bool
    group: types.Group | None
    totals: list[types.Total]
    problem: str = ""


# How the release of a group ended, or None for a signal that came after the command's end.
_Outcome: TypeAlias = Report | BaseException | None


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Run the command in its group; its exit status, or 125 to 127 where it was not executed."""
    daemon = Daemon(args.socket)
    outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
    with _output(args.output) as out:
        try:
            child = HeldChild(args.command, lambda: outcomes.put(None))
        except OSError as error:
            raise Failure(
                f"cannot start a process: {error.strerror}. See 'ulimit -a' for the limits", OWN_FAILURE
            ) from error
        problem = ""
        try:
            group = _join(daemon, child, args)
        except Failure as error:
            if not args.best_effort:
                status = child.kill()
                if status != KILLED:
                    # Somebody interrupted it, which is why there was nothing to monitor.
                    return status
                raise Failure(str(error), OWN_FAILURE) from error
            problem = str(error)
            screen.note(f"{problem}. The command runs unmonitored")
            group = None
        try:
            ended = child.wait(child.let_go())
        except CannotExecute as error:
            complain(str(error))
            if group is not None:
                _abandon(daemon, group.key)
            return error.status
        if group is not None:
            report = _finish_or_interrupted(daemon, group, ended, args.command, outcomes)
        else:
            report = _report(ended, args.command, None, problem=problem)
        _print(report, screen, out)
        return ended.status


@contextlib.contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stderr
        return
    try:
        # Before the command starts: it must not run for hours only to find that its report cannot be kept.
        opened = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise Failure(
            f"cannot write the report to {path}: {error.strerror}. Give another file with -o", OWN_FAILURE
        ) from error
    try:
        yield opened
    finally:
        with contextlib.suppress(OSError):  # an earlier write reported the error
            opened.close()


def _join(daemon: Daemon, child: HeldChild, args: argparse.Namespace) -> types.Group:
    """Put the held child in a group of its own. Raises Failure, with nothing left behind."""
    key = args.key or f"run-{child.pid}-{child.start_time}"
    what = f"monitor {printable(args.command[0])!r} as {key!r}"
    _refuse_used(daemon, key, what)
    request = types.AssignRequest(
        key=key,
        pid_fd=0,
        class_=args.class_,
        # A class that was asked for by name is meant; the process is ours and has not begun.
        allow_class_change=args.class_ not in (None, types.FOLLOW) or None,
        take_over=args.take_over or None,
        # It is held before it executes the command, until the answer is here.
        late=False,
        claim=CLAIM,
        # If resctrlctl is killed, nobody is left to release the claim.
        end_rule=EndRule.MEMBERS,
        attributes={"command": attribute_value(shlex.join(map(text, args.command)))},
        allow_pending=False,
    )
    try:
        reply = daemon.call(what, "Assign", request, types.AssignReply, [child.pidfd])
        if reply.tasks_outside:
            raise Failure(
                f"cannot {what}: resctrlctl itself is in another monitoring group, and so is what it starts. "
                "Use --take-over to take the command out of it"
            )
    except Failure as error:
        # resctrlmond undoes what it refuses. After another error the group may exist.
        if not error.name:
            _abandon(daemon, key)
        raise
    return reply.group


def _refuse_used(daemon: Daemon, key: str, what: str) -> None:
    try:
        group = daemon.call(what, "Get", types.KeyRequest(key=key), types.GroupReply).group
    except Failure as error:
        if error.name == "NoSuchGroup":
            return
        raise
    if not group.state.is_over:
        raise Failure(f"cannot {what}: the workload exists already ({group.state}). Choose another --key")


def _abandon(daemon: Daemon, key: str) -> None:
    request = types.ReleaseRequest(key=key, claim=CLAIM, reason="the command was not executed")
    # The first error is reported already, and usually there is nothing to release.
    with contextlib.suppress(Failure):
        daemon.call("release", "Release", request, types.ReleaseReply)


def _finish_or_interrupted(
    daemon: Daemon, group: types.Group, ended: Ended, command: list[str], outcomes: queue.SimpleQueue[_Outcome]
) -> Report:
    """Release the group, in a thread, until that is done or a second signal has come after the command's end."""

    def finish() -> None:
        try:
            outcomes.put(_finish(daemon, group, ended, command))
        except BaseException as error:
            outcomes.put(error)

    # A daemon thread: the interpreter does not wait for it at its exit.
    threading.Thread(target=finish, name="finish", daemon=True).start()
    interrupts = 0
    is_noted = False
    while True:
        try:
            outcome = outcomes.get(timeout=_NOTE_AFTER_S if interrupts and not is_noted else None)
        except queue.Empty:
            complain("waiting for the totals of the command, which has ended: send the signal again to stop waiting")
            is_noted = True
            continue
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome is not None:
            return outcome
        # Not at the first one: the signal that ends the command, sent to a process group, may arrive after the end.
        interrupts += 1
        if interrupts > 1:
            problem = f"cannot release {group.key!r}: interrupted while resctrlmond did not answer"
            return _report(ended, command, group, problem=problem)


def _finish(daemon: Daemon, group: types.Group, ended: Ended, command: list[str]) -> Report:
    """Release the group. If that fails, the report has the reason and the times of the command, and no totals."""
    tasks_left = _tasks_left(Daemon(daemon.socket, _LOOK_S), group.key)
    request = types.ReleaseRequest(key=group.key, claim=CLAIM, reason=f"ended with status {ended.status}")
    try:
        reply = _release(daemon, request)
    except Failure as error:
        return _report(ended, command, group, tasks_left=tasks_left, problem=str(error))
    return _report(ended, command, reply.group, tasks_left=tasks_left, completed=reply.completed, totals=reply.totals)


def _release(daemon: Daemon, request: types.ReleaseRequest) -> types.ReleaseReply:
    what = f"release {request.key!r}"
    try:
        return daemon.call(what, "Release", request, types.ReleaseReply)
    except Disconnected:
        # The daemon was stopped during the call. With socket activation the next call waits for its restart, and
        # the Release of a workload that has ended answers with the same totals.
        return daemon.call(what, "Release", request, types.ReleaseReply)


def _report(
    ended: Ended,
    command: list[str],
    group: types.Group | None,
    *,
    tasks_left: int | None = None,
    completed: bool = False,
    totals: Sequence[types.Total] = (),
    problem: str = "",
) -> Report:
    return Report(
        command=[text(word) for word in command],
        exit_status=ended.status,
        elapsed=round(ended.elapsed_s, 6),
        user=round(ended.user_s, 6),
        system=round(ended.system_s, 6),
        tasks_left=tasks_left,
        completed=completed,
        group=group,
        totals=list(totals),
        problem=problem,
    )


def _print(report: Report, screen: Screen, out: TextIO) -> None:
    is_json = screen.json is not Json.OFF
    is_hidden = screen.quiet and out is sys.stderr and not is_json
    try:
        if report.group and report.problem and (is_json or is_hidden or out is not sys.stderr):
            complain(report.problem)  # else it is in the text below
        if is_hidden:
            return
        out.write(encode(report, screen.json) + "\n" if is_json else _text(report))
        out.flush()
    except OSError as error:
        where = f". The totals are also in: resctrlctl show {shlex.quote(report.group.key)}" if report.group else ""
        complain(f"cannot write the report: {error.strerror}{where}")


def _tasks_left(daemon: Daemon, key: str) -> int | None:
    """How many tasks the group holds now, from the kernel's own list; None where it cannot be read."""
    try:
        # Asked again: the group may have been moved to another class meanwhile.
        path = daemon.call(f"look for {key!r}", "Get", types.KeyRequest(key=key), types.GroupReply).group.path
        if path is None:
            return None
        with open(os.path.join(path, "tasks"), encoding="ascii") as tasks:
            return sum(1 for _ in tasks)
    except (Failure, OSError):
        return None


def _text(report: Report) -> str:
    command = printable(shlex.join(report.command))
    group = report.group
    workload = f"{printable(group.key)} in class {class_name(group.class_)}" if group else "not monitored"
    rows = [
        Row((_label(total.event), total_figure(total), prose(": ".join(filter(None, (total.quality, total.reason))))))
        for total in report.totals
    ]
    times = (("elapsed", report.elapsed), ("user", report.user), ("system", report.system))
    rows.extend(Row((label, f"{seconds:.6f} s", "")) for label, seconds in times)
    lines = [f"{command}: {workload}", ""]
    lines.extend(f"  {line}" for line in plain([Table(_COLUMNS, tuple(rows))], None, legend=False).splitlines())
    if report.tasks_left:
        lines.append(
            f"{count(report.tasks_left, 'task')} of the command still running: their use from now on is not counted."
        )
    if group and report.problem:
        key = shlex.quote(printable(group.key))
        lines.append(f"No totals: {prose(report.problem)}.")
        lines.append(f"When resctrlmond runs, it ends the workload. The totals are then in: resctrlctl show {key}")
    elif group and not report.completed:
        lines.append("The workload continues, because it has other claims.")
    return "\n".join(["", *lines, ""])


def _label(event: str) -> str:
    return printable(event).removesuffix("_bytes").replace("_", " ")
