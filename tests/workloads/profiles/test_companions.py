# SPDX-License-Identifier: Apache-2.0
"""The care for companions, with a manager object of systemd on a private bus, and real workloads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import resctrlmond.api
import resctrlmond.daemon
from resctrlmond.api.workers import Workers
from resctrlmond.host.unit_globs import COMPANION_PREFIX, UnitGlobs
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.workload import Group, GroupState, Workload
from resctrlmond.workloads.profiles.companion_settings import Companion, Format, Restart
from resctrlmond.workloads.profiles.companions import companion_of, unit_of
from resctrlmond.workloads.profiles.profile import Profile, Profiles, Watch
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.release import release
from tests.api.private_bus import PrivateBus
from tests.workloads.conftest import UID, Host, join, own_host
from tests.workloads.fake_systemd import NAME, FakeSystemd, Unit

Start = Callable[[], "subprocess.Popen[bytes]"]
FIRST, SECOND = "5e" * 32, "c0" * 32
ANNOTATION = "profile.resctrlmon.org"
HELPER = Companion(
    ("/bin/helper", "--config", "$COMPANION_DIR/config.yaml", "$NAMESPACE", "%n$$HOME"),
    "cgroup: $CGROUP2_ABS_PATH\ngroup: $MON_GROUP_PATH\nsnapshot: $SNAPSHOT_DIR\n"
    "stats: $MEMTIERD_SWAP_STATS_PATH\npod: $POD_NAME/$POD_UID\ncontainer: $CONTAINER\nkey: $KEY\n",
    restart=Restart.ON_FAILURE,
    memory_max=64 << 20,
    cpu_quota=20,
    tasks_max=5,
)
PROFILES = Profiles(
    {
        "helped": Profile("helped", Watch.CONTAINER, companion=HELPER),
        "simple": Profile("simple", companion=Companion(("/bin/helper",))),
        "named": Profile("named", companion=Companion(("/bin/helper", "$POD_NAME"))),
        "other": Profile("other"),
    }
)


class Site:
    """A host with a bus and a systemd, whose companions are cared for by ``running``."""

    def __init__(self, host: Host, bus: PrivateBus, cgroup: str) -> None:
        self.host = host
        self.bus = bus
        self.cgroup = cgroup
        self.systemd = FakeSystemd(bus.address)
        self.reported: list[str] = []
        host.ctx.config.profiles = PROFILES

    @property
    def folder(self) -> Path:
        return Path(self.host.run, "companions")

    def start(self, key: str, child: subprocess.Popen[bytes], profile: str, pod: str = "") -> None:
        """Start a container in a control group of its own."""
        path = os.path.join(self.cgroup, key)
        os.makedirs(path, exist_ok=True)
        join(path, child.pid)
        facts = Facts(annotations={ANNOTATION: profile}, namespace="shop", image="", container="app")
        assign(
            self.host.ctx,
            Assignment(
                key=pod or key,
                owner="oci",
                pid=child.pid,
                member=key,
                kind="container",
                own_cgroup=path,
                pod_cgroup=self.cgroup if pod else "",
                attributes={"pod.name": "web-1", "pod.namespace": "shop"} if pod else {"pod.namespace": "shop"},
                facts=facts,
            ),
        )

    def end(self, key: str, owner: str = "oci") -> None:
        release(self.host.ctx, key, owner=owner)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Any]:
        """Care for companions as the daemon does."""
        module = importlib.import_module("resctrlmond.daemon.companions")
        loop = asyncio.get_running_loop()
        manager = self.host.manager
        manager.context.config.profiles = PROFILES
        with contextlib.closing(Workers()) as workers:
            companions = module.Companions(
                manager,
                workers,
                folder=self.host.run,
                address=self.bus.address,
                on_status=self.reported.append,
            )

            def report(key: str, workload: Workload | None) -> None:
                loop.call_soon_threadsafe(companions.changed, key, workload)

            manager.context.store.on_change = report
            companions.configure()
            try:
                yield companions
            finally:
                await companions.close()
                manager.context.store.on_change = lambda _key, _workload: None

    def status(self, key: str) -> str:
        """Return the state of a companion, and its reason; "" for none."""
        return str(self.host.manager.companions.get(key, ""))

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (self.host.manager.companions, self.systemd.units)
            await asyncio.sleep(0.01)

    async def until_status(self, key: str, status: str) -> None:
        await self.until(lambda: self.status(key).startswith(status) and (status or not self.status(key)))


@pytest.fixture(scope="module")
def bus() -> Iterator[PrivateBus]:
    with tempfile.TemporaryDirectory() as folder:
        bus = PrivateBus(Path(folder))
        yield bus
        bus.stop()


@pytest.fixture(params=["dbus_fast", "dbus_next"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the modules again, with each of the D-Bus libraries."""
    monkeypatch.setenv("RESCTRLMOND_DBUS_LIBRARY", request.param)
    prefixes = ("resctrlmond.api.dbus", "resctrlmond.daemon.systemd", "resctrlmond.daemon.companions")
    for name in list(sys.modules):
        if name.startswith(prefixes):
            monkeypatch.delitem(sys.modules, name)
    for package, name in (
        (resctrlmond.api, "dbus"),
        (resctrlmond.daemon, "systemd"),
        (resctrlmond.daemon, "companions"),
    ):
        monkeypatch.delattr(package, name, raising=False)


