# SPDX-License-Identifier: Apache-2.0
"""Control groups of the running kernel: their tasks, the control group of a process, and permitted paths."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.cgroups import NoSuchCgroup
from resctrlmond.resctrl.errors import NoSuchProcess, NotRead, PermissionDenied
from resctrlmond.resctrl.mounts import mounts

from .conftest import cgroup_of_systemd, v1_root, v2_root
from .puppets import Puppet


def enter(cgroup: str, pid: int) -> None:
    with open(f"{cgroup}/cgroup.procs", "w") as procs:
        procs.write(str(pid))


def test_the_cgroup_of_a_process(cgroup: str, puppet: Puppet) -> None:
    os.mkdir(f"{cgroup}/x")
    enter(f"{cgroup}/x", puppet.pid)
    assert cgroups.cgroup_of(puppet.pid) == f"{cgroup}/x"
    assert cgroups.cgroup_of(puppet.make("thread")) == f"{cgroup}/x"


def test_task_in_the_root_control_group_has_no_control_group(cgroup: str, puppet: Puppet) -> None:
    for mount in mounts():
        if mount.fstype in ("cgroup", "cgroup2"):
            enter(mount.point, puppet.pid)
    assert cgroups.cgroup_of(puppet.pid) == ""


@pytest.mark.cgroup_v1
def test_version_1_is_used_for_a_task_in_the_root_of_version_2(cgroup_v1: str, puppet: Puppet) -> None:
    for mount in mounts():
        if mount.fstype in ("cgroup", "cgroup2"):
            enter(mount.point, puppet.pid)
    enter(cgroup_v1, puppet.pid)
    assert cgroups.cgroup_of(puppet.pid) == cgroup_v1


@pytest.mark.cgroup_v1
def test_the_unified_hierarchy_is_preferred(cgroup: str, cgroup_v1: str, puppet: Puppet) -> None:
    enter(cgroup_v1, puppet.pid)
    enter(cgroup, puppet.pid)
    assert cgroups.cgroup_of(puppet.pid) == cgroup


@pytest.mark.cgroup_v1
@pytest.mark.parametrize(
    ("inner", "is_v1"),
    [("resctrlmond-pods/podx/c", True), ("{}/x", False), ("{}", False)],
    ids=["pod", "service", "delegated"],
)
def test_control_group_that_only_version_1_has_is_that_of_a_container(
    cgroup: str, puppet: Puppet, directory: Path, inner: str, is_v1: bool
) -> None:
    """On a hybrid host, a runtime creates it there only. The process stays in the runtime's service in version 2."""
    service = f"{cgroup}/x"
    os.mkdir(service)
    enter(service, puppet.pid)
    with cgroup_of_systemd(directory / "v1", inner.format(os.path.basename(cgroup))) as v1:
        enter(v1, puppet.pid)
        assert cgroups.cgroup_of(puppet.pid) == (v1 if is_v1 else service)


@pytest.fixture
def mounted(cgroup: str) -> Iterator[Callable[[str, Path], None]]:
    """Mount a filesystem of a type for the time of a test."""
    points: list[Path] = []

    def mount(fstype: str, point: Path) -> None:
        subprocess.run(["mount", "-t", fstype, "none", point], check=True)
        points.append(point)

    yield mount
    for point in reversed(points):
        if point.is_mount():
            subprocess.run(["umount", point], check=True)


@pytest.fixture
def without_the_table(monkeypatch: pytest.MonkeyPatch, cgroup: str) -> None:
    """Let the table of mounts be read once, and fail if it is read again."""
    cgroups.check(cgroup)

    def read_again() -> NoReturn:
        raise AssertionError("the table of mounts was read again")

    monkeypatch.setattr("resctrlmond.resctrl.cgroups.mounts", read_again)


@pytest.mark.usefixtures("without_the_table")
def test_the_table_of_mounts_is_read_once(cgroup: str, puppet: Puppet) -> None:
    """Each container start changes it, and adds lines to it: one read took 30 ms with 1500 mounts."""
    enter(cgroup, puppet.pid)
    assert cgroups.cgroup_of(puppet.pid) == cgroup
    assert cgroups.member_test(cgroup)(puppet.pid)
    assert cgroups.check(cgroup) == cgroup
    with pytest.raises(NoSuchCgroup, match="does not exist"):
        cgroups.check(f"{cgroup}/gone")
    with pytest.raises(PermissionDenied):
        cgroups.check(v2_root())


def test_a_hierarchy_that_is_mounted_later_is_found(
    tmp_path: Path, mounted: Callable[[str, Path], None], cgroup: str, puppet: Puppet
) -> None:
    enter(cgroup, puppet.pid)
    inner = cgroup.removeprefix(v2_root())
    assert cgroups.cgroup_of(puppet.pid) == cgroup
    with pytest.raises(NoSuchCgroup, match="is not a control group"):
        cgroups.check(str(tmp_path))
    mounted("cgroup2", tmp_path)
    assert cgroups.check(f"{tmp_path}{inner}") == f"{tmp_path}{inner}"
    assert cgroups.member_test(f"{tmp_path}{inner}")(puppet.pid)
    # The older mount is the host's own.
    assert cgroups.cgroup_of(puppet.pid) == cgroup


