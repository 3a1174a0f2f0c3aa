# SPDX-License-Identifier: Apache-2.0
"""A comparison measured in interleaved rounds, and the table of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

Work = Callable[[], object]


class Unit(NamedTuple):
    """The unit of a row's samples, and how people read them."""

    name: str
    show: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: the samples of resctrlmond and those of the shortest other way (``bare``), by round.

    ``fuse`` marks a row in which most of both samples are calls into the look-alike of resctrl. ``goal`` is the
    largest median ratio, or, with ``goal_is_ours``, the largest median of ``ours``.
    """

    what: str
    ours: list[float]
    bare_is: str
    bare: list[float]
    unit: Unit
    fuse: bool = False
    goal: float | None = None
    goal_is_ours: bool = False

    @property
    def ratios(self) -> list[float]:
        """How many times the bare way's figure ours is, round by round: what slows one slows the other."""
        return [ours / bare for ours, bare in zip(self.ours, self.bare, strict=True)]

    @property
    def goal_shown(self) -> str:
        """The goal for people."""
        if self.goal is None:
            return ""
        return f"ours {self.unit.show(self.goal)}" if self.goal_is_ours else f"{self.goal:.2f}"

    def as_json(self) -> dict[str, Any]:
        """The row for programs, with every sample."""
        ratios = self.ratios
        return {
            "row": self.what,
            "unit": self.unit.name,
            "ours": {"median": statistics.median(self.ours), "p99": p99(self.ours), "samples": self.ours},
            "bare": {"median": statistics.median(self.bare), "p99": p99(self.bare), "samples": self.bare},
            "bare_is": self.bare_is,
            "ratio": {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)},
            "goal": self.goal,
            "goal_of": None if self.goal is None else "ours" if self.goal_is_ours else "ratio",
            "mostly_fuse": self.fuse,
        }


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"


SECONDS = Unit("s", _seconds)
MEBIBYTES = Unit("bytes", lambda value: f"{value / 2**20:.1f} MiB")
BYTES = Unit("bytes", "{:.0f} B".format)
COUNT = Unit("", "{:.0f}".format)


def p99(samples: list[float]) -> float:
    """The 99th percentile by the nearest rank: the greatest of fewer than 100 samples."""
    return sorted(samples)[math.ceil(len(samples) * 0.99) - 1]


def interleaved(rounds: int, *works: Work, times: int = 1, before: Work = lambda: None) -> list[list[float]]:
    """Seconds that one call of each work took, in every round; each is preceded by ``before``, which is not timed.

    In a round each work is called ``times`` times. One round more is made first, which does not count.
    """
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for work, samples in zip(works, taken, strict=True):
            before()
            started = time.perf_counter()
            for _ in range(times):
                work()
            samples.append((time.perf_counter() - started) / times)
    return [samples[1:] for samples in taken]


def table(rows: Iterable[Row]) -> str:
    """The rows in columns: medians, 99th percentiles, the median ratio with the least and the greatest, the goal."""
    cells = [("", "ours", "p99", "bare", "p99", "ratio", "(min-max)", "goal", "bare is")]
    for row in rows:
        ratios, show = row.ratios, row.unit.show
        cells.append(
            (
                row.what + " *" * row.fuse,
                show(statistics.median(row.ours)),
                show(p99(row.ours)),
                show(statistics.median(row.bare)),
                show(p99(row.bare)),
                f"{statistics.median(ratios):.2f}",
                f"({min(ratios):.2f}-{max(ratios):.2f})",
                row.goal_shown,
                row.bare_is,
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([what.ljust(widths[0]), *map(str.rjust, figures, widths[1:-1]), bare_is])
        for what, *figures, bare_is in cells
    )
