# SPDX-License-Identifier: Apache-2.0
"""Commands of services that call the daemon before they are executed: real processes, and a fake systemd on a bus."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resctrlmond.api.access import Policy
from resctrlmond.api.service import Service as Verbs
from resctrlmond.api.sockets import listen
from resctrlmond.api.varlink.interfaces import unit_server
from resctrlmond.api.workers import Workers
from resctrlmond.daemon import unit_starts, units
from resctrlmond.daemon.systemd import Systemd
from resctrlmond.daemon.unit_commands import Service
from resctrlmond.daemon.unit_starts import UnitStarts
from resctrlmond.host.unit_exec import PROGRAM
from resctrlmond.resctrl.processes import children
from resctrlmond.workloads.evidence import callers
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.groups import placement
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.release import release
from tests.api.private_bus import PrivateBus
from tests.hook.builds import ROOT
from tests.workloads.conftest import Host, join
from tests.workloads.fake_systemd import Command, Unit
from tests.workloads.test_unit_watch import Site, remove_below, run

SHOP, OTHER = "shop.service", "other.service"
NOBODY = 65534


class Services(Site):
    """A site whose daemon also serves org.resctrlmon.Unit, and services with processes that the test starts."""

    def __init__(self, host: Host, bus: PrivateBus, top: str, folder: Path) -> None:
        super().__init__(host, bus, top, "dbus_fast")
        self.folder = folder
        self.path = str(folder / "unit.socket")
        self.children: list[subprocess.Popen[str]] = []

    @contextlib.asynccontextmanager
    async def serving(self, *globs: str) -> AsyncIterator[None]:
        """Watch units and serve the calls of their commands, as the daemon does."""
        async with self.systemd, self.watching(*globs):
            watch = self.watch
            assert await watch.connection() is not None
            with contextlib.closing(Workers()) as workers:
                service = Verbs(self.host.manager, Policy(), workers)
                self.starts = UnitStarts(self.host.ctx, workers, watch.connection, watch.assignment, watch.seen)
                service.assign_unit = self.starts.assign
                server = unit_server(service)
                await server.start(listen(self.path, 0o666))
                ticks = asyncio.create_task(self._tick())
                try:
                    yield
                finally:
                    ticks.cancel()
                    await server.close()

    async def _tick(self) -> None:
        while True:
            self.watch.seen.check()
            await asyncio.sleep(0.5)

    def spawn(
        self, name: str, *words: str, below: str = "", user: int | None = None, comm: str = "(x)"
    ) -> subprocess.Popen[str]:
        """Start a process in the control group of the service, which executes the words when it gets a line."""
        # With a name as systemd's own process has before it executes the command.
        command = ["/bin/sh", "-c", f'printf %s "{comm}" >/proc/$$/comm; echo; read _; exec "$0" "$@"', *words]
        options: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        child = subprocess.Popen(
            command, cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
        self.children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "\n"
        os.makedirs(os.path.join(self.top, name, below), exist_ok=True)
        join(os.path.join(self.top, name, below), child.pid)
        return child

    def through(self, name: str, *words: str, **options: Any) -> subprocess.Popen[str]:
        """As ``spawn``, through the program."""
        return self.spawn(name, str(self.folder / "resctrlmon-unit-exec"), *words, **options)

    def state(self, name: str, **commands: list[Command]) -> None:
        """Let systemd state the commands of a service."""
        self.systemd.set(name, Unit(self.inner(name), commands=commands))

    async def begin(self) -> subprocess.Popen[str]:
        """Start the service, and return its process, which has called the daemon and sleeps."""
        main = self.through(SHOP, "/bin/sleep", "600")
        self.state(SHOP, ExecStart=[started(main)])
        go(main)
        await self.until(lambda: has_begun(main))
        return main

    async def begin_with_child(self) -> tuple[subprocess.Popen[str], int]:
        """Start the service; return its process, which has called the daemon, and the one that it has started."""
        main = self.through(SHOP, "/bin/sh", "-c", "read _; sleep 600 & wait")
        self.state(SHOP, ExecStart=[started(main)])
        go(main)
        await self.until(lambda: self.claimed() == [SHOP])
        go(main)
        await self.until(lambda: children(main.pid))
        (child,) = children(main.pid) or []
        return main, child

    async def end(self, process: subprocess.Popen[str]) -> None:
        """End a process of the service, and record that."""
        process.kill()
        await ended(process)
        self.host.manager.maintenance.record_ends(SHOP)

    def sweep(self, name: str = SHOP) -> None:
        """Search for tasks of a service outside its group, as a tick does every few seconds."""
        with self.host.ctx.store.transaction(name) as txn:
            placement.sweep(self.host.ctx, txn)

    def quality(self, name: str = SHOP) -> Quality:
        return self.host.get(name).first.baseline

    def reasons(self, name: str = SHOP) -> tuple[str, ...]:
        return self.host.get(name).first.baseline_reasons

    def known_until(self, name: str = SHOP) -> int:
        """Return until when the watch has seen that all commands of a service are known, in systemd's time.

        If it looked while a process was about to call, it looks again a second later.
        """
        member = self.host.get(name).member(name)
        return member.known_until_us if member is not None else 0

    def in_group(self, child: subprocess.Popen[str]) -> str:
        return self.host.tree.membership(child.pid).group


def started(child: subprocess.Popen[str], *, ended: bool = False, program: str = PROGRAM) -> Command:
    """Return a command as systemd states it after it has started this process."""
    now = time.monotonic()
    return Command(program, child.pid, started=now, ended=now if ended else 0)


def go(child: subprocess.Popen[str]) -> None:
    """Let a process that ``spawn`` has started execute its command."""
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def has_begun(child: subprocess.Popen[str]) -> bool:
    """Whether the process executes its command, sleep(1): then its call has ended."""
    return os.path.basename(os.readlink(f"/proc/{child.pid}/exe")) in ("sleep", "coreutils")


async def ended(child: subprocess.Popen[str]) -> None:
    """Wait for the end of a process."""
    await asyncio.to_thread(child.wait, 60)


async def output(child: subprocess.Popen[str]) -> str:
    """Wait for the end of a process, and return its output."""
    return (await asyncio.to_thread(child.communicate, timeout=60))[0]


@pytest.fixture(scope="module")
def bus() -> Iterator[PrivateBus]:
    with tempfile.TemporaryDirectory() as folder:
        bus = PrivateBus(Path(folder))
        yield bus
        bus.stop()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that each user can read, with the program, whose socket is in the working directory."""
    name = "build/resctrlmon-unit-exec-tested"
    subprocess.run(["make", "-s", "-C", str(ROOT), name], check=True, timeout=300, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        Path(path, "resctrlmon-unit-exec").write_bytes((ROOT / name).read_bytes())
        Path(path, "resctrlmon-unit-exec").chmod(0o755)
        yield Path(path)


@pytest.fixture
def site(host: Host, bus: PrivateBus, cgroup: str, folder: Path, process: Any) -> Iterator[Services]:
    bus.start()
    site = Services(host, bus, cgroup, folder)
    site.run_in("mark.service", process())
    yield site
    for child in site.children:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
    remove_below(cgroup)


def test_service_is_exact_and_stays_so(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sh", "-c", "sleep 600 & wait")
            site.state(SHOP, ExecStart=[started(main)])
            await site.looked()
            assert site.claimed() == []  # the watch waits for the call
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            assert site.in_group(main) == SHOP
            await site.looked()
            site.host.manager.maintenance.tick()
            workload = site.host.get(SHOP)
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
            assert workload.attributes == {"unit": SHOP}
            (member,) = workload.members
            assert (member.id, member.kind, member.pid, member.late) == (SHOP, "unit", 0, False)
            os.kill(main.pid, signal.SIGTERM)
            await ended(main)
            site.systemd.set(SHOP, active="inactive", sub="dead")
            await site.until(lambda: not site.claimed())
        assert site.host.get(SHOP).state is State.COMPLETED
        # The sleep of the shell ran on.
        assert site.quality() is Quality.ESTIMATED
        assert "ran on after its end" in site.reasons()[0]

    run(test)


def test_each_command_of_a_service_is_counted(site: Services) -> None:
    """A service with commands before, after and beside its main process, which is restarted."""

    async def test() -> None:
        async with site.serving("*.service"):
            first = site.through(SHOP, "/bin/true")
            site.state(
                SHOP, ExecStartPre=[started(first)], ExecStart=[Command(PROGRAM)], ExecReload=[Command(PROGRAM)]
            )
            go(first)
            await ended(first)
            assert site.quality() is Quality.EXACT
            before = started(first, ended=True)
            site.host.manager.maintenance.record_ends(SHOP)
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStartPre=[before], ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            # Its control group has tasks again, and the watch and the tick wait for the call.
            await site.looked()
            site.host.manager.maintenance.tick()
            go(main)
            await site.until(lambda: has_begun(main))
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
            reload = site.through(SHOP, "/bin/true")
            both = {"ExecStartPre": [before], "ExecStart": [started(main)]}
            site.state(SHOP, **both, ExecReload=[started(reload)])
            # A sweep finds it outside, and leaves it to its call.
            site.sweep()
            go(reload)
            await ended(reload)
            site.state(SHOP, **both, ExecReload=[started(reload, ended=True)])
            await site.looked()
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
            assert site.host.get(SHOP).generation == 1
            # The service is restarted.
            await site.end(main)
            first = site.through(SHOP, "/bin/true")
            site.state(SHOP, ExecStartPre=[started(first)], ExecStart=[Command(PROGRAM)])
            go(first)
            await ended(first)
            again = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStartPre=[started(first, ended=True)], ExecStart=[started(again)])
            go(again)
            await site.until(lambda: site.in_group(again) == SHOP)
            await site.looked()
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
            again.kill()
            await ended(again)
            site.systemd.set(SHOP, active="inactive", sub="dead")
            await site.until(lambda: not site.claimed())
            assert (site.quality(), site.host.get(SHOP).generation) == (Quality.EXACT, 1)

    run(test)


def test_next_command_is_exact_though_the_watch_looks_before_systemd_states_it(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            first = site.through(SHOP, "/bin/true")
            site.state(SHOP, ExecStart=[started(first), Command(PROGRAM)])
            go(first)
            await ended(first)
            site.host.manager.maintenance.record_ends(SHOP)
            done = started(first, ended=True)
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[done, Command(PROGRAM)])
            await site.looked()
            site.state(SHOP, ExecStart=[done, started(main)])
            go(main)
            await site.until(lambda: has_begun(main))
            await site.looked()
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
            assert site.in_group(main) == SHOP

    run(test)


@pytest.mark.parametrize("comm", ["(x)", "9", "systemd-executo"])
def test_sweep_moves_the_processes_beside_one_that_is_about_to_call(site: Services, comm: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            go(main)
            await site.until(lambda: has_begun(main))
            reload = site.through(SHOP, "/bin/sleep", "600", comm=comm)
            joined = site.spawn(SHOP, "/bin/sleep", "600")
            go(joined)
            await site.until(lambda: has_begun(joined))
            site.sweep()
            assert (site.in_group(joined), site.in_group(reload)) == (SHOP, "")
            assert site.quality() is Quality.LATE

    run(test)


@pytest.mark.parametrize("when", ["at the first call", "later", "before the end"])
@pytest.mark.parametrize("calls", [False, True])
def test_process_with_the_name_of_a_caller_that_ends_without_a_call_makes_the_service_late(
    site: Services, when: str, calls: bool
) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            other = (site.through if calls else site.spawn)(SHOP, "/bin/true", comm="(sleep)")
            stated = {"ExecStartPost": [started(other) if calls else Command(PROGRAM)]}
            if when != "at the first call":
                os.kill(other.pid, signal.SIGSTOP)
                join(os.path.dirname(site.top), other.pid)
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands={"ExecStart": [started(main)], **stated})
            go(main)
            await site.until(lambda: has_begun(main))
            assert site.quality() is Quality.EXACT
            if when != "at the first call":
                join(os.path.join(site.top, SHOP), other.pid)
                os.kill(other.pid, signal.SIGCONT)
                site.sweep()
                assert (site.in_group(other), site.quality()) == ("", Quality.EXACT)
            go(other)
            await ended(other)
            if when == "before the end":
                main.kill()
                await ended(main)
                site.systemd.set(SHOP, active="inactive", sub="dead")
                await site.until(lambda: not site.claimed())
            else:
                site.sweep()
            assert site.quality() is (Quality.EXACT if calls else Quality.LATE), site.reasons()

    run(test)


@pytest.mark.parametrize("place", ["in the service", "elsewhere", "below the service"])
@pytest.mark.parametrize("what", ["process", "control group"])
def test_service_is_late_if_another_workload_takes_a_process_of_it(site: Services, place: str, what: str) -> None:
    """A process that the service has started in another control group, as a runtime does, is not a process of it."""

    async def test() -> None:
        async with site.serving("*.service"):
            _main, child = await site.begin_with_child()
            below = os.path.join(
                site.top, {"elsewhere": "x.scope", "below the service": f"{SHOP}/x"}.get(place, SHOP)
            )
            os.makedirs(below, exist_ok=True)
            join(below, child)
            assert site.quality() is Quality.EXACT
            target: dict[str, Any] = {"pid": child} if what == "process" else {"cgroup": below}
            await asyncio.to_thread(assign, site.host.ctx, Assignment(key="client", owner="client", **target))
            assert site.host.tree.membership(child).group == "client"
            reasons = () if place == "elsewhere" else (Reason.TAKEN_OVER.text(key="client"),)
            assert site.reasons()[:1] == reasons
            # LATE; or ESTIMATED, if the service has been released by now because its control group was taken.
            assert (site.quality() is Quality.EXACT) == (not reasons)

    run(test)


@pytest.mark.parametrize("name", ["session-4.scope", f"docker-{'0a' * 32}.scope"])
def test_process_that_a_service_has_started_in_a_scope_is_found_at_once(site: Services, name: str) -> None:
    """As a session of the SSH server, or by systemd-run(1) with --scope. That of a container is left to its hook."""

    async def test() -> None:
        async with site.serving("*.service"):
            main, child = await site.begin_with_child()
            os.makedirs(os.path.join(site.top, name), exist_ok=True)
            join(os.path.join(site.top, name), child)
            site.systemd.set(name, Unit(site.inner(name)))
            site.systemd.job(name, 7)()
            if name.startswith("session"):
                await site.until(lambda: site.quality() is Quality.ESTIMATED)
                await site.until(lambda: site.host.tree.membership(child).group == "")
                assert site.in_group(main) == SHOP
            else:
                await site.looked()
                assert not site.watch._searches
                assert (site.quality(), site.host.tree.membership(child).group) == (Quality.EXACT, SHOP)

    run(test)


def test_process_with_the_number_of_an_earlier_one_is_put_into_the_group(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            go(main)
            await site.until(lambda: has_begun(main))
            reload = site.through(SHOP, "/bin/sleep", "600")
            with site.host.ctx.store.transaction(SHOP) as txn:
                (member,) = txn.workload.members
                commands = (*member.commands, f"ExecReload={reload.pid}")
                txn.save(txn.workload.with_member(msgspec.structs.replace(member, commands=commands)))
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[started(reload)])
            go(reload)
            await site.until(lambda: has_begun(reload))
            assert (site.in_group(reload), site.quality(), site.reasons()) == (SHOP, Quality.EXACT, ())

    run(test)


def test_command_is_exact_beside_one_that_systemd_has_started_since_its_statement(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            reload = site.through(SHOP, "/bin/true")
            go(main)
            await site.until(lambda: has_begun(main))
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[started(reload)])
            go(reload)
            await ended(reload)
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

    run(test)


@pytest.mark.parametrize("is_end", [False, True])
def test_call_between_the_statement_of_systemd_and_its_use_is_known(
    site: Services, monkeypatch: pytest.MonkeyPatch, is_end: bool
) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            reload = site.through(SHOP, "/bin/sleep", "600")
            commands = {"ExecStart": [started(main)], "ExecReload": [started(reload)]}
            watch = site.watch
            service: Callable[..., Awaitable[Service | None]] = watch._service

            async def slow(systemd: Systemd, key: str) -> Service | None:
                found = await service(systemd, key)
                if found is not None and len(found.commands) == 2 and not has_begun(reload):
                    go(reload)
                    await site.until(lambda: has_begun(reload))
                return found

            monkeypatch.setattr(watch, "_service", slow)
            if is_end:
                site.systemd.set(SHOP, commands=commands, active="failed", sub="failed")
                await site.until(lambda: has_begun(reload) and not site.claimed())
                assert Reason.RAN_ON.text(member=SHOP) in site.reasons()
            else:
                site.state(SHOP, **commands)
                await site.looked()
                assert site.quality() is Quality.EXACT
            assert has_begun(reload)
            assert "outside" not in " ".join(site.reasons())

    run(test)


@pytest.mark.parametrize("comm", ["(sd-pam)", "sleep"])
def test_process_beside_the_commands_makes_the_service_late(site: Services, comm: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            pam = site.spawn(SHOP, "/bin/sleep", "600", comm=comm)
            main = await site.begin()
            await site.looked()
            site.host.manager.maintenance.tick()
            pam.kill()
            await ended(pam)
            main.kill()
            await ended(main)
            site.systemd.set(SHOP, active="inactive", sub="dead")
            await site.until(lambda: not site.claimed())
            assert site.quality() is Quality.LATE

    run(test)


@pytest.mark.parametrize("cause", ["gone", "hang"])
def test_reload_that_was_missed_before_another_makes_the_service_late(site: Services, cause: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            go(main)
            await site.until(lambda: has_begun(main))
            await site.looked()
            assert site.quality() is Quality.EXACT
            one = site.through(SHOP, "/bin/true")
            first = {"ExecStart": [started(main)], "ExecReload": [started(one)]}
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands=first)
            if cause == "gone":
                connection = site.starts._connection
                site.starts._connection = no_connection
                go(one)
                await ended(one)
                site.starts._connection = connection
            else:
                go(one)
                one.wait(60)  # the event loop stands still, as if the daemon was stopped
            two = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[started(two)])
            go(two)
            await site.until(lambda: has_begun(two))
            assert site.in_group(two) == SHOP
            await site.looked()
            site.host.manager.maintenance.tick()
            assert site.quality() is Quality.LATE

    run(test)


@pytest.mark.parametrize("is_missed", [True, False])
def test_reload_that_did_not_reach_the_daemon_makes_the_service_late(site: Services, is_missed: bool) -> None:
    """Another reload follows before the watch looks, and systemd states only the processes of that."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            go(main)
            await site.until(lambda: has_begun(main))
            await site.looked()
            assert site.quality() is Quality.EXACT
            for number in (1, 2):
                is_outside = is_missed and number == 1
                reload = (site.spawn if is_outside else site.through)(SHOP, "/bin/true")
                commands = {"ExecStart": [started(main)], "ExecReload": [started(reload)]}
                site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands=commands)
                end = site.systemd.job(SHOP, number, "reload")
                go(reload)
                await ended(reload)
                end()
            await site.looked()
            assert site.quality() is (Quality.LATE if is_missed else Quality.EXACT)
            assert site.reasons() == ((Reason.COMMAND_UNSEEN.text(member=SHOP),) if is_missed else ())

    run(test)


@pytest.mark.parametrize("is_missed", [True, False])
def test_second_command_of_a_reload_that_did_not_reach_the_daemon_makes_the_service_late(
    site: Services, is_missed: bool
) -> None:
    """A daemon-reload, by which systemd forgets both commands, follows before the watch looks."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            none = [Command(PROGRAM), Command(PROGRAM)]
            site.state(SHOP, ExecStart=[started(main)], ExecReload=none)
            go(main)
            await site.until(lambda: has_begun(main))
            await site.looked()
            end = site.systemd.job(SHOP, 1, "reload")
            done = list[Command]()
            for is_outside in (False, is_missed):
                reload = (site.spawn if is_outside else site.through)(SHOP, "/bin/true")
                commands = {"ExecStart": [started(main)], "ExecReload": [*done, started(reload), *none][:2]}
                site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands=commands)
                go(reload)
                await ended(reload)
                done.append(started(reload, ended=True))
            end()
            forgotten = {"ExecStart": [Command(PROGRAM)], "ExecReload": none}
            site.systemd.set(SHOP, Unit(site.inner(SHOP), commands=forgotten, changed=9))
            await site.looked()
            assert site.quality() is (Quality.LATE if is_missed else Quality.EXACT)

    run(test)


