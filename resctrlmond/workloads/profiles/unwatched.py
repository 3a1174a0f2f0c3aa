# SPDX-License-Identifier: Apache-2.0
"""Containers and units that are in no group because of their profiles, until they end. They are in memory only."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import ResctrlError

replace = msgspec.structs.replace

# The containers of a large host. All of them are in one reply of List.
MAX_CONTAINERS = 1000


class UnwatchedContainer(msgspec.Struct, frozen=True):
    """A container without a group, or a unit of systemd.

    ``pod`` is the key of its pod, "" for none. ``pid`` and ``start_time`` are its first process, or ``cgroup`` is its
    control group. ``source`` is the annotation or rule that selected the profile. ``since`` is RFC 3339, UTC.
    The ``id`` of a unit is the key that its workload would have.
    """

    id: str
    name: str
    pod: str
    profile: str
    source: str
    reason: str
    since: str
    pid: int = 0
    start_time: int = 0
    cgroup: str = ""
    is_unit: bool = False

    def has_ended(self) -> bool:
        """Whether its first process has ended or, if that is not known, its control group is empty."""
        try:
            if self.pid:
                return not processes.is_same(self.pid, self.start_time)
            return not cgroups.is_populated(self.cgroup)
        except ResctrlError:
            return False


class UnwatchedContainers:
    """The containers by id. The methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._containers: dict[str, UnwatchedContainer] = {}

    def add(self, container: UnwatchedContainer) -> None:
        """Add a container, or replace the one with its id. If there are too many, the oldest is forgotten.

        A unit that is in the list stays there as it is: it is added again whenever it is looked at.
        """
        with self._lock:
            known = self._containers.get(container.id)
            if known is not None and known.is_unit and replace(container, since=known.since) == known:
                return
            self._containers.pop(container.id, None)
            self._containers[container.id] = container
            if len(self._containers) > MAX_CONTAINERS:
                del self._containers[next(iter(self._containers))]

    def remove(self, name: str) -> None:
        """Remove the container with that id, if there is one."""
        with self._lock:
            self._containers.pop(name, None)

    def keep_units(self, is_selected: Callable[[str], bool]) -> None:
        """Remove the units whose ids are not selected."""
        with self._lock:
            for one in [one for one in self._containers.values() if one.is_unit and not is_selected(one.id)]:
                del self._containers[one.id]

    def all(self) -> list[UnwatchedContainer]:
        """Return the containers that run, in order of their ids. Those that have ended are forgotten."""
        with self._lock:
            known = list(self._containers.values())
        ended = [container for container in known if container.has_ended()]
        with self._lock:
            for container in ended:
                if self._containers.get(container.id) is container:
                    del self._containers[container.id]
        return sorted((one for one in known if one not in ended), key=lambda one: one.id)
