# SPDX-License-Identifier: Apache-2.0
"""Start, readiness, reload, watchdog and stop of the daemon, failed starts, and restarts after a kill."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from resctrlmond.api import sockets
from resctrlmond.client import Client
from resctrlmond.daemon.startup import Exit
from tests.daemon.conftest import MANAGER, Machine, StartProcess, end, run_daemon
from tests.wait import wait_until

CONTAINER = "4d" * 32


# -- messages to the service manager


def test_ready_status_watchdog_reload_and_stop(machine: Machine, process: StartProcess) -> None:
    machine.start(WATCHDOG_USEC="400000")
    machine.call("Assign", key=CONTAINER, pid=process().pid, claim="engine", endRule="container")
    assert machine.wait_for_notify("STATUS=1 group")
    for _ in range(3):
        assert machine.wait_for_notify("WATCHDOG=1")
    machine.config.write_text("group: 4242\nlog_level: error\nsnapshot_ttl: 0\n")
    assert any(line.startswith("MONOTONIC_USEC=") for line in machine.reload())
    machine.call("Release", key=CONTAINER, claim="engine")
    wait_until(lambda: machine.call("List")["workloads"] == [])
    assert machine.daemon is not None
    machine.daemon.send_signal(signal.SIGTERM)
    assert machine.wait_for_notify("STOPPING=1")
    # No second SIGTERM: Python restores the default handler before it exits, and the signal would kill it.
    assert machine.daemon.wait(60) == Exit.OK


def test_invalid_configuration_is_not_applied(machine: Machine) -> None:
    machine.start()
    machine.config.write_text("group: 4242\nsnapshot_tll: 5min\n")
    machine.reload()
    assert "Did you mean snapshot_ttl?" in machine.log.read_text()
    assert machine.call("Status")["mounted"]
    assert machine.stop() == Exit.OK


def test_invalid_configuration_is_a_problem_until_a_valid_one_is_read(machine: Machine) -> None:
    machine.start()
    for text, is_invalid in (("group: 4242\nsnapshot_tll: 5min\n", True), ("group: 4242\n", False)):
        machine.config.write_text(text)
        machine.reload()
        problems = machine.call("Status")["problems"]
        assert any("the new configuration is wrong" in problem for problem in problems) == is_invalid, problems


def test_keys_that_require_a_restart_are_reported(machine: Machine) -> None:
    machine.start()
    machine.config.write_text("group: 4343\n")
    machine.reload()
    assert "group changed: to apply it, restart resctrlmond" in machine.log.read_text()


def test_original_configuration_requires_no_restart(machine: Machine) -> None:
    machine.start()
    for group in (4343, 4242):
        offset = machine.log.stat().st_size
        machine.config.write_text(f"group: {group}\n")
        machine.reload()
        assert ("group changed" in machine.log.read_text()[offset:]) == (group == 4343)


def test_socket_from_systemd_is_used_and_kept(machine: Machine) -> None:
    path = str(machine.top / "passed")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(16)
        machine.start_with_socket(listener)
    assert machine.wait_for_notify("READY=1")
    with Client(path) as client:
        assert client.call(f"{MANAGER}.Status")["mounted"]
    assert not os.path.exists(machine.socket)
    assert machine.stop() == Exit.OK
    assert os.path.exists(path)


@pytest.mark.parametrize("is_passed", [False, True], ids=["own", "passed"])
def test_members_of_the_reading_group_can_connect(machine: Machine, *, is_passed: bool) -> None:
    machine.config.write_text("group: 4242\nread_group: 4243\n")
    path = str(machine.top / "passed") if is_passed else machine.socket
    if is_passed:
        with sockets.listen(path) as listener:
            machine.start_with_socket(listener)
        assert machine.wait_for_notify("READY=1")
    else:
        machine.start()
    assert struct.pack("<HHI", 0x08, 6, 4243) in os.getxattr(path, "system.posix_acl_access")


def test_socket_without_a_file_is_served(machine: Machine) -> None:
    machine.config.write_text("group: 4242\nread_group: 4243\n")
    path = str(machine.top / "passed")
    with sockets.listen(path) as listener:
        os.unlink(path)
        machine.start_with_socket(listener)
    assert machine.wait_for_notify("READY=1")
    why = f"members of the group of 'read_group' (4243) cannot connect to {path}: No such file or directory"
    assert why in machine.log.read_text()


# -- failed starts


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        ("snapshot_tll: 5min", Exit.CONFIG, "bad.yaml:1"),
        ("group: root", Exit.NO_GROUP, "group 'root'"),
        ("resctrl: relative", Exit.CONFIG, "bad.yaml:1"),
        ("[", Exit.CONFIG, "bad.yaml:2"),
        ("group: 0", Exit.CONFIG, "bad.yaml:1"),
    ],
)
def test_invalid_configuration_is_refused_with_its_exit_code(
    tmp_path: Path, text: str, status: Exit, expected: str
) -> None:
    (tmp_path / "bad.yaml").write_text(text + "\n")
    code, error = run_daemon("--config", str(tmp_path / "bad.yaml"))
    assert code == status
    assert expected in error


@pytest.mark.parametrize("option", ["--simulate", "--config"])
def test_empty_path_on_the_command_line_is_refused(option: str) -> None:
    """With an unset variable, --simulate "$dir" started the daemon on the host's resctrl."""
    code, stderr = run_daemon(option, "")
    assert code == Exit.USAGE
    assert f"argument {option}: the value is empty" in stderr


