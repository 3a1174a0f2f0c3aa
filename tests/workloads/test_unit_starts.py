# SPDX-License-Identifier: Apache-2.0
"""Commands of services that call the daemon before they are executed: real processes, and a fake systemd on a bus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
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
from resctrlmond.daemon.unit_starts import UnitStarts
from resctrlmond.host.unit_exec import PROGRAM
from resctrlmond.resctrl.processes import children
from resctrlmond.resctrl.witness import SIMULATED_FOLDER
from resctrlmond.workloads.evidence import callers
from resctrlmond.workloads.figures.verdict import DROPPED, Verdict, verdict
from resctrlmond.workloads.groups import placement
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.release import release
from tests.api.private_bus import PrivateBus
from tests.hook.builds import ROOT
from tests.workloads.conftest import Host, drop_removed, join
from tests.workloads.fake_systemd import Command, Unit
from tests.workloads.test_unit_watch import Site, remove_below, run

SHOP, OTHER = "shop.service", "other.service"
# Some 0.1 s of CPU time.
BURN = "i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done"
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
                self.starts = UnitStarts(self.host.ctx, workers, watch.connection, watch.assignment)
                service.assign_unit = self.starts.assign
                server = unit_server(service)
                await server.start(listen(self.path, 0o666))
                try:
                    yield
                finally:
                    await server.close()

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

    async def begin_with_child(self, work: str = "sleep 600") -> tuple[subprocess.Popen[str], int]:
        """Start the service; return its process, which has called the daemon, and the one that it has started."""
        main = self.through(SHOP, "/bin/sh", "-c", f"read _; sh -c '{work}' & wait")
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

    def verdict(self, name: str = SHOP) -> Verdict:
        """Return the verdict on a service as a Read shows it, with what the witness has seen until now."""
        workload = self.host.get(name)
        seen = workload if workload.state.is_over else self.host.ctx.proofs.weighed(workload)
        return verdict(seen)

    def quality(self, name: str = SHOP) -> Quality:
        return self.verdict(name).quality

    def reasons(self, name: str = SHOP) -> tuple[str, ...]:
        return self.verdict(name).reasons

    def see(self) -> None:
        """Let the simulator see where processes are, before that changes again."""
        Path(self.host.ctx.tree.path, SIMULATED_FOLDER, "tasks").read_bytes()

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


@pytest.mark.parametrize("globs", [(), ("other.service",), ("*.service", f"!{SHOP}")])
def test_service_that_is_not_selected_any_more_has_not_ended(site: Services, globs: tuple[str, ...]) -> None:
    """units disable made it estimated, because its processes "ran on after its end"."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
            site.watch.configure(globs)
            await site.until(lambda: not site.claimed())
        ended = site.host.get(SHOP)
        assert (ended.state, ended.reason) == (State.COMPLETED, "no glob selects the unit any more")
        assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

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

    run(test)


@pytest.mark.parametrize("missed", range(-1, 6))
def test_service_is_late_by_what_each_command_used_that_did_not_call(site: Services, missed: int) -> None:
    """Two starts, the first of which ends with its control group. Systemd states one command at a time."""
    last = 5

    async def test() -> None:
        async with site.serving("*.service"):
            for number in range(last + 1):
                command = (site.spawn if number == missed else site.through)(SHOP, "/bin/sh", "-c", BURN)
                site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands={"ExecStart": [started(command)]})
                go(command)
                await ended(command)
                site.host.manager.maintenance.record_ends(SHOP)
                if number == 2:
                    site.see()
                    os.rmdir(os.path.join(site.top, SHOP))
            site.systemd.set(SHOP, active="inactive", sub="dead")
            await site.until(lambda: not site.claimed())
            if missed:
                check_missed(site, is_missed=missed >= 0)
            else:
                # The watch has put it into the group, after it had used less.
                assert site.quality() is Quality.LATE

    run(test)


def test_run_that_begins_in_the_control_group_of_the_last_one_is_exact(site: Services) -> None:
    """Type=oneshot with RemainAfterExit= and a reload: systemd keeps the control group."""

    async def test() -> None:
        async with site.serving("*.service"):
            for generation in (1, 2, 3):
                # Systemd's own code needs more than what is neglected, before it executes the program.
                program = str(site.folder / "resctrlmon-unit-exec")
                script = f"printf %s '(x)' >/proc/$$/comm; {BURN}; exec {program} /bin/sh -c '{BURN}'"
                command = site.spawn(SHOP, "/bin/sh", "-c", script)
                site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands={"ExecStart": [started(command)]})
                go(command)
                await ended(command)
                check_missed(site, is_missed=False)
                await site.end(command)
                site.systemd.set(SHOP, active="active", sub="exited")
                await site.until(lambda: not site.claimed())
                assert site.host.get(SHOP).generation == generation
                check_missed(site, is_missed=False)

    run(test)


