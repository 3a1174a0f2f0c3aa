# SPDX-License-Identifier: Apache-2.0
"""Detect ends at once: of processes by pidfd, of members' control groups by cgroup.events, of pods by inotify."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
from collections.abc import Callable

from resctrlmond.daemon.removals import Removals
from resctrlmond.resctrl.errors import NoSuchProcess, NotRead
from resctrlmond.resctrl.processes import Process
from resctrlmond.workloads.model import Member, Workload

log = logging.getLogger(__name__)


class Watch:
    """Watches the living members and the pod of every workload.

    Calls ``on_end`` with the key of a workload when a member or the pod may have ended. Belongs to the event loop.
    Owns a pidfd and a descriptor of cgroup.events for each living member that has them, and one inotify for the
    control groups of all pods. If descriptors or watches run out, the manager's tick detects the end a second later.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._watched: dict[tuple[str, str], _Watched] = {}
        # A change of cgroup.events gives EPOLLPRI, for which asyncio cannot wait. A separate epoll is readable
        # exactly when one of its files has EPOLLPRI.
        self._epoll = select.epoll()
        self._events: dict[int, str] = {}
        self._loop.add_reader(self._epoll.fileno(), self._cgroup_changed)
        self._pods: dict[str, str] = {}
        self._removals: Removals | None = None
        try:
            self._removals = Removals(self._pod_removed)
        except OSError as error:
            log.warning(
                "cannot watch pods by inotify, so their ends are detected up to a second late: %s. "
                "Raise fs.inotify.max_user_instances or LimitNOFILE=",
                error.strerror,
            )
        else:
            self._loop.add_reader(self._removals.fd, self._removals.read)

    def update(self, key: str, workload: Workload | None) -> None:
        """Watch the living members of the workload and its pod; watch nothing for None and for a run that is over."""
        if self._epoll.closed:
            return  # the daemon stops, and a last change arrives
        if workload is not None and workload.state.is_over:
            workload = None
        self._watch_pod(key, workload.pod_cgroup if workload is not None else "")
        living = {} if workload is None else {member.id: member for member in workload.living}
        for (other, member_id), watched in list(self._watched.items()):
            if other == key and living.get(member_id) != watched.member:
                self._forget((other, member_id))
        for member in living.values():
            if (key, member.id) not in self._watched:
                self._begin(key, member)

    def close(self) -> None:
        """Close every descriptor."""
        for name in list(self._watched):
            self._forget(name)
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        if self._removals is not None:
            self._loop.remove_reader(self._removals.fd)
            self._removals.close()

    def _begin(self, key: str, member: Member) -> None:
        watched = _Watched(member)
        self._watched[key, member.id] = watched
        with contextlib.suppress(OSError, NotRead):
            if member.pid:
                self._watch_process(key, member, watched)
            if member.cgroup:
                self._watch_cgroup(key, member, watched)

    def _watch_process(self, key: str, member: Member, watched: _Watched) -> None:
        try:
            process = Process.open(member.pid, member.start_time)
        except NoSuchProcess:
            self._loop.call_soon(self._on_end, key)
            return
        watched.process = process

        def exited() -> None:
            # A pidfd stays readable after the end.
            self._loop.remove_reader(process.pidfd)
            self._on_end(key)

        self._loop.add_reader(process.pidfd, exited)

    def _watch_cgroup(self, key: str, member: Member, watched: _Watched) -> None:
        path = os.path.join(member.cgroup, "cgroup.events")
        if not os.path.exists(path):
            return  # control groups of version 1 have none
        watched.events = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._events[watched.events] = key
        self._epoll.register(watched.events, select.EPOLLPRI)

    def _cgroup_changed(self) -> None:
        for fd, _ in self._epoll.poll(0):
            key = self._events[fd]
            try:
                os.pread(fd, 4096, 0)  # EPOLLPRI is cleared by reading
            except OSError:
                self._epoll.unregister(fd)  # the control group was removed, so the file stays ready
            self._on_end(key)

    def _watch_pod(self, key: str, cgroup: str) -> None:
        before = self._pods.get(key, "")
        if self._removals is None:
            return
        if before and cgroup != before:
            del self._pods[key]
            if before not in self._pods.values():
                self._removals.forget(before)
        if cgroup:
            self._pods[key] = cgroup
            with contextlib.suppress(OSError):
                # Also for the same path: the pod and its parent may have been created again.
                self._removals.watch(cgroup)
            if cgroup != before and not os.path.exists(cgroup):
                self._loop.call_soon(self._on_end, key)  # removed before it was watched

    def _pod_removed(self, cgroup: str) -> None:
        for key, other in self._pods.items():
            if other == cgroup:
                self._on_end(key)

    def _forget(self, name: tuple[str, str]) -> None:
        watched = self._watched.pop(name)
        if watched.process is not None:
            self._loop.remove_reader(watched.process.pidfd)
            watched.process.close()
        if watched.events >= 0:
            with contextlib.suppress(OSError):
                self._epoll.unregister(watched.events)
            del self._events[watched.events]
            os.close(watched.events)


class _Watched:
    def __init__(self, member: Member) -> None:
        self.member = member
        self.process: Process | None = None
        self.events = -1
