# SPDX-License-Identifier: Apache-2.0
"""``make crash``: every verb, every kind of blow, at every system call; prints what became of each."""

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
from tests.crash.blow import Blow
from tests.crash.deeds import DEEDS
from tests.crash.job import Sweep
from tests.crash.sweep import Struck
from tests.crash.verbs import VERBS

_DEEDS = (*DEEDS, daemon.START)


def main() -> int:
    """Returns 0 if nothing did harm; 1 after naming each blow that did."""
    options = _options()
    everything = not options.verb and not options.deed
    blows = [Blow[name] for name in options.blow or Blow.__members__]
    sweeps = [
        Sweep(name, of_daemon, blow, options.sample, options.seed)
        for of_daemon, names in (
            (False, options.verb or (VERBS if everything else ())),
            (True, options.deed or (_DEEDS if everything else ())),
        )
        for name in names
        for blow in blows
    ]
    found = _run(sweeps, options.jobs)
    sys.stdout.write(_table(found))
    harm = [line for _, struck in found for line in struck.harm]
    for line in harm:
        sys.stdout.write(f"HARM: {line}\n")
    return 1 if harm else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.crash", description=__doc__)
    parser.add_argument("--verb", choices=VERBS, action="append", help="only this one (may be given again)")
    parser.add_argument("--deed", choices=_DEEDS, action="append", help="only this one, of the daemon itself")
    parser.add_argument("--blow", choices=Blow.__members__, action="append", help="only this kind")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="only N system calls of each, at random")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at once (default: 1)")
    return parser.parse_args()


def _run(sweeps: list[Sweep], jobs: int) -> list[tuple[Sweep, Struck]]:
    """Run all of them, and report each one as it ends."""
    began = time.monotonic()
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="resctrlmond-crash-") as top,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        running = {pool.submit(_alone, one, os.path.join(top, f"{number}")): one for number, one in enumerate(sweeps)}
        for ended in concurrent.futures.as_completed(running):
            one = running[ended]
            try:
                struck = ended.result()
            except Exception as error:  # the machine itself; the others are to be run all the same
                struck = Struck(Counter(harmed=1), [f"{one.title}, {one.blow.name}: cannot be run: {error!r}"])
            found.append((one, struck))
            minutes = (time.monotonic() - began) / 60
            told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(struck.outcomes.items()))
            sys.stdout.write(
                f"[{len(found):3}/{len(sweeps)}, {minutes:4.0f} min] {one.title:30} {one.blow.name:6} "
                f"{struck.outcomes.total():4} points: {told}\n"
            )
            for line in struck.harm:
                sys.stdout.write(f"HARM: {line}\n")
            sys.stdout.flush()
    return found


def _alone(one: Sweep, top: str) -> Struck:
    """The sweep in a process of its own: what it does to itself, up to its end, is not the next one's."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(one.run, top).result()


def _table(found: list[tuple[Sweep, Struck]]) -> str:
    """Points of each verb by kind of blow, and how many did harm."""
    points: Counter[tuple[str, str]] = Counter()
    order = {one.title: None for one in sorted((one for one, _ in found), key=_place)}
    for one, struck in found:
        for title in (one.title, "all"):
            points[title, one.blow.name] += struck.outcomes.total()
            points[title, "harm"] += len(struck.harm)
    columns = [*Blow.__members__, "harm"]
    rows = [
        ("", *columns),
        *((title, *(f"{points[title, column]}" for column in columns)) for title in (*order, "all")),
    ]
    return "".join(f"{row[0]:30}" + "".join(f"{cell:>8}" for cell in row[1:]) + "\n" for row in rows)


def _place(one: Sweep) -> tuple[bool, int]:
    names = [*_DEEDS] if one.of_daemon else [*VERBS]
    return one.of_daemon, names.index(one.name)


if __name__ == "__main__":
    raise SystemExit(main())
