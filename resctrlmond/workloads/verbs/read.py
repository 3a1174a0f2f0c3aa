# SPDX-License-Identifier: Apache-2.0
"""The verbs that read workloads and their use."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator

from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import NoSuchGroup, NotMounted, NotRead, ResctrlError
from resctrlmond.workloads.evidence.witnessed import Look
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.statements import Statement, statements
from resctrlmond.workloads.figures.verdict import is_news
from resctrlmond.workloads.groups import counters, nested, units
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.errors import NoSuchWorkload
from resctrlmond.workloads.model.states import NameKind
from resctrlmond.workloads.model.validation import canonical_key
from resctrlmond.workloads.model.workload import State, Workload, replace
from resctrlmond.workloads.records.sums import Sums, SumsUse
from resctrlmond.workloads.records.totals import by_counters, shown, summed
from resctrlmond.workloads.records.usage import SharedPass, Usage

_ENDED = {state for state in State if state.is_over} | {State.ENDING}


def get(ctx: Context, key: str) -> Workload:
    """Return the workload. Raises NoSuchWorkload, InvalidKey."""
    return ctx.store.known(canonical_key(key))


def with_proofs(ctx: Context, key: str) -> tuple[Workload, list[Statement]]:
    """Return the workload with what the witness has seen of it until now, and what its proofs show.

    Raises NoSuchWorkload, InvalidKey.
    """
    workload = get(ctx, key)
    if workload.existing_groups and workload.state not in _ENDED:
        seen = workload
        with contextlib.suppress(ResctrlError):  # then the statements have the time at which it was asked last
            seen = ctx.proofs.weighed(workload)
        # At the end, tasks leave the group: what was seen after that is not of this run.
        workload = get(ctx, key)
        if workload.state not in _ENDED and workload.generation == seen.generation:
            workload = seen
    counted: list[Total] = []
    with contextlib.suppress(ResctrlError, OSError):  # such as files that are removed at this moment
        counted = by_counters(ctx.snapshots, workload)
    return workload, list(statements(workload, counted, boot_ns()))


def read(ctx: Context, key: str) -> tuple[Workload, list[Reading], list[Total]]:
    """Return the current counters ([] if the workload is over), and the totals since the baseline.

    Raises NoSuchWorkload.
    """
    key = canonical_key(key)
    found = _read_running(ctx, key)
    if found is not None:
        workload, readings, totals = found
        return workload, readings, shown(workload, totals) or units.shared(ctx, workload)
    with ctx.store.transaction(key) as txn:
        return txn.workload, [], shown(txn.workload, current_totals(ctx, txn.workload))


def nested_totals(ctx: Context, workload: Workload, own: Iterable[Total]) -> list[Total]:
    """Return what the workloads inside this run used since it began, without its ``own`` totals.

    [] if there were none.
    """
    found = nested.totals(ctx, workload, own, functools.partial(counters.own_now, ctx))
    return shown(workload, found)


def usage_of(ctx: Context, key: str, look: Look | None = None) -> Usage:
    """Return the use of a workload, or the reason for which it cannot be read. Raises NoSuchWorkload.

    ``look``: what the witness has seen, if not until now.
    """
    try:
        running = _read_running(ctx, key, look)
        if running is not None:
            workload, readings, totals = running
            read_at, read_ns = (utc_now(), boot_ns()) if workload.existing_groups else ("", 0)
            return Usage(workload, read_at, read_ns, tuple(readings), tuple(totals))
        # A call that has locked the key may be blocked in the kernel.
        with ctx.store.transaction_if_free(key) as txn:
            if txn is None:
                return Usage(ctx.store.known(key), error="another call changes it now")
            first, found = txn.workload.first, tuple(current_totals(ctx, txn.workload))
            return Usage(txn.workload, first.completed_at, first.completed_ns, (), found)
    except NoSuchWorkload:
        raise
    except (ResctrlError, OSError) as error:
        return Usage(ctx.store.known(key), error=str(error))


def current_totals(ctx: Context, workload: Workload) -> list[Total]:
    """Return the totals of all events, from the last readings if there is no group."""
    try:
        readings = counters.readings(ctx, workload)
    except (NoSuchGroup, NotMounted):
        readings = {}
    workload = nested.with_ended(ctx.snapshots, ctx.store.get, workload)
    if readings:
        workload = ctx.proofs.weighed(workload)
    return counters.totals(ctx, workload, readings)


def _read_running(
    ctx: Context, key: str, look: Look | None = None
) -> tuple[Workload, list[Reading], list[Total]] | None:
    """Return the workload with the counters that it shows, and the totals of all events.

    None if it is over or ends now. Raises NoSuchWorkload.
    """
    while (workload := ctx.store.known(key)).state not in _ENDED:
        try:
            readings = counters.readings(ctx, workload)
            now = ctx.store.known(key)
            if [group.nonce for group in now.existing_groups] != [group.nonce for group in workload.existing_groups]:
                continue
            now = ctx.proofs.weighed(nested.with_ended(ctx.snapshots, ctx.store.get, now), look)
            shown_values = summed(live.readings for live in readings.values())
            values = [reading for reading in shown_values if now.shows(reading.event)]
            found = now, values, counters.totals(ctx, now, readings)
        except (ResctrlError, FileNotFoundError):
            if ctx.store.get(key) is workload:
                raise
        else:
            # Without a transaction the workload may have ended, and been set aside, meanwhile.
            later = ctx.store.get(key)
            if later is not None and later.generation == now.generation and later.state not in _ENDED:
                return found
    return None


class Usages:
    """The use of all workloads, and its sums, from passes that concurrent callers share."""

    def __init__(self, ctx: Context, sums: Sums) -> None:
        self.sums = sums
        self._ctx = ctx
        self._pass = SharedPass(lambda: tuple(self._read_each()))
        # Held while the sums are read, so that the readings are used in their order.
        self._reading_sums = threading.Lock()
        # By key: the use of workloads that are over, whose files do not change any more, while callers ask for it.
        # Without it, a ReadAll of 500 workloads and 200 that are over takes 1.24 times the CPU time.
        self._ended: dict[str, Usage] = {}

    def read_all(self, *, with_ended: bool = False) -> list[Usage]:
        """Return the use of all workloads in order of the key, from a pass that concurrent callers share.

        ``with_ended``: also of those that are over. Raises NotRead.
        """
        found = {usage.workload.key: usage for usage in self._pass.get()}
        if with_ended:
            found |= {usage.workload.key: usage for usage in self._read_ended()}
        return [self._with_shared(usage.shown()) for _, usage in sorted(found.items())]

    def read_sums(self, groupings: Iterable[NameKind] = NameKind) -> SumsUse:
        """Return what all workloads used since the boot, by these names, from a reading that callers share.

        Raises NotRead.
        """
        with self._reading_sums:
            begun, usages = self._pass.get_with_begin()
            # Between a loss and the next run, a workload is over, and still claimed.
            interrupted = [workload.key for workload in self._ctx.store.unfinished() if workload.is_interrupted]
            lost = []
            for key in interrupted:
                with contextlib.suppress(NoSuchWorkload):
                    lost.append(usage_of(self._ctx, key))
            return self.sums.read([*usages, *lost], begun, self._ctx.store.get, list(groupings))

    def tick(self) -> None:
        """Forget the last pass if no caller has asked for a while. Write the sums if they are out of date."""
        if self._pass.forget_old():
            self._ended = {}
        self._settle_sums()

    def _with_shared(self, usage: Usage) -> Usage:
        """Return the use with the totals of a unit that shares a group. Sums over several workloads lack these."""
        if usage.totals or usage.workload.state is not State.PENDING:
            return usage
        return replace(usage, totals=tuple(units.shared(self._ctx, usage.workload)))

    def _read_each(self) -> Iterator[Usage]:
        """Read all workloads that are not over. One that cannot be read keeps no other from being read."""
        proofs, found = self._ctx.proofs, []
        look = proofs.look(self._ctx.store.unfinished())
        for workload in self._ctx.store.unfinished():
            if not workload.state.is_over:
                with contextlib.suppress(NoSuchWorkload):  # its record was removed meanwhile
                    found.append(usage_of(self._ctx, workload.key, look))
        # Another look, after the last counter was read, decides on all.
        look = proofs.look([usage.workload for usage in found])
        for usage in found:
            with contextlib.suppress(NoSuchWorkload):
                try:
                    is_old = is_news(usage.workload, proofs.weighed(usage.workload, look))
                except NotRead:
                    is_old = True  # it is read again, with this error
                now = usage_of(self._ctx, usage.workload.key) if is_old else usage
                if not now.workload.state.is_over:
                    yield now

    def _read_ended(self) -> Iterable[Usage]:
        """Return the use of all workloads that are over. Their files are read once while callers ask for them."""
        known, found = self._ended, dict[str, Usage]()
        for workload in self._ctx.store.all():
            if workload.state.is_over:
                usage = known.get(workload.key)
                with contextlib.suppress(NoSuchWorkload):
                    if usage is None or usage.workload is not workload:
                        usage = usage_of(self._ctx, workload.key)
                    found[workload.key] = usage
        self._ended = {key: usage for key, usage in found.items() if not usage.error}
        return found.values()

    def _settle_sums(self) -> None:
        """Write the sums if they are out of date, and then the records that state so."""
        self.sums.write()
        for run in self.sums.unsettled():
            # An error is among the problems of the sums; the next tick tries again.
            with contextlib.suppress(ResctrlError, OSError), self._ctx.store.transaction_if_free(run[0]) as txn:
                workload = txn.find() if txn is not None else None
                if txn is None or not self.sums.settle(workload, run):
                    continue
                if workload is not None and workload.uncounted:
                    txn.save(replace(workload, uncounted=False))
