# SPDX-License-Identifier: Apache-2.0
"""A manager on a simulated resctrl: real mounts, real processes, and a run folder of its own for each test."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.resctrl.mounts import boot_id, mounts
from resctrlmond.resctrl.tree import Found, GroupRef, Tree
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.groups import counters
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import EndRule, GroupState, Workload
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.records.quality_file import text, worse
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store
from resctrlmond.workloads.records.totals import shown, used
from resctrlmond.workloads.verbs.read import get
from tests.resctrl.conftest import descriptors
from tests.sim.conftest import Puppet
from tests.wait import wait_until
from tests.workloads.known_reasons import check_reasons

MARK = 4242
UID = "0f8fad5b-d9cb-469f-a165-70867728950e"
_managers: weakref.WeakSet[Manager] = weakref.WeakSet()


class Host:
    """One machine: its tree, its run folder, and the manager of the daemon that runs on it now."""

    def __init__(self, mountpoint: str, run: str) -> None:
        self.mountpoint = mountpoint
        self.run = run
        self.tree = Tree.open(mountpoint, allow_simulation=True)
        # Simulations have as few RMIDs as the default reserve.
        self.settings = Settings(reserve=0, overflow=0)
        for name in ("records", "groups", "completed"):
            os.makedirs(os.path.join(run, name), exist_ok=True)
        self.manager = self.restart()

    def restart(self) -> Manager:
        """Start a new daemon after a kill: it knows only the files and the tree."""
        if (killed := getattr(self, "manager", None)) is not None:
            killed.context.interference.close()  # as the kernel does; a host has 128 instances of inotify
        folder = Path(self.run)
        snapshots = Snapshots(str(folder / "groups"), str(folder / "completed"))
        records = Store(str(folder / "records"))
        self.manager = Manager(self.tree, records, snapshots, Mark(MARK, boot_id()), self.settings)
        _managers.add(self.manager)
        self.before_recovery()
        self.manager.recover()
        self.after_recovery()
        return self.manager

    @property
    def ctx(self) -> Context:
        """The parts of the manager that runs now."""
        return self.manager.context

    def get(self, key: str) -> Workload:
        """Return the workload. Raises NoSuchWorkload, InvalidKey."""
        return get(self.ctx, key)

    def before_recovery(self) -> None:
        """Connect further parts of a daemon to the new manager."""

    def after_recovery(self) -> None:
        """Start these parts."""

    def marked_groups(self) -> list[Found]:
        return [found for found in self.tree.scan() if found.gid == MARK]

    def make_foreign(self, name: str, class_: str = "") -> GroupRef:
        """Create a foreign group."""
        ref = GroupRef(class_, name)
        os.setegid(0)
        try:
            os.mkdir(self.tree.full_path(ref))
        finally:
            os.setegid(MARK)
        return ref

    def make_class(self, name: str) -> None:
        os.mkdir(os.path.join(self.mountpoint, name))

    def files(self, key: str) -> dict[str, str]:
        """Return the snapshot's files, by their path in it; a link is given as "-> target"."""
        return contents(os.path.join(self.run, "groups", key))

    def folder(self, name: str) -> list[str]:
        return sorted(os.listdir(os.path.join(self.run, name)))

    def check(self) -> None:
        """Check the invariants that hold at any time."""
        self.check_records(self.ctx.store.all())
        for record in self.ctx.store.all():
            self.check_quality(record)

    def check_records(self, records: list[Workload]) -> None:
        """Check that each marked group has one record, and each record its groups."""
        standing = {(found.ref, found.nonce) for found in self.marked_groups()}
        own = [record for record in records if not record.is_observed]
        wanted = {(group.ref, group.nonce) for record in own for group in record.existing_groups}
        assert standing == wanted
        for place, group in [(record.subfolder(group), group) for record in records for group in record.groups]:
            files = [name for name in self.files(place) if not name.startswith("classes/")]
            begun = [name for name in files if name.endswith(".begin")]
            # A group that was released while it waited has no files.
            never = group.state is GroupState.COMPLETED and group.reason.endswith("it never had an RMID")
            was = group.state in (GroupState.COMPLETED, GroupState.LOST) and not never
            assert bool(begun) == (group.state.has_directory or was), group
            ended = [name for name in files if name.endswith(".end")]
            # A lost group ends with its last reading, if there is one.
            was_read = group.state is GroupState.LOST and "checkpoint" in files
            assert bool(ended) == ((group.state is GroupState.COMPLETED and not never) or was_read), group
            # Links to live counters lead into the group's own directory, and are gone once the run is over.
            links = [text for name, text in self.files(place).items() if name in files and text.startswith("-> ")]
            assert not (group.state.is_over and links), (group, links)
            assert all(link.startswith(f"-> {self.tree.full_path(group.ref)}/mon_data/") for link in links), (
                group,
                links,
            )
        assert not [text for text in contents(os.path.join(self.run, "completed")).values() if text.startswith("-> ")]
        for record in own:
            # No container that is observed is missing in an exact pod.
            apart = [of for of in records if of.is_observed and of.attributes.get("pod.uid") == record.key]
            exact = not record.state.is_over and baseline_of(record) is Quality.EXACT
            assert not (apart and exact), record
        for record in records:
            assert not record.has_ended_further_group or record.state.is_over, record
            # An ended workload leaves no group in any class.
            assert not (record.state.is_over and record.existing_groups), record
        assert not [name for name in self.folder("groups") if name.startswith(".")]

    def check_quality(self, record: Workload) -> None:
        """Check that the file is not better than totals by the record, and equal to those of Release later."""
        ctx = self.ctx
        snapshots = ctx.snapshots
        if snapshots.is_bare(record.key):
            return
        # As Read does, but without its effect on the file.
        totals = shown(record, used(snapshots, record, counters.readings(ctx, record)))
        for total in totals:
            check_reasons(total)
        reported = text(totals)
        written = snapshots.quality(record.key)
        if record.state.is_over:
            assert written == reported
        if not written and any(member.joining for member in record.living):
            return  # the first Assign of the run has not ended
        assert worse(written, reported) == written

    def clean(self) -> None:
        """Remove every group and class."""
        for found in self.tree.scan():
            os.rmdir(found.path)
        for class_ in filter(None, self.tree.classes()):
            os.rmdir(os.path.join(self.mountpoint, class_))


