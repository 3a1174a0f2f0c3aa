# SPDX-License-Identifier: Apache-2.0
"""``resctrlmond --simulate``: the simulator outlives a killed daemon; interfaces and keys are those of a host."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resctrlmond.configuration.config import Config
from resctrlmond.daemon.simulated import config_below
from resctrlmond.daemon.startup import Exit
from resctrlmond.sim.fuse.mount import Simulation, unmount
from tests.api.private_bus import Client, PrivateBus
from tests.daemon.conftest import Machine, StartProcess, run_daemon
from tests.wait import wait_until

SESSION_BUS = "DBUS_SESSION_BUS_ADDRESS"


@pytest.fixture
def unmounted(tmp_path: Path) -> Iterator[Machine]:
    """Return a machine on which resctrl is not mounted, and unmount it at the end."""
    with contextlib.closing(Machine(tmp_path)) as machine:
        yield machine
    if os.path.ismount(tmp_path / "resctrl"):
        unmount(str(tmp_path / "resctrl"))


def is_mounted(machine: Machine) -> bool:
    return os.path.ismount(machine.top / "resctrl")


def test_simulator_and_groups_are_kept_over_a_kill_of_the_daemon(unmounted: Machine, process: StartProcess) -> None:
    unmounted.start()
    child = process()
    before = unmounted.call("Assign", key="kept", pid=child.pid, claim="me")["workload"]
    unmounted.kill()
    assert unmounted.groups() == ["kept"]
    assert unmounted.tasks("kept") == {child.pid}
    unmounted.start()
    assert unmounted.group("kept") == before
    assert unmounted.stop() == Exit.OK
    assert not is_mounted(unmounted), "the simulator still runs after its daemon stopped"
    assert not (unmounted.top / "simulator.pid").exists()


def test_daemon_that_stops_ends_its_simulator(unmounted: Machine) -> None:
    unmounted.start()
    assert is_mounted(unmounted)
    assert unmounted.stop() == Exit.OK
    assert not is_mounted(unmounted)
    assert not (unmounted.top / "simulator.pid").exists()
    assert "groups stay" not in unmounted.log.read_text()
    assert f"the simulator on {unmounted.top}/resctrl was ended, and its groups are gone" in unmounted.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_that_is_stopped_during_its_start_ends_its_simulator(
    unmounted: Machine, number: signal.Signals
) -> None:
    unmounted.spawn()
    assert unmounted.daemon is not None
    # Created right after the mount.
    while not (unmounted.top / "simulator.pid").exists():
        assert unmounted.daemon.poll() is None
    unmounted.daemon.send_signal(number)
    assert unmounted.daemon.wait(60) == Exit.OK
    assert not is_mounted(unmounted)
    assert not (unmounted.top / "simulator.pid").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_further_signals_during_the_stop_leave_no_simulator(unmounted: Machine, number: signal.Signals) -> None:
    """As from a user who presses Ctrl-C twice, or timeout(1), which signals the process and its group."""
    unmounted.start()
    assert unmounted.daemon is not None
    unmounted.daemon.send_signal(signal.SIGTERM)
    # At a second signal, Python's default action would end the process between the event loop and the simulator.
    wait_until(lambda: "stopped" in unmounted.log.read_text())
    while unmounted.daemon.poll() is None:
        unmounted.daemon.send_signal(number)
    assert unmounted.daemon.returncode == Exit.OK
    assert "Traceback" not in unmounted.log.read_text()
    assert not is_mounted(unmounted)
    assert not (unmounted.top / "simulator.pid").exists()


def test_simulation_of_root_without_the_unix_group_belongs_to_no_other_user(unmounted: Machine) -> None:
    """With the group nogroup, the user nobody could connect to the socket and read the records."""
    unmounted.config.write_text("group: no-such-group-here\n")
    unmounted.start()
    groups = {os.stat(path).st_gid for path in (unmounted.socket, unmounted.run / "records")}
    users = {user.pw_gid for user in pwd.getpwall()} | {group.gr_gid for group in grp.getgrall()}
    assert groups.isdisjoint(users)
    assert unmounted.stop() == Exit.OK


def test_second_daemon_that_is_refused_keeps_the_simulator_of_the_first(unmounted: Machine) -> None:
    unmounted.start()
    for option in ([], ["--release-all"]):
        code, stderr = run_daemon(*unmounted.command(*option)[3:])
        assert code == Exit.ALREADY_RUNNING
        assert "Use that daemon, or stop it with Ctrl-C or SIGTERM" in stderr
    assert unmounted.call("Status")["mounted"]


def test_daemon_does_not_end_the_simulator_of_another_process(unmounted: Machine) -> None:
    (unmounted.top / "resctrl").mkdir()
    # A file of an earlier daemon, with a pid that belongs to another process now.
    (unmounted.top / "simulator.pid").write_text(f"{os.getpid()} 1\n")
    with Simulation(str(unmounted.top / "resctrl")):
        unmounted.start()
        assert unmounted.stop() == Exit.OK
        assert is_mounted(unmounted)
        assert "keeps running, with its groups" in unmounted.log.read_text()


def test_stop_does_not_fail_if_the_file_of_the_simulator_cannot_be_read(unmounted: Machine) -> None:
    unmounted.start()
    unmounted.kill()  # the simulator stays
    unmounted.start()
    file = unmounted.top / "simulator.pid"
    pid = int(file.read_text().split()[0])
    file.unlink()
    file.mkdir()
    assert unmounted.stop() == 0
    assert is_mounted(unmounted)
    os.kill(pid, signal.SIGTERM)


def test_simulation_serves_dbus_on_the_session_bus(unmounted: Machine) -> None:
    folder = unmounted.top / "bus"
    folder.mkdir()
    bus = PrivateBus(folder)
    bus.start()

    async def list_groups() -> None:
        async with Client(bus.address) as client:
            await client.call("List", "", *())

    try:
        unmounted.start(**{SESSION_BUS: bus.address})
        unmounted.call("Create", key="seen", claim="me")
        asyncio.run(list_groups())
        assert unmounted.stop() == Exit.OK
    finally:
        bus.stop()


def test_daemon_whose_bus_name_is_taken_ends_as_a_second_daemon(unmounted: Machine) -> None:
    folder = unmounted.top / "bus"
    folder.mkdir()
    bus = PrivateBus(folder)
    bus.start()

    async def start_beside_another() -> tuple[int, str]:
        async with Client(bus.address) as other:
            await other.bus.request_name("org.resctrlmon1")
            return await asyncio.to_thread(run_daemon, *unmounted.command()[3:], **{SESSION_BUS: bus.address})

    try:
        code, stderr = asyncio.run(start_beside_another())
    finally:
        bus.stop()
    assert (code, "the name org.resctrlmon1 belongs to process" in stderr) == (Exit.ALREADY_RUNNING, True)


def test_simulation_has_every_key_of_the_configuration_except_paths_and_units(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SESSION_BUS, "unix:path=/none")
    paths = {"resctrl", "runtime_dir", "groups_dir", "varlink_socket"}
    other = {"str": "other", "int": 7, "float": 7.0, "bool": False}
    fields: dict[str, Any] = {
        field.name: other[type(value).__name__]
        for field in msgspec.structs.fields(Config)
        if (value := getattr(Config(), field.name)) is not None and field.name not in paths | {"units"}
    } | {"groups_mode": "0700"}
    config = config_below("/tmp/sim", Config(**fields, units=("*.service",)))
    assert "watches no units" in caplog.text
    assert config.units == (), "the units of the host are not in the simulation"
    assert {name: getattr(config, name) for name in fields} == fields
    assert {getattr(config, name).split("/")[2] for name in paths} == {"sim"}


def test_simulation_without_a_session_bus_does_not_use_dbus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SESSION_BUS, raising=False)
    assert not config_below("/tmp/sim", Config()).dbus
