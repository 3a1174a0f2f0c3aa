# SPDX-License-Identifier: Apache-2.0
"""The systemd units of a workload, from its attribute or from the control groups of its members."""

from __future__ import annotations

import itertools
import re

from resctrlmond.api.types import Workload

# The units that have control groups (systemd.unit(5)). re compiles and keeps it at the first use.
_WITH_CGROUP = r"[A-Za-z0-9:_.\\@-]{1,248}\.(slice|service|scope|socket|mount|swap)"
# As in the field "unit" of an entry in the journal (resctrlmond/daemon/ledger.py).
_OF_LEDGER = (".service", ".scope")


def unit_path(workload: Workload) -> tuple[str, ...]:
    """Return the units in which all members are, the outermost first; () if none is known.

    For example ``("system.slice", "web.service")``. The unit of a process without a control group of its own is not
    known.
    """
    paths = [
        [name for name in member.cgroup.split("/") if re.fullmatch(_WITH_CGROUP, name)]
        for member in workload.members
        if member.cgroup
    ]
    levels = zip(*paths, strict=False)
    common = tuple(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))
    if common:
        return common
    unit = workload.attributes.get("unit", "")
    # Callers may set it to any text. A name with a slash would look like a unit in another one.
    return (unit,) if unit and "/" not in unit else ()


def unit_of(workload: Workload) -> str:
    """Return the unit of the workload: its attribute, or the service or scope of all its members; "" for none."""
    attribute = workload.attributes.get("unit", "")
    return attribute or next((name for name in unit_path(workload) if name.endswith(_OF_LEDGER)), "")
