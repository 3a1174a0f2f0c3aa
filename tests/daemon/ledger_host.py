# SPDX-License-Identifier: Apache-2.0
"""A host whose daemons send the entries of ended workloads to a journal that outlives them."""

from __future__ import annotations

import json
from collections.abc import Collection
from decimal import Decimal
from pathlib import Path

from resctrlmond.daemon.ledger import Ledger, run_of
from resctrlmond.workloads.model.states import NameKind, Quality
from tests.workloads.conftest import Host


class FileJournal:
    """A journal as a file: each entry is a line. Refuses all entries unless ``accepts``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.accepts = True
        self.path.touch()

    def deliver(self, entry: dict[str, str]) -> bool:
        """Write an entry in one system call; return whether that succeeded."""
        if not self.accepts:
            return False
        try:
            with open(self.path, "ab", buffering=0) as file:
                file.write(json.dumps(entry).encode() + b"\n")
        except OSError:
            return False
        return True

    def entries(self) -> list[dict[str, str]]:
        """Return all entries."""
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]

    def recorded(self, runs: Collection[str]) -> set[str] | None:
        """Return which of these runs have an entry; None if the file cannot be read."""
        try:
            return {entry["RESCTRLMON_RUN"] for entry in self.entries()} & set(runs)
        except OSError:
            return None


class LedgerHost(Host):
    """A host with a ledger. Each restart is that of a daemon that was killed."""

    def __init__(self, mountpoint: str, run: str, journal: FileJournal) -> None:
        self.journal = journal
        super().__init__(mountpoint, run)

    def before_recovery(self) -> None:
        self.ledger = Ledger(
            f"{self.run}/ledger", "boot", self.journal, self.ctx.quality.final_totals, self.journal.recorded
        )
        self.ctx.store.before_finish = self.ledger.record

    def after_recovery(self) -> None:
        self.ledger.started()
        self.ledger.settle()

    def check_ledger(self) -> None:
        """Check that each finished run has one entry, and a second one only if it states that it may be one."""
        sent = [
            entry["RESCTRLMON_RUN"] for entry in self.journal.entries() if "RESCTRLMON_POSSIBLE_SECOND" not in entry
        ]
        assert len(set(sent)) == len(sent), "a run has two entries"
        ended = {run_of(workload, "boot") for workload in self.ctx.store.finished()}
        recorded = self.journal.recorded(ended)
        assert recorded == ended, "an ended run has no entry"
        assert self.ledger.describe() == ""

    def check_sums(self) -> None:
        """Check that the sums have each run of the journal once, with its totals, and no other run."""
        store = self.ctx.store
        found = self.manager.usages.sums.read([], float("inf"), store.get, list(NameKind))
        runs = {entry["RESCTRLMON_RUN"]: entry for entry in self.journal.entries()}
        prefix = "RESCTRLMON_TOTAL_"
        truth: dict[str, Decimal] = {}
        for entry in runs.values():
            for field in (name for name in entry if name.startswith(prefix)):
                event = field.removeprefix(prefix).lower()
                truth[event] = truth.get(event, Decimal(0)) + Decimal(entry[field])
        for grouping, names in found.names.items():
            assert sum(sum(one.ends.values()) for one in names) == len(runs), grouping
            used: dict[str, Decimal] = {}
            for one in names:
                for event, amounts in one.amounts.items():
                    numbers = [number for quality, number in amounts.items() if quality is not Quality.UNKNOWN]
                    if numbers:
                        used[event] = used.get(event, Decimal(0)) + sum(numbers)
            assert used == truth, grouping
