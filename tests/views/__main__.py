# SPDX-License-Identifier: Apache-2.0
"""make views: show a simulated machine with 0, 1, 30 and 500 workloads while they end and begin, with each verb.

Print how long each verb took and, with most workloads, the processor time of the daemon and of top; fail if a screen
breaks a rule of tests/views/screens.py.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.rows import cpu_s
from tests.views.screens import WIDTHS, Site, all_faults, site

COUNTS = (0, 1, 30, 500)


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="make views", description=__doc__)
    parser.add_argument("--workloads", type=int, nargs="+", default=COUNTS, help="the numbers of workloads")
    parser.add_argument("--seconds", type=int, default=20, help="how long top runs for its processor time")
    args = parser.parse_args()
    # Not ignored, as in a background job of a shell: "watch" ends with this signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The daemon and its simulator end with the program.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    found = []
    for count in args.workloads:
        with tempfile.TemporaryDirectory(prefix="resctrlmond-views.") as folder, site(Path(folder), count) as of:
            found += all_faults(of, WIDTHS, print)
            _print_cost(of, args.seconds)
    return 1 if found else 0


def _print_cost(of: Site, seconds: int) -> None:
    """Print what top takes while it shows each second, and the daemon meanwhile, and before without it."""
    begun, before = of.begun, cpu_s(of.daemon)
    time.sleep(seconds)
    alone, between = cpu_s(of.daemon) - before, of.begun - begun
    before, own = cpu_s(of.daemon), resource.getrusage(resource.RUSAGE_CHILDREN)
    begun_at = time.monotonic()
    of.ctl(("top", "-b", "-n", str(seconds)), WIDTHS[0])
    # An interval is longer than a second if the daemon takes longer to read all groups.
    shown_s = time.monotonic() - begun_at
    beside = cpu_s(of.daemon) - before
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - own.ru_utime - own.ru_stime
    print(
        f"{of.count:4} workloads, of which {between / seconds:.1f} begin and end each second, on {os.cpu_count()} "
        f"CPUs (load {os.getloadavg()[0]:.0f}): the daemon {100 * alone / seconds:.0f} % of a CPU, "
        f"{100 * beside / shown_s:.0f} % while top shows {seconds} intervals in {shown_s:.0f} s, and top "
        f"{100 * used / shown_s:.0f} %"
    )


if __name__ == "__main__":
    sys.exit(main())
