# SPDX-License-Identifier: Apache-2.0
"""Collect losses of groups, and report another program that seems to remove them, by name if it is known."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from resctrlmond.host.known_programs import NRI_RESCTRL_MON, NRI_RESCTRL_MON_FOLDER, find_processes
from resctrlmond.workloads.model.clock import utc_now

log = logging.getLogger(__name__)

# So many losses within this time are not an accident: nri-resctrl-mon removes groups of unknown pods every 30 s.
MANY, WITHIN_S = 3, 120.0
# An administrator removes the group of a workload once, not twice within this time. workloads/plan.py decides when a
# lost group is created again.
AGAIN_WITHIN_S = 1800.0
_SEARCH_EVERY_S = 60.0


class GroupLosses:
    """The recent losses of groups. Can be called from any thread.

    ``is_ours`` returns whether a directory belongs to this daemon. ``now`` is a clock in seconds that is never set.
    """

    def __init__(self, is_ours: Callable[[str], bool], now: Callable[[], float] = time.monotonic) -> None:
        self._is_ours = is_ours
        self._now = now
        self._guard = threading.Lock()
        self._losses: list[tuple[float, str]] = []
        self._since = ""
        self._suspects = ""
        self._searched = float("-inf")
        self._is_logged = False

    def add(self, key: str) -> None:
        """Record that another program removed a group of the workload while resctrl was mounted."""
        with self._guard:
            self._forget_old()
            if not self._losses:
                self._since = utc_now()
            self._losses.append((self._now(), key))

    def describe(self) -> str:
        """Return a text for the administrator; "" if no other program seems to remove groups. Log it once."""
        with self._guard:
            self._forget_old()
            if not self._is_repeated():
                self._is_logged = False
                return ""
            if self._now() - self._searched >= _SEARCH_EVERY_S:
                self._searched, self._suspects = self._now(), "; or ".join(self._find_suspects())
            text = self._text()
            if not self._is_logged:
                self._is_logged = True
                log.warning("%s", text)
            return text

    def _text(self) -> str:
        suspects = "No program that is known to do this runs here"
        if self._suspects:
            suspects = f"The cause may be {self._suspects}"
        return (
            f"another program removes groups of resctrlmond: {len(self._losses)} since {self._since}, the last one "
            f"of workload {self._losses[-1][1]}, while resctrl is mounted. {suspects}. Stop that program, or "
            "configure it to leave groups with the group id of resctrlmond alone; until then lost groups are created "
            "again after longer and longer delays"
        )

    def _is_repeated(self) -> bool:
        keys = [key for _, key in self._losses]
        recent = sum(time_lost > self._now() - WITHIN_S for time_lost, _ in self._losses)
        return recent >= MANY or len(set(keys)) < len(keys)

    def _forget_old(self) -> None:
        oldest = self._now() - AGAIN_WITHIN_S
        self._losses = [(time_lost, key) for time_lost, key in self._losses if time_lost > oldest]

    def _find_suspects(self) -> Iterator[str]:
        names = set()
        for process in find_processes():
            names.add(process.program.name)
            yield f"{process.comm} (process {process.pid}), which {process.program.effect}"
        folder, program = NRI_RESCTRL_MON_FOLDER, NRI_RESCTRL_MON.name
        if program not in names and os.path.isdir(folder) and not self._is_ours(folder):
            yield f"{program}, because its directory {folder} exists"
