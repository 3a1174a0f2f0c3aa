# SPDX-License-Identifier: Apache-2.0
"""The watch of systemd's units, with a manager object on a private bus, and real control groups and processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import dbus_fast
import dbus_fast.aio
import msgspec
import pytest

import resctrlmond.api
import resctrlmond.daemon
from resctrlmond.api.workers import Workers
from resctrlmond.host.unit_globs import UnitGlobs, problem_of
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import KernelRefused
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.workloads.figures.reasons import why_late
from resctrlmond.workloads.figures.verdict import baseline_of, verdict
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.queue_order import waiting
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.profiles.profile import Profile, Profiles, Rule, Watch
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.release import release
from tests.api.private_bus import PrivateBus
from tests.workloads.conftest import UID, Host, assignment, join, own_host
from tests.workloads.fake_systemd import ROOT, FakeSystemd, Unit

Start = Callable[[], "subprocess.Popen[bytes]"]
SHOP, OTHER = "shop.service", "other@1.service"


class Site:
    """A host with a bus, on which a systemd runs and the watch is started by ``watching``."""

    def __init__(self, host: Host, bus: PrivateBus, top: str, library: str) -> None:
        self.host = host
        self.bus = bus
        self.top = top
        self.systemd = FakeSystemd(bus.address)
        self.library = library
        self.watch: Any = None
        self.marks = itertools.count(1)

    def inner(self, path: str = "") -> str:
        """Return a control group as systemd names it."""
        root = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
        return os.path.join(self.top, path).removeprefix(root).rstrip("/")

    def run_in(self, path: str, child: subprocess.Popen[bytes]) -> str:
        """Create a control group with a process, and return it as systemd names it."""
        os.makedirs(os.path.join(self.top, path), exist_ok=True)
        join(os.path.join(self.top, path), child.pid)
        return self.inner(path)

    def unit(self, name: str, child: subprocess.Popen[bytes], path: str = "") -> Unit:
        """Start a unit with a process."""
        unit = Unit(self.run_in(path or name, child))
        self.systemd.set(name, unit)
        return unit

    @contextlib.asynccontextmanager
    async def watching(self, *globs: str) -> AsyncIterator[None]:
        """Watch units as the daemon does."""
        module = importlib.import_module("resctrlmond.daemon.units")
        assert self.library == importlib.import_module("resctrlmond.api.dbus.library").LIBRARY
        loop = asyncio.get_running_loop()
        with contextlib.closing(Workers()) as workers:
            manager = self.host.manager
            self.watch = module.UnitWatch(manager, workers, folder=self.bus.folder, address=self.bus.address)

            def report(key: str, workload: Workload | None) -> None:
                loop.call_soon_threadsafe(self.watch.changed, key, workload)

            manager.context.store.on_change = report
            self.watch.configure(globs)
            try:
                yield
            finally:
                await self.watch.close()
                manager.context.store.on_change = lambda key, record: None

    def claimed(self) -> list[str]:
        """Return the keys of the workloads of units, without those of which an Assign runs."""
        return [
            of.key
            for of in self.host.ctx.store.unfinished()
            if of.is_claimed_by(SYSTEMD)
            and not any(member.joining for member in of.members)
            and (of.state is not State.PENDING or of.reason)
        ]

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.host.ctx.store.all()
            await asyncio.sleep(0.01)

    async def looked(self) -> None:
        """Wait until the watch has handled all signals so far: it then assigns another unit."""
        # Each time another name: a look that an earlier mark has caused would find the same one at once.
        name = f"mark-{next(self.marks)}.service"
        self.systemd.set(name, Unit(self.inner("mark.service")))
        await self.until(lambda: name in self.claimed())
        self.systemd.set(name)
        await self.until(lambda: name not in self.claimed())


@pytest.fixture(scope="module")
def bus() -> Iterator[PrivateBus]:
    with tempfile.TemporaryDirectory() as folder:
        bus = PrivateBus(Path(folder))
        yield bus
        bus.stop()


@pytest.fixture(params=["dbus_fast", "dbus_next"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Import the modules of the watch again, with each of the D-Bus libraries."""
    monkeypatch.setenv("RESCTRLMOND_DBUS_LIBRARY", request.param)
    for name in list(sys.modules):
        if name.startswith(("resctrlmond.api.dbus", "resctrlmond.daemon.systemd", "resctrlmond.daemon.units")):
            monkeypatch.delitem(sys.modules, name)
    for package, name in ((resctrlmond.api, "dbus"), (resctrlmond.daemon, "systemd"), (resctrlmond.daemon, "units")):
        monkeypatch.delattr(package, name, raising=False)
    return str(request.param)


