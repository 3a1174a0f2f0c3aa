# SPDX-License-Identifier: Apache-2.0
"""``status UNIT``: whether a systemd unit is watched, how exactly, what it used, and why it has no workload."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fnmatch
import os
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from resctrlctl.base.errors import OK, CommandError, print_error
from resctrlctl.connection.daemon import daemon_of
from resctrlctl.screen.output import Json, Output
from resctrlctl.units import exact_units
from resctrlctl.units import verb as units
from resctrlctl.units.render_unit import blocks
from resctrlctl.units.unit_state import UnitState, full_name, is_glob, states_of
from resctrlctl.units.verb import Glob
from resctrlctl.workloads import report
from resctrlctl.workloads.source import Source
from resctrlmond.api import signatures
from resctrlmond.api.exit_codes import NO_SUCH_WORKLOAD, NOT_RUNNING
from resctrlmond.api.types import ReadReply, Total, Unwatched, Workload
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.host.unit_globs import NEVER, TYPES, UnitGlobs, is_of_user, service_near
from resctrlmond.resctrl.counters import EVENTS
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.owners import OVERFLOW, SYSTEMD
from resctrlmond.workloads.model.states import Quality, State

# systemctl uses the same two for a unit that is not running, and one that does not exist.
UNIT_NOT_RUNNING = NOT_RUNNING
NO_SUCH_UNIT = NO_SUCH_WORKLOAD
_MOST_RUNS = 5


class Run(msgspec.Struct, frozen=True, rename="camel"):
    """A run that has ended, as the journal states it."""

    ended_at: str
    duration_sec: float
    quality: Quality
    totals: list[Total]


class Absence(msgspec.Struct, frozen=True, rename="camel"):
    """Why a unit has no workload, and what changes that: a command, or a sentence."""

    reason: str
    remedy: str = ""


class UnitStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A unit, its workload, and its runs that have ended, the newest last.

    ``glob`` selects it, in the file ``glob_path``; "" for none. ``exact_path`` is its drop-in of ``units exact``, ""
    for none. ``use`` is its workload, with its figures, null if there is none; ``absence`` is then the reason.
    ``shared_key`` is the workload in which it is counted with ``shared_with`` others, while it has no RMID. ``tasks``
    is the number of tasks in its group. ``problems`` are the reasons for which parts are not known.
    """

    unit: UnitState
    glob: str
    glob_path: str
    exact_path: str
    use: ReadReply | None
    absence: Absence | None
    shared_key: str
    shared_with: int
    tasks: int | None
    runs: list[Run]
    problems: list[str]

    @property
    def workload(self) -> Workload | None:
        """The workload of the unit, which may have ended."""
        return None if self.use is None else self.use.workload

    @property
    def is_watched(self) -> bool:
        """Whether it has a workload that has not ended."""
        return self.workload is not None and not self.workload.state.is_over

    @property
    def exit_status(self) -> int:
        """The exit status, as that of systemctl status: it is about the unit, and not about its workload."""
        is_running = self.unit.is_running if self.unit.active else self.is_watched
        if is_running:
            return OK
        is_unknown = self.unit.is_missing or not self.unit.active
        return NO_SUCH_UNIT if is_unknown and self.use is None and not self.runs else UNIT_NOT_RUNNING


def unit_status(args: argparse.Namespace, output: Output) -> int:
    """Print each unit; return the status of the first that does not run, or does not exist."""
    names = list(dict.fromkeys(map(full_name, args.unit)))
    facts = _Facts(args, output, names)
    result, printed = OK, False
    shown: set[str] = set()
    for name in names:
        selected = facts.matching(name) if is_glob(name) else [name]
        if not selected:
            why = facts.no_systemd if not is_of_user(name) else ""
            print_error(f"no unit that runs, and no workload of a unit, matches {name}{why and f': {why}'}")
            result = result or NO_SUCH_UNIT
        for key in selected:
            found = facts.status_of(key)
            if found.unit.name in shown:
                continue
            shown.add(found.unit.name)
            result = result or found.exit_status
            if found.exit_status == NO_SUCH_UNIT:
                print_error(_missing(found, facts.near(key)))
                continue
            if output.json is not Json.OFF:
                output.print_json(found)
                continue
            if output.quiet:
                continue
            if printed:
                output.print_line("")
            printed = True
            output.print_blocks(blocks(found))
    return result


def _missing(found: UnitStatus, near: str) -> str:
    name = printable(found.unit.name)
    meant = f"Did you mean {printable(near)}?" if near else ""
    if found.problems:
        why = f"{name} has no workload, and systemd cannot be asked: {found.problems[0]}"
        return f"{why}. {meant}" if near else why
    return f"there is no unit {name}. {meant or 'See: systemctl list-unit-files'}"


