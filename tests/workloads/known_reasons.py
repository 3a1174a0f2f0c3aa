# SPDX-License-Identifier: Apache-2.0
"""Find the declared reasons in the reason of a total."""

from __future__ import annotations

import functools
import re
import string

from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.model.states import Quality, worst

# The text of an error may have semicolons.
_VALUES = {"cause": ".+", "by": ".+", "word": ".+", "used": "[^;]*", "descendants": "[^;]*", "since": "[^;]*"}


def check_reasons(total: Total) -> None:
    """Check that a total that is not exact has declared reasons, and is no better than they allow."""
    found = reasons_in(total.reason)
    assert found is not None, f"not declared in Reason: {total.reason}"
    assert bool(found) == (total.quality is not Quality.EXACT), total
    for reason in found:
        # One domain without a number makes the sum of the others estimated.
        best = Quality.ESTIMATED if Quality.UNKNOWN in reason.qualities else reason.qualities[0]
        assert worst(total.quality, best) is total.quality, (reason, total)


@functools.cache
def reasons_in(text: str) -> list[Reason] | None:
    """Return the reasons in a text where "; " separates them; None if a part of it is not one."""
    if not text:
        return []
    ends = [match.start() for match in re.finditer("; ", text)] + [len(text)]
    for end in ends:
        for reason in Reason:
            if _pattern(reason).fullmatch(text[:end]):
                rest = reasons_in(text[end + 2 :])
                if rest is not None:
                    return [reason, *rest]
    return None


@functools.cache
def _pattern(reason: Reason) -> re.Pattern[str]:
    pattern = ""
    for literal, field, _, _ in string.Formatter().parse(reason.template):
        pattern += re.escape(literal) + ("" if field is None else _VALUES.get(field, "[^;]+"))
    return re.compile(pattern, re.DOTALL)
