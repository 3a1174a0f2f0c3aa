# SPDX-License-Identifier: Apache-2.0
"""A call that fails and cannot be undone either raises the error that it failed with."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.groups.errors import NotWritten
from resctrlmond.groups.files import write_file, writing
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.sim.control import Control, Fault
from resctrlmond.sim.messages import Operation
from tests.groups.conftest import Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]


def test_a_failing_undo_of_assign_does_not_hide_the_first_error(
    host: Host, process: Start, caplog: pytest.LogCaptureFixture
) -> None:
    control = Control(host.mountpoint)
    control.set_faults(
        Fault(on=Operation.TASKS, group="mon_groups/k", answer="EPERM"),
        Fault(on=Operation.RMDIR, group="mon_groups/k", answer="EBUSY"),
    )
    try:
        with pytest.raises(ResctrlError) as caught:
            host.manager.assign(assignment("k", process().pid))
    finally:
        control.set_faults()
    assert caught.value.errno == errno.EPERM
    (logged,) = caplog.messages
    assert logged.startswith("k: cannot undo what a failed call did: ")
    assert "EBUSY" in logged
    # What could not be removed is known, and not forgotten.
    host.check()
    host.manager.release("k", owner="test")
    assert host.ours() == []


def test_a_failing_undo_of_a_write_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "record"
    (in_the_way / "full").mkdir(parents=True)

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    # Nothing but a disk that turns read-only in between does this.
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(NotWritten) as caught, writing(str(in_the_way)):
        write_file(str(in_the_way), b"text")
    assert caught.value.errno == errno.EISDIR
    assert "Read-only file system" in caplog.text
