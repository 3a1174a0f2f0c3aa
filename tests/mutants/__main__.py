# SPDX-License-Identifier: Apache-2.0
"""``make mutants``: plant each bug of the table in a copy of the tree, and run the tests that must notice it.

Prints which test caught each bug, and which bugs survived. Exits with 1 if a bug survived without a reason, if one
that has a reason was caught, or if a row of the table does not apply.
"""

from __future__ import annotations

import argparse
import sys

from tests.mutants.table import MUTANTS
from tests.mutants.trial import CAUGHT, outcomes


def main() -> int:
    """Run the mutants that are named, or all."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="mutants to run, by a part of the name (default: all)"
    )
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if not options.names or any(name in one.name for name in options.names)]
    if options.list:
        print("\n".join(f"{one.name:50} {one.file}" for one in chosen))
        return 0
    ended = []
    for outcome in outcomes(chosen, options.jobs):
        ended.append(outcome)
        print(f"{outcome.what:8}  {outcome.mutant.name:50}  {outcome.by}", flush=True)
    caught = sum(outcome.what == CAUGHT for outcome in ended)
    print(f"\n{caught} of {len(ended)} caught ({100 * caught / max(1, len(ended)):.0f} %)")
    return 0 if all(outcome.is_expected for outcome in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