def made_site(host: Host, bus: PrivateBus, cgroup: str) -> Iterator[Site]:
    bus.start()
    yield Site(host, bus, cgroup)
    for folder in Path(cgroup).iterdir():
        if folder.is_dir():
            for pid in (folder / "cgroup.procs").read_text().split():
                join(cgroup, int(pid))
            folder.rmdir()


@pytest.fixture
def site(library: None, host: Host, bus: PrivateBus, cgroup: str) -> Iterator[Site]:
    yield from made_site(host, bus, cgroup)


@pytest.fixture
def small_site(library: None, tmp_path: Path, bus: PrivateBus, cgroup: str) -> Iterator[Site]:
    """A site with two RMIDs and root's, and without limbo."""
    with own_host(tmp_path, "monitoring-only", 3) as host:
        yield from made_site(host, bus, cgroup)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 120)

    asyncio.run(limited())


def test_companion_runs_from_the_start_of_its_container_to_its_end(site: Site, process: Start) -> None:
    async def test() -> None:
        async with site.systemd as systemd, site.running():
            site.start(FIRST, process(), "helped", pod=UID)
            await site.until_status(FIRST, "running")
            ((name, properties),) = systemd.transient
            assert name == unit_of(FIRST) == f"resctrlmon-companion-{FIRST}.service"
            folder = site.folder / FIRST
            program, arguments, flags = properties["ExecStartEx"][0]
            assert program == arguments[0] == "/bin/helper"
            assert arguments[1:] == ["--config", f"{folder}/config.yaml", "shop", "%n$HOME"]
            assert flags == ["no-env-expand"]
            limits = ("MemoryMax", "CPUQuotaPerSecUSec", "TasksMax", "Restart", "RemainAfterExit", "Slice", "Type")
            assert [properties[limit] for limit in limits] == [
                64 << 20,
                200_000,
                5,
                "on-failure",
                True,
                "resctrlmon-companions.slice",
                "exec",
            ]
            assert (folder / "config.yaml").read_text() == (
                f'cgroup: "{site.cgroup}/{FIRST}"\ngroup: "{site.host.mountpoint}/mon_groups/{FIRST}"\n'
                f'snapshot: "{site.host.run}/groups/{FIRST}"\nstats: "{folder}/memtierd.stats"\n'
                f'pod: "web-1/{UID}"\ncontainer: "app"\nkey: "{FIRST}"\n'
            )
            modes = [stat.S_IMODE(path.stat().st_mode) for path in (site.folder, folder, folder / "config.yaml")]
            assert modes == [0o700, 0o700, 0o600]
            assert FIRST in site.reported
            site.end(FIRST)
            await site.until_status(FIRST, "")
            assert not systemd.units
            await site.until(lambda: not site.folder.exists())

    run(test)


def test_container_without_the_profile_has_no_companion(site: Site, process: Start) -> None:
    async def test() -> None:
        async with site.systemd as systemd, site.running():
            site.start(FIRST, process(), "other")
            site.start(SECOND, process(), "simple")
            await site.until_status(SECOND, "running")
            assert [name for name, _ in systemd.transient] == [unit_of(SECOND)]
            assert site.status(FIRST) == ""

    run(test)


