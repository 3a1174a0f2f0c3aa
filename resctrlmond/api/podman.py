# SPDX-License-Identifier: Apache-2.0
"""Find the name of a Podman container, and whether it is the infra container of a pod: the OCI state lacks both.

Each read is about one container and has a limited length. The name of the image is only in files of Podman that grow
with the number of containers, so it is not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import NotRead

_MANAGER = "io.container.manager"
_LIBPOD = "libpod"
# The infra container, in the annotations of the other containers of its pod.
_SANDBOX_ID = "io.kubernetes.cri-o.SandboxID"
ANNOTATIONS = (_MANAGER, _SANDBOX_ID)

# The monitor is the parent of the OCI runtime, which is the parent of the container's first process.
_GENERATIONS = 2
# The name and the id are among the first options of conmon.
_COMMAND_LENGTH = 1 << 14
_STATUS_LENGTH = 1 << 12


def is_podman(annotations: dict[str, str]) -> bool:
    """Return whether Podman's library created the container."""
    return annotations.get(_MANAGER) == _LIBPOD


def is_infra(container: str, annotations: dict[str, str], cgroup: str) -> bool:
    """Return whether a container of Podman is the infra container of its pod, which keeps the pod's namespaces.

    It is in the pod's control group, ``<pod id>`` or ``...libpod_pod_<pod id>.slice``, and its annotations do not
    name an infra container. With ``--share-parent=false`` it is in another control group and is not recognized.
    """
    if _SANDBOX_ID in annotations:
        return False
    in_pod = rf"/(?:[^/]*libpod_pod_)?[0-9a-f]{{64}}(?:\.slice)?/libpod-{re.escape(container)}(?:\.scope)?(?:/|$)"
    return re.search(in_pod, cgroup) is not None


def container_name(container: str, pid: int) -> str:
    """Return the name of a container with the first process ``pid``; "" if it is unknown.

    The name is in the command line of the container's monitor, ``conmon ... -c ID ... -n NAME ...`` (conmon(8)). Only
    monitors that run as root are trusted.
    """
    for _ in range(_GENERATIONS):
        pid = _parent(pid)
        if pid <= 1:
            break
        arguments = _command(pid)
        if os.path.basename(arguments[0]) == "conmon" and _option(arguments, "-c") == container and _is_of_root(pid):
            return _option(arguments, "-n")
    return ""


def _parent(pid: int) -> int:
    try:
        found = processes.stat(pid)
    except NotRead:
        return 0
    return found.parent if found else 0


def _command(pid: int) -> list[str]:
    """Return the arguments of the process within the length limit; one empty argument if there are none."""
    return _read(f"/proc/{pid}/cmdline", _COMMAND_LENGTH).split("\0")


def _option(arguments: Sequence[str], name: str) -> str:
    """Return the value of the first option with the name; "" if there is none."""
    try:
        return arguments[arguments.index(name) + 1]
    except (ValueError, IndexError):
        return ""


def _is_of_root(pid: int) -> bool:
    """Return whether all user ids of the process (proc_pid_status(5)) are 0."""
    found = re.search(r"^Uid:\s+(.*)$", _read(f"/proc/{pid}/status", _STATUS_LENGTH), re.MULTILINE)
    return found is not None and set(found[1].split()) == {"0"}


def _read(path: str, length: int) -> str:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(file, length).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(file)