def test_a_hierarchy_that_was_unmounted_is_not_trusted(
    tmp_path: Path, mounted: Callable[[str, Path], None], cgroup: str
) -> None:
    inner = cgroup.removeprefix(v2_root())
    mounted("cgroup2", tmp_path)
    assert cgroups.check(f"{tmp_path}{inner}")
    subprocess.run(["umount", str(tmp_path)], check=True)
    _imitate(Path(f"{tmp_path}{inner}"))
    with pytest.raises(NoSuchCgroup):
        cgroups.check(f"{tmp_path}{inner}")


@pytest.mark.parametrize("below", [True, False])
def test_a_filesystem_that_hides_a_hierarchy_is_not_trusted(
    tmp_path: Path, mounted: Callable[[str, Path], None], cgroup: str, below: bool
) -> None:
    inner = cgroup.removeprefix(v2_root())
    mounted("cgroup2", tmp_path)
    assert cgroups.check(f"{tmp_path}{inner}")
    mounted("tmpfs", Path(f"{tmp_path}{inner}") if below else tmp_path)
    _imitate(Path(f"{tmp_path}{inner}"))
    with pytest.raises(NoSuchCgroup):
        cgroups.check(f"{tmp_path}{inner}")


def _imitate(cgroup: Path) -> None:
    cgroup.mkdir(parents=True, exist_ok=True)
    (cgroup / "cgroup.procs").touch()


def test_a_dead_process_has_no_cgroup(puppet: Puppet) -> None:
    puppet.kill()
    with pytest.raises(NoSuchProcess, match=str(puppet.pid)):
        cgroups.cgroup_of(puppet.pid)
    assert not cgroups.member_test(v2_root() + "/x")(puppet.pid)


@pytest.mark.parametrize("name", ["a\rb", "a\x0bb", "a\u2028b", "a b", "a:b", "..a", "(deleted)", "a\\040b"])
def test_cgroup_with_any_name_is_read_completely(cgroup: str, puppet: Puppet, name: str) -> None:
    path = f"{cgroup}/{name}"
    os.mkdir(path)
    enter(path, puppet.pid)
    assert cgroups.cgroup_of(puppet.pid) == path
    assert cgroups.check(path) == path
    assert cgroups.tasks(path) == [puppet.pid]
    assert cgroups.member_test(path)(puppet.pid)
    assert cgroups.is_populated(path)


def test_top_level_name_that_begins_with_dots_is_in_the_own_namespace(cgroup: str, puppet: Puppet) -> None:
    path = f"{v2_root()}/..{os.path.basename(cgroup)}"
    os.mkdir(path)
    try:
        enter(path, puppet.pid)
        assert cgroups.cgroup_of(puppet.pid) == path
    finally:
        enter(v2_root(), puppet.pid)
        os.rmdir(path)


def test_tasks_in_a_cgroup_and_below_are_listed(cgroup: str, puppets: Callable[[], Puppet]) -> None:
    above, below = puppets(), puppets()
    os.mkdir(f"{cgroup}/x")
    enter(cgroup, above.pid)
    enter(f"{cgroup}/x", below.pid)
    thread = below.make("thread")
    assert set(cgroups.tasks(cgroup)) == {above.pid, below.pid, thread}
    assert set(cgroups.tasks(f"{cgroup}/x")) == {below.pid, thread}
    inside = cgroups.member_test(f"{cgroup}/x")
    assert [inside(tid) for tid in (below.pid, thread, above.pid, os.getpid())] == [True, True, False, False]


def test_a_cgroup_whose_name_begins_like_anothers_is_not_inside_it(cgroup: str, puppet: Puppet) -> None:
    for name in ("web", "web-2"):
        os.mkdir(f"{cgroup}/{name}")
    with open(f"{cgroup}/web-2/cgroup.procs", "w") as procs:
        procs.write(str(puppet.pid))
    assert cgroups.member_test(f"{cgroup}/web-2")(puppet.pid)
    assert not cgroups.member_test(f"{cgroup}/web")(puppet.pid)


def test_threads_of_a_threaded_cgroup(cgroup: str, puppet: Puppet) -> None:
    thread = puppet.make("thread")
    enter(cgroup, puppet.pid)
    os.mkdir(f"{cgroup}/t")
    for name, text in (("cgroup.type", "threaded"), ("cgroup.threads", str(thread))):
        with open(f"{cgroup}/t/{name}", "w") as file:
            file.write(text)
    assert cgroups.tasks(f"{cgroup}/t") == [thread]
    assert set(cgroups.tasks(cgroup)) == {puppet.pid, thread}
    inside = cgroups.member_test(f"{cgroup}/t")
    assert (inside(thread), inside(puppet.pid)) == (True, False)


