# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.bench``: measures on a simulated resctrl (root, /dev/fuse) and prints one table of ratios."""

from __future__ import annotations

import tempfile
from pathlib import Path

from resctrlmond.api.varlink.client import Client
from tests.bench import nri, rows
from tests.bench.host import Host, threaded
from tests.bench.measure import Row, table

LEGEND = """
Medians of interleaved rounds; ratio: ours to bare within a round, its median, least and greatest.
* Most of both sides is the simulator: a call into it crosses FUSE to a Python process and takes some hundred times as
  long as one on plain files. The rows on plain files, a copy in memory, show our own share of the work.
resctrlctl: the least of 30 rounds on both sides, because nearly all of it is imports.
Release waits 4 ms for the last energy counts of the cores. Start-up and memory are with the D-Bus interface.
"""


def measured(host: Host) -> list[Row]:
    """Every row, in the order of the table."""
    with host.running():
        found = [*rows.starts(host, 5, 0)]
        with host.daemon() as (daemon, _), Client(host.varlink) as client, threaded(1) as pid:
            found += [
                *rows.hook(host, client, pid),
                *rows.lives(host, client, pid),
                *rows.mounts(host, client, daemon, pid),
                *rows.commands(host, 30),
                *nri.starts(host),
                *rows.listing(host, client),
            ]
        found += rows.starts(host, 3, rows.GROUPS)
        with host.daemon(), Client(host.varlink) as client:
            found += rows.bursts(host, client, 3)
        return [*found, *rows.ground(host)]


def main() -> None:
    """Measure and print."""
    # Where records and snapshots are on a real host, in memory: /run is a tmpfs as well.
    with tempfile.TemporaryDirectory(prefix="resctrlmond-bench.", dir="/dev/shm") as folder:
        print(table(measured(Host(Path(folder)))))
    print(LEGEND, end="")


if __name__ == "__main__":
    main()
