# SPDX-License-Identifier: Apache-2.0
"""A mounted resctrl for the tests of this folder: the machine's own, or a simulation of each profile."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import RmidsExhausted
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tree import GroupRef, Tree

from .places import NAMES, REAL_ROOT, Place, can_allocate, place_named
from .puppets import Puppet

T = TypeVar("T")

HERE = Path(__file__).parent
MARKERS = (
    "allocation: makes control groups, which a machine that only monitors does not have",
    "simulator: needs what only the simulator shows, such as counters that count",
    "cgroup_v1: needs a host with a hierarchy of version 1",
    "kernel_threads: needs a PID namespace in which the kernel's threads are seen",
)
# An emulated CPU is slow, and examples of text are the same on every one.
settings.register_profile("emulated", deadline=None, max_examples=20)
if REAL_ROOT:
    settings.load_profile("emulated")
# Fixtures that mount, make control groups or PID namespaces: a user's run leaves their tests to the guest's.
NEED_ROOT = {"place", "cgroup", "cgroup_v1", "bound", "nested"}
NONCE = 1_700_000_000_123_456_789


def v1_root() -> str:
    """Where the host has its pids hierarchy of version 1; "" if it has none."""
    return next((mount.point for mount in mounts() if mount.fstype == "cgroup" and "pids" in mount.options), "")


def v2_root() -> str:
    """Where the host has its unified hierarchy."""
    return next(mount.point for mount in mounts() if mount.fstype == "cgroup2" and mount.root == "/")


def kernel_thread() -> int:
    """A thread of the kernel; 0 if none is seen."""
    found = ((int(name), processes.stat(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return next((pid for pid, stat in found if stat and stat.is_kernel_thread), 0)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of this folder."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with the fixture ``place`` in all places."""
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", NAMES, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that this place cannot run; the markers state the reasons."""
    unfit = [item for item in items if item.path.is_relative_to(HERE) and not _fits(item)]
    if unfit:
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if item not in unfit]


def _fits(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    place = callspec.params.get("place", "") if callspec else ""
    wants = {mark.name for mark in item.iter_markers()}
    fixtures: list[str] = getattr(item, "fixturenames", [])
    return not (
        (os.geteuid() != 0 and not NEED_ROOT.isdisjoint(fixtures))
        or ("allocation" in wants and not can_allocate(place))
        or ("simulator" in wants and REAL_ROOT)
        or ("cgroup_v1" in wants and not v1_root())
        or ("kernel_threads" in wants and not kernel_thread())
    )


def descriptors() -> dict[str, str]:
    """List the open descriptors of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Check that each test leaves as many open descriptors as before it, also after a failure."""
    before = descriptors()
    yield
    after = descriptors()
    assert len(after) == len(before), f"open before: {before}, open after: {after}"


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place with a mounted resctrl."""
    made = place_named(request.param)
    yield made
    made.close()


@pytest.fixture
def tree(place: Place) -> Iterator[Tree]:
    """The mounted resctrl; what a test leaves in it is removed."""
    opened = Tree.open(place.root, allow_simulation=True)
    yield opened
    place.mount()
    for class_ in opened.classes()[1:]:
        os.rmdir(os.path.join(place.root, class_))
    for found in opened.scan():
        os.rmdir(found.path)


def patiently(action: Callable[[], T]) -> T:
    """Do what needs an RMID, waiting for those that the test before has freed."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return action()
        except RmidsExhausted as error:
            if not error.in_limbo or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def mkdir(path: str) -> None:
    """Create a class or group as another program does, and wait for an RMID in limbo."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return os.mkdir(path)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


Make = Callable[..., GroupRef]


@pytest.fixture
def make(tree: Tree) -> Make:
    """Makes a monitoring group: ``make(name, class_)``."""

    def create(name: str, class_: str = "") -> GroupRef:
        return patiently(lambda: tree.create(GroupRef(class_, name), NONCE)).ref

    return create


@pytest.fixture
def class_(tree: Tree) -> str:
    """A control group that an administrator made."""
    mkdir(os.path.join(tree.path, "gold"))
    return "gold"


@pytest.fixture
def puppets() -> Iterator[Callable[[], Puppet]]:
    """Yield a function that starts commanded processes; kill them afterwards."""
    made: list[Puppet] = []

    def one() -> Puppet:
        made.append(Puppet())
        return made[-1]

    yield one
    for puppet in made:
        puppet.kill()


@pytest.fixture
def puppet(puppets: Callable[[], Puppet]) -> Puppet:
    """One of them."""
    return puppets()


@pytest.fixture
def held(puppet: Puppet) -> Iterator[Process]:
    """The puppet's process, held."""
    with Process.open(puppet.pid) as process:
        yield process


def _cgroup(root: str) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="resctrlmond-test-", dir=root)
    yield path
    deadline = time.monotonic() + 60
    for directory, _, _ in os.walk(path, topdown=False):
        # The last process may still be on its way out.
        while os.path.isdir(directory):
            try:
                os.rmdir(directory)
            except OSError:
                assert time.monotonic() < deadline, f"{directory} stays populated"
                time.sleep(0.01)


@pytest.fixture
def cgroup() -> Iterator[str]:
    """An empty control group of the unified hierarchy."""
    yield from _cgroup(v2_root())


@pytest.fixture
def cgroup_v1() -> Iterator[str]:
    """An empty control group of a hierarchy of version 1."""
    yield from _cgroup(v1_root())


@contextlib.contextmanager
def cgroup_of_systemd(point: Path, inner: str) -> Iterator[str]:
    """Create a control group in the hierarchy of version 1 that systemd has on hybrid hosts, mounted at ``point``."""
    point.mkdir()
    subprocess.run(["mount", "-t", "cgroup", "-o", "none,name=systemd", "none", point], check=True)
    # The host may have mounted it before.
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup" and "name=systemd" in mount.options)
    path = Path(top, inner)
    path.mkdir(parents=True)
    try:
        yield str(path)
    finally:
        for pid in (path / "cgroup.procs").read_text().split():
            Path(top, "cgroup.procs").write_text(pid)
        os.removedirs(path)
        subprocess.run(["umount", point], check=True)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that every user may pass."""
    made = tempfile.mkdtemp(prefix="resctrlmond-test-")
    os.chmod(made, 0o755)
    yield Path(made)
    shutil.rmtree(made)
