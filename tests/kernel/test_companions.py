# SPDX-License-Identifier: Apache-2.0
"""Companions of Podman's containers, under the real systemd and with the real kernel."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path

import pytest

from .host import BUSYBOX, RUN, TREE, Host
from .machine import Guest

EXAMPLE = Path(__file__).parents[2] / "packaging" / "examples" / "memtierd.yaml"
PROFILES = """\
profiles:
  helped:
    companion:
      command: [/usr/local/bin/helper, $CGROUP2_ABS_PATH, $MON_GROUP_PATH, a  b;c, "100%n%%", $$HOME]
      restart: on-failure
  stubborn:
    companion: {command: [/usr/local/bin/stubborn]}
  missing:
    companion: {command: [/usr/local/bin/nothing]}
"""
# Each start adds a line with its arguments and its process to a file.
HELPER = r"""#!/bin/sh
{ printf '%s|' "$@"; echo $$; } >>starts
exec sleep 600
"""
# It fills the journal as fast as it can, and goes on after SIGTERM.
STUBBORN = "#!/bin/sh\ntrap '' TERM\nexec yes 'a line of the flood'\n"
# A stand-in for memtierd, which is in no Debian release.
MEMTIERD = '#!/bin/sh\ncp "$4" seen\nexec sleep 600\n'


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host with profiles that have companions, on which the daemon and the hooks are enabled."""
    host = Host(installed_guest)
    host.make_root()
    host.enable_hooks()
    for name, text in (("helper", HELPER), ("stubborn", STUBBORN), ("memtierd", MEMTIERD)):
        host.guest.write(f"/usr/local/bin/{name}", text)
        host.run(f"chmod 755 /usr/local/bin/{name}")
    host.guest.write("/etc/resctrlmond/profiles.d/10-test.yaml", PROFILES)
    host.guest.write("/etc/resctrlmond/profiles.d/20-memtierd.yaml", EXAMPLE.read_text(encoding="utf-8"))
    host.run("resctrlctl profiles check /etc/resctrlmond/profiles.d/10-test.yaml")
    host.start()
    return host


def start(host: Host, profile: str, annotation: str = "profile.resctrlmon.org") -> str:
    """Start a container with an annotation, and return its id."""
    options = f"-d --annotation {annotation}={profile} --network none --rootfs {BUSYBOX} sleep 600"
    return host.out(f"podman run {options}", timeout=100)


def companion(host: Host, container: str) -> dict[str, str]:
    """Return the companion as the daemon reports it; {} for none."""
    found: dict[str, str] = host.call("Get", key=container)["workload"].get("companion", {})
    return found


def until_state(host: Host, container: str, state: str) -> None:
    host.until(lambda: companion(host, container).get("state") == state, f"the companion to be {state}")


def starts(host: Host, container: str) -> list[str]:
    """Return the lines of the helper."""
    return host.run(f"cat {RUN}/companions/{container}/starts", check=False).stdout.splitlines()


def end(host: Host, container: str) -> None:
    """Remove a container, and wait until nothing of its companion is left."""
    host.run(f"podman rm -f -t 0 {container}", timeout=100)
    unit = f"resctrlmon-companion-{container}.service"
    host.until(lambda: host.out(f"systemctl show -P LoadState {unit}") == "not-found", "the end of the companion")
    host.until(lambda: not host.run(f"ls {RUN}/companions/{container}", check=False).stdout, "its files to be gone")


def test_companion_survives_the_daemon_and_ends_with_its_container(host: Host) -> None:
    container = start(host, "helped")
    until_state(host, container, "running")
    unit = companion(host, container)["unit"]
    host.until(lambda: len(starts(host, container)) == 1, "the helper")
    (line,) = starts(host, container)
    cgroup, group, *others, pid = line.split("|")
    assert others == ["a  b;c", "100%n%%", "$HOME"]
    assert group == f"{TREE}/mon_groups/{container}"
    found = host.out(f"cat $(find {cgroup} -name cgroup.procs)").split()
    assert any(host.membership(process) == ("/", container) for process in found)
    assert host.out(f"systemctl show -P MainPID {unit}") == pid
    assert host.membership(pid) == ("/", ""), "it is not measured as a part of the workload"
    properties = host.out(f"systemctl show -P Slice,MemoryMax,CPUQuotaPerSecUSec,TasksMax {unit}").split()
    assert sorted(properties) == sorted(["resctrlmon-companions.slice", str(256 << 20), "500ms", "64"])
    assert host.out(f"stat -c %a {RUN}/companions {RUN}/companions/{container}").split() == ["700", "700"]
    assert re.search(r"^ *Companion: +running$", host.out(f"resctrlctl show {container}"), re.MULTILINE)

    host.kill()
    until_state(host, container, "running")
    assert len(starts(host, container)) == 1
    assert host.out(f"systemctl show -P MainPID {unit}") == pid

    # systemd reads the unit again from the file that it wrote.
    host.run("systemctl daemon-reload", timeout=100)
    host.run(f"kill -9 {pid}")
    until_state(host, container, "starting")
    assert "it was killed by SIGKILL" in companion(host, container)["reason"]
    host.until(lambda: len(starts(host, container)) == 2, "the restart by systemd")
    again = starts(host, container)[1]
    assert again.rpartition("|")[0] == line.rpartition("|")[0]
    until_state(host, container, "running")
    end(host, container)
    assert host.run(f"test -e /proc/{again.rpartition('|')[2]}", check=False).returncode == 1


