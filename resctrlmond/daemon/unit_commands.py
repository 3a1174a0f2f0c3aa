# SPDX-License-Identifier: Apache-2.0
"""The commands that systemd runs for a service, and whether all of them began in the group of the unit.

``resctrlctl units exact`` has systemd run each command of a service through resctrlmon-unit-exec, which has the
daemon put its process into the group and executes the command after that. Systemd states the commands, and the last
process of each. A command that does not run through the program, or whose process has not called, ran outside.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from resctrlmond.host.unit_exec import WAIT_S, is_program, may_call
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.evidence.callers import COMMAND_GRACE_S
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.model.workload import Member

# The settings of commands that run one after another while a service starts, in this order.
_AT_START = ("ExecCondition", "ExecStartPre", "ExecStart", "ExecStartPost")
# Those of a stop, which systemd also runs without a job: when the main process has ended.
_AT_STOP = ("ExecStop", "ExecStopPost")
# The states (ActiveState) of a unit that is not active, and also of one that is being stopped.
_OVER = ("inactive", "failed")
_STOPPING = (*_OVER, "deactivating")
# The setting of commands that may run several times.
_REPEATED = "ExecReload"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a service: its setting, and its program in the unit file.

    ``pid`` is its process since the last start of the service, 0 for none; ``started_s`` is the time of that
    (``time.monotonic``), and ``has_ended`` whether systemd has seen its end. ``may_call``: the process may still
    call, as far as ``Service.with_callers`` has looked.
    """

    setting: str
    program: str
    pid: int = 0
    started_s: float = 0.0
    has_ended: bool = False
    may_call: bool = False

    @property
    def is_repeated(self) -> bool:
        """Whether the command may have run before in this start: systemd has forgotten the process of that then."""
        return self.setting.startswith(_REPEATED)

    @property
    def name(self) -> str:
        """The name of this process of the command in the record of a member."""
        return f"{self.setting}={self.pid}"

    def with_caller(self, now_s: float) -> Command:
        """Return the command with ``may_call``: the process has not executed it, and has not run for long."""
        is_open = bool(self.pid) and not self.has_ended and is_program(self.program)
        is_new = now_s - self.started_s < COMMAND_GRACE_S
        return replace(self, may_call=is_open and is_new and may_call(self.pid))

    def ran_outside(self, known: Collection[str]) -> bool:
        """Return whether the command was started, and its process is not known and cannot call any more."""
        return bool(self.pid) and self.name not in known and not self.may_call


@dataclass(frozen=True, slots=True)
class Service:
    """A service: its name, its control group relative to the root, and its commands.

    ``is_delegated``: the service has control groups of its own below that one (Delegate=). ``job`` is the number of
    its job, 0 for none, and ``job_type`` the type of that (systemctl(1), list-jobs).
    """

    name: str
    cgroup: str
    is_delegated: bool
    commands: tuple[Command, ...]
    job: int = 0
    job_type: str = ""

    def with_callers(self, now_s: float) -> Service:
        """Return the service with the commands of which a process may still call at this time (``time.monotonic``).

        The names of the known processes are to be read after this: a process that has called since is one of them.
        """
        return replace(self, commands=tuple(command.with_caller(now_s) for command in self.commands))

    @property
    def has_callers(self) -> bool:
        """Whether a process of a command may still call to be put into the group."""
        return any(command.may_call for command in self.commands)

    @property
    def is_forgotten(self) -> bool:
        """Whether systemd states no process of a start: a daemon-reload makes it forget those of all commands."""
        at_start = (one for one in self.commands if not one.is_repeated and one.setting not in _AT_STOP)
        return not any(command.pid for command in at_start)

    def knows_all(self, known: Collection[str]) -> bool:
        """Return whether all processes that systemd states for commands are known."""
        return all(command.name in known for command in self.commands if command.pid)

    def command_of(self, pid: int) -> Command | None:
        """Return the command whose process this is; None if systemd has not started it for a command."""
        running = (one for one in self.commands if one.pid == pid and not one.has_ended and is_program(one.program))
        return next(running, None)

    def is_last_of_job(self, command: Command) -> bool:
        """Return whether the command is the last one that the job of the service runs: a later one may be missed."""
        at_reload = [one for one in self.commands if one.is_repeated]
        in_order = {"start": _in_order(self, _AT_START), "reload": at_reload}.get(self.job_type, [])
        return [one.name for one in in_order][-1:] == [command.name]

    @property
    def at_stop(self) -> int:
        """The number of commands that run while the service stops."""
        return sum(command.setting in _AT_STOP for command in self.commands)


