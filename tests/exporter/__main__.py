# SPDX-License-Identifier: Apache-2.0
"""Scrape an exporter with a real Prometheus while short workloads come and go (make churn)."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.exporter.churn import churn


def main() -> int:
    """Print what was seen; return 1 if a counter fell, an end was missed, or a sum was not the use."""
    parser = argparse.ArgumentParser(prog="python -m tests.exporter", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="(%(default)s)")
    parser.add_argument("--interval", type=int, default=5, metavar="SECONDS", help="of scrapes (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resctrlmond-churn.") as folder:
        outcome = churn(Path(folder), options.minutes * 60, options.interval)
    print(
        f"{outcome.workloads} workloads, {outcome.short} of which lived less than {options.interval} s, "
        f"{outcome.kills} kills, {outcome.samples} samples of counters, {outcome.points} points, "
        f"{outcome.starts} new starts, {len(outcome.faults)} faults"
    )
    print("ended: " + ", ".join(f"{number} {quality}" for quality, number in sorted(outcome.ended.items())))
    for fault in outcome.faults[:50]:
        print(fault)
    return 1 if outcome.faults or not outcome.workloads else 0


if __name__ == "__main__":
    sys.exit(main())
