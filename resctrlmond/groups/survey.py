# SPDX-License-Identifier: Apache-2.0
"""The tree as a whole, for those who must not wait for it: a kernel that hangs is told, not waited for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from resctrlmond.groups.times import utc_now
from resctrlmond.resctrl.bandwidth import Bandwidth
from resctrlmond.resctrl.errors import NotMounted, ResctrlError, not_read
from resctrlmond.resctrl.tree import Capacity, Found, Tree

# A look at hundreds of groups takes milliseconds; the kernel's mutex is held for tens of them at most.
PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What stood at a time (RFC 3339, UTC): ``used`` RMIDs, every ``foreign`` group, classes, and what is offered.

    ``unmounted`` is why there is nothing of it; ``hangs`` that this is old, for no look at the tree has ended since.
    ``inexact`` is why no figure of a simulation is exact.
    """

    time: str
    used: int = 0
    foreign: tuple[Found, ...] = ()
    classes: tuple[str, ...] = ()
    capacity: tuple[Capacity, ...] = ()
    bandwidth: Bandwidth | None = None
    unmounted: NotMounted | None = None
    hangs: str = ""
    inexact: str = ""


@dataclass(slots=True)
class _Look:
    begun_at: str
    thread: threading.Thread | None = None
    seen: Seen | None = None
    errors: list[ResctrlError] = field(default_factory=list)


class Survey:
    """Looks at the tree, each time in a thread of its own; at a tree that hangs, no more than a few at once."""

    def __init__(self, tree: Tree, gid: int, patience_s: float = PATIENCE_S) -> None:
        self._tree = tree
        self._gid = gid
        self._patience_s = patience_s
        self._last = Seen("")
        self._hanging: _Look | None = None

    def look(self) -> Seen:
        """What stands now; after ``patience_s`` without an answer what was seen last. Raises ResctrlError."""
        hanging = self._hanging
        if hanging is None or hanging.thread is None or not hanging.thread.is_alive():
            look = _Look(utc_now())
            look.thread = threading.Thread(target=self._look, args=(look,), name="survey", daemon=True)
            look.thread.start()
            look.thread.join(self._patience_s)
            if not look.thread.is_alive():
                if look.errors:
                    raise look.errors[0]
                assert look.seen is not None
                self._last = look.seen
                return look.seen
            self._hanging = hanging = look
        return self._old(hanging.begun_at)

    def _old(self, since: str) -> Seen:
        last = self._last
        shown = f"the state shown is from {last.time}" if last.time else "its state is not known yet"
        hangs = (
            f"{self._tree.path}: no answer since {since}, {shown}. A system call hangs: "
            "the kernel's log (journalctl -k) may show the reason"
        )
        return replace(last, hangs=hangs)

    def _look(self, look: _Look) -> None:
        try:
            look.seen = self._see(look.begun_at)
        except ResctrlError as error:
            look.errors.append(error)
        except OSError as error:
            look.errors.append(not_read(error, "look at the tree", self._tree.path))

    def _see(self, time: str) -> Seen:
        try:
            capacity = tuple(self._tree.capacity())
            classes, standing = tuple(self._tree.classes()), self._tree.scan()
            bandwidth = self._tree.bandwidth()
        except NotMounted as error:
            return Seen(time, unmounted=error)
        foreign = tuple(found for found in standing if found.gid != self._gid)
        # Each class takes an RMID, the root's included, and each monitoring group.
        used = len(classes) + len(standing)
        return Seen(time, used, foreign, classes, capacity, bandwidth, inexact=self._tree.inexact())
