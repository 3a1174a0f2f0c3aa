# SPDX-License-Identifier: Apache-2.0
"""The files of a machine on which the verb ``doctor`` finds no fault, in a directory; tests break them."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import msgspec

from resctrlctl.doctor.host import Host
from resctrlmond.api.types import NoParameters
from tests.ctl.fake_manager import FakeManager

RESCTRL = "/sys/fs/resctrl"
HOOKS = "/usr/share/containers/oci/hooks.d"
HOOK_PROGRAM = "/usr/libexec/resctrlmon-oci-hook"
SOCKET = "/run/resctrlmond/org.resctrlmon.Manager"
CONFIGURATION = "/etc/resctrlmond/resctrlmond.yaml"
KERNEL = "7.3.4-custom"
KERNEL_CONFIG = f"/usr/lib/modules/{KERNEL}/config"
OPTIONS = ("INTEL_VSEC", "INTEL_TPMI", "INTEL_PMT_TELEMETRY", "X86_CPU_RESCTRL", "X86_CPU_RESCTRL_INTEL_AET")
FLAGS = "fpu cqm rdt_a cqm_llc cqm_occup_llc cqm_mbm_total cqm_mbm_local"
ENERGY_GUID = "0x26696143"
# The group of the daemon and of its monitoring groups. Only its number is in the tree.
MARK = 65534
MOUNTS = (
    "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
    "30 22 0:26 / /sys rw - sysfs sysfs rw",
    f"41 30 0:38 / {RESCTRL} rw,nosuid,nodev,noexec - resctrl resctrl rw,debug",
)
UNIT = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "UnitFileState": "enabled",
    "Result": "success",
    "ExecMainStatus": "0",
    "InactiveEnterTimestamp": "",
    "NRestarts": "0",
}
FAILED = UNIT | {
    "ActiveState": "failed",
    "Result": "exit-code",
    "ExecMainStatus": "69",
    "InactiveEnterTimestamp": "Sat 2026-11-21 11:13:22 UTC",
}


class MachineTree:
    """A directory with the files of a machine. Paths are those of the machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = Host(str(root))
        self.processor("GenuineIntel", "Intel(R) Xeon(R) 6990E+", FLAGS)
        self.write("/proc/sys/kernel/osrelease", f"{KERNEL}\n")
        self.write("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1\n")
        self.write(KERNEL_CONFIG, "".join(f"CONFIG_{name}=y\n" for name in OPTIONS))
        self.write("/sys/class/intel_pmt/telem1/guid", f"{ENERGY_GUID}\n")
        self.write("/sys/devices/system/cpu/modalias", "cpu:type:x86,ven0000fam0006mod00DD:feature:,0000\n")
        self.write("/sys/devices/system/cpu/cpu0/cache/index3/size", "32768K\n")
        self.log("0,0,0,-;Linux version", "6,700,900,-;resctrl: PERF_PKG energy:0x26696143 monitoring detected")
        self.mounts(*MOUNTS)
        self.resource("L3_MON", 64, "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes")
        self.resource("PERF_PKG_MON", 64, "core_energy\nactivity")
        self.write(f"{RESCTRL}/info/L3_MON/max_threshold_occupancy", "524288\n")
        self.write(f"{RESCTRL}/info/L3_MON/mbm_assign_mode", "[default]\n")
        self.group("web", MARK)
        self.write(CONFIGURATION, f"group: {MARK}\n")
        self.write("/run/resctrlmond/records/web.json", "{}")
        os.chown(self.path("/run/resctrlmond/records"), -1, MARK)
        self.unit(UNIT)
        self.write("/usr/share/dbus-1/system.d/org.resctrlmon1.conf", "<busconfig/>\n")
        self.program("/usr/bin/podman")
        self.program(HOOK_PROGRAM)
        self.hook("resctrlmon-createRuntime.json", HOOK_PROGRAM)
        self.write("/proc/1/comm", "systemd\n")

    def path(self, path: str) -> Path:
        """Return the place of a path of the machine."""
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        place = self.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")

    def remove(self, path: str) -> None:
        """Remove a file."""
        self.path(path).unlink()

    def program(self, path: str, script: str = "") -> None:
        """Write an executable program."""
        self.write(path, f"#!/bin/sh\n{script}\n")
        self.path(path).chmod(0o755)

    def processor(self, vendor: str, name: str, flags: str) -> None:
        """Write /proc/cpuinfo of two processors."""
        one = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: {name}\nflags\t\t: {flags}\n\n"
        self.write("/proc/cpuinfo", one * 2)

    def log(self, *records: str) -> None:
        """Write the log of the kernel."""
        self.write("/dev/kmsg", "".join(f"{record}\n" for record in records))

    def mounts(self, *lines: str) -> None:
        """Write the table of mounts."""
        self.write("/proc/self/mountinfo", "".join(f"{line}\n" for line in lines))

    def resource(self, name: str, rmids: int, events: str) -> None:
        """Write a monitoring resource of resctrl."""
        self.write(f"{RESCTRL}/info/{name}/num_rmids", f"{rmids}\n")
        self.write(f"{RESCTRL}/info/{name}/mon_features", f"{events}\n")

    def remove_energy(self) -> None:
        """Remove the resource with core energy."""
        shutil.rmtree(self.path(f"{RESCTRL}/info/PERF_PKG_MON"))

    def group(self, name: str, gid: int = 0) -> None:
        """Create a monitoring group with the mark of a Unix group."""
        place = self.path(f"{RESCTRL}/mon_groups/{name}")
        place.mkdir(parents=True)
        os.chown(place, -1, gid)

    def bind(self) -> None:
        """Create the socket of the daemon. Nothing listens on it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
            opened.bind(str(self.path(SOCKET)))
        self.path(SOCKET).chmod(0o660)
        os.chown(self.path(SOCKET), -1, MARK)

    def listen(self, *paths: str) -> None:
        """Write the table of sockets, with these on which a process listens."""
        rows = "".join(f"0000000000000000: 00000002 00000000 00010000 0001 01 17 {path}\n" for path in paths)
        self.write("/proc/net/unix", f"Num       RefCount Protocol Flags    Type St Inode Path\n{rows}")

    def unit(self, properties: dict[str, str], nri: str = "active") -> None:
        """Write a systemctl that shows the state of the daemon's unit and of the unit of the NRI plugin."""
        lines = "\\n".join(f"{name}={value}" for name, value in properties.items())
        self.program(
            "/usr/bin/systemctl",
            f'case $2 in resctrlmond.service) printf "{lines}\\n" ;; *) echo ActiveState={nri} ;; esac',
        )

    def hook(self, name: str, program: str, folder: str = HOOKS) -> None:
        """Write a hook file."""
        self.write(f"{folder}/{name}", json.dumps({"version": "1.0.0", "hook": {"path": program}}))


def answering_machine(root: Path, manager: FakeManager) -> MachineTree:
    """Return a machine on whose socket a manager answers, without problems."""
    tree = MachineTree(root)
    manager.replies["Status"] = msgspec.structs.replace(manager.status(NoParameters()), problems=[], pending=0)
    os.link(manager.socket, tree.path(SOCKET))
    tree.path(SOCKET).chmod(0o660)
    os.chown(tree.path(SOCKET), -1, MARK)
    return tree
