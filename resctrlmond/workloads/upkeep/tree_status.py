# SPDX-License-Identifier: Apache-2.0
"""Status of the resctrl tree, read with a time limit, so that a blocked kernel is reported and does not block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container

import msgspec

from resctrlmond.resctrl.bandwidth import Bandwidth
from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import NoSuchGroup, NotMounted, ResctrlError, not_read
from resctrlmond.resctrl.tree import Capacity, Found, GroupRef, Tree
from resctrlmond.workloads.evidence.witnessed import Proofs
from resctrlmond.workloads.model.clock import utc_now

# Reading hundreds of groups takes milliseconds, and the kernel holds its mutex for tens of milliseconds at most.
PATIENCE_S = 5.0


class TreeStatus(msgspec.Struct, frozen=True):
    """The status of the resctrl tree at ``time`` (RFC 3339, UTC).

    ``used`` is the number of RMIDs in use, ``foreign`` has each group without the daemon's mark, except in the place
    of a workload's group whose loss is not recorded yet. ``capacity`` and ``bandwidth`` describe the counters of the
    hardware. ``unmounted`` is the reason for an empty status. ``hangs`` is the reason for an old status: the kernel
    has not answered since. ``inexact`` is the reason for which the values of a simulation cannot be exact, and
    ``unwitnessed`` states why the witness cannot be asked.
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
    unwitnessed: str = ""


class _Look(msgspec.Struct):
    begun_at: str
    thread: threading.Thread | None = None
    seen: TreeStatus | None = None
    errors: list[ResctrlError] = msgspec.field(default_factory=list)


class TreeWatcher:
    """A reader of the tree's status with a time limit. Each look at the tree runs in its own thread.

    ``own`` returns the groups of all workloads. They are not looked at: their loss is detected without this.
    While a look is blocked in the kernel, later calls return the last status and start no further thread.
    """

    def __init__(
        self,
        tree: Tree,
        gid: int,
        own: Callable[[], Container[GroupRef]],
        proofs: Proofs,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._tree = tree
        self._proofs = proofs
        self._own = own
        self._gid = gid
        self._patience_s = patience_s
        self._last = TreeStatus("")
        self._hanging: _Look | None = None

    def look(self) -> TreeStatus:
        """Return the current status, or the last one if the kernel does not answer within ``patience_s``.

        Raises ResctrlError.
        """
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

    def read_foreign(self, ref: GroupRef) -> tuple[Found, list[Reading]]:
        """Return a monitoring group of another program, with its current counters. Raises NoSuchGroup."""
        # It has to be one of the existing groups: a path must not be made of what a caller sent.
        found = next((group for group in self.look().foreign if group.ref == ref), None)
        if found is None:
            raise NoSuchGroup(
                f"there is no foreign monitoring group {ref.name} in class {ref.class_ or '/'}",
                remedy="'resctrlctl list' shows the foreign groups",
            )
        return found, self._tree.read(found.ref)

    def _old(self, since: str) -> TreeStatus:
        last = self._last
        shown = f"the state shown is from {last.time}" if last.time else "its state is not known yet"
        hangs = (
            f"{self._tree.path}: no answer since {since}, {shown}. A system call hangs: "
            "the kernel's log (journalctl -k) may show the reason"
        )
        return msgspec.structs.replace(last, hangs=hangs)

    def _look(self, look: _Look) -> None:
        try:
            look.seen = self._see(look.begun_at)
        except ResctrlError as error:
            look.errors.append(error)
        except OSError as error:
            look.errors.append(not_read(error, "look at the tree", self._tree.path))

    def _see(self, time: str) -> TreeStatus:
        try:
            capacity = tuple(self._tree.capacity())
            classes, groups, own = tuple(self._tree.classes()), self._tree.groups(), self._own()
            others = [self._tree.find(group) for group in groups if group not in own]
            bandwidth = self._tree.bandwidth()
        except NotMounted as error:
            return TreeStatus(time, unmounted=error)
        foreign = tuple(found for found in others if found is not None and found.gid != self._gid)
        # Each class (including the root class) and each monitoring group uses an RMID.
        used = len(classes) + len(groups)
        inexact, unwitnessed = self._tree.inexact(), self._proofs.trouble
        return TreeStatus(time, used, foreign, classes, capacity, bandwidth, inexact=inexact, unwitnessed=unwitnessed)
