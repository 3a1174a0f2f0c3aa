# SPDX-License-Identifier: Apache-2.0
"""The measurement of a run: begin with a workload of the daemon, and end with its totals."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from resctrlctl.base.errors import CommandError, Disconnected, NoAnswer
from resctrlctl.connection.daemon import Daemon
from resctrlctl.run.child import CommandResult, HeldChild
from resctrlctl.run.report import Report
from resctrlctl.run.samples import LevelSummary, Sampler
from resctrlctl.run.target import (
    ENDED_EARLY,
    Target,
    as_known,
    difference,
    downgraded,
    in_other_group,
    read_begin,
    together,
)
from resctrlmond.api import signatures, types
from resctrlmond.api.signatures import Q, R, Signature
from resctrlmond.api.text import text
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.states import FOLLOW, EndRule, Quality
from resctrlmond.workloads.model.validation import attribute_value

# The owner of the claim. If resctrlctl is killed, resctrlmond ends this claim some time after the command.
CLAIM = "run"


class Measurement(msgspec.Struct, frozen=True):
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

    def report(
        self,
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
        """Return the report of a run that has ended."""
        return Report(
            command=[text(word) for word in self.command],
            target=str(self.target or ""),
            is_difference=self.begin is not None,
            ended_early=ended_early,
            exit_status=result.status,
            elapsed=round(result.elapsed_s, 6),
            user=round(result.user_s, 6),
            system=round(result.system_s, 6),
            tasks_left=tasks_left,
            completed=completed,
            workload=self.workload,
            totals=list(totals),
            nested=list(nested),
            nested_left=list(nested_left),
            levels=list(levels),
            problem=problem,
        )


def begin_command(daemon: Daemon, child: HeldChild, args: argparse.Namespace) -> Measurement:
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
        # resctrlmond rolls back a call that it refuses. After any other error, the group may exist. A late answer
        # needs no release: the claim ends with the child.
        if not error.name and not isinstance(error, NoAnswer):
            release_unused(daemon, key)
        if error.name == "AlreadyMonitored":
            remedy = "With --best-effort, the command runs in that group, and is counted there"
            raise CommandError(f"{error}. {remedy}", error.status, error.name) from error
        raise
    return Measurement(args.command, None, reply.workload)


def begin_target(daemon: Daemon, child: HeldChild, target: Target, args: argparse.Namespace) -> Measurement:
    """Assign the target to a workload of its own or, if it is all of an existing one, read the totals of that.

    Raises CommandError; then no workload of this run remains.
    """
    begin = read_begin(daemon, target)
    if begin is not None:
        return Measurement(args.command, target, begin.workload, begin, since=time.monotonic())
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
        reply = daemon.patient.call(action, signatures.ASSIGN, request, [target.pidfd] if target.pid else [])
    except CommandError as error:
        if error.name == "AlreadyMonitored":
            raise in_other_group(target) from error
        if not error.name:
            release_unused(daemon, key)
        if isinstance(error, NoAnswer):
            end = f"resctrlctl release {shlex.quote(key)} --claim {CLAIM}"
            raise NoAnswer(f"{error}. When resctrlmond continues, end what it may have begun: {end}") from error
        raise
    if reply.tasks_outside:
        release_unused(daemon, key)
        raise in_other_group(target)
    return Measurement(args.command, target, reply.workload, since=time.monotonic())


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


def release_unused(daemon: Daemon, key: str) -> None:
    request = types.ReleaseRequest(key=key, claim=CLAIM, reason="the command was not executed")
    # The first error is reported already, and usually there is no workload to release.
    with contextlib.suppress(CommandError):
        daemon.call("release", signatures.RELEASE, request)


def release(
    daemon: Daemon, measured: Measurement, result: CommandResult, sampler: Sampler | None, *, is_hidden: bool
) -> Report:
    """Release the workload; return the report. If the release fails, the report has the reason and no totals."""
    assert measured.workload is not None
    key = measured.workload.key
    ended_at = utc_now()
    now = None if is_hidden else _workload_now(daemon, key)
    if now is not None and _is_of_another_run(now, measured.workload):
        problem = f"workload {key!r} ended before the command, and the one that exists now is of another command"
        return measured.report(result, problem=problem)
    # The tasks of a target run on.
    tasks_left = _count_tasks(now) if now is not None and measured.target is None else None
    request = types.ReleaseRequest(key=key, claim=CLAIM, reason=f"ended with status {result.status}")
    try:
        reply = _call_again(daemon.patient, f"release {key!r}", signatures.RELEASE, request)
    except CommandError as error:
        return measured.report(result, tasks_left=tasks_left, problem=str(error))
    result = measured.until_now(result)
    totals = together(reply.totals, reply.nested or ())
    if now is not None:
        ended_early = now.state.is_over
    else:
        # By the clock: the reply to Release is the same for a workload that had ended.
        ended_early = reply.workload.state.is_over and (reply.workload.completed_at or "") < ended_at
    if ended_early:
        totals = downgraded(totals, Quality.LATE, ENDED_EARLY)
    return replace(measured, workload=reply.workload).report(
        result,
        tasks_left=tasks_left,
        completed=reply.completed,
        ended_early=ended_early,
        totals=totals,
        nested=reply.nested or (),
        nested_left=_nested_left(daemon, reply.workload),
        levels=_end_samples(sampler, result, types.ReadReply(workload=reply.workload, readings=[], totals=totals)),
    )


def read_end(daemon: Daemon, measured: Measurement, result: CommandResult, sampler: Sampler | None) -> Report:
    """Read the workload again; return the report, with the reason if there are no totals."""
    assert measured.workload is not None and measured.begin is not None
    key = measured.workload.key
    try:
        end = as_known(_call_again(daemon.patient, f"read {key!r}", signatures.READ, types.KeyRequest(key=key)))
        result = measured.until_now(result)
        totals = difference(measured.begin, end)
    except CommandError as error:
        return measured.report(result, problem=str(error))
    if measured.is_nested:
        reason = f"the command ran in the group of workload {key}, and the use of other tasks there is counted"
        totals = downgraded(totals, Quality.ESTIMATED, reason)
    levels = _end_samples(sampler, result, end)
    return replace(measured, workload=end.workload).report(
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
