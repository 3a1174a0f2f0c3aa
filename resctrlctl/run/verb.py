# SPDX-License-Identifier: Apache-2.0
"""The verb ``run``: run a command, and report what it used, or what a process or control group used meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeAlias

import msgspec
from msgspec.structs import replace

from resctrlctl.base.errors import OWN_FAILURE, CommandError, DaemonDown, Disconnected, print_error
from resctrlctl.connection.daemon import Daemon
from resctrlctl.run.child import KILLED, CannotExecute, CommandResult, HeldChild
from resctrlctl.run.report import RepeatedReport, Report, as_fields, as_text, figures, interval_lines, is_selected
from resctrlctl.run.samples import Interval, LevelSummary, Sampler
from resctrlctl.run.target import (
    ENDED_EARLY,
    Target,
    as_known,
    difference,
    downgraded,
    in_other_group,
    opened,
    read_around,
    read_begin,
    together,
)
from resctrlctl.screen.output import Json, Output, encode
from resctrlctl.screen.width import has_blocks, terminal_width
from resctrlmond.api import signatures, types
from resctrlmond.api.signatures import Q, R, Signature
from resctrlmond.api.text import text
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.states import FOLLOW, EndRule, Quality
from resctrlmond.workloads.model.validation import attribute_value

# The report or the exception of the last reading; None for a signal that arrived after the end of the command.
_Event: TypeAlias = Report | BaseException | None

# The owner of the claim. If resctrlctl is killed, resctrlmond ends this claim some time after the command.
CLAIM = "run"

# After a signal, wait this long before printing a note: the release may end in the meantime.
_NOTE_AFTER_S = 1.0
# Timeout of the check of the workload and its tasks after the command, without which the totals are read too.
_CHECK_TIMEOUT_S = 5.0
# The interval of samples without -I, and the event for which they are taken.
_SAMPLE_S = 0.5
_SAMPLED = "llc_occupancy"

# The errors of Assign after which the command may run in the group of the workload around it, if there is one.
_STAYS_INSIDE = ("AlreadyMonitored", "RmidsExhausted")

# The exit status of a command that a signal ended is greater.
SIGNALLED = 128


class _Measurement(msgspec.Struct, frozen=True):
    """The object that is measured while ``command`` runs: the command itself or, if it is not None, the ``target``.

    ``begin`` is None if ``workload`` was made for this run, which releases it. Otherwise the workload exists
    independently of this run, and the totals are the difference from ``begin``. ``is_nested``: this run is a part of
    the workload, so the totals include the use of other tasks. ``since`` is when the totals begin (time.monotonic());
    None if the command itself is measured, which uses nothing before and after.
    """

    command: list[str]
    target: Target | None
    workload: types.Workload | None = None
    begin: types.ReadReply | None = None
    is_nested: bool = False
    since: float | None = None

    def until_now(self, result: CommandResult) -> CommandResult:
        """Return the result with the time that totals cover that were read now."""
        if self.since is None:
            return result
        return replace(result, elapsed_s=time.monotonic() - self.since)


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the command in a group of its own; return its exit status, or 125 to 127 if it was not executed.

    With a target (``args.pid``, ``args.cgroup`` or ``args.unit``), measure that while the command runs. With
    ``args.repeat``, run the command so many times, unless a signal ends it, and return the last status.
    """
    _check_events(Daemon(args.socket, _CHECK_TIMEOUT_S), args.events)
    with _report_file(args.output, is_appended=args.append) as file, opened(args) as target:
        reports: list[Report] = []
        is_hidden = _is_hidden(args, output, file)
        for number in range(1, args.repeat + 1):
            run_number = number if args.repeat > 1 else 0
            on_interval = None if is_hidden else _interval_writer(args, output, file, run_number)
            report = _run_once(args, target, output, on_interval, is_hidden=is_hidden)
            if isinstance(report, int):
                return report
            reports.append(report)
            if report.exit_status > SIGNALLED:
                break
        _print(reports, args, output, file)
        return reports[-1].exit_status


