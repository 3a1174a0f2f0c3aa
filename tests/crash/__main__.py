# SPDX-License-Identifier: Apache-2.0
"""``make crash``: inject each kind of fault at each system call of each verb, and print the outcomes."""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter

from tests.crash import daemon
from tests.crash.fault import Fault
from tests.crash.job import Sweep
from tests.crash.operations import OPERATIONS
from tests.crash.sweep import Result
from tests.crash.verbs import VERBS

_OPERATIONS = (*OPERATIONS, daemon.START)


def main() -> int:
    """Return 0 if all checks passed after each fault; otherwise print the faults that failed, and return 1."""
    options = _options()
    everything = not options.verb and not options.operation
    faults = [Fault[name] for name in options.fault or Fault.__members__]
    sweeps = [
        Sweep(name, of_daemon, fault, options.sample, options.seed)
        for of_daemon, names in (
            (False, options.verb or (VERBS if everything else ())),
            (True, options.operation or (_OPERATIONS if everything else ())),
        )
        for name in names
        for fault in faults
    ]
    found = _run(sweeps, options.jobs)
    sys.stdout.write(_table(found))
    failures = [line for _, result in found for line in result.failures]
    for line in failures:
        sys.stdout.write(f"FAILED: {line}\n")
    return 1 if failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.crash", description=__doc__)
    parser.add_argument(
        "--verb", choices=VERBS, action="append", help="only this verb of the manager (may be repeated)"
    )
    parser.add_argument("--operation", choices=_OPERATIONS, action="append", help="only this operation of the daemon")
    parser.add_argument("--fault", choices=Fault.__members__, action="append", help="only this kind of fault")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="only N system calls of each, drawn at random"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of --sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="the number of parallel jobs (default: 1)")
    return parser.parse_args()


def _run(sweeps: list[Sweep], jobs: int) -> list[tuple[Sweep, Result]]:
    """Run all sweeps, and report each when it ends."""
    began = time.monotonic()
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="resctrlmond-crash-") as top,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        running = {
            pool.submit(_run_in_own_process, one, os.path.join(top, f"{number}")): one
            for number, one in enumerate(sweeps)
        }
        for ended in concurrent.futures.as_completed(running):
            one = running[ended]
            try:
                result = ended.result()
            except Exception as error:  # of the machine; the other sweeps still run
                result = Result(Counter(failed=1), [f"{one.title}, {one.fault.name}: cannot be run: {error!r}"])
            found.append((one, result))
            minutes = (time.monotonic() - began) / 60
            counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(result.outcomes.items()))
            sys.stdout.write(
                f"[{len(found):3}/{len(sweeps)}, {minutes:4.0f} min] {one.title:30} {one.fault.name:6} "
                f"{result.outcomes.total():4} points: {counts}\n"
            )
            for line in result.failures:
                sys.stdout.write(f"FAILED: {line}\n")
            sys.stdout.flush()
    return found


def _run_in_own_process(one: Sweep, top: str) -> Result:
    """Run a sweep in a process of its own: it cannot affect the next one."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(one.run, top).result()


def _table(found: list[tuple[Sweep, Result]]) -> str:
    """Return a table with the number of points by verb and kind of fault, and the number of failures."""
    points: Counter[tuple[str, str]] = Counter()
    order = {one.title: None for one in sorted((one for one, _ in found), key=_table_order)}
    for one, result in found:
        for title in (one.title, "all"):
            points[title, one.fault.name] += result.outcomes.total()
            points[title, "failed"] += len(result.failures)
    columns = [*Fault.__members__, "failed"]
    rows = [
        ("", *columns),
        *((title, *(f"{points[title, column]}" for column in columns)) for title in (*order, "all")),
    ]
    return "".join(f"{row[0]:30}" + "".join(f"{cell:>8}" for cell in row[1:]) + "\n" for row in rows)


def _table_order(one: Sweep) -> tuple[bool, int]:
    names = [*_OPERATIONS] if one.of_daemon else [*VERBS]
    return one.of_daemon, names.index(one.name)


if __name__ == "__main__":
    raise SystemExit(main())
