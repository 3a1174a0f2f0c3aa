# SPDX-License-Identifier: Apache-2.0
"""What an operator is told of workloads, records and the mount, each kind of message under its id."""

from __future__ import annotations

import logging
from collections.abc import Callable

from resctrlmond import journal
from resctrlmond.groups.record import Record, State, UnreadableRecord
from resctrlmond.message_ids import MessageId
from resctrlmond.resctrl.errors import NotMounted, NotRead, ResctrlError
from resctrlmond.resctrl.tree import Tree
from resctrlmond.rivals import Rivals

log = logging.getLogger(__name__)


class Notices:
    """Tells of workloads as their records change, once for each thing that happened. From any thread.

    ``rivals`` hears of groups that somebody else removed; None at the start, which cannot know who did.
    ``went_with_mount`` says whether a group that is gone went with the mount that it was on.
    """

    def __init__(self, tree: Tree, went_with_mount: Callable[[Record], bool] = lambda _: False) -> None:
        self._tree = tree
        self._went_with_mount = went_with_mount
        self.rivals: Rivals | None = None
        self._is_mounted = True
        self._mounting = self._told_anew = tree.mounting()
        # The last that was told of each workload, by its generation and what became of which of its groups.
        self._told: dict[str, set[tuple[int, str, State]]] = {}

    def changed(self, key: str, record: Record | None) -> None:
        """A record was written; None: it was dropped."""
        if record is None:
            self._told.pop(key, None)
            return
        for group in record.groups:
            what = (record.generation, group.part, group.state)
            is_news = group.state is State.FAILED or (group.state is State.LOST and not group.part)
            # Freed RMIDs come back by themselves in a second or two.
            is_waiting = group.state is State.PENDING and bool(group.reason) and not group.in_limbo
            if (is_news or is_waiting) and what not in self._told.setdefault(key, set()):
                self._told[key].add(what)
                self._tell(group)

    def _tell(self, group: Record) -> None:
        about = {"key": group.key, "class": group.class_ or "/"}
        match group.state:
            case State.PENDING:
                log.warning(
                    "%s waits for an RMID, and is not counted until then: %s",
                    group.key,
                    group.reason,
                    extra=journal.fields(**about, message_id=MessageId.RMIDS_EXHAUSTED),
                )
            case State.FAILED:
                log.error(
                    "%s is not monitored: %s",
                    group.key,
                    group.reason,
                    extra=journal.fields(**about, message_id=MessageId.GROUP_FAILED),
                )
            case _ if not self.look() or self._is_mounted_anew(group):
                log.info("%s is lost: %s", group.key, group.reason, extra=journal.fields(**about))
            case _:
                if self.rivals is not None:
                    self.rivals.note(group.key)
                log.warning(
                    "%s is lost: %s",
                    group.key,
                    group.reason,
                    extra=journal.fields(**about, message_id=MessageId.GROUP_LOST),
                )

    def tick(self) -> None:
        """Once a second: see whether another filesystem stands where resctrl was, or resctrl does again."""
        # The kernel's table of mounts, which tells for sure, is long on a machine with many containers.
        if self._tree.mounting() != self._mounting:
            self.look()

    def look(self) -> bool:
        """Whether resctrl is mounted, or was when that could be told; a change is told."""
        mounting = self._tree.mounting()
        was, reason = self._is_mounted, ""
        try:
            self._tree.check_mounted()
        except NotMounted as error:
            reason = str(error)
        except NotRead:
            return was  # the next tick looks again; what is to be told is none of the verb's that waits for it
        self._mounting = mounting
        self._is_mounted = not reason
        if was and reason:
            log.error(
                "resctrl was unmounted, and every monitoring group with it: %s",
                reason,
                extra=journal.fields(path=self._tree.path, message_id=MessageId.UNMOUNTED),
            )
        elif not was and not reason:
            log.log(journal.NOTICE, "resctrl is mounted again on %s", self._tree.path)
        return not reason

    def _is_mounted_anew(self, group: Record) -> bool:
        """Whether the group that is gone went with an earlier mounting, between two looks; that is told."""
        if not self._went_with_mount(group):
            return False
        if self._told_anew != self._mounting:
            self._told_anew = self._mounting
            log.error(
                "resctrl was unmounted, and every monitoring group with it, and mounted again on %s",
                self._tree.path,
                extra=journal.fields(path=self._tree.path, message_id=MessageId.UNMOUNTED),
            )
        return True

    @staticmethod
    def unreadable(record: UnreadableRecord) -> None:
        """A record's file says nothing to this version."""
        kind = MessageId.RECORD_OF_OTHER_VERSION if record.is_of_other_version else MessageId.RECORD_DAMAGED
        log.warning("%s", record, extra=journal.fields(path=record.path, message_id=kind))

    @staticmethod
    def unfinished(key: str, error: ResctrlError | OSError) -> None:
        """What must be done for a workload failed; it is tried again each second."""
        log.error("%s: %s", key, error, extra=journal.fields(error, key=key, message_id=MessageId.UNFINISHED))
