# SPDX-License-Identifier: Apache-2.0
"""Where the tests find a mounted resctrl: the real one of this machine, or a simulation of each profile."""

from __future__ import annotations

import os
import subprocess
import tempfile
from typing import Protocol

from resctrlmond.sim.fuse.mount import Simulation, unmount
from resctrlmond.sim.profiles import PROFILES

# The mount point of the real kernel's resctrl, if that is to be tested.
REAL_ROOT = os.environ.get("RESCTRLMOND_TEST_ROOT", "")
KERNEL = "kernel"
# Linux 6.12 has other messages for refusals, and one machine tests them.
OLDER = {"intel-rdt, Linux 6.12": "intel-rdt"}
NAMES = [KERNEL] if REAL_ROOT else [*PROFILES, *OLDER]


def can_allocate(name: str) -> bool:
    """Whether control groups can be made there."""
    return os.path.isdir(f"{REAL_ROOT}/info/L3") if name == KERNEL else PROFILES[OLDER.get(name, name)].can_allocate


class Place(Protocol):
    """A mount point with resctrl, which an administrator mounts and unmounts as he likes."""

    name: str
    root: str

    def mount(self) -> None:
        """Mount it, if it is not."""

    def unmount(self) -> None:
        """As umount(8) does; CalledProcessError if that was refused."""

    def close(self) -> None:
        """Leave everything as it was."""


class Kernel:
    """The resctrl of the running kernel."""

    def __init__(self) -> None:
        self.name = KERNEL
        self.root = REAL_ROOT

    def mount(self) -> None:
        if not os.path.isdir(os.path.join(self.root, "info")):
            subprocess.run(["mount", "-t", "resctrl", "resctrl", self.root], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", self.root], check=True, capture_output=True)

    def close(self) -> None:
        self.mount()


class Simulated:
    """A simulation with one of the profiles."""

    def __init__(self, name: str) -> None:
        self.name = OLDER.get(name, name)
        self.root = tempfile.mkdtemp(prefix="resctrlmond-test-")
        os.chmod(self.root, 0o755)
        try:
            kernel = "6.12" if name in OLDER else "newest"
            self.simulation = Simulation(self.root, self.name, kernel=kernel)
            self.simulation.start()
        except BaseException:
            os.rmdir(self.root)
            raise

    def mount(self) -> None:
        if not os.path.isdir(os.path.join(self.root, "info")):
            self.simulation.stop()
            self.simulation.start()

    def unmount(self) -> None:
        subprocess.run(["umount", self.root], check=True, capture_output=True)

    def kill(self) -> None:
        """Let the simulator die as by a crash: its mount stays, and answers ENOTCONN."""
        os.kill(self.simulation.pid, 9)
        os.waitid(os.P_PID, self.simulation.pid, os.WEXITED | os.WNOWAIT)

    def clear(self) -> None:
        """Take a dead simulator's mount away."""
        self.simulation.stop()
        unmount(self.root)

    def close(self) -> None:
        self.simulation.stop()
        os.rmdir(self.root)


def place_named(name: str) -> Place:
    """The place of that name, mounted."""
    return Kernel() if name == KERNEL else Simulated(name)
