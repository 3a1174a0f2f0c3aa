# SPDX-License-Identifier: Apache-2.0
"""The daemon's own life: start, ready, reload, watchdog, stop, the ways it does not start, and a kill in between."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.api.varlink.client import Client
from resctrlmond.daemon.startup import Exit
from tests.daemon.conftest import MANAGER, Machine
from tests.wait import wait_until

Start = Callable[[], "subprocess.Popen[bytes]"]
CTR = "4d" * 32


def failing(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and what was said of a daemon that does not start."""
    command = [sys.executable, "-m", "resctrlmond", *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


# -- what the service manager sees


def test_ready_status_watchdog_reload_and_stop(machine: Machine, process: Start) -> None:
    machine.start(WATCHDOG_USEC="400000")
    machine.call("Assign", key=CTR, pid=process().pid, claim="engine", endRule="container")
    assert machine.told("STATUS=1 group")
    for _ in range(3):
        assert machine.told("WATCHDOG=1")
    machine.config.write_text("group: 4242\nlog_level: error\nsnapshot_ttl: 0\n")
    assert machine.daemon is not None
    machine.daemon.send_signal(signal.SIGHUP)
    reloading = machine.told("RELOADING=1")
    assert any(line.startswith("MONOTONIC_USEC=") for line in reloading)
    assert machine.told("READY=1")
    machine.call("Release", key=CTR, claim="engine")
    wait_until(lambda: machine.call("List")["groups"] == [])
    machine.daemon.send_signal(signal.SIGTERM)
    assert machine.told("STOPPING=1")
    # Not told again: Python gives the signal back to the kernel before it ends.
    assert machine.daemon.wait(60) == Exit.OK


def test_a_bad_configuration_leaves_the_old_one(machine: Machine) -> None:
    machine.start()
    machine.config.write_text("group: 4242\nsnapshot_tll: 5min\n")
    assert machine.daemon is not None
    machine.daemon.send_signal(signal.SIGHUP)
    assert machine.told("RELOADING=1")
    assert machine.told("READY=1")
    assert "Did you mean snapshot_ttl?" in machine.log.read_text()
    assert machine.call("Status")["mounted"]
    assert machine.stop() == Exit.OK


def test_a_bad_configuration_is_a_problem_until_a_good_one_is_read(machine: Machine) -> None:
    machine.start()
    assert machine.daemon is not None
    for text, wrong in (("group: 4242\nsnapshot_tll: 5min\n", True), ("group: 4242\n", False)):
        machine.config.write_text(text)
        machine.daemon.send_signal(signal.SIGHUP)
        assert machine.told("RELOADING=1")
        assert machine.told("READY=1")
        problems = machine.call("Status")["problems"]
        assert any("the new configuration is wrong" in problem for problem in problems) == wrong, problems


def test_keys_that_require_a_restart_are_reported(machine: Machine) -> None:
    machine.start()
    machine.config.write_text("group: 4343\n")
    assert machine.daemon is not None
    machine.daemon.send_signal(signal.SIGHUP)
    assert machine.told("READY=1")
    assert "group changed: to apply it, restart resctrlmond" in machine.log.read_text()


def test_the_original_configuration_again_takes_no_restart(machine: Machine) -> None:
    machine.start()
    assert machine.daemon is not None
    for group in (4343, 4242):
        began = machine.log.stat().st_size
        machine.config.write_text(f"group: {group}\n")
        machine.daemon.send_signal(signal.SIGHUP)
        assert machine.told("RELOADING=1")
        assert machine.told("READY=1")
        assert ("group changed" in machine.log.read_text()[began:]) == (group == 4343)


def test_a_socket_that_systemd_hands_over(machine: Machine) -> None:
    path = str(machine.top / "handed-over")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(16)
        machine.begin_on(listener)
    assert machine.told("READY=1")
    with Client(path) as client:
        assert client.call(f"{MANAGER}.Status")["mounted"]
    assert not os.path.exists(machine.socket)
    assert machine.stop() == Exit.OK
    assert os.path.exists(path)


# -- what keeps it from starting


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("snapshot_tll: 5min", Exit.CONFIG, "bad.yaml:1"),
        ("group: root", Exit.NO_GROUP, "group 'root'"),
        ("resctrl: relative", Exit.CONFIG, "bad.yaml:1"),
        ("[", Exit.CONFIG, "bad.yaml:2"),
        ("group: 0", Exit.CONFIG, "bad.yaml:1"),
    ],
)
def test_a_wrong_configuration(tmp_path: Path, text: str, status: Exit, words: str) -> None:
    (tmp_path / "bad.yaml").write_text(text + "\n")
    code, error = failing("--config", str(tmp_path / "bad.yaml"))
    assert code == status
    assert words in error


@pytest.mark.parametrize("option", ["--simulate", "--config"])
def test_an_empty_path_on_the_command_line_is_refused(option: str) -> None:
    """With an unset variable, --simulate "$dir" started the daemon of the host."""
    code, said = failing(option, "")
    assert code == Exit.USAGE
    assert f"argument {option}: the value is empty" in said