def _run_once(
    args: argparse.Namespace,
    target: Target | None,
    output: Output,
    on_interval: Callable[[Interval], None] | None,
    *,
    is_hidden: bool,
) -> Report | int:
    """Run the command; return its report, or the exit status if it was not executed.

    ``is_hidden``: only the status and the problem of the report are needed.
    """
    daemon = Daemon(args.socket)
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    try:
        child = HeldChild(args.command, lambda: events.put(None))
    except OSError as error:
        raise CommandError(
            f"cannot start a process: {error.strerror}. See 'ulimit -a' for the limits", OWN_FAILURE
        ) from error
    problem = ""
    measured = _Measurement(args.command, target)
    try:
        measured = _assign(daemon, child, args) if target is None else _begin(daemon, child, target, args)
    except CommandError as error:
        # Without the daemon the times are better than nothing, as the command itself is.
        is_fatal = target is not None or not isinstance(error, DaemonDown)
        if is_fatal and not args.best_effort:
            status = child.kill()
            if status != KILLED:
                # A signal had ended the child, so Assign found no process.
                return status
            raise CommandError(str(error), OWN_FAILURE) from error
        problem = str(error)
        if target is None and error.name in _STAYS_INSIDE and (around := read_around(daemon, child.pid)):
            measured = _Measurement(
                args.command, None, around.workload, around, is_nested=True, since=time.monotonic()
            )
            output.note(f"{problem}. The totals will be those of workload {around.workload.key!r} meanwhile")
        else:
            output.note(f"{problem}. The command runs unmonitored")
    sampler = None if is_hidden else _sampler(daemon, measured, args, on_interval)
    try:
        begun = child.execute()
        # In a thread beside the command, which never waits for it.
        if sampler is not None:
            sampler.start(begun if measured.since is None else measured.since)
        result = child.wait(begun)
        if sampler is not None:
            sampler.stop()
    except CannotExecute as error:
        print_error(str(error))
        if measured.workload is not None and measured.begin is None:
            _release_unused(daemon, measured.workload.key)
        return error.status
    if measured.workload is None:
        return _report(measured, result, problem=problem)
    finish = functools.partial(_release, is_hidden=is_hidden) if measured.begin is None else _read_end
    report = _finish_unless_interrupted(lambda: finish(daemon, measured, result, sampler), measured, result, events)
    return _selected(report, args.events)


def _selected(report: Report, patterns: Sequence[str]) -> Report:
    """Return the report with only the events that match."""
    return replace(
        report,
        totals=[total for total in report.totals if is_selected(total.event, patterns)],
        nested=[total for total in report.nested if is_selected(total.event, patterns)],
        levels=[level for level in report.levels if is_selected(level.event, patterns)],
    )


def _check_events(daemon: Daemon, patterns: Sequence[str]) -> None:
    """Raise CommandError if the machine has events, and none matches the patterns."""
    if not patterns:
        return

    try:
        status = daemon.call("list the events", signatures.STATUS)
    except CommandError:
        return  # the command may run without resctrlmond, and Assign reports any other error
    known = dict.fromkeys(event for resource in status.capacity for event in resource.events)
    if known and not any(is_selected(event, patterns) for event in known):
        raise CommandError(
            f"no event matches {','.join(patterns)!r}. The events of this machine are: {', '.join(known)}",
            OWN_FAILURE,
        )


def _sampler(
    daemon: Daemon,
    measured: _Measurement,
    args: argparse.Namespace,
    on_interval: Callable[[Interval], None] | None,
) -> Sampler | None:
    """Return the sampler of the run; None if no sample is needed."""
    # The samples of a nested run would be those of all tasks around it.
    if (
        measured.workload is None
        or measured.is_nested
        or not (args.interval_ms or is_selected(_SAMPLED, args.events))
    ):
        return None
    interval_s = args.interval_ms / 1000 if args.interval_ms else _SAMPLE_S
    return Sampler(
        Daemon(daemon.socket, _CHECK_TIMEOUT_S), measured.workload.key, interval_s, measured.begin, on_interval
    )


def _interval_writer(
    args: argparse.Namespace, output: Output, file: TextIO, run_number: int
) -> Callable[[Interval], None] | None:
    """Return the function that writes an interval; None if none is to be written. ``run_number``: Interval.run."""
    if args.interval_ms is None:
        return None
    form = "json" if output.json is not Json.OFF else "text"

    def write(interval: Interval) -> None:
        chosen = replace(
            interval,
            totals=[total for total in interval.totals if is_selected(total.event, args.events)],
            levels=[level for level in interval.levels if is_selected(level.event, args.events)],
            run=run_number,
        )
        if form == "json":
            file.write(encode(chosen, Json.SHORT) + "\n")
        else:
            file.write(interval_lines(chosen, args.field_separator))
        file.flush()

    return write


