# SPDX-License-Identifier: Apache-2.0
"""The outcome of each rule on each target as a small table: counts by section, and every failed rule by name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple, Self

MOST_NAMED = 20  # for the failed rules of one target


class Outcome(NamedTuple):
    """One rule on one target; its section is the name of its file."""

    section: str
    rule: str
    passed: bool


class Results:
    """Outcomes by target."""

    def __init__(self) -> None:
        self.by_target: dict[str, list[Outcome]] = {}

    def add(self, target: str, outcome: Outcome) -> None:
        """Add an outcome; a rule that failed once stays failed."""
        self.by_target.setdefault(target, []).append(outcome)

    def save(self, folder: Path) -> None:
        """Save one file for each target; keep the file of a target that was not run."""
        folder.mkdir(parents=True, exist_ok=True)
        for target, outcomes in self.by_target.items():
            (folder / f"{target}.json").write_text(json.dumps(outcomes))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load what ``save`` has written."""
        found = cls()
        for file in sorted(folder.glob("*.json")):
            found.by_target[file.stem] = [Outcome(*fields) for fields in json.loads(file.read_text())]
        return found


def lines(results: Results) -> list[str]:
    """Return the table, with a line for each target."""
    targets = list(results.by_target)
    failed = {name: {o.rule for o in outcomes if not o.passed} for name, outcomes in results.by_target.items()}
    shown = {name: {(o.section, o.rule) for o in outcomes} for name, outcomes in results.by_target.items()}
    counts = {name: Counter(section for section, _ in rules) for name, rules in shown.items()}
    sections = sorted({section for count in counts.values() for section in count})
    wide = max([len(target) for target in targets] + [8])
    columns = [*sections, "all", "red"]

    def row(first: str, cells: list[str]) -> str:
        padded = (f"{cell:>{max(len(column), 3)}}" for cell, column in zip(cells, columns, strict=True))
        return f"{first:<{wide}}  " + "  ".join(padded)

    table = [row("rules on", columns)]
    for target in targets:
        cells = [str(counts[target][section] or "-") for section in sections]
        table.append(row(target, [*cells, str(len(shown[target])), str(len(failed[target]))]))
    table += [f"RED on {target}: {rule}" for target in targets for rule in sorted(failed[target])[:MOST_NAMED]]
    return table