def test_configuration_is_checked_without_a_start(tmp_path: Path) -> None:
    config = tmp_path / "resctrlmond.yaml"
    for text, status in (("log_level: info\n", Exit.OK), ("log_levle: info\n", Exit.CONFIG)):
        config.write_text(f"group: 4242\nruntime_dir: /dev/shm/none\n{text}")
        code, stderr = run_daemon("--check-config", "--config", str(config))
        assert code == status
        assert ("Did you mean log_level?" in stderr) == (status == Exit.CONFIG)


def test_check_reports_each_mistake_in_a_line_of_its_own(tmp_path: Path) -> None:
    config, profiles = tmp_path / "resctrlmond.yaml", tmp_path / "profiles.d"
    config.write_text(
        "linger: soon\nlog_levle: info\nunits:\n- late\n- a.service\n- '[x'\ngroups_dir: /sys/fs/resctrl/x\n"
    )
    profiles.mkdir()
    (profiles / "a.yaml").write_text("profils: {}\n")
    code, stderr = run_daemon("--check-config", "--config", str(config), "--profiles-dir", str(profiles))
    assert code == Exit.CONFIG
    places = re.findall(rf"{tmp_path}/([a-z./]+:[0-9]+): ", stderr)
    assert places == [*(f"resctrlmond.yaml:{line}" for line in (1, 2, 4, 6, 7)), "profiles.d/a.yaml:1"]
    config.write_text("group: no-such-group-here\nruntime_dir: /proc/none/run\n")
    code, stderr = run_daemon("--check-config", "--config", str(config), "--profiles-dir", str(profiles))
    assert code == Exit.NO_GROUP
    parts = ("there is no Unix group", "runtime_dir is on proc", "unknown key 'profils'")
    assert [part in line for part, line in zip(parts, stderr.splitlines(), strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        ("group: no-such-group-here", Exit.NO_GROUP, "there is no Unix group 'no-such-group-here'"),
        ("group: 4242\nruntime_dir: /proc/none/run", Exit.CONFIG, "runtime_dir is on proc, not on tmpfs"),
        ("group: 4242\nruntime_dir: /dev/shm/none\ngroups_dir: /proc/none", Exit.CONFIG, "groups_dir is on proc"),
        ("group: 4242\nruntime_dir: /proc/version/run", Exit.CONFIG, "runtime_dir is not a folder"),
    ],
)
def test_check_of_a_configuration_finds_a_missing_group_and_unusable_folders(
    tmp_path: Path, text: str, status: Exit, expected: str
) -> None:
    (tmp_path / "c.yaml").write_text(text + "\n")
    code, stderr = run_daemon("--check-config", "--config", str(tmp_path / "c.yaml"))
    assert (code, expected in stderr) == (status, True), stderr


def test_folders_on_two_filesystems_are_refused(tmp_path: Path) -> None:
    """The daemon moves an ended run from groups_dir to runtime_dir with rename(2)."""
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(other)], check=True)
    try:
        (tmp_path / "c.yaml").write_text(f"group: 4242\nruntime_dir: /dev/shm/none\ngroups_dir: {other}/groups\n")
        code, stderr = run_daemon("--check-config", "--config", str(tmp_path / "c.yaml"))
    finally:
        subprocess.run(["umount", str(other)], check=True)
    assert (code, "groups_dir is on another filesystem than runtime_dir" in stderr) == (Exit.CONFIG, True)


def test_reload_of_the_unit_fails_for_an_invalid_configuration() -> None:
    unit = (Path(__file__).parents[2] / "systemd" / "resctrlmond.service").read_text(encoding="utf-8")
    assert "\nType=notify-reload\n" in unit
    assert "\nExecReload=/usr/bin/resctrlmond --check-config\n" in unit


def test_missing_configuration_file_is_refused(tmp_path: Path) -> None:
    code, stderr = run_daemon("--config", str(tmp_path / "none.yaml"))
    assert (code, "none.yaml" in stderr, "ENOENT" in stderr) == (Exit.CONFIG, True, True)


