# SPDX-License-Identifier: Apache-2.0
"""Somebody else who removes our groups: told from a single removal, and named where it is a known one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from resctrlmond import others
from resctrlmond.groups.times import utc_now

log = logging.getLogger(__name__)

# So many within the time are no accident: nri-resctrl-mon looks every 30 s for groups of pods that it does not know.
MANY, WITHIN_S = 3, 120.0
# A workload's group is removed once by hand; again within this time it is not. How seldom a group that is lost again
# and again is made anew is decided in groups/plan.py.
AGAIN_WITHIN_S = 1800.0
_LOOK_AGAIN_S = 60.0


class Rivals:
    """The losses of late, and what they say. ``now`` is a clock that nobody sets, in seconds. From any thread."""

    def __init__(self, ours: Callable[[str], bool], now: Callable[[], float] = time.monotonic) -> None:
        """``ours``: whether a folder is one of our own."""
        self._ours = ours
        self._now = now
        self._guard = threading.Lock()
        self._lost: list[tuple[float, str]] = []
        self._since = ""
        self._suspects = ""
        self._looked = float("-inf")
        self._is_told = False

    def note(self, key: str) -> None:
        """A group of that workload was removed, not by us, and resctrl is mounted."""
        with self._guard:
            self._forget()
            if not self._lost:
                self._since = utc_now()
            self._lost.append((self._now(), key))

    def alert(self) -> str:
        """What an operator should know; "" while there is no sign of a rival. Logged when it begins."""
        with self._guard:
            self._forget()
            if not self._is_rivalry():
                self._is_told = False
                return ""
            if self._now() - self._looked >= _LOOK_AGAIN_S:
                self._looked, self._suspects = self._now(), "; or ".join(self._suspected())
            text = self._text()
            if not self._is_told:
                self._is_told = True
                log.warning("%s", text)
            return text

    def _text(self) -> str:
        who = self._suspects or "unknown: none of the programs that are known for it runs here"
        return (
            f"somebody else removes our monitoring groups, {len(self._lost)} since {self._since}, the last one that "
            f"of {self._lost[-1][1]}, while resctrl stays mounted. At fault may be {who}. "
            "Stop it, or keep it from groups with our group id; until then lost groups come back ever more slowly"
        )

    def _is_rivalry(self) -> bool:
        keys = [key for _, key in self._lost]
        late = sum(at > self._now() - WITHIN_S for at, _ in self._lost)
        return late >= MANY or len(set(keys)) < len(keys)

    def _forget(self) -> None:
        self._lost = [(at, key) for at, key in self._lost if at > self._now() - AGAIN_WITHIN_S]

    def _suspected(self) -> Iterator[str]:
        names = set()
        for one in others.running():
            names.add(one.program.name)
            yield f"{one.comm} (process {one.pid}), which {one.program.effect}"
        folder, program = others.NRI_RESCTRL_MON_FOLDER, others.NRI_RESCTRL_MON.name
        if program not in names and os.path.isdir(folder) and not self._ours(folder):
            yield f"{program}, whose folder {folder} stands"
