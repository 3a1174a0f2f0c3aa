# SPDX-License-Identifier: Apache-2.0
"""A machine of one profile. Its state is saved once after a full boot, and each guest starts from a saved state."""

from __future__ import annotations

import os
from collections.abc import Callable
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
# Each change of what is prepared has its own state of 240 MB, so those that no run uses are removed soon.
KEEP_PREPARED_SECONDS = 3600
SOURCES = (__file__, qemu.__file__, debugger.__file__)


class Machine:
    """Starts guests. ``build`` takes minutes on the first use of a host; ``start`` then takes a second or two."""

    def __init__(self, profile: str = "cat") -> None:
        self.profile = PROFILES[profile]

    def start(self) -> Guest:
        """Return a guest in the saved state, with the host's time. The caller closes it."""
        return self._restored(self.build())

    def start_prepared(self, name: str, key: str, prepare: Callable[[Guest], None]) -> Guest:
        """Return a guest in the state that *prepare* leaves, with the host's time. The caller closes it.

        That state is saved once for each *key*, which identifies all that *prepare* depends on, below *name*.
        """
        state = self.build()

        def save(place: Path) -> None:
            disk = self._overlay(place, state / "disk.qcow2", "qcow2")
            with self._restored(state, disk) as guest:
                prepare(guest)
                self._save_running(guest, place)

        parts = (state.name, key)
        return self._restored(
            cache.artifact(f"{name}-{self.profile.name}", cache.key(*parts), save, KEEP_PREPARED_SECONDS)
        )

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

    def _restored(self, state: Path, disk: Path | None = None) -> Guest:
        """Return a guest in a saved state, with the host's time. It writes to *disk*, if given, an overlay."""
        guest = Guest(self._qemu(disk or state / "disk.qcow2", state / "memory", writes=disk is not None))
        try:
            guest.set_clock()
        except BaseException:
            guest.close()
            raise
        return guest

    def _qemu(self, disk: Path, memory: Path | None = None, *, writes: bool = True) -> qemu.Qemu:
        return qemu.Qemu(self.profile, self._vmlinux, self._initrd, disk, memory, writes=writes)

    @property
    def _vmlinux(self) -> Path:
        return kernel(self.profile.kernel) / "vmlinux"

    @property
    def _initrd(self) -> Path:
        return rootfs(self.profile.kernel, self.profile.suite) / "initrd"

    def _save(self, place: Path) -> None:
        root = rootfs(self.profile.kernel, self.profile.suite) / "root.ext4"
        cache.progress(f"booting {self.profile.name} to save its state")
        for boot in range(1, BOOTS + 1):
            try:
                self._boot_and_save(self._overlay(place, root, "raw"), place)
                return
            except GuestDiedError as error:
                # Under TCG, a boot panics rarely. Two panics in a row have another cause.
                if "Kernel panic" not in error.console or boot == BOOTS:
                    raise
                cache.progress("the guest's kernel panicked: booting once more")

    @staticmethod
    def _overlay(place: Path, base: Path, base_format: str) -> Path:
        """Create the disk of a state, or replace it: what is written to it leaves *base* as it is."""
        disk = place / "disk.qcow2"
        disk.unlink(missing_ok=True)
        # A relative path, because the folder still has a temporary name, and a cache may be moved.
        backing = Path("..") / base.relative_to(cache.folder())
        tool(["qemu-img", "create", "-q", "-f", "qcow2", "-F", base_format, "-b", backing, disk])
        return disk

    def _boot_and_save(self, disk: Path, place: Path) -> None:
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
            self._save_running(guest, place)

    @staticmethod
    def _save_running(guest: Guest, place: Path) -> None:
        """Save the state of a guest, whose disk is already there, and end the guest."""
        guest.run("sync; echo 3 >/proc/sys/vm/drop_caches")  # less memory to save and to restore
        guest.qemu.save(place / "memory")
        for file in place.iterdir():
            os.chmod(file, 0o444)
