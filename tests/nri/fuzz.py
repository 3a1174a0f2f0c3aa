# SPDX-License-Identifier: Apache-2.0
"""Mutate a conversation repeatedly (make fuzz): python3 -m tests.nri.fuzz [EXECUTIONS [SEED]]."""

from __future__ import annotations

import random
import struct
import sys
import time

from resctrlmond.nri import mux
from tests.nri import hostile

# Lengths and varints at which the behaviour changes.
EDGES = (0, 1, 2, 9, 10, 127, 128, 255, 4096, 4097, 1 << 16, (4 << 20) + 10, (4 << 20) + 11, (1 << 32) - 1)


def mutate(data: bytes, source: random.Random) -> bytes:
    """Change, remove, duplicate or move some of the bytes, or set a length to an edge."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4, 8))):
        at = source.randrange(len(changed) or 1)
        match source.randrange(7):
            case 0:
                changed[at : at + 1] = bytes([source.randrange(256)])
            case 1:
                del changed[at : at + source.choice((1, 2, 8, 64))]
            case 2:
                changed[at:at] = changed[at : at + source.choice((1, 8, 18, 200))]
            case 3:
                changed[at : at + 4] = struct.pack(">I", source.choice(EDGES))
            case 4:
                changed[at:at] = source.randbytes(source.choice((1, 4, 16)))
            case 5:
                changed = changed[:at]
            case _:
                changed[at : at + 1] = bytes([changed[at] ^ 1 << source.randrange(8)]) if changed else b""
    return bytes(changed)


def corpus() -> list[bytes]:
    """Return the conversation, and each of its frames."""
    whole = hostile.conversation()
    frames, at = [], 0
    while at < len(whole):
        (length,) = struct.unpack_from(">I", whole, at + 4)
        frames.append(whole[at : at + 8 + length])
        at += 8 + length
    payload = frames[3][8:]
    return [whole, *frames, mux.frames(mux.PLUGIN, payload * 2)]


def main(executions: int = 1_000_000, seed: int = 1) -> None:
    """Run that many mutants. Print the bytes of a failure, and stop."""
    source = random.Random(seed)
    seeds = corpus()
    began, understood = time.monotonic(), 0
    for number in range(1, executions + 1):
        data = mutate(source.choice(seeds), source)
        cuts = [source.randrange(1 << 12) for _ in range(source.randrange(6))]
        try:
            understood += hostile.check(data, cuts)
        except Exception:
            print(f"execution {number} of seed {seed}: cuts {cuts}, data {data.hex()}", file=sys.stderr)
            raise
        if number % 100_000 == 0:
            rate = number / (time.monotonic() - began)
            print(f"{number} executions, {rate:.0f}/s, {understood} messages understood or refused", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
