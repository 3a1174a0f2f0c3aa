# SPDX-License-Identifier: Apache-2.0
"""A start keeps the files ``quality`` that were up to date when the last daemon stopped, and computes the others."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import not_read
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.records.atomic_files import write_file
from resctrlmond.workloads.records.quality_file import QualityFiles
from resctrlmond.workloads.upkeep import quality_stamps
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment, machine

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with machine(tmp_path, "intel-aet", 8, residue=3) as (made, _):
        yield made


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the workloads whose file was computed."""
    keys: list[str] = []
    update = QualityFiles.update

    def and_note(files: QualityFiles, workload: Workload, *found: Mapping[str, Sequence[Reading]]) -> None:
        keys.append(workload.key)
        update(files, workload, *found)

    monkeypatch.setattr(QualityFiles, "update", and_note)
    return keys


def stop(host: Host) -> None:
    """End the daemon as SIGTERM does."""
    quality_stamps.save(host.ctx)


def file(host: Host, name: str, key: str = "k") -> Path:
    return Path(host.run, "groups", key, name)


def stamps(host: Host) -> Path:
    return Path(host.run, "quality-stamps.json")


def begin(host: Host, process: Start, *, late: bool = False) -> int:
    """Begin a run that has a checkpoint."""
    pid = Control(host.mountpoint).spawn(tid=process().pid)
    assign(host.ctx, assignment("k", pid, late=late))
    host.manager.maintenance.tick()
    return pid


def test_a_restart_computes_no_quality_again(host: Host, process: Start, computed: list[str]) -> None:
    pid = begin(host, process)
    before = file(host, "quality").read_text()
    stop(host)
    computed.clear()
    # Also if the second daemon stops before its first tick.
    for _ in range(2):
        host.restart()
        assert not stamps(host).exists()
        stop(host)
    host.restart()
    assert computed == []
    assert file(host, "quality").read_text() == before
    Control(host.mountpoint).run(pid, 1_000_000_000)
    released = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in released} == {Quality.EXACT}
    assert any(total.number for total in released)
    # The links were removed, and each begin value has an end value.
    names = sorted(os.listdir(file(host, "mon_data/mon_L3_00")))
    assert names == [
        f"{event}.{when}"
        for event in ("llc_occupancy", "mbm_local_bytes", "mbm_total_bytes")
        for when in ("begin", "end")
    ]
    host.check()


def test_a_start_after_a_kill_computes_all(host: Host, process: Start, computed: list[str]) -> None:
    begin(host, process)
    stop(host)
    host.restart()
    host.manager.maintenance.tick()
    computed.clear()
    host.restart()
    assert computed == ["k"]


@pytest.mark.parametrize("name", ["record", "quality", "checkpoint"])
def test_a_changed_file_is_not_trusted(host: Host, process: Start, computed: list[str], name: str) -> None:
    begin(host, process, late=True)
    stop(host)
    path = Path(host.run, "records", "k.json") if name == "record" else file(host, name)
    text = path.read_bytes()
    write_file(str(path), text.replace(b" late ", b" exact ") if name == "quality" else text)
    computed.clear()
    host.restart()
    assert computed == ["k"]
    assert {line.split()[1] for line in file(host, "quality").read_text().splitlines()} == {"late"}


def test_a_missing_file_is_written_again(host: Host, process: Start) -> None:
    begin(host, process)
    before = file(host, "quality").read_text()
    stop(host)
    file(host, "quality").unlink()
    host.restart()
    assert file(host, "quality").read_text() == before


def test_a_checkpoint_that_the_file_does_not_include_gives_no_stamp(host: Host, process: Start) -> None:
    """A reader that stops between the two files must not leave an exact total."""
    begin(host, process)
    group = host.get("k").first
    Control(host.mountpoint).set_faults(Fault(group=group.ref.path, event="mbm_total_bytes", answer="Unavailable"))
    begun_ns = time.monotonic_ns()
    readings = host.tree.read(group.ref)
    assert host.ctx.snapshots.keep_read(group.created_at, begun_ns, "k", readings, group.inodes).number
    stop(host)
    assert "mbm_total_bytes exact" in file(host, "quality").read_text()
    host.restart()
    assert "mbm_total_bytes exact" not in file(host, "quality").read_text()


def test_the_stamps_of_other_code_are_not_valid(host: Host, process: Start, computed: list[str]) -> None:
    """An update may have changed how a quality is computed."""
    begin(host, process)
    stop(host)
    left = msgspec.json.decode(stamps(host).read_bytes())
    assert list(left["files"]) == ["k"]
    left["code"][1] += 1
    stamps(host).write_bytes(msgspec.json.encode(left))
    computed.clear()
    host.restart()
    assert computed == ["k"]


def test_an_update_while_the_daemon_runs_makes_its_stamps_invalid(
    host: Host, process: Start, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package replaces the files before it restarts the daemon, which stops with the old code in memory."""
    begin(host, process)
    monkeypatch.setattr(quality_stamps, "_code", lambda: (1, 2))
    stop(host)
    computed.clear()
    host.restart()
    assert computed == ["k"]


def test_links_that_could_not_be_changed_are_changed_by_the_next_start(host: Host, process: Start) -> None:
    begin(host, process)
    link = next(file(host, "mon_data").glob("*/mbm_total_bytes"))
    target = os.readlink(link)
    link.unlink()
    link.symlink_to("/elsewhere")
    # A folder in the place of the temporary link.
    obstacle = link.with_name(f".{link.name}.new")
    obstacle.mkdir()
    host.restart()
    assert os.readlink(link) == "/elsewhere"
    stop(host)
    obstacle.rmdir()
    host.restart()
    assert os.readlink(link) == target


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"code": [1, 2]}', b"\xff", b'{"code": [1, "x"], "files": {}}'])
def test_a_damaged_file_counts_as_none(host: Host, process: Start, computed: list[str], text: bytes) -> None:
    begin(host, process)
    stamps(host).write_bytes(text)
    computed.clear()
    host.restart()
    assert computed == ["k"]


def test_a_start_without_the_stamps_because_they_cannot_be_read(
    host: Host, process: Start, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They only save time: the daemon starts."""
    begin(host, process)
    stop(host)
    computed.clear()

    def fail(path: str) -> bytes:
        raise not_read(OSError(errno.EIO, os.strerror(errno.EIO)), "read the saved state of a workload", path)

    monkeypatch.setattr(quality_stamps, "read_file", fail)
    host.restart()
    assert computed == ["k"]


def test_a_workload_that_is_kept_in_memory_only_gives_no_stamp(host: Host, process: Start) -> None:
    """Its record lacks a downgrade, so the next start computes a worse quality."""
    begin(host, process)
    records = Path(host.run, "records")
    # A folder in the place of the temporary file: the record cannot be written.
    (records / ".k.json.new").mkdir()
    with (
        pytest.raises(NotWritten, match="cannot write the state of a workload"),
        host.ctx.store.transaction("k") as txn,
    ):
        txn.save(txn.workload.downgraded(txn.workload.first, Quality.LATE, "for this test"))
    # The next checkpoint writes the file with what the record lacks.
    host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9, reserve=0, overflow=0)
    host.manager.maintenance.tick()
    assert host.ctx.store.unsaved == ["k"]
    assert "late" in file(host, "quality").read_text()
    stop(host)
    host.restart()
    words = {line.split()[1] for line in file(host, "quality").read_text().splitlines()}
    assert words == {"estimated"}
