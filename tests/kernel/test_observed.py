# SPDX-License-Identifier: Apache-2.0
"""Containers whose runtime owns their group or their class: crun with ``intelRdt`` in the configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from .host import TREE, WHERE, Host, parse_where
from .machine import Guest
from .machine.crun import LIBRARIES
from .machine.crun import crun as newest_crun

FOLDER = "/opt/crun"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host on which the daemon and the hooks are enabled."""
    host = Host(installed_guest)
    host.make_root()
    host.enable_hooks()
    host.start()
    return host


@pytest.fixture(scope="module")
def crun(host: Host) -> str:
    host.guest.put(newest_crun(), FOLDER)
    return f"LD_LIBRARY_PATH={FOLDER}/{LIBRARIES} {FOLDER}/usr/bin/crun"


@dataclass(frozen=True)
class Container:
    """A container that crun has started: its place at its first instruction, and its process."""

    host: Host
    crun: str
    name: str
    place: tuple[str, str]

    @property
    def pid(self) -> int:
        return int(json.loads(self.host.out(f"{self.crun} state {self.name}"))["pid"])

    def workload(self) -> dict[str, Any]:
        found: dict[str, Any] = self.host.call("Get", key=self.name)["workload"]
        return found

    def kill(self) -> None:
        """Kill it behind the back of crun, which removes the group when it deletes the container."""
        self.host.run(f"kill -9 {self.pid}")

    def delete(self) -> None:
        self.host.run(f"{self.crun} delete --force {self.name}")


def started(host: Host, crun: str, name: str, rdt: dict[str, Any]) -> Container:
    folder = host.bundle(name, f"{WHERE}; sleep 600", {}, f"/{name}")
    spec = json.loads(host.guest.read(f"{folder}/config.json"))
    spec["linux"]["intelRdt"] = rdt
    host.guest.write(f"{folder}/config.json", json.dumps(spec))
    host.run(
        f"{crun} run -d --bundle {folder} {name} </dev/null >/run/{name}.out 2>&1"
        f" || (cat /run/{name}.out >&2; exit 1)"
    )
    host.until(lambda: "mon:" in host.out(f"cat /run/{name}.out"), "the container's first line")
    return Container(host, crun, name, parse_where(host.out(f"cat /run/{name}.out")))


@pytest.mark.parametrize(
    ("name", "rdt", "class_"),
    [("own", {}, "own"), ("named", {"closID": "gold", "schemata": ["L3:0=3"]}, "gold")],
    ids=["a class of its own", "a named class"],
)
def test_group_that_crun_creates_is_observed_and_left_to_it(
    host: Host, crun: str, name: str, rdt: dict[str, Any], class_: str
) -> None:
    container = started(host, crun, name, rdt | {"enableMonitoring": True})
    path = f"{TREE}/{class_}/mon_groups/{name}"
    assert container.place == (class_, name)
    workload = container.workload()
    assert (workload["path"], workload["observed"], workload["baseline"]) == (path, True, "estimated")
    begun = host.run(f"stat -c '%i %g' {path}").stdout
    (line,) = [line for line in host.out("resctrlctl list").splitlines() if line.startswith(f"{name} ")]
    assert line.split()[1] == "observed"
    container.kill()
    host.until(lambda: host.state(name) == "completed", "the end values")
    assert any(file.endswith(".end") for file in host.snapshot(name))
    assert host.run(f"stat -c '%i %g' {path}").stdout == begun, "crun's group was changed"
    container.delete()
    assert host.run(f"find {TREE} -name {name}").stdout == ""
    # crun keeps a named class, and the guest has no further one.
    host.run(f"rmdir {TREE}/gold", check=False)


def test_container_that_is_killed_and_deleted_at_once_is_never_exact(host: Host, crun: str) -> None:
    """The daemon and crun race: the totals are those of the last reading, and unknown if there was none yet."""
    container = started(host, crun, "forced", {"enableMonitoring": True})
    container.delete()
    host.until(lambda: host.state("forced") in ("completed", "lost"), "the end values")
    totals = host.call("Read", key="forced")["totals"]
    assert {total["quality"] for total in totals} in ({"estimated"}, {"unknown"})
    assert host.run(f"find {TREE} -name forced").stdout == ""


def test_container_in_a_class_that_crun_creates_is_read_before_crun_removes_it(host: Host, crun: str) -> None:
    container = started(host, crun, "brief", {"schemata": ["L3:0=3"]})
    assert container.place == ("brief", "brief")
    assert not container.workload().get("observed")
    container.kill()
    host.until(lambda: host.state("brief") == "completed", "its end")
    container.delete()
    assert {total["quality"] for total in host.call("Read", key="brief")["totals"]} == {"exact"}
    assert host.run(f"find {TREE} -name brief").stdout == ""
