# SPDX-License-Identifier: Apache-2.0
"""Guests for the tests in this directory. The report of a failure contains the guest's journal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from .install import stage, start_installed
from .machine import MACHINES, Guest, GuestDiedError, Machine, MachineError

HERE = Path(__file__).parent
# The kernel of the guests: the newest, or, for "6.12", Debian 13's own.
OLDER = os.environ.get("RESCTRLMOND_KERNEL", "")
NOT_BUILT = pytest.StashKey[str]()


def machine(profile: str) -> Machine:
    """Return the machine of a profile, with the kernel of this run."""
    return Machine(f"{profile}-{OLDER}" if OLDER else profile)


class Guests:
    """Starts guests, and closes them at the end of its scope."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._open = contextlib.ExitStack()
        self.running: list[Guest] = []

    def start(self, profile: str = "cat") -> Guest:
        """Start a fresh guest of a profile. The test fails if the host could not build it."""
        return self._started(lambda: machine(profile).start())

    def start_installed(self, staged: Path) -> Guest:
        """Start a fresh guest of the default profile in which the project is installed, but not started."""
        return self._started(lambda: start_installed(machine("cat"), staged))

    def _started(self, start: Callable[[], Guest]) -> Guest:
        if reason := self._config.stash.get(NOT_BUILT, ""):
            pytest.fail(f"there is no test machine: {reason}", pytrace=False)
        guest = self._open.enter_context(start())
        self.running.append(guest)
        return guest

    def end(self, guest: Guest) -> None:
        """Close one guest before the others."""
        self.running.remove(guest)
        guest.close()

    def close(self) -> None:
        """Close all guests."""
        self._open.close()


def _guests(request: pytest.FixtureRequest) -> Iterator[Guests]:
    guests = Guests(request.config)
    try:
        yield guests
    finally:
        guests.close()


@pytest.fixture
def guests(request: pytest.FixtureRequest) -> Iterator[Guests]:
    """Yield guests for a single test: ``guests.start(profile)``."""
    yield from _guests(request)


@pytest.fixture(scope="module")
def module_guests(request: pytest.FixtureRequest) -> Iterator[Guests]:
    """Yield the source of the module's guests."""
    yield from _guests(request)


@pytest.fixture(scope="module")
def guest(module_guests: Guests) -> Guest:
    """Return a guest of the default profile (64 RMIDs, 2 classes), fresh for each test module."""
    return module_guests.start("cat")


@pytest.fixture(scope="module")
def monitoring_guest(module_guests: Guests) -> Guest:
    """Return a guest with monitoring but without allocation, fresh for each test module."""
    return module_guests.start("monitoring-only")


@pytest.fixture(scope="module")
def two_domain_guest(module_guests: Guests) -> Guest:
    """Return a guest with two L3 domains, fresh for each test module."""
    return module_guests.start("two-domains")


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tree that make install creates."""
    return stage(tmp_path_factory.mktemp("staged"))


@pytest.fixture(scope="module")
def installed_guest(module_guests: Guests, staged: Path) -> Guest:
    """Return a guest of the default profile with the project installed, but not started."""
    return module_guests.start_installed(staged)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this directory: they need the real kernel."""
    for item in _items_here(items):
        item.add_marker(pytest.mark.kernel)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the selected tests need before the timeout of the first one runs; a failure fails each test."""
    if session.config.option.collectonly or session.testsfailed or not _items_here(session.items):
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        try:
            for profile in MACHINES:
                machine(profile.name).build()
        except MachineError as error:
            session.config.stash[NOT_BUILT] = str(error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the consoles and journals of the guests to a failure."""
    report = yield
    if report.failed and _items_here([item]):
        arguments: dict[str, object] = getattr(item, "funcargs", {})
        for source in (value for value in arguments.values() if isinstance(value, Guests)):
            for number, guest in enumerate(source.running, start=1):
                report.sections.append((f"journal of guest {number}, {guest.profile}", _journal(guest)))
    return report


def _journal(guest: Guest) -> str:
    try:
        return guest.run("journalctl -n 60 --no-pager", timeout=60, check=False).output
    except GuestDiedError as error:
        return str(error)
    except MachineError as error:
        return f"no journal: {error}"


def _items_here(items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if item.path.is_relative_to(HERE)]
