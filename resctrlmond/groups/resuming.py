# SPDX-License-Identifier: Apache-2.0
"""A workload that lives on when its group was lost: a new run, which knows what was used before."""

from __future__ import annotations

from resctrlmond.groups.accounting import digits
from resctrlmond.groups.ends import has_ended
from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.making import Making
from resctrlmond.groups.plan import losses_in_a_row
from resctrlmond.groups.record import Earlier, Record
from resctrlmond.groups.sweeping import Sweeping


class Resuming:
    """Begins interrupted runs anew. Whoever calls holds the key."""

    def __init__(self, life: Lifecycle, making: Making, sweeping: Sweeping) -> None:
        self.life = life
        self.making = making
        self.sweeping = sweeping

    def resume(self, record: Record) -> Record:
        """Begin an interrupted run (``Record.is_interrupted``) anew, with the members that live, all late now.

        Raises what Lifecycle.make does; the lost run then stands as before.
        """
        members = tuple(
            replace(member, late=True, part="", reason="") for member in record.living if not has_ended(member)
        )
        members += tuple(replace(member, part="") for member in record.awaited)
        places = [place for place in map(self.sweeping.where, members) if place is not None]
        earlier = self._earlier(record)
        # Its tasks may be in another class by now; after an unmount they are all in the root.
        class_ = places[0].class_ if places else record.class_
        anew = self.making.new(record.key, class_, record, record.follows and not places)
        anew = replace(
            anew,
            priority=record.priority,
            pod_cgroup=record.pod_cgroup,
            claims=record.claims,
            members=members,
            attributes=record.attributes,
            attribute_owners=record.attribute_owners,
            earlier=earlier,
        )
        made = self.making.make(anew, record, may_wait=True)
        return self.sweeping.adopt(made) or made

    def _earlier(self, record: Record) -> Earlier:
        totals = {
            total.event.name: "" if total.number is None else digits(total.number)
            for total in self.life.totals(record, {})
        }
        reason = f"its group was lost at {record.completed_at} ({record.reason}), and its use until it had a new one"
        return Earlier(totals, reason + " is not counted", losses_in_a_row(record))