def test_workload_without_an_rmid_gets_its_companion_with_its_group(small_site: Site, process: Start) -> None:
    site = small_site
    manager = site.host.manager

    async def test() -> None:
        async with site.systemd as systemd, site.running():
            others = ["other-0"]
            while create(manager.context, others[-1], owner="me").state != "pending":
                others.append(f"other-{len(others)}")
            site.start(FIRST, process(), "simple")
            assert manager.context.store.known(FIRST).state == "pending"
            await site.until_status(FIRST, "waiting: the workload is pending")
            assert systemd.transient == []
            for other in others:
                release(manager.context, other, owner="me")
            manager.tick()
            assert manager.context.store.known(FIRST).state == "active"
            await site.until_status(FIRST, "running")

    run(test)


@pytest.mark.parametrize("state", ["running", "failed", "exited"])
def test_daemon_that_starts_again_starts_no_companion_twice(site: Site, process: Start, state: str) -> None:
    async def test() -> None:
        async with site.systemd as systemd:
            async with site.running():
                site.start(FIRST, process(), "simple")
                await site.until_status(FIRST, "running")
            if state == "failed":
                systemd.set(unit_of(FIRST), active="failed", sub="failed", result="exit-code", code=1, status=7)
            elif state == "exited":
                systemd.set(unit_of(FIRST), active="active", sub="exited")
            site.host.restart()
            async with site.running():
                await site.until_status(FIRST, state)
                assert len(systemd.transient) == 1
                if state == "failed":
                    assert "it exited with status 7. See: journalctl -u" in site.status(FIRST)
                site.end(FIRST)
                await site.until_status(FIRST, "")
            assert not systemd.units

    run(test)


def test_companion_whose_workload_ended_while_no_daemon_ran_is_stopped(site: Site, process: Start) -> None:
    async def test() -> None:
        async with site.systemd as systemd:
            async with site.running():
                site.start(FIRST, process(), "simple")
                site.start(SECOND, process(), "simple")
                await site.until_status(FIRST, "running")
                await site.until_status(SECOND, "running")
            site.end(FIRST)
            del systemd.units[unit_of(SECOND)]  # as at a crash of systemd
            systemd.units[f"{COMPANION_PREFIX}stray.service"] = systemd.units[unit_of(FIRST)]
            site.host.restart()
            async with site.running():
                await site.until(lambda: [*systemd.units] == [unit_of(SECOND)])
                await site.until_status(SECOND, "running")
                await site.until(lambda: [path.name for path in site.folder.iterdir()] == [SECOND])
            assert [name for name, _ in systemd.transient].count(unit_of(SECOND)) == 2

    run(test)


def test_unit_that_systemd_does_not_stop_keeps_no_companion_from_it(
    site: Site, process: Start, caplog: pytest.LogCaptureFixture
) -> None:
    stray = f"{COMPANION_PREFIX}admin.service"

    async def test() -> None:
        async with site.systemd as systemd:
            systemd.units[stray] = Unit("/system.slice")
            systemd.unstoppable.add(stray)
            site.start(FIRST, process(), "simple")
            async with site.running() as companions:
                await site.until_status(FIRST, "running")
                companions.configure()
                await site.until(lambda: systemd.calls.count("StopUnit") == 2)
            assert [*systemd.units] == [stray, unit_of(FIRST)]

    run(test)
    assert (
        caplog.text.count(f"cannot stop {stray}, which has the name of a companion: {stray}: Operation refused") == 1
    )


def test_new_run_under_the_key_gets_a_companion_of_its_own(site: Site, process: Start) -> None:
    first, second = process(), process()

    async def test() -> None:
        async with site.systemd as systemd:
            async with site.running():
                site.start(FIRST, first, "simple")
                await site.until_status(FIRST, "running")
            # While nothing cares for companions.
            site.end(FIRST)
            site.start(FIRST, second, "simple")
            async with site.running():
                await site.until(lambda: len(systemd.transient) == 2)
                await site.until_status(FIRST, "running")
            assert systemd.calls.index("StopUnit") < len(systemd.calls) - systemd.calls[::-1].index(
                "StartTransientUnit"
            )

    run(test)


