# SPDX-License-Identifier: Apache-2.0
"""resctrlctl with the real daemon, on a simulated resctrl with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TypeAlias

import pytest

from resctrlctl.tree_view import TreeView
from resctrlmond.resctrl import processes
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef, Tree
from tests.ctl.conftest import ROOT, command

Ask: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]
BURN = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"


@dataclass(frozen=True)
class Host:
    """A running daemon: its folder, its tree, and resctrlctl that talks to it."""

    top: Path
    ask: Ask
    socket: str
    daemon: subprocess.Popen[bytes]

    @property
    def tree(self) -> Tree:
        """The simulated resctrl, read past the daemon."""
        return Tree.open(str(self.top / "resctrl"), allow_simulation=True)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The daemon with its simulator, until the end of this file's tests; it must end well."""
    top = tmp_path_factory.mktemp("host")
    socket = top / "run" / "org.resctrlmon.Manager"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TZ": "UTC"}

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = command(str(socket), *arguments)
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)

    log = top / "log"
    with log.open("w") as opened:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "resctrlmond", "--simulate", str(top)],
            env=environment,
            stdout=opened,
            stderr=opened,
        )
    try:
        deadline = time.monotonic() + 60
        while ask("status", "-q").returncode != 0:
            assert daemon.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        os.mkdir(top / "resctrl" / "gold")
        yield Host(top, ask, str(socket), daemon)
    finally:
        daemon.send_signal(signal.SIGTERM)
        ended = daemon.wait(60)
    assert ended == 0, log.read_text()


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that does nothing, for as long as the test runs."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def test_a_command_is_measured_and_its_group_gone(host: Host) -> None:
    done = host.ask("run", "--key", "burn", "--json", "--", sys.executable, "-c", BURN)
    assert done.returncode == 0
    report = json.loads(done.stderr)
    energy = next(total for total in report["totals"] if total["event"] == "core_energy")
    assert (energy["unit"], energy["quality"], report["completed"]) == ("joules", "exact", True)
    assert Decimal(energy["value"]) > 0
    assert report["user"] + report["system"] >= 0.3
    assert host.tree.find(GroupRef("", "burn")) is None
    assert "core_energy" in host.ask("show", "burn").stdout


def test_the_command_is_in_its_group_from_its_first_instruction(host: Host) -> None:
    listing = f"import os; print(os.getpid() in map(int, open('{host.top}/resctrl/gold/mon_groups/first/tasks')))"
    done = host.ask("run", "--key", "first", "--class", "gold", "--", sys.executable, "-c", listing)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_a_task_that_lives_on_is_told_and_not_ended(host: Host) -> None:
    done = host.ask("run", "--", "sh", "-c", "sleep 600 >&- 2>&- & echo $!; sleep 0.3")
    survivor = int(done.stdout)
    assert "\n1 task of the command still running" in done.stderr
    os.kill(survivor, signal.SIGKILL)


def test_a_command_that_is_not_found_leaves_no_group(host: Host) -> None:
    assert host.ask("run", "--key", "none", "--", "/no/such/program").returncode == 127
    assert host.tree.find(GroupRef("", "none")) is None


def test_a_command_in_a_group_already_is_refused_unless_taken_over(host: Host) -> None:
    inner = [*command(f"{host.top}/run/org.resctrlmon.Manager", "run"), "-q"]
    refused = host.ask("run", "-q", "--key", "outer", "--", *inner, "--", "true")
    assert refused.returncode == 125
    assert "is already in the monitoring group 'outer' of class /" in refused.stderr
    done = host.ask("run", "--json", "--", *inner, "--key", "inner", "--take-over", "--", "true")
    assert done.returncode == 0
    # The outer one lost the inner one's command.
    for total in json.loads(done.stderr)["totals"]:
        assert (total["quality"], total["reason"]) == ("late", "workload inner took over one of its tasks")


def test_the_life_of_a_workload(host: Host, sleeper: int) -> None:
    assert host.ask("create", "web", "--attribute", "pod.name=cart").stdout.startswith("web: idle in class / (")
    assigned = host.ask("assign", "web", "--pid", str(sleeper)).stdout
    assert "1 task moved" in assigned
    assert re.search(r"It had used up to 0\.[0-9]{3} s of CPU time before, .* its totals are late\.", assigned)
    row = next(line for line in host.ask("list").stdout.splitlines() if line.startswith("web "))
    assert re.fullmatch(r"web +/ +active +1 +[-0-9]+ [:0-9]+ +cart", row)
    assert host.ask("move", "web", "gold").stdout.startswith("web: active in class gold (")
    assert sleeper in host.tree.tasks(GroupRef("gold", "web"))
    shown = json.loads(host.ask("show", "-j", "web").stdout)
    assert shown["group"]["members"][0]["pid"] == sleeper
    assert {reading["event"] for reading in shown["readings"]} >= {"core_energy", "llc_occupancy"}
    released = host.ask("release", "web")
    assert released.stdout.startswith("web: completed")
    assert host.tree.find(GroupRef("gold", "web")) is None


