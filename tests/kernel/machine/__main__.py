# SPDX-License-Identifier: Apache-2.0
"""The command line of the test machine: build the guests, or run one shell command in a fresh one."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import packages
from .errors import MachineError
from .machine import Machine
from .profiles import MACHINES, OLDER, PROFILES

MAX_BOOTS = 2  # at the same time; each takes a processor


def main() -> int:
    """Return the exit status: of the command, 125 if it could not be run, 128 plus the signal that killed it."""
    parser = argparse.ArgumentParser(prog="tests.kernel.machine", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build", help="create the saved states that do not exist yet")
    build.add_argument(
        "--profile", choices=list(PROFILES), action="append", help="build only this machine (may be repeated)"
    )
    build.add_argument("--all", action="store_true", help="also build the machines with an older kernel")
    run = verbs.add_parser("run", help="run a shell command in a fresh guest")
    run.add_argument("--profile", choices=list(PROFILES), default="cat")
    run.add_argument("--share", type=Path, help="copy this file or folder to /root/<its name> first")
    run.add_argument("--timeout", type=float, default=120.0, help="seconds, default 120")
    run.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    try:
        if arguments.verb == "build":
            names = [machine.name for machine in (MACHINES + OLDER if arguments.all else MACHINES)]
            packages.require()  # before the threads: only one of them may install
            with ThreadPoolExecutor(MAX_BOOTS) as pool:
                list(pool.map(lambda name: Machine(name).build(), arguments.profile or names))
            return 0
        return _run(arguments)
    except MachineError as error:
        print(f"test machine: {error}", file=sys.stderr)
        return 125


def _run(arguments: argparse.Namespace) -> int:
    with Machine(arguments.profile).start() as guest:
        if arguments.share:
            share = arguments.share.resolve()
            guest.put(share, f"/root/{share.name}")
        completed = guest.run(" ".join(arguments.command), timeout=arguments.timeout, check=False)
    sys.stdout.write(completed.stdout)
    sys.stderr.write(completed.stderr)
    return completed.returncode if completed.returncode >= 0 else 128 - completed.returncode


sys.exit(main())