def test_companion_that_ignores_sigterm_is_shown_as_stopping_until_systemd_has_killed_it(
    site: Site, process: Start
) -> None:
    unit = unit_of(FIRST)
    first, second = process(), process()

    async def test() -> None:
        async with site.systemd as systemd, site.running():
            systemd.slow.add(unit)
            site.start(FIRST, first, "simple")
            await site.until_status(FIRST, "running")
            site.end(FIRST)
            assert site.host.get(FIRST).state == "completed"
            await site.until_status(FIRST, "stopping")
            site.start(FIRST, second, "simple")
            assert site.host.get(FIRST).state == "active"
            await site.until_status(FIRST, "waiting: systemd stops the previous companion")
            assert systemd.calls.count("StopUnit") == 1
            systemd.slow.clear()
            systemd.set(unit, active="failed", sub="failed", job="", result="timeout", code=2, status=9)
            await site.until_status(FIRST, "running")
            assert len(systemd.transient) == 2
            systemd.slow.add(unit)
            site.end(FIRST)
            await site.until_status(FIRST, "stopping")
            systemd.set(unit, active="failed", sub="failed", job="", result="timeout", code=2, status=9)
            await site.until_status(FIRST, "")
            assert not systemd.units

    run(test)


def test_reload_that_wants_a_companion_again_while_systemd_stops_it_starts_a_new_one(
    site: Site, process: Start
) -> None:
    unit = unit_of(FIRST)

    async def test() -> None:
        async with site.systemd as systemd, site.running() as companions:
            site.start(FIRST, process(), "simple")
            await site.until_status(FIRST, "running")
            systemd.slow.add(unit)
            site.host.ctx.config.profiles = Profiles({"simple": Profile("simple")})
            companions.configure()
            await site.until_status(FIRST, "stopping")
            site.host.ctx.config.profiles = PROFILES
            companions.configure()
            await site.until_status(FIRST, "waiting: systemd stops the previous companion")
            systemd.set(unit)
            await site.until_status(FIRST, "running")
            assert len(systemd.transient) == 2

    run(test)


def test_companion_whose_main_process_fails_before_its_others_has_failed(site: Site, process: Start) -> None:
    """systemd gives the other processes 10 seconds; another program would stop the unit by a job."""
    failed: dict[str, Any] = {"result": "exit-code", "code": 1, "status": 7}

    async def test() -> None:
        async with site.systemd as systemd, site.running():
            site.start(FIRST, process(), "simple")
            await site.until_status(FIRST, "running")
            systemd.set(unit_of(FIRST), active="deactivating", sub="stop-sigterm", **failed)
            await site.until_status(FIRST, "failed: it exited with status 7")
            systemd.set(unit_of(FIRST), active="failed", sub="failed", **failed)
            site.start(SECOND, process(), "simple")
            await site.until_status(SECOND, "running")
            systemd.set(unit_of(SECOND), active="deactivating", sub="stop-sigterm", job="stop")
            await site.until_status(SECOND, "stopped: another program stops its unit")

    run(test)


def test_companion_without_a_value_for_a_variable_fails_with_the_reason(site: Site, process: Start) -> None:
    async def test() -> None:
        async with site.systemd as systemd, site.running():
            site.start(FIRST, process(), "named")
            await site.until_status(FIRST, "failed: the workload has no value for $POD_NAME")
            site.start(SECOND, process(), "simple")
            await site.until_status(SECOND, "running")
            assert len(systemd.transient) == 1
            assert site.host.get(FIRST).state == "active"

    run(test)


def test_refusal_of_systemd_is_reported_and_tried_again(site: Site, process: Start) -> None:
    async def test() -> None:
        async with site.systemd as systemd, site.running():
            systemd.refusal = "org.freedesktop.DBus.Error.AccessDenied"
            site.start(FIRST, process(), "simple")
            await site.until_status(FIRST, "failed: systemd refused the request: refused")
            await site.until(lambda: systemd.calls.count("StartTransientUnit") == 3)
            systemd.refusal = ""
            await site.until_status(FIRST, "running")

    run(test)


