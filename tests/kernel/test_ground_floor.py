# SPDX-License-Identifier: Apache-2.0
"""Run the tests of tests/resctrl, which test the lowest layer on the simulator, on the real kernel."""

from __future__ import annotations

import shutil
from pathlib import Path

from .install import PROJECT
from .machine import Guest

TESTS = ("__init__.py", "conftest.py", "commanded.py", "resctrl")
PARTS = ("pyproject.toml", "resctrlmond", *(f"tests/{name}" for name in TESTS))
THERE = "/root/ground-floor"
PYTEST = "python3 -m pytest tests/resctrl -q --durations=10 -p no:cacheprovider"
RUN = f"cd {THERE} && RESCTRLMOND_TEST_ROOT=/sys/fs/resctrl {PYTEST}"
# The tests with the fixture "place". The others do not use resctrl, and a second machine gives the same results.
IN_RESCTRL = "-k kernel"


def run_inside(guest: Guest, place: Path, options: str = "") -> str:
    """Copy the lowest layer and its tests into the guest, and run them there. Return their output."""
    for part in PARTS:
        source, target = PROJECT / part, place / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    guest.put(place, THERE)
    done = guest.run(f"{RUN} {options} 2>&1", timeout=400, check=False)
    print(done.output)
    assert done.returncode == 0, done.output
    return done.output


def test_the_ground_floor_on_the_real_kernel(guest: Guest, tmp_path: Path) -> None:
    output = run_inside(guest, tmp_path)
    assert " passed" in output
    assert "skipped" not in output


def test_the_ground_floor_on_a_kernel_that_only_monitors(monitoring_guest: Guest, tmp_path: Path) -> None:
    output = run_inside(monitoring_guest, tmp_path, IN_RESCTRL)
    assert " passed" in output
    assert "skipped" not in output
