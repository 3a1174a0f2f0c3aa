# SPDX-License-Identifier: Apache-2.0
"""A start computes each file ``quality`` again, and writes what is missing in a snapshot."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.records.atomic_files import write_file
from resctrlmond.workloads.verbs.assign import assign
from tests.workloads.conftest import Host, assignment, machine

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with machine(tmp_path, "intel-aet", 8, residue=3) as (made, _):
        yield made


def file(host: Host, name: str) -> Path:
    return Path(host.run, "groups", "k", name)


def begin(host: Host, process: Start, *, late: bool = False) -> int:
    """Begin a run that has a checkpoint."""
    pid = Control(host.mountpoint).spawn(tid=process().pid)
    assign(host.ctx, assignment("k", pid, late=late))
    host.manager.maintenance.tick()
    return pid


def test_file_that_is_better_than_the_record_is_replaced(host: Host, process: Start) -> None:
    """A daemon may be killed after it has written the file, and before the record."""
    begin(host, process, late=True)
    path = file(host, "quality")
    write_file(str(path), path.read_bytes().replace(b" late ", b" exact "))
    host.restart()
    assert {line.split()[1] for line in path.read_text().splitlines()} == {"late"}


def test_missing_file_is_written_again(host: Host, process: Start) -> None:
    begin(host, process)
    before = file(host, "quality").read_text()
    file(host, "quality").unlink()
    host.restart()
    assert file(host, "quality").read_text() == before


def test_file_includes_a_checkpoint_that_was_written_after_it(host: Host, process: Start) -> None:
    """A reader that stops between the two files must not leave an exact total."""
    begin(host, process)
    group = host.get("k").first
    Control(host.mountpoint).set_faults(Fault(group=group.ref.path, event="mbm_total_bytes", answer="Unavailable"))
    begun_ns = time.monotonic_ns()
    readings = host.tree.read(group.ref)
    assert host.ctx.snapshots.keep_read(group.created_at, begun_ns, "k", readings, group.inodes).number
    assert "mbm_total_bytes exact" in file(host, "quality").read_text()
    host.restart()
    assert "mbm_total_bytes exact" not in file(host, "quality").read_text()


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
    obstacle.rmdir()
    host.restart()
    assert os.readlink(link) == target


def test_workload_that_was_kept_in_memory_only_is_worse_after_a_start(host: Host, process: Start) -> None:
    """Its record lacks a downgrade, so the next start computes a worse quality."""
    begin(host, process)
    records = Path(host.run, "records")
    # A folder in the place of the temporary file: the record cannot be written.
    (records / ".k.json.new").mkdir()
    with (
        pytest.raises(NotWritten, match="cannot write the state of a workload"),
        host.ctx.store.transaction("k") as txn,
    ):
        txn.save(txn.workload.doubted(txn.workload.first, doubt(Reason.NOT_INCLUDED, member="x", cause="why")))
    # The next checkpoint writes the file with what the record lacks.
    host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9, reserve=0, overflow=0)
    host.manager.maintenance.tick()
    assert host.ctx.store.unsaved == ["k"]
    assert "late" in file(host, "quality").read_text()
    host.restart()
    words = {line.split()[1] for line in file(host, "quality").read_text().splitlines()}
    assert words == {"estimated"}
