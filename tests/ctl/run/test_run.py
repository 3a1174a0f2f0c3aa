# SPDX-License-Identifier: Apache-2.0
"""resctrlctl run: the command is in its group before it executes, and its use is reported."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from resctrlmond.api import types
from resctrlmond.api.types import Claim, Member
from resctrlmond.resctrl import processes
from resctrlmond.workloads.model.workload import EndRule, State
from tests.ctl.conftest import Ctl, command
from tests.ctl.fake_manager import ALL_EVENTS, LATER, NOW, TOTALS, FakeManager, error, serving
from tests.wait import wait_until

PYTHON = sys.executable
# Short sleeps: Python handles a signal that arrives just before a sleep begins only at the end of that sleep.
WAIT = "import time; print('ready', flush=True)\nfor _ in range(1200): time.sleep(0.05)"


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks."""
    found = processes.stat(pid)
    assert found is not None
    return found.start_time


def start(manager: FakeManager, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """Start resctrlctl run in a session of its own."""
    return subprocess.Popen(
        command(manager.socket, "run", *arguments),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def held(manager: FakeManager) -> int:
    """Wait until Assign is called, and its process is ready for signals; return its pid."""
    wait_until(lambda: manager.called("Assign"))
    pid: int = manager.called("Assign")[0].pid

    def is_ready() -> bool:
        (blocked,) = re.findall(r"SigBlk:\s+([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
        return not int(blocked, 16) >> (signal.SIGINT - 1) & 1

    wait_until(is_ready)
    return pid


def test_command_is_assigned_and_released(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("run", "--", "sh", "-c", "echo out; echo err >&2")
    assert (done.returncode, done.stdout) == (0, "out\n")
    (request,) = manager.called("Assign")
    assert re.fullmatch(rf"run-{request.pid}-[0-9]+", request.key)
    assert request == types.AssignRequest(
        key=request.key,
        pid=request.pid,
        late=False,
        nested=True,
        claim="run",
        end_rule=EndRule.MEMBERS,
        attributes={"command": "sh -c 'echo out; echo err >&2'"},
        allow_pending=False,
    )
    assert manager.called("Release") == [
        types.ReleaseRequest(key=request.key, claim="run", reason="ended with status 0")
    ]
    report = done.stderr.splitlines()
    assert report[:4] == ["err", "", f"sh -c 'echo out; echo err >&2': {request.key} in class /", ""]
    assert re.fullmatch(r"  core energy  12\.345678 J +[0-9.]+k?W  exact", report[4])
    assert re.fullmatch(r"  mbm total        unknown +unknown", report[5])
    # A slow command has lines of samples before these.
    assert [line.split()[0] for line in report[-6:-3]] == ["elapsed", "user", "system"]
    assert report[-3:] == ["", "Not exact", "  mbm total: mon_L3_00 read 'Unavailable' at the end"]


def test_command_does_not_execute_before_it_is_in_its_group(
    manager: FakeManager, environment: dict[str, str], tmp_path: Path
) -> None:
    manager.may_assign.clear()
    with start(manager, environment, "--", "touch", str(tmp_path / "ran")) as process:
        held(manager)
        assert not (tmp_path / "ran").exists()
        manager.may_assign.set()
        process.communicate(timeout=60)
    assert process.returncode == 0
    # During Assign, the process was still a copy of resctrlctl.
    assert b"resctrlctl" in manager.command_lines[0]
    assert (tmp_path / "ran").exists()


def test_assigned_process_executes_the_command(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("run", "--", "sh", "-c", "echo $$")
    assert [int(done.stdout)] == [request.pid for request in manager.called("Assign")] == manager.by_pidfd


@pytest.mark.parametrize("status", [0, 1, 7, 125, 255])
def test_exit_status_is_that_of_the_command(ctl: Ctl, status: int) -> None:
    assert ctl("run", "--", "sh", "-c", f"exit {status}").returncode == status


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_exit_status_is_128_plus_the_signal_that_ended_the_command(manager: FakeManager, ctl: Ctl, name: str) -> None:
    number = signal.Signals[name]
    assert ctl("run", "--", "sh", "-c", f"kill -{number:d} $$").returncode == 128 + number
    assert len(manager.called("Release")) == 1


@pytest.mark.parametrize(("mode", "status"), [(None, 127), (0o644, 126), (0o755, 126)])
def test_command_that_cannot_be_executed_is_released(
    manager: FakeManager, ctl: Ctl, tmp_path: Path, mode: int | None, status: int
) -> None:
    program = tmp_path / "program"
    if mode is not None:
        program.write_bytes(b"\0not a program")
        program.chmod(mode)
    done = ctl("run", "--", str(program))
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(f"resctrlctl: cannot execute '{program}': ")
    assert done.stderr.count("\n") == 1
    assert [request.reason for request in manager.called("Release")] == ["the command was not executed"]


def test_empty_command_is_not_found(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("run", "--", "")
    assert (done.returncode, done.stderr) == (127, "resctrlctl: cannot execute '': No such file or directory\n")
    assert [request.reason for request in manager.called("Release")] == ["the command was not executed"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGRTMIN"])
def test_signal_to_resctrlctl_is_forwarded_to_the_command(
    manager: FakeManager, environment: dict[str, str], name: str
) -> None:
    number = signal.Signals[name]
    # Python instead of sh, because dash loses a signal that arrives while it starts a program with vfork().
    code = f"import signal, sys; signal.signal({number:d}, lambda *_: sys.exit(9)); {WAIT}"
    # Under nohup, SIGHUP is ignored in this process, and resctrlctl would keep it ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with start(manager, environment, "--", PYTHON, "-c", code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, report = process.communicate(timeout=60)
    assert process.returncode == 9
    assert "core energy" in report


def test_command_gets_an_interrupt_from_the_terminal_once(manager: FakeManager, environment: dict[str, str]) -> None:
    code = (
        "import os, signal, time; signal.signal(signal.SIGINT, lambda *_: os.write(1, b'interrupted\\n')); "
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); os.write(1, b'ready\\n')\n"
        "while True: time.sleep(0.05)"
    )
    terminal, end = pty.openpty()
    arguments = command(manager.socket, "run", "-q", "--", PYTHON, "-c", code)
    script = (
        f"import fcntl, os, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp({arguments[0]!r}, {arguments!r})"
    )
    with subprocess.Popen(
        [PYTHON, "-c", script], stdin=end, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True
    ) as process:
        os.close(end)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(3):
            os.write(terminal, b"\x03")
            # A signal is not queued while the same one is pending (signal(7)).
            assert process.stdout.readline() == "interrupted\n"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert (output, process.returncode) == ("", 0)


def test_signal_from_the_command_is_not_forwarded_to_it(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("run", "-q", "--", "sh", "-c", "kill -USR1 $PPID; kill -TERM $PPID; exit 3")
    assert (done.returncode, done.stderr) == (3, "")
    assert len(manager.called("Release")) == 1


def test_command_has_no_blocked_signals(ctl: Ctl) -> None:
    status = ctl("run", "-q", "--", "cat", "/proc/self/status").stdout
    assert re.findall(r"SigBlk:\s+([0-9a-f]+)", status) == ["0" * 16]


def test_workload_is_released_after_an_interrupt_from_the_terminal(
    manager: FakeManager, environment: dict[str, str]
) -> None:
    with start(manager, environment, "--", PYTHON, "-c", WAIT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)  # to the process group, like the terminal
        _, report = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "core energy" in report
    assert len(manager.called("Release")) == 1


def test_interrupt_before_the_command_executes_leaves_no_workload(
    manager: FakeManager, environment: dict[str, str], tmp_path: Path
) -> None:
    manager.may_assign.clear()
    with start(manager, environment, "--", "touch", str(tmp_path / "ran")) as process:
        held(manager)
        os.killpg(process.pid, signal.SIGINT)
        manager.may_assign.set()
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert not (tmp_path / "ran").exists()
    assert [workload.state for workload in manager.workloads.values()] == [State.COMPLETED]


def test_interrupt_during_a_failing_assign_prints_no_error(manager: FakeManager, environment: dict[str, str]) -> None:
    manager.may_assign.clear()
    manager.assign_fails = error("NoSuchProcess", "process 12 has ended")
    with start(manager, environment, "--", "true") as process:
        held(manager)
        os.killpg(process.pid, signal.SIGINT)
        manager.may_assign.set()
        output, report = process.communicate(timeout=60)
    assert (process.returncode, output, report) == (128 + signal.SIGINT, "", "")


def test_command_does_not_execute_if_resctrlctl_is_killed_before(
    manager: FakeManager, environment: dict[str, str], tmp_path: Path
) -> None:
    manager.may_assign.clear()
    with start(manager, environment, "--", "touch", str(tmp_path / "ran")) as process:
        pid = held(manager)
        process.kill()
        process.communicate(timeout=60)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert not (tmp_path / "ran").exists()


def test_signals_ignored_by_the_shell_stay_ignored_but_those_ignored_by_python_do_not(ctl: Ctl) -> None:
    script = (
        f"trap '' HUP INT; exec {PYTHON} -m resctrlctl run -q --best-effort --socket /none -- cat /proc/self/status"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    ignored = int(re.findall(r"SigIgn:\s+([0-9a-f]+)", done.stdout)[0], 16)
    assert ignored & 0b11 == 0b11
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGQUIT, signal.SIGTERM):
        assert not ignored >> (number - 1) & 1


def test_command_inherits_only_the_descriptors_of_the_caller(
    manager: FakeManager, environment: dict[str, str], tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    listing = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    arguments = command(manager.socket, "run", "-o", str(tmp_path / "report"), "--", PYTHON, "-c", listing)
    done = subprocess.run(arguments, env=environment, pass_fds=[writing], capture_output=True, text=True, check=True)
    os.close(reading)
    os.close(writing)
    # One further descriptor is that of the directory that the command lists.
    expected = {0, 1, 2, writing}
    found = set(json.loads(done.stdout))
    assert expected <= found
    assert len(found - expected) == 1


def test_command_is_in_the_process_group_of_resctrlctl(ctl: Ctl) -> None:
    code = "import os; print(os.getpgrp() == os.getpgid(os.getppid()))"
    assert ctl("run", "--", PYTHON, "-c", code).stdout == "True\n"


def test_options_after_the_dashes_belong_to_the_command(ctl: Ctl) -> None:
    assert ctl("run", "--", "echo", "--json", "--", "-q").stdout == "--json -- -q\n"


def test_report_as_json(ctl: Ctl, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = ctl("run", "--key", "nightly", "--json", "-o", str(report), "--", "sh", "-c", "exit 3")
    assert (done.returncode, done.stderr) == (3, "")
    reply = json.loads(report.read_text())
    assert reply["workload"]["key"] == "nightly"
    assert reply["exitStatus"] == 3
    assert reply["command"] == ["sh", "-c", "exit 3"]
    assert reply["totals"][0] == {"event": "core_energy", "unit": "joules", "value": "12.345678", "quality": "exact"}
    assert reply["elapsed"] > 0
    assert (reply["tasksLeft"], reply["completed"]) == (0, True)
    to_stderr = ctl("run", "--json", "--", "true")
    assert (to_stderr.stdout, json.loads(to_stderr.stderr)["exitStatus"]) == ("", 0)


def test_control_characters_are_escaped_in_the_command(manager: FakeManager, ctl: Ctl) -> None:
    """Without the newline, two commands looked like one."""
    assert ctl("run", "--", "sh", "-c", "true\n:\t-").returncode == 0
    (request,) = manager.called("Assign")
    assert request.attributes == {"command": r"sh -c 'true\n:\t-'"}


def test_bytes_that_are_not_utf8_are_escaped_in_the_command(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("run", "--json", "--", "true", "\udcff\udcfe")
    assert json.loads(done.stderr)["command"] == ["true", r"\xff\xfe"]
    (request,) = manager.called("Assign")
    assert request.attributes == {"command": r"true '\xff\xfe'"}


def test_quiet_run_asks_only_what_it_needs(ctl: Ctl, manager: FakeManager) -> None:
    ctl("run", "-q", "--", "sleep", "0.8")
    assert [method for method, _ in manager.calls] == ["Get", "Assign", "Release"]
    manager.calls.clear()
    ctl("run", "--", "sleep", "0.8")
    asked = [method for method, _ in manager.calls]
    assert [method for method in asked if method != "Read"] == ["Get", "Assign", "Get", "Release"]


@contextlib.contextmanager
def waiting_run(manager: FakeManager, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """``run`` with the key k, whose command has begun and waits for a line."""
    begun = folder / "begun"
    with subprocess.Popen(
        command(manager.socket, "run", "--key", "k", "-j", "--", "sh", "-c", f"touch {begun}; read go"),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(begun.exists)
        yield process


@pytest.mark.parametrize("ended_early", [True, False])
def test_workload_that_ended_before_the_command_is_late_although_its_state_could_not_be_read(
    manager: FakeManager, tmp_path: Path, ended_early: bool
) -> None:
    """As while resctrlmond restarts. The totals of the shorter time were exact."""
    # The check that the key is free, and the one after the command.
    missing = error("NoSuchWorkload", "there is no workload")
    with waiting_run(manager, tmp_path) as process:
        manager.refuse["Get"] = missing
        workload = msgspec.structs.replace(manager.workloads["k"], claims=(), state=State.COMPLETED)
        at = LATER if ended_early else "2100-01-01T00:00:00.000000Z"
        workload = msgspec.structs.replace(workload, completed_at=at)
        manager.next_replies["Release"] = [types.ReleaseReply(workload=workload, completed=True, totals=TOTALS)]
        _, text = process.communicate("\n")
    report = json.loads(text)
    assert report.get("endedEarly", False) is ended_early
    qualities = {total["quality"] for total in report["totals"]}
    assert ("exact" in qualities) is not ended_early


@pytest.mark.parametrize("has_ended", [False, True])
def test_workload_of_another_command_with_the_key_is_not_released(
    manager: FakeManager, tmp_path: Path, has_ended: bool
) -> None:
    """The first one's workload was released meanwhile. Its report had the totals of the other one."""
    with waiting_run(manager, tmp_path) as process:
        (claim,) = manager.workloads["k"].claims
        other = msgspec.structs.replace(manager.workloads["k"], claims=(msgspec.structs.replace(claim, since=LATER),))
        if has_ended:
            (member,) = other.members
            members = (msgspec.structs.replace(member, id="pid-1"),)
            other = msgspec.structs.replace(other, claims=(), state=State.COMPLETED, members=members)
        manager.workloads["k"] = other
        _, text = process.communicate("\n")
    message, report = text.splitlines()
    assert "the one that exists now is of another command" in message
    assert json.loads(report)["totals"] == []
    assert "Release" not in [method for method, _ in manager.calls]


def test_quiet_run_prints_nothing_but_writes_the_file(ctl: Ctl, tmp_path: Path) -> None:
    done = ctl("run", "-q", "--", "true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    ctl("run", "-q", "-o", str(tmp_path / "report"), "--", "true")
    assert "core energy" in (tmp_path / "report").read_text()


def test_report_file_is_opened_before_the_command_starts(ctl: Ctl, tmp_path: Path) -> None:
    done = ctl("run", "-o", str(tmp_path / "no" / "report"), "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == 125
    assert done.stderr == (
        f"resctrlctl: cannot write the report to {tmp_path}/no/report: No such file or directory. "
        "Name another file with -o\n"
    )
    assert not (tmp_path / "ran").exists()


def test_full_disk_does_not_change_the_exit_status(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("run", "-o", "/dev/full", "--", "sh", "-c", "exit 6")
    (request,) = manager.called("Release")
    assert done.returncode == 6
    assert done.stderr == (
        "resctrlctl: cannot write the report: No space left on device. "
        f"The totals are also in: resctrlctl show {request.key}\n"
    )


def test_named_class_allows_a_change_of_class(manager: FakeManager, ctl: Ctl) -> None:
    ctl("run", "--class", "gold", "--take-over", "--", "true")
    ctl("run", "--class", "follow", "--", "true")
    named, follows = manager.called("Assign")
    assert (named.class_, named.allow_class_change, named.take_over) == ("gold", True, True)
    assert (follows.class_, follows.allow_class_change, follows.take_over) == ("follow", None, None)
    # A task that is taken over is not counted in the outer workload.
    assert (named.nested, follows.nested) == (None, True)


@pytest.mark.parametrize("best_effort", [False, True])
@pytest.mark.parametrize("name", ["RmidsExhausted", "PermissionDenied"])
def test_command_that_cannot_be_monitored_runs_only_with_best_effort(
    manager: FakeManager, ctl: Ctl, tmp_path: Path, name: str, best_effort: bool
) -> None:
    manager.refuse["Assign"] = error(name, "it is so")
    options = ["--best-effort"] if best_effort else []
    done = ctl("run", "--key", "k", *options, "--", "sh", "-c", f"touch {tmp_path}/ran; exit 4")
    assert done.returncode == (4 if best_effort else 125)
    assert (tmp_path / "ran").exists() == best_effort
    assert done.stderr.startswith("resctrlctl: cannot monitor 'sh' as 'k': it is so")
    assert ("The command runs unmonitored\n" in done.stderr) == best_effort
    assert ("elapsed" in done.stderr) == best_effort
    assert manager.called("Release") == []


def test_command_runs_without_the_daemon_and_its_times_are_reported(ctl: Ctl, tmp_path: Path) -> None:
    done = ctl("run", "--socket", str(tmp_path / "none"), "--", "sh", "-c", "exit 3")
    assert done.returncode == 3
    note, *report = done.stderr.splitlines()
    assert "resctrlmond is not running" in note
    assert note.endswith("The command runs unmonitored")
    assert [line.split()[0] for line in report if line.startswith("  ")] == ["elapsed", "user", "system"]


def test_repeated_runs_have_means_and_deviations(manager: FakeManager, ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "report"
    done = ctl("run", "--key", "k", "-r", "3", "--json", "-o", str(file), "--", "sh", "-c", "echo x")
    assert (done.returncode, done.stdout) == (0, "x\n" * 3)
    assert [request.key for request in manager.called("Release")] == ["k"] * 3
    reply = json.loads(file.read_text())
    assert [run["exitStatus"] for run in reply["runs"]] == [0, 0, 0]
    energy, traffic, *_, elapsed, _user, _system = reply["figures"]
    assert (energy["event"], energy["mean"], energy["deviation"]) == ("core_energy", "12.345678", "0.000000")
    assert (traffic["event"], traffic["mean"], traffic["perSecond"]) == ("mbm_total_bytes", None, None)
    seconds = [run["elapsed"] for run in reply["runs"]]
    assert float(elapsed["mean"]) == pytest.approx(statistics.mean(seconds), abs=1e-6)
    assert float(elapsed["deviation"]) == pytest.approx(statistics.stdev(seconds), abs=1e-6)
    text = ctl("run", "-r", "2", "--", "true").stderr
    assert "true: 2 runs" in text
    assert re.search(r"core energy  12\.345678 J +± 0\.0 %", text)


def test_signal_that_ends_the_command_ends_the_repetition(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("run", "-r", "5", "--", "sh", "-c", "kill -TERM $$")
    assert done.returncode == 128 + signal.SIGTERM
    assert len(manager.called("Assign")) == 1


def test_last_exit_status_of_repeated_runs_counts(ctl: Ctl, tmp_path: Path) -> None:
    done = ctl(
        "run", "-q", "-r", "2", "--", "sh", "-c", f"test -e {tmp_path}/x && exit 4; touch {tmp_path}/x; exit 5"
    )
    assert done.returncode == 4


def test_fields_are_separated_as_asked(ctl: Ctl) -> None:
    lines = ctl("run", "-x", ";", "--", "true").stderr.splitlines()
    energy, traffic, *_, elapsed, _user, _system = (line.split(";") for line in lines)
    assert energy[:4] == ["core_energy", "joules", "12.345678", ""]
    assert (float(energy[4]) > 0, energy[5]) == (True, "exact")
    assert traffic == ["mbm_total_bytes", "bytes", "", "", "", "unknown"]
    assert (elapsed[:2], elapsed[3:]) == (["elapsed", "s"], ["", "", ""])


def test_only_events_that_match_are_reported(manager: FakeManager, ctl: Ctl) -> None:
    manager.capacity = ALL_EVENTS
    done = ctl("run", "-e", "core_*", "-x", ",", "--", "true")
    assert [line.split(",")[0] for line in done.stderr.splitlines()] == ["core_energy", "elapsed", "user", "system"]


def test_command_is_not_executed_if_no_event_of_the_machine_matches(
    manager: FakeManager, ctl: Ctl, tmp_path: Path
) -> None:
    manager.capacity = ALL_EVENTS
    report = tmp_path / "report"
    report.write_text("earlier")
    done = ctl("run", "-e", "joules,nosuch", "-o", str(report), "--", "touch", str(tmp_path / "ran"))
    assert (done.returncode, done.stderr) == (
        125,
        "resctrlctl: no event matches 'joules,nosuch'. "
        "The events of this machine are: llc_occupancy, mbm_total_bytes, core_energy\n",
    )
    assert not (tmp_path / "ran").exists() and not manager.called("Assign")
    assert report.read_text() == "earlier"
    # A list for several machines may have an event that this one lacks.
    assert ctl("run", "-e", "joules,llc*", "--", "true").returncode == 0


def test_events_are_not_checked_without_the_daemon(tmp_path: Path, environment: dict[str, str]) -> None:
    words = command(str(tmp_path / "no-socket"), "run", "-e", "nosuch", "--", "sh", "-c", "exit 3")
    assert subprocess.run(words, env=environment, check=False, capture_output=True).returncode == 3


def test_report_is_appended(ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "report"
    for _ in range(2):
        ctl("run", "-x", ",", "-o", str(file), "--append", "--", "true")
    assert [line.split(",")[0] for line in file.read_text().splitlines()].count("core_energy") == 2


def test_key_of_a_workload_that_is_not_over_is_refused(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k", claims=(Claim("oci", NOW, EndRule.CONTAINER),))
    done = ctl("run", "--key", "k", "--", "true")
    assert done.returncode == 125
    assert (
        done.stderr
        == "resctrlctl: cannot monitor 'true' as 'k': the workload exists already (active). Choose another --key\n"
    )
    assert [name for name, _ in manager.calls] == ["Get"]
    manager.add("k", state=State.COMPLETED, claims=())
    assert ctl("run", "--key", "k", "--", "true").returncode == 0


def test_command_outside_its_group_is_not_executed(manager: FakeManager, ctl: Ctl, tmp_path: Path) -> None:
    manager.tasks_outside = 1
    done = ctl("run", "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == 125
    assert "--take-over" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert len(manager.called("Release")) == 1


def test_tasks_that_still_run_are_reported(manager: FakeManager, ctl: Ctl) -> None:
    # In the in-memory manager, the group is a directory in which a test can write the file "tasks".
    script = f"printf '11\\n12\\n' > {manager.tree}/k/tasks"
    done = ctl("run", "--key", "k", "--", "sh", "-c", script)
    assert done.stderr.endswith(
        "2 tasks of the command are still running; what they use from now on is not counted.\n"
    )
    assert json.loads(ctl("run", "--key", "k", "--json", "--", "sh", "-c", script).stderr)["tasksLeft"] == 2


def test_nested_workloads_that_still_run_are_reported(manager: FakeManager, ctl: Ctl) -> None:
    done = manager.add("k", nested=4, state=State.COMPLETED)
    manager.add("a", part_of=("k",))
    manager.add("b", part_of=("mid", "k"))
    manager.add("ended", part_of=("k",), state=State.COMPLETED)
    manager.add("of-earlier-run", part_of=("k",), created_at="2026-01-01T00:00:00.000000Z")
    manager.add("other", part_of=("mid",))
    manager.replies["Release"] = types.ReleaseReply(workload=done, completed=True, totals=[])
    errors = ctl("run", "--key", "k", "--", "true").stderr
    assert errors.endswith(
        "2 nested workloads are still running (a, b): what they use from now on is not included.\n"
    )
    del manager.workloads["b"], manager.workloads["k"]
    errors = ctl("run", "--key", "k", "--", "true").stderr
    assert errors.endswith("1 nested workload is still running (a): what it uses from now on is not included.\n")
    del manager.workloads["k"]
    assert json.loads(ctl("run", "--key", "k", "-j", "--", "true").stderr)["nestedLeft"] == ["a"]


def test_failed_release_keeps_the_exit_status_and_the_times(manager: FakeManager, ctl: Ctl) -> None:
    manager.refuse["Release"] = error("NotMounted", "it is gone")
    done = ctl("run", "--key", "k", "--", "sh", "-c", "exit 8")
    assert done.returncode == 8
    lines = done.stderr.splitlines()
    assert lines[:3] == ["", "sh -c 'exit 8': k in class /", ""]
    assert [line.split()[0] for line in lines[3:6]] == ["elapsed", "user", "system"]
    assert lines[6:] == [
        "No totals: cannot release 'k': it is gone.",
        "When resctrlmond runs, it ends the workload. For the totals, use: resctrlctl show k",
    ]
    quiet = ctl("run", "--key", "q", "-q", "--", "sh", "-c", "exit 8")
    assert quiet.stderr == "resctrlctl: cannot release 'q': it is gone\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_report_has_times_if_the_daemon_stops_before_the_end(
    environment: dict[str, str], tmp_path: Path, form: str
) -> None:
    report = tmp_path / "report"
    options = ["--key", "k", "-o", str(report), *(["--json"] if form == "json" else [])]
    with serving(tmp_path) as manager:
        process = start(manager, environment, *options, "--", "sh", "-c", "echo ready; read line; exit 3")
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    os.unlink(manager.socket)
    _, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 3
    assert errors.startswith("resctrlctl: cannot release 'k': resctrlmond is not running: ")
    assert errors.count("\n") == 1
    if form == "text":
        assert [line.split()[0] for line in report.read_text().splitlines()[3:6]] == ["elapsed", "user", "system"]
        assert "No totals: cannot release 'k': resctrlmond is not running" in report.read_text()
    else:
        reply = json.loads(report.read_text())
        assert (reply["exitStatus"], reply["completed"], reply["tasksLeft"], reply["totals"]) == (3, False, None, [])
        assert reply["elapsed"] > 0
        assert reply["workload"]["key"] == "k"
        assert reply["problem"].startswith("cannot release 'k': resctrlmond is not running")


def test_release_is_retried_after_a_restart_of_the_daemon(manager: FakeManager, ctl: Ctl) -> None:
    manager.cuts["Release"] = 1
    done = ctl("run", "--key", "k", "--", "true")
    assert len(manager.called("Release")) == 2
    assert "core energy  12.345678 J" in done.stderr


def test_report_of_an_unmonitored_command_has_its_times(manager: FakeManager, ctl: Ctl) -> None:
    manager.refuse["Assign"] = error("RmidsExhausted", "no RMID is free")
    done = ctl("run", "--key", "k", "--best-effort", "--json", "-q", "--", "sh", "-c", "exit 4")
    reply = json.loads(done.stderr)
    assert (done.returncode, reply["exitStatus"], reply["workload"], reply["totals"]) == (4, 4, None, [])
    assert reply["problem"] == "cannot monitor 'sh' as 'k': no RMID is free"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--"],
        ["--unknown", "--", "true"],
        ["--key", "--", "true"],
        ["--append", "true"],
        ["-r", "0", "true"],
        ["-x", ",", "--json", "true"],
        ["-I", "9", "true"],
        ["-p", "1"],
        ["-p", "1", "--unit", "x", "true"],
        ["-p", "x", "true"],
        ["-p", "1", "--class", "gold", "true"],
        ["--cgroup", "/x", "--take-over", "true"],
    ],
)
def test_wrong_command_line_of_run_exits_with_125(ctl: Ctl, arguments: list[str]) -> None:
    done = ctl("run", *arguments)
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.startswith("resctrlctl run: ")


def test_target_is_not_left_unmeasured_without_the_daemon(ctl: Ctl, tmp_path: Path) -> None:
    words = ["--socket", str(tmp_path / "none"), "-p", str(os.getpid())]
    done = ctl("run", *words, "touch", str(tmp_path / "ran"))
    assert (done.returncode, "resctrlmond is not running" in done.stderr) == (125, True)
    assert not (tmp_path / "ran").exists()
    assert ctl("run", *words, "--best-effort", "sh", "-c", "exit 3").returncode == 3


def test_claim_on_a_control_group_does_not_end_while_it_is_empty(manager: FakeManager, ctl: Ctl) -> None:
    ctl("run", "--cgroup", "/x/../web.slice", "true")
    ctl("run", "-p", str(os.getpid()), "true")
    of_cgroup, of_process = manager.called("Assign")
    assert (of_cgroup.cgroup, of_cgroup.end_rule) == ("/web.slice", EndRule.RELEASE)
    assert (of_process.pid, of_process.end_rule) == (os.getpid(), EndRule.MEMBERS)
    assert (of_process.include_descendants, of_process.late) == (True, None)


def until(file: Path, text: str) -> list[str]:
    """Return a command that ends when the file has this text."""
    return ["sh", "-c", f"until grep -q '{text}' {file}; do sleep 0.02; done"]


def test_intervals_are_printed_while_the_command_runs(ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "report"
    options = ["-I", "10", "-o", str(file)]
    assert ctl("run", *options, "--", *until(file, "energy  *0.0")).returncode == 0
    lines = file.read_text().splitlines()
    assert re.fullmatch(r" +[0-9]\.[0-9]{6}  core energy +12\.345678 J  exact", lines[0])
    assert re.fullmatch(r" +[0-9]\.[0-9]{6}  mbm total +unknown  unknown", lines[1])
    assert re.fullmatch(r" +[0-9]\.[0-9]{6}  llc occupancy +1\.50 MiB", lines[2])
    # The totals of this manager never change.
    assert re.fullmatch(r" +[0-9]\.[0-9]{6}  core energy +0\.000000 J  exact", lines[3])
    ctl("run", *options, "-x", ";", "-e", "core*,llc*", "--", *until(file, ";0.0"))
    rows = [line.split(";") for line in file.read_text().splitlines()]
    assert [row[1:] for row in rows[:3]] == [
        ["core_energy", "12.345678", "joules", "exact"],
        ["llc_occupancy", "1572864", "bytes", ""],
        ["core_energy", "0.000000", "joules", "exact"],
    ]
    assert float(rows[0][0]) < float(rows[2][0])
    ctl("run", *options, "--json", "--", *until(file, '"0.0'))
    first, *_, last, report = map(json.loads, file.read_text().splitlines())
    assert (first["totals"][0]["value"], first["levels"][0]["value"]) == ("12.345678", "1572864")
    # The last interval ends with the command.
    assert (last["time"], last["levels"]) == (report["elapsed"], [])


def test_intervals_of_repeated_runs_have_the_number_of_the_run(ctl: Ctl) -> None:
    options = ["-r", "2", "-I", "60000", "-e", "core*,llc*"]
    text = ctl("run", *options, "--", "true").stderr
    assert re.findall(r"^run ([0-9]+) .*core energy", text, re.MULTILINE) == ["1", "2"]
    fields = ctl("run", *options, "-x", ";", "--", "true").stderr.splitlines()
    assert [line.split(";")[1:2] + line.split(";")[5:] for line in fields[:2]] == [
        ["core_energy", "1"],
        ["core_energy", "2"],
    ]
    lines = [json.loads(line) for line in ctl("run", *options, "--json", "--", "true").stderr.splitlines()]
    assert [line.get("run") for line in lines] == [1, 2, None]
    once = json.loads(ctl("run", *options[2:], "--json", "--", "true").stderr.splitlines()[0])
    assert "run" not in once


def test_cache_occupancy_is_sampled_while_the_command_runs(manager: FakeManager, environment: dict[str, str]) -> None:
    for options in ([], ["--json"]):
        manager.calls.clear()
        with start(manager, environment, "-r", "1", *options, "--", "sh", "-c", "read line") as process:
            wait_until(lambda: len(manager.called("Read")) > 1)
            _, report = process.communicate("\n", timeout=60)
        if options:
            (level,) = json.loads(report)["levels"]
            assert level.pop("samples") >= 1
            assert level == {"event": "llc_occupancy", "unit": "bytes", "average": "1572864", "peak": "1572864"}
        else:
            assert re.search(r"llc occupancy average +1\.50 MiB\n +llc occupancy peak +1\.50 MiB\n", report)


def test_failing_samples_change_neither_the_totals_nor_the_exit_status(
    manager: FakeManager, environment: dict[str, str]
) -> None:
    manager.refuse["Read"] = error("NotMounted", "it is gone")
    for options in ([], ["-I", "10"]):
        manager.calls.clear()
        with start(manager, environment, "--key", "k", *options, "--", "sh", "-c", "read line; exit 3") as process:
            wait_until(lambda: len(manager.called("Read")) > 1)
            _, report = process.communicate("\n", timeout=60)
        assert process.returncode == 3
        assert "core energy  12.345678 J" in report
        assert "llc" not in report
        assert report.count("resctrlctl: cannot read 'k': it is gone\n") == len(options) / 2


def test_intervals_on_a_full_disk_do_not_disturb_the_command(
    manager: FakeManager, environment: dict[str, str]
) -> None:
    with start(manager, environment, "-I", "10", "-o", "/dev/full", "--", "sh", "-c", "read line; exit 4") as process:
        wait_until(lambda: len(manager.called("Read")) > 2)
        _, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 4
    assert errors.count("cannot write the intervals: No space left on device. The command continues\n") == 1


@pytest.mark.parametrize("is_monitored", [False, True])
def test_elapsed_time_of_a_target_is_the_time_that_its_totals_cover(
    manager: FakeManager, environment: dict[str, str], is_monitored: bool
) -> None:
    manager.capacity = ALL_EVENTS
    if is_monitored:
        member = Member("m", "process", "cli", pid=os.getpid(), start_time=start_time(os.getpid()))
        workload = manager.add("all", members=(member,))
        Path(str(workload.path), "tasks").write_text(f"{os.getpid()}\n")
    words = ["-p", str(os.getpid()), "-j", "-e", "core*", "--", "sh", "-c", "read line"]
    with start(manager, environment, *words) as process:
        wait_until(
            lambda: processes.descendants(process.pid) and manager.called("Read" if is_monitored else "Assign")
        )
        # The command ends while the manager is held, and its totals are read half a second later.
        manager.answer_takes_s = 0.5
        _, report = process.communicate("\n", timeout=60)
    fields = json.loads(report)
    assert fields.get("isDifference", False) == is_monitored
    assert fields["elapsed"] >= 0.5
