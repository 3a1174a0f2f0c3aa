# SPDX-License-Identifier: Apache-2.0
"""The Ansible role of the examples on a fresh Debian 13, with Debian's ansible-core and the packages of this tree.

Ansible runs on this machine, in a Debian 13 root, and reaches the guest through a connection plugin and this process.
"""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import tarfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.package import builder
from tests.package.build import packages

from .conftest import Guests
from .host import Host
from .install import PATIENCE
from .machine import Guest

# The first run downloads a Debian system to build the packages in, and another one with Ansible.
pytestmark = pytest.mark.timeout(1800)
ANSIBLE = Path(__file__).parents[2] / "packaging" / "examples" / "fleet" / "ansible"
PLUGIN = Path(__file__).parent / "guest_connection.py"
DEBS = ("python3-resctrlmond", "resctrlmond", "resctrlmond-witness", "resctrlmon-nri", "resctrlmon-exporter")
CONFIG = "/etc/resctrlmond/resctrlmond.d/fleet.yaml"
PROFILES = "/etc/resctrlmond/profiles.d/fleet.yaml"
SERVICES = ("resctrlmond", "resctrlmon-nri", "resctrlmon-exporter")
# Ansible's module installs python3-apt on a host that does not have it.
DOWNLOAD = """\
mkdir out; cd out
(apt-get -q update; apt-get -q download python3-apt python-apt-common libapt-pkg7.0 distro-info-data) >&2
dpkg-scanpackages --multiversion . >Packages
"""
PLAY = """\
mkdir out; cd in
export ANSIBLE_CONNECTION_PLUGINS=$PWD/plugins ANSIBLE_PIPELINING=1 ANSIBLE_NOCOLOR=1 ANSIBLE_HOST_KEY_CHECKING=0
for variables in variables-*.json; do
    echo "== $variables"
    ansible-playbook --inventory fleet, --connection guest --user root --extra-vars "@$variables" \\
        ansible/site.yml 2>&1 || :
done
"""


def root() -> Path:
    """Return a Debian 13 with ansible-core."""
    return builder.root("trixie", ["ansible-core"])


@contextmanager
def commands_for(guest: Guest) -> Iterator[str]:
    """Run in the guest what the connection plugin sends. Yields the name of an abstract socket."""
    name = f"resctrlmond-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        threading.Thread(target=_serve, args=(listener, guest), daemon=True).start()
        try:
            yield name
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, guest: Guest) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, connection.makefile("rwb") as stream:
            request = json.loads(stream.readline())
            stdin = base64.b64decode(request["stdin"])
            reply = guest.start(request["command"], 300.0, stdin).reply()
            outputs = {
                name: base64.b64encode(data).decode()
                for name, data in (("stdout", reply.stdout), ("stderr", reply.stderr))
            }
            stream.write(json.dumps({"status": reply.returncode, **outputs}).encode() + b"\n")


def play(place: Path, guest: Guest, *variables: dict[str, Any]) -> list[str]:
    """Apply the role once with each set of variables. Return the outputs."""
    place.mkdir()
    built = packages()
    debs = {name: next(built.glob(f"{name}_*.deb")) for name in DEBS}
    inside = io.BytesIO()
    with commands_for(guest) as name, tarfile.open(fileobj=inside, mode="w") as archive:
        archive.add(ANSIBLE, "in/ansible")
        for file in debs.values():
            archive.add(file, f"in/debs/{file.name}")
        _put(archive, "in/plugins/guest.py", PLUGIN.read_text().replace("@SOCKET@", name))
        for number, one in enumerate(variables):
            common = {
                "resctrlmond_debs": [f"/build/in/debs/{file.name}" for file in debs.values()],
                # The guest has mounted resctrl.
                "resctrlmond_mount": False,
            }
            _put(archive, f"in/variables-{number}.json", json.dumps(common | one))
        archive.close()
        output = builder.run(place, inside.getvalue(), PLAY, archive=root(), is_root=True, network=True)
    return output.split("== variables-")[1:]


