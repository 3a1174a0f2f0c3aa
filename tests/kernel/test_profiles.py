# SPDX-License-Identifier: Apache-2.0
"""Profiles that annotations of Podman's containers choose, on the real kernel."""

from __future__ import annotations

import json

import pytest

from .host import BUSYBOX, TREE, WHERE, Host, parse_where
from .machine import Guest

ANNOTATION = "profile.resctrlmon.org"
PROFILES = """\
profiles:
  usual: {snapshot_ttl: 1h}
  quiet: {watch: none}
  gold: {class: gold}
  missing: {class: platinum}
  small: {memory_high: 64M}
rules:
  - {profile: quiet, container: quiet-*}
default_profile: usual
"""


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host with profiles and the class gold, on which the daemon and the hooks are enabled."""
    host = Host(installed_guest)
    host.make_root()
    host.enable_hooks()
    host.run(f"cat >/etc/resctrlmond/profiles.d/10-test.yaml <<'E'\n{PROFILES}E")
    host.start()
    host.run(f"mkdir {TREE}/gold")
    return host


def run(host: Host, options: str, command: str = WHERE) -> str:
    """Run a container with Podman, and return its output."""
    return host.out(f"podman run {options} --network none --rootfs {BUSYBOX} {command}", timeout=100)


def explained(host: Host, key: str) -> dict[str, str]:
    """Return the profile of a workload or container, and why it has that."""
    found: dict[str, str] = json.loads(host.out(f"resctrlctl profiles explain {key} --json"))
    return {name: found[name] for name in ("profile", "source")}


def test_container_sees_the_class_of_its_profile_from_its_first_instruction(host: Host) -> None:
    class_, group = parse_where(run(host, f"--rm --name moved --annotation {ANNOTATION}=gold"))
    assert class_ == "gold"
    assert len(group) == 64
    host.until(lambda: host.state(group) == "completed", "the container's end")
    assert group not in host.groups("gold")
    assert explained(host, group) == {"profile": "gold", "source": f"annotation {ANNOTATION}"}
    assert {total["quality"] for total in host.call("Read", key=group)["totals"]} == {"exact"}


def test_check_reports_a_class_that_does_not_exist(host: Host) -> None:
    path = "/etc/resctrlmond/profiles.d/10-test.yaml"
    said = host.out(f"resctrlctl profiles check {path} 2>&1; echo $?").splitlines()
    assert (said[-1], len(said)) == ("8", 3)
    problem = "profile missing names the class platinum, which does not exist"
    assert f"{path}:5: {problem}" in said[1]
    assert problem in host.out("journalctl -u resctrlmond --no-pager -q")
    assert "names the class gold, which" in host.out("journalctl -u resctrlmond --no-pager -q"), "it came later"


def test_class_that_does_not_exist_is_reported_and_the_container_runs(host: Host) -> None:
    class_, group = parse_where(run(host, f"--rm --annotation {ANNOTATION}=missing"))
    assert (class_, len(group)) == ("/", 64)
    assert "its profile missing names the class platinum: there is no such class" in host.out(
        "journalctl -u resctrlmond"
    )


def test_annotation_for_the_container_overrides_the_other_one(host: Host) -> None:
    options = f"--rm --name app --annotation {ANNOTATION}=quiet --annotation {ANNOTATION}/app=gold"
    assert parse_where(run(host, options))[0] == "gold"


def test_scope_of_a_container_has_the_memory_setting_of_its_profile(host: Host) -> None:
    container = run(host, f"-d --name small --annotation {ANNOTATION}=small", "sleep 600")
    scope = f"libpod-{container}.scope"
    high = f"cat $(find /sys/fs/cgroup -type d -name {scope})/memory.high"
    host.until(lambda: host.out(high) == str(64 << 20), "the memory setting of its profile")
    assert host.out(f"systemctl show -P MemoryHigh {scope}") == str(64 << 20)
    host.run("podman rm -f -t 0 small", timeout=100)
    host.until(lambda: host.state(container) == "completed", "the container's end")
    host.until(lambda: host.out("ls /run/resctrlmond/unit-memory.json || true") == "", "the end of the record")


def test_container_that_is_not_watched_is_listed_with_the_rule(host: Host) -> None:
    container = run(host, "-d --name quiet-1", "sleep 600")
    pid = host.out("podman inspect quiet-1 --format '{{.State.Pid}}'", timeout=100)
    assert host.membership(pid) == ("/", "")
    assert host.state(container) == ""
    (listed,) = host.call("ListUnwatched")["containers"]
    assert (listed["id"], listed["name"], listed["profile"]) == (container, "quiet-1", "quiet")
    assert explained(host, "quiet-1")["source"].startswith("rule at /etc/resctrlmond/profiles.d/10-test.yaml:")
    host.run("podman rm -f -t 0 quiet-1", timeout=100)
    assert host.call("ListUnwatched")["containers"] == []


def test_empty_annotation_opts_out_and_an_unknown_one_gets_the_default(host: Host) -> None:
    class_, group = parse_where(run(host, f"--rm --name quiet-2 --annotation {ANNOTATION}="))
    assert (class_, len(group)) == ("/", 64), "the rule does not apply"
    assert explained(host, group) == {"profile": "", "source": f"annotation {ANNOTATION} is empty"}
    _, group = parse_where(run(host, f"--rm --name quiet-3 --annotation {ANNOTATION}=glod"))
    assert explained(host, group)["profile"] == "usual"
    log = host.out("journalctl -u resctrlmond")
    assert f"{group}: annotation {ANNOTATION} names the profile 'glod', which does not exist" in log
