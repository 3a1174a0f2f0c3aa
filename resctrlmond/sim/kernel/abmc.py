# SPDX-License-Identifier: Apache-2.0
"""Assignable bandwidth counters of each L3, and the files that control them (Linux 6.18).

The rules and texts are those of fs/resctrl/monitor.c and Documentation/filesystems/resctrl.rst. The message for a
command that cannot be parsed ("Invalid input") is newer, and is in the image of Linux 7.3.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from fractions import Fraction

from resctrlmond.sim.kernel.commands import CommandStatus
from resctrlmond.sim.kernel.counters import Counters
from resctrlmond.sim.kernel.tree import error
from resctrlmond.sim.profiles import GIB, MBM_LOCAL, MBM_TOTAL, Event, Kind, Profile

# Every memory transaction that a filter can name, in the kernel's order, and its share of the simulated traffic.
TRANSACTIONS = {
    "local_reads": Fraction(1, 2),
    "remote_reads": Fraction(1, 8),
    "local_non_temporal_writes": Fraction(1, 8),
    "remote_non_temporal_writes": Fraction(1, 16),
    "local_reads_slow_memory": Fraction(1, 8),
    "remote_reads_slow_memory": Fraction(1, 32),
    "dirty_victim_writes_all": Fraction(1, 32),
}
DEFAULT_FILTERS = {
    MBM_TOTAL.name: tuple(TRANSACTIONS),
    MBM_LOCAL.name: tuple(name for name in TRANSACTIONS if name.startswith("local_")),
}
_NO = "nNfF0"
_YES = "yYtT1"
_MODE_OFF = "mbm_event counter assignment mode is not enabled"


def parse_bool(text: str) -> bool | None:
    """Parse a boolean as kstrtobool() does: by its first one or two letters. Return None if it is invalid."""
    if text[:1] and text[0] in _YES + _NO:
        return text[0] in _YES
    return {"on": True, "of": False}.get(text[:2].lower())


class Assignments:
    """The counters of every L3, by (rmid, event), and their assignment.

    ``online`` returns the numbers of the L3 caches that are online; ``update_counts`` updates all counts.
    """

    def __init__(
        self,
        profile: Profile,
        status: CommandStatus,
        counters: Counters,
        online: Callable[[], Collection[int]],
        update_counts: Callable[[], None],
    ) -> None:
        self._number = profile.mbm_counters or 0
        self._events = [event for event in profile.cache_events if event.kind is Kind.TRAFFIC]
        self._status = status
        self._counters = counters
        self._online = online
        self._update_counts = update_counts
        self._taken: list[set[tuple[int, str]]] = [set() for _ in range(profile.domains)]
        self._enabled = bool(self._number)
        self._on_mkdir = True
        self._filters = dict(DEFAULT_FILTERS)

    def counts(self, rmid: int, event: Event, domain: int) -> bool:
        """Whether that event of the RMID can be read in that L3."""
        return not self._enabled or (rmid, event.name) in self._taken[domain]

    def rate(self, event: Event) -> Fraction:
        """Return the traffic that the event's filter matches, in bytes per second."""
        if not self._number:
            return event.rate
        return GIB * sum((TRANSACTIONS[name] for name in self._filters[event.name]), Fraction(0))

    # -- changes of groups

    def new_group(self, rmid: int) -> None:
        """Assign a counter for each event in each L3 to a group, or report the failure (rdtgroup_assign_cntrs())."""
        if self._enabled and self._on_mkdir:
            for event in self._events:
                self._assign_in(rmid, event, self._online())

    def drop_group(self, rmid: int) -> None:
        """Free the counters of a group (rdtgroup_unassign_cntrs())."""
        for taken in self._taken:
            taken -= {key for key in taken if key[0] == rmid}

    def drop_domain(self, domain: int) -> None:
        """Free the counters of an L3 that goes offline."""
        self._taken[domain].clear()

    def _assign_in(self, rmid: int, event: Event, domains: Collection[int]) -> bool:
        """Assign a counter in each of these L3 that has one left. Return whether all had (Linux 6.18 stops early)."""
        assigned = [self._assign(rmid, event, domain) for domain in domains]
        return all(assigned)

    def _assign(self, rmid: int, event: Event, domain: int) -> bool:
        taken = self._taken[domain]
        if (rmid, event.name) in taken:
            return True
        if len(taken) >= self._number:
            self._status.add(f"Failed to allocate counter for {event.name} in domain {domain}")
            return False
        taken.add((rmid, event.name))
        self._counters.restart_event(event, rmid, domain)
        return True

    # -- files; a read also clears last_cmd_status, except for the first one

    def show_number(self) -> str:
        """Show ``num_mbm_cntrs``."""
        return ";".join(f"{domain}={self._number}" for domain in self._online()) + "\n"

    def _begin(self, refusal: str = _MODE_OFF) -> None:
        self._status.clear()
        if not self._enabled:
            self._status.add(refusal)
            raise error(errno.EINVAL)

    def show_available(self) -> str:
        """Show ``available_mbm_cntrs``."""
        self._begin()
        return ";".join(f"{domain}={self._number - len(self._taken[domain])}" for domain in self._online()) + "\n"

    def show_on_mkdir(self) -> str:
        """Show ``mbm_assign_on_mkdir``."""
        self._begin()
        return f"{int(self._on_mkdir)}\n"

    def write_on_mkdir(self, command: str) -> None:
        """Set whether new groups get counters."""
        value = parse_bool(command)
        if value is None:
            raise self._status.unreadable("mbm_assign_on_mkdir")
        self._begin()
        self._on_mkdir = value

    def show_mode(self) -> str:
        """Show ``mbm_assign_mode``."""
        if not self._number:
            return "[default]\n"
        return "[mbm_event]\ndefault\n" if self._enabled else "[default]\nmbm_event\n"

    def write_mode(self, command: str) -> None:
        """Set the mode. A change frees and restarts all counters."""
        mode = self._status.line("mbm_assign_mode", command)
        if mode not in ("default", "mbm_event"):
            self._status.add("Unsupported assign mode")
            raise error(errno.EINVAL)
        enable = mode == "mbm_event"
        if enable and not self._number:
            self._status.add("mbm_event mode is not supported")
            raise error(errno.EINVAL)
        if enable == self._enabled:
            return
        self._update_counts()
        self._enabled = enable
        self._filters = dict(DEFAULT_FILTERS)
        self._on_mkdir = self._on_mkdir or enable
        for domain, taken in enumerate(self._taken):
            taken.clear()
            self._counters.restart_node(domain)

    def show_filter(self, event: Event) -> str:
        """Show ``event_configs/<event>/event_filter``."""
        self._begin()
        return ",".join(self._filters[event.name]) + "\n"

    def write_filter(self, event: Event, command: str) -> None:
        """Set the transactions of an event, and restart its counters."""
        wanted = self._status.line("event_filter", command)
        self._begin()
        names = [name.strip() for name in wanted.split(",")] if wanted else []
        for name in names:
            if name not in TRANSACTIONS:
                self._status.add(f"Invalid memory transaction type {name}")
                raise error(errno.EINVAL)
        chosen = tuple(name for name in TRANSACTIONS if name in names)
        if chosen == self._filters[event.name]:
            return
        self._update_counts()
        self._filters[event.name] = chosen
        for domain, taken in enumerate(self._taken):
            for rmid in [rmid for rmid, name in taken if name == event.name]:
                self._counters.restart_event(event, rmid, domain)

    def show_group(self, rmid: int) -> str:
        """Show ``mbm_L3_assignments`` of a group."""
        self._begin()
        lines = []
        for event in self._events:
            states = [f"{domain}={'e' if self.counts(rmid, event, domain) else '_'}" for domain in self._online()]
            lines.append(f"{event.name}:{';'.join(states)}\n")
        return "".join(lines)

    def write_group(self, rmid: int, command: str) -> None:
        """Run the lines ``<event>:<domain or *>=<e or _>``, up to the first that fails."""
        wanted = self._status.line("mbm_L3_assignments", command)
        self._begin("mbm_event mode is not enabled")
        self._update_counts()
        for assignment in wanted.split("\n"):
            name, _, places = assignment.partition(":")
            event = next((known for known in self._events if known.name == name), None)
            if event is None:
                self._status.add(f"Invalid event {name}")
                raise error(errno.ENOENT)
            self._modify(rmid, event, places)

    def _modify(self, rmid: int, event: Event, places: str) -> None:
        """Apply ``0=e;1=_`` (resctrl_parse_mbm_assignment())."""
        while places:
            place, _, places = places.partition(";")
            where, equals, state = place.strip().partition("=")
            if where.startswith("*"):
                self._apply(rmid, event, "*", state, self._online())
                return
            if not equals or not (where.isascii() and where.isdigit()):
                self._status.add("Missing domain id")
                raise error(errno.EINVAL)
            if int(where) not in self._online():
                self._status.add(f"Invalid domain id {int(where)}")
                raise error(errno.EINVAL)
            self._apply(rmid, event, str(int(where)), state, [int(where)])

    def _apply(self, rmid: int, event: Event, where: str, state: str, domains: Collection[int]) -> None:
        number = 0
        if state == "_":
            for domain in domains:
                self._taken[domain].discard((rmid, event.name))
        elif state != "e":
            number = errno.EINVAL
        elif not self._assign_in(rmid, event, domains):
            number = errno.ENOSPC
        if number:
            self._status.add(f"Assign operation '{event.name}:{where}={state}' failed")
            raise error(number)
