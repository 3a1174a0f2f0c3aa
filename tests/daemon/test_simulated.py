# SPDX-License-Identifier: Apache-2.0
"""``resctrlmond --simulate``: the simulator outlives a killed daemon, and every interface and key is as on a host."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from resctrlmond.config import Config
from resctrlmond.daemon.simulated import config_below
from resctrlmond.daemon.startup import Exit
from resctrlmond.sim.fuse.mount import Simulation, unmount
from tests.api.private_bus import Client, PrivateBus
from tests.daemon.conftest import Machine
from tests.daemon.test_life import failing

SESSION_BUS = "DBUS_SESSION_BUS_ADDRESS"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Machine]:
    """A directory in which nothing is mounted yet; whatever a test leaves mounted is unmounted."""
    with contextlib.closing(Machine(tmp_path)) as made:
        yield made
    if os.path.ismount(tmp_path / "resctrl"):
        unmount(str(tmp_path / "resctrl"))


def is_mounted(machine: Machine) -> bool:
    return os.path.ismount(machine.top / "resctrl")


def test_a_killed_daemon_leaves_its_simulator_and_the_next_one_takes_up_its_groups(
    alone: Machine, process: Callable[[], subprocess.Popen[bytes]]
) -> None:
    alone.start()
    child = process()
    before = alone.call("Assign", key="kept", pid=child.pid, claim="me")["group"]
    alone.kill()
    assert alone.groups() == ["kept"]
    assert alone.tasks("kept") == {child.pid}
    alone.start()
    assert alone.group("kept") == before
    assert alone.stop() == Exit.OK
    assert not is_mounted(alone), "the simulator of a daemon that stopped is still there"
    assert not (alone.top / "simulator.pid").exists()


def test_a_daemon_that_stops_ends_its_simulator(alone: Machine) -> None:
    alone.start()
    assert is_mounted(alone)
    assert alone.stop() == Exit.OK
    assert not is_mounted(alone)
    assert not (alone.top / "simulator.pid").exists()
    assert "groups stay" not in alone.log.read_text()
    assert f"the simulator on {alone.top}/resctrl was ended, and its groups are gone" in alone.log.read_text()


def test_a_simulation_of_root_without_the_group_belongs_to_no_other_user(alone: Machine) -> None:
    """It belonged to nogroup: the user nobody could connect to the socket and read the records."""
    alone.config.write_text("group: no-such-group-here\n")
    alone.start()
    groups = {os.stat(path).st_gid for path in (alone.socket, alone.run / "records")}
    users = {user.pw_gid for user in pwd.getpwall()} | {group.gr_gid for group in grp.getgrall()}
    assert groups.isdisjoint(users)
    assert alone.stop() == Exit.OK


def test_a_second_daemon_that_may_not_start_leaves_the_simulator_of_the_first(alone: Machine) -> None:
    alone.start()
    for option in ([], ["--release-all"]):
        code, said = failing(*alone.command(*option)[3:])
        assert code == Exit.ALREADY_RUNNING
        assert "Use that daemon, or stop it with Ctrl-C or SIGTERM" in said
    assert alone.call("Status")["mounted"]


def test_a_simulator_that_somebody_else_mounted_stays(alone: Machine) -> None:
    (alone.top / "resctrl").mkdir()
    # Left by a daemon whose process id another process has by now.
    (alone.top / "simulator.pid").write_text(f"{os.getpid()} 1\n")
    with Simulation(str(alone.top / "resctrl")):
        alone.start()
        assert alone.stop() == Exit.OK
        assert is_mounted(alone)
        assert "keeps running, with its groups" in alone.log.read_text()


def test_a_simulation_serves_d_bus_on_the_session_bus(alone: Machine) -> None:
    folder = alone.top / "bus"
    folder.mkdir()
    bus = PrivateBus(folder)
    bus.start()

    async def version() -> None:
        async with Client(bus.address) as client:
            await client.call("List", "", *())

    try:
        alone.start(**{SESSION_BUS: bus.address})
        alone.call("Create", key="seen", claim="me")
        asyncio.run(version())
        assert alone.stop() == Exit.OK
    finally:
        bus.stop()


def test_a_daemon_whose_name_is_taken_on_the_bus_ends_as_one_that_is_the_second(alone: Machine) -> None:
    folder = alone.top / "bus"
    folder.mkdir()
    bus = PrivateBus(folder)
    bus.start()

    async def start_beside_another() -> tuple[int, str]:
        async with Client(bus.address) as other:
            await other.bus.request_name("org.resctrlmon1")
            return await asyncio.to_thread(failing, *alone.command()[3:], **{SESSION_BUS: bus.address})

    try:
        code, said = asyncio.run(start_beside_another())
    finally:
        bus.stop()
    assert (code, "the name org.resctrlmon1 belongs to process" in said) == (Exit.ALREADY_RUNNING, True)


def test_a_simulation_has_every_key_of_the_configuration_but_its_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SESSION_BUS, "unix:path=/none")
    paths = {"resctrl", "runtime_dir", "groups_dir", "varlink_socket"}
    other = {"str": "other", "int": 7, "float": 7.0, "bool": False}
    fields = {
        field.name: other[type(value).__name__]
        for field in msgspec.structs.fields(Config)
        if (value := getattr(Config(), field.name)) is not None and field.name not in paths
    } | {"groups_mode": "0700"}
    below = config_below("/tmp/sim", Config(**fields))
    assert {name: getattr(below, name) for name in fields} == fields
    assert {getattr(below, name).split("/")[2] for name in paths} == {"sim"}


def test_a_simulation_without_a_session_bus_goes_without_d_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SESSION_BUS, raising=False)
    assert not config_below("/tmp/sim", Config()).dbus
