# SPDX-License-Identifier: Apache-2.0
"""The files of a workload for its containers: when they are written, and how long their folder stays."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl.mounts import mounts
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.model.errors import InvalidKey, LimitExceeded, NotWritten
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.profiles.profile import Profile, Profiles
from resctrlmond.workloads.records.usage import Usage
from resctrlmond.workloads.upkeep import exposures
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import total_of
from tests.workloads.conftest import UID, Host, assignment, machine

EVENTS = {"activity", "core_energy", "mbm_local_bytes", "mbm_total_bytes"}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with machine(tmp_path, "intel-aet", 8, residue=3) as (made, _):
        yield made


@pytest.fixture
def spawn(host: Host, process: Callable[[], subprocess.Popen[bytes]]) -> Callable[[], int]:
    """Start a process that has a virtual task; returns its id."""

    def start() -> int:
        return Control(host.mountpoint).spawn(tid=process().pid)

    return start


def tick(host: Host, interval_s: float = 0.0) -> None:
    host.manager.exposures.tick(interval_s)


def words(folder: Path, name: str) -> dict[str, list[list[str]]]:
    """Return the words of each line of a file after the first one, by that one."""
    found: dict[str, list[list[str]]] = {}
    for line in (folder / name).read_text().splitlines():
        word, *rest = line.split()
        found.setdefault(word, []).append(rest)
    return found


def test_folder_exists_before_the_workload_and_has_its_figures_later(host: Host, spawn: Callable[[], int]) -> None:
    folder = Path(host.manager.exposures.expose(UID, "c1"))
    assert folder == Path(host.run, "exposed", UID, "files")
    tick(host)
    assert os.listdir(folder) == []
    pid = spawn()
    assign(host.ctx, assignment(UID, pid))
    tick(host)
    assert sorted(os.listdir(folder)) == ["begin", "live"]
    begun = words(folder, "begin")
    assert begun["time"] == [[host.get(UID).first.created_at]]
    Control(host.mountpoint).run(pid, 1_000_000_000)
    tick(host)
    live = words(folder, "live")
    assert live["state"] == [["active"]]
    totals = {event: (number, quality) for event, number, quality in live["total"]}
    assert totals.keys() == EVENTS
    expected = total_of(read(host.ctx, UID)[2])
    assert totals["mbm_total_bytes"] == (str(expected.number), str(expected.quality))
    assert expected.number
    values = {(domain, event): text for domain, event, *text in live["value"]}
    before = {(domain, event): text for domain, event, *text in begun["value"]}
    assert values.keys() == before.keys()
    used = sum(int(values[one][0]) - int(before[one][0]) for one in values if one[1] == "mbm_total_bytes")
    assert used == expected.number
    assert not (folder / "end").exists()
    release(host.ctx, UID, owner="test")
    tick(host)
    ended = words(folder, "end")
    assert ended == words(folder, "live")
    assert ended["state"] == [["completed"]]
    assert {event for event, *_ in ended["total"]} == EVENTS


def test_files_are_regular_and_readable_by_any_container(host: Host, spawn: Callable[[], int]) -> None:
    """The root of a container may be another user of the host."""
    folder = Path(host.manager.exposures.expose("k", "c1"))
    assign(host.ctx, assignment("k", spawn()))
    tick(host)
    release(host.ctx, "k", owner="test")
    tick(host)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert sorted(os.listdir(folder)) == ["begin", "end", "live"]
    for name in os.listdir(folder):
        status = (folder / name).lstat()
        assert stat.S_ISREG(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o644


def test_live_is_written_after_the_interval_or_a_change_of_the_state(host: Host, spawn: Callable[[], int]) -> None:
    live = Path(host.manager.exposures.expose("k", "c1"), "live")
    create(host.ctx, "k", owner="test")
    tick(host, 3600)
    first = live.stat().st_ino
    tick(host, 3600)
    assert live.stat().st_ino == first
    assign(host.ctx, assignment("k", spawn()))
    tick(host, 3600)
    assert "state active\n" in live.read_text()
    second = live.stat().st_ino
    tick(host, 0)
    assert live.stat().st_ino != second


def test_end_is_written_after_the_call_that_changes_the_workload(host: Host, spawn: Callable[[], int]) -> None:
    folder = Path(host.manager.exposures.expose("k", "c1"))
    assign(host.ctx, assignment("k", spawn()))
    tick(host)
    before = (folder / "live").read_text()
    release(host.ctx, "k", owner="test")
    with host.ctx.store.transaction("k"):
        ticking = threading.Thread(target=tick, args=[host])
        ticking.start()
        ticking.join(60)
        assert not ticking.is_alive()
    assert ((folder / "live").read_text(), (folder / "end").exists()) == (before, False)
    tick(host)
    assert {event for event, *_ in words(folder, "end")["total"]} == EVENTS


def test_only_exposed_workloads_are_read(
    host: Host, spawn: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assign(host.ctx, assignment("other", spawn()))
    assign(host.ctx, assignment("k", spawn()))
    asked: list[str] = []
    usage = host.manager.exposures._read

    def read_one(key: str) -> Usage:
        asked.append(key)
        return usage(key)

    monkeypatch.setattr(host.manager.exposures, "_read", read_one)
    tick(host)
    assert asked == []
    host.manager.exposures.expose("k", "c1")
    tick(host)
    assert asked == ["k"]


def test_files_have_no_reasons_and_only_selected_events(host: Host, spawn: Callable[[], int]) -> None:
    """A reason may name another workload of the host."""
    profile = Profile("p", events=("mbm_total_bytes",))
    host.ctx.config.profiles = Profiles({"p": profile}, default="p", default_origin="F:1")
    folder = Path(host.manager.exposures.expose("k", "c1"))
    facts = Facts(annotations={}, namespace="", image="", container="")
    assign(host.ctx, assignment("k", spawn(), member="k", kind="container", facts=facts))
    assign(host.ctx, assignment("k", spawn(), late=True))
    tick(host)
    ((event, _, quality),) = words(folder, "live")["total"]
    assert (event, quality) == ("mbm_total_bytes", "late")
    assert {event for _, event, *_ in words(folder, "begin")["value"]} == {"mbm_total_bytes"}


def test_pending_workload_states_it_until_it_has_a_group(host: Host, spawn: Callable[[], int]) -> None:
    for number in range(7):
        create(host.ctx, f"other-{number}", owner="test")
    folder = Path(host.manager.exposures.expose("k", "c1"))
    assign(host.ctx, assignment("k", spawn()))
    tick(host)
    assert (folder / "live").read_text().splitlines()[1:] == ["state pending"]
    assert not (folder / "begin").exists()
    release(host.ctx, "other-0", owner="test")
    deadline = time.monotonic() + 60
    while host.get("k").state is State.PENDING:
        assert time.monotonic() < deadline
        host.manager.maintenance.tick()
        time.sleep(0.05)
    tick(host, 3600)
    assert words(folder, "live")["state"] == [["active"]]
    assert (folder / "begin").exists()


def test_next_run_replaces_the_files_in_the_same_folder(host: Host, spawn: Callable[[], int]) -> None:
    folder = Path(host.manager.exposures.expose("k", "c1"))
    inode = folder.stat().st_ino
    for _ in range(2):
        assign(host.ctx, assignment("k", spawn()))
        tick(host, 3600)
        assert sorted(os.listdir(folder)) == ["begin", "live"]
        assert words(folder, "begin")["time"] == [[host.get("k").first.created_at]]
        release(host.ctx, "k", owner="test")
        tick(host, 3600)
        assert (folder / "end").exists()
    assert folder.stat().st_ino == inode


def test_lost_group_and_the_run_after_it_keep_the_folder(host: Host, spawn: Callable[[], int]) -> None:
    """As after an unmount: no file of the folder leads into resctrl, so nothing is busy."""
    folder = Path(host.manager.exposures.expose("k", "c1"))
    inode = folder.stat().st_ino
    pid = spawn()
    assign(host.ctx, assignment("k", pid))
    tick(host)
    os.rmdir(host.tree.full_path(host.get("k").first.ref))
    host.manager.maintenance.tick()
    tick(host)
    assert words(folder, "end")["state"] == [["lost"]]
    assign(host.ctx, assignment("k", pid, member="again"))
    tick(host)
    assert words(folder, "live")["state"] == [["active"]]
    assert not (folder / "end").exists()
    assert folder.stat().st_ino == inode


def test_next_daemon_continues(host: Host, spawn: Callable[[], int]) -> None:
    folder = Path(host.manager.exposures.expose("k", "c1"))
    inode = folder.stat().st_ino
    pid = spawn()
    assign(host.ctx, assignment("k", pid))
    tick(host)
    before = (folder / "begin").read_text()
    host.restart()
    Control(host.mountpoint).run(pid, 1_000_000_000)
    tick(host)
    assert (folder / "begin").read_text() == before
    totals = {event: number for event, number, _ in words(folder, "live")["total"]}
    assert int(totals["mbm_total_bytes"]) > 0
    assert folder.stat().st_ino == inode


def test_release_of_all_groups_is_in_the_files(host: Host, spawn: Callable[[], int]) -> None:
    """No daemon writes them afterwards."""
    folder = Path(host.manager.exposures.expose("k", "c1"))
    assign(host.ctx, assignment("k", spawn()))
    tick(host)
    assert host.manager.release_all() == []
    assert words(folder, "live")["state"] == [["completed"]]


def age(host: Host) -> None:
    """Let all containers be older than a container whose creation may not have ended."""
    host.manager.exposures._started -= exposures.GRACE_S
    for written in host.manager.exposures._written.values():
        for container in written.exposed_at:
            written.exposed_at[container] -= exposures.GRACE_S


def test_folder_is_removed_without_workload_and_containers(
    host: Host, spawn: Callable[[], int], cgroup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposures, "LOOK_S", 0.0)
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
    folder = Path(host.manager.exposures.expose("k", "c1", cgroup.removeprefix(top)))
    host.manager.exposures.expose("k", "c2", "/no/such")
    assign(host.ctx, assignment("k", spawn()))
    tick(host)
    age(host)
    tick(host)
    assert len(list((folder.parent / "containers").iterdir())) == 2
    release(host.ctx, "k", owner="test")
    with host.ctx.store.transaction("k") as txn:
        txn.drop()
    tick(host)
    # The container of the control group may still have it as a mount: a later run must be in this very folder.
    assert os.listdir(folder) == []
    assert [entry.name for entry in (folder.parent / "containers").iterdir()] == ["c1"]
    os.rmdir(cgroup)
    tick(host)
    assert host.folder("exposed") == []
    assert Path(host.manager.exposures.expose("k", "c3")).is_dir()
    os.mkdir(cgroup)


def test_new_container_keeps_a_folder_whose_control_group_is_not_there_yet(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposures, "LOOK_S", 0.0)
    folder = Path(host.manager.exposures.expose("k", "c1", "/no/such"))
    tick(host)
    assert folder.is_dir()
    age(host)
    tick(host)
    assert host.folder("exposed") == []


def test_clock_that_is_set_keeps_the_folder_of_a_new_container(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime does not create a container whose mount has no source."""
    monkeypatch.setattr(exposures, "LOOK_S", 0.0)
    folder = Path(host.manager.exposures.expose("k", "c1", "/no/such"))
    # As after a step of the clock by a day. The next daemon does not know when the folder was exposed.
    os.utime(folder.parent / "containers" / "c1", (time.time() - 86400,) * 2)
    tick(host)
    assert folder.is_dir()
    host.restart()
    tick(host)
    assert folder.is_dir()
    age(host)
    tick(host)
    assert host.folder("exposed") == []


