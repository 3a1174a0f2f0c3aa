# SPDX-License-Identifier: Apache-2.0
"""``make conformance``: many random operations on a real kernel and on the simulator, and what differs, shrunk."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conformance.target import OLDER
from tests.kernel.machine import Guest, Machine

from .compare import difference, shrink
from .generator import LENGTH, Generator, Sequence
from .targets import Execute, on_guest, on_simulation, put

CASES = Path(__file__).parents[1] / "cases"
# Machines of tests/kernel -> whether its pool is small enough to fill; "sim NAME" is the simulation that matches it.
MACHINES = {"cat": True, "monitoring-only": False, "two-domains": True}
EVERY_MACHINE = MACHINES | {name + OLDER: small for name, small in MACHINES.items()}
MOST_SHRUNK = 3  # differences that are worth the time; they tend to be of one kind


def generated(machine: str, seed: int, operations: int) -> list[Sequence]:
    """At least that many operations for a machine."""
    generator = Generator(seed, allocation=not machine.startswith("monitoring-only"), fill=EVERY_MACHINE[machine])
    return [generator.sequence() for _ in range(-(-operations // LENGTH))]


def differences(sequences: list[Sequence], there: Execute, here: Execute) -> Iterator[tuple[Sequence, str]]:
    """The sequences that do not look the same, cut after the first difference, and what it is."""
    with ThreadPoolExecutor() as both:
        kernels = both.submit(there, sequences)
        simulations = both.submit(here, sequences)
    for sequence, kernel, simulation in zip(sequences, kernels.result(), simulations.result(), strict=True):
        if found := difference(sequence, kernel, simulation):
            yield sequence[: found.at + 1], str(found)


def _investigate(machine: str, sequence: Sequence, there: Execute, here: Execute, name: str) -> None:
    """Shrinks a difference and keeps it as a case, with what the kernel shows."""

    def differ(candidates: list[Sequence]) -> list[bool]:
        pairs = zip(candidates, there(candidates), here(candidates), strict=True)
        return [difference(*pair) is not None for pair in pairs]

    if not differ([sequence])[0]:
        print("    does not differ by itself: it needs what came before, or is not deterministic")
        return
    shortest = shrink(sequence, differ)
    for _, told in differences([shortest], there, here):
        print(f"    shortest: {json.dumps(shortest)}\n    {told}")
    save(CASES / f"{name}.json", machine, [shortest], there)


def save(path: Path, machine: str, sequences: list[Sequence], there: Execute) -> None:
    """Keeps sequences with what the kernel shows."""
    case = {"machine": machine, "sequences": sequences, "observations": there(sequences)}
    path.write_text(json.dumps(case, separators=(",", ":")) + "\n")
    print(f"    saved as {path}")


def compare(machine: str, guest: Guest, seed: int, operations: int) -> int:
    """How many sequences differ on that machine; says so."""
    put(guest)
    there, here = on_guest(guest), on_simulation(f"sim {machine}")
    sequences = generated(machine, seed, operations)
    total, begun = sum(map(len, sequences)), time.monotonic()
    found = list(differences(sequences, there, here))
    seconds = time.monotonic() - begun
    print(f"{machine}: seed {seed}, {total} operations, {len(found)} differences, {seconds:.0f} s", flush=True)
    for number, (sequence, told) in enumerate(found):
        print(f"  {told}", flush=True)
        if number < MOST_SHRUNK:
            _investigate(machine, sequence, there, here, f"{machine}-{seed}-{number}")
    return len(found)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python3 -m tests.conformance.differential", description=__doc__)
    made.add_argument("--seed", type=int, help="of the sequences (default: a new one, which is printed)")
    made.add_argument("--operations", type=int, default=12_000, help="in all (default: %(default)s)")
    made.add_argument(
        "--machine", choices=EVERY_MACHINE, action="append", help="only this one; may be given repeatedly"
    )
    made.add_argument("--all", action="store_true", help="those with an older kernel too")
    made.add_argument("--record", metavar="NAME", help="keep the sequences as cases/NAME-MACHINE.json instead")
    return made


def main(arguments: list[str] | None = None) -> int:
    """The exit status is 1 if anything differs."""
    options = parser().parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    machines = options.machine or list(EVERY_MACHINE if options.all else MACHINES)
    differing = 0
    for machine in machines:
        with Machine(machine).start() as guest:
            if options.record:
                put(guest)
                sequences = generated(machine, seed, options.operations // len(machines))
                save(CASES / f"{options.record}-{machine}.json", machine, sequences, on_guest(guest))
            else:
                differing += compare(machine, guest, seed, options.operations // len(machines))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