def test_command_that_was_missed_before_a_run_in_the_same_control_group_makes_it_late(site: Services) -> None:
    """The use in earlier runs is not missing, and must not hide use since then."""

    async def test() -> None:
        async with site.serving("*.service"):
            for _ in range(2):
                command = site.through(SHOP, "/bin/sh", "-c", f"{BURN}; {BURN}; {BURN}")
                site.state(SHOP, ExecStart=[started(command)])
                go(command)
                await ended(command)
                await site.end(command)
                site.systemd.set(SHOP, active="active", sub="exited")
                await site.until(lambda: not site.claimed())
            missed = site.spawn(SHOP, "/bin/sh", "-c", BURN)
            go(missed)
            await ended(missed)
            await site.begin()
            assert site.host.get(SHOP).generation == 3
            check_missed(site, is_missed=True)

    run(test)


@pytest.mark.parametrize("is_moved", [True, False])
def test_process_that_calls_again_is_late_by_its_use_outside(site: Services, is_moved: bool) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            program = site.folder / "resctrlmon-unit-exec"
            main = site.through(SHOP, "/bin/sh", "-c", f"echo; read _; {BURN}; exec {program} /bin/sleep 600")
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            assert main.stdout is not None
            assert await asyncio.to_thread(main.stdout.readline) == "\n"
            assert site.in_group(main) == SHOP
            if is_moved:
                Path(site.host.mountpoint, "tasks").write_text(str(main.pid))
            go(main)
            await site.until(lambda: has_begun(main))
            assert site.in_group(main) == SHOP
            check_missed(site, is_missed=is_moved)

    run(test)


@pytest.mark.parametrize("missed", ["", "another command", "its own work"])
def test_process_that_calls_again_in_the_next_run_is_late_by_use_since_the_last(site: Services, missed: str) -> None:
    """Its use in the last run is not missing, and must not hide use since then."""

    async def test() -> None:
        async with site.serving("*.service"):
            program = site.folder / "resctrlmon-unit-exec"
            work = BURN if missed == "its own work" else ":"
            script = f"{BURN}; {BURN}; echo; read _; {work}; exec {program} /bin/sleep 600"
            main = site.through(SHOP, "/bin/sh", "-c", script)
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            assert main.stdout is not None
            assert await asyncio.to_thread(main.stdout.readline) == "\n"
            active = site.systemd.units[SHOP]
            site.systemd.set(SHOP, active="inactive")
            await site.until(lambda: not site.claimed())
            await site.looked()
            if missed == "another command":
                other = site.spawn(SHOP, "/bin/sh", "-c", BURN)
                go(other)
                await ended(other)
            # Without a signal: the watch would put its process into the group before its call.
            site.systemd.units[SHOP] = active
            go(main)
            await site.until(lambda: has_begun(main))
            assert (site.in_group(main), site.host.get(SHOP).generation) == (SHOP, 2)
            check_missed(site, is_missed=bool(missed))

    run(test)


def test_command_that_calls_in_the_group_hides_none_that_was_missed(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            missed = site.spawn(SHOP, "/bin/sh", "-c", BURN)
            go(missed)
            await ended(missed)
            program = site.folder / "resctrlmon-unit-exec"
            script = f"read _; {BURN}; {BURN}; exec {program} /bin/sleep 600"
            other = site.spawn(SHOP, "/bin/sh", "-c", script)
            Path(site.host.tree.full_path(site.host.get(SHOP).first.ref), "tasks").write_text(str(other.pid))
            stated = {"ExecStart": [started(main)], "ExecReload": [started(other)]}
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands=stated)
            for _ in range(2):
                go(other)
            await site.until(lambda: has_begun(other))
            check_missed(site, is_missed=True)

    run(test)


def check_missed(site: Services, *, is_missed: bool) -> None:
    """Check that a service is exact, or late by what BURN uses."""
    if not is_missed:
        assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
        return
    assert site.quality() is Quality.LATE
    found = re.findall(r"used .*?([0-9.]+) s of CPU time (?:outside|before)", " ".join(site.reasons()))
    assert found, site.reasons()
    assert 0.02 < max(map(float, found)) < 5, found


