# SPDX-License-Identifier: Apache-2.0
"""The directories of mon_data: L3 caches, their nodes, packages, and whether they are online."""

from __future__ import annotations

import dataclasses

from resctrlmond.sim.profiles import Event, Profile


@dataclasses.dataclass(frozen=True, slots=True)
class Domain:
    """One directory with counters. ``parts`` are the nodes of an L3 with Sub-NUMA Clustering, whose sum it is."""

    name: str
    number: int
    nodes: tuple[int, ...]
    events: tuple[Event, ...]
    parts: tuple[Domain, ...] = ()


def _cache(profile: Profile, number: int) -> Domain:
    nodes = tuple(profile.nodes_of(number))
    parts = [Domain(f"mon_sub_L3_{node:02d}", node, (node,), profile.cache_events) for node in nodes]
    clustered = profile.nodes_per_cache > 1
    return Domain(f"mon_L3_{number:02d}", number, nodes, profile.cache_events, tuple(parts) if clustered else ())


class Domains:
    """All domains of a machine. A domain with parts is online as long as one part is."""

    def __init__(self, profile: Profile) -> None:
        self.caches = [_cache(profile, number) for number in range(profile.domains)]
        self.packages = [
            Domain(f"mon_PERF_PKG_{number:02d}", number, tuple(profile.nodes_of(number)), profile.package_events)
            for number in range(profile.domains if profile.package_events else 0)
        ]
        self._offline: set[str] = set()

    @property
    def all(self) -> list[Domain]:
        """Return the directories of mon_data, without the nodes in them."""
        return [*self.caches, *self.packages]

    def is_online(self, domain: Domain) -> bool:
        """Whether any CPU of the domain is online."""
        if domain.parts:
            return any(self.is_online(part) for part in domain.parts)
        return domain.name not in self._offline

    def nodes(self, domain: Domain) -> list[int]:
        """Return the online nodes whose sum the domain's counters are."""
        return [node for part in (domain.parts or (domain,)) if self.is_online(part) for node in part.nodes]

    def online_caches(self) -> list[int]:
        """Return the numbers of the online L3 caches."""
        return [domain.number for domain in self.caches if self.is_online(domain)]

    @property
    def _leaves(self) -> list[tuple[Domain, Domain | None]]:
        return [(part, domain if domain.parts else None) for domain in self.all for part in domain.parts or (domain,)]

    @property
    def leaves(self) -> list[Domain]:
        """Return the domains that go offline by themselves: nodes instead of the caches that have them."""
        return [leaf for leaf, _ in self._leaves]

    def set_online(self, name: str, online: bool) -> tuple[Domain, Domain | None] | None:
        """Switch a domain without parts. Return (domain, the one that contains it), or None if nothing changes."""
        found = next(((leaf, whole) for leaf, whole in self._leaves if leaf.name == name), None)
        if found is None or self.is_online(found[0]) == online:
            return None
        if online:
            self._offline.discard(name)
        else:
            self._offline.add(name)
        return found
