# SPDX-License-Identifier: Apache-2.0
"""A comparison measured in interleaved rounds, and the table of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: what we took and what the barest way took, round by round, in seconds or bytes.

    ``fuse`` marks a row in which calls into the simulator are most of both sides.
    """

    what: str
    ours: list[float]
    bare_is: str
    bare: list[float]
    show: Callable[[float], str]
    fuse: bool = False

    @property
    def ratios(self) -> list[float]:
        """How many times the bare way's figure ours is, round by round: what slows one slows the other."""
        return [ours / bare for ours, bare in zip(self.ours, self.bare, strict=True)]


def seconds(value: float) -> str:
    """A time for people."""
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"


def mebibytes(value: float) -> str:
    """A size for people."""
    return f"{value / 2**20:.1f} MiB"


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
    """The rows in columns: medians, and the median ratio with the least and the greatest."""
    cells = [("", "ours", "bare", "ratio", "(min-max)", "bare is")]
    for row in rows:
        ratios = row.ratios
        cells.append(
            (
                row.what + " *" * row.fuse,
                row.show(statistics.median(row.ours)),
                row.show(statistics.median(row.bare)),
                f"{statistics.median(ratios):.2f}",
                f"({min(ratios):.2f}-{max(ratios):.2f})",
                row.bare_is,
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([what.ljust(widths[0]), *map(str.rjust, figures, widths[1:-1]), bare_is])
        for what, *figures, bare_is in cells
    )
