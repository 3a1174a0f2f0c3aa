# SPDX-License-Identifier: Apache-2.0
"""Processes of known programs are found by their names and their users."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from resctrlmond.host.known_programs import find_processes

# Sets the name of the process, prints a line, and sleeps.
NAMED = (
    "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, sys.argv[1].encode()); print(flush=True); time.sleep(600)"
)
NAMES = {
    "nri-resctrl-mon": "nri-resctrl-mon",
    "90-resctrl-mon": "nri-resctrl-mon",
    "90-nri-resctrl-mon": "nri-resctrl-mon",
    "kepler": "kepler",
    "memory-bandwidth-exporter": "memory-bandwidth-exporter",
    "pqos": "intel-cmt-cat",
    "rdtset": "intel-cmt-cat",
    "pcm": "pcm",
    "pcm-memory": "pcm",
    "pcm-sensor-server": "pcm",
    "pcmanfm": "",
    "keplerx": "",
}


@pytest.mark.parametrize("user", [0, 65534])
@pytest.mark.parametrize("name", NAMES)
def test_only_processes_of_root_with_a_known_name_are_found(name: str, user: int) -> None:
    # The Python of the system, because other users may have no access to the Python of the tests.
    command = ["/usr/bin/python3", "-c", NAMED, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=user, group=user, cwd="/") as process:
        try:
            assert process.stdout
            assert process.stdout.readline()
            found = [known.program.name for known in find_processes() if known.pid == process.pid]
        finally:
            process.kill()
    assert found == ([NAMES[name]] if NAMES[name] and user == 0 else [])


def test_process_that_ends_meanwhile_is_skipped(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "4711")
    assert list(find_processes(proc=str(tmp_path))) == []
