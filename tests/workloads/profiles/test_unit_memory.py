# SPDX-License-Identifier: Apache-2.0
"""The memory settings of units: a manager object of systemd on a private bus, and real control groups."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from resctrlmond.api.dbus import library
from resctrlmond.api.workers import Workers
from resctrlmond.daemon import systemd, systemd_loop
from resctrlmond.daemon.unit_memory import UnitMemory, restore_all
from resctrlmond.daemon.unit_memory_file import UnitMemoryFile
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.owners import OCI
from resctrlmond.workloads.model.workload import Group, GroupState, Member, Workload
from resctrlmond.workloads.profiles.memory_settings import MemorySettings, Swap
from resctrlmond.workloads.profiles.profile import Choice, Profile, Profiles
from resctrlmond.workloads.profiles.unit_memory import INFINITY, Change, Outcome, step, wanted_by
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.members import remove_member
from resctrlmond.workloads.verbs.release import release
from tests.api.private_bus import PrivateBus
from tests.workloads.conftest import UID, Host, assignment
from tests.workloads.fake_systemd import Unit
from tests.workloads.test_unit_watch import Site, remove_below, run, use

SHOP, OTHER = "shop.service", "other.service"
MIB = 1 << 20
SMALL = Profile("small", memory=MemorySettings(high=64 * MIB, swap=Swap.DENY))
LIMITED = {"MemoryHigh": 64 * MIB, "MemorySwapMax": 0}
FREE = {"MemoryHigh": INFINITY, "MemorySwapMax": INFINITY}
Start = Callable[[], "subprocess.Popen[bytes]"]


class Settings(Site):
    """A site whose daemon also applies memory settings."""

    memory: UnitMemory

    def __init__(self, host: Host, bus: PrivateBus, top: str) -> None:
        super().__init__(host, bus, top, "dbus_fast")

    @contextlib.asynccontextmanager
    async def serving(self, *globs: str) -> AsyncIterator[None]:
        """Watch units, and change them, as the daemon does."""
        manager = self.host.manager
        manager.unit_memory.clear()
        async with self.watching(*globs):
            with contextlib.closing(Workers()) as workers:
                self.memory = UnitMemory(manager, workers, folder=self.bus.folder, address=self.bus.address)
                report = manager.context.store.on_change
                loop = asyncio.get_running_loop()

                def both(key: str, workload: Workload | None) -> None:
                    report(key, workload)
                    loop.call_soon_threadsafe(self.memory.changed, key, workload)

                manager.context.store.on_change = both
                self.memory.configure()
                try:
                    yield
                finally:
                    await self.memory.close()

    async def assign(self, child: subprocess.Popen[bytes], id_: str, path: str, key: str = "k") -> None:
        """Assign a container of Podman, as its hook does."""
        request = assignment(
            key,
            child.pid,
            OCI,
            member=id_,
            kind="container",
            own_cgroup=f"{self.top}/{path}",
            choice=Choice(SMALL, "default_profile at F:1"),
        )
        await asyncio.to_thread(assign, self.host.ctx, request)

    def values(self, name: str = SHOP) -> dict[str, int]:
        return self.systemd.units[name].memory

    def text(self, key: str = SHOP) -> str:
        return self.host.manager.unit_memory.get(key, "")

    @property
    def file(self) -> UnitMemoryFile:
        return UnitMemoryFile(self.bus.folder)


@pytest.fixture(scope="module")
def bus() -> Iterator[PrivateBus]:
    with tempfile.TemporaryDirectory() as folder:
        bus = PrivateBus(Path(folder))
        yield bus
        bus.stop()


@pytest.fixture
def site(host: Host, bus: PrivateBus, cgroup: str, process: Start) -> Iterator[Settings]:
    bus.start()
    site = Settings(host, bus, cgroup)
    site.run_in("mark.service", process())
    yield site
    UnitMemoryFile(bus.folder).write({})
    remove_below(cgroup)


# -- the rules


def test_value_from_before_comes_back_after_kills_at_any_point() -> None:
    """A model of one property and its record, which is written before and after each change."""
    for seed in range(3000):
        draw = random.Random(seed)
        value = before = draw.choice([INFINITY, 5])
        record: Change | None = None
        foreign: int | None = None
        for _ in range(draw.randrange(1, 8)):
            if draw.random() < 0.15:
                value = foreign = 1000 + draw.randrange(9)
                continue
            wanted = draw.choice([None, 0, 7, 9])
            plan = step(record, value, wanted)
            if foreign is not None and record is None:
                before, foreign = value, None  # it is the value from before now
            survives = draw.randrange(4)
            if plan.outcome is Outcome.SET:
                if survives >= 1:
                    record = plan.first
                if survives >= 2:
                    value = plan.value
            if survives == 3 or plan.outcome is not Outcome.SET:
                record = plan.then
        last = step(record, value, None)
        if last.outcome is Outcome.SET:
            value = last.value
        assert last.then is None
        assert value == (before if foreign is None else foreign), seed


def test_file_that_cannot_be_read_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "unit-memory.json").write_text("[]")
    with pytest.raises(ResctrlError, match="cannot read which units have changed memory settings"):
        UnitMemoryFile(str(tmp_path)).read()


# -- units


def test_unit_has_the_settings_of_its_profile_until_its_end(site: Settings, process: Start) -> None:
    child = process()

    async def test() -> None:
        async with site.systemd:
            site.systemd.files[SHOP] = Unit("", active="inactive", sub="dead")
            site.unit(SHOP, child)
            site.unit(OTHER, process())
            use(site.host, SMALL, small={"globs": {"unit": (SHOP,)}})
            async with site.serving("*.service"):
                await site.until(lambda: site.values() == LIMITED)
                await site.until(lambda: site.text() == f"set: memory.high: {64 * MIB}, memory.swap.max: 0")
                assert site.file.exists
                assert site.values(OTHER) == FREE
                assert site.text(OTHER) == ""
                child.kill()
                child.wait()
                site.systemd.set(SHOP, active="inactive", sub="dead")
                await site.until(lambda: site.values() == FREE)
                await site.until(lambda: not site.file.exists)
                assert site.text() == ""

    run(test)


def test_reload_of_the_profiles_changes_the_settings(site: Settings, process: Start) -> None:
    async def test() -> None:
        async with site.systemd:
            site.systemd.set(SHOP, replace(site.unit(SHOP, process()), memory={**FREE, "MemoryHigh": 99 * MIB}))
            use(site.host, SMALL, default="small")
            async with site.serving(SHOP):
                await site.until(lambda: site.values() == LIMITED)
                use(site.host, Profile("small", memory=MemorySettings(high=32 * MIB)), default="small")
                site.memory.configure()
                await site.until(lambda: site.values() == {"MemoryHigh": 32 * MIB, "MemorySwapMax": INFINITY})
                use(site.host, Profile("small"), default="small")
                site.memory.configure()
                await site.until(lambda: site.values() == {"MemoryHigh": 99 * MIB, "MemorySwapMax": INFINITY})
                await site.until(lambda: not site.file.exists)

    run(test)


def test_next_daemon_puts_the_values_back(site: Settings, process: Start) -> None:
    async def test() -> None:
        async with site.systemd:
            site.unit(SHOP, process())
            use(site.host, SMALL, default="small")
            async with site.serving(SHOP):
                await site.until(lambda: site.values() == LIMITED)
            # As after a kill. The workload ends while no daemon runs.
            assert site.values() == LIMITED
            release(site.host.ctx, SHOP, owner="systemd")
            site.systemd.set(SHOP, active="inactive", sub="dead")
            async with site.serving(SHOP):
                await site.until(lambda: site.values() == FREE)
                await site.until(lambda: not site.file.exists)

    run(test)


def test_values_come_back_without_a_daemon(site: Settings, process: Start) -> None:
    async def test() -> None:
        async with site.systemd:
            site.unit(SHOP, process())
            use(site.host, SMALL, default="small")
            async with site.serving(SHOP):
                await site.until(lambda: site.values() == LIMITED)
            assert await restore_all(site.bus.folder, site.bus.address) == ""
            assert site.values() == FREE
            assert not site.file.exists

    run(test)


def test_value_of_another_program_stays(site: Settings, process: Start) -> None:
    async def test() -> None:
        async with site.systemd:
            site.unit(SHOP, process())
            use(site.host, SMALL, default="small")
            async with site.serving(SHOP):
                await site.until(lambda: site.values() == LIMITED)
                site.systemd.units[SHOP].memory["MemoryHigh"] = 5 * MIB
                site.systemd.set(SHOP, active="inactive", sub="dead")
                await site.until(lambda: site.values() == {"MemoryHigh": 5 * MIB, "MemorySwapMax": INFINITY})
                await site.until(lambda: not site.file.exists)

    run(test)


@pytest.mark.parametrize("why", ["hangs", "refuses", "is missing"])
def test_workload_does_not_wait_for_systemd(
    site: Settings, process: Start, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(systemd_loop, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(systemd_loop, "_LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(library, "REPLY_TIMEOUT_S", 0.5)

    async def test() -> None:
        async with site.systemd:
            profiles = Profiles({"small": SMALL}, (), default="small", default_origin="F:1")
            site.host.ctx.config.profiles = profiles
            scope, child = f"libpod-{'c4' * 32}.scope", process()
            site.systemd.set(scope, Unit(site.run_in(scope, child), transient=True))
            site.systemd.hangs = why == "hangs"
            site.systemd.refusal = "org.freedesktop.DBus.Error.AccessDenied" if why == "refuses" else ""
            with monkeypatch.context() as patched:
                if why == "is missing":
                    patched.setattr(systemd, "NAME", "org.freedesktop.none")
                async with site.serving():
                    await site.assign(child, "c4" * 32, scope)
                    await site.until(lambda: site.text("k").startswith("not set: "))
            assert site.values(scope) == FREE
            site.systemd.hangs, site.systemd.refusal = False, ""
            async with site.serving():
                await site.until(lambda: site.values(scope) == LIMITED)
                await asyncio.to_thread(release, site.host.ctx, "k", owner=OCI)

    run(test)


def test_change_that_systemd_refused_is_tried_again(
    site: Settings, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd_loop, "_FIRST_PAUSE_S", 0.05)

    async def test() -> None:
        async with site.systemd:
            site.unit(SHOP, process())
            use(site.host, SMALL, default="small")
            site.systemd.refusal = "org.freedesktop.DBus.Error.AccessDenied"
            async with site.serving(SHOP):
                await site.until(lambda: site.text().startswith("not set: systemd refused the change"))
                site.systemd.refusal = ""
                await site.until(lambda: site.values() == LIMITED)

    run(test)


def test_full_disk_changes_nothing(site: Settings, process: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: UnitMemoryFile, _changes: object) -> None:
        raise NotWritten("No space left on device")

    async def test() -> None:
        async with site.systemd:
            site.unit(SHOP, process())
            use(site.host, SMALL, default="small")
            with monkeypatch.context() as patched:
                patched.setattr(UnitMemoryFile, "write", full)
                async with site.serving(SHOP):
                    await site.until(lambda: site.text() == "not set: No space left on device")
                    assert site.values() == FREE
            async with site.serving(SHOP):
                await site.until(lambda: site.values() == LIMITED)

    run(test)


def test_unit_whose_control_group_a_user_has_is_left_alone(site: Settings, process: Start) -> None:
    async def test() -> None:
        async with site.systemd:
            site.systemd.set(SHOP, replace(site.unit(SHOP, process()), delegate=True, user="shopper"))
            use(site.host, SMALL, default="small")
            async with site.serving(SHOP):
                await site.until(lambda: "delegated its control group to the user shopper" in site.text())
                assert site.values() == FREE
                assert not site.file.exists

    run(test)


# -- containers of Podman


@pytest.mark.parametrize(
    ("key", "attributes", "has_settings"), [("k", {}, True), (UID, {}, False), ("c1" * 32, {"pod.uid": UID}, False)]
)
def test_containers_of_pods_are_left_to_the_nri_plugin(
    key: str, attributes: dict[str, str], has_settings: bool
) -> None:
    id_ = "c1" * 32
    member = Member(id_, "container", OCI, cgroup=f"/sys/fs/cgroup/machine.slice/libpod-{id_}.scope", profile="small")
    group = Group(class_="", name=key, state=GroupState.CREATED)
    workload = Workload(key=key, groups=(group,), members=(member,), attributes=attributes)
    wanted = wanted_by(workload, Profiles({"small": SMALL}, ()))
    assert [one.unit for one in wanted] == ([f"libpod-{id_}.scope"] if has_settings else [])


def test_scope_of_a_users_service_manager_is_left_alone() -> None:
    """The system's manager may have a scope of the same name."""
    id_ = "c1" * 32
    path = f"/sys/fs/cgroup/user.slice/user@1000.service/user.slice/libpod-{id_}.scope"
    member = Member(id_, "container", OCI, cgroup=path, profile="small")
    workload = Workload(key="k", groups=(Group(class_="", name="k", state=GroupState.CREATED),), members=(member,))
    (wanted,) = wanted_by(workload, Profiles({"small": SMALL}, ()))
    assert wanted.refusal == "its scope belongs to a user's service manager"