def _put(archive: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    archive.addfile(entry, io.BytesIO(text.encode()))


def recap(output: str) -> dict[str, int]:
    """Return the numbers of Ansible's last line."""
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", output.partition("PLAY RECAP")[2])}


class Fleet(Host):
    """A host to which the role is applied with some variables."""

    def __init__(self, guest: Guest, place: Path) -> None:
        super().__init__(guest)
        self._place = place
        self._runs = 0

    def apply(self, **variables: Any) -> str:
        """Apply the role. Return the output."""
        self._runs += 1
        (output,) = play(self._place / str(self._runs), self.guest, variables)
        return output

    def processes(self) -> list[int]:
        """Return the main process of each service."""
        return [int(pid) for pid in self.out(f"systemctl show -P MainPID {' '.join(SERVICES)}").split()]

    def unwatched(self) -> list[str]:
        """Return the units that a profile leaves out, as the daemon states."""
        return [one["id"] for one in self.call("ListUnwatched")["containers"]]


@pytest.fixture
def fleet(guests: Guests, tmp_path: Path) -> Fleet:
    """A fresh Debian 13 with an archive that has what Ansible's module needs, and two services that run."""
    packages()
    host = Fleet(guests.start("cat"), tmp_path)
    (tmp_path / "download").mkdir()
    builder.run(tmp_path / "download", _empty(), DOWNLOAD, archive=root(), is_root=True, network=True)
    host.guest.put(tmp_path / "download" / "out", "/srv/apt")
    host.guest.write("/etc/apt/sources.list", "deb [trusted=yes] file:/srv/apt ./\n")
    host.run("rm -f /etc/apt/sources.list.d/*")
    for unit in SERVICES:
        host.guest.write(PATIENCE.replace("resctrlmond", unit), "[Service]\nTimeoutStartSec=300\n")
    for name in ("shop", "other"):
        host.run(f"systemd-run --unit={name} sleep 100000")
    return host


def test_only_changes_restart_services_and_are_live_and_wrong_files_are_refused(fleet: Fleet) -> None:
    wanted: dict[str, Any] = {
        "resctrlmond_config": {"units": ["shop.service"]},
        "resctrlmond_nri_config": {"namespaces": ["shop"]},
        "resctrlmond_exporter_listen": "127.0.0.1:10134",
    }
    output = fleet.apply(**wanted)
    assert (recap(output)["failed"], recap(output)["changed"] > 0) == (0, True), output
    fleet.until(lambda: fleet.state("shop.service") == "active", "the service that the configuration selects")
    before = fleet.processes()
    assert 0 not in before
    output = fleet.apply(**wanted)
    assert (recap(output)["failed"], recap(output)["changed"]) == (0, 0), output
    assert fleet.processes() == before

    output = fleet.apply(resctrlmond_config={"snapshot_tll": "1h"})
    assert recap(output)["failed"] == 1, output
    assert "unknown key 'snapshot_tll'. Did you mean snapshot_ttl?" in output
    assert "RUNNING HANDLER" not in output, output
    assert fleet.processes() == before

    # The file before the wrong one takes effect: the next run would not restart the daemon for it.
    wanted["resctrlmond_config"] = {"units": ["shop.service", "other.service"]}
    output = fleet.apply(**wanted | {"resctrlmond_nri_config": {"namespaces": "shop"}})
    assert recap(output)["failed"] == 1, output
    assert "namespaces is not a list" in output
    assert "RUNNING HANDLER [resctrlmond : Restart the services]" in output, output
    assert "- other.service" in fleet.out(f"cat {CONFIG}").splitlines()
    assert fleet.out("cat /etc/resctrlmond/nri.yaml").splitlines()[-1] == "- shop"
    fleet.until(lambda: fleet.state("other.service") == "active", "the service that is selected now")
    after = fleet.processes()
    assert not {0, *before} & {*after}

    # With all files as before, only the profiles are written.
    output = fleet.apply(**wanted, resctrlmond_profiles={"profiles": {"quiet": {"wach": "none"}}})
    assert recap(output)["failed"] == 1, output
    assert "unknown key 'wach'. Did you mean watch?" in output
    assert "RUNNING HANDLER" not in output, output
    assert "quiet" not in fleet.out(f"cat {PROFILES}")
    assert (fleet.processes(), fleet.unwatched()) == (after, [])

    rules = [{"profile": "quiet", "owner": "systemd", "unit": "other.service"}]
    wanted["resctrlmond_profiles"] = {"profiles": {"quiet": {"watch": "none"}}, "rules": rules}
    output = fleet.apply(**wanted)
    assert (recap(output)["failed"], recap(output)["changed"]) == (0, 2), output
    fleet.until(lambda: fleet.unwatched() == ["other.service"], "the profile to apply")
    assert fleet.state("shop.service") == "active"

    units = "resctrlmond.socket resctrlmond.service resctrlmon-nri.service resctrlmon-exporter.socket"
    assert fleet.out(f"systemctl is-active {units} resctrlmon-exporter.service").split() == ["active"] * 5
    assert fleet.out(f"systemctl is-enabled {units} resctrlmon-exporter.service").split() == ["enabled"] * 5
    assert ":910:" in fleet.out("getent group resctrlmon-read")
    get = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:10134/metrics').read().decode())"
    assert "resctrlmond_up 1" in fleet.out(f'python3 -c "{get}"', timeout=200)


def _empty() -> bytes:
    inside = io.BytesIO()
    tarfile.open(fileobj=inside, mode="w").close()
    return inside.getvalue()
