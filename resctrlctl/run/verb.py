# SPDX-License-Identifier: Apache-2.0
"""The verb ``run``: run a command, and report what it used, or what a process or control group used meanwhile."""

from __future__ import annotations

import argparse
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from resctrlctl.base.errors import OWN_FAILURE, CommandError, DaemonDown, NoAnswer, print_error
from resctrlctl.connection.daemon import Daemon
from resctrlctl.run.child import KILLED, CannotExecute, CommandResult, HeldChild
from resctrlctl.run.measurement import (
    Measurement,
    begin_command,
    begin_target,
    read_end,
    release,
    release_unused,
)
from resctrlctl.run.report import Report, is_selected
from resctrlctl.run.samples import Interval, Sampler
from resctrlctl.run.target import Target, opened, read_around
from resctrlctl.run.writer import Writer, report_file
from resctrlctl.screen.output import Output
from resctrlmond.api import signatures

# The report or the exception of the last reading; None for a signal that arrived after the end of the command.
_Event: TypeAlias = Report | BaseException | None

# After a signal, wait this long before printing a note: the release may end in the meantime.
_NOTE_AFTER_S = 1.0
# The interval of samples without -I, and the event for which they are taken.
_SAMPLE_S = 0.5
_SAMPLED = "llc_occupancy"

# The errors of Assign after which the command may run in the group of the workload around it, if there is one.
_STAYS_INSIDE = ("AlreadyMonitored", "RmidsExhausted")

# The exit status of a command that a signal ended is greater.
SIGNALLED = 128


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the command in a group of its own; return its exit status, or 125 to 127 if it was not executed.

    With a target (``args.pid``, ``args.cgroup`` or ``args.unit``), measure that while the command runs. With
    ``args.repeat``, run the command so many times, unless a signal ends it, and return the last status.
    """
    _check_events(Daemon(args.socket), args.events)
    with report_file(args.output, is_appended=args.append) as file, opened(args) as target:
        reports: list[Report] = []
        writer = Writer(args, output, file)
        for number in range(1, args.repeat + 1):
            report = _run_once(args, target, output, writer, number if args.repeat > 1 else 0)
            if isinstance(report, int):
                return report
            reports.append(report)
            if report.exit_status > SIGNALLED:
                break
        writer.write(reports)
        return reports[-1].exit_status


def _run_once(
    args: argparse.Namespace,
    target: Target | None,
    output: Output,
    writer: Writer,
    run_number: int,
) -> Report | int:
    """Run the command; return its report, or the exit status if it was not executed. ``run_number``: Interval.run."""
    daemon = Daemon(args.socket)
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    try:
        child = HeldChild(args.command, lambda: events.put(None))
    except OSError as error:
        raise CommandError(
            f"cannot start a process: {error.strerror}. See 'ulimit -a' for the limits", OWN_FAILURE
        ) from error
    problem = ""
    measured = Measurement(args.command, target)
    try:
        measured = begin_command(daemon, child, args) if target is None else begin_target(daemon, child, target, args)
    except CommandError as error:
        # Without the daemon the times are better than nothing, as the command itself is.
        is_fatal = target is not None or not isinstance(error, DaemonDown)
        if is_fatal and not args.best_effort:
            status = child.kill()
            if status != KILLED:
                # A signal had ended the child, so Assign found no process.
                return status
            remedy = ". With --best-effort, the command runs in any case" if isinstance(error, NoAnswer) else ""
            raise CommandError(f"{error}{remedy}", OWN_FAILURE) from error
        problem = str(error)
        if target is None and error.name in _STAYS_INSIDE and (around := read_around(daemon, child.pid)):
            measured = Measurement(
                args.command, None, around.workload, around, is_nested=True, since=time.monotonic()
            )
            output.note(f"{problem}. The totals will be those of workload {around.workload.key!r} meanwhile")
        else:
            output.note(f"{problem}. The command runs unmonitored")
    sampler = None if writer.is_hidden else _sampler(daemon, measured, args, writer.interval_writer(run_number))
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
            release_unused(daemon, measured.workload.key)
        return error.status
    if measured.workload is None:
        return measured.report(result, problem=problem)
    finish = functools.partial(release, is_hidden=writer.is_hidden) if measured.begin is None else read_end
    return _finish_unless_interrupted(lambda: finish(daemon, measured, result, sampler), measured, result, events)


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
    measured: Measurement,
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
    return Sampler(daemon, measured.workload.key, interval_s, measured.begin, on_interval)


def _finish_unless_interrupted(
    finish: Callable[[], Report],
    measured: Measurement,
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
            return measured.report(result, problem=problem)
