# SPDX-License-Identifier: Apache-2.0
"""The work without a caller, once a second: ends, retries, losses, checkpoints, pruning.

A tick skips a workload that is unchanged, that is, if nothing can have happened to it without a report: its members
are watched (``watched.py``), its groups were found and not removed or renamed since then
(``Interference.take_gone``), its record has not changed and its checkpoint is not due. After a tick that skipped all
workloads, the next ticks look at none until one of these happens. A sweep skips a workload only if it sleeps as well:
none of its tasks has run since the last sweep (``activity.py``). A sweep each SWEEP_ALL_S skips none, in case that a
report was lost.

A checkpoint is skipped if the CPU times of the workload's tasks are those before the last two checkpoints: the
workload has slept, so the counters have counted nothing. None is skipped if tasks may run that no living member
accounts for, or if groups can lose their counters (``mbm_event``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator

from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.errors import NoSuchGroup, NotMounted, ResctrlError
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.evidence.activity import activity
from resctrlmond.workloads.evidence.callers import has_caller
from resctrlmond.workloads.evidence.run_state import Activity, TakenCheckpoint
from resctrlmond.workloads.evidence.watched import may_end_unseen
from resctrlmond.workloads.figures.reasons import text_of
from resctrlmond.workloads.figures.verdict import is_news, verdict
from resctrlmond.workloads.groups import counters, ends, location, placement, removal
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.queue_order import lacking_counters
from resctrlmond.workloads.groups.resumption import losses_in_a_row, resumes_after_s
from resctrlmond.workloads.groups.runs import resume
from resctrlmond.workloads.model.clock import seconds_since_ns
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.workload import GroupState, State, Workload
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.rmids import bandwidth_counters, overflow, rmid_queue
from resctrlmond.workloads.upkeep.early_pruning import EarlyPruner

log = logging.getLogger(__name__)

# The interval of sweeps, which search the control groups of members for tasks outside their groups. A process that
# joins a container from outside (podman exec) is not a child of its init, so it starts there.
SWEEP_S = 5.0
# The interval of sweeps of all workloads, also of those of which no task has run.
SWEEP_ALL_S = 60.0
# How many checkpoints in a row are skipped if no task runs. The next one writes again what was removed from /run.
_MAX_SKIPPED = 9


def _log_failure(key: str, error: ResctrlError | OSError) -> None:
    log.error("%s: %s", key, error)


# Work that the start does, and a sweep again if that failed.


class Maintenance:
    """Does the work that no caller asks for. Each step is a transaction of one workload.

    ``on_failure`` is called once for work that failed and is tried again, with the key and the error.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._store = ctx.store
        self._runs = ctx.runs
        self.early_pruner = EarlyPruner(ctx.store, ctx.snapshots)
        self._swept = self._swept_all = time.monotonic()
        # When a tick skipped all workloads: the changes of the workloads and of their watched members, and the
        # interval of checkpoints; None if the next tick has to look at each workload. And the time.monotonic() of the
        # next checkpoint. Without it, an idle minute with 500 containers takes 1.06 times the CPU time.
        self._all_unchanged: tuple[int, int, float] | None = None
        self._all_unchanged_until = 0.0
        # The errors of work that is tried again, by key and kind of work. Some of it is about no run.
        self._failures: dict[tuple[str, str], str] = {}
        # When a tick began the work on a workload (time.monotonic()): a long tick that makes progress does not hang.
        self.last_progress = self._swept
        self.is_stopping = False
        self.on_failure: Callable[[str, ResctrlError | OSError], None] = _log_failure
        ctx.callbacks.serve_counters = self.serve_counters

    def tick(self) -> None:
        """Do the work of a second: ends, retries, losses, pruning; and each SWEEP_S search the control groups."""
        settings = self._ctx.config.settings
        is_sweep = time.monotonic() - self._swept >= SWEEP_S
        if time.monotonic() - self._swept_all >= SWEEP_ALL_S:
            for run in self._runs.all():
                run.sleeping = None
            self._swept_all = time.monotonic()
        self._forget_gone()
        self._forget_ended()
        known = self._store.changes, self._ctx.watched.changes, settings.checkpoint_interval_s
        if is_sweep or known != self._all_unchanged or time.monotonic() >= self._all_unchanged_until:
            self._all_unchanged = None
            if self._tick_all(settings, is_sweep=is_sweep):
                self._all_unchanged, self._all_unchanged_until = (
                    known,
                    self._next_checkpoint(settings.checkpoint_interval_s),
                )
        if self.is_stopping:
            return
        if is_sweep:
            self._weigh()
        self._ctx.interference.update()
        if is_sweep:
            self._swept = time.monotonic()
        rmid_queue.serve(self._ctx, lambda key: self._guarded(key, "creating"))
        overflow.serve(self._ctx, lambda key: self._guarded(key, "sharing"))
        self.serve_counters(is_tick=True)
        with self._guarded("completed", "pruning"):
            self._prune(settings)
        self._forget_failures()

    def _tick_all(self, settings: Settings, *, is_sweep: bool) -> bool:
        """Do the work of a second for each workload. Return whether nothing could have happened to any of them."""
        unsaved, is_all_unchanged = set(self._store.unsaved), True
        kept = [workload for workload in map(self._store.get, sorted(unsaved)) if workload and workload.is_finished]
        for workload in (*self._store.unfinished(), *kept):
            if self.is_stopping:
                # On a busy machine the checkpoints of some tens of groups take seconds. The next start takes them.
                return False
            is_unchanged = workload.key not in unsaved and self._is_unchanged(workload, settings)
            if is_unchanged and (not is_sweep or self._is_sleeping(workload)):
                continue
            is_all_unchanged = False
            # Skip keys that a call has locked (the call may be blocked in the kernel); the next tick retries.
            with self._guarded(workload.key), self._store.transaction_if_free(workload.key) as txn:
                if txn is None:
                    continue
                self._runs.of(workload.key).unchanged = None
                watched = self._ctx.watched.of(workload.key)
                try:
                    if workload.key in unsaved:
                        txn.save(txn.workload)
                    recorded = self._tick(txn, settings, is_sweep=is_sweep)
                    if is_sweep:
                        self._search(txn)
                except NotMounted:
                    self._lose_unmounted(txn)
                else:
                    if recorded is not None and not may_end_unseen(recorded, watched):
                        self._runs.of(workload.key).unchanged = recorded, watched
        return is_all_unchanged

    def _weigh(self) -> None:
        """Record what the witness has seen of the workloads. Live figures ask it each time."""
        proofs = self._ctx.proofs
        look = proofs.look(self._store.unfinished())
        for workload in self._store.unfinished():
            if workload.state not in (State.ACTIVE, State.IDLE):
                continue
            with self._guarded(workload.key, "weighing"):
                # The process of a command has used something that is subtracted when it has called.
                if not has_caller(workload) and is_news(workload, proofs.weighed(workload, look)):
                    with self._store.transaction_if_free(workload.key) as txn:
                        # At its end, its tasks leave the groups.
                        if txn is not None and txn.find() is workload:
                            self._save_weighed(txn, proofs.weighed(workload, look))

    def _save_weighed(self, txn: Transaction, weighed: Workload) -> None:
        """Save what the witness has shown. On an error, remove the file "quality", which may be better than that."""
        _log_news(txn.workload, weighed)
        try:
            txn.save(weighed)
        except ResctrlError:
            self._ctx.snapshots.remove_quality(txn.key)
            raise

    def sweep(self, key: str) -> None:
        """Move tasks that joined the workload's members from outside into its groups."""
        with self._store.transaction(key) as txn:
            placement.sweep(self._ctx, txn)

    def record_ends(self, key: str) -> None:
        """Record which members have ended, and end the claims that end with them."""
        with self._store.transaction(key) as txn:
            ends.record_ends(self._ctx, txn)

    def serve_counters(self, *, is_tick: bool = False) -> None:
        """Assign free bandwidth counters to the groups that lack some."""
        bandwidth_counters.serve(self._ctx, lambda key: self._guarded(key, "counters", is_tick=is_tick))

    @property
    def problems(self) -> list[str]:
        """The errors of work that fails at present and is tried again."""
        found = [f"{key}: {text}" for (key, _), text in sorted(self._failures.copy().items())]
        return list(dict.fromkeys(found))

    def _search(self, txn: Transaction) -> None:
        """Search for tasks outside the workload's groups, which were just found."""
        workload, run = txn.find(), self._runs.of(txn.key)
        # Before the search: a task that runs meanwhile may fork after it.
        before = activity(workload) if workload is not None else None
        run.sleeping = None
        placement.sweep(self._ctx, txn)
        if workload is not None and before is not None and txn.find() is workload:
            run.sleeping = workload, before

    @contextlib.contextmanager
    def _guarded(self, key: str, work: str = "", *, is_tick: bool = True) -> Iterator[None]:
        """Keep an error from the work on other workloads, and report it once, not each second.

        ``is_tick``: a tick does the work, and so makes progress.
        """
        if is_tick:
            self.last_progress = time.monotonic()
        about = key, work
        try:
            yield
        except (ResctrlError, OSError) as error:
            text = str(error)
            if self._failures.get(about) != text:
                self.on_failure(key, error)
            self._failures[about] = text
        except Exception as error:
            # A defect that shows with one workload must not keep the others from being served.
            if self._failures.get(about) != repr(error):
                log.exception("%s: maintenance failed unexpectedly", key)
            self._failures[about] = repr(error)
        else:
            self._failures.pop(about, None)

    def _forget_failures(self) -> None:
        """Forget failed work that is not tried again, because its workload ended or has what it waited for."""
        for key, work in list(self._failures):
            workload = self._store.get(key)
            match work:
                case "creating":
                    is_over = workload is None or all(
                        group.state is not GroupState.PENDING for group in workload.groups
                    )
                case "counters":
                    # A failure to read the counters of the host has a key that no workload has.
                    is_of_host = key == bandwidth_counters.ALL_COUNTERS
                    asking = [workload] if workload else self._store.without_counters() if is_of_host else []
                    is_over = not lacking_counters(asking)
                case "pruning":
                    is_over = key != "completed" and not self._ctx.snapshots.completed.has(key)
                case _:
                    is_over = workload is None
            if is_over:
                # A call that does the same work may have removed it meanwhile.
                self._failures.pop((key, work), None)

    def _prune(self, settings: Settings) -> None:
        completed = self._ctx.snapshots.completed
        profiles = self._ctx.config.profiles.by_name.values()
        ttls = [settings.snapshot_ttl_s, *(one.snapshot_ttl_s for one in profiles if one.snapshot_ttl_s is not None)]
        for workload in self._store.finished():
            if seconds_since_ns(workload.first.completed_ns) < min(ttls):
                break  # all others ended later
            if not self._is_expired(workload, settings):
                continue
            with self._guarded(workload.key), self._store.transaction_if_free(workload.key) as txn:
                if txn is not None:
                    self._drop_expired(txn, settings)
        self._drop_unkept(settings)
        for path in self._store.prune(settings.snapshot_ttl_s):
            log.info("removed a record that could not be read and was set aside for snapshot_ttl: %s", path)
        for key in completed.list_keys():
            with self._guarded(key, "pruning"), self._store.transaction_if_free(key) as txn:
                if txn is not None:
                    completed.prune(key, self._ttl_s(txn.find(), settings))
        self.early_pruner.prune()

    def _drop_unkept(self, settings: Settings) -> None:
        """Remove the records and the files of ended runs that their profiles do not keep."""
        for workload in self._store.finished():
            if workload.keeps_files:
                continue
            with self._guarded(workload.key), self._store.transaction_if_free(workload.key) as txn:
                if txn is not None:
                    self._drop_expired(txn, settings)

    def _drop_expired(self, txn: Transaction, settings: Settings) -> None:
        """Remove the record and the files of a run that has been over for ``snapshot_ttl``."""
        workload = txn.find()
        is_over = workload is not None and workload.state.is_over and not workload.is_interrupted
        if workload is not None and is_over and self._is_expired(workload, settings):
            self._ctx.snapshots.delete(txn.key)
            txn.drop()

    def _is_expired(self, workload: Workload, settings: Settings) -> bool:
        ttl_s = self._ttl_s(workload, settings)
        if workload.uncounted:
            # Its record and its files are the only ones that have its use if the daemon is killed.
            ttl_s = max(ttl_s, settings.snapshot_ttl_s)
        return seconds_since_ns(workload.first.completed_ns) >= ttl_s

    def _ttl_s(self, workload: Workload | None, settings: Settings) -> float:
        """Return for how long the files of an ended run are kept: as its profile or else the settings state."""
        if workload is not None and not workload.keeps_files:
            return 0.0
        profile = self._ctx.config.profile_of(workload) if workload is not None else None
        if profile is None or profile.snapshot_ttl_s is None:
            return settings.snapshot_ttl_s
        return profile.snapshot_ttl_s

    def _forget_gone(self) -> None:
        """Forget the groups that may have been removed or renamed since the last tick."""
        gone = self._ctx.interference.take_gone()
        for run in self._runs.all() if gone is None or gone else ():
            workload = run.found
            if workload and (gone is None or any(_is_below(group.ref, gone) for group in workload.existing_groups)):
                run.found = self._all_unchanged = None

    def _forget_ended(self) -> None:
        """Forget the runs that have ended. A key that a call has locked is left to the next tick."""
        for key in self._store.take_ended():
            with self._store.transaction_if_free(key) as txn:
                if txn is None:
                    self._store.add_ended(key)
                    continue
                workload = txn.find()
                if workload is not None and not workload.is_finished:
                    continue  # the next run of the key has begun
                self._runs.forget(key)

    def _is_unchanged(self, workload: Workload, settings: Settings) -> bool:
        """Whether nothing that a tick looks for can have happened since the last one without a report."""
        run = self._runs.of(workload.key)
        unchanged, watched = run.unchanged or (None, None)
        return (
            unchanged is workload
            and watched is self._ctx.watched.of(workload.key)
            and run.found is workload
            and not self._decide_on_checkpoint(workload, settings.checkpoint_interval_s)
        )

    def _is_sleeping(self, workload: Workload) -> bool:
        """Whether none of its tasks has run since a sweep found all of them in their groups."""
        run = self._runs.of(workload.key)
        sleeping, before = run.sleeping or (None, None)
        if sleeping is not workload or self._ctx.interference.has_trouble:
            return False
        return activity(workload) == before

    def _tick(self, txn: Transaction, settings: Settings, *, is_sweep: bool) -> Workload | None:
        """Do the work of a second. Return the workload if it has a group."""
        ctx = self._ctx
        workload = txn.find()
        if workload is None:
            return None
        if workload.is_interrupted:
            self._resume(txn)
            return None
        if workload.state.is_over:
            self._drop_expired(txn, settings)
            return None
        if workload.state is State.ENDING:
            ends.finish_again(ctx, txn)
        elif workload.state is not State.PENDING and (is_sweep or not self._is_found(workload)):
            self._follow(txn, workload)
        # Before record_ends(), which may end the workload: tasks that have come back ran outside.
        placement.wake_dormant(ctx, txn)
        recorded = ends.record_ends(ctx, txn)
        if recorded is not None and recorded.dormant:
            placement.wake_dormant(ctx, txn)
            recorded = txn.find()
        if recorded is not None and recorded.state in (State.ACTIVE, State.IDLE):
            self._checkpoint(txn, recorded, settings.checkpoint_interval_s)
            location.relink_stale(ctx, txn.workload)
            return txn.workload
        return None

    def _is_found(self, workload: Workload) -> bool:
        reports_removal = self._ctx.interference.reports_removal
        return self._runs.of(workload.key).found is workload and all(
            reports_removal(group.ref) for group in workload.existing_groups
        )

    def _follow(self, txn: Transaction, workload: Workload) -> None:
        run = self._runs.of(txn.key)
        # Set first: the groups may be removed right after they were found, and another tick take that report.
        run.found = workload
        try:
            location.follow(self._ctx, txn)
        except NoSuchGroup as error:
            run.found = None
            removal.lose(self._ctx, txn, error.message)
        except BaseException:
            run.found = None
            raise

    def _resume(self, txn: Transaction) -> None:
        workload = ends.record_ends(self._ctx, txn)
        if workload is None or not workload.is_interrupted:
            return
        run, now = self._runs.of(txn.key), time.monotonic()
        since, tries = run.resume_try = run.resume_try or (now, 0)
        if now < since + resumes_after_s(losses_in_a_row(workload) + tries):
            return
        self._ctx.tree.check_mounted()  # an unmount may take long, and needs no pause when it is over
        try:
            resume(self._ctx, txn)
        except Exception:
            # The state of the run that was tried has replaced that of the lost run. If that run has begun, it stays.
            if txn.workload.is_interrupted:
                self._runs.of(txn.key).resume_try = now, tries + 1
            raise

    def _decide_on_checkpoint(self, workload: Workload, interval_s: float) -> bool:
        """Return whether to take a checkpoint now. One that is due and not needed counts as skipped from now on."""
        # The first one at once: so a short life has one too, and so has a workload after a restart.
        run = self._runs.of(workload.key)
        last = -math.inf if run.checkpointed_at is None else run.checkpointed_at
        is_due = bool(interval_s) and time.monotonic() - last >= interval_s
        if not is_due or run.taken is None or self._is_needed(workload, run.taken):
            return is_due
        run.taken.skipped += 1
        run.checkpointed_at = time.monotonic()
        return False

    def _next_checkpoint(self, interval_s: float) -> float:
        times = (run.checkpointed_at for run in self._runs.all())
        last = min((at for at in times if at is not None), default=math.inf)
        return last + interval_s if interval_s else math.inf

    def _is_needed(self, workload: Workload, last: TakenCheckpoint) -> bool:
        """Whether the counters may have counted something since the last checkpoint, or too many were skipped."""
        if not last.is_final or last.workload is not workload or last.skipped >= _MAX_SKIPPED:
            return True
        return self._activity(workload) != last.activity

    def _activity(self, workload: Workload) -> Activity | None:
        if self._ctx.interference.has_trouble or ends.may_run_unseen(workload):
            return None
        return activity(workload)

    def _checkpoint(self, txn: Transaction, workload: Workload, interval_s: float) -> None:
        now = time.monotonic()
        if not self._decide_on_checkpoint(workload, interval_s):
            return
        run = self._runs.of(txn.key)
        last, run.taken = run.taken, None
        # Before the readings: what a task uses after this is not in them.
        before = self._activity(workload)
        with contextlib.suppress(NoSuchGroup):  # the next tick records the loss
            counters.checkpoint(self._ctx, txn)
            if before is not None and txn.workload is workload:
                has_slept = last is not None and last.workload is workload and last.activity == before
                is_final = has_slept and not self._has_assigned_counters()
                run.taken = TakenCheckpoint(workload, before, is_final)
        run.checkpointed_at = now

    def _has_assigned_counters(self) -> bool:
        """Whether groups can lose their bandwidth counters, which then restart from 0, and have exact totals.

        That a group had no counter for a time is known only from a reading.
        """
        return self._ctx.tree.bandwidth_configuration().mode is Mode.ASSIGNED

    def _lose_unmounted(self, txn: Transaction) -> None:
        workload = txn.find()
        if workload is not None and workload.state.has_group:
            removal.lose(self._ctx, txn, "resctrl was unmounted, which removed every group")


def _log_news(before: Workload, now: Workload) -> None:
    """Log the reasons that a look at the witness has added, and the last program that has moved a task."""
    known = verdict(before).reasons
    for why in verdict(now).reasons:
        if why not in known:
            log.warning("%s: %s", now.key, why)
    for group, old in zip(now.groups, before.groups, strict=True):
        for one in group.doubts:
            if one.events and one not in old.doubts:
                log.warning("%s: %s", now.key, text_of(one))
        if group.moved_by != old.moved_by:
            log.warning("%s: the last task was moved by %s", now.key, group.moved_by)


def _is_below(ref: GroupRef, gone: set[str]) -> bool:
    """Whether one of the directories is that of the group, or above it."""
    return not gone.isdisjoint((ref.path, os.path.dirname(ref.path), ref.class_, ""))
