# SPDX-License-Identifier: Apache-2.0
"""The names by which people know a workload, from its attributes and the control groups of its members."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]{1,248}\.(service|scope)")
_SLICE = re.compile(r"/([A-Za-z0-9:_.\\@-]{1,248}\.slice)(?:/|\Z)")
_USER_SLICE = re.compile(r"/user-([0-9]{1,10})\.slice/")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a workload; "" for each that it does not have. ``user`` is a number.

    ``slice`` is the outermost systemd slice, if the control groups of all members are in the same one.

    ``unit`` is that of the attributes; without one, it is ``unit_of_members``, the only systemd unit of the members.
    """

    namespace: str
    pod: str
    container: str
    unit: str
    unit_of_members: str
    user: str
    slice: str


def names_of(attributes: Mapping[str, str], cgroups: Iterable[str]) -> Names:
    """Return the names of a workload. ``cgroups``: the control groups of its members, "" for one without."""
    paths = [path for path in cgroups if path]
    units = {unit_of(path) for path in paths}
    unit = units.pop() if len(units) == 1 else ""
    slices = {found[1] if (found := _SLICE.search(path)) else "" for path in paths}
    users = {found[1] for path in paths if (found := _USER_SLICE.search(path))}
    return Names(
        namespace=attributes.get("pod.namespace", ""),
        pod=attributes.get("pod.name", ""),
        container=attributes.get("container.name", ""),
        unit=attributes.get("unit", "") or unit,
        unit_of_members=unit,
        user=users.pop() if len(users) == 1 else "",
        slice=slices.pop() if len(slices) == 1 else "",
    )


def unit_of(cgroup: str) -> str:
    """Return the systemd unit of a control group: the first service or scope in its path; "" if it has none."""
    return next((name for name in cgroup.split("/") if _UNIT.fullmatch(name)), "")
