# SPDX-License-Identifier: Apache-2.0
"""``make crash``: every verb, every kind of blow, at every system call; prints what became of each."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from resctrlmond.sim.mount import Simulation
from tests.crash import daemon
from tests.crash.deeds import DEEDS
from tests.crash.harness import Blow, Harness, Struck, report
from tests.crash.verbs import VERBS
from tests.groups.conftest import MARK, Host


def main() -> int:
    """Returns 0 if nothing did harm; 1 after naming each blow that did."""
    parser = argparse.ArgumentParser(prog="tests.crash", description=__doc__)
    parser.add_argument("--verb", choices=VERBS, action="append", help="only this one (may be given again)")
    parser.add_argument(
        "--deed", choices=[*DEEDS, daemon.START], action="append", help="only this one, of the daemon itself"
    )
    parser.add_argument("--blow", choices=[blow.name for blow in Blow], action="append", help="only this kind")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th system call")
    options = parser.parse_args()
    os.setegid(MARK)
    everything = not options.verb and not options.deed
    verbs = options.verb or (VERBS if everything else [])
    deeds = options.deed or ([*DEEDS, daemon.START] if everything else [])
    outcomes: Counter[str] = Counter()
    harm: list[str] = []
    with tempfile.TemporaryDirectory(prefix="resctrlmond-crash-") as top:
        machines = itertools.count()
        for blow in map(Blow.__getitem__, options.blow or Blow.__members__):
            for name in verbs:
                struck = _on_a_machine(os.path.join(top, f"{next(machines)}"), name, blow, options.every)
                outcomes += report(name, blow, struck, harm)
            for name in deeds:
                place = Path(top, f"{next(machines)}")
                with daemon.machine(place, name) as harness:
                    struck = harness.sweep(name, blow, options.every)
                outcomes += report(f"daemon: {name}", blow, struck, harm)
    counted = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    sys.stdout.write(f"{outcomes.total()} points: {counted}; {len(harm)} did harm\n")
    for line in harm:
        sys.stdout.write(f"HARM: {line}\n")
    return 1 if harm else 0


def _on_a_machine(top: str, name: str, blow: Blow, every: int) -> Struck:
    for folder in ("resctrl", "run"):
        os.makedirs(os.path.join(top, folder))
    with Simulation(os.path.join(top, "resctrl"), "intel-rdt", 2000):
        harness = Harness(Host(os.path.join(top, "resctrl"), os.path.join(top, "run")), os.path.join(top, "log"))
        return harness.sweep(name, blow, every)


if __name__ == "__main__":
    raise SystemExit(main())
