# SPDX-License-Identifier: Apache-2.0
"""Finding, reading, moving and removing monitoring groups."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from resctrlmond.resctrl.counters import offered
from resctrlmond.resctrl.errors import (
    GroupExists,
    KernelRefused,
    MonitoringUnavailable,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    ResctrlError,
    RmidsExhausted,
)
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.sim.fuse.mount import Simulation

from .conftest import NONCE, Make, mkdir
from .puppets import Puppet

A = GroupRef("", "a")
B = GroupRef("", "b")


def names(tree: Tree) -> list[str]:
    return [found.ref.path for found in tree.scan()]


# -- remove and rename


def test_removing_twice_is_true_and_false(tree: Tree, make: Make) -> None:
    ref = make("a")
    assert tree.remove(ref) is True
    assert tree.remove(ref) is False
    assert tree.remove(GroupRef("nowhere", "a")) is False


def test_the_tasks_of_a_removed_group_are_in_its_class(tree: Tree, make: Make, puppet: Puppet) -> None:
    ref = make("a")
    tree.write_task(ref.path, puppet.pid)
    tree.remove(ref)
    assert tree.membership(puppet.pid) == Membership("", "")
    with pytest.raises(NoSuchGroup):
        tree.tasks(ref)
    with pytest.raises(NoSuchGroup):
        tree.read(ref)
    with pytest.raises(NoSuchGroup):
        tree.write_task(ref.path, puppet.pid)


def test_renaming_onto_an_existing_group_is_group_exists(tree: Tree, make: Make) -> None:
    make("a")
    make("b")
    with pytest.raises(GroupExists, match=f"{tree.path}/mon_groups/b"):
        tree.rename(A, B)
    assert names(tree) == ["mon_groups/a", "mon_groups/b"]


def test_rename_to_a_missing_class_raises_no_such_class(tree: Tree, make: Make) -> None:
    make("a")
    with pytest.raises(NoSuchClass, match=f"{tree.path}/nowhere: there is no such class"):
        tree.rename(A, GroupRef("nowhere", "a"))
    assert names(tree) == ["mon_groups/a"]


def test_rename_of_a_missing_group_raises_no_such_group(tree: Tree) -> None:
    with pytest.raises(NoSuchGroup, match="mon_groups/a"):
        tree.rename(A, B)


def test_rename_to_an_invalid_name_has_the_kernels_message(tree: Tree, make: Make) -> None:
    with pytest.raises(KernelRefused) as caught:
        tree.rename(make("a"), GroupRef("", "mon_groups"))
    assert caught.value.status == "Destination must be a mon_groups subdirectory"


@pytest.mark.allocation
def test_rename_to_another_class_moves_the_tasks(tree: Tree, make: Make, puppet: Puppet, class_: str) -> None:
    tree.write_task(make("a").path, puppet.pid)
    tree.rename(A, GroupRef(class_, "a"))
    assert tree.membership(puppet.pid) == Membership(class_, "a")
    assert names(tree) == [f"{class_}/mon_groups/a"]


# -- reading the tree


@pytest.mark.allocation
@pytest.mark.parametrize("name", ["mon_data2", "info.d", "mon_groups_", " gold", ".gold", "é"])
def test_class_is_detected_by_its_files_and_not_by_its_name(tree: Tree, make: Make, name: str) -> None:
    mkdir(f"{tree.path}/{name}")
    make("a")
    assert tree.classes() == ["", name]
    assert tree.has_class(name)
    make("info", name)
    assert names(tree) == ["mon_groups/a", f"{name}/mon_groups/info"]


def test_only_the_root_is_a_class_at_first(tree: Tree, make: Make) -> None:
    make("a")
    assert tree.classes() == [""]
    assert tree.has_class("")
    assert not tree.has_class("mon_groups/a")


class _Remover(Tree):
    """Remove the classes while they are listed."""

    def classes(self) -> list[str]:
        found = super().classes()
        for class_ in found[1:]:
            os.rmdir(os.path.join(self.path, class_))
        return found


@pytest.mark.allocation
def test_a_class_that_vanishes_during_the_scan_is_left_out(tree: Tree, make: Make, class_: str) -> None:
    make("a", class_)
    make("b")
    assert names(_Remover(tree.path, tree.simulation)) == ["mon_groups/b"]


def test_path_that_is_not_a_group_is_not_found(tree: Tree) -> None:
    assert tree.find(A) is None
    assert tree.find(GroupRef("nowhere", "a")) is None
    assert tree.find(GroupRef("tasks", "a")) is None


def test_capacity_is_read_from_info(tree: Tree) -> None:
    info = Path(tree.path, "info")
    offers = {capacity.resource: capacity for capacity in tree.capacity()}
    assert set(offers) == {path.name for path in info.glob("*_MON")}
    for resource, capacity in offers.items():
        assert capacity.rmids == int((info / resource / "num_rmids").read_text())
        assert set(capacity.events) <= set((info / resource / "mon_features").read_text().split())
        assert capacity.events


def test_every_offered_event_is_counted_and_no_other(tree: Tree, make: Make) -> None:
    offers = {event for capacity in tree.capacity() for event in capacity.events}
    assert {reading.event for reading in tree.read(make("a"))} == offers


def test_files_that_configure_an_event_are_not_events() -> None:
    text = "llc_occupancy\nmbm_total_bytes\nmbm_total_bytes_config\nmbm_local_bytes\nmbm_local_bytes_config\n"
    assert offered(text) == ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes")


class _UnmonitoredTree(Tree):
    def _directories(self, directory: str) -> list[str]:
        return [name for name in super()._directories(directory) if not name.endswith("_MON")]


def test_missing_monitoring_resource_is_reported(tree: Tree) -> None:
    with pytest.raises(MonitoringUnavailable, match="/info: offers no monitoring"):
        _UnmonitoredTree(tree.path, tree.simulation).capacity()


# -- writing tasks


def test_a_task_is_listed_where_it_was_put(tree: Tree, make: Make, puppet: Puppet) -> None:
    ref = make("a")
    assert tree.tasks(ref) == []
    tree.write_task(ref.path, puppet.pid)
    assert tree.tasks(ref) == [puppet.pid]


@pytest.mark.parametrize("tid", [0, -1, -5])
def test_number_that_names_no_task_is_refused(tree: Tree, make: Make, tid: int) -> None:
    ref = make("a")
    with pytest.raises(NoSuchProcess):
        tree.write_task(ref.path, tid)
    assert tree.tasks(ref) == []


def test_a_task_in_another_users_group_of_files(tree: Tree, make: Make, puppet: Puppet) -> None:
    ref = make("a")
    os.chmod(f"{tree.full_path(ref)}/tasks", 0)
    with pytest.raises(ResctrlError, match=r"/tasks: cannot move task .*\(EACCES\)"):
        tree.write_task(ref.path, puppet.pid)


# -- counters of a group


def test_a_new_group_has_readings(tree: Tree, make: Make) -> None:
    readings = tree.read(make("a"))
    assert readings
    assert readings == sorted(readings, key=lambda reading: (reading.domain, reading.event))
    assert all(reading.domain.startswith("mon_") for reading in readings)
    # With Sub-NUMA Clustering, a domain contains its sub-domains, and no other directory is deeper.
    assert all("/mon_sub_L3_" in reading.domain for reading in readings if reading.is_part)


@pytest.mark.simulator
def test_a_group_with_a_running_task_counts(tree: Tree, make: Make, puppet: Puppet) -> None:
    ref = make("a")
    tree.write_task(ref.path, puppet.pid)
    before = {(reading.domain, reading.event): reading.value.number or 0 for reading in tree.read(ref)}
    puppet.do("burn")
    after = {(reading.domain, reading.event): reading.value.number or 0 for reading in tree.read(ref)}
    assert before.keys() == after.keys()
    traffic = [key for key in after if key[1] == "mbm_total_bytes"]
    assert sum(after[key] for key in traffic) > sum(before[key] for key in traffic)


def test_a_counter_that_cannot_be_read_is_an_error_with_its_reason(tree: Tree, make: Make) -> None:
    ref = make("a")
    before = tree.read(ref)
    # The value of a cache with nodes is their sum, and is not read.
    nodes = [reading for reading in before if reading.is_part]
    refused = (nodes or before)[0]
    # Without a read bit kernfs refuses root too.
    os.chmod(f"{tree.full_path(ref)}/mon_data/{refused.domain}/{refused.event}", 0)
    after = tree.read(ref)
    assert [(reading.domain, reading.event) for reading in after] == [
        (reading.domain, reading.event) for reading in before
    ]
    (found,) = (
        reading.value for reading in after if (reading.domain, reading.event) == (refused.domain, refused.event)
    )
    assert (found.status, found.text, found.number) == ("error", "Permission denied", None)
    without = {reading.domain for reading in after if reading.value.status == "error"}
    assert without == {refused.domain, refused.domain.partition("/")[0]}
    assert len(after) > len(without)


def test_reading_a_group_that_is_removed_raises_and_never_returns_a_part(tree: Tree, make: Make) -> None:
    whole = [(reading.domain, reading.event) for reading in tree.read(make("whole"))]

    def come_and_go() -> None:
        for number in range(60):
            with contextlib.suppress(RmidsExhausted):
                tree.create(A, NONCE + number)
            tree.remove(A)

    administrator = threading.Thread(target=come_and_go)
    administrator.start()
    while administrator.is_alive():
        with contextlib.suppress(NoSuchGroup):
            assert [(reading.domain, reading.event) for reading in tree.read(A)] == whole
        with contextlib.suppress(NoSuchGroup):
            tree.tasks(A)
        tree.find(A)
    administrator.join()


def test_remedy_is_not_to_mount_if_the_kernel_has_no_mount_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without the hardware, which most are, there is nothing to mount on."""
    missing = str(tmp_path / "resctrl")
    with pytest.raises(NotMounted, match=r"resctrl: does not exist: .*mount -t resctrl"):
        Tree.open(missing)
    monkeypatch.setattr("resctrlmond.resctrl.tree.DEFAULT_PATH", missing)
    with pytest.raises(NotMounted, match="only if the processor has") as refused:
        Tree.open(missing)
    assert "mount -t" not in str(refused.value)


def test_file_that_an_older_kernel_lacks_needs_no_table_of_mounts(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has thousands of lines on a host with many containers, and each reading would need it."""

    def look(_tree: Tree) -> None:
        raise AssertionError("the table of mounts was read")

    monkeypatch.setattr(Tree, "check_mounted", look)
    assert tree._read_text_if_there("info/L3_MON/mbm_assign_mode_of_a_later_kernel") == ""


@pytest.mark.simulator
def test_events_of_a_new_mount_are_read_although_its_domains_are_the_same(tmp_path: Path) -> None:
    ref, found = GroupRef("", "a"), []
    with Simulation(str(tmp_path), events="llc_occupancy"):
        tree = Tree.open(str(tmp_path), allow_simulation=True)
        tree.create(ref, 1)
        found.append({reading.event for reading in tree.read(ref) if reading.domain == "mon_L3_00"})
    with Simulation(str(tmp_path), events="llc_occupancy,mbm_total_bytes"):
        tree.create(ref, 1)
        found.append({reading.event for reading in tree.read(ref) if reading.domain == "mon_L3_00"})
    assert found == [{"llc_occupancy"}, {"llc_occupancy", "mbm_total_bytes"}]