class _Facts:
    """The workloads, systemd's units and the globs, which are read before the first unit is shown."""

    def __init__(self, args: argparse.Namespace, output: Output, names: Sequence[str]) -> None:
        self._source = Source(args, output)
        self._daemon = daemon_of(args)
        self._workloads = {workload.key: workload for workload in self._source.workloads().workloads}
        self._unwatched = {one.id: one for one in self._source.unwatched() if one.is_unit}
        # systemctl lists the units of a glob only if they are loaded.
        known = [key for name in names if is_glob(name) for key in self._known(name)]
        self._states, self.no_systemd = states_of(list(dict.fromkeys([*names, *known])))
        self._globs: list[Glob] = []
        self._no_globs = ""
        try:
            self._globs = units.all_globs()
        except (ConfigError, OSError) as error:
            self._no_globs = f"the globs cannot be read: {error}"

    def matching(self, glob: str) -> list[str]:
        """Return the units that run, and those with a workload, that a glob matches, by name."""
        running = [key for key, state in self._states.items() if state.is_running and _matches(key, glob)]
        return sorted({*running, *self._known(glob)})

    def _known(self, glob: str) -> list[str]:
        """Return the units with a workload, and those that their profiles leave out, that a glob matches."""
        keys = [key for key, workload in self._workloads.items() if _is_unit(workload)]
        return [key for key in (*keys, *self._unwatched) if _matches(key, glob)]

    def near(self, name: str) -> str:
        """Return the unit that an unknown name may mean, with another type or a similar name; "" if there is none."""
        # full_name() completes a name whose type is misspelt.
        stem = name.rpartition(".")[0]
        if "." in stem and (typed := service_near(stem)) not in ("", name):
            return typed
        # Without the types, which are alike in all names.
        keys = [key for key in (*self._workloads, *self._unwatched) if key.endswith(TYPES)]
        known = {key.rpartition(".")[0]: key for key in keys}
        close = difflib.get_close_matches(stem[:64], known, n=1, cutoff=0.7)
        return known[close[0]] if close else ""

    def status_of(self, name: str) -> UnitStatus:
        """Return what is known of a unit."""
        state = self._states.get(name, UnitState(name))
        key = state.name
        problems = [self.no_systemd] if self.no_systemd and not is_of_user(key) else []
        problems += [self._no_globs] if self._no_globs else []
        use = self._use(key)
        runs, no_runs = _ended_runs(key)
        problems += [no_runs] if no_runs else []
        shared = self._shared(key, use)
        is_watched = use is not None and not use.workload.state.is_over
        glob = self._selecting(key)
        return UnitStatus(
            unit=state,
            glob=glob.glob if glob else "",
            glob_path=glob.path if glob else "",
            exact_path=_exact_path(key),
            use=use,
            absence=None if is_watched else self._absence(state, glob, use),
            shared_key=shared.key if shared else "",
            shared_with=_others(shared, key) if shared else 0,
            tasks=_count_tasks(use.workload) if use and is_watched else None,
            runs=runs,
            problems=problems,
        )

    def _use(self, key: str) -> ReadReply | None:
        if key not in self._workloads:
            return None
        try:
            return self._source.read(key)
        except CommandError as error:
            if error.name == "NoSuchWorkload":  # it was removed meanwhile
                return None
            raise

    def _shared(self, key: str, use: ReadReply | None) -> Workload | None:
        """Return the overflow workload in which a unit that waits for an RMID is counted."""
        if use is None or use.workload.state is not State.PENDING:
            return None
        return next((of for of in self._workloads.values() if _is_overflow(of) and _has_member(of, key)), None)

    def _selecting(self, key: str) -> Glob | None:
        rank = UnitGlobs([of.glob for of in self._globs]).rank(key)
        if rank is None:
            return None
        glob = UnitGlobs([of.glob for of in self._globs]).wanted[rank]
        return next(of for of in self._globs if of.glob == glob)

    def _absence(self, state: UnitState, glob: Glob | None, use: ReadReply | None) -> Absence:
        """Return why a unit has no workload, in the order in which the daemon decides."""
        key = state.name
        if not self._source.is_daemon:
            remedy = "systemctl start resctrlmond.socket resctrlmond.service"
            return Absence("resctrlmond is not running, so no unit is watched", remedy)
        if not key.endswith(TYPES):
            return Absence(
                "only services, scopes and slices are watched, because the others have no tasks of a program"
            )
        if key in NEVER:
            return Absence("it is never watched: it has the tasks of the whole host, or process 1")
        if glob is None:
            return self._unselected(state)
        if (out := self._unwatched.get(key)) is not None:
            return _left_out(out)
        if state.has_ended:
            start = shlex.join(["systemctl", "start", key])
            return Absence("it is not running", "" if is_of_user(key) or state.is_missing else start)
        if use is not None and use.workload.state in (State.LOST, State.FAILED):
            return Absence(f"its workload is {use.workload.state}", "resctrlctl status")
        if (around := self._around(state.cgroup)) is not None:
            return Absence(
                f"its tasks are counted in the workload {around.key}", shlex.join(["resctrlctl", "show", around.key])
            )
        return self._not_yet()

    def _unselected(self, state: UnitState) -> Absence:
        key = state.name
        if self._no_globs:
            return Absence("it is not known whether a glob selects it")
        excluding = UnitGlobs([of.glob for of in self._globs]).excluded_by(key)
        if not excluding:
            of_user = " of this user's units" if is_of_user(key) else ""
            around = self._around(state.cgroup)
            counted = f"; its tasks are counted in the workload {around.key}" if around else ""
            reason = f"no glob{of_user} in the configuration selects it{counted}"
            return Absence(reason, shlex.join(["resctrlctl", "units", "enable", key]))
        path = next(of.path for of in self._globs if of.glob == excluding)
        remedy = shlex.join(["resctrlctl", "units", "disable", excluding])
        if os.path.basename(path) != units.FILE:
            remedy = f"remove the glob from {path}, then: systemctl reload resctrlmond"
        return Absence(f"the glob {excluding} in {path} excludes it", remedy)

    def _not_yet(self) -> Absence:
        """Return why a unit that runs and is selected has no workload: what the daemon reports about units."""
        problems: list[str] = []
        with contextlib.suppress(CommandError):
            reply = self._daemon.call("ask for the status", signatures.STATUS)
            problems = [problem for problem in reply.problems if "units" in problem]
        if problems:
            return Absence(problems[0], "systemctl status resctrlmond.service")
        why = "it has no tasks, resctrlmond has not detected it yet, or has not read the globs since they changed"
        return Absence(why, "systemctl reload resctrlmond, then: journalctl -u resctrlmond")

    def _around(self, cgroup: str) -> Workload | None:
        """Return the innermost workload that counts the tasks of a control group."""
        found = [
            (len(path), of)
            for of in self._workloads.values()
            if cgroup and not of.state.is_over and not _is_overflow(of)
            for path in _paths(of)
            if cgroup == path or cgroup.startswith(f"{path}/")
        ]
        return max(found, key=lambda one: one[0])[1] if found else None


