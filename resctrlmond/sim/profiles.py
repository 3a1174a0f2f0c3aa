# SPDX-License-Identifier: Apache-2.0
"""The simulated machines: the numbers of RMIDs, CLOSIDs and domains, the events, and their rates."""

from __future__ import annotations

import dataclasses
import enum
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

ENERGY_FRACTION_BITS = 18  # core_energy and activity (arch/x86/kernel/cpu/resctrl/intel_aet.c)
MBM_BITS = 32  # of a bandwidth counter: 24 and what CPUID adds (arch/x86/kernel/cpu/resctrl/internal.h)
TELEMETRY_BITS = 63  # of a register; bit 63 means that it is valid (intel_aet.c)


# As in the modalias of the processor (arch/x86/include/asm/processor.h, X86_VENDOR_*).
INTEL = "0000"
# The interval at which cores push their counts (the cover letter of the series that added intel_aet.c).
HARDWARE_LAG_SECONDS = 0.002


class Kind(enum.Enum):
    """The method of counting of an event, and the format of its file (fs/resctrl/ctrlmondata.c)."""

    OCCUPANCY = "occupancy"  # bytes held now; a gauge
    TRAFFIC = "traffic"  # bytes since the creation of the group
    TELEMETRY = "telemetry"  # since power-on of the RMID


class Kernel(enum.StrEnum):
    """The kernel whose rules apply: Linux 6.1, 6.12, or the newest (``Resctrl`` lists the differences)."""

    V6_1 = "6.1"
    V6_12 = "6.12"
    NEWEST = "newest"


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One counter file.

    ``rate`` is the whole model of the hardware: for OCCUPANCY the bytes of cache that one live task holds, for the
    others the units (bytes, joules, farads, cycles) that one second of CPU time adds. ``fraction_bits`` is for
    fixed-point values; None for integers.
    """

    name: str
    kind: Kind
    rate: Fraction
    fraction_bits: int | None = None


LLC_OCCUPANCY = Event("llc_occupancy", Kind.OCCUPANCY, Fraction(MIB))
MBM_TOTAL = Event("mbm_total_bytes", Kind.TRAFFIC, Fraction(GIB))
MBM_LOCAL = Event("mbm_local_bytes", Kind.TRAFFIC, Fraction(3 * GIB, 4))
CORE_ENERGY = Event("core_energy", Kind.TELEMETRY, Fraction(5, 2), ENERGY_FRACTION_BITS)
ACTIVITY = Event("activity", Kind.TELEMETRY, Fraction(3, 2), ENERGY_FRACTION_BITS)
# The events of GUID 0x26557651 (intel_aet.c), in its order.
_PERF = tuple(
    Event(name, Kind.TELEMETRY, Fraction(rate))
    for name, rate in {
        "stalls_llc_hit": 120_000_000,
        "c1_res": 100_000_000,
        "unhalted_core_cycles": 2_400_000_000,
        "stalls_llc_miss": 360_000_000,
        "c6_res": 50_000_000,
        "unhalted_ref_cycles": 2_000_000_000,
        "uops_retired": 4_800_000_000,
    }.items()
)


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """One simulated machine, and the kernel on it.

    ``num_rmids`` includes root's RMID 0. ``num_closids`` of 1 means: no allocation, no control groups. ``domains`` is
    the number of L3 caches, and of packages if ``package_events`` has any: L3 ``i`` is package ``i``. Sub-NUMA
    Clustering divides each L3 into ``nodes_per_cache`` nodes with continuous numbers: a node is the smallest part
    that counts, and a whole L3 if there is one for each cache. ``cache_bytes`` is the size of one L3, ``scale_bytes``
    the unit of its counters.

    A class's mask of an L3 has ``cbm_bits`` bits; the hardware also uses ``shareable_bits`` of them, and a mask may
    have holes with ``sparse_masks``.

    ``mbm_counters`` is the number of assignable bandwidth counters in each L3; None: every RMID always has its own,
    unless ``mbm_tracked`` limits the number of RMIDs whose bandwidth each node counts: those that were active last.
    ``configurable_events``: the memory transactions of the bandwidth events can be configured for each L3.

    A bandwidth counter of the hardware wraps at ``mbm_bits`` bits, in its unit. Telemetry of a package is pushed
    every ``lag_seconds`` and wraps at ``telemetry_bits`` bits, including the fraction.

    ``debug``: mounted with that option, so that groups show their IDs. ``vendor``: as in the processor's modalias.
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
    nodes_per_cache: int = 1
    mbm_counters: int | None = None
    configurable_events: bool = False
    shareable_bits: int = 0
    sparse_masks: bool = False
    debug: bool = False
    kernel: Kernel = Kernel.NEWEST
    mbm_bits: int = MBM_BITS
    lag_seconds: float = HARDWARE_LAG_SECONDS
    telemetry_bits: int = TELEMETRY_BITS
    vendor: str = INTEL
    mbm_tracked: int | None = None

    @property
    def can_allocate(self) -> bool:
        """Whether control groups are possible: the machine has Cache Allocation Technology."""
        return self.num_closids > 1

    @property
    def has_limbo(self) -> bool:
        """Whether freed RMIDs wait for their cache lines to drain: only if occupancy can be measured."""
        return LLC_OCCUPANCY in self.cache_events

    @property
    def is_old(self) -> bool:
        """Whether the rules of Linux 6.12 or older ones apply."""
        return self.kernel is not Kernel.NEWEST

    @property
    def is_oldest(self) -> bool:
        """Whether the rules of Linux 6.1 apply."""
        return self.kernel is Kernel.V6_1

    @property
    def nodes(self) -> int:
        """The number of nodes in all L3 caches."""
        return self.domains * self.nodes_per_cache

    @property
    def node_cache_bytes(self) -> int:
        """The share of an L3 of one node."""
        return self.cache_bytes // self.nodes_per_cache

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
        """Round ``count`` bytes down to a multiple of the hardware's unit."""
        return count - count % self.scale_bytes

    def node_of(self, cpu: int, cpus: int) -> int:
        """Return the node of a CPU: the host's ``cpus`` CPUs, in order, in equal blocks."""
        return min(cpu, cpus - 1) * self.nodes // cpus

    def nodes_of(self, domain: int) -> range:
        """Return the nodes of an L3, which are also those of the package with that number."""
        return range(domain * self.nodes_per_cache, (domain + 1) * self.nodes_per_cache)


