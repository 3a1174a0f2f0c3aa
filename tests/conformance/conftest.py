# SPDX-License-Identifier: Apache-2.0
"""The targets of the rules: the running kernel, or the simulations that match it; and the table at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from .actors import Actor, ActorPool
from .table import Outcome, Results, lines
from .target import OLDER, REAL_ROOT, SIMULATIONS, Resctrl, kernel, options, simulation

HERE = Path(__file__).parent
KERNEL = "kernel"
# One machine shows most rules of Linux 6.12 in every run; the others run only if RESCTRL_CONFORMANCE is "all".
ALL = os.environ.get("RESCTRL_CONFORMANCE") == "all"
OLDER_SIMULATIONS = [name + OLDER for name in SIMULATIONS if ALL or name == "sim cat"]
TARGETS = [KERNEL] if REAL_ROOT else [*SIMULATIONS, *OLDER_SIMULATIONS]
MARKERS = (
    "allocation: makes control groups",
    "monitoring_only: for a machine without allocation",
    "limbo: freed RMIDs wait, because occupancy is monitored",
    "no_occupancy: freed RMIDs do not wait, because occupancy is not monitored",
    "two_domains: needs two L3 caches",
    "witness: needs the files of resctrlmond-witness, which each simulation has",
    "kernel_only(why): the simulator cannot show this",
)
RESULTS = pytest.StashKey[Results]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of this directory."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every rule on every target."""
    if "fs" in metafunc.fixturenames:
        metafunc.parametrize("target", TARGETS, indirect=True, scope="session")


def _capabilities(name: str) -> set[str]:
    """Return the markers that the target satisfies."""
    if name != KERNEL:
        from resctrlmond.sim.fuse.mount import Simulation

        profile = Simulation("", **options(name)).profile
        allocates, occupancy, domains = profile.can_allocate, profile.has_limbo, profile.domains
        has_witness = True
    else:
        root = kernel()
        allocates, occupancy, domains = root.can_allocate, root.has_occupancy, len(root.domains)
        has_witness = os.path.isdir(root.witness)
    found = {"allocation" if allocates else "monitoring_only"}
    found |= {"limbo" if occupancy else "no_occupancy"}
    found |= {"two_domains"} if domains > 1 else set()
    found |= {"witness"} if has_witness else set()
    return found | ({"kernel_only"} if name == KERNEL else set())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the rules that do not apply to a target, according to the markers."""
    items_here = [item for item in items if item.path.is_relative_to(HERE) and "target" in _parameters(item)]
    capabilities = {name: _capabilities(name) for name in {_parameters(item)["target"] for item in items_here}}
    known = {marker.split(":")[0].split("(")[0] for marker in MARKERS}
    unfit = []
    for item in items_here:
        wants = {mark.name for mark in item.iter_markers()} & known
        if not wants <= capabilities[_parameters(item)["target"]]:
            unfit.append(item)
    if unfit:
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if item not in unfit]


def _parameters(item: pytest.Item) -> dict[str, str]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record the outcome of a rule on its target."""
    report = yield
    target = _parameters(item).get("target")
    if target and item.path.is_relative_to(HERE) and (report.when == "call" or report.failed):
        rule = Outcome(item.path.stem.removeprefix("test_"), item.originalname, report.passed)
        item.config.stash.setdefault(RESULTS, Results()).add(target, rule)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of rules and targets, and save it in build/conformance for a run on another target."""
    results = config.stash.get(RESULTS, None)
    if results is None:
        return
    folder = Path(os.environ.get("RESCTRL_CONFORMANCE_RESULTS", str(config.rootpath / "build/conformance")))
    results.save(folder)
    terminalreporter.section("conformance")
    for line in lines(results):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Iterator[Resctrl]:
    """Yield a mounted resctrl."""
    made = kernel() if request.param == KERNEL else simulation(request.param)
    yield made
    made.close()


@pytest.fixture
def fs(target: Resctrl) -> Iterator[Resctrl]:
    """Yield the same one without groups and with an empty last_cmd_status, and remove the groups of the rule."""
    target.mount()
    target.clean()
    target.write("tasks", "\n")
    yield target
    target.mount()
    target.clean()


@pytest.fixture(scope="session")
def actor_pool() -> Iterator[ActorPool]:
    """Yield the source of processes."""
    with ActorPool() as made:
        yield made


@pytest.fixture
def actors(actor_pool: ActorPool) -> Iterator[Callable[[], Actor]]:
    """Yield a function that starts processes for commands; end them afterwards."""
    yield actor_pool.actor
    actor_pool.end_all()


@pytest.fixture
def actor(actors: Callable[[], Actor]) -> Actor:
    """Start one process."""
    return actors()


@pytest.fixture
def nobody(actor: Actor) -> Actor:
    """Start one process of an ordinary user."""
    actor.call("become", uid=65534, gid=65534)
    return actor
