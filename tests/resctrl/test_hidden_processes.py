# SPDX-License-Identifier: Apache-2.0
"""A process that /proc hides does not pass for one that has ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from resctrlmond.resctrl import processes

CODE = """
import os, sys
from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import NoSuchProcess, NotRead
pid = int(sys.argv[1])
print(*map(processes.is_hidden, (1, pid, os.getpid(), 2**22 - 1)))
for look in (processes.stat, processes.Process.open, cgroups.cgroup_of):
    try:
        look(pid)
    except (NoSuchProcess, NotRead) as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("hidepid", [1, 2])
def test_process_that_proc_hides(hidepid: int) -> None:
    """The daemon stated that there was no such process: it sees that of another user only with CAP_SYS_PTRACE."""
    mount = f"mount -t proc -o hidepid={hidepid} proc /proc"
    # The daemon has the group of its mark, and with gid=0, which is the default, root's group sees all processes.
    drop = "setpriv --regid=4242 --clear-groups --bounding-set=-all,+dac_override"
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec {drop} "$@"', "sh"]
            done = subprocess.run(
                [*command, sys.executable, "-c", CODE, str(child.pid)], capture_output=True, text=True, check=True
            )
        finally:
            child.kill()
    assert done.stdout.split() == ["True", "True", "False", "False", "NotRead", "NotRead", "NotRead"]


def test_visible_and_ended_processes_are_not_hidden() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert not processes.is_hidden(child.pid)
    assert not processes.is_hidden(os.getpid())
    assert processes.stat(child.pid) is None


@pytest.mark.parametrize("number", [0, -1, -(2**40), 2**31, 2**80])
def test_number_that_no_process_has_is_not_hidden(number: int) -> None:
    """A signal to process 0 or -1 is for several processes."""
    assert not processes.is_hidden(number)
    assert processes.stat(number) is None
