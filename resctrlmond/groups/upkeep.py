# SPDX-License-Identifier: Apache-2.0
"""What happens without a caller, once a second: ends, retries, losses, checkpoints, pruning."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator

from resctrlmond.groups.assignments import ALL_COUNTERS, Assignments
from resctrlmond.groups.early_pruning import EarlyPruning
from resctrlmond.groups.ends import Ends
from resctrlmond.groups.interference import Interference
from resctrlmond.groups.lifecycle import Lifecycle
from resctrlmond.groups.pending import Pending
from resctrlmond.groups.plan import lacking_counters, losses_in_a_row, resumes_after_s
from resctrlmond.groups.record import Record, State
from resctrlmond.groups.resuming import Resuming
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.sweeping import Sweeping
from resctrlmond.groups.times import seconds_since_ns
from resctrlmond.resctrl.errors import NoSuchGroup, NotMounted, ResctrlError

log = logging.getLogger(__name__)

# What joins a container from outside (exec sessions) is not a child of its first process: its control group is
# looked through for such tasks this often.
SWEEP_S = 5.0


def _log_complaint(key: str, error: ResctrlError | OSError) -> None:
    log.error("%s: %s", key, error)


class Upkeep:
    """The manager's own initiative. Every step takes the key it works on.

    ``complain`` is told, once, of work that failed and is tried again.
    """

    def __init__(
        self,
        life: Lifecycle,
        settings: Callable[[], Settings],
        *,
        sweeping: Sweeping,
        pending: Pending,
        resuming: Resuming,
        ends: Ends,
    ) -> None:
        self.life = life
        self.book = life.book
        self.settings = settings
        self.sweeping = sweeping
        self.pending = pending
        self.resuming = resuming
        self.ends = ends
        self.assignments = Assignments(life)
        self.early_pruning = EarlyPruning(life)
        self.interference = Interference(life, sweeping)
        self._swept = time.monotonic()
        # Per key: the run (its generation) and the time.monotonic() of its last checkpoint.
        self._checkpointed: dict[str, tuple[int, float]] = {}
        # What failed and will be tried again, by the key and the kind of work.
        self._complaints: dict[tuple[str, str], str] = {}
        # Per key: which lost run (its generation), since when it has not been tried, and the failed tries.
        self._tries: dict[str, tuple[int, float, int]] = {}
        # When a tick went on to the next workload (time.monotonic()): a long one is no tick that hangs.
        self.went_on = self._swept
        self.is_stopping = False
        self.complain: Callable[[str, ResctrlError | OSError], None] = _log_complaint

    def tick(self) -> None:
        """Once a second: ends, retries, losses, pruning; and the control groups looked through every SWEEP_S."""
        settings = self.settings()
        is_sweep = time.monotonic() - self._swept >= SWEEP_S
        for record in self.book.all():
            if self.is_stopping:
                # On a busy machine the checkpoints of some tens of groups take seconds. The next start takes them.
                return
            # Who is being worked on is left to its verb, which may hang, and seen to a second later.
            with self._logged(record.key), self.book.writing_if_free(record.key) as is_free:
                if not is_free:
                    continue
                try:
                    self._tick(record.key, settings)
                    if is_sweep:
                        self.sweeping.sweep(record.key)
                        self.interference.inspect(record.key)
                except NotMounted:
                    self._unmounted(record.key)
        self.react()
        if is_sweep:
            self._swept = time.monotonic()
        self.pending.serve(lambda key: self._logged(key, "making"))
        self.serve_counters(is_tick=True)
        with self._logged("completed", "pruning"):
            self._prune(settings)
        self._forget_complaints()

    def react(self) -> float:
        """Mark what other programs have written to resctrl; see Interference.react."""
        return self.interference.react(lambda key: self._logged(key, "looking", is_tick=False))

    def begin(self) -> None:
        """Look for what other programs have done to the groups while no daemon ran."""
        for record in self.book.all():
            with self._logged(record.key, "looking"):
                self.interference.inspect(record.key, is_thorough=True)

    @property
    def problems(self) -> list[str]:
        """What fails at present, and is tried again."""
        found = [f"{key}: {text}" for (key, _), text in sorted(self._complaints.copy().items())]
        return list(dict.fromkeys(found))

    def _forget_complaints(self) -> None:
        """Forget failed work that is not tried again, because its workload ended or has what it waited for."""
        for key, work in list(self._complaints):
            record = self.book.get(key)
            match work:
                case "making":
                    is_over = record is None or all(group.state is not State.PENDING for group in record.groups)
                case "counters":
                    # Reading the counters of the host fails under a name that no workload has.
                    asking = [record] if record is not None else self.book.all() if key == ALL_COUNTERS else []
                    is_over = not lacking_counters(asking)
                case "pruning":
                    is_over = key != "completed" and not self.life.snapshots.has_set_aside(key)
                case _:
                    is_over = record is None
            if is_over:
                # A call that does the same work may have forgotten it meanwhile.
                self._complaints.pop((key, work), None)

    def serve_counters(self, *, is_tick: bool = False) -> None:
        """Give bandwidth counters that are free to the groups that lack some."""
        self.assignments.serve(lambda key: self._logged(key, "counters", is_tick=is_tick))

    def _prune(self, settings: Settings) -> None:
        for path in self.book.prune(settings.snapshot_ttl_s):
            log.info("removed a record that could not be read and was set aside for snapshot_ttl: %s", path)
        for key in self.life.snapshots.set_aside_keys():
            with self._logged(key, "pruning"), self.book.writing_if_free(key) as is_free:
                if is_free:
                    self.life.snapshots.prune(key, settings.snapshot_ttl_s)
        self.early_pruning.prune()

    @contextlib.contextmanager
    def _logged(self, key: str, work: str = "", *, is_tick: bool = True) -> Iterator[None]:
        """Go on with the others whatever happens to this one, and say it once, not each second.

        ``is_tick``: a tick does the work, and so has not hung; a call that does it says nothing about the tick.
        """
        if is_tick:
            self.went_on = time.monotonic()
        about = key, work
        try:
            yield
        except (ResctrlError, OSError) as error:
            text = str(error)
            if self._complaints.get(about) != text:
                self.complain(key, error)
            self._complaints[about] = text
        except Exception as error:
            # A mistake of ours with one workload: the others, and those that wait for an RMID, do without it.
            if self._complaints.get(about) != repr(error):
                log.exception("%s: maintenance failed unexpectedly", key)
            self._complaints[about] = repr(error)
        else:
            self._complaints.pop(about, None)

    def _tick(self, key: str, settings: Settings) -> None:
        with self.book.writing(key):
            record = self.book.get(key)
            if record is None:
                return
            if record.is_interrupted:
                self._interrupted(record)
                return
            if record.state.is_over:
                if seconds_since_ns(record.completed_ns) >= settings.snapshot_ttl_s:
                    self.life.snapshots.delete(key)
                    self.book.drop(key)
                self._checkpointed.pop(key, None)
                self._tries.pop(key, None)
                self.sweeping.joiners.forget(key)
                self.interference.forget(key)
                return
            if record.state is State.ENDING:
                self.life.finish(record, record.reason)
            elif record.state is not State.PENDING:
                try:
                    self.life.follow(record)
                except NoSuchGroup as error:
                    self.life.lose(record, error.message)
            # Before the settling, which may end the workload: tasks that have come back ran outside.
            self.sweeping.take_back(key)
            settled = self.ends.settle(key)
            if settled is not None and settled.awaited:
                self.sweeping.take_back(key)
                settled = self.book.get(key)
            if settled is not None and settled.state in (State.ACTIVE, State.IDLE):
                self._checkpoint(settled, settings.checkpoint_interval_s)
                self.life.relink_stale(settled)

    def _interrupted(self, record: Record) -> None:
        settled = self.ends.settle(record.key)
        if settled is None or not settled.is_interrupted:
            self._tries.pop(record.key, None)
            return
        # By the clock that nobody sets.
        now = time.monotonic()
        generation, since, tries = self._tries.get(record.key, (0, now, 0))
        if generation != settled.generation:
            # A call has resumed the run that the entry is about, and this is the next one, just lost.
            since, tries = now, 0
            self._tries[record.key] = settled.generation, since, tries
        if now < since + resumes_after_s(losses_in_a_row(settled) + tries):
            return
        self.life.tree.check_mounted()  # an unmount may take long, and once it is over nothing is waited for
        self._tries[record.key] = settled.generation, now, tries + 1
        self.resuming.resume(settled)
        del self._tries[record.key]

    def _checkpoint(self, record: Record, interval_s: float) -> None:
        now = time.monotonic()
        # The first one as soon as the group is seen: a short life has one too, and so has one before a restart.
        generation, last = self._checkpointed.get(record.key, (0, -math.inf))
        if not interval_s or (generation == record.generation and now - last < interval_s):
            return
        with contextlib.suppress(NoSuchGroup):  # the next tick notes the loss
            self.life.checkpoint(record)
        self._checkpointed[record.key] = record.generation, now

    def _unmounted(self, key: str) -> None:
        with self.book.writing(key):
            record = self.book.get(key)
            if record is not None and record.state.has_group:
                self.life.lose(record, "resctrl was unmounted, which removed every group")
