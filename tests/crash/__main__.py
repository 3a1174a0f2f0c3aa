# SPDX-License-Identifier: Apache-2.0
"""``make crash``: every verb, every kind of blow, at every system call; prints what became of each."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

from resctrlmond.sim.mount import Simulation
from tests.crash.harness import Blow, Harness, report
from tests.crash.verbs import VERBS
from tests.groups.conftest import MARK, Host


def main() -> int:
    """Returns 0 if nothing did harm; 1 after naming each blow that did."""
    parser = argparse.ArgumentParser(prog="tests.crash", description=__doc__)
    parser.add_argument("--verb", choices=VERBS, action="append", help="only this one (may be given again)")
    parser.add_argument("--blow", choices=[blow.name for blow in Blow], action="append", help="only this kind")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th system call")
    options = parser.parse_args()
    os.setegid(MARK)
    harm: list[str] = []
    with tempfile.TemporaryDirectory(prefix="resctrlmond-crash-") as top:
        for blow in map(Blow.__getitem__, options.blow or Blow.__members__):
            for name in options.verb or VERBS:
                harm += _on_a_machine(
                    os.path.join(top, f"{blow.name}-{len(harm)}-{len(name)}-{name[-4:]}"), name, blow, options.every
                )
    for line in harm:
        sys.stdout.write(f"HARM: {line}\n")
    return 1 if harm else 0


def _on_a_machine(top: str, name: str, blow: Blow, every: int) -> list[str]:
    for folder in ("resctrl", "run"):
        os.makedirs(os.path.join(top, folder))
    with Simulation(os.path.join(top, "resctrl"), "intel-rdt", 2000):
        harness = Harness(Host(os.path.join(top, "resctrl"), os.path.join(top, "run")), os.path.join(top, "log"))
        try:
            report(name, blow, harness.sweep(name, blow, every))
        except AssertionError as error:
            return [str(error)]
    return []


if __name__ == "__main__":
    raise SystemExit(main())