@pytest.mark.parametrize("action", [[], ["--check-config"]])
def test_missing_directory_of_profiles_is_refused(tmp_path: Path, action: list[str]) -> None:
    missing = str(tmp_path / "none")
    code, stderr = run_daemon(*action, "--simulate", str(tmp_path / "sim"), "--profiles-dir", missing)
    assert (code, f"{missing}: the directory of the profiles does not exist" in stderr) == (Exit.CONFIG, True)


def test_missing_unix_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("group: no-such-group-here\n")
    code, stderr = run_daemon("--config", str(tmp_path / "c.yaml"))
    assert (code, "systemd-sysusers" in stderr) == (Exit.NO_GROUP, True)


def config(machine: Machine) -> str:
    """Write a configuration without --simulate for the machine, and return its path."""
    path = machine.top / "real.yaml"
    path.write_text(f"resctrl: {machine.top}/resctrl\nruntime_dir: {machine.top}/run\ngroup: 4242\ndbus: false\n")
    return str(path)


def test_simulated_resctrl_is_refused_without_simulate(machine: Machine) -> None:
    code, stderr = run_daemon("--config", config(machine))
    assert (code, "simulated" in stderr, "--simulate" in stderr) == (Exit.NOT_MOUNTED, True, True)


def test_start_fails_if_resctrl_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "resctrl").mkdir()
    path = tmp_path / "c.yaml"
    path.write_text(f"resctrl: {tmp_path}/resctrl\nruntime_dir: {tmp_path}/run\ngroup: 4242\ndbus: false\n")
    code, stderr = run_daemon("--config", str(path))
    assert (code, "mount -t resctrl" in stderr) == (Exit.NOT_MOUNTED, True)
    assert os.listdir(tmp_path / "resctrl") == []


def test_second_daemon_is_refused(machine: Machine) -> None:
    machine.start()
    code, stderr = run_daemon(*machine.command()[3:])
    assert (code, "another resctrlmond is running" in stderr) == (Exit.ALREADY_RUNNING, True)
    assert machine.call("Status")["mounted"]


def test_invalid_variables_of_the_service_manager_are_refused(machine: Machine) -> None:
    shell = ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *machine.command()]
    environment = {**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "varlink"}
    done = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == Exit.FAILURE
    assert "LISTEN_FDNAMES" in done.stderr
    assert "Traceback" not in done.stderr


def test_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, stderr = run_daemon("--simulate", str(tmp_path / "file"))
    assert (code, "ENOTDIR" in stderr) == (Exit.FAILURE, True)


# -- workloads outlive the daemon


def test_assign_of_a_running_process_is_late(machine: Machine, process: StartProcess) -> None:
    """The example in README.md was reported as exact."""
    machine.start()
    child = process()
    machine.call("Create", key="mine", claim="me")
    done = machine.call("Assign", key="mine", pid=child.pid, claim="me")
    assert (done["workload"]["baseline"], done["descendantsOutside"]) == ("late", 0)
    (member,) = done["workload"]["members"]
    assert member["late"] and member["cpuTimeBeforeNs"] > 0
    totals = machine.call("Release", key="mine", claim="me")["totals"]
    assert {total["quality"] for total in totals} == {"late"}
    assert all("of CPU time before it was put into the group" in total["reason"] for total in totals)


def test_daemon_keeps_its_groups_over_a_kill_and_writes_their_ends(machine: Machine, process: StartProcess) -> None:
    child = process()
    machine.start()
    before = machine.call(
        "Assign", key=CONTAINER, pid=child.pid, late=False, claim="engine", endRule="container", member="c1"
    )["workload"]
    directory = machine.top / "resctrl" / "mon_groups" / CONTAINER
    snapshot = machine.run / "groups" / CONTAINER
    inode, nonce = directory.stat().st_ino, directory.stat().st_mtime_ns
    files = {path: path.read_bytes() for path in snapshot.rglob("*.begin")}
    assert files
    machine.kill()
    machine.start()
    assert machine.group(CONTAINER) == before
    assert (directory.stat().st_ino, directory.stat().st_mtime_ns) == (inode, nonce)
    assert {path: path.read_bytes() for path in snapshot.rglob("*.begin")} == files
    assert machine.tasks(CONTAINER) == {child.pid}
    end(child)
    assert machine.reaches(CONTAINER, "completed")
    assert {path.with_suffix(".end") for path in files} == set(snapshot.rglob("*.end"))
    assert (snapshot / "completed_at").exists()
    assert machine.groups() == []
    assert {total["quality"] for total in machine.call("Read", key=CONTAINER)["totals"]} == {"exact"}


