# SPDX-License-Identifier: Apache-2.0
"""Companions: which workload is to have one now, the name of its unit, and the values of its variables. No I/O."""

from __future__ import annotations

import hashlib
import re

import msgspec

from resctrlmond.host.unit_globs import COMPANION_PREFIX
from resctrlmond.workloads.model.states import CompanionState
from resctrlmond.workloads.model.validation import is_pod_uid
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.profiles.companion_settings import STATS_FILE, Companion
from resctrlmond.workloads.profiles.profile import Profiles, Watch

# systemd's UNIT_NAME_MAX is 255, with the prefix and ".service".
_MAX_UNIT_STEM = 200
_UNIT_CHARACTERS = re.compile(r"[A-Za-z0-9:_.]")


class CompanionStatus(msgspec.Struct, frozen=True):
    """The state of a workload's companion, with the reason, "" for none, and the name of its unit."""

    state: CompanionState
    reason: str = ""
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


def companion_of(workload: Workload | None, profiles: Profiles) -> Companion | None:
    """Return the companion that the workload is to have until its end; None if it is to have none.

    A pod of which only the containers have groups has none: the containers in its group have another profile.
    """
    if workload is None or not workload.profile or workload.key.startswith(COMPANION_PREFIX):
        return None
    if workload.state is State.ENDING or (workload.state.is_over and not workload.is_interrupted):
        return None
    profile = profiles.find(workload.profile)
    if profile is None or (profile.watch is Watch.CONTAINER and is_pod_uid(workload.key)):
        return None
    return profile.companion


def is_ready(workload: Workload) -> bool:
    """Return whether a companion can be started: the group exists, and the workload has a member."""
    return workload.state is State.ACTIVE


def run_of(workload: Workload) -> str:
    """Return a name for this run of the workload, which no other run has."""
    return str(workload.first.nonce)


def unit_of(key: str) -> str:
    """Return the name of the unit of a workload's companion.

    The key is escaped as by systemd-escape(1). A key that is too long for that is cut, and gets a checksum.
    """
    escaped = "".join(
        character if _UNIT_CHARACTERS.fullmatch(character) else f"\\x{ord(character):02x}" for character in key
    )
    if len(escaped) > _MAX_UNIT_STEM:
        escaped = f"{escaped[:100]}\\x2e{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    return f"{COMPANION_PREFIX}{escaped}.service"


def values_of(workload: Workload, *, group: str, snapshot: str, folder: str) -> dict[str, str]:
    """Return the values of the variables for a workload, without those that it lacks.

    ``group`` is the path of its monitoring group, ``snapshot`` that of its begin and end files, and ``folder`` that
    of the companion's files.
    """
    attributes = workload.attributes
    pod = workload.key if is_pod_uid(workload.key) else attributes.get("pod.uid", "")
    found = {
        "CGROUP2_ABS_PATH": _cgroup_of(workload),
        "MON_GROUP_PATH": group,
        "SNAPSHOT_DIR": snapshot,
        "COMPANION_DIR": folder,
        "MEMTIERD_SWAP_STATS_PATH": f"{folder}/{STATS_FILE}",
        "KEY": workload.key,
        "POD_UID": pod,
        "POD_NAME": attributes.get("pod.name", ""),
        "NAMESPACE": attributes.get("pod.namespace", ""),
        "CONTAINER": "" if is_pod_uid(workload.key) else attributes.get("container.name", ""),
    }
    return {name: value for name, value in found.items() if value}


def _cgroup_of(workload: Workload) -> str:
    if is_pod_uid(workload.key):
        return workload.pod_cgroup
    return next((member.cgroup for member in workload.living if member.cgroup), "")
