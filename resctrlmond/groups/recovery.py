# SPDX-License-Identifier: Apache-2.0
"""The start: taking up where the last daemon stopped, whatever stopped it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.ends import Ends
from resctrlmond.groups.errors import InvalidKey
from resctrlmond.groups.keys import canonical_key
from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.pending import Pending
from resctrlmond.groups.plan import RECOVERED, Do, Step, baseline_of, recover
from resctrlmond.groups.record import ROOT_PART, Claim, EndRule, Record, State, UnreadableRecord
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.sweeping import Sweeping
from resctrlmond.groups.times import boot_ns, utc_now
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.tree import Found

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """What an operator should know of the start, in a sentence, and whether it still holds."""

    text: str
    lasts: Callable[[], bool]


def _until_the_first_tick() -> bool:
    # The tick tries the work again, and reports it if it still fails.
    return False


class Recovery:
    """Carries out the start-up plan (``plan.recover``). Every step takes the key it works on.

    ``unreadable`` are the records that could not be read. ``at`` is the path, or the workload, that it is at.
    """

    def __init__(
        self, life: Lifecycle, settings: Callable[[], Settings], *, sweeping: Sweeping, pending: Pending, ends: Ends
    ) -> None:
        self.life = life
        self.book = life.book
        self.settings = settings
        self.sweeping = sweeping
        self.pending = pending
        self.ends = ends
        self.unreadable: list[UnreadableRecord] = []
        self.at = life.tree.path

    def recover(self) -> list[Problem]:
        """Take up where the last daemon stopped, whatever stopped it. Returns what an operator should know."""
        self.unreadable = self.book.load()
        problems = [Problem(str(item), functools.partial(self._is_kept, item)) for item in self.unreadable]
        for record in self.book.all():
            with self._reported(record.key, problems):
                self.ends.note_unseen(record.key)
        tree = self.life.tree
        plan = recover(self.book.all(), tree.scan(), self.life.mark.gid, self.life.mark.boot_id)
        # What goes wrong with one is no reason not to serve the others: the ticks will try it again.
        for step in plan.steps:
            with self._reported(step.record.key, problems), self.book.writing(step.record.key):
                self._take_up(step)
        self.pending.serve(lambda key: self._reported(key, problems))
        for found in plan.leftovers:
            with self._reported(found.path, problems, functools.partial(self._stands, found)):
                problems.extend(self._leftover(found))
        for record in self.book.all():
            with self._reported(record.key, problems):
                if record.state.is_over and not self.life.snapshots.exists(record.key):
                    # Set aside for a run that was never begun.
                    self.life.snapshots.bring_back(record.key, record.generation)
                with self.book.writing(record.key):
                    standing = self.book.get(record.key)
                    if standing is not None and not standing.state.is_over:
                        # Killed before it was written, or from a version that wrote none.
                        self.life.quality.update(standing)
                self.sweeping.take_back(record.key)
                self.ends.settle(record.key)
        with self._reported(self.life.snapshots.groups, problems, lambda: True):  # the next start tries it again
            self.life.snapshots.sweep()
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
            # A mistake of ours with one workload keeps nobody from being served, at this start and all that follow.
            log.exception("%s: recovery failed unexpectedly", what)
            problems.append(Problem(f"{what}: {error!r}", lasts))

    def _is_kept(self, item: UnreadableRecord) -> bool:
        # Once its key has a workload again, the file is out of the way under another name.
        return os.path.lexists(item.path) and self.book.get(item.key) is None

    def _stands(self, found: Found) -> bool:
        return self.life.tree.find(found.ref) == found

    def _is_adopted(self, key: str, found: Found) -> bool:
        record = self.book.get(key)
        return record is not None and any(group.nonce == found.nonce for group in record.standing)

    def _take_up(self, step: Step) -> None:
        record = step.record
        if record.part and self._is_over(record.key):
            return  # its workload turned out to be lost
        match step.do:
            case Do.KEEP:
                self.sweeping.rejoin(record)
                # A move may have been noted before its links were changed (ENOSPC, EIO). rejoin may move the group.
                for group in (self.book.get(record.key) or record).standing:
                    if group.part == record.part:
                        self.life.relink(group)
            case Do.RETRY:
                pass  # in its turn, when all others are seen to
            case Do.BASELINE:
                record = self.life.follow_group(record)
                quality = baseline_of(self.book.get(record.key), record)
                self.sweeping.adopt(self.life.baseline(record, quality))
            case Do.FINISH:
                self.life.finish(record, record.reason)
            case _:
                whole = self.book.get(record.key) or record
                self.life.lose(whole, "the group was gone when resctrlmond started")

    def _is_over(self, key: str) -> bool:
        record = self.book.get(key)
        return record is None or record.state.is_over

    def _leftover(self, found: Found) -> Iterator[Problem]:
        """Our mark without a record: adopted if somebody is in it, else removed."""
        if self.life.tree.find(found.ref) != found:
            return  # a record had its name, and took it up
        left = functools.partial(self._stands, found)
        name = found.ref.name.removeprefix(self.settings().group_prefix)
        if any(item.is_of_other_version and item.key == name for item in self.unreadable):
            yield Problem(
                f"{found.path}: has the mark of resctrlmond, and another version wrote its record: not changed", left
            )
            return
        if not self.life.tree.tasks(found.ref):
            self.life.tree.remove(found.ref)
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
                left,
            )
            return
        adopted = functools.partial(self._is_adopted, key, found)
        with self.book.writing(key):
            standing = self.book.get(key)
            if standing is not None and not standing.state.is_over:
                if standing.claimed_by(RECOVERED) and all(found.ref != group.ref for group in standing.groups):
                    # Its workload was found in another class just now.
                    self._take_over(replace(self._unrecorded(key, found), part=found.ref.class_ or ROOT_PART))
                    yield Problem(
                        f"{found.path}: had the mark of resctrlmond, but no record: adopted with an unknown baseline",
                        adopted,
                    )
                    return
                yield Problem(
                    f"{found.path}: has the mark of resctrlmond, but the record of {key} is about another group: "
                    "not changed",
                    left,
                )
                return
            if standing is not None:
                self.life.snapshots.set_aside(key, standing.generation, standing.completed_ns)
            generation = standing.generation + 1 if standing else 1
            claims = (Claim(RECOVERED, utc_now(), EndRule.TASKS),)
            self._take_over(replace(self._unrecorded(key, found), generation=generation, claims=claims))
        yield Problem(
            f"{found.path}: had the mark of resctrlmond, but no record: adopted with an unknown baseline", adopted
        )

    def _unrecorded(self, key: str, found: Found) -> Record:
        return Record(
            key=key,
            class_=found.ref.class_,
            group_name=found.ref.name,
            state=State.PENDING,
            nonce=found.nonce,
            boot_id=self.life.mark.boot_id,
            created_at=utc_now(),
            created_ns=boot_ns(),
        )

    def _take_over(self, record: Record) -> None:
        record = self.life.baseline(self.book.put(record), Quality.UNKNOWN)
        self.book.put(replace(record, state=State.ACTIVE, reason="adopted without its record"))
