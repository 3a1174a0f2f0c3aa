# SPDX-License-Identifier: Apache-2.0
"""Numbers that the metrics of Prometheus and the points of OTLP compute from the same replies."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from resctrlmond.api.types import Sum, SumsReply
from resctrlmond.workloads.model.states import NameKind, Quality

_NUMBER = re.compile(r"[0-9]+\Z", re.ASCII)


def domain_digits(name: str) -> str:
    """Return the number of a domain as its directory has it: "00" for mon_L3_00."""
    number = _NUMBER.search(name)
    return number[0] if number else ""


def domain_number(name: str) -> str:
    """Return the number of a domain as the kernel counts it: "0" for mon_L3_00 and for mon_PERF_PKG_00."""
    number = _NUMBER.search(name)
    return str(int(number[0])) if number else name


def seconds(time: str) -> float:
    """Return a time (RFC 3339) in seconds since the epoch."""
    return datetime.datetime.fromisoformat(time).timestamp()


def ended_runs(sums: SumsReply) -> Mapping[Quality, int]:
    """Return how many runs have ended, by the worst quality of their totals; 0 for a quality that none has."""
    ended = Counter(dict.fromkeys(Quality, 0))
    for of in sums.names:
        # Each grouping has all runs.
        if of.by is NameKind.NAMESPACE:
            ended.update({each.quality: each.runs for each in of.ends})
    return ended


def inexact_ratios(use: Sum, excess: float) -> Iterable[tuple[Quality, float]]:
    """Yield the part of a sum that is late, and the part that is estimated, from 0 to 1; none for an exact sum.

    The part of a sum of 0 is 1. ``excess``: by how much the exported value, which is held, is higher than the sum.
    This part is estimated.
    """
    total = float(use.value or 0) + excess
    if use.late is not None:
        yield Quality.LATE, float(use.late) / total if total else 1.0
    if use.estimated is not None or excess:
        yield Quality.ESTIMATED, (float(use.estimated or 0) + excess) / total if total else 1.0