def _matches(key: str, glob: str) -> bool:
    return is_of_user(key) == is_of_user(glob) and fnmatch.fnmatchcase(key, glob)


def _paths(workload: Workload) -> set[str]:
    """Return the control groups of the members that have not ended."""
    return {member.cgroup for member in workload.members if member.cgroup and not member.ended_at}


def _is_unit(workload: Workload) -> bool:
    owners = {claim.owner for claim in workload.claims}
    return SYSTEMD in owners or (not owners and workload.attributes.get("unit") == workload.key)


def _is_overflow(workload: Workload) -> bool:
    return any(claim.owner == OVERFLOW for claim in workload.claims)


def _has_member(workload: Workload, key: str) -> bool:
    return any(member.id == key and not member.ended_at for member in workload.members)


def _others(workload: Workload, key: str) -> int:
    return sum(member.id != key and not member.ended_at for member in workload.members)


def _left_out(out: Unwatched) -> Absence:
    selected = f" ({out.profile_source})" if out.profile_source and out.profile_source not in out.reason else ""
    return Absence(f"{out.reason}{selected}", f"resctrlctl profiles show {out.profile}" if out.profile else "")


def _exact_path(key: str) -> str:
    """Return the path of the drop-in of ``units exact`` for a service, or for its template; "" for none."""
    prefix, at, _ = key.partition("@")
    names = [key, *([f"{prefix}@.service"] if at else [])]
    if is_of_user(key) or not key.endswith(".service"):
        return ""
    return next((path for path in map(exact_units.path_of, names) if os.path.isfile(path)), "")


def _count_tasks(workload: Workload) -> int | None:
    """Return the number of tasks in the group; None if it is not known, or the workload has several groups."""
    if workload.path is None or len(workload.classes or ()) > 1:
        return None
    with contextlib.suppress(OSError), open(os.path.join(workload.path, "tasks"), encoding="ascii") as file:
        return len(file.read().split())
    return None


def _ended_runs(key: str) -> tuple[list[Run], str]:
    """Return the last runs in the journal, the newest last, and why they are not known; "" if they are."""
    try:
        found = _last_runs(report.journal_entries(f"--lines={2 * _MOST_RUNS}", f"RESCTRLMON_KEY={key}"), key)
    except CommandError as error:
        return [], str(error)
    return found, ""


def _last_runs(entries: Iterable[dict[str, Any]], key: str) -> list[Run]:
    runs: dict[str, Run] = {}
    for fields in entries:
        entry = report.entry_of(fields)
        if entry is None or entry.names["key"] != key:
            continue
        totals = [
            Total(
                event=event,
                unit=EVENTS[event].unit,
                value=None if value is None else f"{value:f}",
                quality=quality,
            )
            for event, (value, quality) in entry.totals.items()
        ]
        # An entry can be in the journal twice.
        runs[entry.run] = Run(_ended_at(fields), entry.seconds, entry.quality, totals)
    return list(runs.values())[-_MOST_RUNS:]


def _ended_at(fields: dict[str, Any]) -> str:
    try:
        moment = datetime.fromtimestamp(int(fields["__REALTIME_TIMESTAMP"]) // 10**6, UTC)
    except (KeyError, ValueError, TypeError, OverflowError, OSError):
        return ""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
