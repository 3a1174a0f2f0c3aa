# SPDX-License-Identifier: Apache-2.0
"""``make truth``: compare the reports on thousands of short workloads with their actual use, in one table."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from resctrlmond.sim.profiles import PROFILES
from tests.truth import cases
from tests.truth.compare import Tally, table
from tests.truth.run import NAMES, Part, end_orderly, run

# A machine for each so many: the simulator remembers every task that it ever had.
PART = 250
# One in so many parts is played through the daemon's socket.
BY_DAEMON = 10

LEGEND = """
resctrlmond: its files, Release and Read, which must agree. The others are small models of nri-resctrl-mon and of
goresctrl's pkg/monitor, written from descriptions of their sources, on the same simulated machine; neither marks a
figure. The first does not read counters: its figure is the rise from the first to the last of readings 15 s apart.
The figure of the second is the counter that it exports, read 15 s apart, which begins with the register's value from
former owners of the RMID.
"""


def main() -> int:
    """Compare all reports with the actual use. Print the broken promises, and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="tests.truth", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the seed of the workloads (default: %(default)s)")
    parser.add_argument(
        "--workloads", type=int, default=10_000, metavar="N", help="the number of workloads (default: %(default)s)"
    )
    parser.add_argument("--by-daemon", action="store_true", help="run all workloads through the daemon's socket")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="the number of parallel machines"
    )
    parser.add_argument(
        "--machines",
        nargs="*",
        default=list(PROFILES),
        choices=PROFILES,
        help="the machines for the cases of single workloads (default: all; none: only the short workloads)",
    )
    options = parser.parse_args()
    parts = list(_parts(options.seed, options.workloads, options.by_daemon))
    started = time.monotonic()
    tallies = [Tally(name) for name in NAMES]
    with multiprocessing.get_context("spawn").Pool(options.jobs, end_orderly, maxtasksperchild=1) as pool:
        for part, found in zip(parts, pool.imap(run, parts), strict=True):
            for tally, more in zip(tallies, found, strict=True):
                tally.merge(more)
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{tallies[0].workloads} of {options.workloads}")
            for line in found[0].violations:
                sys.stdout.write(f"BROKEN (make truth TRUTH='{part}'): {line}\n")
            sys.stdout.flush()
        reports = list(pool.imap(cases.play, options.machines))
        # All results are in: wait for the processes that are ending, without a signal.
        pool.close()
        pool.join()
    ours = tallies[0]
    sys.stdout.write(f"\n{table(tallies)}\n{LEGEND}\n")
    marks = ", ".join(f"{count} {mark}" for mark, count in sorted(ours.marks.items()))
    sys.stdout.write(
        f"seed {options.seed}: {ours.kills} kills in the middle of a verb, {ours.restarts} restarts beside; {marks}; "
        f"{len(ours.violations)} promises broken; {time.monotonic() - started:.0f} s\n"
    )
    sys.stdout.write(
        f"pools of the machine: {ours.pools_exact} sums exact and right, {ours.pools_estimated} estimated\n"
    )
    for report in reports:
        for line in report.wrong:
            sys.stdout.write(f"WRONG ({report.profile}): {line}\n")
    if reports:
        sys.stdout.write(f"\n{cases.table(reports)}\n")
    return 1 if ours.violations or any(report.wrong for report in reports) else 0


def _parts(seed: int, workloads: int, by_daemon: bool) -> list[Part]:
    """Divide the workloads into parts of one machine each. Each part has a seed of its own, to repeat it."""
    if workloads <= PART:
        return [Part(seed, workloads, by_daemon)]
    counts = [min(PART, workloads - start) for start in range(0, workloads, PART)]
    return [
        Part(seed * 1000 + number, count, by_daemon or number % BY_DAEMON == BY_DAEMON - 1)
        for number, count in enumerate(counts)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
