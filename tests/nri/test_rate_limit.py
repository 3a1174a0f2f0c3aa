# SPDX-License-Identifier: Apache-2.0
"""The messages that pass into a log that a runtime could fill."""

from __future__ import annotations

import logging

from resctrlmond.service.rate_limit import BURST, INTERVAL_S, LONGEST, RateLimit


class Kept(logging.Handler):
    """Keeps the records that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_each_line_of_code_is_limited_and_reports_dropped_messages() -> None:
    now = [0.0]
    kept = Kept()
    kept.addFilter(RateLimit(lambda: now[0]))
    log = logging.Logger("test", logging.DEBUG)
    log.addHandler(kept)

    def one(number: int) -> None:
        log.warning("number %d of %s", number, "many")

    for number in range(BURST + 7):
        one(number)
    log.warning("another place")
    assert kept.texts == [*(f"number {number} of many" for number in range(BURST)), "another place"]
    now[0] = INTERVAL_S
    kept.texts.clear()
    one(1)
    one(2)
    assert kept.texts == ["number 1 of many (7 more like this one were left out before it)", "number 2 of many"]
    kept.texts.clear()
    for _ in range(2 * BURST):
        log.debug("%s", "asked for")
    assert len(kept.texts) == 2 * BURST


def test_a_long_message_is_cut() -> None:
    kept = Kept()
    kept.addFilter(RateLimit())
    log = logging.Logger("test")
    log.addHandler(kept)
    log.error("%s", "x" * 100_000)
    assert kept.texts == ["x" * LONGEST + "..."]
