# SPDX-License-Identifier: Apache-2.0
"""Log what an administrator should know about workloads, records and the mount, each kind with its message id."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from resctrlmond.daemon.group_losses import GroupLosses
from resctrlmond.host.unit_globs import is_of_user
from resctrlmond.resctrl.errors import NotMounted, NotRead, ResctrlError
from resctrlmond.resctrl.tree import Tree
from resctrlmond.service import journal
from resctrlmond.service.message_ids import MessageId
from resctrlmond.workloads.groups.units import is_unit
from resctrlmond.workloads.model.workload import Group, GroupState, Workload
from resctrlmond.workloads.records.record_format import UnreadableRecord

log = logging.getLogger(__name__)

# A unit may give up its RMID again and again, and a user may start any number of units: each unit, and each user, has
# one warning in this time.
_UNIT_S = 600.0


class Notices:
    """Logs each event of a workload once, as its record changes. Can be called from any thread.

    ``losses`` collects the losses of groups that another program removed; None during the start, because the groups
    may have been removed before it. ``went_with_mount`` returns whether a lost group was lost with the mount that
    held it.
    """

    def __init__(self, tree: Tree, went_with_mount: Callable[[str, Group], bool] = lambda _key, _: False) -> None:
        self._tree = tree
        self._went_with_mount = went_with_mount
        self.losses: GroupLosses | None = None
        self._is_mounted = True
        self._mounting = self._logged_mounting = tree.mounting()
        # The logged events of each workload: its generation, the folder of the group, and the group's state.
        self._logged: dict[str, set[tuple[int, str, GroupState]]] = {}
        # When each unit, or user, had a warning that a unit waits (time.monotonic()). Held for it: ``_warning``.
        self._warned: dict[str, float] = {}
        self._warning = threading.Lock()

    def changed(self, key: str, workload: Workload | None) -> None:
        """Log what is new in a workload that was saved; forget a workload that was removed (None)."""
        try:
            self._changed(key, workload)
        except Exception:
            # The record is written already: the verb must not fail, and others must get the change.
            log.exception("%s: a change could not be logged", key)

    def _changed(self, key: str, workload: Workload | None) -> None:
        if workload is None:
            self._logged.pop(key, None)
            return
        for group in workload.groups:
            event = (workload.generation, group.folder, group.state)
            is_end = group.state is GroupState.FAILED or (group.state is GroupState.LOST and not group.folder)
            # RMIDs in limbo become usable without an action of the administrator.
            is_waiting = group.state is GroupState.PENDING and bool(group.reason) and not group.in_limbo
            if (is_end or is_waiting) and event not in self._logged.setdefault(key, set()):
                self._logged[key].add(event)
                self._log(key, workload, group)

    def _log(self, key: str, workload: Workload, group: Group) -> None:
        fields = {"key": key, "class": group.class_ or "/"}
        match group.state:
            case GroupState.PENDING:
                of_unit = is_unit(workload)
                log.log(
                    self._level_of_unit(key) if of_unit else logging.WARNING,
                    "%s waits for an RMID, and %s until then: %s",
                    key,
                    # It may share a group.
                    "has no figures of its own" if of_unit else "is not counted",
                    group.reason,
                    extra=journal.fields(**fields, message_id=MessageId.RMIDS_EXHAUSTED),
                )
            case _ if group.observed:
                # Its owner removes it when the container ends, perhaps before the daemon has read it.
                log.info("%s ended: %s", key, group.reason, extra=journal.fields(**fields))
            case GroupState.FAILED:
                log.error(
                    "%s is not monitored: %s",
                    key,
                    group.reason,
                    extra=journal.fields(**fields, message_id=MessageId.GROUP_FAILED),
                )
            case _ if not self.check_mount() or self._went_with_earlier_mount(workload.key, group):
                log.info("%s is lost: %s", key, group.reason, extra=journal.fields(**fields))
            case _:
                if self.losses is not None:
                    self.losses.add(key)
                log.warning(
                    "%s is lost: %s",
                    key,
                    group.reason,
                    extra=journal.fields(**fields, message_id=MessageId.GROUP_LOST),
                )

    def _level_of_unit(self, key: str) -> int:
        """Return the level at which to log that a unit waits: a warning, unless there was one within ``_UNIT_S``."""
        unit_or_user = key.partition(":")[0] if is_of_user(key) else key
        with self._warning:
            now = time.monotonic()
            self._warned = {one: at for one, at in self._warned.items() if now - at < _UNIT_S}
            if unit_or_user in self._warned:
                return logging.DEBUG
            self._warned[unit_or_user] = now
            return logging.WARNING

    def tick(self) -> None:
        """Check the mount if another filesystem may be mounted there than a second ago."""
        # The kernel's table of mounts is exact, but long on a machine with many containers.
        if self._tree.mounting() != self._mounting:
            self.check_mount()

    def check_mount(self) -> bool:
        """Return whether resctrl is mounted; log a change. Return the last answer if it cannot be read."""
        mounting = self._tree.mounting()
        was_mounted, reason = self._is_mounted, ""
        try:
            self._tree.check_mounted()
        except NotMounted as error:
            reason = str(error)
        except NotRead:
            return was_mounted  # the next tick tries again; the verb that waits for this must not fail
        self._mounting = mounting
        self._is_mounted = not reason
        if was_mounted and reason:
            log.error(
                "resctrl was unmounted, and every monitoring group with it: %s",
                reason,
                extra=journal.fields(path=self._tree.path, message_id=MessageId.UNMOUNTED),
            )
        elif not was_mounted and not reason:
            log.log(journal.NOTICE, "resctrl is mounted again on %s", self._tree.path)
        return not reason

    def _went_with_earlier_mount(self, key: str, group: Group) -> bool:
        """Return whether the group was lost because resctrl was mounted again between two checks; log that once."""
        if not self._went_with_mount(key, group):
            return False
        if self._logged_mounting != self._mounting:
            self._logged_mounting = self._mounting
            log.error(
                "resctrl was unmounted, and every monitoring group with it, and mounted again on %s",
                self._tree.path,
                extra=journal.fields(path=self._tree.path, message_id=MessageId.UNMOUNTED),
            )
        return True

    @staticmethod
    def unreadable(record: UnreadableRecord) -> None:
        """Log a record that this version cannot read."""
        kind = MessageId.RECORD_OF_OTHER_VERSION if record.is_of_other_version else MessageId.RECORD_DAMAGED
        log.warning("%s", record, extra=journal.fields(path=record.path, message_id=kind))

    @staticmethod
    def unfinished(key: str, error: ResctrlError | OSError) -> None:
        """Log work for a workload that failed and is tried again each second."""
        log.error("%s: %s", key, error, extra=journal.fields(error, key=key, message_id=MessageId.UNFINISHED))
