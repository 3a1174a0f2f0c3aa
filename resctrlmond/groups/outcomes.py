# SPDX-License-Identifier: Apache-2.0
"""What the verbs of the manager answer, where it is more than a record."""

from __future__ import annotations

from dataclasses import dataclass

from resctrlmond.groups.accounting import Total
from resctrlmond.groups.record import Record
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.tasks import Moved


@dataclass(frozen=True, slots=True)
class Assigned:
    """The outcome of Assign. ``descendants``: processes below the target that stayed outside."""

    record: Record
    moved: Moved
    descendants: int = 0


@dataclass(frozen=True, slots=True)
class Released:
    """The outcome of Release: ``completed`` if it was the last claim, and the totals so far."""

    record: Record
    completed: bool
    totals: list[Total]


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What became of an owner's claims; ``failures`` by key."""

    kept: list[str]
    released: list[str]
    failures: dict[str, ResctrlError]
