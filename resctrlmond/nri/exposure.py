# SPDX-License-Identifier: Apache-2.0
"""Mount the figures of its workload into a container, in the response to CreateContainer, if its profile says so.

A runtime does not create a container if the source of a mount is missing, if it cannot create the mount point, or if
another plugin mounts something at the same path. So the daemon creates the directory first, and the mount is left out
if any of this could happen, or if the daemon does not answer in time. If the runtime has not created a container with
the mount, the next one of that name in the pod gets none.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import time
from collections.abc import Iterable
from typing import TypeVar

from resctrlmond.api import signatures, types
from resctrlmond.nri import place
from resctrlmond.nri.manager import Manager, Refused, Unavailable
from resctrlmond.nri.messages import Container, Mount, Pod
from resctrlmond.resctrl.errors import printable
from resctrlmond.service import journal
from resctrlmond.workloads.model.errors import InvalidKey
from resctrlmond.workloads.model.validation import canonical_key, is_pod_uid
from resctrlmond.workloads.profiles.profile import Choice, Profiles, Watch

log = logging.getLogger(__name__)

DESTINATION = "/run/resctrlmon"
OPTIONS = ("bind", "ro", "nosuid", "nodev", "noexec")
# How long no further call is made after one that reached its time limit: each would delay a container.
PAUSE_S = 10.0
# The limit for what is kept about containers that are being created.
_MOST = 4096

K = TypeVar("K")
V = TypeVar("V")


class Exposure:
    """Asks resctrlmond, by calls of its own, for the directories to mount.

    ``texts`` states, by the id of a container whose profile exposes its figures, whether it has the mount.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        # The calls of a manager do not overlap.
        self._turn = asyncio.Lock()
        self._paused_until = 0.0
        self.texts: dict[str, str] = {}
        # By pod and name: the container that the runtime creates with the mount, and the names of which it did not
        # create one.
        self._creating: dict[tuple[str, str], str] = {}
        self._refused: dict[tuple[str, str], None] = {}

    @staticmethod
    def is_wanted(profiles: Profiles) -> bool:
        """Whether any profile exposes figures."""
        return any(profile.exposes for profile in profiles.by_name.values())

    def begin(self) -> None:
        """Forget which containers are being created: the events of an earlier connection do not arrive any more."""
        self._creating.clear()

    def created(self, container: str) -> None:
        """Record that the runtime has created a container."""
        self._creating = {name: other for name, other in self._creating.items() if other != container}

    def removed(self, container: str) -> None:
        """Forget a container that was removed."""
        self.texts.pop(container, None)

    async def mount(
        self, pod: Pod, container: Container, choice: Choice, *, unselected: str, within_s: float
    ) -> Mount | None:
        """Return the mount for a container that is being created; None if it gets none.

        ``unselected`` is the reason why its pod is not monitored, "" if it is.
        """
        if choice.profile is None or not choice.profile.exposes:
            return None
        name = pod.id, container.name
        if name in self._creating and self._creating.pop(name) != container.id:
            _keep(self._refused, name, None)
        why_not, path = unselected or self._why_not(name, container), ""
        if not why_not:
            try:
                async with asyncio.timeout(within_s):
                    path, why_not = await self._folder(pod, container, choice)
            except TimeoutError:
                self._manager.abandon(is_hung=True)
                self._paused_until = time.monotonic() + PAUSE_S
                why_not = "resctrlmond did not answer in time"
        if why_not:
            self.leave_out(pod, container, choice, why_not, level=logging.INFO if unselected else logging.WARNING)
            return None
        _keep(self._creating, name, container.id)
        _keep(self.texts, container.id, f"mounted at {DESTINATION}")
        return Mount(DESTINATION, "bind", OPTIONS, path)

    def leave_out(
        self, pod: Pod, container: Container, choice: Choice, why_not: str, *, level: int = logging.WARNING
    ) -> None:
        """Record and log why a container has no mount."""
        _keep(self.texts, container.id, f"not mounted: {why_not}")
        log.log(
            level,
            "container %s of pod %s with the profile %s does not get its figures as a mount: %s",
            printable(container.name),
            printable(f"{pod.namespace}/{pod.name}"),
            choice.name,
            printable(why_not),
            extra=journal.fields(key=pod.uid or pod.id),
        )

    def _why_not(self, name: tuple[str, str], container: Container) -> str:
        if name in self._refused:
            return "the runtime did not create an earlier container with the mount"
        if time.monotonic() < self._paused_until:
            return "resctrlmond did not answer in time"
        if container.mounts is None:
            return "the container has too many mounts"
        return why_not_among(container.mounts)

    async def _folder(self, pod: Pod, container: Container, choice: Choice) -> tuple[str, str]:
        """Return the directory to mount, or "" and the reason why there is none."""
        inner = place.inner_path(container.cgroups_path)
        try:
            key = canonical_key(pod.uid or pod.id)
            if choice.watch is Watch.CONTAINER and not is_pod_uid(container.id):
                key = container.id
            async with self._turn:
                cgroup = f"/{inner}" if inner else None
                request = types.ExposeRequest(key=key, member=container.id, cgroup=cgroup)
                reply = await self._manager.ask(signatures.EXPOSE, request)
            await asyncio.to_thread(_check, reply.path)
        except (Unavailable, Refused, InvalidKey) as error:
            return "", str(error)
        except OSError as error:
            return "", f"{error.filename}: {error.strerror}"
        return reply.path, ""


def why_not_among(mounts: Iterable[Mount]) -> str:
    """Return why the runtime might not be able to add the mount to these; "" if it is."""
    for mount in mounts:
        # In most images /var/run is a link to /run.
        path = os.path.normpath("/" + mount.destination.lstrip("/"))
        path = path.removeprefix("/var") if (path + "/").startswith("/var/run/") else path
        if (path + "/").startswith(DESTINATION + "/"):
            return f"the container has another mount at {mount.destination}"
        is_above = path != "/" and DESTINATION.startswith(path + "/")
        if is_above and (mount.type != "tmpfs" or "ro" in mount.options):
            return f"the mount point cannot be created in the container's mount at {mount.destination}"
    return ""


def _check(path: str) -> None:
    """Raise OSError unless the path is that of an existing directory, without links in the daemon's own folder."""
    own = path
    for _ in range(3):  # exposed/KEY/files
        own = os.path.dirname(own)
    is_link = os.path.realpath(path) != os.path.realpath(own) + path.removeprefix(own)
    if is_link or not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def _keep(known: dict[K, V], key: K, value: V) -> None:
    """Add an entry. The oldest ones are forgotten."""
    known.pop(key, None)
    known[key] = value
    while len(known) > _MOST:
        del known[next(iter(known))]
