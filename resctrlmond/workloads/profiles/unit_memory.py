# SPDX-License-Identifier: Apache-2.0
"""The memory settings of workloads whose control group is a unit of systemd: what to set, and what to put back.

No I/O. A kill of the daemon may come before or after each change. So the record of a change is written first, and has
all values that the property can have because of the daemon: it has any other value only if another program set it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

import msgspec

from resctrlmond.host.unit_globs import is_of_user
from resctrlmond.workloads.model.owners import OCI, SYSTEMD
from resctrlmond.workloads.model.validation import is_pod_uid
from resctrlmond.workloads.model.workload import Member, State, Workload
from resctrlmond.workloads.profiles.memory_settings import MEMORY_HIGH, SWAP_MAX, UNLIMITED, files_of
from resctrlmond.workloads.profiles.profile import Profiles

# The properties of systemd.resource-control(5) that set a file, and their value for no limit.
PROPERTIES = {MEMORY_HIGH: "MemoryHigh", SWAP_MAX: "MemorySwapMax"}
FILES = {name: file for file, name in PROPERTIES.items()}
INFINITY = (1 << 64) - 1
# crun moves the processes of a container to this control group below its scope.
_OF_CRUN = "container"
_USER_MANAGER = re.compile(r"/user@[0-9]{1,10}\.service/")

replace = msgspec.structs.replace


class Wanted(msgspec.Struct, frozen=True):
    """The values by property that a unit is to have, for a workload: ``cgroup`` is its absolute path.

    ``run`` identifies this run of the member: another run may have another unit of the same name. ``refusal`` is why
    the settings cannot be applied; "" if they can.
    """

    unit: str
    cgroup: str
    values: Mapping[str, int]
    run: str
    refusal: str = ""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one property: ``before`` is its value before the first change, ``value`` the one set last.

    ``value`` is None until the first change is known to be done. ``next`` is the value that is about to be set; None
    if there is none.
    """

    before: int
    value: int | None = None
    next: int | None = None

    def is_ours(self, now: int) -> bool:
        """Whether the daemon, and no other program, can have left the property at the value ``now``."""
        return now in (self.value, self.next) or (self.value is None and now == self.before)


class Changes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a unit: the changed properties by name. ``invocation`` is the invocation ID of the unit."""

    properties: Mapping[str, Change]
    invocation: str = ""


class Outcome(enum.Enum):
    """The treatment of one property by the daemon."""

    NOTHING = "nothing"
    SET = "set"
    FOREIGN = "foreign"
    """Another program has set it since then, so it is left as it is."""


class Step(msgspec.Struct, frozen=True):
    """The change of one property: the record to write ``first``, the value to set, and the record to write ``then``.

    The records are None for no record. With NOTHING and FOREIGN, only ``then`` is written.
    """

    outcome: Outcome
    first: Change | None
    value: int
    then: Change | None


def step(known: Change | None, now: int, wanted: int | None) -> Step:
    """Return what to do about a property with the value ``now``. ``wanted`` is None if nobody wants it changed."""
    if known is not None and not known.is_ours(now):
        return Step(Outcome.FOREIGN, known, now, None if wanted is None else known)
    if wanted is None:
        if known is None or now == known.before:
            return Step(Outcome.NOTHING, None, now, None)
        return Step(Outcome.SET, Change(known.before, now, known.before), known.before, None)
    if known is None:
        if now == wanted:
            return Step(Outcome.NOTHING, None, now, None)
        return Step(Outcome.SET, Change(now, None, wanted), wanted, Change(now, wanted))
    then = Change(known.before, wanted)
    if now == wanted:
        return Step(Outcome.NOTHING, then, now, then)
    last = None if known.value is None and now == known.before else now
    return Step(Outcome.SET, Change(known.before, last, wanted), wanted, then)


def wanted_by(workload: Workload | None, profiles: Profiles) -> list[Wanted]:
    """Return what the units of a workload are to have until its end.

    Containers of pods are left to the NRI plugin, by which the runtime sets their files before they start.
    """
    if workload is None or workload.state is State.ENDING or (workload.state.is_over and not workload.is_interrupted):
        return []
    found = []
    for member in workload.living:
        is_unit = member.owner == SYSTEMD and member.id == workload.key
        if (is_unit or _is_of_podman(workload, member)) and (profile := profiles.find(member.profile)) is not None:
            files, _ = files_of(profile.memory, {}, "")
            if files:
                values = {PROPERTIES[name]: _value(amount) for name, amount in files.items()}
                of = _of_unit if is_unit else _of_podman
                found.append(of(workload, member, values))
    return found


def _is_of_podman(workload: Workload, member: Member) -> bool:
    is_of_pod = is_pod_uid(workload.key) or "pod.uid" in workload.attributes
    return member.owner == OCI and member.kind == "container" and not is_of_pod


def _of_unit(workload: Workload, member: Member, values: Mapping[str, int]) -> Wanted:
    refusal = "it is a unit of a user's service manager" if is_of_user(member.id) else ""
    return Wanted(member.id, member.cgroup, values, _run_of(workload, member), refusal)


def _of_podman(workload: Workload, member: Member, values: Mapping[str, int]) -> Wanted:
    unit, run = f"libpod-{member.id}.scope", _run_of(workload, member)
    above, found, below = f"{member.cgroup}/".partition(f"/{unit}/")
    if not found or below not in ("", f"{_OF_CRUN}/"):
        where = member.cgroup or "the root"
        return Wanted(unit, "", values, run, f"its control group {where} is not a unit of systemd")
    if _USER_MANAGER.search(f"{above}/"):
        return Wanted(unit, "", values, run, "its scope belongs to a user's service manager")
    return Wanted(unit, f"{above}/{unit}", values, run)


def _run_of(workload: Workload, member: Member) -> str:
    return f"{workload.generation} {member.started_at}"


def _value(amount: int) -> int:
    return INFINITY if amount >= UNLIMITED else amount


def text_of(values: Mapping[str, int]) -> str:
    """Return values of properties as text, by the names of the files."""
    return ", ".join(
        f"{FILES[name]}: {'max' if value == INFINITY else value}" for name, value in sorted(values.items())
    )