_AMD = "0002"
_L3_MONITORING = (LLC_OCCUPANCY, MBM_TOTAL, MBM_LOCAL)
_ENERGY = (CORE_ENERGY, ACTIVITY)

PROFILES = {
    profile.name: profile
    for profile in (
        # A small server with Cache Monitoring, Memory Bandwidth Monitoring and Cache Allocation.
        Profile("intel-rdt", 64, 4, 1, 32 * MIB, 64 * KIB, 12, _L3_MONITORING),
        # Clearwater Forest: two packages, 576 RMIDs, energy telemetry of GUID 0x26696143. Its perf events are off
        # by default, since the hardware has fewer counters for them than RMIDs (intel_aet.c).
        Profile("intel-aet", 576, 16, 2, 576 * MIB, 64 * KIB, 12, _L3_MONITORING, _ENERGY),
        # The same machine booted with rdt=perf, which also enables the seven events of GUID 0x26557651.
        Profile("intel-aet-perf", 576, 16, 2, 576 * MIB, 64 * KIB, 12, _L3_MONITORING, _ENERGY + _PERF),
        # Two packages in SNC-2: RMIDs and unit are divided by the nodes of an L3 (rdt_get_mon_l3_config(),
        # arch/x86/kernel/cpu/resctrl/monitor.c).
        Profile("intel-snc2", 160, 16, 2, 320 * MIB, 32 * KIB, 16, _L3_MONITORING, nodes_per_cache=2),
        # Zen 5 with Assignable Bandwidth Monitoring Counters: many RMIDs, 32 counters in each L3.
        Profile("amd-abmc", 4096, 16, 2, 32 * MIB, 64, 16, _L3_MONITORING, mbm_counters=32, vendor=_AMD),
        # Zen 4 with Bandwidth Monitoring Event Configuration.
        Profile("amd-bmec", 256, 16, 2, 32 * MIB, 64, 16, _L3_MONITORING, configurable_events=True, vendor=_AMD),
        # Zen 2 without either: the hardware tracks the bandwidth of the RMIDs that were active last, and resets a
        # counter that it assigns again. No document states the number of RMIDs on real hardware.
        Profile("amd-tracking", 256, 16, 2, 32 * MIB, 64, 16, _L3_MONITORING, vendor=_AMD, mbm_tracked=4),
        # No allocation and no occupancy: no control groups, no limbo, and root's `tasks` reads empty.
        Profile("monitoring-only", 64, 1, 1, 32 * MIB, 64 * KIB, 12, (MBM_TOTAL, MBM_LOCAL)),
    )
}


def _within(value: float, low: float, high: float, what: str, remedy: str) -> None:
    if not low <= value <= high:
        raise ValueError(f"{value} {what} cannot be simulated: give {remedy}")