@pytest.mark.parametrize("is_missed", [True, False])
def test_start_that_did_not_reach_the_daemon_makes_the_service_late(site: Services, is_missed: bool) -> None:
    """Restarts of a service with Type=simple, whose jobs end before the calls, and not a look between them."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            await site.looked()
            assert site.quality() is Quality.EXACT
            for number in (1, 2):
                await site.end(main)
                is_outside = is_missed and number == 1
                main = (site.spawn if is_outside else site.through)(SHOP, "/bin/sleep", "600")
                site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands={"ExecStart": [started(main)]})
                site.systemd.job(SHOP, number)()
                go(main)
                await site.until(lambda main=main: has_begun(main))  # type: ignore[misc]
            await site.looked()
            assert site.quality() is (Quality.LATE if is_missed else Quality.EXACT)
            assert (Reason.START_UNSEEN.text(member=SHOP) in site.reasons()) is is_missed

    run(test)


@pytest.mark.parametrize("of", ["first start", "other start", "same start"])
@pytest.mark.parametrize("setting", ["ExecCondition", "ExecStartPre", "ExecStart"])
def test_command_that_was_missed_before_a_daemon_reload_in_the_same_start_makes_the_service_late(
    site: Services, of: str, setting: str
) -> None:
    """systemd has forgotten its process when the next command calls."""

    async def test() -> None:
        async with site.serving("*.service"):
            if of != "first start":
                before = site.through(SHOP, "/bin/sleep", "600")
                here = {"ExecCondition" if of == "same start" else "ExecStart": [started(before)]}
                site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands=here)
                go(before)
                await site.until(lambda: has_begun(before))
                await site.end(before)
                assert site.quality() is Quality.EXACT
            missed = site.spawn(SHOP, "/bin/true")
            go(missed)
            await ended(missed)
            main = site.through(SHOP, "/bin/sleep", "600")
            forgotten = {"ExecCondition": [Command(PROGRAM)]} if of == "same start" else {}
            forgotten |= {setting: [*forgotten.get(setting, []), Command(PROGRAM)]}
            forgotten["ExecStart"] = [*forgotten.get("ExecStart", []), started(main)]
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands=forgotten)
            go(main)
            await site.until(lambda: has_begun(main))
            await site.looked()
            assert site.quality() is Quality.LATE
            assert site.reasons() == (Reason.COMMAND_UNSEEN.text(member=SHOP),)

    run(test)


def test_reload_is_exact_after_a_restart_of_the_daemon_that_missed_nothing(site: Services) -> None:
    """The first look after the restart knows all processes that systemd states."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            go(main)
            await site.until(lambda: has_begun(main))
            site.watch.seen.keep(())
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            await site.looked()
            reload = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[started(reload)])
            go(reload)
            await site.until(lambda: has_begun(reload))
            await site.looked()
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

    run(test)


