# SPDX-License-Identifier: Apache-2.0
"""Two seconds of make fuzz for each decoder."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.__main__ import TARGETS, run


@pytest.mark.parametrize("name", TARGETS)
def test_no_mutant_makes_a_decoder_stumble(name: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    assert run(TARGETS[name], 2.0, random.Random(f"{seed} {name}")) > 0