def profile_named(
    name: str,
    *,
    rmids: int | None = None,
    domains: int | None = None,
    closids: int | None = None,
    counters: int | None = None,
    kernel: str = Kernel.NEWEST,
    lag_ms: float | None = None,
    telemetry_bits: int | None = None,
    mbm_bits: int | None = None,
    cbm_bits: int | None = None,
    shareable_bits: int | None = None,
    sparse_masks: int | None = None,
    events: str | None = None,
    debug: bool = False,
) -> Profile:
    """Return the profile with that name, with other numbers if given.

    RMIDs 2 to 65536, CLOSIDs 2 to 256 (if the machine allocates), domains 1 to 64, assignable bandwidth counters 1 to
    1024 (if there are any), lag 0 to 1000 ms, telemetry 20 to 63 bits, bandwidth counters 24 to 62, masks 1 to 32
    bits, any of which may be shareable, with holes (1) or without (0); ``events`` of the L3 by name, with commas.
    Raises ``ValueError`` with a message for the user if the name or a number is invalid.
    """
    if name not in PROFILES:
        raise ValueError(f"there is no profile {name!r}: choose one of {', '.join(PROFILES)}")
    profile = PROFILES[name]
    if rmids is not None:
        _within(rmids, 2, 65536, "RMIDs", "2 to 65536 (one of them is root's own)")
        profile = dataclasses.replace(profile, num_rmids=rmids)
    if domains is not None:
        _within(domains, 1, 64, "domains", "1 to 64")
        profile = dataclasses.replace(profile, domains=domains)
    if closids is not None:
        if not profile.can_allocate:
            raise ValueError(f"the profile {name} has no control groups: leave the number of CLOSIDs out")
        _within(closids, 2, 256, "CLOSIDs", "2 to 256 (one of them is root's own)")
        profile = dataclasses.replace(profile, num_closids=closids)
    if counters is not None:
        if profile.mbm_counters is None:
            raise ValueError(f"the profile {name} has no assignable counters: give the number with amd-abmc")
        _within(counters, 1, 1024, "counters", "1 to 1024")
        profile = dataclasses.replace(profile, mbm_counters=counters)
    if lag_ms is not None:
        _within(lag_ms, 0, 1000, "ms of lag", "0 to 1000")
        profile = dataclasses.replace(profile, lag_seconds=lag_ms / 1000)
    if telemetry_bits is not None:
        _within(telemetry_bits, 20, TELEMETRY_BITS, "bits of telemetry", f"20 to {TELEMETRY_BITS}")
        profile = dataclasses.replace(profile, telemetry_bits=telemetry_bits)
    if mbm_bits is not None:
        _within(mbm_bits, 24, 62, "bits of a bandwidth counter", "24 to 62")
        profile = dataclasses.replace(profile, mbm_bits=mbm_bits)
    masks = {"cbm_bits": cbm_bits, "shareable_bits": shareable_bits, "sparse_masks": sparse_masks}
    profile = _with_masks(profile, {name: value for name, value in masks.items() if value is not None})
    if events is not None:
        profile = dataclasses.replace(profile, cache_events=_cache_events(events))
    profile = dataclasses.replace(profile, debug=debug)
    return _on_kernel(profile, Kernel(kernel))


def _with_masks(profile: Profile, numbers: dict[str, int]) -> Profile:
    if numbers and not profile.can_allocate:
        raise ValueError(f"the profile {profile.name} has no masks: leave {', '.join(numbers)} out")
    bits = numbers.get("cbm_bits", profile.cbm_bits)
    _within(bits, 1, 32, "bits of a mask", "1 to 32")
    _within(numbers.get("shareable_bits", 0), 0, (1 << bits) - 1, "as shareable bits", f"0 to {(1 << bits) - 1:#x}")
    _within(numbers.get("sparse_masks", 0), 0, 1, "as sparse masks", "0 or 1")
    return dataclasses.replace(profile, **numbers)  # type: ignore[arg-type]  # they are all numbers


def _cache_events(names: str) -> tuple[Event, ...]:
    """Return the events of these names, in the kernel's order."""
    wanted = set(names.split(","))
    if unknown := wanted - {event.name for event in _L3_MONITORING}:
        known = ", ".join(event.name for event in _L3_MONITORING)
        raise ValueError(f"{', '.join(sorted(unknown))} cannot be simulated: give some of {known}")
    return tuple(event for event in _L3_MONITORING if event.name in wanted)


def _on_kernel(profile: Profile, kernel: Kernel) -> Profile:
    """Refuse machines that an older kernel does not support."""
    on_it = dataclasses.replace(profile, kernel=kernel)
    # Linux 7.0, 6.18
    lacks = on_it.is_old and bool(profile.package_events or profile.mbm_counters)
    # Linux 6.11, 6.3, and twice 6.7
    newer = (profile.nodes_per_cache > 1, profile.configurable_events, profile.sparse_masks, profile.debug)
    if lacks or (on_it.is_oldest and any(newer)):
        raise ValueError(f"the profile {profile.name} needs a newer kernel than {kernel}: leave --kernel out")
    return on_it