def test_a_configuration_is_checked_without_a_start(tmp_path: Path) -> None:
    config = tmp_path / "resctrlmond.yaml"
    for text, status in (("log_level: info\n", Exit.OK), ("log_levle: info\n", Exit.CONFIG)):
        config.write_text(f"group: 4242\nruntime_dir: /dev/shm/none\n{text}")
        code, said = failing("--check-config", "--config", str(config))
        assert code == status
        assert ("Did you mean log_level?" in said) == (status == Exit.CONFIG)


@pytest.mark.parametrize(
    ("text", "status", "wanted"),
    [
        ("group: no-such-group-here", Exit.NO_GROUP, "there is no Unix group 'no-such-group-here'"),
        ("group: 4242\nruntime_dir: /proc/none/run", Exit.CONFIG, "runtime_dir is on proc, not on tmpfs"),
        ("group: 4242\nruntime_dir: /dev/shm/none\ngroups_dir: /proc/none", Exit.CONFIG, "groups_dir is on proc"),
        ("group: 4242\nruntime_dir: /proc/version/run", Exit.CONFIG, "runtime_dir is not a folder"),
    ],
)
def test_the_check_of_a_configuration_finds_a_missing_group_and_unusable_folders(
    tmp_path: Path, text: str, status: Exit, wanted: str
) -> None:
    (tmp_path / "c.yaml").write_text(text + "\n")
    code, said = failing("--check-config", "--config", str(tmp_path / "c.yaml"))
    assert (code, wanted in said) == (status, True), said


def test_folders_on_two_filesystems_are_refused(tmp_path: Path) -> None:
    """An ended run is moved from one to the other by rename(2)."""
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(other)], check=True)
    try:
        (tmp_path / "c.yaml").write_text(f"group: 4242\nruntime_dir: /dev/shm/none\ngroups_dir: {other}/groups\n")
        code, said = failing("--check-config", "--config", str(tmp_path / "c.yaml"))
    finally:
        subprocess.run(["umount", str(other)], check=True)
    assert (code, "groups_dir is on another filesystem than runtime_dir" in said) == (Exit.CONFIG, True)


def test_the_unit_has_a_reload_fail_for_a_wrong_configuration() -> None:
    unit = (Path(__file__).parents[2] / "systemd" / "resctrlmond.service").read_text(encoding="utf-8")
    assert "\nType=notify-reload\n" in unit
    assert "\nExecReload=/usr/bin/resctrlmond --check-config\n" in unit


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    code, said = failing("--config", str(tmp_path / "none.yaml"))
    assert (code, "none.yaml" in said, "ENOENT" in said) == (Exit.CONFIG, True, True)


def test_the_group_is_missing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("group: no-such-group-here\n")
    code, said = failing("--config", str(tmp_path / "c.yaml"))
    assert (code, "systemd-sysusers" in said) == (Exit.NO_GROUP, True)


def config(machine: Machine) -> str:
    path = machine.top / "real.yaml"
    path.write_text(f"resctrl: {machine.top}/resctrl\nruntime_dir: {machine.top}/run\ngroup: 4242\ndbus: false\n")
    return str(path)


def test_a_simulation_is_not_taken_for_the_real_one(machine: Machine) -> None:
    code, said = failing("--config", config(machine))
    assert (code, "simulated" in said, "--simulate" in said) == (Exit.NOT_MOUNTED, True, True)


def test_resctrl_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "resctrl").mkdir()
    path = tmp_path / "c.yaml"
    path.write_text(f"resctrl: {tmp_path}/resctrl\nruntime_dir: {tmp_path}/run\ngroup: 4242\ndbus: false\n")
    code, said = failing("--config", str(path))
    assert (code, "mount -t resctrl" in said) == (Exit.NOT_MOUNTED, True)
    assert os.listdir(tmp_path / "resctrl") == []


def test_another_daemon_runs(machine: Machine) -> None:
    machine.start()
    code, said = failing(*machine.command()[3:])
    assert (code, "another resctrlmond is running" in said) == (Exit.ALREADY_RUNNING, True)
    assert machine.call("Status")["mounted"]


def test_nonsense_from_the_service_manager(machine: Machine) -> None:
    shell = ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *machine.command()]
    environment = {**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "varlink"}
    done = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == Exit.FAILURE
    assert "LISTEN_FDNAMES" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = failing("--simulate", str(tmp_path / "file"))
    assert (code, "ENOTDIR" in said) == (Exit.FAILURE, True)


# -- a kill and a stop are the end of nothing