def test_retry_that_is_not_needed_any_more_costs_nothing(site: Site, process: Start) -> None:
    """A start fails, and the workload has no task any more: a retry that stays due would look again and again."""
    child = process()

    async def test() -> None:
        async with site.systemd as systemd, site.running() as companions:
            systemd.refusal = "org.freedesktop.DBus.Error.AccessDenied"
            site.start(FIRST, child, "simple")
            await asyncio.to_thread(create, site.host.ctx, FIRST, owner="me")
            await site.until_status(FIRST, "failed")
            child.kill()
            child.wait()
            await asyncio.to_thread(site.host.manager.maintenance.tick)
            await site.until_status(FIRST, "waiting: the workload is idle")
            assert companions._retries.seconds is None

    run(test)


@pytest.mark.parametrize("refusal", ["org.freedesktop.DBus.Error.AccessDenied", f"{NAME}.UnitExists"])
def test_many_changes_cause_no_further_tries(site: Site, process: Start, refusal: str) -> None:
    async def test() -> None:
        async with site.systemd as systemd, site.running() as companions:
            systemd.refusal = refusal
            site.start(FIRST, process(), "simple")
            await site.until_status(FIRST, "failed")
            begun, before = time.monotonic(), systemd.calls.count("StartTransientUnit")
            for _ in range(200):
                companions.changed(FIRST, site.host.get(FIRST))
                await asyncio.sleep(0.005)
            # 0.5 s and 1 s after the first one, and so on.
            assert systemd.calls.count("StartTransientUnit") - before <= 1 + (time.monotonic() - begun) / 0.5

    run(test)