@dataclass(slots=True)
class _Jobs:
    """The numbers of the jobs of a service: those that have ended since all its commands were known, those that have
    begun and not ended, and those of the latter of which a process has called.

    ``stops`` are those of ``ended`` that have only stopped the service, ``starts`` those of ``open`` that start it.
    ``state`` is the last ActiveState that systemd has reported.
    """

    ended: set[int] = field(default_factory=set[int])
    stops: set[int] = field(default_factory=set[int])
    open: set[int] = field(default_factory=set[int])
    called: set[int] = field(default_factory=set[int])
    starts: set[int] = field(default_factory=set[int])
    state: str = ""


class CallsSeen:
    """The services of which each call so far has been handled, as far as the daemon knows. Belongs to the event loop.

    A process gives up after WAIT_S without an answer, and executes its command. So after the loop has stood still for
    so long, no service is among them. ``check`` must be called more often than that, and is by each use.

    A process may also fail to reach the daemon, and systemd forgets it at the next run of the same command. But
    systemd runs commands in jobs only, apart from those of a stop, and reports each job (JobNew, JobRemoved) before
    its reply to a later question. So a job that has ended, and of which no process has called, may have run a command
    that is not known, until a statement of systemd shows all processes as known (``explain``).

    Systemd reports the number of a job and its result, and not its type. But it reports a change of the unit before
    the next job that begins or ends (bus_job_send_removed_signal in its dbus-job.c). So the job that has stopped a
    service is one that ends with success while the unit is no longer active: a reload with success leaves it active.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        # The jobs of the services that were added before, by name.
        self._jobs: dict[str, _Jobs] = {}
        self._checked_s = time.monotonic()
        self._stops = 0
        # How often a service was removed, by name.
        self._losses: dict[str, int] = {}
        # Those of which a call has failed since the last one that was handled.
        self._missed: set[str] = set()

    def check(self) -> None:
        """Forget all services if the loop may have stood still since the last check."""
        now = time.monotonic()
        if now - self._checked_s >= WAIT_S:
            self._names.clear()
            self._stops += 1
        self._checked_s = now

    def __contains__(self, name: str) -> bool:
        self.check()
        return name in self._names

    def state(self, name: str) -> tuple[int, int]:
        """Return what changes if the service is forgotten."""
        self.check()
        return self._stops, self._losses.get(name, 0)

    def add(self, name: str, state: tuple[int, int]) -> None:
        """Add a service, unless it was forgotten since it had that ``state``, or has missed a call."""
        if state == self.state(name) and name not in self._missed:
            self._names.add(name)

    def remove(self, name: str) -> None:
        """Forget a service: a process of it may run outside."""
        self._names.discard(name)
        self._losses[name] = self._losses.get(name, 0) + 1

    def miss(self, name: str) -> None:
        """Forget a service of which a call has failed, until another one is handled."""
        self.remove(name)
        self._missed.add(name)

    def handle(self, name: str, state: tuple[int, int], *, knows_all: bool) -> None:
        """Record that a call of a service was handled, which states what was missed before it.

        ``knows_all``: no other process may still call, so add the service as ``add`` does.
        """
        self._missed.discard(name)
        if knows_all:
            self.add(name, state)

    def forget_all(self) -> None:
        """Forget all services: systemd has not reported its jobs for a time."""
        self._names.clear()
        self._stops += 1
        self._jobs.clear()

    def watch(self, name: str) -> None:
        """Note the jobs of a service from now on."""
        self._jobs.setdefault(name, _Jobs())

    def begin_job(self, name: str, job: int) -> None:
        """Record that systemd has a new job for a unit."""
        if (jobs := self._jobs.get(name)) is not None:
            jobs.open.add(job)
            if jobs.state in (*_OVER, "activating"):
                jobs.starts.add(job)

    def end_job(self, name: str, job: int, *, is_done: bool) -> None:
        """Record that systemd has removed a job for a unit. ``is_done``: with success."""
        if (jobs := self._jobs.get(name)) is None:
            return
        if job not in jobs.called:
            jobs.ended.add(job)
            if is_done and jobs.state in _STOPPING and job in jobs.open - jobs.starts:
                jobs.stops.add(job)
        jobs.open.discard(job)
        jobs.called.discard(job)
        jobs.starts.discard(job)

    def change_state(self, name: str, state: str) -> None:
        """Record the ActiveState of a unit that systemd has reported."""
        if (jobs := self._jobs.get(name)) is None:
            return
        if state == "deactivating":
            # systemctl restart makes a job that starts the service stop it, and start it once more.
            again = jobs.open & jobs.called
            jobs.called -= again
            jobs.starts -= again
        elif state == "activating":
            jobs.starts |= jobs.open
        elif state == "reloading" and jobs.state != state:
            # systemctl reload makes a job that reloads the service do that once more.
            jobs.called -= jobs.open
        jobs.state = state

    def ended_jobs(self, name: str) -> frozenset[int]:
        """Return the jobs that have ended, and may have run commands that are not known."""
        jobs = self._jobs.get(name)
        return frozenset(jobs.ended if jobs is not None else ())

    def is_only_stop(self, name: str, jobs: Collection[int]) -> bool:
        """Return whether these ended jobs are none at all, or one job that stopped the service."""
        own = self._jobs.get(name)
        return not jobs or (len(jobs) == 1 and own is not None and own.stops.issuperset(jobs))

    def open_jobs(self, name: str) -> frozenset[int]:
        """Return the jobs that have begun and not ended, of which no process has called."""
        jobs = self._jobs.get(name)
        return frozenset(jobs.open - jobs.called if jobs is not None else ())

    def explain(self, name: str, jobs: Collection[int]) -> None:
        """Record that all commands are known that these jobs, which have begun, have run or are running."""
        own = self._jobs.setdefault(name, _Jobs())
        own.called.update(own.open.intersection(jobs))
        own.ended.difference_update(jobs)
        own.stops.difference_update(jobs)

    def explain_running(self, name: str, job: int) -> None:
        """Do the same for the job that runs, as systemd has stated since ``watch``. It may have begun before that."""
        own = self._jobs.setdefault(name, _Jobs())
        if job not in own.ended:
            own.open.add(job)
        self.explain(name, [job])

    def keep(self, names: Collection[str]) -> None:
        """Forget all other services."""
        self._jobs = {name: jobs for name, jobs in self._jobs.items() if name in names}
        self._names.intersection_update(names)
        self._missed.intersection_update(names)
        self._losses = {name: losses for name, losses in self._losses.items() if name in names}

    def __len__(self) -> int:
        return len(self._losses)


def reasons(service: Service, member: str, known: Collection[str]) -> list[str]:
    """Return why tasks of the unit ran outside its group; [] if all commands that were started began in it.

    ``known`` are the names of the processes that were put into the group by their call. A process that may still call
    is not a reason yet.
    """
    found = []
    for command in service.commands:
        program, setting = printable(command.program), f"{command.setting}="
        if not is_program(command.program):
            found.append(Reason.COMMAND_NOT_EXACT.text(member=member, program=program, setting=setting))
        elif command.ran_outside(known):
            found.append(Reason.COMMAND_OUTSIDE.text(member=member, program=program, setting=setting))
    if service.is_delegated:
        found.append(Reason.DELEGATED.text(member=member))
    return list(dict.fromkeys(found))


def reasons_of_stop(member: Member) -> list[str]:
    """Return why commands of a stop may have run outside, about which systemd has no statement any more."""
    seen = sum(name.startswith(tuple(f"{setting}=" for setting in _AT_STOP)) for name in member.commands)
    return [Reason.STOP_UNSEEN.text(member=member.id)] if seen < member.commands_at_stop else []


def states_none(service: Service, known: Collection[str]) -> bool:
    """Return whether systemd states none of the known processes any more.

    It forgets those of a command at the next run of it, and all of them at a daemon-reload.
    """
    return bool(known) and not any(command.name in known for command in service.commands)


def has_forgotten(service: Service, known: Collection[str]) -> bool:
    """Return whether systemd has forgotten the known processes since the start to which they belong."""
    return states_none(service, known) and service.is_forgotten


def is_other_start(service: Service, known: Collection[str]) -> bool:
    """Return whether the service was started again since the known processes."""
    return states_none(service, known) and not service.is_forgotten


def has_forgotten_before(service: Service, command: Command) -> bool:
    """Return whether systemd has forgotten a command that has run before this one in the same start.

    A daemon-reload makes it forget the processes of all commands. They run one after another, so each has run.
    """
    before = itertools.takewhile(lambda other: other.name != command.name, _in_order(service, _AT_START))
    return command.setting in _AT_START and any(not other.pid and is_program(other.program) for other in before)


def kept(service: Service, known: Iterable[str], more: Command) -> tuple[str, ...]:
    """Return the names of the known processes that systemd still states, and of one more."""
    current = {command.name for command in service.commands}
    return (*(name for name in known if name in current and name != more.name), more.name)


def _in_order(service: Service, settings: Sequence[str]) -> list[Command]:
    """Return the commands of these settings in the order in which systemd runs them."""
    return [one for setting in settings for one in service.commands if one.setting == setting]