@pytest.mark.cgroup_v1
def test_version_1_cgroup_lists_its_tasks_and_whether_it_is_populated(cgroup_v1: str, puppet: Puppet) -> None:
    assert not cgroups.is_populated(cgroup_v1)
    os.mkdir(f"{cgroup_v1}/x")
    enter(f"{cgroup_v1}/x", puppet.pid)
    thread = puppet.make("thread")
    assert set(cgroups.tasks(cgroup_v1)) == {puppet.pid, thread}
    assert cgroups.is_populated(cgroup_v1)
    assert cgroups.member_test(cgroup_v1)(thread)
    assert cgroups.check(cgroup_v1) == cgroup_v1


@pytest.mark.cgroup_v1
def test_membership_is_read_in_the_hierarchy_of_the_path(cgroup: str, cgroup_v1: str, puppet: Puppet) -> None:
    enter(cgroup, puppet.pid)
    enter(cgroup_v1, puppet.pid)
    assert cgroups.member_test(cgroup)(puppet.pid)
    assert cgroups.member_test(cgroup_v1)(puppet.pid)
    enter(v1_root(), puppet.pid)
    assert not cgroups.member_test(cgroup_v1)(puppet.pid)
    assert cgroups.member_test(cgroup)(puppet.pid)


def test_populated_includes_the_whole_subtree(cgroup: str, puppet: Puppet) -> None:
    os.makedirs(f"{cgroup}/x/y")
    assert not cgroups.is_populated(cgroup)
    enter(f"{cgroup}/x/y", puppet.pid)
    assert cgroups.is_populated(cgroup)
    enter(v2_root(), puppet.pid)
    assert not cgroups.is_populated(cgroup)


def test_removed_control_group_is_empty(cgroup: str) -> None:
    assert cgroups.tasks(f"{cgroup}/gone") == []
    assert not cgroups.is_populated(f"{cgroup}/gone")
    assert not cgroups.member_test(f"{cgroup}/gone")(os.getpid())


def test_a_cgroup_that_vanishes_at_any_moment_is_empty(cgroup: str) -> None:
    def come_and_go() -> None:
        for _ in range(500):
            os.makedirs(f"{cgroup}/x/y")
            os.rmdir(f"{cgroup}/x/y")
            os.rmdir(f"{cgroup}/x")

    administrator = threading.Thread(target=come_and_go)
    administrator.start()
    while administrator.is_alive():
        assert cgroups.tasks(cgroup) == []
        assert not cgroups.is_populated(f"{cgroup}/x")
        assert not cgroups.is_populated(f"{cgroup}/x/y")
    administrator.join()


def test_every_root_cgroup_is_refused() -> None:
    roots = [mount.point for mount in mounts() if mount.fstype in ("cgroup", "cgroup2")]
    assert v2_root() in roots
    for root in roots:
        with pytest.raises(PermissionDenied, match=f"{root}: is the root control group"):
            cgroups.check(root)
        with pytest.raises(PermissionDenied):
            cgroups.check(f"{root}/./")


@pytest.mark.parametrize(
    "path", ["", ".", "/", "/tmp", "/proc/self", "/nowhere", "x", "/sys/fs", "a\0b", "/sys/fs/cgroup/\0", "/\ud800"]
)
def test_path_that_is_not_a_cgroup_is_refused(path: str) -> None:
    with pytest.raises(NoSuchCgroup):
        cgroups.check(path)


def test_a_way_out_of_the_hierarchy_is_refused(cgroup: str) -> None:
    with pytest.raises(PermissionDenied):
        cgroups.check(f"{cgroup}/..")
    with pytest.raises(NoSuchCgroup):
        cgroups.check(f"{cgroup}/../../../../../../tmp")
    with pytest.raises(NoSuchCgroup, match="does not exist"):
        cgroups.check(f"{cgroup}/gone")
    with pytest.raises(NoSuchCgroup):
        cgroups.check(f"{cgroup}/cgroup.procs")


def test_symlink_is_resolved(cgroup: str, tmp_path: str) -> None:
    os.symlink(cgroup, f"{tmp_path}/link")
    os.symlink(v2_root(), f"{tmp_path}/root")
    assert cgroups.check(f"{tmp_path}/link") == cgroup
    with pytest.raises(PermissionDenied):
        cgroups.check(f"{tmp_path}/root")


def test_search_of_control_groups_is_limited(cgroup: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who may create control groups can create any number, and the tick searched all of them."""
    monkeypatch.setattr(cgroups, "MAX_BELOW", 20)
    for number in range(19):
        os.mkdir(f"{cgroup}/{number}")
    assert cgroups.tasks(cgroup) == []
    os.mkdir(f"{cgroup}/one-more")
    with pytest.raises(NotRead, match="more than 20 control groups below it"):
        cgroups.tasks(cgroup)