@pytest.mark.parametrize("of", ["watch", "connection", "missed reload", "call after it", "end after it"])
def test_service_stays_exact_after_a_daemon_reload_unless_a_command_was_missed(site: Services, of: str) -> None:
    """systemd forgets all processes of commands by it. The daemon may be restarted too."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            own = {"ExecStart": [started(main)], "ExecReload": [Command(PROGRAM)]}
            site.systemd.set(SHOP, Unit(site.inner(SHOP), commands=own, changed=7))
            go(main)
            await site.until(lambda: has_begun(main))
            await site.until(lambda: site.known_until() == 7)
            is_missed = of not in ("watch", "connection")
            if of != "watch":
                site.watch.seen.forget_all()
            forgotten = {"ExecStart": [Command(PROGRAM)], "ExecReload": [Command(PROGRAM)]}
            unit = Unit(site.inner(SHOP), commands=forgotten, changed=8 if of != "connection" else 7)
            if of == "call after it":
                reload = site.through(SHOP, "/bin/true")
                commands = forgotten | {"ExecReload": [started(reload)]}
                site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands=commands, changed=9)
                go(reload)
                await ended(reload)
            elif of == "end after it":
                main.kill()
                await ended(main)
                unit = replace(unit, active="failed", sub="failed")
            site.systemd.set(SHOP, unit)
            await site.looked()
            assert site.quality() is (Quality.LATE if is_missed else Quality.EXACT)
            assert site.reasons() == ((Reason.COMMAND_UNSEEN.text(member=SHOP),) if is_missed else ())

    run(test)


def test_reload_between_the_questions_of_the_watch_makes_the_service_late(
    site: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not reached, and a daemon-reload followed. The connection is new, so no job was reported."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            own = {"ExecStart": [started(main)], "ExecReload": [Command(PROGRAM)]}
            site.systemd.set(SHOP, Unit(site.inner(SHOP), commands=own, changed=7))
            go(main)
            await site.until(lambda: has_begun(main))
            await site.until(lambda: site.known_until() == 7)
            site.watch.seen.forget_all()
            systemd = await site.watch.connection()
            assert systemd is not None
            service = systemd.service

            async def later(name: str) -> Any:
                if name == SHOP:
                    site.systemd.units[SHOP] = replace(site.systemd.units[SHOP], changed=9)
                return await service(name)

            monkeypatch.setattr(systemd, "service", later)
            forgotten = {"ExecStart": [Command(PROGRAM)], "ExecReload": [Command(PROGRAM)]}
            site.systemd.set(SHOP, Unit(site.inner(SHOP), commands=forgotten, changed=7))
            await site.looked()
            assert (site.quality(), site.reasons()) == (Quality.LATE, (Reason.COMMAND_UNSEEN.text(member=SHOP),))

    run(test)


def test_start_during_a_halt_of_the_daemon_makes_the_service_late(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            assert site.quality() is Quality.EXACT
            await site.end(main)
            other = site.through(SHOP, "/bin/true")
            go(other)
            other.wait(60)  # the event loop stands still, as if the daemon was stopped
            again = await site.begin()
            assert site.in_group(again) == SHOP
            await site.looked()
            site.host.manager.maintenance.tick()
            assert site.quality() is Quality.LATE

    run(test)


@pytest.mark.parametrize("cause", ["gone", "hang"])
def test_command_that_was_missed_makes_the_service_late_after_it_is_unloaded(site: Services, cause: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            one = site.through(SHOP, "/bin/true")
            site.state(SHOP, ExecStart=[started(one), Command(PROGRAM)])
            go(one)
            await ended(one)
            await site.looked()
            assert site.quality() is Quality.EXACT
            site.host.manager.maintenance.record_ends(SHOP)
            two = site.through(SHOP, "/bin/true")
            unit = Unit(site.inner(SHOP), commands={"ExecStart": [started(one, ended=True), started(two)]})
            site.systemd.units[SHOP] = unit
            if cause == "gone":
                connection = site.starts._connection
                site.starts._connection = no_connection
                go(two)
                await ended(two)
                site.starts._connection = connection
            else:
                go(two)
                two.wait(60)  # as above
            site.systemd.set(SHOP)
            await site.until(lambda: not site.claimed())
            assert site.quality() is Quality.LATE

    run(test)


@pytest.mark.parametrize("end", ["stop", "by itself"])
@pytest.mark.parametrize("is_missed", [True, False])
def test_reload_that_did_not_reach_the_daemon_makes_the_service_late_after_it_is_unloaded(
    site: Services, is_missed: bool, end: str
) -> None:
    """Its process and the service end before the watch looks. Nothing else tells a reload from a stop then."""

    async def test() -> None:
        async with site.serving("*.service"):
            begun = site.systemd.job(SHOP, 1)
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            go(main)
            await site.until(lambda: has_begun(main))
            begun()
            await site.looked()
            assert site.quality() is Quality.EXACT
            reload = (site.spawn if is_missed else site.through)(SHOP, "/bin/true")
            commands = {"ExecStart": [started(main)], "ExecReload": [started(reload)]}
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), active="reloading", commands=commands)
            reloaded = site.systemd.job(SHOP, 2, "reload")
            go(reload)
            await ended(reload)
            # No signal of the state active: systemd would send one only if it has the time before the end.
            reloaded()
            stopped = site.systemd.job(SHOP, 3, "stop") if end == "stop" else None
            main.terminate()
            await ended(main)
            site.systemd.set(SHOP, active="deactivating", sub="stop-sigterm")
            if stopped:
                stopped()
            site.systemd.set(SHOP, active="inactive", sub="dead")
            site.systemd.set(SHOP)
            await site.until(lambda: not site.claimed())
            assert site.quality() is (Quality.LATE if is_missed else Quality.EXACT)
            assert site.reasons() == ((Reason.COMMAND_UNSEEN.text(member=SHOP),) if is_missed else ())

    run(test)


@pytest.mark.parametrize("is_missed", [True, False])
def test_command_of_a_start_that_did_not_reach_the_daemon_makes_the_service_late_after_it_is_unloaded(
    site: Services, is_missed: bool
) -> None:
    """Type=oneshot with two commands, which systemd unloads when the second one has ended."""

    async def test() -> None:
        async with site.serving("*.service"):
            begun = site.systemd.job(SHOP, 1)
            one = site.through(SHOP, "/bin/true")
            unit = Unit(site.inner(SHOP), active="activating", sub="start")
            site.systemd.set(SHOP, replace(unit, commands={"ExecStart": [started(one), Command(PROGRAM)]}))
            go(one)
            await ended(one)
            await site.looked()  # no look may follow while the second one runs, which it would see
            two = (site.spawn if is_missed else site.through)(SHOP, "/bin/true")
            commands = {"ExecStart": [started(one, ended=True), started(two)]}
            site.systemd.units[SHOP] = replace(unit, commands=commands)
            go(two)
            await ended(two)
            begun()
            site.systemd.set(SHOP, active="inactive", sub="dead")
            site.systemd.set(SHOP)
            await site.until(lambda: not site.claimed())
            assert site.quality() is (Quality.LATE if is_missed else Quality.EXACT)
            assert site.reasons() == ((Reason.COMMAND_UNSEEN.text(member=SHOP),) if is_missed else ())

    run(test)


@pytest.mark.parametrize("is_missed", [True, False])
def test_automatic_restart_that_did_not_reach_the_daemon_makes_the_service_late(
    site: Services, is_missed: bool
) -> None:
    """Type=oneshot with Restart=on-failure: the service is being started when the job of the second start begins."""

    async def test() -> None:
        async with site.serving("*.service"):
            begun = site.systemd.job(SHOP, 1)
            one = site.through(SHOP, "/bin/false")
            unit = Unit(site.inner(SHOP), active="activating", sub="start")
            site.systemd.set(SHOP, replace(unit, commands={"ExecStart": [started(one)]}))
            go(one)
            await ended(one)
            begun()
            site.systemd.set(SHOP, sub="auto-restart")
            begun = site.systemd.job(SHOP, 2)
            two = (site.spawn if is_missed else site.through)(SHOP, "/bin/true")
            # A start that is too short for a look: what systemd states about it is not read.
            stated = one if is_missed else two
            site.systemd.units[SHOP] = replace(unit, commands={"ExecStart": [started(stated)]})
            go(two)
            await ended(two)
            site.systemd.set(SHOP, active="inactive", sub="dead")
            begun()
            site.systemd.set(SHOP)
            await site.until(lambda: not site.claimed())
            assert site.quality() is (Quality.LATE if is_missed else Quality.EXACT)

    run(test)


@pytest.mark.parametrize("is_missed", [True, False])
def test_reload_that_the_same_job_repeats_is_exact_unless_the_second_one_is_missed(
    site: Services, is_missed: bool
) -> None:
    """systemctl reload during a reload (src/core/job.c, job_install())."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            await site.looked()
            unit = Unit(site.inner(SHOP), active="reloading", sub="reload")
            reloaded = site.systemd.job(SHOP, 2, "reload")
            one = site.through(SHOP, "/bin/true")
            commands = {"ExecStart": [started(main)], "ExecReload": [started(one)]}
            site.systemd.set(SHOP, replace(unit, commands=commands))
            go(one)
            await ended(one)
            site.systemd.set(SHOP, active="active", sub="running")
            two = (site.spawn if is_missed else site.through)(SHOP, "/bin/true")
            stated = one if is_missed else two
            commands = {"ExecStart": [started(main)], "ExecReload": [started(stated)]}
            site.systemd.set(SHOP, replace(unit, commands=commands))
            go(two)
            await ended(two)
            reloaded()
            main.terminate()
            await ended(main)
            site.systemd.set(SHOP, active="inactive", sub="dead")
            site.systemd.set(SHOP)
            await site.until(lambda: not site.claimed())
            assert site.quality() is (Quality.LATE if is_missed else Quality.EXACT)

    run(test)


