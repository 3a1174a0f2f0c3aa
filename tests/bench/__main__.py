# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.bench``: measures on a look-alike of resctrl (root, /dev/fuse), and prints a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

from tests.bench.host import compile_modules
from tests.bench.measure import Row, table
from tests.bench.sections import SAMPLE, SECTIONS, WHOLE, measured

LEGEND = """
Medians and 99th percentiles of interleaved rounds; ratio: ours to bare in a round, its median, least and greatest.
* Calls into a look-alike of resctrl with constant counters are much of both sides: each crosses FUSE.
  In the rows on plain files, a copy in memory, a read takes less time than on hardware.
resctrlctl: the least of all rounds on both sides, because nearly all of it is imports.
Release waits 4 ms for the last energy counts of the cores. The daemon has the D-Bus interface unless a row differs.
"""


def machine() -> dict[str, object]:
    """Where and when this is measured, and how busy the machine is by itself."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; all without one")
    parser.add_argument("--sample", action="store_true", help="a few rounds only: the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample to the file")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    compile_modules()
    where = machine()
    rows: list[Row] = []
    for name in arguments.sections or SECTIONS:
        print(f"measuring {name}", file=sys.stderr)
        rows += measured(name, SAMPLE if arguments.sample else WHOLE)
    print(", ".join(f"{name}: {value}" for name, value in where.items()))
    print(table(rows))
    print(LEGEND, end="")
    if arguments.json:
        found = {**where, "rows": [row.as_json() for row in rows]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
