# SPDX-License-Identifier: Apache-2.0
"""The verb doctor on a real machine: each fault is named with its remedy, and the remedy removes the finding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .cri.containerd import TRIXIE
from .host import BUSYBOX, RUN, SOCKET, TREE, Host
from .machine import Guest

HOOKS = "/usr/share/containers/oci/hooks.d"
THRESHOLD = f"{TREE}/info/L3_MON/max_threshold_occupancy"
UNITS = "resctrlmond.socket resctrlmond.service"
# Sets the name of the process, as a program of that name has it.
PQOS = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'pqos'); time.sleep(3600)"


@pytest.fixture(scope="module")
def machine(installed_guest: Guest) -> Host:
    """Return a host on which the daemon runs and starts at boot, and Podman calls the hook."""
    host = Host(installed_guest)
    host.run("systemctl enable resctrlmond")
    host.start()
    host.run("resctrlctl hooks enable")
    assert faults(host) == []
    return host


@pytest.fixture
def host(machine: Host) -> Iterator[Host]:
    """Yield the host, and check that it has no fault after the test: each test repairs what it breaks."""
    yield machine
    assert faults(machine) == []


def findings(host: Host, command: str = "resctrlctl doctor --json=short") -> list[dict[str, Any]]:
    """Return all findings, and check the exit status against the worst."""
    done = host.run(command, check=False, timeout=100)
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == {"ok": 0, "note": 0, "warning": 8, "error": 9}[report["worst"]]
    found: list[dict[str, Any]] = report["findings"]
    return found


def faults(host: Host, check: str = "") -> list[dict[str, Any]]:
    """Return the warnings and errors, or those of one check."""
    return [
        each for each in findings(host) if each["severity"] in ("warning", "error") and check in ("", each["check"])
    ]


def repair(host: Host, fault: dict[str, Any], timeout: float = 100.0) -> None:
    """Run the first line of the remedy."""
    host.run(fault["fix"][0], timeout=timeout)


def until_no_problem(host: Host) -> None:
    """Wait until the daemon sees that resctrl is back."""
    host.until(lambda: host.call("Status")["problems"] == [], "the daemon to see resctrl")


def test_stock_kernel_has_no_joules_in_a_virtual_machine(machine: Host) -> None:
    (energy,) = (each for each in findings(machine) if each["check"] == "energy")
    assert energy["severity"] == "note"
    assert "virtual machine" in energy["what"]


def test_each_user_can_examine_the_machine(machine: Host) -> None:
    user = "setpriv --reuid 65534 --regid 65534 --clear-groups resctrlctl doctor --json=short"
    found = [each for each in findings(machine, user) if each["severity"] == "warning"]
    assert [each["check"] for each in found] == ["socket"]
    assert "usermod -aG resctrlmon-read nobody" in found[0]["fix"][0]
    for group in ("resctrlmon", "resctrlmon-read"):
        member = user.replace("--clear-groups", f"--groups {group}")
        assert [each for each in findings(machine, member) if each["severity"] == "warning"] == []


def test_resctrl_that_is_not_mounted(host: Host) -> None:
    host.unmount()
    (fault,) = faults(host, "mount")
    assert fault["severity"] == "error"
    assert fault["fix"] == ["systemctl enable --now sys-fs-resctrl.mount"]
    repair(host, fault)
    until_no_problem(host)


def test_filesystem_over_resctrl(host: Host) -> None:
    host.run(f"mount -t tmpfs tmpfs {TREE}")
    (fault,) = faults(host, "mount")
    assert "tmpfs is mounted over" in fault["what"]
    repair(host, fault)
    until_no_problem(host)


def test_stopped_daemon_is_reported_and_stays_stopped(host: Host) -> None:
    host.run("systemctl stop resctrlmond.service")
    (fault,) = faults(host)
    assert (fault["check"], fault["severity"]) == ("daemon", "error")
    assert "inactive" in fault["what"]
    assert host.run("systemctl is-active resctrlmond.service", check=False).stdout.strip() == "inactive"
    repair(host, fault)


def test_failed_daemon_is_reported_with_the_time(host: Host) -> None:
    host.run("echo 'linger: maybe' >>/etc/resctrlmond/resctrlmond.yaml; systemctl restart resctrlmond", check=False)
    found = {each["check"]: each for each in faults(host)}
    assert found.keys() == {"configuration", "daemon"}
    assert "/etc/resctrlmond/resctrlmond.yaml:" in found["configuration"]["what"]
    assert "failed at" in found["daemon"]["what"]
    host.run("sed -i '$d' /etc/resctrlmond/resctrlmond.yaml")
    host.run(found["daemon"]["fix"][-1])


def test_missing_socket(host: Host) -> None:
    host.run(f"rm {SOCKET}")
    (fault,) = faults(host)
    assert fault["check"] == "socket"
    repair(host, fault)


def test_socket_without_permission_for_its_group(host: Host) -> None:
    host.run(f"chmod 0600 {SOCKET}")
    (fault,) = faults(host)
    assert (fault["check"], fault["severity"]) == ("socket", "warning")
    repair(host, fault)


def test_hook_file_that_names_a_missing_program(host: Host) -> None:
    host.run("mv /usr/libexec/resctrlmon-oci-hook /usr/libexec/saved")
    (fault,) = faults(host)
    assert (fault["check"], fault["severity"]) == ("hooks", "error")
    assert "/usr/libexec/resctrlmon-oci-hook, which is not an executable program" in fault["what"]
    assert "no container starts" in fault["why"]
    repair(host, fault)
    assert faults(host) == []
    host.run("mv /usr/libexec/saved /usr/libexec/resctrlmon-oci-hook")  # as an installation does
    (disabled,) = (each for each in findings(host) if each["check"] == "hooks" and each["fix"])
    assert disabled["fix"] == ["resctrlctl hooks enable"]
    repair(host, disabled)
    assert [each["severity"] for each in findings(host) if each["check"] == "hooks"] == ["ok"]


def test_invalid_hook_file_stops_podman(host: Host) -> None:
    host.make_root()
    host.run(f"echo '{{' >{HOOKS}/broken.json")
    run = f"podman run --rm --network none --rootfs {BUSYBOX} true"
    assert host.run(run, check=False, timeout=200).returncode != 0
    (fault,) = faults(host)
    assert f"{HOOKS}/broken.json is not a hook file: line 2" in fault["what"]
    repair(host, fault)
    host.run(run, timeout=200)


def test_containerd_without_nri(host: Host) -> None:
    host.guest.write("/etc/containerd/config.toml", TRIXIE.config.partition('[plugins."io.containerd.nri')[0])
    host.run("systemctl start containerd", timeout=100)
    (fault,) = faults(host)
    assert (fault["check"], fault["severity"]) == ("nri", "warning")
    assert fault["fix"][0] == "/etc/containerd/config.toml: add:"
    snippet = "\n".join(fault["fix"][1:-1])
    host.run(f"printf '%s\\n' '{snippet}' >>/etc/containerd/config.toml && {fault['fix'][-1]}", timeout=100)
    (fault,) = faults(host)
    assert "resctrlmon-nri.service is inactive" in fault["what"]
    repair(host, fault)
    assert faults(host) == []
    host.run("systemctl disable --now resctrlmon-nri containerd; rm -f /etc/containerd/config.toml", timeout=100)


def test_rmids_that_foreign_groups_use_up(host: Host) -> None:
    host.run(f"cd {TREE}/mon_groups && i=0 && while mkdir taken$i 2>/dev/null; do i=$((i+1)); done", timeout=100)
    (fault,) = faults(host)
    assert (fault["check"], fault["severity"]) == ("rmids", "error")
    assert "by foreign groups of unknown programs" in fault["what"]
    repair(host, fault)
    assert faults(host) == []
    host.run(f"rmdir {TREE}/mon_groups/taken*", timeout=100)


def test_threshold_with_which_no_rmid_leaves_limbo(host: Host) -> None:
    host.run(f"echo 0 >{THRESHOLD}")
    (fault,) = faults(host)
    assert THRESHOLD in fault["what"]
    # The unit of this machine's counter is larger than the first number that the remedy tries.
    repair(host, fault)
    assert int(host.out(f"cat {THRESHOLD}")) > 0


def test_running_rival(host: Host) -> None:
    host.run(f'systemd-run --unit=rdt-service python3 -c "{PQOS}"')
    host.run("until pgrep -x pqos; do sleep 0.1; done")
    (fault,) = faults(host)
    assert (fault["check"], fault["fix"]) == ("rivals", ["systemctl stop rdt-service.service"])
    repair(host, fault)


def test_record_directory_gives_the_mark(host: Host) -> None:
    host.call("Create", key="own", claim="me")
    (rmids,) = (each for each in findings(host) if each["check"] == "rmids")
    assert "1 by groups of resctrlmond" in rmids["what"], host.out(f"stat {RUN}/records")
    host.call("Release", key="own", claim="me")
