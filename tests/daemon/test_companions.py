# SPDX-License-Identifier: Apache-2.0
"""Companions of a daemon that runs as a process, with a manager object of systemd on a private bus."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.workloads.profiles.companions import unit_of
from tests.api.private_bus import PrivateBus
from tests.daemon.conftest import Machine, StartProcess, end
from tests.daemon.containers import CONTAINER, UID, execute
from tests.daemon.test_profiles_hook import Host, pod
from tests.daemon.test_watching import watching
from tests.wait import wait_until
from tests.workloads.fake_systemd import FakeSystemd

__all__ = ["pod"]  # a fixture

OTHER = "5e" * 32
PROFILES = """\
profiles:
  swap-idle-data:
    watch: container
    companion:
      command: [/usr/local/bin/memtierd, -c, "", -config, $COMPANION_DIR/config.yaml]
      template: |
        config: |
          - $CGROUP2_ABS_PATH
  track-working-set-size:
    watch: container
    companion: {command: [/usr/local/bin/memtierd, $CONTAINER, $POD_UID]}
"""


@pytest.fixture
def systemd() -> Iterator[FakeSystemd]:
    """A manager object of systemd, which a thread serves on a bus of its own."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started = threading.Event()

    with tempfile.TemporaryDirectory() as folder:
        bus = PrivateBus(Path(folder))
        bus.start()
        fake = FakeSystemd(bus.address)

        async def serve() -> None:
            async with fake:
                started.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        try:
            assert started.wait(60)
            yield fake
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
            bus.stop()


class Site:
    """A host with profiles that have companions. Its daemon finds systemd on the bus."""

    def __init__(self, machine: Machine, systemd: FakeSystemd) -> None:
        self.systemd = systemd
        self.machine = machine
        self.host = Host(machine)
        self.host.write(PROFILES)

    def start(self) -> None:
        self.machine.start(DBUS_SESSION_BUS_ADDRESS=self.systemd.address)

    def companion(self, key: str) -> dict[str, Any]:
        """Return the companion of a workload; {} for none."""
        found: dict[str, Any] = self.machine.group(key).get("companion", {})
        return found

    def until(self, key: str, state: str) -> None:
        wait_until(
            lambda: self.companion(key).get("state", "") == state, interval_s=0.02, timeout_s=60, failure=state
        )


@pytest.fixture
def site(machine: Machine, systemd: FakeSystemd) -> Site:
    found = Site(machine, systemd)
    found.start()
    return found


def test_containers_of_a_pod_have_the_companions_that_annotations_of_memtierd_select(site: Site, pod: Any) -> None:
    annotations = {
        "uid": UID,
        "namespace": "shop",
        "class.memtierd.nri.io": "swap-idle-data",
        "class.memtierd.nri.io/c1": "track-working-set-size",
        "class.memtierd.nri.io/c2": "",
    }
    ids = (CONTAINER, OTHER, "c2" * 32)
    children = [pod(id_) for id_ in ids]
    for number, (child, id_) in enumerate(zip(children, ids, strict=True)):
        site.host.start(child, id_, name=f"c{number}", **annotations)
    for key in (CONTAINER, OTHER):
        site.until(key, "running")
    assert site.companion(UID) == {}, "the pod only has the container without a profile"
    found = {name: properties["ExecStartEx"][0][1] for name, properties in site.systemd.transient}
    folder = f"{site.machine.run}/companions/{CONTAINER}"
    assert found == {
        unit_of(CONTAINER): ["/usr/local/bin/memtierd", "-c", "", "-config", f"{folder}/config.yaml"],
        unit_of(OTHER): ["/usr/local/bin/memtierd", "c1", UID],
    }
    text = Path(folder, "config.yaml").read_text()
    (path,) = [line.strip().removeprefix("- ") for line in text.splitlines() if "/sys/fs/cgroup" in line]
    assert str(children[0].pid) in Path(path, "cgroup.procs").read_text().split()
    assert "Companion: running" in site.host.ctl("profiles", "explain", CONTAINER)
    assert json.loads(site.host.ctl("list", "--json"))["usages"][0]["workload"]
    execute(children[0])
    end(children[0])
    wait_until(lambda: unit_of(CONTAINER) not in site.systemd.units, interval_s=0.02, timeout_s=60, failure="the end")
    assert unit_of(OTHER) in site.systemd.units


def test_companion_survives_a_kill_of_the_daemon(site: Site, init: StartProcess) -> None:
    child = init()
    site.host.start(child, profile="swap-idle-data")
    site.until(CONTAINER, "running")
    site.machine.kill()
    site.start()
    site.until(CONTAINER, "running")
    assert len(site.systemd.transient) == 1
    site.machine.kill()
    execute(child)
    end(child)
    site.start()
    wait_until(lambda: not site.systemd.units, interval_s=0.02, timeout_s=60, failure="the end of the companion")


def test_watch_reports_each_state_of_a_companion(site: Site, init: StartProcess) -> None:
    child = init()
    with watching(site.machine) as [watcher]:

        def until_last(*expected: str) -> None:
            def is_last() -> bool:
                workloads = [change["workload"] for change in watcher.of(CONTAINER)]
                states = [(of["state"], of.get("companion", {}).get("state", "")) for of in workloads]
                return states[-1:] == [expected]

            wait_until(is_last, failure=f"the watcher knows {watcher.of(CONTAINER)}, not {expected}")

        site.host.start(child, profile="swap-idle-data")
        until_last("active", "running")
        site.systemd.slow.add(unit_of(CONTAINER))
        execute(child)
        end(child)
        until_last("completed", "stopping")
        assert watcher.of(CONTAINER)[-1]["change"] == "changed"


def test_reload_applies_companions_to_running_containers(site: Site, init: StartProcess) -> None:
    site.host.write("profiles: {swap-idle-data: }")
    site.machine.reload()
    site.host.start(init(), profile="swap-idle-data")
    assert site.companion(CONTAINER) == {}
    site.host.write(PROFILES)
    site.machine.reload()
    site.until(CONTAINER, "running")
    site.host.write("profiles: {swap-idle-data: }")
    site.machine.reload()
    wait_until(lambda: not site.systemd.units, interval_s=0.02, timeout_s=60, failure="the end of the companion")


def test_file_of_another_user_changes_nothing(site: Site, init: StartProcess) -> None:
    site.host.start(init(), profile="swap-idle-data")
    site.until(CONTAINER, "running")
    os.chown(site.host.directory / "10.yaml", 65534, -1)
    site.machine.reload()
    problems = site.machine.call("Status")["problems"]
    assert any("a companion runs as root, and " in problem for problem in problems), problems
    assert site.companion(CONTAINER)["state"] == "running"


def test_simulation_without_a_bus_of_its_own_starts_no_companion(machine: Machine, init: StartProcess) -> None:
    host = Host(machine)
    host.write(PROFILES)
    machine.start(DBUS_SESSION_BUS_ADDRESS="", DBUS_SYSTEM_BUS_ADDRESS="unix:path=/dev/null")
    host.start(init(), profile="swap-idle-data")
    machine.reload()
    assert "companion" not in machine.group(CONTAINER)
    assert "companion" not in json.dumps(machine.call("Status")["problems"])
