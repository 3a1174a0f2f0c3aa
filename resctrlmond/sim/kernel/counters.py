# SPDX-License-Identifier: Apache-2.0
"""The counters: a fixed model of CPU time for each RMID and node, with the hardware's state."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction

from resctrlmond.sim.profiles import ENERGY_FRACTION_BITS, LLC_OCCUPANCY, Event, Kind, Profile

NS = 10**9
CACHE_HALF_LIFE_SECONDS = 0.5
MOST_RESIDUE_NS = 1000 * NS


def decimals(bits: int) -> int:
    """Return the number of decimals for a value with this many binary fraction bits (fs/resctrl/ctrlmondata.c)."""
    return max(1, math.ceil(bits * math.log10(2)))


def format_fixed(raw: int, bits: int = ENERGY_FRACTION_BITS) -> str:
    """Format a fixed-point value as the kernel does: the fraction rounded half up to ``decimals(bits)`` digits."""
    if bits == 0:
        return f"{raw}.0"
    digits = decimals(bits)
    fraction = ((raw & ((1 << bits) - 1)) * 10**digits + (1 << (bits - 1))) >> bits
    return f"{raw >> bits}.{fraction:0{digits}d}"


def format_raw(event: Event, raw: int) -> str:
    """Format a value of that event as its file shows it, without the newline."""
    return str(raw) if event.fraction_bits is None else format_fixed(raw, event.fraction_bits)


@dataclasses.dataclass(slots=True)
class _Footprint:
    """The cache lines of one RMID in one node: tasks fill at once, and the lines of ended tasks halve every 0.5 s."""

    level: float = 0.0
    at: float = 0.0
    held: int = 0  # held by the current tasks

    def now(self, time: float) -> float:
        if self.level <= self.held:
            return float(self.held)
        halvings = max(0.0, time - self.at) / CACHE_HALF_LIFE_SECONDS
        return self.held + (self.level - self.held) * math.pow(0.5, halvings)


class Counters:
    """CPU nanoseconds and cache lines for each (rmid, node).

    The CPU time of an RMID is never reset, like the telemetry registers; MBM values subtract the value at ``mkdir``.
    RMID 0 has the CPU time of the host that is charged nowhere else. ``residue_seed`` gives every RMID a
    pseudo-random history, as on a host that has run for a while; None gives none.

    Telemetry lags: cores push their counts every 2 ms (the cover letter of the series that added intel_aet.c), so the
    use since the last multiple of ``profile.lag_seconds`` cannot be read yet.
    """

    def __init__(self, profile: Profile, residue_seed: int | None = None) -> None:
        self.profile = profile
        self._traffic_events = [event for event in profile.cache_events if event.kind is Kind.TRAFFIC]
        self._busy: collections.Counter[tuple[int, int]] = collections.Counter()
        self._unpushed: dict[tuple[int, int], tuple[float, int]] = {}  # (time of the push, ns)
        self._born: dict[tuple[int, int], int] = {}  # the value when the RMID's group was created
        self._mbm_base: dict[tuple[str, int, int], int] = {}
        self._charged: collections.Counter[int] = collections.Counter()  # by node, to RMIDs other than 0
        self._footprints: dict[tuple[int, int], _Footprint] = {}
        self._tasks: dict[tuple[int, int], int] = {}  # the arguments of the last hold_cache()
        # By node, the RMIDs whose bandwidth is counted, the last active one at the end; root's is always counted.
        self._tracked: list[dict[int, None]] = [{} for _ in range(profile.nodes)]
        if residue_seed is not None:
            chance = random.Random(residue_seed)  # noqa: S311 - a demonstration, not a secret
            for rmid in range(profile.num_rmids):
                for node in range(profile.nodes):
                    self._busy[rmid, node] = chance.randrange(MOST_RESIDUE_NS)
        self._root_residue = [self._busy[0, node] for node in range(profile.nodes)]
        self.begin_group(0)

    def charge(self, rmid: int, node: int, ns: int, since: float, now: float) -> None:
        """Add CPU time, used evenly between ``since`` and ``now``, to an RMID other than root's."""
        if not ns:
            return
        self._track(rmid, node)
        self._busy[rmid, node] += ns
        self._charged[node] += ns
        lag = self.profile.lag_seconds
        if not lag:
            return
        pushed = min(now, math.floor(now / lag) * lag)  # a product that is rounded may be later than now
        fresh = ns if since >= pushed else int(ns * (now - pushed) / (now - since))
        waiting = self._waiting(rmid, node, now)
        self._unpushed[rmid, node] = (pushed + lag, waiting + fresh)

    def _track(self, rmid: int, node: int) -> None:
        """Track an RMID that becomes active or is read by mkdir: it takes the counters of the longest idle one."""
        if self.profile.mbm_tracked is None:
            return
        tracked = self._tracked[node]
        if rmid in tracked:
            del tracked[rmid]
        else:
            if len(tracked) >= self.profile.mbm_tracked:
                del tracked[next(iter(tracked))]
            for event in self._traffic_events:
                self.restart_event(event, rmid, node)
        tracked[rmid] = None

    def is_tracked(self, rmid: int, node: int) -> bool:
        """Whether the hardware currently counts the bandwidth of that RMID there."""
        return self.profile.mbm_tracked is None or rmid == 0 or rmid in self._tracked[node]

    def _waiting(self, rmid: int, node: int, now: float) -> int:
        """Return the CPU time that is not in the telemetry registers yet."""
        due, ns = self._unpushed.get((rmid, node), (now, 0))
        return ns if due > now else 0

    def busy(self, rmid: int, node: int) -> int:
        """Return the true CPU time of an RMID since power-on, without lag."""
        return self._busy[rmid, node]

    @property
    def active(self) -> set[int]:
        """Return the RMIDs that ever used CPU time."""
        return {rmid for (rmid, _), ns in self._busy.items() if ns}

    def busy_since_birth(self, rmid: int, node: int) -> int:
        """Return the true CPU time of the RMID's current group."""
        return self._busy[rmid, node] - self._born.get((rmid, node), 0)

    def charge_root(self, host_ns: Sequence[int]) -> None:
        """Charge RMID 0 with the rest of the host's CPU time, by node since the start; never less than before."""
        for node, used in enumerate(host_ns):
            left = self._root_residue[node] + used - self._charged[node]
            self._busy[0, node] = max(self._busy[0, node], left)

    def begin_group(self, rmid: int) -> None:
        """Start the traffic of a new group at 0; telemetry continues."""
        for node in range(self.profile.nodes):
            self._born[rmid, node] = self._busy[rmid, node]
            for event in self._traffic_events:
                self.restart_event(event, rmid, node)
            if rmid:
                self._track(rmid, node)  # mkdir reads the counters

    def restart_event(self, event: Event, rmid: int, node: int) -> None:
        """Restart one traffic counter at 0, as when an assignable counter is assigned."""
        self._mbm_base[event.name, rmid, node] = self._busy[rmid, node]

    def restart_node(self, node: int) -> None:
        """Restart all traffic counters of a node, as when its CPUs come online."""
        for rmid in range(self.profile.num_rmids):
            for event in self._traffic_events:
                self.restart_event(event, rmid, node)

    def hold_cache(self, tasks: Mapping[tuple[int, int], int], now: float) -> None:
        """Set the number of live tasks of each (rmid, node): each holds a share of that cache from now on."""
        if tasks == self._tasks:
            return
        self._tasks = dict(tasks)
        in_node: collections.Counter[int] = collections.Counter()
        for (_, node), number in tasks.items():
            in_node[node] += number
        for key in self._footprints.keys() | tasks.keys():
            number = tasks.get(key, 0)
            even = self.profile.node_cache_bytes // max(1, in_node[key[1]])
            footprint = self._footprints.setdefault(key, _Footprint())
            footprint.level, footprint.at = footprint.now(now), now
            footprint.held = number * min(int(LLC_OCCUPANCY.rate), even)

    def occupancy(self, rmid: int, node: int, now: float) -> int:
        """Return the cache that ``rmid`` holds in bytes, a multiple of the unit. Root has half of the rest."""
        if rmid == 0:
            others = sum(f.now(now) for (_, where), f in self._footprints.items() if where == node)
            return self.profile.round_down(max(0, self.profile.node_cache_bytes - int(others)) // 2)
        footprint = self._footprints.get((rmid, node))
        return self.profile.round_down(int(footprint.now(now))) if footprint else 0

    def traffic(self, event: Event, rmid: int, node: int, rate: Fraction) -> int:
        """Return the bytes at that rate since the counter started at 0."""
        since = self._busy[rmid, node] - self.began(event, rmid, node)
        return self.profile.round_down(int(since * rate / NS))

    def began(self, event: Event, rmid: int, node: int) -> int:
        """Return the CPU time at which a traffic counter started at 0."""
        return self._mbm_base.get((event.name, rmid, node), 0)

    def telemetry(self, event: Event, rmid: int, domain: int, now: float) -> int | None:
        """Return the value of the register; None if this RMID was never active on that package.

        Registers run from power-on on, and their bit 63 states that there is data (intel_aet.c).
        """
        busy = sum(self._busy[rmid, node] - self._waiting(rmid, node, now) for node in self.profile.nodes_of(domain))
        raw = int((busy << (event.fraction_bits or 0)) * event.rate / NS)
        return raw & ((1 << self.profile.telemetry_bits) - 1) if busy else None