def test_bus_that_is_missing_is_tried_with_pauses(
    site: Site, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("resctrlmond.daemon.companions")
    opened, tries = module.Systemd.open, []

    async def open_(*args: Any) -> Any:
        tries.append(time.monotonic())
        return await opened(*args)

    monkeypatch.setattr(module.Systemd, "open", open_)
    site.bus.stop()

    async def test() -> None:
        async with site.running() as companions:
            site.start(FIRST, process(), "simple")
            while len(tries) < 3:
                companions.changed(FIRST, site.host.get(FIRST))
                await asyncio.sleep(0.005)
            first, second, third = tries
            assert (second - first >= 0.5, third - second >= 1) == (True, True)

    run(test)


@pytest.mark.parametrize("cause", ["no bus", "no systemd", "hangs"])
def test_bus_that_is_missing_or_hangs_delays_only_the_companion(
    site: Site, process: Start, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("resctrlmond.api.dbus.library"), "REPLY_TIMEOUT_S", 0.3)
    manager = site.host.manager

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            systemd = site.systemd
            if cause == "no bus":
                site.bus.stop()
            elif cause == "hangs":
                await stack.enter_async_context(systemd)
                systemd.hangs = True
            await stack.enter_async_context(site.running())
            begun = time.monotonic()
            site.start(FIRST, process(), "simple")
            assert time.monotonic() - begun < 5
            await site.until_status(FIRST, "waiting: companions are neither started nor stopped: ")
            await site.until(lambda: "neither started" in manager.alerts["companions"])
            if cause == "no bus":
                site.bus.start()
            systemd.hangs = False
            if cause != "hangs":
                await stack.enter_async_context(systemd)
            await site.until_status(FIRST, "running")
            await site.until(lambda: not manager.alerts["companions"])

    run(test)


def test_companion_that_an_administrator_stops_is_not_started_again(site: Site, process: Start) -> None:
    async def test() -> None:
        async with site.systemd as systemd, site.running() as companions:
            site.start(FIRST, process(), "simple")
            await site.until_status(FIRST, "running")
            systemd.set(unit_of(FIRST))
            await site.until_status(FIRST, "stopped: another program has stopped its unit")
            companions.configure()
            site.start(SECOND, process(), "simple")
            await site.until_status(SECOND, "running")
            assert [name for name, _ in systemd.transient].count(unit_of(FIRST)) == 1

    run(test)


def test_reload_stops_a_companion_that_the_profile_no_longer_has(site: Site, process: Start) -> None:
    async def test() -> None:
        async with site.systemd as systemd, site.running() as companions:
            site.start(FIRST, process(), "simple")
            await site.until_status(FIRST, "running")
            site.host.ctx.config.profiles = Profiles({"simple": Profile("simple")})
            companions.configure()
            await site.until(lambda: not systemd.units)
            await site.until_status(FIRST, "")
            site.host.ctx.config.profiles = PROFILES
            companions.configure()
            await site.until_status(FIRST, "running")

    run(test)


def test_restart_by_systemd_is_shown_with_its_cause(site: Site, process: Start) -> None:
    async def test() -> None:
        async with site.systemd as systemd, site.running():
            site.start(FIRST, process(), "simple")
            await site.until_status(FIRST, "running")
            systemd.set(unit_of(FIRST), active="activating", sub="auto-restart", result="signal", code=2, status=11)
            await site.until_status(FIRST, "starting: again: it was killed by SIGSEGV")
            systemd.set(unit_of(FIRST), active="active", sub="running")
            await site.until_status(FIRST, "running")

    run(test)


def test_files_that_cannot_be_written_are_removed_at_the_end(
    site: Site, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("resctrlmond.daemon.companions")
    written = module.CompanionFiles.write

    def write(files: Any, key: str, run: str, name: str, text: str | None) -> None:
        written(files, key, run, name, text)
        (site.folder / key / ".run").unlink()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.CompanionFiles, "write", write)

    async def test() -> None:
        async with site.systemd as systemd, site.running():
            site.start(FIRST, process(), "simple")
            await site.until_status(FIRST, "failed")
            assert "ENOSPC" in site.status(FIRST)
            site.end(FIRST)
            await site.until(lambda: not site.folder.exists())
            assert systemd.transient == []

    run(test)


def test_link_in_the_place_of_a_folder_is_not_followed(site: Site, process: Start, tmp_path: Path) -> None:
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (kept / "file").touch()
    site.folder.mkdir(mode=0o700)
    (site.folder / FIRST).symlink_to(kept)

    async def test() -> None:
        async with site.systemd, site.running():
            site.start(FIRST, process(), "simple")
            await site.until_status(FIRST, "running")
            assert not (site.folder / FIRST).is_symlink()
            site.end(FIRST)
            await site.until(lambda: not site.folder.exists())
        assert [path.name for path in kept.iterdir()] == ["file"]

    run(test)


def test_release_of_everything_stops_all_companions(site: Site, process: Start) -> None:
    async def test() -> None:
        async with site.systemd as systemd:
            async with site.running():
                for key in (FIRST, SECOND):
                    site.start(key, process(), "simple")
                    await site.until_status(key, "running")
            systemd.set(unit_of(FIRST), active="failed", sub="failed")
            module = importlib.import_module("resctrlmond.daemon.companions")
            assert await module.stop_all(site.host.run, site.bus.address) == ""
            assert not systemd.units
            assert not site.folder.exists()

    run(test)


# -- without a bus


def workload(key: str, profile: str, state: GroupState = GroupState.CREATED) -> Workload:
    return Workload(key=key, groups=(Group(name="g", state=state),), profile=profile, is_active=True)


@pytest.mark.parametrize(
    ("key", "profile", "state", "has_one"),
    [
        (FIRST, "simple", GroupState.CREATED, True),
        (FIRST, "helped", GroupState.CREATED, True),
        (UID, "simple", GroupState.CREATED, True),
        # The pod holds only containers of other profiles.
        (UID, "helped", GroupState.CREATED, False),
        (FIRST, "simple", GroupState.PENDING, True),
        (FIRST, "simple", GroupState.ENDING, False),
        (FIRST, "simple", GroupState.COMPLETED, False),
        (FIRST, "other", GroupState.CREATED, False),
        (FIRST, "", GroupState.CREATED, False),
        (FIRST, "unknown", GroupState.CREATED, False),
        # Otherwise it would have one too, and so on.
        (unit_of(FIRST), "simple", GroupState.CREATED, False),
    ],
)
def test_workloads_that_have_a_companion(key: str, profile: str, state: GroupState, has_one: bool) -> None:
    assert bool(companion_of(workload(key, profile, state), PROFILES)) == has_one


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("web", "resctrlmon-companion-web.service"),
        ("a-b", r"resctrlmon-companion-a\x2db.service"),
        ("user-1000:a@b.service", r"resctrlmon-companion-user\x2d1000:a\x40b.service.service"),
        ("a\\x2db", r"resctrlmon-companion-a\x5cx2db.service"),
    ],
)
def test_unit_has_the_escaped_key(key: str, expected: str) -> None:
    assert unit_of(key) == expected


