# SPDX-License-Identifier: Apache-2.0
"""Damaged files of a run: no other file is changed, no figure is invented, and the workload still ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import UID, Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]
SECRET = "12345678901234"


def link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def folder_link(path: Path, secret: Path) -> None:
    path.symlink_to(secret.parent)


def fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


def huge(path: Path, _: Path) -> None:
    path.write_bytes(b"1" * (5 << 20))


def nothing(path: Path, _: Path) -> None:
    """It is removed."""


def damaged(host: Host, key: str, pattern: str, make: Callable[[Path, Path], None]) -> Path:
    top = Path(host.run, "groups", key)
    path = next(path for path in sorted(top.rglob("*")) if path.match(pattern))
    secret = Path(host.run, "elsewhere", "secret")
    secret.parent.mkdir(exist_ok=True)
    secret.write_text(SECRET)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    make(path, secret)
    return secret


def shown(host: Host, key: str) -> str:
    _, _, totals = read(host.ctx, key)
    return " ".join(str(total.number) for total in totals)


@pytest.mark.parametrize("make", [link, folder_link, fifo, folder, huge, nothing])
@pytest.mark.parametrize(
    "pattern", ["mbm_total_bytes.begin", "mbm_total_bytes", "mon_L3_00", "mon_data", "created_at", "checkpoint"]
)
def test_a_run_whose_files_were_damaged_still_ends(
    small_simulation: str, tmp_path: Path, process: Start, make: Callable[[Path, Path], None], pattern: str
) -> None:
    host = Host(small_simulation, str(tmp_path))
    child, other = process(), process()
    assign(host.ctx, assignment(UID, child.pid, "oci"))
    assign(host.ctx, assignment("other", other.pid, "oci"))
    host.manager.maintenance.tick()
    before = host.files("other")["mon_data/mon_L3_00/mbm_total_bytes.begin"]
    secret = damaged(host, UID, pattern, make)
    assert SECRET not in shown(host, UID)
    host.manager.maintenance.tick()
    host.restart()
    assert host.get(UID).state is State.ACTIVE
    try:
        release(host.ctx, UID, owner="oci")
    except ResctrlError as error:
        # The error names the path until it is free.
        assert str(host.run) in error.path
        assert len(host.marked_groups()) == 2
        shutil.rmtree(Path(host.run, "groups", UID))
        host.manager.maintenance.tick()
        assert all(total.number is None for total in read(host.ctx, UID)[2])
    assert host.get(UID).state is State.COMPLETED
    assert [found.ref.name for found in host.marked_groups()] == ["other"]
    assert SECRET not in shown(host, UID)
    assert secret.read_text() == SECRET
    assert host.files("other")["mon_data/mon_L3_00/mbm_total_bytes.begin"] == before
    assert release(host.ctx, "other", owner="oci").completed
    host.clean()


def plain(path: Path, _: Path) -> None:
    path.write_text("x")


@pytest.mark.parametrize("make", [plain, link, fifo])
@pytest.mark.parametrize("place", ["", "mon_data", "mon_data/mon_L3_00", "classes", "classes/gold"])
def test_file_in_the_place_of_a_folder_does_not_keep_the_rmid(
    small_simulation: str, tmp_path: Path, process: Start, make: Callable[[Path, Path], None], place: str
) -> None:
    """The run could not end, and its RMID was not free, until an operator had moved the file away."""
    host = Host(small_simulation, str(tmp_path))
    host.make_class("gold")
    child, gold = process(), process()
    host.tree.write_task("gold", gold.pid)
    assign(host.ctx, assignment(UID, child.pid, "oci", member="c1"))
    assign(host.ctx, assignment(UID, gold.pid, "oci", member="c2"))
    host.manager.maintenance.tick()
    path, secret = Path(host.run, "groups", UID, place), Path(host.run, "secret")
    secret.write_text(SECRET)
    shutil.rmtree(path)
    make(path, secret)
    done = release(host.ctx, UID, owner="oci")
    assert done.workload.state is State.COMPLETED
    assert host.marked_groups() == []
    assert secret.read_text() == SECRET
    # Unknown baselines are not derived from the last readings.
    assert {total.quality for total in done.totals} <= {Quality.ESTIMATED, Quality.UNKNOWN}
    assert all(total.reason for total in done.totals)
    create(host.ctx, UID, owner="oci")
    release(host.ctx, UID, owner="oci")
    host.clean()


def test_a_run_whose_begin_values_were_removed_is_not_counted_from_0(host: Host, process: Start) -> None:
    """Energy continues from the value that others left: all of it counted for this workload."""
    assign(host.ctx, assignment(UID, process().pid, "oci"))
    shutil.rmtree(Path(host.run, "groups", UID, "mon_data"))
    live = read(host.ctx, UID)[2]
    assert live
    assert {(total.number, total.quality) for total in live} == {(None, Quality.UNKNOWN)}
    done = release(host.ctx, UID, owner="oci")
    assert {(total.number, total.quality) for total in done.totals} == {(None, Quality.UNKNOWN)}
    assert all("'no file'" in total.reason for total in done.totals)


def test_a_run_whose_folder_was_removed_still_ends_and_gives_its_rmid_back(
    small_simulation: str, tmp_path: Path, process: Start
) -> None:
    """Its last values had no place to be written to: it never ended."""
    host = Host(small_simulation, str(tmp_path))
    host.make_class("gold")
    child, gold = process(), process()
    host.tree.write_task("gold", gold.pid)
    assign(host.ctx, assignment(UID, child.pid, "oci", member="c1"))
    assign(host.ctx, assignment(UID, gold.pid, "oci", member="c2"))
    shutil.rmtree(Path(host.run, "groups", UID))
    host.manager.maintenance.tick()
    done = release(host.ctx, UID, owner="oci")
    assert done.workload.state is State.COMPLETED
    assert host.marked_groups() == []
    assert {(total.number, total.quality) for total in done.totals} == {(None, Quality.UNKNOWN)}
    assert all("baseline" in total.reason for total in done.totals)
    host.clean()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(begin=st.binary(max_size=60), end=st.binary(max_size=60), when=st.binary(max_size=40))
def test_damaged_files_of_an_ended_run_give_no_number(
    small_simulation: str, tmp_path: Path, begin: bytes, end: bytes, when: bytes
) -> None:
    host = Host(small_simulation, str(tmp_path))
    create(host.ctx, "web", owner="a")
    top = Path(host.run, "groups", "web")
    release(host.ctx, "web", owner="a")
    generation = host.get("web").generation
    domain = next((top / "mon_data").iterdir())
    (domain / "mbm_total_bytes.begin").write_bytes(begin)
    (domain / "mbm_total_bytes.end").write_bytes(end)
    (top / "completed_at").write_bytes(when)
    for total in read(host.ctx, "web")[2]:
        assert total.number is None or total.number >= 0
    # Moved aside for the next run, and pruned by a time that is none.
    create(host.ctx, "web", owner="a")
    host.manager.maintenance.tick()
    assert release(host.ctx, "web", owner="a").workload.generation == generation + 1
    host.check()
