# SPDX-License-Identifier: Apache-2.0
"""The rules of tests/conformance, which hold on the simulator, hold on the real kernel: the same files, run in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.table import Outcome, Results, lines

from .conftest import Guests
from .install import PROJECT
from .machine import Guest

PARTS = ("pyproject.toml", "tests/__init__.py", "tests/conformance")
THERE = "/root/conformance"
FOUND = f"{THERE}/results"
PYTEST = "python3 -m pytest tests/conformance -q -p no:cacheprovider"
RUN = f"cd {THERE} && RESCTRL_CONFORMANCE_ROOT=/sys/fs/resctrl RESCTRL_CONFORMANCE_RESULTS={FOUND} {PYTEST} 2>&1"
RESULTS = PROJECT / "build/conformance"


def put(guest: Guest, place: Path) -> None:
    """Put the suite, which needs nothing else of the project, into the guest."""
    for part in PARTS:
        source, target = PROJECT / part, place / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    guest.put(place, THERE)


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """At the end of the run: all targets' results side by side, those of the simulations from their own last run."""

    class Summary:
        def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
            terminalreporter.section("conformance")
            for line in lines(Results.load(RESULTS)):
                terminalreporter.write_line(line)

    request.config.pluginmanager.register(Summary(), "conformance-summary")
    yield


@pytest.mark.timeout(450)
@pytest.mark.parametrize("profile", ["cat", "monitoring-only", "two-domains"])
def test_the_rules_hold_on_the_real_kernel(guests: Guests, profile: str, tmp_path: Path) -> None:
    guest = guests.start(profile)
    put(guest, tmp_path)
    done = guest.run(RUN, timeout=400, check=False)
    print(done.output)
    found = Results()
    for fields in json.loads(guest.read(f"{FOUND}/kernel.json")):
        found.add(f"kernel {profile}", Outcome(*fields))
    found.save(RESULTS)
    assert done.returncode == 0, done.output
    assert " passed" in done.output
    assert "skipped" not in done.output
