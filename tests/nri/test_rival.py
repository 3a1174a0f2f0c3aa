# SPDX-License-Identifier: Apache-2.0
"""nri-resctrl-mon on the same host is found, and said."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.nri.rival import rivals
from tests.nri.conftest import Node

# Whoever else is on the host that runs the tests, there is no process in there.
NOBODY = "/sys"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[str]:
    """A socket as resctrlmond's: of root and the group that marks."""
    path = str(tmp_path / "manager")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chown(path, 0, 4242)
        yield path


def await_name(pid: int, name: str) -> None:
    """exec closes what was inherited, which is what Popen waits for, before it gives the process its name."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/comm").read_text() != f"{name}\n":
        assert time.monotonic() < deadline, "the program was never called by its name"
        time.sleep(0.001)


@pytest.mark.parametrize("name", ["nri-resctrl-mon", "90-resctrl-mon"])
def test_its_process(tmp_path: Path, manager: str, name: str) -> None:
    program = tmp_path / name
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "600"]) as process:
        try:
            await_name(process.pid, name)
            assert f"it runs as process {process.pid}" in rivals(manager, plugins="/none", snapshots="/none")
        finally:
            process.kill()
    assert f"it runs as process {process.pid}" not in rivals(manager, plugins="/none", snapshots="/none")


def test_a_process_of_that_name_that_is_not_roots_is_none(tmp_path: Path, manager: str) -> None:
    """Anybody may call his process so; only root gets at the runtime's socket."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'nri-resctrl-mon'); print(flush=True); time.sleep(600)"
    # The system's Python: ours may be in a folder that is root's alone.
    command = ["/usr/bin/python3", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=65534, group=65534, cwd="/") as process:
        try:
            assert process.stdout
            assert process.stdout.readline()
            assert Path(f"/proc/{process.pid}/comm").read_text() == "nri-resctrl-mon\n"
            assert f"it runs as process {process.pid}" not in rivals(manager, plugins="/none", snapshots="/none")
        finally:
            process.kill()


def test_its_place_among_the_plugins_that_are_launched(tmp_path: Path, manager: str) -> None:
    for name in ("90-resctrl-mon", "10-other", "resctrl-mon"):
        (tmp_path / name).touch()
    found = rivals(manager, proc=NOBODY, plugins=str(tmp_path), snapshots="/none")
    assert found == [f"{tmp_path}/90-resctrl-mon is launched by the runtime"]


def test_its_folder_is_told_from_ours(tmp_path: Path, manager: str) -> None:
    folder = tmp_path / "nri-resctrl-mon"
    folder.mkdir()

    def found(socket: str) -> list[str]:
        return rivals(socket, proc=NOBODY, plugins="/none", snapshots=str(folder))

    assert found(manager) == [f"{folder} is not of resctrlmond"]
    os.chown(folder, 0, 4242)
    assert found(manager) == []
    assert found("/none") == [], "it cannot be told whose it is"


def test_it_is_said_once_and_in_the_status(node: Node, tmp_path: Path) -> None:
    node.stop_adapter()
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(tmp_path / "nri-notify"))
    notify.settimeout(30)
    program = tmp_path / "nri-resctrl-mon"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "600"]) as process, notify:
        try:
            node.start_adapter(NOTIFY_SOCKET=str(tmp_path / "nri-notify"))
            with node.connected() as plugin:
                plugin.greet()
                told = iter(lambda: notify.recv(4096).decode(), "")
                wanted = "STATUS=registered with containerd v1.7.24; nri-resctrl-mon is here too"
                assert next(status for status in told if status == wanted)
            assert node.said().count("nri-resctrl-mon is on this host too") == 1
            assert f"it runs as process {process.pid}" in node.said()
        finally:
            process.kill()
