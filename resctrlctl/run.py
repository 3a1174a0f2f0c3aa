# SPDX-License-Identifier: Apache-2.0
"""The verb ``run``: run a command as a workload of its own, and report what the command used."""

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

from resctrlctl.child import KILLED, CannotExecute, CommandResult, HeldChild
from resctrlctl.daemon import Daemon
from resctrlctl.errors import OWN_FAILURE, CommandError, Disconnected, print_error
from resctrlctl.format import format_class, format_count, format_message, format_value
from resctrlctl.layout import Column, Row, Table, to_text
from resctrlctl.output import Json, Output, encode
from resctrlmond.api import types
from resctrlmond.api.text import text
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.states import EndRule
from resctrlmond.workloads.validation import attribute_value

# The owner of the claim. If resctrlctl is killed, resctrlmond ends this claim some time after the command.
CLAIM = "run"

# After a signal, wait this long before printing a note: the release may end in the meantime.
_NOTE_AFTER_S = 1.0
# Timeout of the count of remaining tasks, on which the totals do not depend.
_TASKS_TIMEOUT_S = 5.0

_COLUMNS = (Column("EVENT"), Column("TOTAL", right=True), Column("QUALITY"))


class Report(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """The JSON report of ``run``: the exit status and times of the command, and the daemon's reply to Release.

    ``elapsed``, ``user`` and ``system`` are seconds. ``tasks_left`` is the number of tasks that were still running
    when the command had ended; null if it is unknown. ``problem`` is the reason if there are no totals. ``workload``
    is then null if the command was not monitored, or else as it was when the command began.
    """

    command: list[str]
    exit_status: int
    elapsed: float
    user: float
    system: float
    tasks_left: int | None
    completed: bool
    workload: types.Workload | None
    totals: list[types.Total]
    problem: str = ""


# The report or the exception of the release; None for a signal that arrived after the end of the command.
_Event: TypeAlias = Report | BaseException | None


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the command in a group of its own; return its exit status, or 125 to 127 if it was not executed."""
    daemon = Daemon(args.socket)
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    with _report_file(args.output) as file:
        try:
            child = HeldChild(args.command, lambda: events.put(None))
        except OSError as error:
            raise CommandError(
                f"cannot start a process: {error.strerror}. See 'ulimit -a' for the limits", OWN_FAILURE
            ) from error
        problem = ""
        try:
            workload = _assign(daemon, child, args)
        except CommandError as error:
            if not args.best_effort:
                status = child.kill()
                if status != KILLED:
                    # A signal had ended the child, so Assign found no process.
                    return status
                raise CommandError(str(error), OWN_FAILURE) from error
            problem = str(error)
            output.note(f"{problem}. The command runs unmonitored")
            workload = None
        try:
            result = child.wait(child.execute())
        except CannotExecute as error:
            print_error(str(error))
            if workload is not None:
                _release_unused(daemon, workload.key)
            return error.status
        if workload is not None:
            report = _finish_unless_interrupted(daemon, workload, result, args.command, events)
        else:
            report = _report(result, args.command, None, problem=problem)
        _print(report, output, file)
        return result.status


@contextlib.contextmanager
def _report_file(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stderr
        return
    try:
        # Opened before the command starts, because an error after hours of work would lose the report.
        opened = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise CommandError(
            f"cannot write the report to {path}: {error.strerror}. Name another file with -o", OWN_FAILURE
        ) from error
    try:
        yield opened
    finally:
        with contextlib.suppress(OSError):  # _print() has reported the error
            opened.close()


def _assign(daemon: Daemon, child: HeldChild, args: argparse.Namespace) -> types.Workload:
    """Assign the held child to a workload of its own. Raises CommandError; then no workload remains."""
    key = args.key or f"run-{child.pid}-{child.start_time}"
    action = f"monitor {printable(args.command[0])!r} as {key!r}"
    _check_key_is_free(daemon, key, action)
    request = types.AssignRequest(
        key=key,
        pid_fd=0,
        class_=args.class_,
        # The user named the class, and the process has not run yet, so it may change its class.
        allow_class_change=args.class_ not in (None, types.FOLLOW) or None,
        take_over=args.take_over or None,
        # The child does not execute the command before the reply.
        late=False,
        claim=CLAIM,
        # If resctrlctl is killed, no process is left that releases the claim.
        end_rule=EndRule.MEMBERS,
        attributes={"command": attribute_value(shlex.join(map(text, args.command)))},
        allow_pending=False,
    )
    try:
        reply = daemon.call(action, "Assign", request, types.AssignReply, [child.pidfd])
        if reply.tasks_outside:
            raise CommandError(
                f"cannot {action}: resctrlctl is in another monitoring group, so its child processes are too. "
                "Use --take-over to take the command out of that group"
            )
    except CommandError as error:
        # resctrlmond rolls back a call that it refuses. After any other error, the group may exist.
        if not error.name:
            _release_unused(daemon, key)
        raise
    return reply.workload


def _check_key_is_free(daemon: Daemon, key: str, action: str) -> None:
    """Raise CommandError if a workload with that key exists and is not over."""
    try:
        workload = daemon.call(action, "Get", types.KeyRequest(key=key), types.WorkloadReply).workload
    except CommandError as error:
        if error.name == "NoSuchWorkload":
            return
        raise
    if not workload.state.is_over:
        raise CommandError(f"cannot {action}: the workload exists already ({workload.state}). Choose another --key")


def _release_unused(daemon: Daemon, key: str) -> None:
    request = types.ReleaseRequest(key=key, claim=CLAIM, reason="the command was not executed")
    # The first error is reported already, and usually there is no workload to release.
    with contextlib.suppress(CommandError):
        daemon.call("release", "Release", request, types.ReleaseReply)


def _finish_unless_interrupted(
    daemon: Daemon,
    workload: types.Workload,
    result: CommandResult,
    command: list[str],
    events: queue.SimpleQueue[_Event],
) -> Report:
    """Release the group in a thread; return the report. The second signal in ``events`` stops the wait."""

    def finish() -> None:
        try:
            events.put(_finish(daemon, workload, result, command))
        except BaseException as error:
            events.put(error)

    # A daemon thread, because the interpreter does not wait for it at its exit.
    threading.Thread(target=finish, name="finish", daemon=True).start()
    interrupts = 0
    is_note_printed = False
    while True:
        try:
            event = events.get(timeout=_NOTE_AFTER_S if interrupts and not is_note_printed else None)
        except queue.Empty:
            print_error("the command has ended; waiting for its totals. Send the signal again to stop waiting")
            is_note_printed = True
            continue
        if isinstance(event, BaseException):
            raise event
        if event is not None:
            return event
        # The first signal is ignored: if it was sent to the process group, it ended the command, and is read later.
        interrupts += 1
        if interrupts > 1:
            problem = f"cannot release {workload.key!r}: interrupted while resctrlmond did not answer"
            return _report(result, command, workload, problem=problem)


def _finish(daemon: Daemon, workload: types.Workload, result: CommandResult, command: list[str]) -> Report:
    """Release the group; return the report. If the release fails, the report has the reason and no totals."""
    tasks_left = _count_tasks(Daemon(daemon.socket, _TASKS_TIMEOUT_S), workload.key)
    request = types.ReleaseRequest(key=workload.key, claim=CLAIM, reason=f"ended with status {result.status}")
    try:
        reply = _release(daemon, request)
    except CommandError as error:
        return _report(result, command, workload, tasks_left=tasks_left, problem=str(error))
    return _report(
        result, command, reply.workload, tasks_left=tasks_left, completed=reply.completed, totals=reply.totals
    )


def _release(daemon: Daemon, request: types.ReleaseRequest) -> types.ReleaseReply:
    action = f"release {request.key!r}"
    try:
        return daemon.call(action, "Release", request, types.ReleaseReply)
    except Disconnected:
        # The daemon was stopped during the call. With socket activation, the next call waits for the restart, and
        # the Release of a workload that has ended returns the same totals.
        return daemon.call(action, "Release", request, types.ReleaseReply)


def _report(
    result: CommandResult,
    command: list[str],
    workload: types.Workload | None,
    *,
    tasks_left: int | None = None,
    completed: bool = False,
    totals: Sequence[types.Total] = (),
    problem: str = "",
) -> Report:
    return Report(
        command=[text(word) for word in command],
        exit_status=result.status,
        elapsed=round(result.elapsed_s, 6),
        user=round(result.user_s, 6),
        system=round(result.system_s, 6),
        tasks_left=tasks_left,
        completed=completed,
        workload=workload,
        totals=list(totals),
        problem=problem,
    )


def _print(report: Report, output: Output, file: TextIO) -> None:
    is_json = output.json is not Json.OFF
    is_hidden = output.quiet and file is sys.stderr and not is_json
    try:
        if report.workload and report.problem and (is_json or is_hidden or file is not sys.stderr):
            print_error(report.problem)  # otherwise it is in the text below
        if is_hidden:
            return
        file.write(encode(report, output.json) + "\n" if is_json else _text(report))
        file.flush()
    except OSError as error:
        remedy = (
            f". The totals are also in: resctrlctl show {shlex.quote(report.workload.key)}" if report.workload else ""
        )
        print_error(f"cannot write the report: {error.strerror}{remedy}")


def _count_tasks(daemon: Daemon, key: str) -> int | None:
    """Return the number of tasks in the group now, from the file "tasks"; None if it cannot be read."""
    try:
        # Get the path again, because the group may have been moved to another class.
        path = daemon.call(f"find {key!r}", "Get", types.KeyRequest(key=key), types.WorkloadReply).workload.path
        if path is None:
            return None
        with open(os.path.join(path, "tasks"), encoding="ascii") as tasks:
            return sum(1 for _ in tasks)
    except (CommandError, OSError):
        return None


def _text(report: Report) -> str:
    command = printable(shlex.join(report.command))
    workload = report.workload
    name = f"{printable(workload.key)} in class {format_class(workload.class_)}" if workload else "not monitored"
    rows = [
        Row(
            (
                _label(total.event),
                format_value(total.value, total.unit),
                format_message(": ".join(filter(None, (total.quality, total.reason)))),
            )
        )
        for total in report.totals
    ]
    times = (("elapsed", report.elapsed), ("user", report.user), ("system", report.system))
    rows.extend(Row((label, f"{seconds:.6f} s", "")) for label, seconds in times)
    lines = [f"{command}: {name}", ""]
    lines.extend(f"  {line}" for line in to_text([Table(_COLUMNS, tuple(rows))], None, legend=False).splitlines())
    if report.tasks_left:
        tasks = format_count(report.tasks_left, "task")
        lines.append(f"{tasks} of the command still running: their use from now on is not counted.")
    if workload and report.problem:
        key = shlex.quote(printable(workload.key))
        lines.append(f"No totals: {format_message(report.problem)}.")
        lines.append(f"When resctrlmond runs, it ends the workload. For the totals, use: resctrlctl show {key}")
    elif workload and not report.completed:
        lines.append("The workload continues, because it has other claims.")
    return "\n".join(["", *lines, ""])


def _label(event: str) -> str:
    return printable(event).removesuffix("_bytes").replace("_", " ")
