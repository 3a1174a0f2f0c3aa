# SPDX-License-Identifier: Apache-2.0
"""Other programs that manage monitoring groups are found by their names, and by whom they belong to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from resctrlmond.others import running

# A process that takes a name, and prints once it has it.
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
def test_only_roots_processes_of_a_known_name_are_others(name: str, user: int) -> None:
    # The system's Python: the tests' own may be in a folder that is root's alone.
    command = ["/usr/bin/python3", "-c", NAMED, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=user, group=user, cwd="/") as process:
        try:
            assert process.stdout
            assert process.stdout.readline()
            found = [one.program.name for one in running() if one.pid == process.pid]
        finally:
            process.kill()
    assert found == ([NAMES[name]] if NAMES[name] and user == 0 else [])


def test_a_process_that_ends_meanwhile_is_passed_over(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "4711")
    assert list(running(proc=str(tmp_path))) == []
