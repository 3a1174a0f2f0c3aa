# SPDX-License-Identifier: Apache-2.0
"""Know which directories of resctrl other programs create and remove, from inotify.

A group that is gone is lost, and its workload with it. A new one may be gone before the pools are read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from resctrlmond.resctrl.foreign_directories import ForeignDirectories
from resctrlmond.resctrl.tree import GroupRef, Tree

log = logging.getLogger(__name__)

# A reading waits so long for a thread that processes events: it may hang in the kernel.
_EVENTS_WAIT_S = 2.0


class Interference:
    """Watches the directories of the tree. Thread-safe."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        # Called with the directories that other programs created, and when events were lost.
        self.on_created: Callable[[Iterable[str]], None] = lambda _directories: None
        self.on_events_lost: Callable[[], None] = lambda: None
        self._foreign: ForeignDirectories | None = None
        self._events_lock = threading.Lock()
        self._hangs = False
        self._trouble = ""

    def start(self) -> None:
        """Watch the tree from now on."""
        self._foreign = ForeignDirectories(self._tree.path)
        self.update()

    def close(self) -> None:
        """Stop watching the tree."""
        if self._foreign is not None:
            self._foreign.close()
            self._foreign = None

    def update(self) -> None:
        """Watch all directories after a mount or an error, and process the events until now."""
        foreign = self._foreign
        if foreign is None:
            return
        foreign.update_watches(self._tree.mounting())
        if foreign.trouble != self._trouble:
            self._trouble = foreign.trouble
            if self._trouble:
                log.warning("groups that other programs create or remove are found late: %s", self._trouble)
            else:
                log.info("groups that other programs create or remove are found at once again")
        self._read_events(wait_s=0)

    @property
    def has_trouble(self) -> bool:
        """Whether some changes of other programs are not reported."""
        return self._foreign is None or bool(self._foreign.trouble)

    # -- creation and end of a group

    def creating(self, ref: GroupRef) -> AbstractContextManager[None]:
        """Expect a new group of the daemon, which the block creates and watches."""
        return self._foreign.expecting(ref.path) if self._foreign is not None else contextlib.nullcontext()

    def watch(self, ref: GroupRef) -> None:
        """Watch a new group of the daemon."""
        if self._foreign is not None:
            self._foreign.watch(ref.path)

    def take_gone(self) -> set[str] | None:
        """Return the classes and groups that were removed or renamed since the last call; None if any may have been.

        Each is a path relative to the tree, also that of ``mon_groups`` of a removed class.
        """
        foreign = self._foreign
        if foreign is None:
            return None
        # Before the events: if a mount comes in between, its groups are found missing by the next call.
        mounting = self._tree.mounting()
        # Does not wait for a thread that may hang in the kernel: what that has read is returned by a later call.
        self._read_events(wait_s=0)
        return foreign.take_gone(mounting)

    def reports_removal(self, ref: GroupRef) -> bool:
        """Whether ``take_gone`` will return the group or its class when it is removed or renamed."""
        return self._foreign is not None and self._foreign.is_watched(ref.path)

    # -- events

    def read_events(self) -> bool:
        """Read and process the events until now. Return False if another thread that has read some hangs.

        The caller must not hold a lock that the processing needs. Only the first call waits for that thread.
        """
        self._hangs = not self._read_events(wait_s=0 if self._hangs else _EVENTS_WAIT_S)
        return not self._hangs

    def _read_events(self, *, wait_s: float) -> bool:
        """Read and process the events. Return whether all until now are processed.

        Another thread may have read events and not processed them yet. Wait for it for ``wait_s`` at most.
        """
        if not self._events_lock.acquire(blocking=wait_s != 0, timeout=wait_s or -1):
            return False
        try:
            if self._foreign is not None and (changes := self._foreign.take()):
                self.on_created(changes.created)
                if changes.is_lost:
                    self.on_events_lost()
            return True
        finally:
            self._events_lock.release()
