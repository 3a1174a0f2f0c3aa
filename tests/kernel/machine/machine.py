# SPDX-License-Identifier: Apache-2.0
"""A machine of one profile. Its state is saved once after a full boot, and each guest starts from that state."""

from __future__ import annotations

import os
from pathlib import Path

from . import cache, debugger, packages, qemu
from .errors import GuestDiedError
from .guest import Guest
from .kernel import NEWEST, kernel, kernel_key
from .profiles import PROFILES
from .rootfs import rootfs, rootfs_key
from .tools import tool

BOOT_SECONDS = 600.0
BOOTS = 2
SOURCES = (__file__, qemu.__file__, debugger.__file__)


class Machine:
    """Starts guests. ``build`` takes minutes on the first use of a host; ``start`` then takes a second or two."""

    def __init__(self, profile: str = "cat") -> None:
        self.profile = PROFILES[profile]

    def start(self) -> Guest:
        """Return a guest in the saved state, with the host's time. The caller closes it."""
        state = self.build()
        process = self._qemu(state / "disk.qcow2", state / "memory")
        guest = Guest(process)
        try:
            guest.set_clock()
        except BaseException:
            guest.close()
            raise
        return guest

    def build(self) -> Path:
        """Return the folder of the saved state. Create it if it does not exist."""
        packages.require()
        parts = (
            *qemu.machine_arguments(self.profile),
            self.profile.setup,
            qemu.version(),
            rootfs_key(self.profile.kernel, self.profile.suite),
            kernel_key(self.profile.kernel),
        )
        return cache.artifact(f"state-{self.profile.name}", cache.key(*map(Path, SOURCES), *parts), self._save)

    def _qemu(self, disk: Path, memory: Path | None = None) -> qemu.Qemu:
        return qemu.Qemu(self.profile, self._vmlinux, self._initrd, disk, memory)

    @property
    def _vmlinux(self) -> Path:
        return kernel(self.profile.kernel) / "vmlinux"

    @property
    def _initrd(self) -> Path:
        return rootfs(self.profile.kernel, self.profile.suite) / "initrd"

    def _save(self, place: Path) -> None:
        root = rootfs(self.profile.kernel, self.profile.suite) / "root.ext4"
        cache.progress(f"booting {self.profile.name} to save its state")
        disk = place / "disk.qcow2"
        for boot in range(1, BOOTS + 1):
            disk.unlink(missing_ok=True)
            # A relative path, because the folder still has a temporary name, and a cache may be moved.
            backing = Path("..") / root.relative_to(cache.folder())
            tool(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", backing, disk])
            try:
                self._boot_and_save(disk, place / "memory")
                return
            except GuestDiedError as error:
                # Under TCG, a boot panics rarely. Two panics in a row have another cause.
                if "Kernel panic" not in error.console or boot == BOOTS:
                    raise
                cache.progress("the guest's kernel panicked: booting once more")

    def _boot_and_save(self, disk: Path, memory: Path) -> None:
        process = self._qemu(disk)
        with Guest(process) as guest:
            if self.profile.kernel != NEWEST:
                process.force(debugger.symbols(qemu.PROGRAM, qemu.cpu(self.profile), self._vmlinux, self._initrd))
            guest.run(
                "systemctl is-system-running --wait || { systemctl --failed --no-pager; exit 1; }",
                timeout=BOOT_SECONDS,
            )
            guest.run("udevadm settle", timeout=BOOT_SECONDS)
            guest.run(self.profile.setup)
            guest.run("sync; echo 3 >/proc/sys/vm/drop_caches")  # less memory to save and to restore
            guest.qemu.save(memory)
        os.chmod(disk, 0o444)
        os.chmod(memory, 0o444)