@pytest.fixture
def site(library: str, host: Host, bus: PrivateBus, cgroup: str, process: Start) -> Iterator[Site]:
    """A site with a process for the unit of ``looked``."""
    bus.start()
    site = Site(host, bus, cgroup, library)
    site.run_in("mark.service", process())
    yield site
    remove_below(cgroup)


def remove_below(top: str) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        if folder != top:
            for pid in Path(folder, "cgroup.procs").read_text().split():
                join(top, int(pid))
            os.rmdir(folder)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 120)

    asyncio.run(limited())


def test_selected_units_are_assigned_and_end_with_the_unit(site: Site, process: Start) -> None:
    first, second, third = process(), process(), process()
    host = site.host

    async def test() -> None:
        async with site.systemd as systemd:
            site.unit(SHOP, first)
            site.unit("getty@tty1.service", third)
            async with site.watching("other@*.service", "*.service", "!getty@*"):
                await site.until(lambda: site.claimed() == [SHOP])
                site.unit(OTHER, second)
                await site.until(lambda: len(site.claimed()) == 2)
                assert (host.tree.membership(first.pid).group, host.tree.membership(second.pid).group) == (
                    SHOP,
                    OTHER,
                )
                shop, other = host.get(SHOP), host.get(OTHER)
                assert (shop.priority, other.priority) == (-2, -1)
                assert shop.attributes == {"unit": SHOP}
                (member,) = shop.members
                assert (member.id, member.kind, member.late) == (SHOP, "unit", True)
                assert baseline_of(shop) is Quality.LATE
                # The text depends on whether the process has used any CPU time before.
                assert verdict(shop).reasons == (why_late(member),)
                systemd.set(SHOP, active="inactive", sub="dead")
                systemd.set(OTHER)
                await site.until(lambda: not site.claimed())
        assert {host.get(key).state for key in (SHOP, OTHER)} == {State.COMPLETED}
        assert host.tree.membership(third.pid).group == ""

    run(test)


@pytest.mark.parametrize("how", ["restart job", "automatic restart", "reload", "stop job"])
def test_unit_that_changes_keeps_its_workload(site: Site, process: Start, how: str) -> None:
    first, second = process(), process()
    states: dict[str, Any] = {
        "restart job": {"active": "inactive", "sub": "dead", "job": "start"},
        "automatic restart": {"active": "activating", "sub": "auto-restart"},
        "reload": {"active": "reloading", "sub": "reload"},
        "stop job": {"active": "deactivating", "sub": "stop-sigterm", "job": "stop"},
    }

    async def test() -> None:
        async with site.systemd as systemd:
            site.unit(SHOP, first)
            async with site.watching("*.service"):
                await site.until(lambda: site.claimed() == [SHOP])
                ends = how in ("restart job", "automatic restart")
                if ends:
                    first.kill()
                    first.wait()
                    site.host.manager.maintenance.record_ends(SHOP)
                systemd.set(SHOP, **states[how])
                await site.looked()
                assert site.claimed() == [SHOP]
                if ends:
                    site.run_in(SHOP, second)
                systemd.set(SHOP, active="active", sub="running", job="")
                await site.looked()
                record = site.host.get(SHOP)
                assert (record.generation, record.state) == (1, State.ACTIVE)
                if ends:
                    await site.until(lambda: site.host.tree.membership(second.pid).group == SHOP)

    run(test)


@pytest.mark.parametrize(("active", "sub"), [("active", "exited"), ("failed", "failed")])
def test_unit_without_processes_holds_no_rmid(site: Site, process: Start, active: str, sub: str) -> None:
    child = process()

    async def test() -> None:
        async with site.systemd as systemd:
            site.unit(SHOP, child)
            async with site.watching("*"):
                await site.until(lambda: site.claimed() == [SHOP])
                systemd.set(SHOP, active=active, sub=sub)
                await site.until(lambda: not site.claimed())

    run(test)