def test_assign_of_a_process_by_hand_is_late(machine: Machine, process: Start) -> None:
    """README's own example said that it was exact."""
    machine.start()
    child = process()
    machine.call("Create", key="mine", claim="me")
    done = machine.call("Assign", key="mine", pid=child.pid, claim="me")
    assert (done["group"]["baseline"], done["descendantsOutside"]) == ("late", 0)
    (member,) = done["group"]["members"]
    assert member["late"] and member["cpuTimeBeforeNs"] > 0
    totals = machine.call("Release", key="mine", claim="me")["totals"]
    assert {total["quality"] for total in totals} == {"late"}
    assert all("of CPU time before it was put into the group" in total["reason"] for total in totals)


def test_a_killed_daemon_takes_up_its_groups_and_ends_them_rightly(machine: Machine, process: Start) -> None:
    child = process()
    machine.start()
    before = machine.call(
        "Assign", key=CTR, pid=child.pid, late=False, claim="engine", endRule="container", member="c1"
    )["group"]
    place = machine.top / "resctrl" / "mon_groups" / CTR
    snapshot = machine.run / "groups" / CTR
    inode, nonce = place.stat().st_ino, place.stat().st_mtime_ns
    files = {path: path.read_bytes() for path in snapshot.rglob("*.begin")}
    assert files
    machine.kill()
    machine.start()
    assert machine.group(CTR) == before
    assert (place.stat().st_ino, place.stat().st_mtime_ns) == (inode, nonce)
    assert {path: path.read_bytes() for path in snapshot.rglob("*.begin")} == files
    assert machine.tasks(CTR) == {child.pid}
    end(child)
    assert machine.reaches(CTR, "completed")
    assert {path.with_suffix(".end") for path in files} == set(snapshot.rglob("*.end"))
    assert (snapshot / "completed_at").exists()
    assert machine.groups() == []
    assert {total["quality"] for total in machine.call("Read", key=CTR)["totals"]} == {"exact"}


def test_members_that_ended_while_it_was_stopped_end_at_the_start(machine: Machine, process: Start) -> None:
    child = process()
    machine.start()
    machine.call("Assign", key=CTR, pid=child.pid, claim="engine", endRule="container")
    assert machine.stop() == Exit.OK
    assert machine.groups() == [CTR]
    end(child)
    machine.start()
    assert machine.group(CTR)["state"] == "completed"
    assert machine.groups() == []
    assert list((machine.run / "groups" / CTR).rglob("*.end"))


def test_an_end_is_seen_at_once_without_anybody_saying_so(machine: Machine, process: Start) -> None:
    """By pidfd: the tick that would find it too comes once a second."""
    machine.start()
    fastest = 9.0
    for number in range(3):
        child = process()
        machine.call("Assign", key=f"c{number}", pid=child.pid, claim="engine", endRule="container")
        time.sleep(0.2)
        ended = time.monotonic()
        end(child)
        assert machine.reaches(f"c{number}", "completed")
        fastest = min(fastest, time.monotonic() - ended)
    assert fastest < 0.5


def test_the_mount_goes_and_the_daemon_stays(machine: Machine, process: Start) -> None:
    machine.start()
    machine.call("Assign", key=CTR, pid=process().pid, claim="engine", endRule="container")
    subprocess.run(["umount", str(machine.top / "resctrl")], check=True)
    assert machine.reaches(CTR, "lost")
    status = machine.call("Status")
    assert not status["mounted"]
    assert status["problems"]
    assert machine.stop() == Exit.OK


def test_foreign_name_that_is_not_utf8_is_listed(machine: Machine) -> None:
    """List and Status failed as a whole, for as long as a group or class of such a name stood."""
    machine.start()
    group = os.fsencode(machine.top) + b"/resctrl/mon_groups/\xff"
    class_ = os.fsencode(machine.top) + b"/resctrl/\xfe"
    os.mkdir(group)
    os.mkdir(class_)
    foreign = [{"class": "", "name": "\\xff", "path": f"{machine.top}/resctrl/mon_groups/\\xff"}]
    assert machine.call("List")["foreign"] == foreign
    status = machine.call("Status")
    assert (status["foreign"], status["classes"]) == (foreign, ["", "\\xfe"])
    os.rmdir(group)
    os.rmdir(class_)


def test_a_simulation_where_others_may_write_is_refused(tmp_path: Path) -> None:
    """Who made /tmp/sim before root did had links in it, and a mode of his choice for what they led to."""
    victim = tmp_path / "victim"
    victim.mkdir(0o700)
    top = tmp_path / "sim"
    (top / "run").mkdir(parents=True)
    (top / "run" / "completed").symlink_to(victim)
    top.chmod(0o1777)
    link = tmp_path / "link"
    link.symlink_to(top)
    places = [top, link]
    if os.geteuid() == 0:
        given_away = tmp_path / "theirs"
        given_away.mkdir()
        os.chown(given_away, 65534, 65534)
        places.append(given_away)
    for place in places:
        code, said = failing("--simulate", str(place))
        assert (code, "because other users can change it" in said) == (Exit.FAILURE, True)
    assert victim.stat().st_mode & 0o777 == 0o700