def test_what_the_daemon_refuses(host: Host, sleeper: int) -> None:
    assert host.ask("show", "nobody").returncode == 4
    assert host.ask("assign", "x", "--pid", "2147483647").returncode == 4
    assert host.ask("create", "..").returncode == 1
    mismatch = host.ask("assign", "x", "--pid", str(sleeper), "--class", "gold")
    assert (mismatch.returncode, mismatch.stdout) == (1, "")
    assert mismatch.stderr.startswith(f"resctrlctl: cannot assign process {sleeper} to 'x': ")
    assert host.ask("assign", "x", "--pid", "1").returncode == 77


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "x", "--class", "missing"),
        ("assign", "x", "--pid", "PID", "--class", "missing", "--allow-class-change"),
        ("run", "--key", "x", "--class", "missing", "--", "true"),
        ("move", "standing", "missing"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_class_that_is_missing_is_one_error_everywhere(
    host: Host, sleeper: int, arguments: tuple[str, ...]
) -> None:
    """Some calls answered with the errno of their mkdir instead."""
    host.ask("create", "standing")
    done = host.ask(*(str(sleeper) if word == "PID" else word for word in arguments))
    assert done.returncode == (125 if arguments[0] == "run" else 1)
    told = f"{host.top}/resctrl/missing: there is no such class. 'resctrlctl status' lists the classes\n"
    assert done.stderr.endswith(told)
    assert host.tree.find(GroupRef("", "x")) is None


def test_the_tree_tells_the_same_as_the_daemon(host: Host, sleeper: int) -> None:
    host.ask("create", "same")
    host.ask("assign", "same", "--pid", str(sleeper))
    from_daemon = json.loads(host.ask("show", "-j", "same").stdout)
    found = host.tree.find(GroupRef("", "same"))
    assert found is not None
    view = TreeView(host.tree, found.gid).read("same")
    assert [(one.domain, one.event, one.unit) for one in view.readings] == [
        (one["domain"], one["event"], one["unit"]) for one in from_daemon["readings"]
    ]
    assert view.group.path == from_daemon["group"]["path"]
    host.ask("release", "same")


@pytest.mark.parametrize("source", ["daemon", "tree"])
def test_a_foreign_group_is_shown_in_each_class_that_has_one_of_its_name(host: Host, source: str) -> None:
    folders = [
        host.top / "resctrl" / "mon_groups" / "pqos-1",
        host.top / "resctrl" / "gold" / "mon_groups" / "pqos-1",
    ]
    for folder in folders:
        os.mkdir(folder)
    before = {folder: folder.stat() for folder in folders}
    options = ["--root", f"{host.top}/resctrl", "--socket", "/none"] if source == "tree" else []
    try:
        listed = json.loads(host.ask("list", "-j", *options).stdout)
        assert {"class": "", "name": "pqos-1", "path": str(folders[0])} in listed["foreign"]
        done = host.ask("show", "-j", "pqos-1", *options)
        assert done.returncode == 0, done.stderr
        told = [json.loads(line) for line in done.stdout.splitlines()]
        assert [one["foreign"]["class"] for one in told] == ["", "gold"]
        assert all({reading["event"] for reading in one["readings"]} >= {"core_energy"} for one in told)
        assert "foreign: another program created it" in host.ask("show", str(folders[1]), *options).stdout
        assert host.ask("show", "pqos-2", *options).returncode == 4
        # Only read.
        assert {folder: (folder.stat().st_gid, folder.stat().st_mtime_ns) for folder in folders} == {
            folder: (status.st_gid, status.st_mtime_ns) for folder, status in before.items()
        }
        assert host.ask("release", "pqos-1").returncode == 4
    finally:
        for folder in folders:
            os.rmdir(folder)


def test_a_task_in_another_class_stays_there_in_a_second_group_and_this_is_shown(host: Host, sleeper: int) -> None:
    assert host.ask("create", "two", "--class", "gold").returncode == 0
    done = host.ask("assign", "two", "--pid", str(sleeper))
    assert done.stdout.startswith("two: active in classes gold, / (")
    assert "the tasks stay in their class, where the workload has a further group" in done.stderr
    assert host.tree.membership(sleeper) == Membership("", "two")
    refused = host.ask("assign", "two", "--pid", str(sleeper), "--class", "gold")
    assert refused.returncode == 1
    assert "Can't move task to different control group" in refused.stderr
    assert host.tree.membership(sleeper) == Membership("", "two")
    moved = host.ask("assign", "two", "--pid", str(sleeper), "--class", "gold", "--allow-class-change")
    assert (moved.returncode, moved.stderr) == (0, "")
    assert host.tree.membership(sleeper) == Membership("gold", "two")
    host.ask("release", "two")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGQUIT"])
def test_a_second_signal_after_the_end_of_the_command_stops_waiting_for_a_daemon_that_hangs(
    host: Host, name: str
) -> None:
    words = ("run", "--key", f"hung-{name}", "--", "sh", "-c", "echo ready; read line; exit 7")
    with subprocess.Popen(
        command(host.socket, *words),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "ready\n"
        host.daemon.send_signal(signal.SIGSTOP)
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            deadline = time.monotonic() + 60
            while processes.descendants(process.pid):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.Signals[name])
            assert "send the signal again to stop waiting" in process.stderr.readline()
            process.send_signal(signal.Signals[name])
            _, report = process.communicate(timeout=60)
        finally:
            host.daemon.send_signal(signal.SIGCONT)
    assert process.returncode == 7
    assert f"No totals: cannot release 'hung-{name}': interrupted while resctrlmond did not answer." in report
    assert "elapsed" in report


def test_a_third_signal_ends_what_can_do_nothing_else(tmp_path: Path) -> None:
    """The report goes into a pipe that is full and that nobody reads."""
    code = (
        "import os, signal\n"
        "from resctrlctl.child import HeldChild\n"
        "child = HeldChild(['sh', '-c', 'exit 7'])\n"
        "child.wait(child.let_go())\n"
        "print('ready', flush=True)\n"
        "while True: os.write(2, b'x' * 4096)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            # One that is sent while the same is pending is not queued (signal(7)).
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert process.returncode == 7