def test_units_that_stopped_while_no_daemon_ran_are_released(site: Site, process: Start) -> None:
    first, second = process(), process()

    async def test() -> None:
        async with site.systemd as systemd:
            site.unit(SHOP, first)
            site.unit(OTHER, second)
            async with site.watching("*.service"):
                await site.until(lambda: len(site.claimed()) == 2)
            first.kill()
            first.wait()
            systemd.set(SHOP)
            site.host.restart()
            assert len(site.claimed()) == 2
            async with site.watching("*.service"):
                await site.until(lambda: site.claimed() == [OTHER])
        assert site.host.get(SHOP).state is State.COMPLETED
        assert (
            site.host.get(OTHER).state,
            site.host.get(OTHER).generation,
        ) == (State.ACTIVE, 1)

    run(test)


def test_a_reload_releases_units_that_no_glob_selects(site: Site, process: Start) -> None:
    first, second = process(), process()

    async def test() -> None:
        async with site.systemd:
            site.unit(SHOP, first)
            site.unit(OTHER, second)
            async with site.watching("shop.*", "other@*"):
                await site.until(lambda: len(site.claimed()) == 2)
                site.watch.configure(["other@*"])
                await site.until(lambda: site.claimed() == [OTHER])
                site.bus.stop()  # without a bus too
                site.watch.configure([])
                await site.until(lambda: not site.claimed())

    run(test)


@pytest.mark.parametrize("cause", ["bus", "systemd", "reload of systemd"])
def test_units_are_looked_at_again_after(site: Site, process: Start, cause: str) -> None:
    first, second = process(), process()

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            systemd = await stack.enter_async_context(site.systemd)
            site.unit(SHOP, first)
            async with site.watching("*.service"):
                await site.until(lambda: site.claimed() == [SHOP])
                del systemd.units[SHOP]  # without a signal
                systemd.units[OTHER] = Unit(site.run_in(OTHER, second))
                if cause == "bus":
                    site.bus.stop()
                    await site.until(lambda: "not watched" in site.host.manager.alerts.get("units", ""))
                    site.bus.start()
                    await systemd.__aenter__()
                elif cause == "systemd":
                    await systemd.reexecute()
                else:
                    systemd.signal("Reloading", "b", False)
                await site.until(lambda: site.claimed() == [OTHER])
                await site.until(lambda: not site.host.manager.alerts.get("units", "?"))

    run(test)


def test_a_systemd_that_does_not_reply_delays_nothing(site: Site, process: Start) -> None:
    child = process()

    async def test() -> None:
        async with site.systemd as systemd:
            systemd.hangs = True
            site.unit(SHOP, child)
            async with site.watching("*.service"):
                await site.until(lambda: "Subscribe" in systemd.calls)
                assign(site.host.ctx, Assignment(key="mine", owner="me", pid=child.pid))
                site.host.manager.maintenance.tick()
            assert site.claimed() == []

    run(test)


def test_problem_of_a_systemd_that_does_not_reply_names_systemd(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("resctrlmond.api.dbus.library"), "REPLY_TIMEOUT_S", 0.2)

    async def test() -> None:
        async with site.systemd as systemd:
            systemd.hangs = True
            async with site.watching("*.service"):
                # On a busy machine, another call may be late first; the watch tries again.
                problem = "systemd's units are not watched: systemd did not reply to Subscribe within 0 s"
                await site.until(lambda: site.host.manager.alerts.get("units") == problem)

    run(test)


def test_other_senders_are_not_believed(site: Site, process: Start) -> None:
    """A signal to one connection needs no match rule, and any user may send one."""
    child = process()

    async def test() -> None:
        async with site.systemd as systemd:
            site.unit(SHOP, child)
            async with site.watching("*.service"):
                await site.until(lambda: site.claimed() == [SHOP])
                await site.looked()
                before = len(systemd.calls)
                stranger = await dbus_fast.aio.MessageBus(bus_address=site.bus.address).connect()
                for name in await _names(stranger):
                    signal = dbus_fast.Message.new_signal(ROOT, "org.freedesktop.systemd1.Manager", "Reloading")
                    signal.signature, signal.body, signal.destination = "b", [False], name
                    await stranger.send(signal)
                await _names(stranger)
                stranger.disconnect()
                with contextlib.suppress(EOFError, OSError):
                    await stranger.wait_for_disconnect()  # type: ignore[no-untyped-call]
                await site.looked()
                # Three for each of the two changes of its unit.
                assert systemd.calls[before:].count("ListUnitsByPatterns") <= 4

    run(test)


