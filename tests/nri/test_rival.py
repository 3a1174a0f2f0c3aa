# SPDX-License-Identifier: Apache-2.0
"""nri-resctrl-mon on the same host is detected and reported."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.nri.rival import rivals
from tests.nri.conftest import Node
from tests.wait import wait_until

# A directory without processes, which does not depend on the host.
NO_PROCESSES = "/sys"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[str]:
    """Yield a socket like resctrlmond's: its group is the mark."""
    path = str(tmp_path / "manager")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chown(path, 0, 4242)
        yield path


def await_name(pid: int, name: str) -> None:
    """Popen waits for exec to close the inherited descriptors, but exec sets the name of the process later."""
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == f"{name}\n", interval_s=0.001)


@pytest.mark.parametrize("name", ["nri-resctrl-mon", "90-resctrl-mon"])
def test_its_process_is_detected(tmp_path: Path, manager: str, name: str) -> None:
    program = tmp_path / name
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "600"]) as process:
        try:
            await_name(process.pid, name)
            assert f"it runs as process {process.pid}" in rivals(manager, plugins="/none", snapshots="/none")
        finally:
            process.kill()
    assert f"it runs as process {process.pid}" not in rivals(manager, plugins="/none", snapshots="/none")


def test_process_of_that_name_of_another_user_is_ignored(tmp_path: Path, manager: str) -> None:
    """All users can name a process like this; only root has access to the runtime's socket."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'nri-resctrl-mon'); print(flush=True); time.sleep(600)"
    # The system's Python, because the test's own may be in a directory that only root can read.
    command = ["/usr/bin/python3", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=65534, group=65534, cwd="/") as process:
        try:
            assert process.stdout
            assert process.stdout.readline()
            assert Path(f"/proc/{process.pid}/comm").read_text() == "nri-resctrl-mon\n"
            assert f"it runs as process {process.pid}" not in rivals(manager, plugins="/none", snapshots="/none")
        finally:
            process.kill()


def test_its_file_among_launched_plugins_is_detected(tmp_path: Path, manager: str) -> None:
    for name in ("90-resctrl-mon", "10-other", "resctrl-mon"):
        (tmp_path / name).touch()
    found = rivals(manager, proc=NO_PROCESSES, plugins=str(tmp_path), snapshots="/none")
    assert found == [f"{tmp_path}/90-resctrl-mon is launched by the runtime"]


def test_its_directory_is_distinguished_from_that_of_resctrlmond(tmp_path: Path, manager: str) -> None:
    folder = tmp_path / "nri-resctrl-mon"
    folder.mkdir()

    def found(socket: str) -> list[str]:
        return rivals(socket, proc=NO_PROCESSES, plugins="/none", snapshots=str(folder))

    assert found(manager) == [f"{folder} does not belong to resctrlmond"]
    os.chown(folder, 0, 4242)
    assert found(manager) == []
    assert found("/none") == [], "its owner is unknown"


def test_rival_is_logged_once_and_shown_in_the_status(node: Node, tmp_path: Path) -> None:
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
                statuses = iter(lambda: notify.recv(4096).decode(), "")
                wanted = "STATUS=registered with containerd v1.7.24; nri-resctrl-mon is here too"
                assert next(status for status in statuses if status == wanted)
            assert node.log_text().count("nri-resctrl-mon is on this host too") == 1
            assert f"it runs as process {process.pid}" in node.log_text()
        finally:
            process.kill()
