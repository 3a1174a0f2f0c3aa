# SPDX-License-Identifier: Apache-2.0
"""``make conformance``: many random operations on a real kernel and on the simulator, with each difference shrunk."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.conformance.target import OLDER
from tests.kernel.machine import Guest, Machine

from .compare import difference, shrink
from .generator import LENGTH, Generator, Sequence
from .targets import AT_ONCE, Execute, on_guest, on_simulation, put

CASES = Path(__file__).parents[1] / "cases"
# Machines of tests/kernel -> whether its pool is small enough to fill; "sim NAME" is the simulation that matches it.
MACHINES = {"cat": True, "monitoring-only": False, "two-domains": True, "no-occupancy": True}
EVERY_MACHINE = MACHINES | {name + OLDER: small for name, small in MACHINES.items()}
MOST_SHRUNK = 3  # differences that are worth the time; they tend to be of one kind


def generated(machine: str, seed: int, operations: int) -> list[Sequence]:
    """Return sequences with at least a number of operations for a machine."""
    allocation, two = machine.startswith(("cat", "two-domains")), machine.startswith("two-domains")
    generator = Generator(seed, allocation=allocation, fill=EVERY_MACHINE[machine], switch=two)
    return [generator.sequence() for _ in range(-(-operations // LENGTH))]


def differences(sequences: list[Sequence], there: Execute, here: Execute) -> Iterator[tuple[Sequence, str]]:
    """Yield the sequences with a difference, cut after the first one, with its description."""
    with ThreadPoolExecutor() as both:
        kernels = both.submit(there, sequences)
        simulations = both.submit(here, sequences)
    for sequence, kernel, simulation in zip(sequences, kernels.result(), simulations.result(), strict=True):
        if found := difference(sequence, kernel, simulation):
            yield sequence[: found.at + 1], str(found)


def _investigate(machine: str, sequence: Sequence, there: Execute, here: Execute, name: str) -> None:
    """Shrink a difference, and save it as a case with the results of the kernel."""

    def differ(candidates: list[Sequence]) -> list[bool]:
        pairs = zip(candidates, there(candidates), here(candidates), strict=True)
        return [difference(*pair) is not None for pair in pairs]

    if not differ([sequence])[0]:
        print("    does not differ by itself: it needs what came before, or is not deterministic")
        return
    shortest = shrink(sequence, differ)
    for _, text in differences([shortest], there, here):
        print(f"    shortest: {json.dumps(shortest)}\n    {text}")
    save(CASES / f"{name}.json", machine, [shortest], there)


def save(path: Path, machine: str, sequences: list[Sequence], there: Execute) -> None:
    """Save sequences with the results of the kernel."""
    case = {"machine": machine, "sequences": sequences, "observations": there(sequences)}
    path.write_text(json.dumps(case, separators=(",", ":")) + "\n")
    print(f"    saved as {path}")


class Total(NamedTuple):
    """The number of operations on a machine, and of the sequences that differ."""

    operations: int
    differing: int


def compare(machine: str, guest: Guest, seed: int, operations: int) -> Total:
    """Run operations on the machine and on its simulation, and print each difference."""
    put(guest)
    there, here = on_guest(guest), on_simulation(f"sim {machine}")
    sequences = generated(machine, seed, operations)
    total, begun, found = sum(map(len, sequences)), time.monotonic(), 0
    for start in range(0, len(sequences), AT_ONCE):
        if start:
            print(f"{machine}: {start * LENGTH} operations, {found} differences so far", flush=True)
        for sequence, text in list(differences(sequences[start : start + AT_ONCE], there, here)):
            print(f"{machine}: seed {seed}: {text}", flush=True)
            if found < MOST_SHRUNK:
                _investigate(machine, sequence, there, here, f"{machine}-{seed}-{found}")
            found += 1
    seconds = time.monotonic() - begun
    print(f"{machine}: seed {seed}, {total} operations, {found} differences, {seconds:.0f} s", flush=True)
    return Total(total, found)


def record(machine: str, guest: Guest, name: str, seed: int, operations: int) -> Total:
    """Save operations with the results of the kernel as a case."""
    put(guest)
    sequences = generated(machine, seed, operations)
    save(CASES / f"{name}-{machine}.json", machine, sequences, on_guest(guest))
    return Total(sum(map(len, sequences)), 0)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python3 -m tests.conformance.differential", description=__doc__)
    made.add_argument("--seed", type=int, help="of the sequences (default: a new one, which is printed)")
    made.add_argument("--operations", type=int, default=12_000, help="in all (default: %(default)s)")
    made.add_argument(
        "--machine", choices=EVERY_MACHINE, action="append", help="only this one; may be given repeatedly"
    )
    made.add_argument("--guests", type=int, default=3, help="how many machines run at a time (default: %(default)s)")
    made.add_argument("--all", action="store_true", help="those with an older kernel too")
    made.add_argument("--record", metavar="NAME", help="keep the sequences as cases/NAME-MACHINE.json instead")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Compare or record. Return 1 if there is a difference."""
    options = parser().parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    machines = options.machine or list(EVERY_MACHINE if options.all else MACHINES)
    share = -(-options.operations // len(machines))

    def run(machine: str) -> Total:
        with Machine(machine).start() as guest:
            if options.record:
                return record(machine, guest, options.record, seed, share)
            return compare(machine, guest, seed, share)

    print(f"seed {seed}: {options.operations} operations on {', '.join(machines)}", flush=True)
    with ThreadPoolExecutor(options.guests) as pool:
        totals = list(pool.map(run, machines))
    operations, differing = (sum(numbers) for numbers in zip(*totals, strict=True))
    done = f"all: {operations} operations on {len(machines)} machines, seed {seed}, {differing} differences"
    print(done, flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