def test_members_that_ended_while_the_daemon_was_stopped_end_at_its_start(
    machine: Machine, process: StartProcess
) -> None:
    child = process()
    machine.start()
    machine.call("Assign", key=CONTAINER, pid=child.pid, claim="engine", endRule="container")
    assert machine.stop() == Exit.OK
    assert machine.groups() == [CONTAINER]
    end(child)
    machine.start()
    assert machine.group(CONTAINER)["state"] == "completed"
    assert machine.groups() == []
    assert list((machine.run / "groups" / CONTAINER).rglob("*.end"))


def test_end_of_a_process_is_detected_at_once_without_a_call(machine: Machine, process: StartProcess) -> None:
    """The daemon watches a pidfd; the tick would detect the end within a second."""
    machine.start()
    fastest, number = 9.0, 0
    # A busy machine can delay single ends for any time. If only ticks detected them, each end but the first would be
    # 0.2 s after a tick, and detected 0.8 s later.
    while fastest >= 0.5:
        assert number < 30, f"the fastest of {number} ends was detected after {fastest:.1f} s"
        child = process()
        machine.call("Assign", key=f"c{number}", pid=child.pid, claim="engine", endRule="container")
        time.sleep(0.2)
        ended = time.monotonic()
        end(child)
        assert machine.reaches(f"c{number}", "completed")
        if number:
            fastest = min(fastest, time.monotonic() - ended)
        number += 1


def test_daemon_keeps_running_after_an_unmount(machine: Machine, process: StartProcess) -> None:
    machine.start()
    machine.call("Assign", key=CONTAINER, pid=process().pid, claim="engine", endRule="container")
    # EBUSY (umount(2)) while the tick has a file of it open.
    umount = ["umount", str(machine.top / "resctrl")]
    wait_until(lambda: subprocess.run(umount, capture_output=True, check=False).returncode == 0)
    assert machine.reaches(CONTAINER, "lost")
    status = machine.call("Status")
    assert not status["mounted"]
    assert status["problems"]
    assert machine.stop() == Exit.OK


def test_foreign_name_that_is_not_utf8_is_listed(machine: Machine) -> None:
    """List and Status failed as long as a group or class with such a name existed."""
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


@pytest.mark.parametrize("resctrl", ["", "none"])
def test_missing_group_on_a_machine_without_resctrl_names_the_simulator(tmp_path: Path, resctrl: str) -> None:
    """A user who creates the group there has gained nothing."""
    (tmp_path / "c.yaml").write_text(f"group: no-such-group-here\nresctrl: {tmp_path / resctrl}\n")
    code, stderr = run_daemon("--config", str(tmp_path / "c.yaml"))
    assert (code, stderr.count("\n")) == (Exit.NO_GROUP, 1)
    assert (f"This machine has no {tmp_path}/none either: to try the" in stderr) == bool(resctrl)
    assert ("use --simulate /tmp/sim" in stderr) == bool(resctrl)


def test_directory_in_which_another_user_simulates_is_refused() -> None:
    """The lock could not be created there, and the message was about free space."""
    command, uid = [sys.executable, "-m", "resctrlmond", "--simulate"], os.geteuid()
    # Not in tmp_path, which is closed to other users.
    with tempfile.TemporaryDirectory() as place:
        top = Path(place) / "sim" if uid == 0 else Path("/usr")
        if uid == 0:
            os.chmod(place, 0o755)
            top.mkdir()
            uid = 65534
            # The files of the tests may be closed to other users too.
            rights = ["--inh-caps", "-all,+dac_read_search", "--ambient-caps", "-all,+dac_read_search"]
            command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *rights, "--", *command]
        done = subprocess.run([*command, str(top)], capture_output=True, text=True, timeout=60, check=False)
        assert not (top / "run").exists()
    assert (done.returncode, done.stderr) == (
        Exit.FAILURE,
        f"resctrlmond: error: {top}: the directory belongs to another user, who may run a simulation there: "
        "Permission denied (EACCES). "
        f"Choose a directory of your own, such as {top}-{uid}, or run the commands as that user\n",
    )


def test_simulation_in_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """A user who created /tmp/sim before root could make the daemon change the mode of the target of a link."""
    victim = tmp_path / "victim"
    victim.mkdir(0o700)
    top = tmp_path / "sim"
    (top / "run").mkdir(parents=True)
    (top / "run" / "completed").symlink_to(victim)
    top.chmod(0o1777)
    link = tmp_path / "link"
    link.symlink_to(top)
    directories = [top, link]
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        os.chown(foreign, 65534, 65534)
        directories.append(foreign)
    for directory in directories:
        code, stderr = run_daemon("--simulate", str(directory))
        assert (code, "because other users can change it" in stderr) == (Exit.FAILURE, True)
    assert victim.stat().st_mode & 0o777 == 0o700
