# SPDX-License-Identifier: Apache-2.0
"""The machines that can be simulated: how many RMIDs, CLOSIDs and domains, which events, and at what rates."""

from __future__ import annotations

import dataclasses
import enum
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class Kind(enum.Enum):
    """How an event counts, and how its file prints it (fs/resctrl/ctrlmondata.c)."""

    OCCUPANCY = "occupancy"  # bytes held now; a gauge
    TRAFFIC = "traffic"  # bytes since the group was made
    TELEMETRY = "telemetry"  # fixed point, since power-on of the RMID


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One counter file.

    ``rate`` is the whole model of the hardware: for OCCUPANCY the bytes of cache that one live task holds, for the
    others the units (bytes, joules, farads) that one second of CPU time adds.
    """

    name: str
    kind: Kind
    rate: Fraction


LLC_OCCUPANCY = Event("llc_occupancy", Kind.OCCUPANCY, Fraction(MIB))
MBM_TOTAL = Event("mbm_total_bytes", Kind.TRAFFIC, Fraction(GIB))
MBM_LOCAL = Event("mbm_local_bytes", Kind.TRAFFIC, Fraction(3 * GIB, 4))
CORE_ENERGY = Event("core_energy", Kind.TELEMETRY, Fraction(5, 2))
ACTIVITY = Event("activity", Kind.TELEMETRY, Fraction(3, 2))


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """One simulated machine.

    ``num_rmids`` counts root's RMID 0. ``num_closids`` of 1 means: no allocation, no control groups.
    ``domains`` is the number of L3 caches, and of packages where ``package_events`` has any: L3 ``i`` is package
    ``i``. ``cache_bytes`` is the size of one L3, ``scale_bytes`` the unit that its counters are multiples of.
    """

    name: str
    num_rmids: int
    num_closids: int
    domains: int
    cache_bytes: int
    scale_bytes: int
    cbm_bits: int
    cache_events: tuple[Event, ...]
    package_events: tuple[Event, ...] = ()

    @property
    def can_allocate(self) -> bool:
        """Whether control groups can be made: Cache Allocation Technology is there."""
        return self.num_closids > 1

    @property
    def has_limbo(self) -> bool:
        """Whether freed RMIDs wait for their cache lines to drain: only where occupancy can be measured."""
        return LLC_OCCUPANCY in self.cache_events

    @property
    def default_threshold(self) -> int:
        """``max_threshold_occupancy`` at boot, in bytes: an even share of the L3 (fs/resctrl/monitor.c)."""
        return self.round_down(self.cache_bytes // self.num_rmids) if self.has_limbo else 0

    @property
    def resources(self) -> tuple[tuple[str, tuple[Event, ...]], ...]:
        """Every resource that monitors, as (name, events): ``info/<name>_MON`` and ``mon_data/mon_<name>_NN``."""
        both = (("L3", self.cache_events), ("PERF_PKG", self.package_events))
        return tuple((name, events) for name, events in both if events)

    def round_down(self, count: int) -> int:
        """``count`` bytes as the hardware can tell them: a multiple of its unit."""
        return count - count % self.scale_bytes

    def domain_of(self, cpu: int, cpus: int) -> int:
        """The domain of a CPU: the host's ``cpus`` CPUs, in order, in equal blocks."""
        return min(cpu, cpus - 1) * self.domains // cpus


_L3_MONITORING = (LLC_OCCUPANCY, MBM_TOTAL, MBM_LOCAL)

PROFILES = {
    profile.name: profile
    for profile in (
        # A small server with Cache Monitoring, Memory Bandwidth Monitoring and Cache Allocation.
        Profile("intel-rdt", 64, 4, 1, 32 * MIB, 64 * KIB, 12, _L3_MONITORING),
        # Clearwater Forest: two packages, 576 RMIDs, energy telemetry of GUID 0x26696143.
        Profile("intel-aet", 576, 16, 2, 576 * MIB, 64 * KIB, 12, _L3_MONITORING, (CORE_ENERGY, ACTIVITY)),
        # No allocation and no occupancy: no control groups, no limbo, and root's `tasks` reads empty.
        Profile("monitoring-only", 64, 1, 1, 32 * MIB, 64 * KIB, 12, (MBM_TOTAL, MBM_LOCAL)),
    )
}


def profile_named(name: str, *, rmids: int | None = None, domains: int | None = None) -> Profile:
    """The profile of that name, with another number of RMIDs (2 to 65536) or domains (1 to 64) where given.

    Raises ``ValueError`` with a sentence for the user where the name or a number is not one that exists.
    """
    if name not in PROFILES:
        raise ValueError(f"there is no profile {name!r}: choose one of {', '.join(PROFILES)}")
    profile = PROFILES[name]
    if rmids is not None:
        if not 2 <= rmids <= 65536:
            raise ValueError(f"{rmids} RMIDs cannot be simulated: give 2 to 65536 (one of them is root's own)")
        profile = dataclasses.replace(profile, num_rmids=rmids)
    if domains is not None:
        if not 1 <= domains <= 64:
            raise ValueError(f"{domains} domains cannot be simulated: give 1 to 64")
        profile = dataclasses.replace(profile, domains=domains)
    return profile