@pytest.mark.parametrize("stop", ["a start", "two starts"])
def test_start_whose_control_group_came_and_went_unseen_makes_the_service_late(site: Services, stop: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            await site.end(main)
            for _ in range(1 if stop == "a start" else 2):
                os.rmdir(os.path.join(site.top, SHOP))
                missed = site.spawn(SHOP, "/bin/sh", "-c", BURN)
                go(missed)
                await ended(missed)
                site.see()
            os.rmdir(os.path.join(site.top, SHOP))
            again = await site.begin()
            assert site.in_group(again) == SHOP
            await site.looked()
            check_missed(site, is_missed=True)

    run(test)


@pytest.mark.parametrize("starts", [("a", "a missed", "b"), ("a", "b", "a missed", "b"), ("a", "b", "a")])
def test_service_whose_slice_changes_is_late_by_a_start_that_did_not_call(
    site: Services, starts: tuple[str, ...]
) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            for start in starts:
                slice_, is_missed = f"{start[0]}.slice", start.endswith("missed")
                words = ("/bin/sh", "-c", BURN) if is_missed else ("/bin/true",)
                main = (site.spawn if is_missed else site.through)(slice_, *words, below=SHOP)
                unit = Unit(site.inner(f"{slice_}/{SHOP}"), commands={"ExecStart": [started(main)]})
                site.systemd.units[SHOP] = unit
                go(main)
                await ended(main)
                site.host.manager.maintenance.record_ends(SHOP)
                site.see()
                os.rmdir(os.path.join(site.top, slice_, SHOP))
                site.see()
            assert site.host.get(SHOP).generation == 1
            check_missed(site, is_missed="a missed" in starts)

    run(test)


def test_start_that_the_witness_dropped_before_the_daemon_looked_may_be_missing(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            await site.end(main)
            os.rmdir(os.path.join(site.top, SHOP))
            missed = site.spawn(SHOP, "/bin/sh", "-c", BURN)
            go(missed)
            await ended(missed)
            site.see()
            os.rmdir(os.path.join(site.top, SHOP))
            site.see()
            drop_removed(site.host, site.top)
            await site.begin()
            assert site.quality() is Quality.ESTIMATED
            assert DROPPED in " ".join(site.reasons())

    run(test)


@pytest.mark.parametrize("cause", ["no connection", "the daemon stands still"])
def test_command_that_gave_up_makes_the_service_late(site: Services, cause: str) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            other = site.through(SHOP, "/bin/sh", "-c", BURN)
            site.systemd.units[SHOP] = Unit(
                site.inner(SHOP), commands={"ExecStart": [started(main)], "ExecReload": [started(other)]}
            )
            if cause == "no connection":
                site.starts._connection = no_connection
                go(other)
                await ended(other)
            else:
                go(other)
                other.wait(60)  # the event loop stands still, as if the daemon was stopped
            check_missed(site, is_missed=True)

    run(test)


@pytest.mark.parametrize("calls", [False, True])
def test_process_that_looks_like_a_caller_is_left_alone_and_counted_outside(site: Services, calls: bool) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            other = (site.through if calls else site.spawn)(SHOP, "/bin/sh", "-c", BURN)
            stated = {"ExecStart": [started(main)], "ExecReload": [started(other)]}
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands=stated)
            site.sweep()
            assert site.in_group(other) == ""
            go(other)
            await ended(other)
            site.sweep()
            check_missed(site, is_missed=not calls)

    run(test)


def test_commands_in_a_control_group_below_that_of_the_service_are_counted(site: Services) -> None:
    """Systemd runs ExecReload= of a service with Delegate= there (systemd.resource-control(5))."""

    async def test() -> None:
        async with site.serving("*.service"):
            main = await site.begin()
            for is_missed in (False, True):
                other = (site.spawn if is_missed else site.through)(SHOP, "/bin/sh", "-c", BURN, below=".control")
                stated = {"ExecStart": [started(main)], "ExecReload": [started(other)]}
                site.systemd.units[SHOP] = Unit(site.inner(SHOP), delegate=True, commands=stated)
                go(other)
                await ended(other)
                check_missed(site, is_missed=is_missed)

    run(test)


@pytest.mark.parametrize("place", ["in the service", "elsewhere", "below the service"])
@pytest.mark.parametrize("what", ["process", "control group"])
def test_service_is_late_if_another_workload_takes_a_process_of_it(site: Services, place: str, what: str) -> None:
    """A process that the service has started in another control group, as a runtime does, is not a process of it."""

    async def test() -> None:
        async with site.serving("*.service"):
            is_idle = place == "elsewhere"
            work = "exec sleep 600" if is_idle else f"{BURN}; {BURN}; {BURN}; sleep 600"
            _main, child = await site.begin_with_child(work)
            if is_idle:
                # The simulator does not see the change of its control group, and what it has used must be charged.
                await site.until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
                site.see()
            below = os.path.join(
                site.top, {"elsewhere": "x.scope", "below the service": f"{SHOP}/x"}.get(place, SHOP)
            )
            os.makedirs(below, exist_ok=True)
            join(below, child)
            target: dict[str, Any] = {"pid": child} if what == "process" else {"cgroup": below}
            await asyncio.to_thread(assign, site.host.ctx, Assignment(key="client", owner="client", **target))
            # If its control group is taken, the service is released, and its group may be removed with the task.
            while site.host.tree.membership(child).group != "client":
                site.sweep("client")
                await asyncio.sleep(0.01)
            if is_idle:
                assert (site.quality(), site.reasons()) == (Quality.EXACT, ())
                return
            await site.until(lambda: site.quality() is not Quality.EXACT)
            # A service that has been released has ended before its process went on elsewhere.
            assert re.search("outside the group|ran on after its end", site.reasons()[0])

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


def test_service_with_a_command_after_its_end_is_exact_each_time(site: Services) -> None:
    """Type=oneshot with ExecStopPost=, which a timer starts again and again."""

    async def test() -> None:
        async with site.serving("*.service"):
            for _ in range(3):
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
                site.systemd.set(SHOP, active="inactive", sub="dead")
                site.systemd.set(SHOP)
                await site.until(lambda: site.host.get(SHOP).state.is_over)
                assert (site.quality(), site.reasons()) == (Quality.EXACT, ())

    run(test)


@pytest.mark.parametrize("when", ["after the list", "before the release"])
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
            units = systemd.units

            async def slow_units(patterns: list[str]) -> Any:
                found = await units(patterns)
                if when == "after the list" and not done and any(one.name == SHOP and one.has_ended for one in found):
                    await start()
                return found

            call = watch._call

            async def slow_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                if function is release and not done:
                    await start()
                return await call(function, *args, **kwargs)

            monkeypatch.setattr(systemd, "units", slow_units)
            monkeypatch.setattr(watch, "_call", slow_call)
            site.systemd.set(SHOP, active="inactive", sub="dead")
            await site.until(lambda: done and has_begun(again))
            await site.looked()
            workload = site.host.get(SHOP)
            assert (workload.generation, workload.is_claimed_by(SYSTEMD)) == (1, True)
            assert (site.in_group(again), site.quality(), site.reasons()) == (SHOP, Quality.EXACT, ())

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
            # Its claim is recorded before its tasks are moved.
            await site.until(lambda: site.claimed() == [SHOP] and f"{SHOP} ran" in site.reasons()[0])
            assert site.quality() is Quality.LATE
            assert "before it was put into the group" in site.reasons()[0]

    run(test)


def test_process_that_joins_later_makes_the_service_late(site: Services) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.through(SHOP, "/bin/sleep", "600")
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            go(site.spawn(SHOP, "/bin/sh", "-c", f"{BURN}; sleep 600"))
            await site.until(lambda: site.quality() is Quality.LATE)

    run(test)


def test_command_that_never_calls_is_assigned_by_the_watch(site: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            main = site.spawn(SHOP, "/bin/sleep", "600")
            monkeypatch.setattr(callers, "_GRACE_S", 0.1)
            site.state(SHOP, ExecStart=[started(main)])
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
            main = site.spawn(
                SHOP, "/bin/bash", "-c", f"{named}; {script}; echo; read _; exec {program} /bin/sleep 600"
            )
            go(main)
            assert main.stdout is not None
            assert main.stdout.readline() == "\n"
            site.state(SHOP, ExecStart=[started(main)])
            go(main)
            await site.until(lambda: site.claimed() == [SHOP])
            assert site.quality() is Quality.LATE
            assert "outside the group" in site.reasons()[0]

    run(test)


@pytest.mark.parametrize("seconds", [0, 60])
def test_process_that_calls_long_after_its_start_is_late(site: Services, seconds: int) -> None:
    async def test() -> None:
        async with site.serving("*.service"):
            program = str(site.folder / "resctrlmon-unit-exec")
            named = 'printf %s "(x)" >/proc/$$/comm'
            main = site.spawn(SHOP, "/bin/sh", "-c", f"{named}; {BURN}; echo; read _; exec {program} /bin/sleep 600")
            go(main)
            assert main.stdout is not None
            assert main.stdout.readline() == "\n"
            commands = {"ExecStart": [Command(PROGRAM, main.pid, started=time.monotonic() - seconds)]}
            site.systemd.units[SHOP] = Unit(site.inner(SHOP), commands=commands)
            go(main)
            await site.until(lambda: has_begun(main))
            check_missed(site, is_missed=seconds > 0)

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
                await site.until(lambda main=main: has_begun(main))  # type: ignore[misc]
                assert site.in_group(main) == name
                assert (site.quality(name), site.reasons(name)) == (Quality.EXACT, ())

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
