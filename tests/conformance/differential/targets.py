# SPDX-License-Identifier: Apache-2.0
"""Execute sequences in a simulation on this host, or on the real kernel in a guest."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .executor import Observation
from .generator import Sequence

if TYPE_CHECKING:
    from tests.kernel.machine import Guest

PROJECT = Path(__file__).parents[3]
PARTS = ("pyproject.toml", "tests/__init__.py", "tests/conformance")
THERE = "/root/conformance"
MODULE = "tests.conformance.differential.executor"
AT_ONCE = 10  # sequences in one go: few enough for the time-out, where several guests share a processor

Execute = Callable[[list[Sequence]], list[list[Observation]]]


def put(guest: Guest) -> None:
    """Copy the suite, which needs no other part of the project, into the guest."""
    with tempfile.TemporaryDirectory() as place:
        for part in PARTS:
            source, target = PROJECT / part, Path(place, part)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        guest.put(Path(place), THERE)


def _in_parts(execute: Execute) -> Execute:
    def all_of(sequences: list[Sequence]) -> list[list[Observation]]:
        starts = range(0, len(sequences), AT_ONCE)
        return [found for start in starts for found in execute(sequences[start : start + AT_ONCE])]

    return all_of


def on_simulation(name: str, environment: dict[str, str] | None = None) -> Execute:
    """Return a function that executes sequences in a simulation, by its name in ``SIMULATIONS``."""

    def execute(sequences: list[Sequence]) -> list[list[Observation]]:
        with tempfile.TemporaryDirectory() as place:
            source, result = Path(place, "in"), Path(place, "out")
            source.write_text(json.dumps(sequences))
            command = [sys.executable, "-m", MODULE, name, str(source), str(result)]
            subprocess.run(command, cwd=PROJECT, env=environment, check=True, timeout=600)
            found: list[list[Observation]] = json.loads(result.read_text())
            return found

    return _in_parts(execute)


def on_guest(guest: Guest) -> Execute:
    """Return a function that executes sequences on the kernel of a guest that has the suite."""

    def execute(sequences: list[Sequence]) -> list[list[Observation]]:
        guest.write(f"{THERE}/in", json.dumps(sequences))
        where = f"cd {shlex.quote(THERE)} && RESCTRL_CONFORMANCE_ROOT=/sys/fs/resctrl"
        guest.run(f"{where} python3 -m {MODULE} kernel in out", timeout=600)
        found: list[list[Observation]] = json.loads(guest.read(f"{THERE}/out"))
        return found

    return _in_parts(execute)
