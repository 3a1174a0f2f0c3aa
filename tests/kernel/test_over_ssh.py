# SPDX-License-Identifier: Apache-2.0
"""varlinkctl and resctrlctl ask the daemon of another host over ssh, with the default configuration of Debian's sshd.

The other host is the guest itself. The calling user cannot connect to its socket without ssh.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from .host import SOCKET, Host
from .machine import Completed, Guest

MAN = Path(__file__).parents[2] / "man"
FLEET = (MAN / "resctrlmond-fleet.7.scd").read_text(encoding="utf-8").splitlines()
# The commands and the messages are those of the pages.
CALL = next(line.removeprefix("$ ") for line in FLEET if line.startswith("$ varlinkctl call ssh-unix:"))
REFUSED = FLEET[(first := FLEET.index("channel 0: open failed: connect failed: open failed")) : first + 3]
CTL = (MAN / "resctrlctl.1.scd").read_text(encoding="utf-8").splitlines()
LIMITED = next(line for line in CTL if line.startswith("restrict,command=")).partition(" ssh-")[0]

# The name NODE of the pages, for the calling user. ssh asks nothing, as in a script.
CONFIG = """\
Host NODE
  HostName 127.0.0.1
  User reader
  BatchMode yes
"""
DROP_IN = "/etc/ssh/sshd_config.d/forwarding.conf"
# An emulated processor takes seconds for the keys and the session of a connection.
LONG = 150.0


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host with the daemon and sshd, three users for whom ssh has keys, and the calling user *desk*."""
    host = Host(installed_guest)
    host.start()
    # Each first session of a user would start a manager of its own, which takes ten seconds of an emulated processor.
    host.run("systemctl mask --runtime user@.service && systemctl start ssh")
    host.run("useradd -m desk && useradd -m -G resctrlmon-read reader && useradd -m stranger")
    host.run("install -d -m 700 ~desk/.ssh && ssh-keygen -q -t ed25519 -N '' -f ~desk/.ssh/id_ed25519")
    for user in ("reader", "stranger", "root"):
        host.run(f"install -d -m 700 -o {user} ~{user}/.ssh")
        host.run(f"install -m 600 -o {user} ~desk/.ssh/id_ed25519.pub ~{user}/.ssh/authorized_keys")
    host.guest.write("/home/desk/.ssh/config", CONFIG)
    host.run("sed 's/^/127.0.0.1 /' /etc/ssh/ssh_host_*_key.pub >~desk/.ssh/known_hosts && chown -R desk ~desk/.ssh")
    return host


def run(host: Host, command: str) -> Completed:
    """Run a command as the calling user."""
    return host.run(f"runuser -u desk -- {command}", check=False, timeout=LONG)


def test_varlinkctl_calls_the_daemon_of_another_host(host: Host) -> None:
    done = run(host, CALL.replace("call", "call -j", 1))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["since"] == host.call("Sums")["since"]
    here = run(host, CALL.replace("ssh-unix:NODE:", ""))
    assert here.returncode != 0
    assert "Permission denied" in here.stderr


def test_watch_of_another_host_ends_with_its_daemon(host: Host) -> None:
    watch = CALL.replace("call", "call --more -j", 1).replace(".Sums", ".Watch")
    host.run("touch /tmp/followed")
    followed = host.guest.start(f"runuser -u desk -- {watch} >/tmp/followed", LONG)
    host.until(lambda: '"listed":true' in host.out("cat /tmp/followed"), "the workloads that are present", LONG)
    host.call("Create", key="followed", claim="me")
    host.call("Release", key="followed", claim="me")
    host.until(lambda: '"ended"' in host.out("cat /tmp/followed"), "the end", LONG)
    host.run("systemctl stop resctrlmond.socket resctrlmond.service")
    assert followed.wait(check=False).returncode != 0
    done = run(host, CALL)
    assert (done.returncode, done.stderr.splitlines()) == (1, REFUSED)
    done = run(host, "resctrlctl --host NODE list")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("resctrlctl: cannot connect to NODE: resctrlmond is not running: ")
    host.start()


def test_only_root_of_the_other_host_may_write(host: Host) -> None:
    parameters = shlex.quote(json.dumps({"key": "made", "claim": "me"}))
    create = CALL.replace(".Sums '{}'", f".Create {parameters}")
    refused = run(host, create)
    assert refused.returncode != 0
    assert "PermissionDenied" in refused.stderr
    assert host.state("made") == ""
    done = run(host, create.replace("NODE", "root@NODE"))
    assert (done.returncode, done.stderr) == (0, "")
    assert host.state("made") == "idle"
    host.call("Release", key="made", claim="me")


def test_resctrlctl_asks_the_daemon_of_another_host(host: Host) -> None:
    host.call("Create", key="there", claim="me")
    listed = run(host, "resctrlctl --host NODE list -q")
    assert (listed.returncode, listed.stdout, listed.stderr) == (0, "there\n", "")
    host.call("Release", key="there", claim="me")


def test_user_in_neither_group_is_refused(host: Host) -> None:
    """The page says that sshd does not send the reason, and that resctrlctl prints it."""
    done = run(host, CALL.replace("NODE", "stranger@NODE"))
    assert (done.returncode, done.stderr.splitlines()) == (1, REFUSED)
    done = run(host, "resctrlctl --host stranger@NODE list")
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr.startswith(
        f"resctrlctl: cannot connect to stranger@NODE: access to {SOCKET} is denied. Only root"
    )


def test_only_varlinkctl_needs_an_sshd_that_forwards(host: Host) -> None:
    host.guest.write(DROP_IN, "AllowStreamLocalForwarding no\n")
    host.run("systemctl restart ssh")
    try:
        done = run(host, CALL)
        assert (done.returncode, done.stderr.splitlines()) == (1, REFUSED)
        done = run(host, "resctrlctl --host NODE sums")
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        host.run(f"rm {DROP_IN} && systemctl restart ssh")


def test_account_can_be_limited_to_the_bridge(host: Host) -> None:
    host.run(f"sed -i {shlex.quote(f's/^/{LIMITED} /')} ~reader/.ssh/authorized_keys")
    try:
        assert run(host, "resctrlctl --host NODE sums").returncode == 0
        assert run(host, CALL).returncode != 0
        other = run(host, "ssh NODE id")
        assert "uid=" not in other.output
    finally:
        host.run("sed -i 's/^restrict.* ssh-/ssh-/' ~reader/.ssh/authorized_keys")
