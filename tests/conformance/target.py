# SPDX-License-Identifier: Apache-2.0
"""A mounted resctrl as the rules see it: its path, the machine's features, and mount and unmount."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from .actors import outcome, read, write

# The mount point of the real kernel's resctrl, if the rules run on the real kernel.
REAL_ROOT = os.environ.get("RESCTRL_CONFORMANCE_ROOT", "")
# One unit of the occupancy counter where a CPU without the hardware claims to have it. With the default of 0
# no freed RMID would ever be clean there.
SHORT_LIMBO = "29360191"

# The cache that the processor of tests/kernel claims: masks of three bits, all shared with the hardware.
_CACHE = {"closids": 2, "cbm_bits": 3, "shareable_bits": 7, "sparse_masks": 1}
_EVENTS = "llc_occupancy,mbm_total_bytes,mbm_local_bytes"
# name -> options of the simulations that match the machines of tests/kernel, and of one without occupancy
SIMULATIONS: dict[str, dict[str, Any]] = {
    "sim cat": {"profile": "intel-rdt", "cpus": 1, **_CACHE},
    "sim monitoring-only": {"profile": "monitoring-only", "cpus": 1, "events": _EVENTS},
    "sim two-domains": {"profile": "intel-rdt", "cpus": 4, "domains": 2, **_CACHE},
    "sim no-occupancy": {"profile": "monitoring-only", "cpus": 1},
}
OLDER = "-6.12"  # the suffix of a machine with this kernel, and of the simulation that matches it


def options(name: str) -> dict[str, Any]:
    """Return the options of a simulation, by its name in SIMULATIONS with or without the suffix OLDER."""
    return SIMULATIONS[name.removesuffix(OLDER)] | {"kernel": "6.12" if name.endswith(OLDER) else "newest"}


class Mounter(Protocol):
    """Mounts and unmounts a resctrl."""

    def mount(self, *, debug: bool = False) -> None:
        """Mount resctrl, with or without the option debug."""

    def switch(self, cpu: int, online: bool) -> None:
        """Take a CPU offline or online; nothing happens if it already is."""

    def close(self) -> None:
        """Restore the original state."""


class _Kernel:
    def mount(self, *, debug: bool = False) -> None:
        option = ["-o", "debug"] if debug else []
        subprocess.run(["mount", "-t", "resctrl", *option, "resctrl", REAL_ROOT], check=True, capture_output=True)

    def switch(self, cpu: int, online: bool) -> None:
        Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text(f"{online:d}")

    def close(self) -> None:
        pass


class _Simulated:
    def __init__(self, name: str) -> None:
        from resctrlmond.sim.fuse.mount import Simulation

        self.root = tempfile.mkdtemp(prefix="resctrlmond-conformance-")
        os.chmod(self.root, 0o755)
        self._kinds = {debug: Simulation(self.root, **options(name), debug=debug) for debug in (False, True)}
        self._simulation = self._kinds[False]
        self._simulation.start()
        self._offline: set[int] = set()

    def mount(self, *, debug: bool = False) -> None:
        self._simulation.stop()
        self._simulation = self._kinds[debug]
        self._simulation.start()
        for cpu in self._offline:
            self._order(cpu, False)

    def switch(self, cpu: int, online: bool) -> None:
        if (cpu in self._offline) == online:
            self._order(cpu, online)
            self._offline ^= {cpu}

    def _order(self, cpu: int, online: bool) -> None:
        from resctrlmond.sim.control.client import Control

        control = Control(self.root)
        (control.cpu_online if online else control.cpu_offline)(cpu)

    def close(self) -> None:
        self._simulation.stop()
        os.rmdir(self.root)


class Resctrl:
    """A mounted resctrl, with paths relative to its root."""

    def __init__(self, root: str, mounter: Mounter, *, simulated: bool) -> None:
        self.root = root
        self.simulated = simulated
        self._mounter = mounter
        # The number of CPUs, numbered from 0; all are root's now.
        self.cpus = int(re.split("[-,]", self.read("cpus_list").strip())[-1]) + 1
        if not simulated and self.has_occupancy and self.read("info/L3_MON/max_threshold_occupancy") == "0\n":
            self.write("info/L3_MON/max_threshold_occupancy", SHORT_LIMBO)

    # -- features of the machine

    @property
    def can_allocate(self) -> bool:
        """Return whether there can be control groups besides root."""
        return os.path.isdir(self.path("info/L3"))

    @property
    def events(self) -> list[str]:
        """Return the names of the counter files of an L3 domain."""
        return self.read("info/L3_MON/mon_features").split()

    @property
    def has_occupancy(self) -> bool:
        """Return whether freed RMIDs stay in limbo until their cache lines are evicted."""
        return "llc_occupancy" in self.events

    @property
    def num_rmids(self) -> int:
        """Return the maximum number of groups, including root."""
        return int(self.read("info/L3_MON/num_rmids"))

    @property
    def num_closids(self) -> int:
        """Return the maximum number of control groups, including root."""
        return int(self.read("info/L3/num_closids")) if self.can_allocate else 1

    @property
    def domains(self) -> list[str]:
        """Return the names in ``mon_data``, sorted."""
        return sorted(os.listdir(self.path("mon_data")))

    @property
    def last_cache(self) -> list[int]:
        """Return the CPUs of the last L3."""
        if self.simulated:
            return list(range(self.cpus - self.cpus // len(self.domains), self.cpus))
        text = Path(f"/sys/devices/system/cpu/cpu{self.cpus - 1}/cache/index3/shared_cpu_list").read_text()
        return [
            cpu
            for low, _, high in (part.partition("-") for part in text.strip().split(","))
            for cpu in range(int(low), int(high or low) + 1)
        ]

    def switch(self, online: bool, *cpus: int) -> None:
        """Take CPUs offline or online."""
        for cpu in cpus:
            self._mounter.switch(cpu, online)

    @property
    def is_6_16(self) -> bool:
        """Return whether mkdir clears last_cmd_status, as since the code moved to fs/resctrl (6.12: it does not).

        Detected by a file of 6.18: no kernel between the two is tested.
        """
        return os.path.exists(self.path("info/L3_MON/mbm_assign_mode"))

    # -- files

    def path(self, *names: str) -> str:
        """Return the absolute path."""
        return "/".join((self.root, *names))

    @property
    def witness(self) -> str:
        """Return the directory with the files of the witness."""
        return self.path(".witness") if self.simulated else "/sys/fs/bpf/resctrlmond"

    def load_witness(self, rows: int = 65_536, keep: int = 3600) -> None:
        """Load the witness again. It keeps removed control groups for ``keep`` seconds."""
        if self.simulated:
            from resctrlmond.sim.control.client import Control

            Control(self.root).set_witness(restart=True, rows=rows, keep=keep)
        else:
            options = ["--rows", str(rows), "--keep", str(keep)]
            subprocess.run(["resctrlmond-witness", "unload"], check=True)
            subprocess.run(["resctrlmond-witness", "load", *options], check=True)

    def read(self, *names: str) -> str:
        """Read the whole file."""
        return read(self.path(*names))

    def write(self, path: str, text: object) -> None:
        """Write one command to a file. Raises OSError if it is refused."""
        write(self.path(path), str(text))

    def try_write(self, path: str, text: object) -> tuple[str, str]:
        """Return the result of one command: ``OK`` or the errno's name, and last_cmd_status after it."""
        return outcome(lambda: self.write(path, text)), self.status

    @property
    def status(self) -> str:
        """Read ``info/last_cmd_status``."""
        return self.read("info/last_cmd_status")

    def clear(self) -> None:
        """Clear last_cmd_status: a write to tasks also does it in Linux 6.12, unlike a write to cpus."""
        self.write("tasks", os.getpid())

    def set_status(self) -> str:
        """Leave a message in last_cmd_status, to see whether the next operation clears it."""
        assert outcome(lambda: self.write("tasks", "set_status")) == "EINVAL"
        return "Task list parsing error pid set_status\n"

    def names(self, *names: str) -> list[str]:
        """Return the entries of a directory, sorted."""
        return sorted(os.listdir(self.path(*names)))

    # -- groups

    def mkdir(self, path: str) -> str:
        """Create a group. Return ``OK`` or the errno's name; wait for RMIDs in limbo."""
        deadline = time.monotonic() + 60
        while (result := outcome(lambda: os.mkdir(self.path(path)))) == "EBUSY" and time.monotonic() < deadline:
            time.sleep(0.05)
        return result

    def create(self, path: str) -> str:
        """Create a group, which must succeed, and return its path."""
        result = self.mkdir(path)
        assert result == "OK", f"mkdir {path}: {result}, last_cmd_status {self.status!r}"
        return path

    def rmdir(self, path: str) -> None:
        """Remove a group."""
        os.rmdir(self.path(path))

    def members(self, group: str) -> set[int]:
        """Return the threads in its ``tasks``."""
        return {int(word) for word in self.read(group, "tasks").split()}

    def groups_of(self, tid: int) -> tuple[str, str]:
        """Return (control group, monitoring group) of a thread from ``/proc/TID/cpu_resctrl_groups``: "/" is root."""
        if self.simulated:
            text = os.getxattr(self.root, f"user.resctrlmond.task.{tid}").decode()
        else:
            text = read(f"/proc/{tid}/cpu_resctrl_groups")
        # A name may contain a newline.
        control, _, monitor = text.removesuffix("\n").partition("\nmon:")
        return control.removeprefix("res:"), monitor

    def fill(self) -> int:
        """Create groups ``mon_groups/fill-N`` until no RMID is left. Return their number."""
        made = 0
        while self.mkdir(f"mon_groups/fill-{made}") == "OK":
            made += 1
        return made

    def clean(self) -> None:
        """Remove all groups, and give root the whole cache."""
        for name in os.listdir(self.root):
            if os.path.isdir(self.path(name, "mon_groups")):
                self.rmdir(name)
        for name in os.listdir(self.path("mon_groups")):
            self.rmdir(f"mon_groups/{name}")
        if self.can_allocate:
            full = self.read("info/L3/cbm_mask").strip()
            self.write("schemata", re.sub("=[0-9a-f]+", f"={full}", self.read("schemata")))

    # -- mount and unmount

    def unmount(self) -> str:
        """Unmount resctrl. Return ``OK``, or ``EBUSY`` if a file in it is open."""
        done = subprocess.run(["umount", self.root], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return "OK"
        assert "busy" in done.stderr, done.stderr
        return "EBUSY"

    def mount(self, *, debug: bool = False) -> None:
        """Mount resctrl if it is not mounted."""
        if not os.path.isdir(self.path("info")):
            self._mounter.mount(debug=debug)

    def close(self) -> None:
        """Restore the original state."""
        self.mount()
        self.clean()
        self._mounter.close()


def kernel() -> Resctrl:
    """Return the resctrl of the running kernel."""
    mounter = _Kernel()
    if not os.path.isdir(os.path.join(REAL_ROOT, "info")):
        mounter.mount()
    return Resctrl(REAL_ROOT, mounter, simulated=False)


def simulation(name: str) -> Resctrl:
    """Return a simulation, by its name in ``SIMULATIONS``, or by that with the suffix OLDER."""
    mounter = _Simulated(name)
    return Resctrl(mounter.root, mounter, simulated=True)