def contents(top: str) -> dict[str, str]:
    found = {}
    for directory, _, names in os.walk(top):
        for name in names:
            path = os.path.join(directory, name)
            is_link = os.path.islink(path)
            found[os.path.relpath(path, top)] = (
                f"-> {os.readlink(path)}" if is_link else Path(path).read_text(errors="replace")
            )
    return found


def assignment(key: str, pid: int, owner: str = "test", **more: object) -> Assignment:
    """Return an assignment of a process that waits for the call, as the hook's does, unless ``late`` is set."""
    # The parameters of the hook's interface.
    more.setdefault("ends", EndRule.CONTAINER if owner == "oci" else None)
    return Assignment(key=key, owner=owner, pid=pid, **{"late": False, **more})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def marked() -> Iterator[None]:
    """Run with the group id of the mark, as the daemon does."""
    before = os.getegid()
    os.setegid(MARK)
    yield
    os.setegid(before)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Close the managers of the test, as the end of a daemon does, and check that no other descriptors stay open."""
    before, others = descriptors(), {*_managers}
    yield
    for manager in {*_managers} - others:
        manager.context.interference.close()
    wait_until(lambda: len(descriptors()) <= len(before), failure=f"open before: {before}, now: {descriptors()}")


@pytest.fixture(scope="session")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A large machine that has been up for a while: its energy counters go on from where others left them."""
    directory = str(tmp_path_factory.mktemp("resctrl"))
    with Simulation(directory, "intel-aet", 2000, residue=7):
        yield directory