def test_earlier_containers_of_a_pod_are_forgotten(host: Host) -> None:
    folder = Path(host.manager.exposures.expose(UID, "c1", "/no/such"))
    age(host)
    host.manager.exposures.expose(UID, "c2", "/no/such")
    assert [entry.name for entry in (folder.parent / "containers").iterdir()] == ["c2"]


@pytest.mark.parametrize(("key", "container"), [("../x", "c"), ("k", "../c"), ("k", ""), ("", "c")])
def test_names_that_are_not_valid_are_refused(host: Host, key: str, container: str) -> None:
    with pytest.raises(InvalidKey):
        host.manager.exposures.expose(key, container)
    assert not Path(host.run, "exposed").exists()


def test_number_of_folders_is_limited(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposures, "MAX_EXPOSED", 1)
    host.manager.exposures.expose("k", "c1")
    host.manager.exposures.expose("k", "c2")
    with pytest.raises(LimitExceeded, match="Expose fewer"):
        host.manager.exposures.expose("other", "c3")


def test_file_in_the_way_is_an_error_and_other_workloads_are_written(
    host: Host, spawn: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    Path(host.run, "exposed").mkdir()
    Path(host.run, "exposed", "a").touch()
    with pytest.raises(NotWritten):
        host.manager.exposures.expose("a", "c1")
    removed = Path(host.manager.exposures.expose("b", "c1"))
    kept = Path(host.manager.exposures.expose("c", "c1"))
    for key in "bc":
        assign(host.ctx, assignment(key, spawn()))
    removed.rmdir()
    for _ in range(2):
        tick(host)
    assert (kept / "live").exists()
    assert caplog.text.count("b: the files for its containers are not up to date") == 1