def test_another_scope_of_the_same_name_keeps_its_own_values(site: Settings, process: Start) -> None:
    """It has the values that the first one was given, and they are its own."""
    id_, child = "c5" * 32, process()
    scope = f"libpod-{id_}.scope"

    async def test() -> None:
        async with site.systemd:
            site.host.ctx.config.profiles = Profiles({"small": SMALL}, (), default="small", default_origin="F:1")
            site.systemd.set(scope, Unit(site.run_in(scope, child), transient=True))
            async with site.serving():
                await site.assign(child, id_, scope)
                await site.until(lambda: site.values(scope) == LIMITED)
            await asyncio.to_thread(release, site.host.ctx, "k", owner=OCI)
            own = replace(site.systemd.units[scope], invocation="bb" * 16, memory=dict(LIMITED))
            site.systemd.set(scope, own)
            async with site.serving():
                await site.until(lambda: not site.file.exists)
            assert site.values(scope) == LIMITED

    run(test)


@pytest.mark.parametrize("below", ["", "/container"])
def test_scope_of_a_container_of_podman_has_the_settings(site: Settings, process: Start, below: str) -> None:
    ids = ["c1" * 32, "c2" * 32]
    scopes = [f"libpod-{id_}.scope" for id_ in ids]

    async def test() -> None:
        async with site.systemd:
            profiles = Profiles({"small": SMALL}, (), default="small", default_origin="F:1")
            site.host.ctx.config.profiles = profiles
            async with site.serving():
                for id_, scope in zip(ids, scopes, strict=True):
                    child = process()
                    inner = site.run_in(f"machine.slice/{scope}{below}", child)
                    site.systemd.set(scope, Unit(inner.removesuffix(below), transient=True))
                    await site.assign(child, id_, f"machine.slice/{scope}{below}", "pod")
                for scope in scopes:
                    await site.until(lambda scope=scope: site.values(scope) == LIMITED)  # type: ignore[misc]
                await site.until(lambda: site.text("pod").count("set: ") == 2)
                site.systemd.set(scopes[0])
                await asyncio.to_thread(remove_member, site.host.ctx, "pod", ids[0])
                await site.until(lambda: "libpod" not in site.text("pod"))
                assert site.values(scopes[1]) == LIMITED
                await asyncio.to_thread(release, site.host.ctx, "pod", owner=OCI)
                await site.until(lambda: site.values(scopes[1]) == FREE)

    run(test)


def test_container_without_a_scope_is_left_alone(site: Settings, process: Start) -> None:
    async def test() -> None:
        async with site.systemd:
            site.host.ctx.config.profiles = Profiles({"small": SMALL}, (), default="small", default_origin="F:1")
            async with site.serving():
                child = process()
                site.run_in("elsewhere", child)
                await site.assign(child, "c3" * 32, "elsewhere")
                await site.until(lambda: "is not a unit of systemd" in site.text("k"))
                await asyncio.to_thread(release, site.host.ctx, "k", owner=OCI)

    run(test)
