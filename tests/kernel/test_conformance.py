# SPDX-License-Identifier: Apache-2.0
"""Run the rules of tests/conformance, which the simulator follows, on the real kernel: the same files, in a guest."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.conformance.differential.__main__ import CASES, MACHINES, differences, generated
from tests.conformance.differential.compare import difference
from tests.conformance.differential.targets import THERE, on_guest, on_simulation, put
from tests.conformance.table import Outcome, Results, lines

from .conftest import Guests
from .install import PROJECT
from .test_witness import PROGRAM, make

FOUND = f"{THERE}/results"
# The recorded sequences are for the simulator; the kernel runs random ones below.
IGNORE = "--ignore=tests/conformance/test_differential.py"
PYTEST = f"python3 -m pytest tests/conformance -q -p no:cacheprovider {IGNORE}"
RUN = f"cd {THERE} && RESCTRL_CONFORMANCE_ROOT=/sys/fs/resctrl RESCTRL_CONFORMANCE_RESULTS={FOUND} {PYTEST} 2>&1"
SEED, OPERATIONS = 8, 150  # make conformance runs many more, with another seed each time
RESULTS = PROJECT / "build/conformance"


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print the results of all targets at the end; those of the simulations are from their own last run."""

    class Summary:
        def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
            terminalreporter.section("conformance")
            for line in lines(Results.load(RESULTS)):
                terminalreporter.write_line(line)

    request.config.pluginmanager.register(Summary(), "conformance-summary")
    yield


@pytest.mark.parametrize("profile", MACHINES)
def test_the_rules_hold_on_the_real_kernel(guests: Guests, profile: str) -> None:
    guest = guests.start(profile)
    put(guest)
    # Its load patches the kernel's code, which has panicked guests with several CPUs.
    if profile != "two-domains":
        guest.put(make("resctrlmond-witness"), PROGRAM)
        guest.run(f"groupadd --system resctrlmon && {PROGRAM} load")
    done = guest.run(RUN, timeout=400, check=False)
    print(done.output)
    found = Results()
    for fields in json.loads(guest.read(f"{FOUND}/kernel.json")):
        found.add(f"kernel {guest.profile}", Outcome(*fields))
    found.save(RESULTS)
    assert done.returncode == 0, done.output
    assert " passed" in done.output
    assert "skipped" not in done.output


@pytest.mark.parametrize("profile", MACHINES)
def test_random_operations_look_the_same_on_the_simulator(guests: Guests, profile: str) -> None:
    guest = guests.start(profile)
    put(guest)
    there, here = on_guest(guest), on_simulation(f"sim {guest.profile}")
    sequences = generated(guest.profile, SEED, OPERATIONS)
    assert list(differences(sequences, there, here)) == []
    for path in sorted(CASES.glob("*.json")):
        case = json.loads(path.read_text())
        if case["machine"] == guest.profile:
            found = zip(case["sequences"], case["observations"], there(case["sequences"]), strict=True)
            assert [str(different) for pair in found if (different := difference(*pair))] == [], (
                f"{path} does not match this kernel"
            )
