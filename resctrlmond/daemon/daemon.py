# SPDX-License-Identifier: Apache-2.0
"""Run the daemon: serve the interfaces, watch ends, tick and feed the watchdog until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any

from resctrlmond.api import sockets
from resctrlmond.api.access import Policy
from resctrlmond.api.service import Service
from resctrlmond.api.varlink import interfaces as varlink_interfaces
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.configuration.config import Config, is_within
from resctrlmond.daemon import alerts
from resctrlmond.daemon.companion_files import CompanionFiles
from resctrlmond.daemon.group_losses import GroupLosses
from resctrlmond.daemon.ledger import Ledger
from resctrlmond.daemon.live_config import LiveConfig
from resctrlmond.daemon.notices import Notices
from resctrlmond.daemon.simulated import STOP_SIGNALS
from resctrlmond.daemon.startup import Exit, Setup, StartupError
from resctrlmond.daemon.ticker import Ticker
from resctrlmond.daemon.unit_memory_file import UnitMemoryFile
from resctrlmond.daemon.watch import Watch
from resctrlmond.host import unit_exec
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.service import journal
from resctrlmond.service.notify import Notify, watchdog_interval_s
from resctrlmond.service.start_lock import StartLock
from resctrlmond.workloads.groups import location
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.profiles.profile import Profiles

if TYPE_CHECKING:
    from resctrlmond.api.dbus.server import DBusServer
    from resctrlmond.daemon.companions import Companions
    from resctrlmond.daemon.unit_memory import UnitMemory
    from resctrlmond.daemon.units import UnitWatch

log = logging.getLogger(__name__)

TICK_S = 1.0
_SWITCH_INTERVAL_S = 0.0002
# How long verbs that run when the daemon stops may take to end.
_STOP_S = 2.0
# A start or a stop without progress for so long may hang in the kernel: hooks do not wait for it.
PROGRESS_S = 5.0


class Daemon:
    """One run of the daemon. ``reload`` reads the configuration again; it raises ConfigError if that is wrong.

    ``profiles`` reads the profiles, at the start too, and raises the same.
    ``bus``: the address of the D-Bus bus; None for the system bus. ``ledger`` gets the ended workloads.
    """

    def __init__(
        self,
        config: Config,
        setup: Setup,
        reload: Callable[[], Config],
        notify: Notify | None = None,
        *,
        profiles: Callable[[], Profiles] = Profiles,
        bus: str | None = None,
        start_lock: StartLock | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._bus = bus
        self._start_lock = start_lock or StartLock("")
        self._live = LiveConfig(config, setup, reload, profiles)
        self._setup = setup
        self._manager = setup.manager
        self._ctx = setup.manager.context
        self._notify = notify or Notify()
        self._workers = Workers()
        self._service = Service(self._manager, Policy(*config.reader_ids(setup.gid)), self._workers)
        self._notices = Notices(self._ctx.tree, functools.partial(location.went_with_mount, self._ctx))
        self._ledger = ledger
        self._losses = GroupLosses(lambda folder: is_within(config.groups_dir, folder))
        self._ticker = Ticker(
            self._workers, self._tick, last_progress=lambda: self._manager.maintenance.last_progress
        )
        self._units: UnitWatch | None = None
        self._companions: Companions | None = None
        self._unit_memory: UnitMemory | None = None
        # Called with the key of a workload whose companion, or memory setting, has another state.
        self._on_status: Callable[[str], None] = lambda _key: None
        # The sockets that systemd passed, by name.
        self._passed: dict[str, socket.socket] = {}
        self._stopping = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Recover, open the interfaces, report READY, and serve until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stopping.set)
        # From here on they are handled; see simulator().
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # Ignored until READY=1, because a reload sends READY=1 too, and the configuration has just been read.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # A thread that returns from a system call waits so long for each other thread that computes. Assign makes
        # hundreds of system calls; with Python's 5 ms it took seconds while others read.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        _raise_descriptor_limit()
        async with contextlib.AsyncExitStack() as opened:
            # Closed in the opposite order, also if a later step fails.
            opened.push(self._stop_workers)
            if not await self._recovered():
                return
            watch = Watch(lambda key: self._start(self._record_ends(key, watch)), self._ctx.watched.report)
            opened.callback(watch.close)
            dbus = self._dbus_server()
            self._follow_changes(loop, watch, dbus)
            varlink = varlink_interfaces.server(self._service)
            if dbus is not None:
                opened.push_async_callback(dbus.close)
            opened.push_async_callback(varlink.close)
            listeners = self._varlink_sockets()
            for listener in listeners:
                await varlink.start(listener)
            # Before the connection to the bus, which takes time at boot: callers wait longer if they are notified.
            opened.push_async_callback(self._close_units)
            self._watch_units()
            await self._start_unit_server(opened)
            if dbus is not None:
                await self._start_dbus(dbus)
            opened.push_async_callback(self._close_companions)
            self._start_companions()
            opened.push_async_callback(self._close_unit_memory)
            self._start_unit_memory()
            loop.add_signal_handler(signal.SIGHUP, lambda: self._start(self._on_reload()))
            self._start_lock.release()
            self._notify.ready(self._status())
            log.info("ready: %s", self._status())
            opened.callback(self._notify.stopping)
            await self._tick_until_stopped()
            self._manager.maintenance.is_stopping = True
            # A caller that comes from now on wakes the next daemon.
            self._start_lock.take()
            self._start_lock.release_after(PROGRESS_S)

    def _stop_workers(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # A task that waits for its turn would give its call to a pool that is closed.
        for task in self._tasks:
            task.cancel()
        if hanging := self._workers.close(_STOP_S):
            # Python waits for its threads before it exits, and a system call may never return. The next start
            # recovers what is unfinished, as it does after a kill.
            if error is not None:
                log.error("%s", error)
            calls = "1 call" if hanging == 1 else f"{hanging} calls"
            log.error("stopped while %s hung in the kernel; groups stay. See: journalctl -k", calls)
            logging.shutdown()
            # A thread that hangs keeps the process's files open, and with them the lock.
            self._start_lock.release()
            os._exit(os.EX_OK if error is None else os.EX_SOFTWARE)
        _ignore_signals()
        # The groups of a simulation go with its simulator, which is stopped later.
        is_simulation = self._ctx.tree.simulation is not None
        log.info("stopped" if is_simulation else "stopped; groups stay, and the next start continues with them")

    async def _recovered(self) -> bool:
        """Recover; if that takes long, report the path or workload at work to the service manager.

        Returns False if the daemon is stopped before: the next start continues.
        """
        reported = ""
        recovering = asyncio.ensure_future(self._workers.run(Lane.UPKEEP, self._recover))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            while not recovering.done():
                await asyncio.wait([recovering, stopping], timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done() and not recovering.done():
                    self._notify.stopping()
                    recovering.cancel()
                    return False
                place = self._manager.recovery.at
                if place != reported and not recovering.done():
                    self._notify.extend_start()
                    self._start_lock.release_after(PROGRESS_S)
                    self._notify.status(f"recovering, now at {place}: it may hang in a system call")
                    reported = place
        finally:
            stopping.cancel()
        recovering.result()
        return True

    def _recover(self) -> None:
        manager = self._manager
        self._live.load_profiles("the daemon runs without profiles")
        store = self._ctx.store
        store.on_change, store.before_finish = self._notices.changed, self._before_finish
        manager.maintenance.on_failure = self._notices.unfinished
        manager.recover()
        unreadable = manager.recovery.unreadable
        for record in unreadable:
            self._notices.unreadable(record)
        for problem in manager.problems[len(unreadable) :]:
            log.warning("%s", problem)
        self._notices.losses = self._losses
        if self._ledger is not None:
            self._ledger.started()
            # A thread of its own, and one that the exit does not wait for: the journal may hang.
            threading.Thread(target=self._ledger.settle, daemon=True).start()

    def _before_finish(self, workload: Workload) -> None:
        """Report a run that has ended, in its transaction. Raises NotWritten if the ledger cannot keep it."""
        if self._ledger is not None:
            self._ledger.record(workload)
        self._service.watches.ended(workload)

    # -- interfaces

    async def _start_unit_server(self, opened: contextlib.AsyncExitStack) -> None:
        """Serve org.resctrlmon.Unit: on the socket that systemd passed, or on one of its own if units are watched."""
        listener = self._passed.get("unit")
        if listener is None and not self._passed and self._live.config.units:
            path = os.path.join(self._live.config.runtime_dir, os.path.basename(unit_exec.SOCKET))
            listener = sockets.listen(path, 0o666)
        if listener is not None:
            server = varlink_interfaces.unit_server(self._service)
            opened.push_async_callback(server.close)
            await server.start(listener)

    def _varlink_sockets(self) -> list[socket.socket]:
        """Return the listening sockets."""
        try:
            self._passed = sockets.passed_sockets()
        except ValueError as error:
            raise ResctrlError(str(error)) from error
        gid = self._setup.gid
        listener = self._passed.get("varlink") or sockets.listen(self._live.config.varlink_socket, 0o660, gid)
        path = str(listener.getsockname())
        for other in self._live.config.reader_ids(gid) - {gid}:
            try:
                sockets.let_connect(path, other)
            except OSError as error:
                # Not a reason to measure nothing: only readers are affected.
                why = error.strerror or str(error)
                log.warning("members of the group of 'read_group' (%d) cannot connect to %s: %s", other, path, why)
        # The socket that systemd-report(1) reads. All interfaces but Unit can be called on each of them.
        report = self._passed.get("report")
        return [listener] if report is None else [listener, report]

    def _dbus_server(self) -> DBusServer | None:
        if not self._live.config.dbus:
            return None
        # Not at the top: without D-Bus its library need not be installed.
        from resctrlmond.api.dbus.server import DBusServer  # noqa: PLC0415

        return DBusServer(
            self._service,
            set_log_level=journal.set_level,
            get_log_level=journal.level,
            log_target=journal.target(),
            folder=self._live.config.runtime_dir,
            address=self._bus,
        )

    @staticmethod
    async def _start_dbus(dbus: DBusServer) -> None:
        from resctrlmond.api.dbus.server import NameTaken  # noqa: PLC0415

        try:
            await dbus.start()
        except NameTaken as error:
            raise StartupError(error, Exit.ALREADY_RUNNING) from error

    def _watch_units(self) -> None:
        """Watch the units that the configuration selects."""
        globs = self._live.config.units
        if self._units is None and globs:
            # Not at the top: it needs the D-Bus library.
            from resctrlmond.daemon.unit_starts import UnitStarts  # noqa: PLC0415
            from resctrlmond.daemon.units import UnitWatch  # noqa: PLC0415

            self._units = watch = UnitWatch(
                self._manager, self._workers, folder=self._live.config.runtime_dir, address=self._bus
            )
            starts = UnitStarts(self._ctx, self._workers, watch.connection, watch.assignment)
            self._service.assign_unit = starts.assign
        if self._units is not None:
            self._units.configure(globs)

    def _start_companions(self) -> None:
        """Start the companions that the profiles define, and stop those of workloads that have ended."""
        if self._bus == "":
            return  # a simulation without a session bus must not start programs of the host
        if self._companions is None:
            has_some = any(profile.companion for profile in self._ctx.config.profiles.by_name.values())
            if not has_some and not CompanionFiles(self._live.config.runtime_dir).exists:
                return
            try:
                # Not at the top: it needs the D-Bus library.
                from resctrlmond.daemon.companions import Companions  # noqa: PLC0415
            except ImportError as error:
                self._manager.alerts[alerts.COMPANIONS.key] = alerts.COMPANIONS.text(error)
                return
            self._companions = Companions(
                self._manager,
                self._workers,
                folder=self._live.config.runtime_dir,
                address=self._bus,
                on_status=self._on_status,
            )
        self._companions.configure()

    async def _close_companions(self) -> None:
        if self._companions is not None:
            await self._companions.close()

    def _start_unit_memory(self) -> None:
        """Apply the memory settings of the profiles to units, and put back those that no profile wants any more."""
        if self._bus == "":
            return  # a simulation without a session bus must not change units of the host
        if self._unit_memory is None:
            has_some = any(profile.memory for profile in self._ctx.config.profiles.by_name.values())
            if not has_some and not UnitMemoryFile(self._live.config.runtime_dir).exists:
                return
            try:
                # Not at the top: it needs the D-Bus library.
                from resctrlmond.daemon.unit_memory import UnitMemory  # noqa: PLC0415
            except ImportError as error:
                self._manager.alerts[alerts.UNIT_MEMORY.key] = alerts.UNIT_MEMORY.text(error)
                return
            self._unit_memory = UnitMemory(
                self._manager,
                self._workers,
                folder=self._live.config.runtime_dir,
                address=self._bus,
                on_status=self._on_status,
            )
        self._unit_memory.configure()

    async def _close_unit_memory(self) -> None:
        if self._unit_memory is not None:
            await self._unit_memory.close()

    async def _close_units(self) -> None:
        if self._units is not None:
            await self._units.close()

    def _follow_changes(self, loop: asyncio.AbstractEventLoop, watch: Watch, dbus: DBusServer | None) -> None:
        # By key: the workloads that have changed since the loop was woken.
        unseen: dict[str, Workload | None] = {}

        def changed(key: str, workload: Workload | None) -> None:
            # The workload may be outdated by now: the watch needs the newest one.
            watch.update(key, self._ctx.store.get(key))
            self._service.watches.changed(key, workload)
            if self._units is not None:
                self._units.changed(key, workload)
            if self._companions is not None:
                self._companions.changed(key, workload)
            if self._unit_memory is not None:
                self._unit_memory.changed(key, workload)
            if dbus is not None:
                dbus.changed(key, workload)

        def report(key: str) -> None:
            workload = self._ctx.store.get(key)
            self._service.watches.changed(key, workload, has_new_status=True)
            if dbus is not None:
                dbus.changed(key, workload)

        self._on_status = report

        def take(key: str) -> None:
            if key in unseen:
                changed(key, unseen.pop(key))

        def from_worker(key: str, workload: Workload | None) -> None:
            self._notices.changed(key, workload)
            unseen[key] = workload

        # Once for each verb, after its reply: while the loop runs, the thread of the verb waits for Python's lock. A
        # process that ends before it is watched is found by the watch.
        def at_end(key: str) -> None:
            if key in unseen:
                self._workers.call_later(loop, take, key)

        store = self._ctx.store
        store.on_change, store.on_end = from_worker, at_end
        for workload in store.all():
            changed(workload.key, workload)

    # -- ends and ticks

    async def _record_ends(self, key: str, watch: Watch) -> None:
        has_failed = True
        try:
            await self._workers.run_in_turn(Lane.ENDS, self._manager.maintenance.record_ends, key)
            has_failed = False
        except ResctrlError as error:
            self._notices.unfinished(key, error)
        finally:
            watch.ends_recorded(key, has_failed=has_failed)

    async def _tick_until_stopped(self) -> None:
        watchdog_s = watchdog_interval_s()
        reported, known = "", -1
        while not self._stopping.is_set():
            self._ticker.step()
            self._manager.alerts["upkeep"] = self._ticker.problem
            if watchdog_s is not None and not self._ticker.is_stuck:
                self._notify.watchdog()
            if (changes := self._ctx.store.changes) != known:
                known, status = changes, self._status()
                if status != reported:
                    self._notify.status(status)
                    reported = status
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), min(TICK_S, watchdog_s or TICK_S))

    def _tick(self) -> None:
        self._notices.tick()
        self._manager.tick()
        self._manager.alerts["losses"] = self._losses.describe()
        if self._ledger is not None:
            self._ledger.retry()
            self._manager.alerts["ledger"] = self._ledger.describe()

    def _status(self) -> str:
        workloads = self._ctx.store.unfinished()
        groups = sum(workload.state.has_group for workload in workloads)
        pending = sum(workload.state == "pending" for workload in workloads)
        text = f"{groups} group" if groups == 1 else f"{groups} groups"
        return f"{text}, {pending} waiting for an RMID" if pending else text

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- reload

    async def _on_reload(self) -> None:
        async with self._reloading:
            self._notify.reloading()
            if self._live.reload():
                self._watch_units()
            # In a thread: many rules take seconds, and the name of a user may be looked up in the network. Containers
            # that start meanwhile must not wait.
            await self._workers.run(Lane.UPKEEP, self._live.load_profiles, "the old ones stay in use")
            self._start_companions()
            self._start_unit_memory()
            if not (self._manager.alerts["configuration"] or self._manager.alerts["profiles"]):
                log.info("configuration and profiles reloaded")
            self._notify.ready(self._status())


def _ignore_signals() -> None:
    """Ignore further signals: with their default actions, a second Ctrl-C would end the process before its simulator.

    The event loop would restore the default actions of the handlers that it has when it is closed.
    """
    numbers = (*STOP_SIGNALS, signal.SIGHUP)
    # Until they are ignored. Other threads do not block them.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one.

    Each living member takes two descriptors, and the soft limit of 1024 is for programs that use select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