async def _names(bus: dbus_fast.aio.MessageBus) -> list[str]:
    place = "org.freedesktop.DBus"
    call = dbus_fast.Message(destination=place, path="/org/freedesktop/DBus", interface=place, member="ListNames")
    reply = await bus.call(call)
    assert reply is not None
    return [name for name in reply.body[0] if name.startswith(":")]


def test_units_of_users_are_found_by_their_control_groups(
    site: Site, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, app, init, inner = process(), process(), process(), process()

    async def test() -> None:
        monkeypatch.setattr(importlib.import_module("resctrlmond.daemon.units"), "_LOOK_AT_USERS_S", 0.02)
        top = "user@1000.service"
        async with site.systemd:
            site.run_in(f"{top}/init.scope", init)
            site.run_in(f"{top}/app.slice/app.service", app)
            site.run_in(f"{top}/app.slice/app.service/below.service", inner)
            site.unit(top, manager)
            async with site.watching("*.service", "user-*:*"):
                key = "user-1000:app.service"
                await site.until(lambda: {key, "user-1000:app.slice", top} <= set(site.claimed()))
                await site.looked()
                assert len(site.claimed()) == 3
                assert site.host.tree.membership(app.pid).group == key
                assert site.host.tree.membership(inner.pid).group == key
                assert site.host.tree.membership(init.pid).group == top
                assert site.host.get(key).attributes == {"unit": key, "user": "1000"}
                for child in (app, inner):
                    child.kill()
                    child.wait()
                await site.until(lambda: key not in site.claimed())
                site.watch.configure(["*.service"])
                await site.until(lambda: site.claimed() == [top])

    run(test)


@pytest.fixture
def deep(site: Site) -> Iterator[None]:
    """Slices with services below a user's manager, down to one with a path that is too long."""
    top = os.path.join(site.top, "user@1000.service")
    os.mkdir(top)
    with contextlib.ExitStack() as stack:
        above = os.open(top, os.O_DIRECTORY)
        stack.callback(os.close, above)
        for _ in range(4096 // 200 + 1):
            for name in ("x.service", "d" * 200 + ".slice"):
                os.mkdir(name, dir_fd=above)
                stack.callback(os.rmdir, name, dir_fd=above)
            above = os.open(name, os.O_DIRECTORY, dir_fd=above)
            stack.callback(os.close, above)
        yield


@pytest.mark.usefixtures("deep")
def test_control_groups_that_a_user_creates_do_not_disturb_the_watch(
    site: Site, process: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, stranger = process(), process()
    long = "l" * 195 + ".service"

    async def test() -> None:
        monkeypatch.setattr(importlib.import_module("resctrlmond.daemon.units"), "_LOOK_AT_USERS_S", 0.02)
        top = "user@1000.service"
        async with site.systemd:
            for name in ("a b.service", "odd\udcff.service", "\x1b[31m.service", long):
                child = process()
                site.run_in(f"{top}/app.slice/{name}", child)
            site.run_in(f"{top}/odd\udcff.slice/inner.service", process())
            site.run_in(f"{top}/app.slice/own.service", own)
            site.unit(top, process())
            other = "user@1001.service"
            site.run_in(f"{other}/other.service", stranger)
            site.unit(other, process())
            async with site.watching("user-*:*.service", "mark*.service"):
                keys = ["user-1000:own.service", "user-1001:other.service"]
                await site.until(lambda: sorted(site.claimed()) == keys)
                await site.looked()
                assert site.host.manager.alerts["units"] == ""
                stranger.kill()
                stranger.wait()
                await site.until(lambda: site.claimed() == keys[:1])
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    run(test)


@pytest.mark.parametrize("is_end", [False, True])
def test_system_unit_does_not_wait_for_the_units_of_a_user(
    site: Site, process: Start, monkeypatch: pytest.MonkeyPatch, is_end: bool
) -> None:
    """A user starts or ends many units, and a service of the system starts meanwhile."""
    names = [f"{number}.service" for number in range(5)]
    children = {name: process() for name in names}

    async def test() -> None:
        units_module = importlib.import_module("resctrlmond.daemon.units")
        monkeypatch.setattr(units_module, "_LOOK_AT_USERS_S", 0.02)
        loop = asyncio.get_running_loop()
        calls: list[str] = []
        is_armed = not is_end

        def call_during(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if is_armed:
                    calls.append(getattr(args[1], "key", args[1]))
                if is_armed and len(calls) == 1:
                    asyncio.run_coroutine_threadsafe(start(), loop).result(60)
                return function(*args, **kwargs)

            return call

        async def start() -> None:
            site.unit("mark.service", process())
            await site.until(lambda: site.watch._changed)

        monkeypatch.setattr(units_module, "assign", call_during(assign))
        monkeypatch.setattr(units_module, "release", call_during(release))
        async with site.systemd:
            for name, child in children.items():
                site.run_in(f"user@1000.service/{name}", child)
            site.unit("user@1000.service", process())
            async with site.watching("mark*.service", "user-*:*.service"):
                if is_end:
                    await site.until(lambda: len(site.claimed()) == len(names))
                    is_armed = True
                    for child in children.values():
                        child.kill()
                        child.wait()
                await site.until(lambda: {"mark.service", *calls} >= {f"user-1000:{name}" for name in names})
                await site.until(lambda: "mark.service" in site.claimed())
        assert calls[1] == "mark.service"

    run(test)


def test_unit_of_a_user_that_fails_keeps_no_other_from_its_group(
    site: Site, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass ended at that unit if a system unit changed meanwhile, and the next one began at it again."""
    children = {f"{number}.service": process() for number in range(3)}
    mark = process()

    async def test() -> None:
        units_module = importlib.import_module("resctrlmond.daemon.units")
        monkeypatch.setattr(units_module, "_LOOK_AT_USERS_S", 0.02)
        loop = asyncio.get_running_loop()
        attempts = itertools.count(1)

        async def change() -> None:
            next(attempts)
            site.systemd.set("mark.service", Unit(site.inner("mark.service")))
            await site.until(lambda: site.watch._changed)

        def assign_or_fail(ctx: Context, request: Assignment) -> object:
            if request.key != "user-1000:0.service":
                return assign(ctx, request)
            asyncio.run_coroutine_threadsafe(change(), loop).result(60)
            raise KernelRefused("the group cannot be created")

        monkeypatch.setattr(units_module, "assign", assign_or_fail)
        async with site.systemd:
            site.run_in("mark.service", mark)
            for name, child in children.items():
                site.run_in(f"user@1000.service/{name}", child)
            site.unit("user@1000.service", process())
            async with site.watching("mark*.service", "user-*:*.service"):
                await site.until(lambda: {"user-1000:1.service", "user-1000:2.service"} <= set(site.claimed()))
        assert next(attempts) > 1

    run(test)


@pytest.mark.usefixtures("deep")
def test_units_of_a_user_with_the_same_name_do_not_replace_each_other(
    site: Site, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systemd has one unit of a name, but the user can create another control group with it."""

    async def test() -> None:
        monkeypatch.setattr(importlib.import_module("resctrlmond.daemon.units"), "_LOOK_AT_USERS_S", 0.02)
        top = "user@1000.service"
        async with site.systemd:
            for slice_ in ("z.slice", "a.slice", "m.slice", "a.slice/b.slice"):
                site.run_in(f"{top}/{slice_}/web.service", process())
            site.unit(top, process())
            async with site.watching("user-*:*.service", "mark*.service"):
                await site.until(lambda: site.claimed() == ["user-1000:web.service"])
                await site.looked()
                before = site.host.get("user-1000:web.service")
                for _ in range(3):
                    await site.looked()
                assert site.host.get("user-1000:web.service") is before

    run(test)


def test_unit_gives_its_control_group_to_a_container(site: Site, process: Start) -> None:
    """The unit is watched before the runtime calls the hook."""
    child = process()
    scope = "libpod-abc.scope"

    async def test() -> None:
        async with site.systemd as systemd:
            site.unit(scope, child)
            async with site.watching("*.scope", "mark*.service"):
                await site.until(lambda: site.claimed() == [scope])
                path = os.path.join(site.top, scope)
                assign(
                    site.host.ctx,
                    Assignment(key="abc", owner="oci", pid=child.pid, own_cgroup=path, member="abc", late=False),
                )
                await site.until(lambda: not site.claimed())
                assert site.host.tree.membership(child.pid).group == "abc"
                systemd.set(scope, job="stop")
                await site.looked()
                assert site.claimed() == []

    run(test)


def test_units_wait_for_rmids_in_the_order_of_their_globs(site: Site, process: Start, tmp_path: Path) -> None:
    names = ["c.service", "b.service", "a.service"]
    children = [process() for _ in names]

    async def test() -> None:
        async with site.systemd:
            for name, child in zip(names, children, strict=True):
                site.unit(name, child)
            async with site.watching(*names):
                await site.until(lambda: len(site.claimed()) == 3)
                states = [site.host.get(name).state for name in names]
                assert states == [State.ACTIVE, State.PENDING, State.PENDING]
                create(site.host.ctx, "container", owner="oci")
                order = [of.workload.key for of in waiting(site.host.ctx.store.unfinished())]
                assert order == ["container", "b.service", "a.service"]

    (tmp_path / "small").mkdir()
    with own_host(tmp_path / "small", "monitoring-only", 2) as host:
        site.host = host
        run(test)
        host.clean()


def test_units_leave_the_reserve_to_containers(site: Site, process: Start, tmp_path: Path) -> None:
    names = ["a.service", "b.service", "c.service"]
    children = [process() for _ in names]

    async def test() -> None:
        manager = site.host.manager
        async with site.systemd:
            for name, child in zip(names, children, strict=True):
                site.unit(name, child)
            async with site.watching(*names):
                await site.until(lambda: len(site.claimed()) == 3)
                assert [manager.context.store.known(name).state for name in names] == [
                    State.ACTIVE,
                    State.ACTIVE,
                    State.PENDING,
                ]
                assert (
                    "RMIDs are kept for workloads of priority 0 and above (3 free)"
                    in manager.context.store.known(names[2]).reason
                )
                # A request of the same priority waits behind the unit; all others take what is kept.
                create(manager.context, "low", owner="me", priority=-3)
                assert manager.context.store.known("low").state is State.PENDING
                containers = [f"container{number}" for number in range(3)]
                assert {create(manager.context, key, owner="oci").state for key in containers} == {State.IDLE}
                assert create(manager.context, "one-more", owner="oci").state is State.PENDING
                # An RMID that becomes free is not for a unit while the reserve is not full.
                release(manager.context, "one-more", owner="oci")
                release(manager.context, containers[0], owner="oci")
                manager.maintenance.tick()
                assert manager.context.store.known(names[2]).state is State.PENDING
                manager.context.config.settings = Settings(reserve=0, overflow=0)
                manager.maintenance.tick()
                assert manager.context.store.known(names[2]).state is State.ACTIVE

    (tmp_path / "small").mkdir()
    with own_host(tmp_path / "small", "monitoring-only", 6) as host:
        site.host = host
        host.ctx.config.settings = Settings(reserve=3, overflow=0)
        run(test)
        host.clean()


def use(host: Host, *profiles: Profile, default: str = "", **rules: dict[str, Any]) -> None:
    """Use these profiles from now on, with rules for units: the name of a profile and its conditions."""
    owners = frozenset({"systemd"})
    found = tuple(Rule(name, f"F:{name}", owners=owners, **conditions) for name, conditions in rules.items())
    by_name = {profile.name: profile for profile in profiles}
    host.ctx.config.profiles = Profiles(by_name, found, unit_default=default, unit_default_origin="F:9")


def test_profile_leaves_out_a_unit_and_a_reload_applies(site: Site, process: Start) -> None:
    first, second = process(), process()
    host = site.host
    quiet = Profile("quiet", Watch.NONE)

    async def test() -> None:
        async with site.systemd as systemd:
            site.unit(SHOP, first)
            site.unit(OTHER, second)
            use(host, quiet, quiet={"globs": {"unit": ("shop.*",)}})
            async with site.watching("*.service"):
                await site.until(lambda: site.claimed() == [OTHER] and host.ctx.unwatched.all())
                (left_out,) = host.ctx.unwatched.all()
                assert (left_out.id, left_out.is_unit, left_out.profile) == (SHOP, True, "quiet")
                assert left_out.reason == "it is in no group, because of its profile quiet (rule at F:quiet)"
                assert host.tree.membership(first.pid).group == ""
                systemd.set(SHOP, active="active", sub="reload")
                await site.looked()
                assert host.ctx.unwatched.all() == [left_out], "with the time at which it was found first"
                # A reload: the rule concerns another unit.
                use(host, quiet, quiet={"globs": {"unit": ("other@*",)}})
                site.watch.configure(["*.service"])
                await site.until(lambda: site.claimed() == [SHOP])
                assert [one.id for one in host.ctx.unwatched.all()] == [OTHER]
                assert host.get(OTHER).reason == ("it is in no group, because of its profile quiet (rule at F:quiet)")
                assert host.tree.membership(second.pid).group == ""
                site.watch.configure(["shop.*"])
                await site.until(lambda: not host.ctx.unwatched.all())

    run(test)


def test_profile_moves_the_tasks_of_a_unit_to_its_class_also_after_a_restart(site: Site, process: Start) -> None:
    first, second, late = process(), process(), process()
    host = site.host
    host.make_class("gold")

    async def test() -> None:
        async with site.systemd as systemd:
            site.unit(SHOP, first)
            use(host, Profile("gold", class_="gold"), gold={"globs": {"unit": ("*.service",)}})
            async with site.watching("*.service", "!mark.service"):
                await site.until(lambda: site.claimed() == [SHOP])
                assert host.tree.membership(first.pid) == Membership("gold", SHOP)
                record = host.get(SHOP)
                assert (record.profile, record.profile_source) == ("gold", "rule at F:gold")
                assert baseline_of(record) is Quality.LATE
                # Process 1 starts each process of a service, in its own class.
                site.run_in(SHOP, late)
                host.manager.maintenance.sweep(SHOP)
                assert host.tree.membership(late.pid) == Membership("gold", SHOP)
                for child in (first, late):
                    child.kill()
                    child.wait()
                host.manager.maintenance.record_ends(SHOP)
                # A reload changes no unit that runs.
                use(host, Profile("gold", class_="gold"))
                systemd.set(SHOP, active="activating", sub="auto-restart")
                site.run_in(SHOP, second)
                systemd.set(SHOP, active="active", sub="running")
                await site.until(lambda: host.tree.membership(second.pid) == Membership("gold", SHOP))
                record = host.get(SHOP)
                assert (record.generation, len(record.groups), record.profile) == (1, 1, "gold")
                (member,) = record.members
                assert (member.profile, member.tasks_outside) == ("gold", 0)

    run(test)


def test_slice_stays_in_its_class_and_a_missing_class_is_logged(
    site: Site, process: Start, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = process(), process()
    host = site.host
    host.make_class("gold")

    async def test() -> None:
        async with site.systemd:
            site.unit("web.slice", first)
            site.unit(SHOP, second)
            profiles = [Profile("gold", class_="gold"), Profile("missing", class_="platinum")]
            use(host, *profiles, gold={"globs": {"unit": ("*.slice",)}}, missing={"globs": {"unit": ("*.service",)}})
            async with site.watching("*.slice", "shop.service"):
                await site.until(lambda: len(site.claimed()) == 2)
        for child, key in ((first, "web.slice"), (second, SHOP)):
            assert host.tree.membership(child.pid) == Membership("", key)
        warning = f"unit {SHOP} stays in its class, although its profile missing names the class platinum"
        assert f"{warning}: there is no such class" in caplog.text

    run(test)


def test_task_of_a_container_that_starts_in_a_unit_with_a_class_stays_in_the_container(
    site: Site, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assignment of the unit has listed the task when the hook of the container moves it."""
    own, init = process(), process()
    host = site.host
    host.make_class("gold")
    test_member = cgroups.member_test

    def start(path: str) -> Callable[[int], bool]:
        monkeypatch.undo()
        record = assign(host.ctx, assignment(UID, init.pid, owner="oci", member="c1")).workload
        assert baseline_of(record) is Quality.EXACT
        return test_member(path)

    async def test() -> None:
        async with site.systemd:
            site.run_in(SHOP, own)
            site.unit(SHOP, init)
            use(host, Profile("gold", class_="gold"), gold={"globs": {"unit": (SHOP,)}})
            monkeypatch.setattr(cgroups, "member_test", start)
            async with site.watching(SHOP):
                await site.until(lambda: site.claimed() == [SHOP])
        assert host.tree.membership(own.pid) == Membership("gold", SHOP)
        assert host.tree.membership(init.pid) == Membership("", UID)
        assert baseline_of(host.get(UID)) is Quality.EXACT

    run(test)


def test_profile_sets_priority_and_linger_of_a_unit(site: Site, process: Start) -> None:
    first, second = process(), process()
    host = site.host

    async def test() -> None:
        async with site.systemd as systemd:
            site.unit(SHOP, first)
            site.unit(OTHER, second)
            use(host, Profile("kept", linger_s=600.0, priority=7), Profile("usual", priority=-9), default="usual")
            rule = Rule("kept", "F:kept", owners=frozenset({"oci", "systemd"}), globs={"cgroup": ("*/shop.*",)})
            host.ctx.config.profiles = msgspec.structs.replace(host.ctx.config.profiles, rules=(rule,))
            async with site.watching("*.service"):
                await site.until(lambda: len(site.claimed()) == 2)
                assert (host.get(SHOP).priority, host.get(OTHER).priority) == (7, -9)
                assert host.get(OTHER).profile_source == "default_unit_profile at F:9"
                for child, key in ((first, SHOP), (second, OTHER)):
                    child.kill()
                    child.wait()
                    host.manager.maintenance.record_ends(key)
                    systemd.set(key, active="inactive", sub="dead")
                await site.until(lambda: site.claimed() == [SHOP])
                await site.looked()
                assert host.get(SHOP).state in (State.ACTIVE, State.IDLE)
                # It starts again, and its run continues.
                third = process()
                site.run_in(SHOP, third)
                systemd.set(SHOP, active="active", sub="running")
                await site.until(lambda: host.tree.membership(third.pid).group == SHOP)
                assert host.get(SHOP).generation == 1
                # A reload with a shorter time, and an end.
                use(host, Profile("kept", linger_s=0.2, priority=7))
                third.kill()
                third.wait()
                systemd.set(SHOP, active="inactive", sub="dead")
                await site.until(lambda: host.get(SHOP).state is State.COMPLETED)

    run(test)


@pytest.mark.parametrize(
    ("globs", "name", "rank"),
    [
        (["*.service"], "a.service", 0),
        (["b.service", "*.service"], "a.service", 1),
        (["*.service", "!a*"], "a.service", None),
        (["!a*", "*.service"], "a.service", None),
        (["*"], "a.timer", None),
        (["*"], "init.scope", None),
        (["*"], "-.slice", None),
        (["*"], "system.slice", 0),
        (["*"], "user-1000.slice", 0),
        (["*"], "user-1000:a.service", None),
        (["user-*:*"], "user-1000:a.service", 0),
        (["user-*:*"], "user-1000:init.scope", None),
        (["user-*:*"], "user-1000.slice", None),
        (["user-1001:*", "user-100[0-9]:*.service"], "user-1000:a.service", 1),
        (["*.service", "user-*:*", "!user-*:a*"], "user-1000:a.service", None),
        (["*.service", "user-*:*", "!user-*:a*"], "a.service", 0),
        ([r"dev-disk\x2duuid.service"], r"dev-disk\x2duuid.service", 0),
        ([], "a.service", None),
    ],
)
def test_globs_select_units(globs: list[str], name: str, rank: int | None) -> None:
    assert not any(map(problem_of, globs))
    assert UnitGlobs(globs).rank(name) == rank


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("nginx", "Did you mean nginx.service?"),
        ("!nginx", "Did you mean !nginx.service?"),
        ("backup.timer", "Did you mean backup.service?"),
        ("", "not the name or glob"),
        ("a b.service", "not the name or glob"),
        ("a/b.service", "not the name or glob"),
        ("init.scope", "never watched"),
        ("-.slice", "never watched"),
    ],
)
def test_wrong_globs_are_refused_with_the_nearest_valid_one(glob: str, expected: str) -> None:
    assert expected in problem_of(glob)


@pytest.mark.parametrize(
    ("glob", "problem"),
    [
        ("[a.service", "bracket that has no end"),
        ("![]a.service", "bracket that has no end"),
        ("a[bc][d.service", "bracket that has no end"),
        ("user-x:*.service", "the user's number"),
        ("!user-:a.service", "the user's number"),
        ("user-!1000:*.service", "the user's number"),
        ("org.foo.bar", "Did you mean org.foo.bar.service?"),
        ("!foo.timer", "Did you mean !foo.service?"),
    ],
)
def test_glob_that_would_match_no_unit_is_refused(glob: str, problem: str) -> None:
    assert problem in problem_of(glob)


@pytest.mark.parametrize(
    "glob",
    ["[]a].service", "[!]a].service", "a[bc][d-f]*", "user-[!0]*:*.service", "user-[0-9]*:*.service", "user-1.slice"],
)
def test_glob_with_brackets_is_accepted(glob: str) -> None:
    assert problem_of(glob) == ""
