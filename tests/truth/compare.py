# SPDX-License-Identifier: Apache-2.0
"""Compare reported figures with the actual use."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

from tests.truth.script import PIECE_NS, What
from tests.truth.world import Life, Use

EXACT, LATE = "exact", "late"
ENERGY, TRAFFIC = "core_energy", "mbm_total_bytes"
GIB = 1 << 30
JOULES_PER_NS = Decimal("2.5e-9")
_PIECE = Use(Decimal(PIECE_NS) * JOULES_PER_NS, PIECE_NS * GIB // 10**9)


@dataclass(frozen=True, slots=True)
class Figure:
    """One event of one workload: ``reported`` is None without a figure, and ``mark`` is "" without one."""

    event: str
    reported: Decimal | None
    used: Decimal
    counted: Decimal
    risked: Decimal
    mark: str

    @property
    def lost(self) -> Decimal:
        return max(Decimal(0), self.used - (self.reported or 0))

    @property
    def twice(self) -> Decimal:
        return max(Decimal(0), (self.reported or 0) - self.used)

    @property
    def is_marked(self) -> bool:
        return self.mark not in ("", EXACT)


def figures(life: Life) -> list[Figure]:
    """Return the figures of energy (joules) and traffic (bytes) of an ended workload."""
    reported = life.reported
    assert reported is not None
    marks = reported.marks
    risked = _PIECE.joules * life.pieces_risked, Decimal(_PIECE.bytes * life.pieces_risked)
    traffic = None if reported.bytes is None else Decimal(reported.bytes)
    return [
        Figure(ENERGY, reported.joules, life.used.joules, life.counted.joules, risked[0], marks.get(ENERGY, "")),
        Figure(
            TRAFFIC, traffic, Decimal(life.used.bytes), Decimal(life.counted.bytes), risked[1], marks.get(TRAFFIC, "")
        ),
    ]


@dataclass
class Tally:
    """The results of all workloads of one agent. ``lost`` and ``twice`` by event, without a mark and with one."""

    name: str
    workloads: int = 0
    exact: int = 0
    marked: int = 0
    needlessly: int = 0  # marked, and yet nothing is missing
    wrong: int = 0
    lost: dict[tuple[str, bool], Decimal] = field(default_factory=dict)
    twice: dict[tuple[str, bool], Decimal] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    used: Use = field(default_factory=Use)
    kills: int = 0
    restarts: int = 0
    pools_exact: int = 0
    pools_estimated: int = 0
    violations: list[str] = field(default_factory=list)

    def merge(self, other: Tally) -> None:
        """Add the results of the same agent on another machine."""
        for name in (
            "workloads",
            "exact",
            "marked",
            "needlessly",
            "wrong",
            "kills",
            "restarts",
            "pools_exact",
            "pools_estimated",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, others in ((self.lost, other.lost), (self.twice, other.twice)):
            for key, amount in others.items():
                mine[key] = mine.get(key, Decimal(0)) + amount
        for mark, count in other.marks.items():
            self.marks[mark] = self.marks.get(mark, 0) + count
        self.used += other.used
        self.violations += other.violations

    def add(self, life: Life, *, judged: bool = True) -> None:
        """Count an ended workload. ``judged``: the promises apply to its agent."""
        self.workloads += 1
        self.used += life.used
        of = figures(life)
        is_right = all(figure.reported == figure.used for figure in of)
        is_marked = any(figure.is_marked for figure in of)
        self.exact += is_right and not is_marked
        self.marked += is_marked
        self.needlessly += is_right and is_marked
        self.wrong += any(figure.reported != figure.used and not figure.is_marked for figure in of)
        for figure in of:
            name = figure.event, figure.is_marked
            self.lost[name] = self.lost.get(name, Decimal(0)) + figure.lost
            self.twice[name] = self.twice.get(name, Decimal(0)) + figure.twice
        if is_marked:
            worst = max(
                (figure.mark for figure in of), key=["", "exact", "late", "estimated", "unknown", "unseen"].index
            )
            self.marks[worst] = self.marks.get(worst, 0) + 1
        if judged:
            workload = f"workload {life.of.number} ({life.of.key[:12]}, {life.reported})"
            self.violations += [f"{workload}: {why}" for figure in of for why in broken(life, figure)]
            self.violations += [f"{workload}: {why}" for why in life.problems]


def broken(life: Life, figure: Figure) -> list[str]:
    """Return the promises that a figure breaks."""
    assert life.reported is not None
    found = []
    if figure.mark == "":
        found.append("is given without a word on how far it can be trusted")
    if figure.mark == EXACT and figure.reported != figure.used:
        found.append("is called exact and is not")
    if figure.twice:
        found.append("is more than was used")
    if figure.mark == LATE and figure.reported != figure.counted:
        found.append("is not what its tasks used in the group")
    if figure.reported is not None and figure.used >= figure.reported > figure.counted:
        found.append("is more than was used in groups of its own")
    # If another program removed the group, at most the use since the last checkpoint is unknown.
    was_removed = life.pieces_at_removal >= 0 and figure.event == ENERGY and not has(life, What.MISREAD)
    if was_removed and figure.reported is not None and figure.counted - figure.reported > figure.risked:
        found.append(f"is short of more than was used since the last checkpoint ({figure.risked})")
    return [
        f"{figure.event} {why}: reported {figure.reported}, used {figure.used}, in groups {figure.counted}"
        for why in found
    ]


def has(life: Life, what: What) -> bool:
    """Return whether an event of this kind happened to the workload."""
    return any(event.what is what for events in life.of.events.values() for event in events)


def _gib(number: Decimal) -> str:
    return f"{number / GIB:.3f}"


def table(tallies: list[Tally]) -> str:
    """Return a table of all tallies, with one figure on each line."""
    rows: list[tuple[str, list[str]]] = [
        ("workloads", [str(one.workloads) for one in tallies]),
        ("exact, to the last digit", [str(one.exact) for one in tallies]),
        ("marked as not exact", [str(one.marked) for one in tallies]),
        ("  of these nothing missing", [str(one.needlessly) for one in tallies]),
        ("wrong, and not marked", [str(one.wrong) for one in tallies]),
        ("energy used, J", [f"{one.used.joules:.6f}" for one in tallies]),
        ("  lost without a mark, J", [f"{one.lost.get((ENERGY, False), 0):.6f}" for one in tallies]),
        ("  lost and marked, J", [f"{one.lost.get((ENERGY, True), 0):.6f}" for one in tallies]),
        ("  counted twice, J", [f"{_both(one.twice, ENERGY):.6f}" for one in tallies]),
        ("traffic used, GiB", [_gib(Decimal(one.used.bytes)) for one in tallies]),
        ("  lost without a mark, GiB", [_gib(one.lost.get((TRAFFIC, False), Decimal(0))) for one in tallies]),
        ("  lost and marked, GiB", [_gib(one.lost.get((TRAFFIC, True), Decimal(0))) for one in tallies]),
        ("  counted twice, GiB", [_gib(_both(one.twice, TRAFFIC)) for one in tallies]),
    ]
    rows.insert(0, ("", [one.name for one in tallies]))
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(tallies))]
    label = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{name:{label}}  " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for name, cells in rows
    )


def _both(amounts: dict[tuple[str, bool], Decimal], event: str) -> Decimal:
    return amounts.get((event, False), Decimal(0)) + amounts.get((event, True), Decimal(0))