def test_companion_that_cannot_be_executed_fails_alone_and_is_gone_with_the_program(host: Host) -> None:
    container = start(host, "missing")
    until_state(host, container, "failed")
    assert companion(host, container)["reason"].startswith("systemd cannot execute its program")
    assert host.state(container) == "active"
    explained = json.loads(host.out(f"resctrlctl profiles explain {container} --json"))
    assert explained["companion"]["state"] == "failed"
    host.run("systemctl stop resctrlmond resctrlmond.socket")
    host.run("resctrlmond --release-all", timeout=100)
    assert host.out("systemctl list-units --all --no-legend 'resctrlmon-companion*'") == ""
    assert host.run(f"test -e {RUN}/companions", check=False).returncode == 1
    host.run("systemctl start resctrlmond.socket")
    host.start()
    host.run(f"podman rm -f -t 0 {container}", timeout=100)


def test_companion_that_floods_its_log_and_ignores_sigterm_harms_neither_workload_nor_daemon(host: Host) -> None:
    container = start(host, "stubborn")
    until_state(host, container, "running")
    unit = companion(host, container)["unit"]
    daemon, pid = host.pid(), host.out(f"systemctl show -P MainPID {unit}")
    watch = host.process(f"resctrlctl watch --json=short {container} >/run/watched")
    written = f"awk '/^wchar/ {{ print $2 }}' /proc/{pid}/io"
    host.until(lambda: int(host.out(written)) > 10_000 * len("a line of the flood\n"), "the flood", 200)
    assert companion(host, container)["state"] == "running"
    assert host.state(container) == "active"
    # 200 in 30 s, which journald raises with the free space of its file system.
    lines = int(host.out(f"journalctl -u {unit} -t stubborn -t yes -o cat | wc -l", timeout=200))
    assert 0 < lines < 5000, lines

    host.until(lambda: bool(host.out("cat /run/watched")), "the client that watches")
    end(host, container)

    def states() -> list[tuple[str, str]]:
        watched = [json.loads(line)["workload"] for line in host.out("cat /run/watched").splitlines()]
        return [(of["state"], of.get("companion", {}).get("state", "")) for of in watched]

    host.until(lambda: states()[-1] == ("completed", ""), "the last change")
    assert ("completed", "stopping") in states(), states()
    host.run(f"kill {watch}")
    ended = datetime.fromisoformat(host.call("Get", key=container)["workload"]["completedAt"])
    killed = f"journalctl -o json -u {unit} _PID=1 | grep 'SIGKILL' | head -n 1"
    at = int(json.loads(host.out(killed))["__REALTIME_TIMESTAMP"]) / 1e6
    assert ended.timestamp() < at, "the end of the workload waited for its companion"
    assert host.run(f"test -e /proc/{pid}", check=False).returncode == 1
    assert host.pid() == daemon


def test_example_for_memtierd_starts_it_for_an_annotation_of_its_plugin(host: Host) -> None:
    container = start(host, "swap-idle-data", "class.memtierd.nri.io")
    until_state(host, container, "running")
    seen = f"{RUN}/companions/{container}/seen"
    host.until(lambda: host.run(f"test -s {seen}", check=False).returncode == 0, "the stand-in for memtierd")
    text = host.out(f"cat {seen}")
    (cgroup,) = [line.strip().removeprefix("- ") for line in text.splitlines() if "/sys/fs/cgroup" in line]
    assert container in cgroup
    host.run(f"test -e {cgroup}/cgroup.procs")
    # With the daemon stopped, the end is found at its next start.
    host.run("systemctl stop resctrlmond resctrlmond.socket")
    host.run(f"podman rm -f -t 0 {container}", timeout=100)
    unit = f"resctrlmon-companion-{container}.service"
    assert host.out(f"systemctl is-active {unit}") == "active"
    host.run("systemctl start resctrlmond.socket")
    host.start()
    host.until(lambda: host.out(f"systemctl show -P LoadState {unit}") == "not-found", "the end of the companion")
    host.until(lambda: host.run(f"test -e {RUN}/companions", check=False).returncode == 1, "its files to be gone")
