# SPDX-License-Identifier: Apache-2.0
"""A Debian guest under QEMU whose stock kernel offers the real resctrl: built once, restored in a second."""

from __future__ import annotations

from .errors import (
    BuildError,
    CommandError,
    CommandTimeoutError,
    GuestDiedError,
    MachineError,
    MissingPackagesError,
)
from .guest import Completed, Guest
from .machine import Machine
from .profiles import MACHINES, PROFILES, Profile

__all__ = [
    "MACHINES",
    "PROFILES",
    "BuildError",
    "CommandError",
    "CommandTimeoutError",
    "Completed",
    "Guest",
    "GuestDiedError",
    "Machine",
    "MachineError",
    "MissingPackagesError",
    "Profile",
]
