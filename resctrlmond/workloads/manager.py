# SPDX-License-Identifier: Apache-2.0
"""The manager of all workloads: the verbs, as blocking calls that any thread may make."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    KernelRefused,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    ResctrlError,
)
from resctrlmond.resctrl.package_energy import DEFAULT_FOLDER, PackageEnergy
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tree import Found, GroupRef, Tree
from resctrlmond.workloads.evidence.interference import Interference
from resctrlmond.workloads.evidence.joiners import Joiners
from resctrlmond.workloads.evidence.pod_times import PodTimes
from resctrlmond.workloads.evidence.takeover import TakeOver
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.groups import counters, ends, location, nested, placement, relocation, removal, target
from resctrlmond.workloads.groups.context import Context, Reloadable
from resctrlmond.workloads.groups.runs import (
    check_has_rmid,
    claimed,
    continue_run,
    move_empty,
    new_run,
    require_run,
    start_run,
    with_profile,
)
from resctrlmond.workloads.machine.pools import Machine, MachineUse
from resctrlmond.workloads.machine.state import MachineFile
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.errors import InvalidRequest, NoSuchClaim, NoSuchWorkload
from resctrlmond.workloads.model.latency import Latencies
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.pods import Inventory
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import FOLLOW, NameKind, Quality
from resctrlmond.workloads.model.validation import (
    canonical_key,
    check_claim,
    check_member_id,
    check_word,
    reason_text,
    valid_class,
)
from resctrlmond.workloads.model.workload import EndRule, Group, Member, State, Workload, replace
from resctrlmond.workloads.profiles.companions import CompanionStatus
from resctrlmond.workloads.profiles.profile import Choice, Profiles
from resctrlmond.workloads.profiles.requests import Assigned, Assignment, Reconciled, Released
from resctrlmond.workloads.profiles.unwatched import UnwatchedContainers
from resctrlmond.workloads.records.quality_file import QualityFiles
from resctrlmond.workloads.records.record_format import UnreadableRecord
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Limit, Store, Transaction
from resctrlmond.workloads.records.sums import Sums, SumsUse
from resctrlmond.workloads.records.totals import shown, summed
from resctrlmond.workloads.records.usage import SharedPass, Usage
from resctrlmond.workloads.rmids import overflow
from resctrlmond.workloads.upkeep import quality_stamps
from resctrlmond.workloads.upkeep.exposures import Exposures
from resctrlmond.workloads.upkeep.maintenance import Maintenance
from resctrlmond.workloads.upkeep.recovery import Problem, Recovery
from resctrlmond.workloads.upkeep.tree_status import TreeStatus, TreeWatcher
from resctrlmond.workloads.verbs import apart, observed, profiled
from resctrlmond.workloads.verbs.assign import assign

log = logging.getLogger(__name__)


class Manager:
    """Owns the groups that have the ``mark``.

    Calls for one key run one at a time. ``get`` and ``workloads`` never wait. ``alerts`` are the present problems of
    the host, by subject; "" is none. ``pods`` are the pods that owners reported. ``companions`` are the states of the
    companions, by the key of their workloads, and ``unit_memory`` states what became of the memory settings of a
    workload that is a unit. ``latencies`` are the durations of calls, which the interfaces count.
    """

    def __init__(self, tree: Tree, store: Store, snapshots: Snapshots, mark: Mark, settings: Settings) -> None:
        self.tree = tree
        self.pods = Inventory()
        self.alerts: dict[str, str] = {}
        self.companions: dict[str, CompanionStatus] = {}
        self.unit_memory: dict[str, str] = {}
        self.latencies = Latencies()
        quality = QualityFiles(snapshots)
        store.before_save = quality.before_save
        store.on_unsaved = snapshots.remove_quality
        # Simulated packages have no energy of their own.
        energy = PackageEnergy(DEFAULT_FOLDER if tree.simulation is None else "")
        file = MachineFile(os.path.join(os.path.dirname(store.folder), "machine.json"), mark.boot_id)
        machine = Machine(
            tree, store, snapshots, gid=mark.gid, energy=energy, may_run=ends.may_leave_tasks, file=file
        )
        interference = Interference(tree, store, mark)
        interference.on_created, interference.on_events_lost = machine.created_by_others, machine.events_lost
        interference.on_counters_reset, machine.read_events = machine.counters_reset, interference.read_all_events
        self.context = Context(
            tree=tree,
            store=store,
            snapshots=snapshots,
            mark=mark,
            config=Reloadable(settings),
            quality=quality,
            joiners=Joiners(),
            take_over=TakeOver(store),
            interference=interference,
            machine=machine,
            pod_times=PodTimes(store.folder),
        )
        self.sums = store.sums = Sums(sums_path(store.folder), mark.boot_id, quality.final_totals)
        self.maintenance = Maintenance(self.context)
        # Gets the process of a new member, and its workload's key, before ``on_end`` of ``subscribe``; then owns it.
        self.on_assigned: Callable[[str, Process], None] = lambda _key, process: process.close()
        self._store = store
        self._recovery = Recovery(self.context)
        self._watcher = TreeWatcher(tree, mark.gid, store.refs)
        self._found_at_start: list[Problem] = []
        self._usage = SharedPass(lambda: tuple(self._read_each()))
        self._machine = SharedPass(machine.read)
        # Held while the sums are read, so that the readings are used in their order.
        self._reading_sums = threading.Lock()
        # By key: the use of workloads that are over, whose files do not change any more, while callers ask for it.
        self._ended_usage: dict[str, Usage] = {}
        exposed = os.path.join(os.path.dirname(store.folder), "exposed")
        self._exposures = Exposures(
            exposed, snapshots, store.get, self._read_exposed, lambda: self.maintenance.is_stopping
        )

    # -- the daemon's side

    @property
    def settings(self) -> Settings:
        """The settings of the last reload."""
        return self.context.config.settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self.context.config.settings = settings

    @property
    def profiles(self) -> Profiles:
        """The profiles of the last reload."""
        return self.context.config.profiles

    @profiles.setter
    def profiles(self, profiles: Profiles) -> None:
        self.context.config.profiles = profiles

    @property
    def unwatched(self) -> UnwatchedContainers:
        """The containers and units that are in no group because of their profiles."""
        return self.context.unwatched

    def choose_for_unit(self, key: str, path: str) -> Choice:
        """Return the profile of the unit with that key and control group; see ``profiled.choose_for_unit``."""
        return profiled.choose_for_unit(self.context, key, path)

    def leave_out_unit(self, key: str, path: str, choice: Choice) -> str:
        """Record that a unit is in no group because of its profile; return the reason."""
        return profiled.leave_out_unit(self.context, key, path, choice)

    def subscribe(
        self,
        on_change: Callable[[str, Workload | None], None],
        on_end: Callable[[str], None] = lambda _key: None,
        on_failure: Callable[[str, ResctrlError | OSError], None] | None = None,
    ) -> None:
        """Have ``on_change`` called after each change of a workload, with its key; with None after its removal.

        ``on_end`` is called with the key when the changes that belong together are complete. ``on_failure`` is called
        once for maintenance that failed and is tried again.
        """
        self._store.on_change = on_change
        self._store.on_end = on_end
        if on_failure is not None:
            self.maintenance.on_failure = on_failure

    def on_finish(self, before_finish: Callable[[Workload], None]) -> None:
        """Have ``before_finish`` called when a run has ended, before its record states that.

        If it raises NotWritten, the record is not saved, and the next tick tries again.
        """
        self._store.before_finish = before_finish

    def final_totals(self, workload: Workload) -> list[Total]:
        """Return the totals of a run whose end values are written, of all events.

        Those that its profile leaves out are among them: sums over several workloads include them. See
        ``totals.shown``. Raises NotRead.
        """
        return self.context.quality.final_totals(workload)

    def recover(self) -> None:
        """Continue where the last daemon stopped. This is the only way to start. See ``problems`` afterwards."""
        # Before a group is created or a task moved, so that the writes of other programs are seen from now on.
        self.context.interference.start()
        self._found_at_start = self._recovery.recover()
        self.maintenance.begin()
        self._exposures.start()

    def search_left_out(self) -> None:
        """Make a pod late if one of its containers began while ``recover`` ran, and its hook had no socket to call.

        To be called when hooks can call. It waits for no call: ticks search the pods that calls have locked. A pod
        that begins later is searched for these containers by its first Assign.
        """
        self.context.memory.since_ns = boot_ns()
        self.maintenance.search_left_out()

    @property
    def recovering_at(self) -> str:
        """The path or the workload at which ``recover`` works."""
        return self._recovery.at

    @property
    def unreadable(self) -> list[UnreadableRecord]:
        """The records that ``recover`` could not read."""
        return self._recovery.unreadable

    @property
    def problems(self) -> list[str]:
        """The problems that the start found and that last, and what fails at present."""
        return [*(problem.text for problem in self._found_at_start), *self.maintenance.problems]

    def postpone_checkpoints(self, has_queued_calls: Callable[[], bool]) -> None:
        """Postpone the first checkpoints of runs while calls of hooks are queued; see ``maintenance.py``.

        ``has_queued_calls`` is called by the thread of a tick.
        """
        self.maintenance.has_queued_calls = has_queued_calls

    def tick(self) -> None:
        """Do the work of a second (``Maintenance.tick``), and forget the problems of the start that are over."""
        self.maintenance.tick()
        self._settle_sums()
        self._exposures.tick(self.settings.expose_interval_s)
        self._machine.forget_old()
        with contextlib.suppress(ResctrlError, OSError):  # the next call of read_machine() reports it
            self.context.machine.tick(has_trouble=self.context.interference.has_trouble)
        if self._usage.forget_old():
            self._ended_usage = {}
        lasting = []
        for problem in self._found_at_start:
            try:
                if problem.lasts():
                    lasting.append(problem)
            except ResctrlError:
                lasting.append(problem)  # the tree cannot be read now
        self._found_at_start = lasting

    @property
    def last_progress(self) -> float:
        """When a tick last began the work on a workload (time.monotonic())."""
        return self.maintenance.last_progress

    def report_watched(self, key: str, members: Iterable[Member]) -> None:
        """State for which members of the workload ``record_ends`` will be called when they may have ended.

        Ticks look for the ends of the others. This replaces what was stated for the workload before.
        """
        self.context.watched.report(key, members)

    def record_ends(self, key: str) -> None:
        """Record which members have ended, and end the claims that end with them."""
        self.maintenance.record_ends(key)

    @property
    def events_fd(self) -> int:
        """A descriptor that is readable when ``react`` is to be called; -1 if there is none."""
        return self.context.interference.fd

    def react(self) -> float:
        """Downgrade workloads after writes of other programs to resctrl.

        Returns after how many seconds it is to be called again; 0 if only after the next event.
        """
        return self.maintenance.react()

    @property
    def react_rest_s(self) -> float:
        """For how many seconds ``react`` should not be called."""
        return self.context.interference.rest_s

    def on_event(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when a call has read events that ask for a ``react``."""
        self.context.interference.wake = wake

    def stop(self) -> None:
        """End a running tick soon."""
        self.maintenance.is_stopping = True

    def leave_stamps(self) -> None:
        """State on disk which files ``quality`` the next start can keep. To be called when no call runs any more."""
        quality_stamps.save(self.context)

    def close(self) -> None:
        """Close the descriptors."""
        self.context.interference.close()

    def release_all(self) -> list[str]:
        """End every workload, with its last values written, and remove every group that has our mark.

        Tasks lose their group and continue; groups of other programs are not touched. No daemon may be running.
        Returns the problems, [] if none of these groups is left. Raises NotMounted.
        """
        # As a start does, so that runs that a crash cut short, and groups without a record, end as what they are.
        self.recover()
        problems = []
        for key in [workload.key for workload in self._store.all()]:
            try:
                with self._store.transaction(key) as txn:
                    if not txn.workload.state.is_over:
                        placement.sweep_last(self.context, txn)
                        removal.finish(self.context, txn, "resctrlmond released all its groups")
                    for claim in txn.workload.claims if txn.workload.is_interrupted else ():
                        txn.save(removal.without_claim(txn.workload, claim.owner))  # or a later start resumes it
            except (ResctrlError, OSError) as error:
                problems.append(f"{key}: {error}")
        self._exposures.tick(0)
        # Groups without a record whose names are not valid keys.
        for found in self.tree.scan():
            if found.gid != self.context.mark.gid:
                continue
            try:
                self.tree.remove(found.ref)
            except (ResctrlError, OSError) as error:
                problems.append(f"{found.path}: {error}")
        return problems

    # -- verbs that write

    def create(
        self,
        key: str,
        *,
        owner: str,
        ends: EndRule | None = None,
        class_: str = FOLLOW,
        attributes: Mapping[str, str] | None = None,
        may_wait: bool = True,
        priority: int | None = None,
        facts: Facts | None = None,
    ) -> Workload:
        """Create the workload's group without a task, or find it; ``owner`` claims it, and the claim ends by the rule
        ``ends`` (None: EndRule.RELEASE for a new claim, unchanged for an existing one).

        With class FOLLOW the group is created in the root class and moves to the class of its first task. If no RMID
        is free, the workload is ``pending``; RmidsExhausted only if not ``may_wait``. Pending workloads get an RMID
        in the order of ``priority`` (-1000 to 1000, 0 at first), the highest first. ``facts`` are those of a pod by
        which its profile is selected, None for no selection. Raises NotWatched, InvalidKey, InvalidClass,
        NoSuchClass, ForeignGroup, ClassMismatch, KernelRefused, NotMounted, NotWritten, InvalidAttributes,
        LimitExceeded.
        """
        key = canonical_key(key)
        check_claim(owner, attributes or {}, priority)
        class_ = class_ if class_ == FOLLOW else valid_class(class_)
        ctx = self.context
        choice = profiled.choose_for_pod(ctx, key, owner, facts)
        priority = profiled.priority_of(ctx, key, choice) if priority is None else priority
        with self._store.transaction(key) as txn:
            workload = continue_run(ctx, txn)
            if workload is None:
                workload = new_run(ctx, txn, "" if class_ == FOLLOW else class_, follows_class=class_ == FOLLOW)
                workload = with_profile(claimed(workload, owner, ends, attributes, priority), choice)
                return start_run(ctx, txn, workload, may_wait=may_wait)
            if not may_wait:
                check_has_rmid(workload)
            if class_ != FOLLOW and all(class_ != group.class_ for group in workload.groups):
                # Before the move, which is not undone.
                self._store.check_limits(claimed(workload, owner, ends, attributes, priority))
                move_empty(ctx, txn, class_)
            workload = with_profile(claimed(txn.workload, owner, ends, attributes, priority), choice)
            return txn.save(workload, Limit.NORMAL)

    def assign(self, assignment: Assignment) -> Assigned:
        """Put a process with its threads, or a control group, into the workload's group; create that if needed.

        A container for which its runtime has created a group stays there, and is a workload of its own that is only
        read (``observed``).
        A call that fails changes nothing: a group that was created for it is removed again. Only downgrades stay: of
        a baseline that was found to be late, of groups in which tasks of a rejected member ran, and of a pod that may
        lack the rejected container. Raises what
        ``create`` does, and AlreadyMonitored, NoSuchProcess, ProcessChanged, NoSuchCgroup, PermissionDenied.
        """
        canonical_key(assignment.key)
        check_claim(assignment.owner, assignment.attributes, assignment.priority)
        check_word("kind", assignment.kind)
        if assignment.nested and assignment.take_over:
            raise InvalidRequest("nested and takeOver exclude each other: one of them decides on the outer workload")
        if assignment.member is not None:
            check_member_id(assignment.member)
        assignment, whole = profiled.with_profile(self.context, assignment), assignment.key
        with apart.marking_rejected(self.context, assignment):
            try:
                return self._assign(assignment, whole)
            except (NoSuchClass, ClassMismatch, KernelRefused) as error:
                if assignment.choice is None or assignment.class_ == FOLLOW:
                    raise
                profiled.warn_of_class(assignment, str(error))
            return self._assign(dataclasses.replace(assignment, class_=FOLLOW, allow_class_change=False), whole)

    def note_rejected(self, pod: str, id_: str, pid: int, error: ResctrlError) -> None:
        """Make a pod late, because a container that the runtime starts cannot be assigned."""
        apart.mark_rejected(self.context, pod, id_, pid, error)

    def note_left_out(self, pod: str, id_: str) -> None:
        """Make a pod late, because a container in its control group is a workload of its own."""
        apart.mark_separate(self.context, pod, id_)

    def _assign(self, assignment: Assignment, whole: str) -> Assigned:
        """Carry out an assignment whose profile is selected. ``whole`` is the key that the caller has named."""
        key = canonical_key(assignment.key)
        with target.opened(self.tree, assignment, self.context.callers) as opened:
            where = opened.membership()
            of_runtime = observed.group_of_runtime(self.context, where, assignment)
            if of_runtime is not None:
                return self._observe(of_runtime, opened, dataclasses.replace(assignment, key=whole))
            is_inside = assignment.nested and where is not None and bool(where.group)
            pid = opened.process.pid if opened.process is not None else None
            is_of_service = self.context.take_over.is_of_service(where, pid)
            takes = assignment.take_over or is_inside or is_of_service
            turn = self.context.take_over.turn() if takes else contextlib.nullcontext()
            with turn, self._store.transaction(key) as txn, self.context.interference.unreported():
                run = txn.find()
                if run is None or run.state.is_over:
                    self.context.callers.forget(key)
                assigned = assign(self.context, txn, opened, where, assignment)
                if opened.process is not None:
                    self.context.callers.called(key, opened.process.pid)
                # A service is watched by its control group.
                if opened.process is not None and assignment.unit_command is None:
                    self.on_assigned(key, opened.process.detach())
                return assigned

    def downgrade(self, key: str, member: str, quality: Quality, reasons: Iterable[str]) -> Workload | None:
        """Give the group of a member no better a baseline than ``quality``; return None if the run has ended."""
        with self._store.transaction(canonical_key(key)) as txn:
            workload = txn.find()
            found = workload.member(member) if workload is not None else None
            if workload is None or found is None or workload.state.is_over:
                return None
            for why in reasons:
                workload = workload.downgraded(workload.group_of(found), quality, why)
            return txn.save(workload)

    @property
    def has_exact_service(self) -> bool:
        """Whether a service of which all commands have called is exact so far."""
        services = (one for one in self._store.unfinished() if any(member.commands for member in one.members))
        return any(service.worst_baseline is Quality.EXACT for service in services)

    def find_leavers(self, inner: str) -> None:
        """Search the exact services that have started tasks of a control group, which systemd names ``inner``.

        The tasks have left their service, whose group counts them until the search. Raises NotRead.
        """
        keys, path = set(), cgroups.path_of(inner) if inner.strip("/") else ""
        for tid in cgroups.tasks(path) if path else ():
            with contextlib.suppress(NoSuchProcess):
                keys.add(self.context.take_over.exact_service_at(self.tree.membership(tid)))
        for key in sorted(keys - {""}):
            self.maintenance.sweep(key)

    def note_commands(self, key: str, member: str, until_us: int) -> None:
        """Record until when all commands of a service are known (``Member.known_until_us``)."""
        with self._store.transaction(canonical_key(key)) as txn:
            workload = txn.find()
            found = workload.member(member) if workload is not None else None
            if workload is not None and found is not None and not workload.state.is_over:
                txn.save(workload.with_member(replace(found, known_until_us=until_us)))

    def _observe(self, found: Found, opened: target.Target, assignment: Assignment) -> Assigned:
        key, whole = canonical_key(found.ref.name), canonical_key(assignment.key)
        if whole != key:
            # First, so that a daemon that is killed in between leaves no exact pod that lacks the container.
            with self._store.transaction(whole) as txn:
                apart.mark_apart(self.context, txn, Reason.COUNTED_APART.text(member=key))
        with self._store.transaction(key) as txn:
            return observed.observe(self.context, txn, found, opened, assignment)

    def release(
        self, key: str, *, owner: str, reason: str = "released", commands: frozenset[str] | None = None
    ) -> Released:
        """End ``owner``'s claim. The workload ends with its last claim. Return the totals, also if it was over.

        A service of which other ``commands`` are known by now (``Member.commands``) keeps its claim: it was started
        again.

        Raises NoSuchWorkload, and NoSuchClaim if the workload is not over and ``owner`` has no claim on it.
        """
        key = canonical_key(key)
        with self._store.transaction(key) as txn:
            workload = txn.workload
            is_over = workload.state.is_over
            if not is_over and not workload.is_claimed_by(owner) and workload.claims:
                owners = ", ".join(claim.owner for claim in workload.claims)
                raise NoSuchClaim(f"{owner} has no claim on {key}", remedy=f"It is claimed by {owners}")
            member = workload.member(key)
            if commands is not None and member is not None and commands != frozenset(member.commands):
                pass  # processes of the next start are in the group
            elif workload.is_interrupted or (not is_over and workload.without_claim(owner).claims):
                self._mark_running_on(txn, owner)
                txn.save(removal.without_claim(txn.workload, owner))
            elif workload.state is State.ENDING:
                ends.finish_again(self.context, txn)
            elif not is_over:
                self._mark_running_on(txn, owner)
                placement.sweep_last(self.context, txn)
                # The last claim is removed by the write that records the end: a daemon that is killed after it
                # completes this end, and one that is killed before it has not begun.
                removal.finish(self.context, txn, reason_text(reason), without_claims=[owner])
            workload = txn.workload
            totals = shown(workload, self._totals(workload))
            released = Released(workload, workload.state.is_over, totals, self.nested_totals(workload, totals))
        if released.completed:
            # Before the next group is created, because the kernel would give it the counters that became free.
            self.maintenance.serve_counters()
        return released

    def _mark_running_on(self, txn: Transaction, owner: str) -> None:
        """Make an exact service estimated if processes of it run on after the release. Raises NotRead."""
        workload, member = txn.workload, txn.workload.member(txn.key)
        if owner != SYSTEMD or workload.state.is_over or member is None or not member.commands:
            return
        if cgroups.is_populated(member.cgroup):
            why = Reason.RAN_ON.text(member=member.id)
            txn.save(workload.downgraded(workload.group_of(member), Quality.ESTIMATED, why))

    def add_member(self, key: str, member: str, *, owner: str, kind: str = "sandbox") -> Workload:
        """Add a member that has no task of its own. A living member that has tasks is not changed.

        Raises NoSuchWorkload, LimitExceeded.
        """
        key = canonical_key(key)
        check_member_id(member)
        check_word("claim", owner)
        check_word("kind", kind)
        with self._store.transaction(key) as txn:
            workload = require_run(self.context, txn)
            known = workload.member(member)
            if known is None or not (known.is_living and known.has_tasks):
                workload = workload.with_member(Member(id=member, kind=kind, owner=owner, started_at=utc_now()))
            return txn.save(claimed(workload, owner), Limit.NORMAL)

    def remove_member(self, key: str, member: str, *, reason: str = "removed", confirms: bool = False) -> Workload:
        """End a member. A member that is not known, or that has ended, is not an error.

        ``confirms``: the caller only confirms the end of the member's first process. If that runs, the call is about
        an earlier process of the same id, and ends nothing. Raises NoSuchWorkload.
        """
        key = canonical_key(key)
        with self._store.transaction(key) as txn:
            # Before record_ends(), which may end the workload: tasks of another dormant member may have come back.
            placement.wake_dormant(self.context, txn)
            workload = txn.workload
            ending = workload.member(member)
            if ending is not None and ending.is_living and not (confirms and ends.runs(ending)):
                txn.save(ends.without_member(workload, ending, reason_text(reason)))
            elif ending is not None and ending.dormant:
                txn.save(workload.with_member(replace(ending, dormant=False, reason=reason_text(reason))))
            return ends.record_ends(self.context, txn) or workload

    def expose(self, key: str, container: str, cgroup: str = "") -> str:
        """Return the folder with the files of the workload that a container can have as a mount.

        See ``Exposures.expose``. Raises InvalidKey, InvalidRequest, LimitExceeded, NotWritten.
        """
        if cgroup:
            check_word("cgroup", cgroup, target.MAX_PATH_LENGTH)
        return self._exposures.expose(key, container, cgroup)

    def reconcile(self, owner: str, keys: Iterable[str]) -> Reconciled:
        """End ``owner``'s claims on all workloads but ``keys``. The claims of other owners are not changed."""
        failures: dict[str, ResctrlError] = {}
        living = set()
        for key in keys:
            try:
                living.add(canonical_key(key))
            except ResctrlError as error:
                failures[key] = error
        kept, released = [], []
        for workload in self._store.all():
            if not workload.is_claimed_by(owner):
                continue
            if workload.key in living:
                kept.append(workload.key)
                continue
            try:
                self.release(workload.key, owner=owner, reason="not in its owner's Reconcile list")
                released.append(workload.key)
            except ResctrlError as error:
                failures[workload.key] = error
        for key in sorted(living.difference(kept)):
            missing = NoSuchClaim if self._store.get(key) else NoSuchWorkload
            failures[key] = missing(f"{owner} has no claim on {key}", remedy="Create or assign it")
        return Reconciled(kept, released, failures)

    def move(self, key: str, class_: str) -> Workload:
        """Move the workload to another class; its RMID and counters stay. Raises NoSuchClass, KernelRefused."""
        key, class_ = canonical_key(key), valid_class(class_)
        with self._store.transaction(key) as txn:
            workload = require_run(self.context, txn)
            if not self.tree.has_class(class_):
                raise self.tree.no_such_class(class_)
            if workload.first.class_ == class_:
                return workload
            return relocation.relocate(self.context, txn, class_)

    # -- verbs that read

    def get(self, key: str) -> Workload:
        """Return the workload. Raises NoSuchWorkload."""
        return self._store.known(canonical_key(key))

    def find(self, key: str) -> Workload | None:
        """Return the workload of that canonical key, if there is one."""
        return self._store.get(key)

    @property
    def changes(self) -> int:
        """How often a workload was changed: the workloads are the same while it is."""
        return self._store.changes

    def unfinished(self) -> list[Workload]:
        """Return the workloads that are not finished, in order of the key."""
        return self._store.unfinished()

    def by_key(self) -> dict[str, Workload]:
        """Return all workloads by key, in any order. The event loop may call this."""
        return self._store.by_key()

    def workloads(self) -> list[Workload]:
        """Return all workloads, ended ones until their snapshots are removed, in order of the key."""
        return self._store.all()

    def read(self, key: str) -> tuple[Workload, list[Reading], list[Total]]:
        """Return the current counters ([] if the workload is over), and the totals since the baseline.

        Raises NoSuchWorkload.
        """
        key = canonical_key(key)
        found = self._read_running(key)
        if found is not None:
            workload, readings, totals = found
            return workload, readings, shown(workload, totals) or overflow.shared(self.context, workload)
        with self._store.transaction(key) as txn:
            return txn.workload, [], shown(txn.workload, self._totals(txn.workload))

    def nested_totals(self, workload: Workload, own: Iterable[Total]) -> list[Total]:
        """Return what the workloads inside this run used since it began, without its ``own`` totals.

        [] if there were none.
        """
        found = nested.totals(self.context, workload, own, functools.partial(counters.own_now, self.context))
        return shown(workload, found)

    def read_all(self, *, with_ended: bool = False) -> list[Usage]:
        """Return the use of all workloads in order of the key, from a pass that concurrent callers share.

        ``with_ended``: also of those that are over. Raises NotRead.
        """
        found = {usage.workload.key: usage for usage in self._usage.get()}
        if with_ended:
            found |= {usage.workload.key: usage for usage in self._read_ended()}
        return [self._with_shared(usage.shown()) for _, usage in sorted(found.items())]

    def _with_shared(self, usage: Usage) -> Usage:
        """Return the use with the totals of a unit that shares a group. Sums over several workloads lack these."""
        if usage.totals or usage.workload.state is not State.PENDING:
            return usage
        return replace(usage, totals=tuple(overflow.shared(self.context, usage.workload)))

    def _read_running(self, key: str) -> tuple[Workload, list[Reading], list[Total]] | None:
        """Return the workload with the counters that it shows, and the totals of all events.

        None if it is over or ends now. Raises NoSuchWorkload.
        """
        while (workload := self._store.known(key)).state not in _ENDED:
            try:
                readings = counters.readings(self.context, workload)
                # A downgrade is saved before the use that it is about is counted, so the workload has it now.
                now = self._store.known(key)
                if [group.nonce for group in now.existing_groups] != [
                    group.nonce for group in workload.existing_groups
                ]:
                    continue
                now = nested.with_ended(self.context.snapshots, self._store.get, now)
                shown_values = summed(live.readings for live in readings.values())
                values = [reading for reading in shown_values if now.shows(reading.event)]
                found = now, values, counters.totals(self.context, now, readings)
            except (ResctrlError, FileNotFoundError):
                if self._store.get(key) is workload:
                    raise
            else:
                # Without a transaction the workload may have ended, and been set aside, meanwhile.
                later = self._store.get(key)
                if later is not None and later.generation == now.generation and later.state not in _ENDED:
                    return found
        return None

    def _read_each(self) -> Iterator[Usage]:
        """Read all workloads that are not over. One that cannot be read keeps no other from being read."""
        for workload in self._store.unfinished():
            if not workload.state.is_over:
                with contextlib.suppress(NoSuchWorkload):  # its record was removed meanwhile
                    usage = self._usage_of(workload.key)
                    if not usage.workload.state.is_over:
                        yield usage

    def _read_ended(self) -> Iterable[Usage]:
        """Return the use of all workloads that are over. Their files are read once while callers ask for them."""
        known, found = self._ended_usage, dict[str, Usage]()
        for workload in self._store.all():
            if workload.state.is_over:
                usage = known.get(workload.key)
                with contextlib.suppress(NoSuchWorkload):
                    if usage is None or usage.workload is not workload:
                        usage = self._usage_of(workload.key)
                    found[workload.key] = usage
        self._ended_usage = {key: usage for key, usage in found.items() if not usage.error}
        return found.values()

    def _read_exposed(self, key: str) -> Usage:
        """Return the use of a workload for its containers, in a tick."""
        self.maintenance.last_progress = time.monotonic()
        return self._usage_of(key).shown()

    def _usage_of(self, key: str) -> Usage:
        try:
            running = self._read_running(key)
            if running is not None:
                workload, readings, totals = running
                read_at = utc_now() if workload.existing_groups else ""
                return Usage(workload, read_at, tuple(readings), tuple(totals))
            # A call that has locked the key may be blocked in the kernel.
            with self._store.transaction_if_free(key) as txn:
                if txn is None:
                    return Usage(self._store.known(key), error="another call changes it now")
                return Usage(txn.workload, txn.workload.first.completed_at, (), tuple(self._totals(txn.workload)))
        except NoSuchWorkload:
            raise
        except (ResctrlError, OSError) as error:
            return Usage(self._store.known(key), error=str(error))

    def read_sums(self, groupings: Iterable[NameKind] = NameKind) -> SumsUse:
        """Return what all workloads used since the boot, by these names, from a reading that callers share.

        Raises NotRead.
        """
        with self._reading_sums:
            begun, usages = self._usage.get_with_begin()
            # Between a loss and the next run, a workload is over, and still claimed.
            interrupted = [workload.key for workload in self._store.unfinished() if workload.is_interrupted]
            lost = []
            for key in interrupted:
                with contextlib.suppress(NoSuchWorkload):
                    lost.append(self._usage_of(key))
            return self.sums.read([*usages, *lost], begun, self._store.get, list(groupings))

    def _settle_sums(self) -> None:
        """Write the sums if they are out of date, and then the records that state so."""
        self.sums.write()
        for run in self.sums.unsettled():
            # An error is among the problems of the sums; the next tick tries again.
            with contextlib.suppress(ResctrlError, OSError), self._store.transaction_if_free(run[0]) as txn:
                workload = txn.find() if txn is not None else None
                if txn is None or not self.sums.settle(workload, run):
                    continue
                if workload is not None and workload.uncounted:
                    txn.save(replace(workload, uncounted=False))

    def read_machine(self) -> MachineUse:
        """Return the use of the whole machine, from a reading that concurrent callers share.

        Raises NotRead, NotMounted.
        """
        return self._machine.get()

    def read_foreign(self, ref: GroupRef) -> tuple[Found, list[Reading]]:
        """Return a monitoring group of another program, with its current counters. Raises NoSuchGroup."""
        # It has to be one of the existing groups: a path must not be made of what a caller sent.
        found = next((group for group in self.tree_status().foreign if group.ref == ref), None)
        if found is None:
            raise NoSuchGroup(
                f"there is no foreign monitoring group {ref.name} in class {ref.class_ or '/'}",
                remedy="'resctrlctl list' shows the foreign groups",
            )
        return found, self.tree.read(found.ref)

    def tree_status(self) -> TreeStatus:
        """Return what is in the tree; if the kernel hangs, what was there before. Raises ResctrlError."""
        return self._watcher.look()

    def snapshot_path(self, workload: Workload) -> str | None:
        """Return the folder of the workload's begin and end files; None if there is none. Raises NotRead."""
        snapshots = self.context.snapshots
        return snapshots.path(workload.key) if snapshots.exists(workload.key) else None

    def went_with_mount(self, group: Group) -> bool:
        """Whether the mount is gone on which the group was found last."""
        return location.went_with_mount(self.context, group)

    def _totals(self, workload: Workload) -> list[Total]:
        try:
            readings = counters.readings(self.context, workload)
        except (NoSuchGroup, NotMounted):
            readings = {}
        workload = nested.with_ended(self.context.snapshots, self._store.get, workload)
        return counters.totals(self.context, workload, readings)


def sums_path(records: str) -> str:
    """Return the path of the file of the sums, which is beside the folder of the records."""
    return os.path.join(os.path.dirname(records), "sums.json")


_ENDED = {state for state in State if state.is_over} | {State.ENDING}
