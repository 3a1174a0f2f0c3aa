# SPDX-License-Identifier: Apache-2.0
"""The start: continue where the last daemon stopped, for any reason."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator

import msgspec

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.tree import Found
from resctrlmond.workloads.groups import creation, ends, location, placement, removal
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.plan import Do, Step, plan_start
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.errors import InvalidKey
from resctrlmond.workloads.model.owners import RECOVERED
from resctrlmond.workloads.model.validation import canonical_key
from resctrlmond.workloads.model.workload import ROOT_FOLDER, Claim, EndRule, Group, GroupState, Workload, replace
from resctrlmond.workloads.records.record_format import UnreadableRecord
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.rmids import rmid_queue
from resctrlmond.workloads.upkeep import host_conditions
from resctrlmond.workloads.verbs import excluded

log = logging.getLogger(__name__)


class Problem(msgspec.Struct, frozen=True):
    """A problem that the start found, as a sentence for an administrator, and whether it lasts."""

    text: str
    lasts: Callable[[], bool]


def _lasts(condition: Callable[[], str]) -> bool:
    return bool(condition())


def _until_the_first_tick() -> bool:
    # The tick tries the work again, and reports it if it still fails.
    return False


class Recovery:
    """Carries out the start-up plan (``plan.plan_start``).

    ``unreadable`` are the records that could not be read. ``at`` is the path or the workload at work.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.unreadable: list[UnreadableRecord] = []
        self.at = ctx.tree.path

    def recover(self) -> list[Problem]:
        """Continue where the last daemon stopped. Returns the problems that an administrator should know."""
        ctx = self._ctx
        self.unreadable = ctx.store.load()
        problems = [Problem(str(item), functools.partial(self._is_kept, item)) for item in self.unreadable]
        with self._reported(ctx.tree.path, problems):
            conditions = host_conditions.found(ctx.tree)
            problems += [Problem(condition(), functools.partial(_lasts, condition)) for condition in conditions]
        if (sums := ctx.store.sums) is not None:
            if reset := sums.load():
                problems.append(Problem(reset, functools.partial(os.path.lexists, sums.set_aside_path)))
            sums.recover(ctx.store.by_key(), {item.key for item in self.unreadable})
        ctx.machine.load()
        for workload in ctx.store.all():
            with self._reported(workload.key, problems), ctx.store.transaction(workload.key) as txn:
                ends.add_unseen_end(ctx, txn)
        plan = plan_start(ctx.store.all(), ctx.tree.scan(), ctx.mark.gid, ctx.mark.boot_id)
        for workload in ctx.store.all():
            excluded.note_pod(ctx, workload)
        # An error with one workload must not keep the others from being served: the next tick tries it again.
        for step in plan.steps:
            with self._reported(step.key, problems), ctx.store.transaction(step.key) as txn:
                self._carry_out(txn, step)
        rmid_queue.serve(ctx, lambda key: self._reported(key, problems))
        for found in plan.leftovers:
            with self._reported(found.path, problems, functools.partial(self._exists, found)):
                problems.extend(self._leftover(found))
        kept: dict[str, list[str]] = {}
        for step in plan.steps:
            if step.do is Do.KEEP:
                kept.setdefault(step.key, []).append(step.group.folder)
        for workload in ctx.store.all():
            # Just before the totals, which need the begin values too: only those of the last 16 runs stay decoded.
            for folder in kept.get(workload.key, ()):
                with self._reported(workload.key, problems), ctx.store.transaction(workload.key) as txn:
                    self._load(txn, folder)
            with self._reported(workload.key, problems), ctx.store.transaction(workload.key) as txn:
                self._complete(txn)
        with self._reported(ctx.snapshots.groups, problems, lambda: True):  # the next start tries it again
            ctx.snapshots.remove_incomplete()
        with self._reported(ctx.tree.path, problems):  # the next start tries it again
            ctx.machine.fold()
        return problems

    @contextlib.contextmanager
    def _reported(
        self, what: str, problems: list[Problem], lasts: Callable[[], bool] = _until_the_first_tick
    ) -> Iterator[None]:
        self.at = what
        try:
            yield
        except (ResctrlError, OSError) as error:
            problems.append(Problem(f"{what}: {error}", lasts))
        except Exception as error:
            # A defect that shows with one workload must not keep the others from being served, at this start and all
            # that follow.
            log.exception("%s: recovery failed unexpectedly", what)
            problems.append(Problem(f"{what}: {error!r}", lasts))

    def _is_kept(self, item: UnreadableRecord) -> bool:
        # If its key is used again, the file is kept under another name.
        return os.path.lexists(item.path) and self._ctx.store.get(item.key) is None

    def _exists(self, found: Found) -> bool:
        return self._ctx.tree.find(found.ref) == found

    def _is_adopted(self, key: str, found: Found) -> bool:
        workload = self._ctx.store.get(key)
        return workload is not None and any(group.nonce == found.nonce for group in workload.existing_groups)

    def _carry_out(self, txn: Transaction, step: Step) -> None:
        ctx = self._ctx
        workload = txn.find()
        if step.group.folder and (workload is None or workload.state.is_over):
            return  # an earlier step found that the workload is lost
        group = txn.workload.group(step.group.folder) or step.group
        match step.do:
            case Do.KEEP:
                if not group.folder:
                    placement.rejoin(ctx, txn)  # for all groups
            case Do.RETRY:
                pass  # with the RMID queue, after all others
            case Do.BASELINE:
                group = location.follow_group(ctx, txn, group)
                # Otherwise it was adopted with its tasks, and the last daemon was killed before it wrote that down.
                has_begin = not (txn.workload.is_claimed_by(RECOVERED) or ctx.tree.tasks(group.ref))
                if not has_begin:
                    ctx.machine.lost("a group with tasks had no begin values")
                placement.adopt(ctx, txn, creation.write_baseline(ctx, txn, group, has_begin=has_begin))
            case Do.FINISH:
                # The first call may have failed to write it.
                ends.add_unseen_end(ctx, txn)
                removal.finish(ctx, txn, group.reason)
            case Do.RECORD_LOSS:
                removal.lose(ctx, txn, "the group was gone when resctrlmond started")

    def _load(self, txn: Transaction, folder: str) -> None:
        """Load the begin values of a group that was kept, and check the links to its counters."""
        workload = txn.find()
        group = workload.group(folder) if workload else None
        if workload is not None and group is not None and group.state is GroupState.CREATED:
            self._ctx.snapshots.load_begin(workload.subfolder(group))
            # A new path may have been recorded before the links were changed (ENOSPC, EIO).
            location.relink(self._ctx, workload, group)

    def _complete(self, txn: Transaction) -> None:
        """Write what the last daemon did not, and end what has ended."""
        ctx = self._ctx
        workload = txn.find()
        if workload is None:
            return
        if not workload.state.is_over:
            # A daemon that was killed may have left a file that is better than the record.
            ctx.quality.update(workload)
        elif not ctx.snapshots.exists(txn.key):
            # Set aside for a run that was never started.
            ctx.snapshots.bring_back(txn.key, workload.generation)
        placement.wake_dormant(ctx, txn)
        ends.record_ends(ctx, txn)

    def _leftover(self, found: Found) -> Iterator[Problem]:
        """Adopt a group with our mark and without a record if it has tasks, else remove it."""
        ctx = self._ctx
        if not self._exists(found):
            return  # a workload had its name, and took it
        exists = functools.partial(self._exists, found)
        name = found.ref.name.removeprefix(ctx.config.settings.group_prefix)
        if any(item.is_of_other_version and item.key == name for item in self.unreadable):
            yield Problem(
                f"{found.path}: has the mark of resctrlmond, and another version wrote its record: not changed",
                exists,
            )
            return
        ctx.machine.lost("a group with the mark of resctrlmond had no record")
        if not ctx.tree.tasks(found.ref):
            ctx.tree.remove(found.ref)
            yield Problem(
                f"{found.path}: had the mark of resctrlmond, but no record and no tasks: removed",
                _until_the_first_tick,
            )
            return
        try:
            key = canonical_key(name)
        except InvalidKey as error:
            yield Problem(
                f"{found.path}: has the mark of resctrlmond, but no record, and its name is not a valid key: {error}",
                exists,
            )
            return
        with ctx.store.transaction(key) as txn:
            is_adopted = self._adopt(txn, found)
        if is_adopted:
            adopted = functools.partial(self._is_adopted, key, found)
            yield Problem(
                f"{found.path}: had the mark of resctrlmond, but no record: adopted with an unknown baseline", adopted
            )
        else:
            yield Problem(
                f"{found.path}: has the mark of resctrlmond, but the record of {key} is about another group: "
                "not changed",
                exists,
            )

    def _adopt(self, txn: Transaction, found: Found) -> bool:
        """Record a group without a record as one of the workload with its name. Return False if that has others."""
        ctx = self._ctx
        group = Group(
            class_=found.ref.class_,
            name=found.ref.name,
            nonce=found.nonce,
            boot_id=ctx.mark.boot_id,
            created_at=utc_now(),
            created_ns=boot_ns(),
        )
        workload = txn.find()
        if workload is None or workload.state.is_over:
            if workload is not None:
                ctx.snapshots.set_aside(txn.key, workload.generation, workload.first.completed_ns)
            generation = workload.generation + 1 if workload else 1
            claims = (Claim(RECOVERED, utc_now(), EndRule.TASKS),)
            txn.save(Workload(key=txn.key, groups=(group,), generation=generation, claims=claims))
        elif workload.is_claimed_by(RECOVERED) and all(found.ref != other.ref for other in workload.groups):
            # A group of the workload was adopted in another class just now.
            group = txn.save_group(replace(group, folder=found.ref.class_ or ROOT_FOLDER))
        else:
            return False
        group = creation.write_baseline(ctx, txn, group, has_begin=False)
        group = replace(group, reason="adopted without its record")
        txn.save(replace(txn.workload.with_group(group), is_active=True))
        return True
