# SPDX-License-Identifier: Apache-2.0
"""Read the energy of whole processor packages (RAPL), from /sys/class/powercap (Documentation/power/powercap)."""

from __future__ import annotations

import glob
import os
import re
import threading
import time
from decimal import Decimal

import msgspec

from resctrlmond.resctrl import kernel_files

DEFAULT_FOLDER = "/sys/class/powercap"

# intel_rapl_common.c names the zone of a package, or of a die of it, so; AMD's processors have the same zones.
_ZONES = "intel-rapl:*[0-9]"
_NAME = re.compile(r"package-([0-9]+)(?:-die-[0-9]+)?\n?")
# More than any package: the counter cannot begin again twice within the time that this takes.
_MOST_W = 2000
_MICRO = Decimal("0.000001")


class Zone(msgspec.Struct):
    """A package, or a die of it. ``last_uj`` was read at ``read_at``, and ``used_uj`` were used until then."""

    package: int
    range_uj: int
    last_uj: int
    read_at: float  # time.monotonic()
    used_uj: int = 0


class PackageEnergy:
    """The energy that each package has used since ``begin``; none if the host does not show it. Thread-safe."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._zones: dict[str, Zone] = {}
        self._missed = ""
        # An older value that is added after a newer one looks as if the counter had begun again.
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Count from now on."""
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        self._zones = {}
        self._missed = ""
        for zone in sorted(glob.glob(os.path.join(self._folder, _ZONES))):
            try:
                name = _NAME.fullmatch(kernel_files.read(os.path.join(zone, "name")).decode("ascii", "replace"))
                if name is not None:
                    range_uj = int(kernel_files.read(os.path.join(zone, "max_energy_range_uj")))
                    self._zones[zone] = Zone(int(name[1]), range_uj, _energy_uj(zone), time.monotonic())
            except (OSError, ValueError):
                continue

    def update(self, *, only_due: bool = False) -> bool:
        """Read the counters; ``only_due``: only those that could begin again before the next call, 10 s later.

        Return whether one was read.
        """
        with self._lock:
            return self._update(only_due=only_due)

    def _update(self, *, only_due: bool) -> bool:
        is_read = False
        for path, zone in self._zones.items():
            elapsed_s, span_s = time.monotonic() - zone.read_at, zone.range_uj / 1e6 / _MOST_W
            if only_due and elapsed_s + 10 < span_s / 2:
                continue
            try:
                now_uj = _energy_uj(path)
            except (OSError, ValueError) as error:
                self._missed = f"{path} cannot be read: {error}"
                continue
            if elapsed_s >= span_s:
                self._missed = f"{path} was not read for {elapsed_s:.0f} s, and may have begun again meanwhile"
            # The counter begins again from 0 after max_energy_range_uj.
            zone.used_uj += now_uj - zone.last_uj + (zone.range_uj if now_uj < zone.last_uj else 0)
            zone.last_uj, zone.read_at, is_read = now_uj, time.monotonic(), True
        return is_read

    def used_joules(self) -> dict[int, Decimal]:
        """Return the energy of each package since ``begin``."""
        used: dict[int, Decimal] = {}
        with self._lock:
            for zone in self._zones.values():
                used[zone.package] = used.get(zone.package, Decimal(0)) + zone.used_uj * _MICRO
        return used

    @property
    def zones(self) -> dict[str, Zone]:
        """The state of each zone, by the path of its folder."""
        with self._lock:
            return {path: msgspec.structs.replace(zone) for path, zone in self._zones.items()}

    def restore(self, zones: dict[str, Zone], missed: str) -> None:
        """Continue from the state that a process before this one had, in the same boot."""
        with self._lock:
            self._zones, self._missed = zones, missed

    @property
    def missed(self) -> str:
        """Why the figures may be wrong; "" if they are right."""
        return self._missed


def _energy_uj(zone: str) -> int:
    return int(kernel_files.read(os.path.join(zone, "energy_uj")))
