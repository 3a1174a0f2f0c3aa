# SPDX-License-Identifier: Apache-2.0
"""The reasons for which totals are not exact, as a sheet."""

from __future__ import annotations

from collections.abc import Sequence

from resctrlctl.screen.format import format_message
from resctrlctl.screen.layout import Sheet, Tone


def reasons(totals: Sequence[tuple[str, str]]) -> list[Sheet]:
    """Return a sheet with each reason once, and with its events; none if there is no reason.

    ``totals`` are the name of each event, and its reasons, which "; " separates; "" if the total is exact.
    """
    # A daemon may state a reason twice: for two groups of a workload.
    events: dict[str, dict[str, None]] = {}
    for name, texts in totals:
        for reason in texts.split("; ") if texts else ():
            events.setdefault(format_message(reason), {})[name] = None
    lines: dict[str, list[str]] = {}
    for reason, names in events.items():
        lines.setdefault("all" if len(names) == len(totals) > 1 else ", ".join(names), []).append(reason)
    fields = tuple((names, tuple(found)) for names, found in lines.items())
    return [Sheet("Not exact", fields, Tone.WARNING)] if fields else []