@pytest.fixture(scope="session")
def small_simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return a machine with classes and as few counters as possible, for tests that repeat a step often."""
    directory = str(tmp_path_factory.mktemp("small"))
    with Simulation(directory, "intel-rdt", 2000):
        yield directory


@contextmanager
def own_host(top: Path, profile: str, rmids: int, **options: Any) -> Iterator[Host]:
    """Yield a host with a simulated machine of its own, in the directory ``top``."""
    for name in ("resctrl", "run"):
        (top / name).mkdir()
    with Simulation(str(top / "resctrl"), profile, rmids, **options):
        yield Host(str(top / "resctrl"), str(top / "run"))


@contextmanager
def machine(top: Path, profile: str, rmids: int = 16, **options: int) -> Iterator[tuple[Host, Control]]:
    """A machine of its own with virtual tasks, where every checkpoint interval is over at once.

    Its counters do not lag unless ``lag_ms`` is given: a reading just after a use has all of it.
    """
    with own_host(top, profile, rmids, virtual_cpus=2, **{"lag_ms": 0, **options}) as host:
        host.settings = host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9, reserve=0, overflow=0)
        yield host, Control(host.mountpoint)


def when_all_stand(host: Host, key: str) -> Workload:
    """Wait until no group of a workload is pending, and return the workload: limbo lasts at least a second."""
    deadline = time.monotonic() + 240
    while any(group.state is GroupState.PENDING for group in host.get(key).groups):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        host.manager.maintenance.tick()
    return host.get(key)


@contextmanager
def locked(host: Host, key: str) -> Iterator[None]:
    """Hold the key's transaction in another thread within the context, as a call that hangs in the kernel does."""
    is_locked, is_over = threading.Event(), threading.Event()

    def call() -> None:
        with host.ctx.store.transaction(key):
            is_locked.set()
            is_over.wait(60)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        assert is_locked.wait(60)
        yield
    finally:
        is_over.set()
        caller.join()


@pytest.fixture
def host(simulation: str, tmp_path: Path) -> Iterator[Host]:
    made = Host(simulation, str(tmp_path))
    yield made
    made.clean()


@pytest.fixture
def small_host(small_simulation: str, tmp_path: Path) -> Iterator[Host]:
    made = Host(small_simulation, str(tmp_path))
    yield made
    made.clean()


@pytest.fixture
def process() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Makes processes that sleep until the test is over."""
    made: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(["sleep", "600"]))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.wait()


@pytest.fixture
def puppet() -> Iterator[Puppet]:
    made = Puppet()
    yield made
    made.kill()


@pytest.fixture
def cgroup() -> Iterator[str]:
    """A control group of the unified hierarchy, wherever that is mounted."""
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
    # A new one for each test: one that cannot be removed must not fail all tests after it.
    path = tempfile.mkdtemp(prefix=f"resctrlmond-test-{os.getpid()}-", dir=top)
    os.chmod(path, 0o755)
    yield path
    deadline = time.monotonic() + 60
    while os.path.isdir(path) and time.monotonic() < deadline:
        for pid in Path(path, "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.rmdir(path)
        except OSError:
            time.sleep(0.01)


def drop_removed(host: Host, top: str, tid: int = 0) -> None:
    """Let the witness drop what it has recorded of the control groups that were removed until now.

    To do so, it needs a nearly full table, and the removal of others, which are created in ``top``. A simulation with
    virtual tasks knows only those that a task, ``tid``, has entered.
    """
    folder, control = Path(host.mountpoint, ".witness"), Control(host.mountpoint)
    others = [Path(top, f"other-{number}") for number in range(200)]
    for other in others:
        other.mkdir()
        if tid:
            control.set_cgroup(tid, str(other))
    rows, removed = (len((folder / name).read_bytes().splitlines()) for name in ("ended", "removed"))
    time.sleep(1.01)
    for other in others:
        other.rmdir()
    # A full table is a gap, so a quarter stays free for control groups of other programs.
    control.set_witness(rows=max(rows, removed + len(others)) * 4 // 3, keep=1)
    (folder / "removed").read_bytes()
    control.set_witness()
    status = (folder / "status").read_text()
    assert "gaps 0 0 0 0\n" in status
    assert "dropped 0\n" not in status


def join(cgroup: str, pid: int) -> None:
    Path(cgroup, "cgroup.procs").write_text(str(pid))
