# SPDX-License-Identifier: Apache-2.0
"""Detect ends at once: of processes by pidfd, of members' control groups by cgroup.events, of pods by inotify."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
from collections.abc import Callable, Iterable

from resctrlmond.daemon.removals import Removals
from resctrlmond.resctrl.errors import NoSuchProcess, NotRead
from resctrlmond.resctrl.processes import Process
from resctrlmond.workloads.model.workload import Member, Workload

log = logging.getLogger(__name__)


class Watch:
    """Watches the living members and the pod of every workload.

    Calls ``on_end`` with the key of a workload when a member or the pod may have ended; the caller then records the
    end, and calls ``ends_recorded``. An end that is detected before that call is reported after it, because most ends
    are detected twice, by pidfd and by cgroup.events. Belongs to the event loop.
    Owns a pidfd and a descriptor of cgroup.events for each living member that has them, and one inotify for the
    control groups of all pods. If descriptors or watches run out, the manager's tick detects the end a second later.

    ``report`` is called with the key and the members of a workload for whose end ``on_end`` will be called. These are
    none between a call of ``on_end`` and its ``ends_recorded``, and none after a failure, so that the tick detects
    the end.
    The kernel drops a change of cgroup.events if it removes the control group within 10 ms of the change before
    (kernel/cgroup/cgroup.c, CGROUP_FILE_NOTIFY_MIN_INTV); the sweep detects that end.
    """

    def __init__(
        self,
        on_end: Callable[[str], None],
        report: Callable[[str, Iterable[Member]], None] = lambda _key, _members: None,
    ) -> None:
        self._on_end = on_end
        self._report = report
        self._loop = asyncio.get_running_loop()
        # By key and member.
        self._watched: dict[str, dict[str, _Watched]] = {}
        # By key: whether another end was detected since the call of on_end that has no ends_recorded() yet.
        self._unrecorded: dict[str, bool] = {}
        # The keys of which the last ends_recorded() was about a failure.
        self._failed: set[str] = set()
        # A change of cgroup.events gives EPOLLPRI, for which asyncio cannot wait. A separate epoll is readable
        # exactly when one of its files has EPOLLPRI.
        self._epoll = select.epoll()
        self._events: dict[int, tuple[str, _Watched]] = {}
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
        if workload is None:
            self._failed.discard(key)
        self._watch_pod(key, workload.pod_cgroup if workload is not None else "")
        living = {} if workload is None else {member.id: member for member in workload.living}
        of_key = self._watched.setdefault(key, {})
        for member_id, watched in list(of_key.items()):
            member = living.get(member_id)
            if member is not None and _watched_part(member) == _watched_part(watched.member):
                watched.member = member
            else:
                self._forget(of_key.pop(member_id))
        for member in living.values():
            if member.id not in of_key:
                of_key[member.id] = self._begin(key, member)
        if not of_key:
            del self._watched[key]
        self._report_watched(key)

    def ends_recorded(self, key: str, *, has_failed: bool = False) -> None:
        """End a call of ``on_end``: the workload's ends were recorded after it, or that failed."""
        if self._epoll.closed:
            return
        is_outdated = self._unrecorded.pop(key)
        if has_failed:
            self._failed.add(key)
        else:
            self._failed.discard(key)
        # Nothing is watched if the run is over.
        if is_outdated and (key in self._watched or key in self._pods):
            self._may_have_ended(key)
        else:
            self._report_watched(key)

    def close(self) -> None:
        """Close every descriptor."""
        for key, of_key in self._watched.items():
            self._report(key, ())
            for watched in of_key.values():
                self._forget(watched)
        self._watched.clear()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        if self._removals is not None:
            self._loop.remove_reader(self._removals.fd)
            self._removals.close()

    def _report_watched(self, key: str) -> None:
        is_reliable = key not in self._unrecorded and key not in self._failed
        of_key = self._watched.get(key, {}) if is_reliable else {}
        self._report(key, [watched.member for watched in of_key.values() if watched.reports_end])

    def _may_have_ended(self, key: str) -> None:
        if key in self._unrecorded:
            self._unrecorded[key] = True
            return
        self._unrecorded[key] = False
        self._report_watched(key)
        self._on_end(key)

    def _begin(self, key: str, member: Member) -> _Watched:
        watched = _Watched(member)
        if member.pid:
            with contextlib.suppress(OSError, NotRead):
                self._watch_process(key, member, watched)
        if member.cgroup:
            with contextlib.suppress(OSError, NotRead):
                self._watch_cgroup(key, member, watched)
        return watched

    def _watch_process(self, key: str, member: Member, watched: _Watched) -> None:
        try:
            process = Process.open(member.pid, member.start_time)
        except NoSuchProcess:
            self._loop.call_soon(self._may_have_ended, key)
            return
        watched.process = process

        def exited() -> None:
            # A pidfd stays readable after the end.
            self._loop.remove_reader(process.pidfd)
            watched.has_exited = True
            self._may_have_ended(key)

        self._loop.add_reader(process.pidfd, exited)

    def _watch_cgroup(self, key: str, member: Member, watched: _Watched) -> None:
        # Control groups of version 1 have none.
        watched.events = os.open(os.path.join(member.cgroup, "cgroup.events"), os.O_RDONLY | os.O_CLOEXEC)
        self._events[watched.events] = key, watched
        # The file has EPOLLPRI until it is read.
        if b"populated 1\n" not in os.pread(watched.events, 4096, 0):
            self._loop.call_soon(self._may_have_ended, key)
        self._epoll.register(watched.events, select.EPOLLPRI)
        watched.has_events = True

    def _cgroup_changed(self) -> None:
        for fd, _ in self._epoll.poll(0):
            key, watched = self._events[fd]
            try:
                os.pread(fd, 4096, 0)  # EPOLLPRI is cleared by reading
            except OSError:
                self._epoll.unregister(fd)  # the control group was removed, so the file stays ready
                watched.has_events = False
            self._may_have_ended(key)

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
                self._loop.call_soon(self._may_have_ended, key)  # removed before it was watched

    def _pod_removed(self, cgroup: str) -> None:
        for key, other in self._pods.items():
            if other == cgroup:
                self._may_have_ended(key)

    def _forget(self, watched: _Watched) -> None:
        if watched.process is not None:
            self._loop.remove_reader(watched.process.pidfd)
            watched.process.close()
        if watched.events >= 0:
            with contextlib.suppress(OSError):
                self._epoll.unregister(watched.events)
            del self._events[watched.events]
            os.close(watched.events)


def _watched_part(member: Member) -> tuple[int, int, str, str]:
    """Return what the watch of a member depends on. A control group at the same path may be another one later."""
    return member.pid, member.start_time, member.cgroup, member.started_at


class _Watched:
    def __init__(self, member: Member) -> None:
        self.member = member
        self.process: Process | None = None
        self.has_exited = False
        self.events = -1
        self.has_events = False

    @property
    def reports_end(self) -> bool:
        """Whether the end of the member raises an event, because its process or its control group has not ended."""
        return (self.process is not None and not self.has_exited) or self.has_events
