# SPDX-License-Identifier: Apache-2.0
"""Random mutants that no test can detect, each with the reason. ``make mutate`` does not draw them."""

from __future__ import annotations

from typing import NamedTuple


class Equivalent(NamedTuple):
    """A change (``changes.Change``) without an effect that a caller could see."""

    file: str
    function: str
    text: str
    reason: str


_EVIDENCE = "resctrlmond/workloads/evidence/"
_FIGURES = "resctrlmond/workloads/figures/"
_RECORDS = "resctrlmond/workloads/records/"

EQUIVALENTS = (
    Equivalent(
        _FIGURES + "verdict.py",
        "with_ids",
        "use.at_ns > since_ns -> (use.at_ns >= since_ns)",
        "One nanosecond of the minute in which the last use of a former user is expected.",
    ),
    Equivalent(_RECORDS + "quality_file.py", "", "16 -> (16 + 1)", "The size of a cache."),
    Equivalent(_RECORDS + "quality_file.py", "", "16 -> (16 - 1)", "The size of a cache."),
    Equivalent(
        _RECORDS + "sums.py",
        "Sums._show",
        "1 -> (1 + 1)",
        "Versions are compared only: each later one is higher, by any number.",
    ),
    Equivalent(
        _EVIDENCE + "takeover.py",
        "TakeOver.may_take_for.may_take",
        "late.add(where) -> pass",
        "Saves the same record again for each task of the group, which takes only more time.",
    ),
    *(
        Equivalent(
            _EVIDENCE + "witnessed.py",
            "",
            f"0xEFFFFFFC -> (4026531836 {one})",
            "A constant of the kernel: only a daemon on a real kernel compares it, which tests/kernel runs.",
        )
        for one in ("+ 1", "- 1")
    ),
)
