# SPDX-License-Identifier: Apache-2.0
"""Configurable bandwidth events: the memory transactions that each L3 counts for them (AMD's BMEC, Linux 6.3).

The rules are those of Documentation/filesystems/resctrl.rst ("mbm_total_bytes_config"), the messages those of
mon_config_write() in fs/resctrl/rdtgroup.c.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from fractions import Fraction

from resctrlmond.sim.kernel.abmc import DEFAULT_FILTERS, TRANSACTIONS
from resctrlmond.sim.kernel.commands import CommandStatus, parse_unsigned_long
from resctrlmond.sim.kernel.counters import Counters
from resctrlmond.sim.kernel.tree import error
from resctrlmond.sim.profiles import GIB, Event, Kind, Profile

_BITS = {name: 1 << number for number, name in enumerate(TRANSACTIONS)}
MOST = sum(_BITS.values())


class Configurations:
    """A mask of transactions for each bandwidth event in each L3, if the machine can configure them.

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
        self._profile = profile
        self._status = status
        self._counters = counters
        self._online = online
        self._update_counts = update_counts
        self._events = [event for event in profile.cache_events if event.kind is Kind.TRAFFIC]
        self._masks = {
            (event.name, domain): sum(_BITS[name] for name in DEFAULT_FILTERS[event.name])
            for event in self._events
            for domain in range(profile.domains)
        }
        self._unavailable: set[tuple[int, str, int]] = set()  # (rmid, event, domain) that is Unavailable for one read

    def rate(self, event: Event, domain: int, usual: Fraction) -> Fraction:
        """Return the counted traffic in bytes per second; ``usual`` if nothing can be configured."""
        if not self._profile.configurable_events:
            return usual
        mask = self._masks[event.name, domain]
        return GIB * sum((share for name, share in TRANSACTIONS.items() if mask & _BITS[name]), Fraction(0))

    def can_be_read(self, rmid: int, event: Event, domain: int) -> bool:
        """Return False at the first read of an RMID after a change."""
        key = (rmid, event.name, domain)
        if key not in self._unavailable:
            return True
        self._unavailable.remove(key)
        return False

    def show(self, event: Event) -> str:
        """Show ``mbm_total_bytes_config``: ``0=0x7f;1=0x7f``."""
        return ";".join(f"{domain}=0x{self._masks[event.name, domain]:02x}" for domain in self._online()) + "\n"

    def write(self, event: Event, command: str) -> None:
        """Apply ``0=0x7f;1=15``, in hexadecimal, to one L3 after the other, up to the first error."""
        rest = self._status.line(f"{event.name}_config", command)
        self._update_counts()
        while rest:
            part, _, rest = rest.partition(";")
            number, _, text = part.strip().partition("=")
            domain, mask = parse_unsigned_long(number, 10), parse_unsigned_long(text, 16)
            if domain is None:
                raise self._refusal("Missing '=' or non-numeric domain id")
            if mask is None:
                raise self._refusal("Non-numeric event configuration value")
            if mask & ~MOST:
                raise self._refusal(f"Invalid event configuration: max valid mask is 0x{MOST:02x}")
            if domain not in self._online():
                raise error(errno.EINVAL)
            self._configure(event, domain, mask)

    def _configure(self, event: Event, domain: int, mask: int) -> None:
        """Clear the counters of all RMIDs for both events after a change; the next read of each is Unavailable."""
        if self._masks[event.name, domain] == mask:
            return
        self._masks[event.name, domain] = mask
        self._counters.restart_node(domain)
        names = [event.name for event in self._events]
        self._unavailable |= {(rmid, name, domain) for rmid in range(self._profile.num_rmids) for name in names}

    def _refusal(self, message: str) -> OSError:
        self._status.add(message)
        return error(errno.EINVAL)