@contextlib.contextmanager
def _report_file(path: str | None, *, is_appended: bool) -> Iterator[TextIO]:
    if path is None:
        yield sys.stderr
        return
    try:
        # Opened before the command starts, because an error after hours of work would lose the report.
        opened = open(path, "a" if is_appended else "w", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise CommandError(
            f"cannot write the report to {path}: {error.strerror}. Name another file with -o", OWN_FAILURE
        ) from error
    try:
        yield opened
    finally:
        with contextlib.suppress(OSError):  # _print() has reported the error
            opened.close()


def _assign(daemon: Daemon, child: HeldChild, args: argparse.Namespace) -> _Measurement:
    """Assign the held child to a workload of its own. Raises CommandError; then no workload remains."""
    key = _key(child, args)
    action = f"monitor {printable(args.command[0])!r} as {key!r}"
    _check_key_is_free(daemon, key, action)
    request = types.AssignRequest(
        key=key,
        pid_fd=0,
        class_=args.class_,
        # The user named the class, and the process has not run yet, so it may change its class.
        allow_class_change=args.class_ not in (None, FOLLOW) or None,
        take_over=args.take_over or None,
        # In another run, both count the command: the outer one by the use of its nested workloads.
        nested=None if args.take_over else True,
        # The child does not execute the command before the reply.
        late=False,
        claim=CLAIM,
        # If resctrlctl is killed, no process is left that releases the claim.
        end_rule=EndRule.MEMBERS,
        attributes={"command": attribute_value(printable(shlex.join(map(text, args.command))))},
        allow_pending=False,
    )
    try:
        reply = daemon.call(action, signatures.ASSIGN, request, [child.pidfd])
        if reply.tasks_outside:
            raise CommandError(
                f"cannot {action}: resctrlctl is in another monitoring group, so its child processes are too. "
                "Use --take-over to take the command out of that group"
            )
    except CommandError as error:
        # resctrlmond rolls back a call that it refuses. After any other error, the group may exist.
        if not error.name:
            _release_unused(daemon, key)
        if error.name == "AlreadyMonitored":
            remedy = "With --best-effort, the command runs in that group, and is counted there"
            raise CommandError(f"{error}. {remedy}", error.status, error.name) from error
        raise
    return _Measurement(args.command, None, reply.workload)


def _begin(daemon: Daemon, child: HeldChild, target: Target, args: argparse.Namespace) -> _Measurement:
    """Assign the target to a workload of its own or, if it is all of an existing one, read the totals of that.

    Raises CommandError; then no workload of this run remains.
    """
    begin = read_begin(daemon, target)
    if begin is not None:
        return _Measurement(args.command, target, begin.workload, begin, since=time.monotonic())
    key = _key(child, args)
    action = f"measure {target} as {key!r}"
    _check_key_is_free(daemon, key, action)
    request = types.AssignRequest(
        key=key,
        pid_fd=0 if target.pid else None,
        cgroup=target.cgroup or None,
        include_descendants=bool(target.pid) or None,
        claim=CLAIM,
        # If resctrlctl is killed, the end of the process ends its claim. A control group may have tasks again.
        end_rule=EndRule.MEMBERS if target.pid else EndRule.RELEASE,
        allow_pending=False,
    )
    try:
        reply = daemon.call(action, signatures.ASSIGN, request, [target.pidfd] if target.pid else [])
    except CommandError as error:
        if error.name == "AlreadyMonitored":
            raise in_other_group(target) from error
        if not error.name:
            _release_unused(daemon, key)
        raise
    if reply.tasks_outside:
        _release_unused(daemon, key)
        raise in_other_group(target)
    return _Measurement(args.command, target, reply.workload, since=time.monotonic())


def _key(child: HeldChild, args: argparse.Namespace) -> str:
    return str(args.key or f"run-{child.pid}-{child.start_time}")


def _check_key_is_free(daemon: Daemon, key: str, action: str) -> None:
    """Raise CommandError if a workload with that key exists and is not over."""
    try:
        workload = daemon.call(action, signatures.GET, types.KeyRequest(key=key)).workload
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
        daemon.call("release", signatures.RELEASE, request)


def _finish_unless_interrupted(
    finish: Callable[[], Report],
    measured: _Measurement,
    result: CommandResult,
    events: queue.SimpleQueue[_Event],
) -> Report:
    """Call ``finish`` in a thread; return the report. The second signal in ``events`` stops the wait."""
    assert measured.workload is not None

    def call() -> None:
        try:
            events.put(finish())
        except BaseException as error:
            events.put(error)

    # A daemon thread, because the interpreter does not wait for it at its exit.
    threading.Thread(target=call, name="finish", daemon=True).start()
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
            verb = "release" if measured.begin is None else "read"
            problem = f"cannot {verb} {measured.workload.key!r}: interrupted while resctrlmond did not answer"
            return _report(measured, result, problem=problem)


def _release(
    daemon: Daemon, measured: _Measurement, result: CommandResult, sampler: Sampler | None, *, is_hidden: bool
) -> Report:
    """Release the workload; return the report. If the release fails, the report has the reason and no totals."""
    assert measured.workload is not None
    key = measured.workload.key
    ended_at = utc_now()
    now = None if is_hidden else _workload_now(Daemon(daemon.socket, _CHECK_TIMEOUT_S), key)
    if now is not None and _is_of_another_run(now, measured.workload):
        problem = f"workload {key!r} ended before the command, and the one that exists now is of another command"
        return _report(measured, result, problem=problem)
    # The tasks of a target run on.
    tasks_left = _count_tasks(now) if now is not None and measured.target is None else None
    request = types.ReleaseRequest(key=key, claim=CLAIM, reason=f"ended with status {result.status}")
    try:
        reply = _call_again(daemon, f"release {key!r}", signatures.RELEASE, request)
    except CommandError as error:
        return _report(measured, result, tasks_left=tasks_left, problem=str(error))
    result = measured.until_now(result)
    totals = together(reply.totals, reply.nested or ())
    if now is not None:
        ended_early = now.state.is_over
    else:
        # By the clock: the reply to Release is the same for a workload that had ended.
        ended_early = reply.workload.state.is_over and (reply.workload.completed_at or "") < ended_at
    if ended_early:
        totals = downgraded(totals, Quality.LATE, ENDED_EARLY)
    return _report(
        replace(measured, workload=reply.workload),
        result,
        tasks_left=tasks_left,
        completed=reply.completed,
        ended_early=ended_early,
        totals=totals,
        nested=reply.nested or (),
        nested_left=_nested_left(Daemon(daemon.socket, _CHECK_TIMEOUT_S), reply.workload),
        levels=_end_samples(sampler, result, types.ReadReply(workload=reply.workload, readings=[], totals=totals)),
    )


def _read_end(daemon: Daemon, measured: _Measurement, result: CommandResult, sampler: Sampler | None) -> Report:
    """Read the workload again; return the report, with the reason if there are no totals."""
    assert measured.workload is not None and measured.begin is not None
    key = measured.workload.key
    try:
        end = as_known(_call_again(daemon, f"read {key!r}", signatures.READ, types.KeyRequest(key=key)))
        result = measured.until_now(result)
        totals = difference(measured.begin, end)
    except CommandError as error:
        return _report(measured, result, problem=str(error))
    if measured.is_nested:
        reason = f"the command ran in the group of workload {key}, and the use of other tasks there is counted"
        totals = downgraded(totals, Quality.ESTIMATED, reason)
    levels = _end_samples(sampler, result, end)
    return _report(
        replace(measured, workload=end.workload),
        result,
        ended_early=end.workload.state.is_over,
        totals=totals,
        levels=levels,
    )


def _end_samples(sampler: Sampler | None, result: CommandResult, last: types.ReadReply) -> list[LevelSummary]:
    """Write the last interval, which ends with the command; return the summaries of the samples."""
    if sampler is None:
        return []
    sampler.wait()
    sampler.advance(result.elapsed_s, last)
    return sampler.summaries()


def _call_again(daemon: Daemon, action: str, method: Signature[Q, R], request: Q) -> R:
    try:
        return daemon.call(action, method, request)
    except Disconnected:
        # The daemon was stopped during the call. With socket activation, the next call waits for the restart, and
        # the Release of a workload that has ended returns the same totals.
        return daemon.call(action, method, request)


def _report(
    measured: _Measurement,
    result: CommandResult,
    *,
    tasks_left: int | None = None,
    completed: bool = False,
    ended_early: bool = False,
    totals: Sequence[types.Total] = (),
    nested: Sequence[types.Total] = (),
    nested_left: Sequence[str] = (),
    levels: Sequence[LevelSummary] = (),
    problem: str = "",
) -> Report:
    return Report(
        command=[text(word) for word in measured.command],
        target=str(measured.target or ""),
        is_difference=measured.begin is not None,
        ended_early=ended_early,
        exit_status=result.status,
        elapsed=round(result.elapsed_s, 6),
        user=round(result.user_s, 6),
        system=round(result.system_s, 6),
        tasks_left=tasks_left,
        completed=completed,
        workload=measured.workload,
        totals=list(totals),
        nested=list(nested),
        nested_left=list(nested_left),
        levels=list(levels),
        problem=problem,
    )


def _print(reports: Sequence[Report], args: argparse.Namespace, output: Output, file: TextIO) -> None:
    is_json = output.json is not Json.OFF
    is_hidden = _is_hidden(args, output, file)
    try:
        for report in reports:
            if report.workload and report.problem and (_is_data(args, output) or is_hidden or file is not sys.stderr):
                print_error(report.problem)  # otherwise it is in the text below
        if is_hidden:
            return
        if is_json:
            all_runs = RepeatedReport(reports[0].command, reports, figures(reports))
            text_of = encode(reports[0] if args.repeat == 1 else all_runs, output.json) + "\n"
        elif args.field_separator is not None:
            text_of = as_fields(reports, args.field_separator)
        else:
            # A file has no width, as the output of other verbs.
            width = terminal_width() if file is sys.stderr and sys.stderr.isatty() else None
            text_of = as_text(reports, width, is_ascii=not has_blocks())
        file.write(text_of)
        file.flush()
    except OSError as error:
        keys = [shlex.quote(report.workload.key) for report in reports if report.workload]
        remedy = f". The totals are also in: resctrlctl show {' '.join(keys)}" if keys else ""
        print_error(f"cannot write the report: {error.strerror}{remedy}")


def _is_data(args: argparse.Namespace, output: Output) -> bool:
    """Return whether the report is for programs."""
    return output.json is not Json.OFF or args.field_separator is not None


def _is_hidden(args: argparse.Namespace, output: Output, file: TextIO) -> bool:
    return output.quiet and file is sys.stderr and not _is_data(args, output)


def _workload_now(daemon: Daemon, key: str) -> types.Workload | None:
    """Return the workload as it is now, because its group may have been moved; None if it cannot be read."""
    try:
        return daemon.call(f"find {key!r}", signatures.GET, types.KeyRequest(key=key)).workload
    except CommandError:
        return None


def _is_of_another_run(now: types.Workload, begun: types.Workload) -> bool:
    """Whether another command has claimed the key since; it must not be released with that command's totals."""
    claims = [[claim.since for claim in workload.claims if claim.owner == CLAIM] for workload in (now, begun)]
    if all(claims):
        return claims[0] != claims[1]
    # A run that has ended has no claims.
    return now.state.is_over and not {member.id for member in begun.members} <= {member.id for member in now.members}


def _nested_left(daemon: Daemon, outer: types.Workload) -> list[str]:
    """Return the keys of the nested workloads that run now; [] if they cannot be listed."""
    if not outer.nested:
        return []

    try:
        pages = daemon.stream("list the workloads", signatures.LIST)
        return [
            one.key
            for page in pages
            for one in page.workloads
            if outer.key in (one.part_of or ())
            and not one.state.is_over
            # Otherwise it began in an earlier run of the same key.
            and (one.created_at or "") >= (outer.created_at or "")
        ]
    except CommandError:
        return []


def _count_tasks(workload: types.Workload) -> int | None:
    """Return the number of tasks in the group now, from the file "tasks"; None if it cannot be read."""
    if workload.path is None:
        return None
    try:
        # In bytes: Python imports the codec of an encoding when it is used.
        with open(os.path.join(workload.path, "tasks"), "rb") as tasks:
            return sum(1 for _ in tasks)
    except OSError:
        return None