def test_unit_names_of_long_keys_differ_and_are_valid() -> None:
    one, other = unit_of("-" * 199 + "a"), unit_of("-" * 199 + "b")
    assert one != other
    assert len(one) <= 255


@pytest.mark.parametrize(
    ("globs", "is_selected"),
    [
        (["*.service"], False),
        (["*"], False),
        ([f"{COMPANION_PREFIX}*.service"], True),
        (["*.service", "resc*"], False),
    ],
)
def test_globs_of_units_select_companions_only_by_their_prefix(globs: list[str], is_selected: bool) -> None:
    assert (UnitGlobs(globs).rank(unit_of(FIRST)) is not None) == is_selected
    assert UnitGlobs(["*.service"]).rank("nginx.service") == 0


@pytest.mark.parametrize(
    ("result", "code", "status", "expected"),
    [
        ("exit-code", 1, 203, "systemd cannot execute its program"),
        ("exit-code", 1, 3, "it exited with status 3"),
        ("signal", 2, 9, "it was killed by SIGKILL"),
        ("signal", 2, 99, "it was killed by signal 99"),
        ("oom-kill", 2, 9, "the kernel killed it, because its memory was used up (memory_max)"),
        ("resources", 0, 0, "systemd reports resources"),
    ],
)
def test_failure_is_described(result: str, code: int, status: int, expected: str) -> None:
    module = importlib.import_module("resctrlmond.daemon.companions")
    assert module.failure_text(result, code, status, "u.service") == f"{expected}. See: journalctl -u 'u.service'"


def test_format_names_its_file() -> None:
    assert [format_.file_name for format_ in Format] == ["config.yaml", "config.json", "config"]


class Killed(BaseException):
    """The end of a daemon that is killed."""


class Steps:
    """Kills the daemon before or after its ``fatal``th step: a write of files, or a request to systemd."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.fatal = -1
        module = importlib.import_module("resctrlmond.daemon.companions")
        for name in ("write", "remove"):
            monkeypatch.setattr(module.CompanionFiles, name, self._counted(getattr(module.CompanionFiles, name)))
        for name in ("start_transient", "stop", "reset_failed"):
            monkeypatch.setattr(module.Systemd, name, self._awaited(getattr(module.Systemd, name)))

    def _step(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            raise Killed

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._step()
            result = function(*args)
            self._step()
            return result

        return call

    def _awaited(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            self._step()
            result = await function(*args)
            self._step()
            return result

        return call


def test_daemon_that_is_killed_at_any_step_leaks_and_repeats_no_companion(
    site: Site, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container lives and ends, and the daemon is killed at each step of that once, and starts again."""
    steps = Steps(monkeypatch)
    children = [process() for _ in range(20)]

    async def killed_or(condition: Callable[[], object], companions: Any) -> None:
        await site.until(lambda: companions._loop._task.done() or condition())

    async def live(key: str, child: subprocess.Popen[bytes], fatal: int) -> None:
        steps.count, steps.fatal = 0, fatal
        async with site.running() as companions:
            site.start(key, child, "simple")
            await killed_or(lambda: site.status(key) == "running", companions)
        async with site.running() as companions:
            await killed_or(lambda: site.status(key) == "running", companions)
            site.end(key)
            await killed_or(lambda: not site.folder.exists(), companions)
        async with site.running():
            await site.until(lambda: not site.folder.exists())

    async def test() -> None:
        async with site.systemd as systemd:
            fatal, was_killed = 0, True
            while was_killed:
                fatal += 1
                key = f"{fatal:064x}"
                await live(key, children[fatal], fatal)
                was_killed = steps.count >= fatal
                assert systemd.units == {}
                assert [name for name, _ in systemd.transient] == [unit_of(key)], f"killed at step {fatal}"
                systemd.transient.clear()
            assert fatal > 8, "each of the four steps, before and after it"

    run(test)