@pytest.mark.parametrize("is_missed", [True, False])
def test_start_that_is_restarted_by_the_same_job_is_exact_unless_the_second_one_is_missed(
    site: Services, is_missed: bool
) -> None:
    """systemctl restart changes a job that is still starting the service (src/core/job.c, job_install())."""

    async def test() -> None:
        async with site.serving("*.service"):
            begun = site.systemd.job(SHOP, 1)
            one = site.through(SHOP, "/bin/sleep", "600")
            unit = Unit(site.inner(SHOP), active="activating", sub="start")
            site.systemd.set(SHOP, replace(unit, commands={"ExecStart": [started(one)]}))
            go(one)
            await site.until(lambda: has_begun(one))
            site.systemd.set(SHOP, active="deactivating", sub="stop-sigterm")
            await site.end(one)
            two = (site.spawn if is_missed else site.through)(SHOP, "/bin/true")
            # A start that is too short for a look: what systemd states about it is not read.
            stated = one if is_missed else two
            site.systemd.set(SHOP, replace(unit, commands={"ExecStart": [started(stated)]}))
            go(two)
            await ended(two)
            begun()
            site.systemd.set(SHOP, active="inactive", sub="dead")
            site.systemd.set(SHOP)
            await site.until(lambda: not site.claimed())
            assert site.quality() is (Quality.LATE if is_missed else Quality.EXACT)

    run(test)


