# SPDX-License-Identifier: Apache-2.0
"""The guest has the properties that other tests need: a real resctrl, a normal systemd, correct results."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wait import wait_until

from .conftest import Guests, machine
from .install import PROJECT
from .machine import CommandError, CommandTimeoutError, Guest, GuestDiedError, cache
from .machine.tools import tool

RESCTRL = "/sys/fs/resctrl"


def wait_for(guest: Guest, command: str, seconds: float) -> None:
    """Repeat a command until it succeeds. Raise its last failure at the timeout."""
    deadline = time.monotonic() + seconds
    while guest.run(command, check=False).returncode != 0:
        if time.monotonic() > deadline:
            guest.run(command)
        time.sleep(0.2)


def test_resctrl_is_the_kernels_own(guest: Guest) -> None:
    assert guest.run(f"findmnt -no FSTYPE {RESCTRL}").stdout == "resctrl\n"
    assert guest.read(f"{RESCTRL}/info/L3_MON/num_rmids") == b"64\n"
    assert guest.read(f"{RESCTRL}/info/L3/num_closids") == b"2\n"
    events = guest.read(f"{RESCTRL}/info/L3_MON/mon_features").decode().split()
    assert events == ["llc_occupancy", "mbm_total_bytes", "mbm_local_bytes"]


def test_task_can_be_moved_into_a_group(guest: Guest) -> None:
    group = f"{RESCTRL}/mon_groups/one"
    guest.run(f"mkdir {group}; sleep 30 & echo $! >{group}/tasks; echo $! >/run/sleeper")
    pid = guest.read("/run/sleeper").decode().strip()
    assert guest.read(f"{group}/tasks").decode() == f"{pid}\n"
    assert guest.read(f"/proc/{pid}/cpu_resctrl_groups") == b"res:/\nmon:one\n"
    assert guest.read(f"{group}/mon_data/mon_L3_00/llc_occupancy") == b"0\n"
    guest.run(f"kill {pid}; rmdir {group}")
    assert guest.run(f"ls {RESCTRL}/mon_groups").stdout == ""


def test_freed_rmids_can_be_used_again(guest: Guest) -> None:
    guest.run(f"cd {RESCTRL}/mon_groups; for n in $(seq 63); do mkdir g$n || exit; done")
    refused = guest.run(f"mkdir {RESCTRL}/mon_groups/one-more", check=False)
    assert refused.returncode == 1
    assert "No space left on device" in refused.stderr
    guest.run(f"rmdir {RESCTRL}/mon_groups/g*")
    wait_for(guest, f"mkdir {RESCTRL}/mon_groups/again", 10)
    guest.run(f"rmdir {RESCTRL}/mon_groups/again")


def test_output_and_status(guest: Guest) -> None:
    completed = guest.run("echo out; echo err >&2; exit 3", check=False)
    assert (completed.stdout, completed.stderr, completed.returncode) == ("out\n", "err\n", 3)
    assert completed.output == "out\nerr\n"
    with pytest.raises(CommandError, match=r"status 4: echo why; exit 4\nwhy"):
        guest.run("echo why; exit 4")
    with pytest.raises(CommandError, match="No such file"):
        guest.read("/nowhere")


def test_a_timeout_kills_the_whole_session(guest: Guest) -> None:
    # The pipe's reader is a separate process, as a shell's child often is.
    with pytest.raises(CommandTimeoutError, match="begun"):
        guest.run("echo begun; (sleep 4321 | cat); echo never", timeout=1)
    assert guest.run("pgrep -f 'sleep [4]321'", check=False).stdout == ""


def test_commands_do_not_wait_for_each_other(guest: Guest) -> None:
    waiting = guest.start("until [ -e /run/go ]; do sleep 0.1; done; echo gone")
    assert not waiting.done()
    guest.run("touch /run/go")
    assert waiting.wait().stdout == "gone\n"


def test_background_process_of_a_command_is_not_awaited(guest: Guest) -> None:
    begun = time.monotonic()
    pid = guest.run("sleep 100 & echo $!").stdout.strip()
    assert time.monotonic() - begun < 50
    guest.run(f"kill {pid}")


def test_put_and_read(guest: Guest, tmp_path: Path) -> None:
    data = bytes(range(256)) * 8192
    (tmp_path / "tree/usr/lib").mkdir(parents=True)
    (tmp_path / "tree/usr/lib/blob").write_bytes(data)
    (tmp_path / "tree/usr/lib/blob").chmod(0o750)
    before = guest.run("stat -c '%a %U:%G' / /usr /usr/lib").stdout
    guest.put(tmp_path / "tree", "/")
    assert guest.run("stat -c '%a %U:%G' / /usr /usr/lib").stdout == before
    assert guest.run("stat -c '%a %U:%G %s' /usr/lib/blob").stdout == f"750 root:root {len(data)}\n"
    assert guest.read("/usr/lib/blob") == data
    guest.put(tmp_path / "tree/usr/lib/blob", "/new folder/renamed")
    assert guest.read("/new folder/renamed") == data
    guest.write("/new folder/text", "words\n", mode=0o600)
    assert guest.run("stat -c %a '/new folder/text'; cat '/new folder/text'").stdout == "600\nwords\n"


def test_systemd_is_up(guest: Guest) -> None:
    assert guest.run("systemctl is-system-running").stdout == "running\n"
    assert guest.run("systemd-run --quiet --wait --pipe sh -c 'cat /proc/self/cgroup'").stdout.startswith(
        "0::/system.slice/run-"
    )
    guest.run("systemd-run --wait --unit=journal-test sh -c 'echo the journal works'; systemctl daemon-reload")
    assert "the journal works" in guest.run("journalctl --no-pager -u journal-test").stdout
    assert guest.run("busctl call org.freedesktop.DBus /org/freedesktop/DBus org.freedesktop.DBus GetId").stdout
    assert guest.run("stat -fc %T /sys/fs/cgroup").stdout == "cgroup2fs\n"


def test_the_clock_is_the_hosts(guest: Guest) -> None:
    before = time.time()
    there = float(guest.run("date +%s.%N").stdout)
    # A busy host lets its guest wait; a clock of its own would be hours away.
    assert before - 60 < there < time.time() + 60


def test_python_has_the_packages_of_the_project(guest: Guest) -> None:
    modules = "msgspec, dbus_fast, sdnotify, yaml, rich, google.protobuf, prometheus_client, pytest"
    guest.run(f"python3 -W error -c 'import {modules}'")


def test_podman_runs_a_container(guest: Guest) -> None:
    guest.run("mkdir -p /srv/box/bin; cp /bin/busybox /srv/box/bin/; ln -s busybox /srv/box/bin/echo")
    box = guest.run("podman run --rm --network=none --rootfs /srv/box /bin/echo from the box", timeout=100)
    assert box.stdout == "from the box\n"


def test_monitoring_only_has_no_classes(monitoring_guest: Guest) -> None:
    assert int(monitoring_guest.read(f"{RESCTRL}/info/L3_MON/num_rmids")) > 64
    assert monitoring_guest.run(f"ls {RESCTRL}/schemata {RESCTRL}/info/L3", check=False).returncode == 2
    refused = monitoring_guest.run(f"mkdir {RESCTRL}/class", check=False)
    assert "Operation not permitted" in refused.stderr
    monitoring_guest.run(f"mkdir {RESCTRL}/mon_groups/one; rmdir {RESCTRL}/mon_groups/one")


def test_two_domains(two_domain_guest: Guest) -> None:
    guest = two_domain_guest
    assert guest.run(f"ls {RESCTRL}/mon_data").stdout == "mon_L3_00\nmon_L3_01\n"
    guest.run("for cpu in 2 3; do echo 0 >/sys/devices/system/cpu/cpu$cpu/online; done")
    assert guest.run(f"ls {RESCTRL}/mon_data").stdout == "mon_L3_00\n"
    guest.run("for cpu in 2 3; do echo 1 >/sys/devices/system/cpu/cpu$cpu/online; done")
    assert guest.run(f"ls {RESCTRL}/mon_data").stdout == "mon_L3_00\nmon_L3_01\n"


def test_each_guest_begins_with_the_saved_state(guests: Guests) -> None:
    first, second = guests.start(), guests.start()
    first.run(f"mkdir {RESCTRL}/mon_groups/mine; touch /etc/mine; sync")
    assert second.run(f"ls {RESCTRL}/mon_groups").stdout == ""
    assert guests.start().run("ls /etc/mine", check=False).returncode == 2


def test_prepared_state_is_saved_once(name_in_cache: str) -> None:
    prepared: list[Guest] = []

    def prepare(guest: Guest) -> None:
        prepared.append(guest)
        guest.run(f"echo mine >/etc/mine; mkdir {RESCTRL}/mon_groups/mine; sync")

    for _ in range(2):
        before = time.time()
        with machine("cat").start_prepared(name_in_cache, "key", prepare) as guest:
            assert before - 60 < float(guest.run("date +%s.%N").stdout) < time.time() + 60
            assert guest.run(f"cat /etc/mine; ls {RESCTRL}/mon_groups").stdout == "mine\nmine\n"
            guest.run(f"rm /etc/mine; rmdir {RESCTRL}/mon_groups/mine; sync")
    assert len(prepared) == 1
    with machine("cat").start() as guest:
        assert guest.run(f"ls /etc/mine {RESCTRL}/mon_groups/mine", check=False).stdout == ""


@pytest.fixture
def name_in_cache() -> Iterator[str]:
    """Yield a name of builds, which are removed at the end."""
    name = f"test-{secrets.token_hex(4)}"
    yield name
    for path in cache.folder().glob(f"{name}-*"):
        tool(["rm", "-rf", path])


def test_panic_is_reported_with_the_console(guests: Guests) -> None:
    guest = guests.start()
    with pytest.raises(GuestDiedError, match="Kernel panic"):
        guest.run("echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger")


def test_qemu_ends_with_a_killed_test_run(guests: Guests) -> None:
    guests.start().close()  # fails early with the reason if no guest is possible
    program = (
        "import os, signal; from tests.kernel.machine import Machine; guest = Machine().start();"
        "print(guest.qemu.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    pid = int(ended.stdout)
    wait_until(lambda: not _lives(pid), failure=f"QEMU {pid} outlives its starter")


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}/exe")
