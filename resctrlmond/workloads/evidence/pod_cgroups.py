# SPDX-License-Identifier: Apache-2.0
"""Control groups of pods: find the pod of a container, and the containers of a pod."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import not_read
from resctrlmond.workloads.model.validation import canonical_key

# The kubelet names the control group of a pod "pod<uid>" (cgroupfs driver) or "kubepods-burstable-pod<uid>.slice"
# with underscores for dashes (systemd driver). UIDs of static pods have neither. A UID may have capital letters.
_POD = re.compile(r"(?:.*[^0-9A-Za-z])?pod([0-9A-Fa-f]{8}(?:[-_]?[0-9A-Fa-f]{4}){3}[-_]?[0-9A-Fa-f]{12})(?:\.slice)?")
# The same for one UID that need not be a UUID, without and with the systemd driver.
_CLAIMED = r"pod{}|(?:.*-)?kubepods(?:-besteffort|-burstable)?-pod{}\.slice"
# Ids of containers and sandboxes, as of containerd, CRI-O and Podman.
_CONTAINER = re.compile(r"(?:.*-)?([0-9a-f]{64})(?:\.scope)?")
# CRI-O runs a monitor for each container, in a control group next to the container's.
MONITOR = "crio-conmon-"


def pod_cgroup(cgroup: str, claimed: str = "") -> tuple[str, str]:
    """Return the parent or ancestor of a control group that is a pod's, and the pod's UID; ("", "") if none is.

    A name shows the UID of a pod only if this has the form of a UUID. ``claimed`` is another UID to look for.
    """
    of_claimed = re.compile(_CLAIMED.format(re.escape(claimed), re.escape(claimed.replace("-", "_"))))
    parent = cgroup.rpartition("/")[0]
    while parent:
        above, _, name = parent.rpartition("/")
        if named := _POD.fullmatch(name):
            return parent, canonical_key(re.sub("[-_]", "", named[1]))
        if claimed and of_claimed.fullmatch(name):
            return parent, claimed
        parent = above
    return "", ""


def container_in(name: str) -> str | None:
    """Return the id of the container whose control group has that name; None if it is not that of a container."""
    named = _CONTAINER.fullmatch(name)
    return named[1] if named and not name.startswith(MONITOR) else None


def list_below(pod: str) -> list[str]:
    """List the names of the control groups directly in that of a pod; [] if it was removed. Raises NotRead."""
    try:
        with os.scandir(pod) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise not_read(error, "list the containers in the control group", pod) from error


def containers_in(pod: str, known: Collection[str]) -> dict[str, str]:
    """Return the containers with tasks in the control group of a pod, except for the ``known``: id -> control group.

    Raises NotRead.
    """
    found = {}
    for name in list_below(pod):
        path, container = os.path.join(pod, name), container_in(name)
        if container is not None and container not in known and cgroups.is_populated(path):
            found[container] = path
    return found