def test_service_with_a_command_after_its_end_is_exact_each_time(site: Services) -> None:
    """Type=oneshot with ExecStopPost=, which a timer starts again and again: its job ends after that command."""

    async def test() -> None:
        async with site.serving("*.service"):
            for number in (1, 2, 3):
                begun = site.systemd.job(SHOP, number)
                one = site.through(SHOP, "/bin/true")
                unit = Unit(site.inner(SHOP), active="activating", sub="start")
                commands = {"ExecStart": [started(one)], "ExecStopPost": [Command(PROGRAM)]}
                site.systemd.set(SHOP, replace(unit, commands=commands))
                go(one)
                await ended(one)
                two = site.through(SHOP, "/bin/true")
                commands = {"ExecStart": [started(one, ended=True)], "ExecStopPost": [started(two)]}
                unit = replace(unit, active="deactivating", sub="stop-post", commands=commands)
                site.systemd.set(SHOP, unit)
                go(two)
                await ended(two)
                begun()
                site.systemd.set(SHOP, active="inactive", sub="dead")
                site.systemd.set(SHOP)
                await site.until(lambda: site.host.get(SHOP).state.is_over)
                assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

    run(test)


@pytest.mark.parametrize("signals", ["before the job ends", "after it"])
def test_service_that_is_stopped_and_unloaded_at_once_is_exact(site: Services, signals: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            begun = site.systemd.job(SHOP, 1)
            main = await site.begin()
            begun()
            stopped = site.systemd.job(SHOP, 2, "stop")
            site.systemd.set(SHOP, active="deactivating", sub="stop-sigterm")
            main.terminate()
            await ended(main)
            if signals == "after it":
                stopped()
            site.systemd.set(SHOP, active="inactive", sub="dead")
            if signals != "after it":
                stopped()
            site.systemd.set(SHOP)
            await site.until(lambda: not site.claimed())
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

    run(test)


def test_reload_after_the_statement_of_systemd_is_exact(site: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[Command(PROGRAM)])
            go(main)
            await site.until(lambda: has_begun(main))
            one = site.through(SHOP, "/bin/true")
            watch = site.watch
            service: Callable[..., Awaitable[Service | None]] = watch._service
            done: list[int] = []

            async def slow(systemd: Systemd, key: str) -> Service | None:
                found = await service(systemd, key)
                if key == SHOP and found and one.poll() is not None and not done:
                    assert found.commands[-1].pid == one.pid
                    done.append(1)
                    two = site.through(SHOP, "/bin/sleep", "600")
                    site.systemd.units[SHOP] = Unit(
                        site.inner(SHOP), commands={"ExecStart": [started(main)], "ExecReload": [started(two)]}
                    )
                    go(two)
                    await site.until(lambda: has_begun(two))
                return found

            monkeypatch.setattr(watch, "_service", slow)
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[started(one)])
            await site.looked()
            go(one)
            await ended(one)
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
            site.state(SHOP, ExecStart=[started(main)], ExecReload=[started(one, ended=True)])
            await site.until(lambda: done)
            await site.looked()
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

    run(test)


