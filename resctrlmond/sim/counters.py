# SPDX-License-Identifier: Apache-2.0
"""What the counters show: a fixed model on CPU time, kept per RMID and domain as the hardware keeps it."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Iterable, Mapping

from resctrlmond.sim.profiles import LLC_OCCUPANCY, Event, Kind, Profile

NS = 10**9
FRACTION_BITS = 18  # core_energy and activity (arch/x86/kernel/cpu/resctrl/intel_aet.c)
CACHE_HALF_LIFE_SECONDS = 0.5
MOST_RESIDUE_NS = 1000 * NS


def decimals(bits: int) -> int:
    """How many decimals a value of that many binary fraction bits is printed with (fs/resctrl/ctrlmondata.c)."""
    return max(1, math.ceil(bits * math.log10(2)))


def format_fixed(raw: int, bits: int = FRACTION_BITS) -> str:
    """A fixed-point value as the kernel prints it: its fraction rounded half up to ``decimals(bits)`` digits."""
    if bits == 0:
        return f"{raw}.0"
    digits = decimals(bits)
    fraction = ((raw & ((1 << bits) - 1)) * 10**digits + (1 << (bits - 1))) >> bits
    return f"{raw >> bits}.{fraction:0{digits}d}"


@dataclasses.dataclass(slots=True)
class _Footprint:
    """The cache lines of one RMID in one L3: tasks fill at once, what they leave halves every 0.5 s."""

    level: float = 0.0
    at: float = 0.0
    held: int = 0  # what the tasks that are there now hold

    def now(self, time: float) -> float:
        if self.level <= self.held:
            return float(self.held)
        halvings = max(0.0, time - self.at) / CACHE_HALF_LIFE_SECONDS
        return self.held + (self.level - self.held) * math.pow(0.5, halvings)


class Counters:
    """CPU nanoseconds and cache lines per (rmid, domain).

    CPU time of an RMID is never reset, as the telemetry registers are not; MBM files subtract what was there at
    ``mkdir``. RMID 0 has the host's CPU time that was charged to nobody else. ``residue_seed`` gives every RMID
    a pseudo-random history to begin with, as on a host that has been up for a while; None gives none.
    """

    def __init__(self, profile: Profile, residue_seed: int | None = None) -> None:
        self.profile = profile
        self._busy: collections.Counter[tuple[int, int]] = collections.Counter()
        self._mbm_base: dict[tuple[int, int], int] = {}
        self._charged: collections.Counter[int] = collections.Counter()  # by domain, to RMIDs other than 0
        self._footprints: dict[tuple[int, int], _Footprint] = {}
        self._tasks: dict[tuple[int, int], int] = {}  # as hold_cache() was last told
        if residue_seed is not None:
            chance = random.Random(residue_seed)  # noqa: S311 - a demonstration, no secret
            for rmid in range(profile.num_rmids):
                for domain in range(profile.domains):
                    self._busy[rmid, domain] = chance.randrange(MOST_RESIDUE_NS)
        self._root_residue = [self._busy[0, domain] for domain in range(profile.domains)]
        self.restart_traffic(0)

    def charge(self, rmid: int, domain: int, ns: int) -> None:
        """Adds CPU time to an RMID other than root's."""
        self._busy[rmid, domain] += ns
        self._charged[domain] += ns

    def settle_root(self, domain: int, host_ns: int) -> None:
        """Charges RMID 0 with what is left of the host's CPU time in that domain since the start; never less."""
        left = self._root_residue[domain] + host_ns - self._charged[domain]
        self._busy[0, domain] = max(self._busy[0, domain], left)

    def restart_traffic(self, rmid: int) -> None:
        """The MBM files of ``rmid`` begin at 0 from here on; telemetry goes on."""
        for domain in range(self.profile.domains):
            self._mbm_base[rmid, domain] = self._busy[rmid, domain]

    def hold_cache(self, tasks: Mapping[tuple[int, int], int], now: float) -> None:
        """Says how many live tasks each (rmid, domain) has: each holds a share of that L3 from now on."""
        if tasks == self._tasks:
            return
        self._tasks = dict(tasks)
        in_domain: collections.Counter[int] = collections.Counter()
        for (_, domain), number in tasks.items():
            in_domain[domain] += number
        for key in self._footprints.keys() | tasks.keys():
            number = tasks.get(key, 0)
            even = self.profile.cache_bytes // max(1, in_domain[key[1]])
            footprint = self._footprints.setdefault(key, _Footprint())
            footprint.level, footprint.at = footprint.now(now), now
            footprint.held = number * min(int(LLC_OCCUPANCY.rate), even)

    def occupancy(self, rmid: int, domain: int, now: float) -> int:
        """Bytes of L3 that ``rmid`` holds, a multiple of the unit. Root has half of what the others leave."""
        if rmid == 0:
            others = sum(f.now(now) for (_, where), f in self._footprints.items() if where == domain)
            return self.profile.round_down(max(0, self.profile.cache_bytes - int(others)) // 2)
        footprint = self._footprints.get((rmid, domain))
        return self.profile.round_down(int(footprint.now(now))) if footprint else 0

    def raw(self, event: Event, rmid: int, domain: int, now: float) -> int | None:
        """The value before printing: bytes, or fixed point; None: this RMID was never active on that package."""
        busy = self._busy[rmid, domain]
        if event.kind is Kind.OCCUPANCY:
            return self.occupancy(rmid, domain, now)
        if event.kind is Kind.TRAFFIC:
            since = busy - self._mbm_base.get((rmid, domain), 0)
            return self.profile.round_down(int(since * event.rate / NS))
        return int((busy << FRACTION_BITS) * event.rate / NS) if busy else None

    def text(self, event: Event, rmids: Iterable[int], domain: int, now: float) -> str:
        """The content of a counter file: the sum over the group's own RMID and its children's, before rounding.

        Members without a value are left out; if none has one, the text is ``Unavailable``.
        """
        values = [value for rmid in rmids if (value := self.raw(event, rmid, domain, now)) is not None]
        if not values:
            return "Unavailable\n"
        total = sum(values)
        return f"{format_fixed(total) if event.kind is Kind.TELEMETRY else total}\n"
