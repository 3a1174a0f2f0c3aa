# SPDX-License-Identifier: Apache-2.0
"""``python3 -m resctrlmond.sim MOUNTPOINT``: mounts a simulated resctrl until it is told to end."""

from __future__ import annotations

import argparse
import sys

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.sim.mount import serve
from resctrlmond.sim.profiles import PROFILES, profile_named


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python3 -m resctrlmond.sim",
        description="Mount a simulated resctrl filesystem. Its counters follow a fixed model on the CPU time of "
        "the real tasks in its groups; nothing in it is a measurement.",
    )
    made.add_argument("mountpoint", metavar="MOUNTPOINT", help="an empty directory")
    made.add_argument("--profile", default="intel-aet", choices=PROFILES, help="the machine (default: %(default)s)")
    made.add_argument("--rmids", type=int, metavar="N", help="how many RMIDs it has, root's own included")
    made.add_argument("--domains", type=int, metavar="N", help="how many L3 caches and packages it has")
    made.add_argument(
        "--residue",
        type=int,
        metavar="SEED",
        help="telemetry begins with a pseudo-random history of every RMID, instead of Unavailable",
    )
    made.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Serves; returns the exit status: 0 after an orderly end, 1 if the simulation could not be mounted."""
    options = parser().parse_args(arguments)
    try:
        profile = profile_named(options.profile, rmids=options.rmids, domains=options.domains)
        serve(options.mountpoint, profile, options.residue, until_eof=options.until_eof)
    except (ResctrlError, ValueError) as failure:
        print(f"resctrlmond.sim: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