def test_start_before_the_statement_of_systemd_is_exact(site: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins in a look, and its job ends before the statement."""

    async def test() -> None:
        async with site.serving("*.service"):
            one = await site.begin()
            await site.looked()
            await site.end(one)
            two = site.through(SHOP, "/bin/sleep", "600")
            watch = site.watch
            service: Callable[..., Awaitable[Service | None]] = watch._service
            done: list[int] = []

            async def slow(systemd: Systemd, key: str) -> Service | None:
                if key == SHOP and not done:
                    done.append(1)
                    site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands={"ExecStart": [started(two)]})
                    end = site.systemd.job(SHOP, 1)
                    go(two)
                    await site.until(lambda: has_begun(two))
                    end()
                return await service(systemd, key)

            monkeypatch.setattr(watch, "_service", slow)
            site.systemd.set(SHOP, active="activating", sub="auto-restart")
            await site.until(lambda: done)
            await site.looked()
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

    run(test)


def test_start_after_the_statement_of_systemd_is_exact(site: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            one = await site.begin()
            await site.looked()
            await site.end(one)
            two = site.through(SHOP, "/bin/sleep", "600")
            watch = site.watch
            service: Callable[..., Awaitable[Service | None]] = watch._service
            done: list[int] = []

            async def slow(systemd: Systemd, key: str) -> Service | None:
                found = await service(systemd, key)
                if key == SHOP and found and not done:
                    assert found.commands[-1].pid == one.pid
                    done.append(1)
                    site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands={"ExecStart": [started(two)]})
                    go(two)
                    await site.until(lambda: has_begun(two))
                return found

            monkeypatch.setattr(watch, "_service", slow)
            ended_one = {"ExecStart": [started(one, ended=True)]}
            site.systemd.set(SHOP, commands=ended_one, active="activating", sub="auto-restart")
            await site.until(lambda: done)
            await site.looked()
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

    run(test)


@pytest.mark.parametrize("when", ["after the list", "after the check", "before the release"])
def test_service_that_is_started_again_during_a_look_continues(
    site: Services, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            await site.looked()
            await site.end(main)
            again = site.through(SHOP, "/bin/sleep", "600")
            watch, done = site.watch, list[int]()

            async def start() -> None:
                done.append(1)
                site.state(SHOP, ExecStart=[started(again)])
                go(again)
                await site.until(lambda: has_begun(again))

            systemd = await watch.connection()
            assert systemd is not None
            units, check_end = systemd.units, watch._check_end

            async def slow_units(patterns: list[str]) -> Any:
                found = await units(patterns)
                if when == "after the list" and not done and any(one.name == SHOP and one.has_ended for one in found):
                    await start()
                return found

            async def slow_check(systemd: Systemd, key: str, *, is_loaded: bool) -> None:
                await check_end(systemd, key, is_loaded=is_loaded)
                if key == SHOP and not done:
                    await start()

            call = watch._call

            async def slow_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                if function is release and not done:
                    await start()
                return await call(function, *args, **kwargs)

            monkeypatch.setattr(systemd, "units", slow_units)
            monkeypatch.setattr(watch, "_call", slow_call)
            if when == "after the check":
                monkeypatch.setattr(watch, "_check_end", slow_check)
            site.systemd.set(SHOP, active="inactive", sub="dead")
            await site.until(lambda: done and has_begun(again))
            await site.looked()
            workload = site.host.get(SHOP)
            assert (workload.generation, workload.is_claimed_by(SYSTEMD)) == (1, True)
            assert (site.in_group(again), site.quality(), site.reasons()) == (SHOP, Quality.EXACT, ())

    run(test)


@pytest.mark.parametrize("setting", ["ExecCondition", "ExecStartPre", "ExecStartPost", "ExecReload", "ExecStop"])
def test_service_with_a_command_that_does_not_run_through_the_program_is_late(site: Services, setting: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], **{setting: [Command("/bin/true")]})
            go(main)
            await site.until(lambda: has_begun(main))
            assert site.in_group(main) == SHOP
            assert site.quality() is Quality.LATE
            assert f"systemd runs /bin/true ({setting}=)" in site.reasons()[0]

    run(test)


@pytest.mark.parametrize(
    ("setting", "when"),
    [
        ("ExecStartPre", "before"),
        *itertools.product(["ExecStartPost", "ExecReload", "ExecStopPost"], ["before", "later", "at the end"]),
    ],
)
def test_command_that_gave_up_makes_the_service_late(site: Services, setting: str, when: str) -> None:
    """Its program ran outside: for example, the daemon was hanging."""

    async def test() -> None:
        async with site.serving("*.service"):
            other = site.spawn(SHOP, "/bin/true")
            go(other)
            await ended(other)
            main = site.through(SHOP, "/bin/sleep", "600")
            missed = {setting: [started(other, ended=True)]}
            own = {"ExecStart": [started(main)]}
            site.state(SHOP, **own, **(missed if when == "before" else {setting: [Command(PROGRAM)]}))
            go(main)
            await site.until(lambda: has_begun(main))
            if when != "before":
                assert site.quality() is Quality.EXACT
            if when == "later":
                site.state(SHOP, **own, **missed)
            elif when == "at the end":
                main.kill()
                await ended(main)
                site.systemd.set(SHOP, commands={**own, **missed}, active="failed", sub="failed")
                await site.until(lambda: not site.claimed())
            await site.until(lambda: site.quality() is Quality.LATE)
            assert f"({setting}=) of {SHOP} was started outside the group" in " ".join(site.reasons())

    run(test)


@pytest.mark.parametrize("is_last", [False, True])
def test_start_that_gave_up_between_two_others_makes_the_service_late(site: Services, is_last: bool) -> None:
    """systemd forgets the processes of a start at the next one."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            assert site.quality() is Quality.EXACT
            await site.end(main)
            other = site.spawn(SHOP, "/bin/true")
            go(other)
            await ended(other)
            between = {"ExecStart": [started(other, ended=True)]}
            active, sub = ("failed", "failed") if is_last else ("activating", "auto-restart")
            site.systemd.set(SHOP, commands=between, active=active, sub=sub)
            await site.looked()
            if not is_last:
                again = site.through(SHOP, "/bin/sleep", "600")
                site.systemd.set(SHOP, commands={"ExecStart": [started(again)]}, active="active", sub="running")
                go(again)
                await site.until(lambda: site.in_group(again) == SHOP)
            await site.until(lambda: site.quality() is Quality.LATE)
            # A search while it ran may give the reason, or what systemd states.
            assert site.reasons()

    run(test)


@pytest.mark.parametrize("cause", ["restart of the daemon", "systemd hangs", "systemd is gone"])
def test_start_that_the_daemon_may_have_missed_makes_the_service_late(site: Services, cause: str) -> None:
    """Its commands ran outside, it has ended, and systemd states only those of the next start."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            assert site.quality() is Quality.EXACT
            await site.end(main)
            starts = site.starts
            if cause == "restart of the daemon":
                site.watch.seen.keep(())
            else:
                other = site.through(SHOP, "/bin/true")
                site.systemd.hangs = cause == "systemd hangs"
                connection = starts._connection
                if cause == "systemd is gone":
                    starts._connection = no_connection
                go(other)
                await ended(other)
                site.systemd.hangs = False
                starts._connection = connection
                assert await site.watch.connection() is not None
                await site.looked()
            again = site.through(SHOP, "/bin/sleep", "600")
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands={"ExecStart": [started(again)]})
            go(again)
            await site.until(lambda: site.quality() is Quality.LATE and site.in_group(again) == SHOP)
            assert "may have missed a start" in " ".join(site.reasons())

    run(test)


def test_stop_commands_of_a_service_that_is_not_loaded_any_more_are_not_known(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            for name, setting in ((SHOP, "ExecStop"), (OTHER, "ExecReload")):
                main = site.through(name, "/bin/sleep", "600")
                site.state(name, ExecStart=[started(main)], **{setting: [Command(PROGRAM)]})
                go(main)
                await site.until(lambda name=name: name in site.claimed())  # type: ignore[misc]
                assert site.quality(name) is Quality.EXACT
                main.kill()
                await ended(main)
                site.systemd.set(name)
            await site.until(lambda: not site.claimed())
            assert (site.quality(SHOP), site.quality(OTHER)) == (Quality.LATE, Quality.EXACT)
            assert "run at its stop" in site.reasons(SHOP)[0]

    run(test)


def test_two_commands_that_start_at_once_are_both_exact(site: Services) -> None:
    """As ExecStartPost= of a service with Type=simple does."""

    async def test() -> None:
        async with site.serving("*.service"):
            main, post = site.through(SHOP, "/bin/sleep", "600"), site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)], ExecStartPost=[started(post)])
            go(post)
            await site.until(lambda: site.claimed() == [SHOP])
            assert site.in_group(post) == SHOP
            assert site.quality() is Quality.EXACT
            go(main)
            await site.until(lambda: site.in_group(main) == SHOP)
            await site.looked()
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

    run(test)


def test_other_process_in_the_control_group_makes_the_service_late(site: Services, process: Any) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            other = process()
            main = site.through(SHOP, "/bin/sleep", "600")
            join(os.path.join(site.top, SHOP), other.pid)
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            assert site.quality() is Quality.LATE
            assert f"{SHOP} ran" in site.reasons()[0]
            assert "before it was put into the group" in site.reasons()[0]

    run(test)


def test_delegated_service_is_late(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.systemd.set(SHOP, Unit(site.inner(SHOP), delegate=True, commands={"ExecStart": [started(main)]}))
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            assert (site.in_group(main), site.quality()) == (SHOP, Quality.LATE)
            assert "Delegate=" in site.reasons()[0]

    run(test)


def test_process_that_joins_later_makes_the_service_late(site: Services, process: Any) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            join(os.path.join(site.top, SHOP), process().pid)
            site.sweep()
            assert site.quality() is Quality.LATE

    run(test)


def test_command_that_never_calls_is_assigned_by_the_watch(site: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.spawn(SHOP, "/bin/sleep", "600")
            long_ago = time.monotonic() - callers.COMMAND_GRACE_S
            site.state(SHOP, ExecStart=[Command(PROGRAM, main.pid, started=long_ago)])
            await site.until(lambda: site.claimed() == [SHOP])
            assert (site.in_group(main), site.quality()) == (SHOP, Quality.LATE)

    run(test)


def test_program_does_not_wait_for_a_systemd_that_hangs(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/echo", "ran")
            site.state(SHOP, ExecStart=[started(main)])
            await site.looked()
            site.systemd.hangs = True
            go(main)
            assert await output(main) == "ran\n"
            site.systemd.hangs = False
            assert site.host.ctx.store.get(SHOP) is None

    run(test)


async def no_connection() -> None:
    return None


async def call_without_systemd(site: Services) -> subprocess.Popen[str]:
    """Let a process call while systemd is not on the bus, and return it once the daemon has its call."""
    main = site.through(SHOP, "/bin/sleep", "600")
    await site.systemd.__aexit__()
    await site.until(lambda: site.watch._systemd is None)
    go(main)
    await site.until(lambda: SHOP in site.starts._locks or has_begun(main))
    return main


def test_service_that_starts_while_the_daemon_connects_to_systemd_is_exact(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = await call_without_systemd(site)
            assert not has_begun(main)
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands={"ExecStart": [started(main)]})
            await site.systemd.__aenter__()
            await site.until(lambda: site.claimed() == [SHOP])
            await site.until(lambda: has_begun(main))
            assert (site.in_group(main), site.quality(), site.reasons()) == (SHOP, Quality.EXACT, ())

    run(test)


@pytest.mark.parametrize("limit", ["_CONNECTION_WAIT_S", "_SOON_S"])
def test_service_does_not_wait_long_for_a_systemd_that_is_not_on_the_bus(
    site: Services, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            # As long after the end of the connection.
            monkeypatch.setattr(units, limit, 0.0)
            main = await call_without_systemd(site)
            # The program itself waits for up to 30 s.
            async with asyncio.timeout(20):
                await site.until(lambda: has_begun(main))
            assert site.host.ctx.store.get(SHOP) is None
            await site.systemd.__aenter__()

    run(test)


async def reply_of(site: Services, child: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the reply that a process got which sends a call, and prints the reply."""
    go(child)
    found: dict[str, Any] = json.loads(await output(child))
    return found


CALLING = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect("unit.socket")
connection.sendall(sys.argv[1].encode() + bytes(1))
data = b""
while not data.endswith(bytes(1)):
    data += connection.recv(1)
print(data[:-1].decode())
"""
ASSIGN = '{"method":"org.resctrlmon.Unit.AssignSelf"}'


def calling(site: Services, name: str, call: str = ASSIGN, **options: Any) -> subprocess.Popen[str]:
    """Start a process in the control group that sends a call without the program."""
    return site.spawn(name, "/usr/bin/python3", "-IS", "-c", CALLING, call, **options)


@pytest.mark.parametrize("user", [None, NOBODY])
def test_caller_that_systemd_has_not_started_is_refused(site: Services, user: int | None) -> None:
    """A worker of a watched service, a process below its control group, and processes elsewhere."""

    async def test() -> None:
        async with site.serving(SHOP, "user@*.service"):
            main = site.spawn(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)])
            denied, unknown = "org.resctrlmon.Manager.PermissionDenied", "org.resctrlmon.Manager.NotWatched"
            for name, below, error in (
                (SHOP, "", denied),
                (SHOP, "below", unknown),
                (SHOP, "libpod-payload-1", unknown),
                ("below", SHOP, denied),
                ("user@1000.service", f"app.slice/{SHOP}", unknown),
                ("session-1.scope", SHOP, unknown),
                (OTHER, "", unknown),
                ("session-1.scope", "", unknown),
                ("kubepods.slice", "cri-containerd-1.scope", unknown),
                ("user@1000.service", "", unknown),
            ):
                found = await reply_of(site, calling(site, name, below=below, user=user))
                assert found.get("error") == error, (name, below, found)
            assert site.claimed() == []
            assert site.in_group(main) == ""

    run(test)


@pytest.mark.parametrize("of", ["ended", "other program", "other service"])
def test_process_that_systemd_states_otherwise_is_refused(site: Services, of: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = calling(site, SHOP)
            command = started(main, ended=of == "ended", program="/bin/true" if of == "other program" else PROGRAM)
            if of == "other service":
                site.systemd.set(SHOP, Unit(site.inner(OTHER), commands={"ExecStart": [command]}))
            else:
                site.state(SHOP, ExecStart=[command])
            assert (await reply_of(site, main))["error"] == "org.resctrlmon.Manager.PermissionDenied"

    run(test)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('{"method":"org.resctrlmon.Unit.AssignSelf","parameters":{"key":"x"}}', "InvalidParameter"),
        ('{"method":"org.resctrlmon.Unit.AssignSelf","parameters":{"pid":1}}', "InvalidParameter"),
        ('{"method":"org.resctrlmon.Manager.List"}', "InterfaceNotFound"),
        ('{"method":"org.resctrlmon.Hook.Run"}', "InterfaceNotFound"),
        ('{"method":"org.resctrlmon.Unit.Other"}', "MethodNotFound"),
    ],
)
def test_socket_offers_no_other_method_and_no_parameter(site: Services, call: str, error: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = calling(site, SHOP, call)
            site.state(SHOP, ExecStart=[started(main)])
            assert (await reply_of(site, main))["error"] == f"org.varlink.service.{error}"

    run(test)


def test_caller_that_does_not_wait_is_not_exact(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.spawn(
                SHOP,
                "/usr/bin/python3",
                "-IS",
                "-c",
                "import socket, time; s = socket.socket(socket.AF_UNIX); s.connect('unit.socket'); "
                's.sendall(b\'{"method":"org.resctrlmon.Unit.AssignSelf","oneway":true}\' + bytes(1)); '
                "time.sleep(600)",
            )
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            # The call fails, because nobody waits; the watch finds the service after that.
            await site.until(lambda: site.claimed() == [SHOP])
            assert site.quality() is Quality.LATE

    run(test)


@pytest.mark.parametrize("of", ["process", "orphan", "child"])
def test_process_that_has_worked_before_its_call_is_late(
    site: Services, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Its first call did not reach the daemon, for example, and it executes the program again after its work."""
    monkeypatch.setattr(unit_starts, "_MOST_CPU_NS", 10**8)
    work = "i=0; while test $i -lt 200000; do i=$((i + 1)); done"
    script = {
        "process": work,
        "child": f"({work}) & wait",
        "orphan": f"(({work}; touch done) &); until test -e done; do sleep 0.01; done",
    }[of]

    async def test() -> None:
        async with site.serving("*.service"):
            program = str(site.folder / "resctrlmon-unit-exec")
            named = 'printf %s "(x)" >/proc/$$/comm'
            main = site.spawn(SHOP, "/bin/bash", "-c", f"{named}; {script}; echo; read _; exec {program} sleep 600")
            go(main)
            assert main.stdout is not None
            assert main.stdout.readline() == "\n"
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            assert site.quality() is Quality.LATE
            assert re.search(r"executed something before .* at least [0-9]+\.[0-9]{2} s", site.reasons()[0])

    run(test)


def test_process_that_calls_long_after_its_start_is_late(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.systemd.units[SHOP] = Unit(
                site.inner(SHOP), commands={"ExecStart": [Command(PROGRAM, main.pid, started=time.monotonic() - 60)]}
            )
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            assert site.quality() is Quality.LATE
            assert "CPU time before" in site.reasons()[0]

    run(test)


def test_flood_of_one_user_does_not_keep_services_of_others_from_the_group(site: Services) -> None:
    """Connections that send nothing, half a call, or do not read, of one user; and refused calls without end."""

    async def test() -> None:
        async with site.serving("*.service"):
            flood = (
                "import socket, time\n"
                "kept = []\n"
                "for number in range(200):\n"
                "    s = socket.socket(socket.AF_UNIX); s.connect('unit.socket')\n"
                '    data = b\'{"method":"org.resctrlmon.Unit.AssignSelf"}\' + bytes(1)\n'
                "    try: s.sendall([b'', data[:9], data][number % 3])\n"
                "    except OSError: pass\n"
                "    kept.append(s)\n"
                "print('full', flush=True)\n"
                "time.sleep(600)\n"
            )
            hostile = site.spawn(OTHER, "/usr/bin/python3", "-IS", "-c", flood, user=NOBODY)
            go(hostile)
            assert hostile.stdout is not None
            assert await asyncio.to_thread(hostile.stdout.readline) == "full\n"
            for user, name in ((NOBODY - 1, "third.service"), (None, SHOP)):
                main = site.through(name, "/bin/sleep", "600", user=user)
                site.state(name, ExecStart=[started(main)])
                go(main)
                await site.until(lambda main=main, name=name: site.in_group(main) == name)  # type: ignore[misc]
                assert site.quality(name) is Quality.EXACT

    run(test)


REPEATED = """
import socket
for _ in range(100):
    s = socket.socket(socket.AF_UNIX); s.connect("unit.socket")
    s.sendall(b'{"method":"org.resctrlmon.Unit.AssignSelf"}' + bytes(1)); data = b""
    while not data.endswith(bytes(1)): data += s.recv(1)
print(data[:-1].decode())
"""


@pytest.mark.parametrize("top", ["user@1000.service", "libpod-1.scope"])
def test_refused_callers_with_the_name_of_a_service_do_not_delay_it(site: Services, top: str) -> None:
    """A user, and the root of a container, can create a control group with any name below their own."""

    async def test() -> None:
        async with site.serving("*.service"):
            child = site.spawn(top, "/usr/bin/python3", "-IS", "-c", REPEATED, below=f"app.slice/{SHOP}", user=NOBODY)
            assert (await reply_of(site, child))["error"] == "org.resctrlmon.Manager.NotWatched"
            assert "GetUnit" not in site.systemd.calls
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            assert (site.in_group(main), site.quality()) == (SHOP, Quality.EXACT)

    run(test)


def test_refused_callers_are_forgotten(site: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_starts, "_REFUSALS_S", 0.0)

    async def test() -> None:
        async with site.serving("*.service"):
            for number in range(3):
                child = calling(site, f"shop@{number}.service", user=NOBODY)
                assert (await reply_of(site, child))["error"] == "org.resctrlmon.Manager.NotWatched"
            assert len(site.starts._refusals) == 1

    run(test)


def test_services_of_which_each_call_fails_are_forgotten(site: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection to a socket with Accept= has a service of its own."""
    monkeypatch.setattr(unit_starts, "_MOST_SEEN", 2)

    async def test() -> None:
        async with site.serving("*.service"):
            for number in range(5):
                child = calling(site, f"shop@{number}.service")
                assert (await reply_of(site, child))["error"] == "org.resctrlmon.Manager.NotWatched"
            assert len(site.watch.seen) <= 2

    run(test)


def test_refused_callers_of_one_service_do_not_reach_systemd_without_end(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.spawn(SHOP, "/bin/sleep", "600")
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands={"ExecStart": [started(main)]})
            child = site.spawn(SHOP, "/usr/bin/python3", "-IS", "-c", REPEATED, user=NOBODY)
            found = await reply_of(site, child)
            assert found["error"] == "org.resctrlmon.Manager.LimitExceeded"
            assert site.systemd.calls.count("GetAll") < 30

    run(test)
