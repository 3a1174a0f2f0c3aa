# SPDX-License-Identifier: Apache-2.0
"""The machines that tests can select: CPU features, and the commands that run before the state is saved."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .debian import SUITE, UNSTABLE
from .kernel import NEWEST, OF_DEBIAN_13

MONITORING = ("cqm", "cqm_llc", "cqm_occup_llc", "cqm_mbm_total", "cqm_mbm_local")
TRAFFIC = tuple(name for name in MONITORING if name != "cqm_occup_llc")
ALLOCATION = ("rdt_a", "cat_l3")

MOUNT = "mount -t resctrl resctrl /sys/fs/resctrl"
# With the default threshold of 0, a freed RMID stays in limbo forever. With this value, one unit of the occupancy
# counter, the kernel frees it in its next check, which runs every second.
SHORT_LIMBO = f"{MOUNT}; echo 29360191 >/sys/fs/resctrl/info/L3_MON/max_threshold_occupancy"


@dataclass(frozen=True)
class Profile:
    """One kind of machine.

    ``cpu_level`` is the highest basic CPUID leaf. A leaf above it reads as the highest one, so the kernel
    takes resctrl's limits (leaves 0xf and 0x10) from a leaf with another meaning: from leaf 4, the
    L1i cache, 64 RMIDs, 2 CLOSIDs and 3-bit masks; from leaf 0xb, the topology, more than 512 RMIDs.
    ``features`` are forced, with setcpuid= if the kernel supports it. ``smp`` is QEMU's -smp, ``setup`` a shell
    command, ``memory`` is in MiB, ``kernel`` is the series of kernels, ``suite`` the Debian suite of all else.
    """

    name: str
    cpu_level: int
    features: tuple[str, ...]
    setup: str
    smp: str = "1"
    memory: int = 1024
    kernel: str = NEWEST
    suite: str = SUITE


MACHINES = (
    Profile("cat", 4, MONITORING + ALLOCATION, SHORT_LIMBO),
    # Leaf 0xb gives a number of CLOSIDs that depends on the CPU that reads it, so this machine shows none.
    Profile("monitoring-only", 11, MONITORING, MOUNT),
    # Two sockets have two caches, so each group has two domains. Only this machine has several CPUs under
    # TCG: container starts, which patch the kernel's code, have panicked such a guest.
    Profile("two-domains", 4, MONITORING + ALLOCATION, SHORT_LIMBO, smp="4,sockets=2,cores=2"),
    # Without occupancy, no freed RMID waits in limbo. Tests can use all RMIDs, because there are few.
    Profile("no-occupancy", 4, TRAFFIC, MOUNT),
)
# The same machines with Debian 13's own kernel, which tests request by name.
OLDER = tuple(replace(machine, name=f"{machine.name}-6.12", kernel=OF_DEBIAN_13) for machine in MACHINES)
# The next Debian with the newest kernel, which tests request by name.
SID = replace(MACHINES[0], name="cat-sid", suite=UNSTABLE)
PROFILES = {profile.name: profile for profile in (*MACHINES, *OLDER, SID)}
