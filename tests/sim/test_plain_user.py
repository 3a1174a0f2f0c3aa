# SPDX-License-Identifier: Apache-2.0
"""A user without privileges runs a simulation if /dev/fuse is open to all users, as on Debian."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

NOBODY = "65534"
# Root becomes an ordinary user who can read the tests' files and change only his own, in a separate mount namespace
# with the mode of the device as in Debian.
AS_NOBODY = """\
mknod "$1/fuse" c 10 229; chmod 666 "$1/fuse"; mount --bind "$1/fuse" /dev/fuse; shift
exec setpriv --reuid 65534 --regid 65534 --clear-groups \\
    --inh-caps -all,+dac_read_search --ambient-caps -all,+dac_read_search -- "$@"
"""
JOB = """\
import os, sys
from resctrlmond.sim.fuse.mount import Simulation

with Simulation(sys.argv[1], "intel-aet"):
    group = sys.argv[1] + "/mon_groups/mine"
    os.mkdir(group)
    os.utime(group, ns=(1, 1))
    with open(group + "/tasks", "w") as tasks:
        tasks.write(str(os.getpid()))
    with open(group + "/tasks") as tasks:
        assert str(os.getpid()) in tasks.read().split()
    os.rmdir(group)
    print(os.listdir(sys.argv[1] + "/mon_groups"))
"""


def test_makes_and_removes_groups(tmp_path: Path) -> None:
    # Not in tmp_path: fusermount3 looks for the place as the user, to whom root's folders are closed.
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-c", JOB, place]
        if os.geteuid() == 0:
            os.chown(place, int(NOBODY), int(NOBODY))
            command = ["unshare", "--mount", "sh", "-euc", AS_NOBODY, "sh", str(tmp_path), *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
