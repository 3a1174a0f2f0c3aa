# SPDX-License-Identifier: Apache-2.0
"""resctrlctl with the real daemon, on a simulated resctrl with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from resctrlctl.workloads.tree_view import TreeView
from resctrlmond.api import types
from resctrlmond.client import Client
from resctrlmond.resctrl import processes
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.model.states import ProofKind
from tests.ctl.conftest import ROOT, Ctl, command
from tests.daemon.conftest import cgroup_root
from tests.wait import wait_until

BURN = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"

# Creates groups until no RMID is left. mkdir also fails while the RMIDs of earlier tests are in limbo, and those
# become free later: the RMIDs are used up when there are as many groups and classes as RMIDs.
FILL = """\
import os, pathlib, sys, time
root = pathlib.Path(sys.argv[1])
rmids = int((root / "info/L3_MON/num_rmids").read_text())
made = 0
while True:
    try:
        (root / f"mon_groups/fill-{made}").mkdir()
        made += 1
    except OSError:
        classes = [root, *(path.parent for path in root.glob("*/mon_groups"))]
        if sum(1 + len(os.listdir(one / "mon_groups")) for one in classes) == rmids:
            break
        time.sleep(0.01)
"""

# Waits until a process has used some CPU time, which is read from the clock of clock_getcpuclockid(3).
UNTIL_USED = """\
import sys, time
clock = ~int(sys.argv[1]) << 3 | 2
until = time.clock_gettime(clock) + 0.01
while time.clock_gettime(clock) < until:
    time.sleep(0.01)
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TZ": "UTC"}


@dataclass(frozen=True)
class Host:
    """A running daemon with its directory and socket. ``ctl`` runs resctrlctl as its client."""

    top: Path
    ctl: Ctl
    socket: str
    daemon: subprocess.Popen[bytes]

    @property
    def tree(self) -> Tree:
        """The simulated resctrl, read without the daemon."""
        return Tree.open(str(self.top / "resctrl"), allow_simulation=True)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The daemon with its simulator, for all tests of this module. Its exit status must be 0."""
    top = tmp_path_factory.mktemp("host")
    socket = top / "run" / "org.resctrlmon.Manager"
    environment = ENVIRONMENT

    def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = command(str(socket), *arguments)
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)

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
        while ctl("status", "-q").returncode != 0:
            assert daemon.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        os.mkdir(top / "resctrl" / "gold")
        yield Host(top, ctl, str(socket), daemon)
    finally:
        daemon.send_signal(signal.SIGTERM)
        ended = daemon.wait(60)
    assert ended == 0, log.read_text()


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that sleeps until the end of the test."""
    with subprocess.Popen(["sleep", "600"]) as process:
        # Its use before it sleeps is not to be counted in a workload.
        wait_until(lambda: processes.stat_fields(process.pid)[0] == b"S")
        yield process.pid
        process.kill()


def test_run_reports_totals_and_removes_the_group(host: Host) -> None:
    done = host.ctl("run", "--key", "burn", "--json", "--", sys.executable, "-c", BURN)
    assert done.returncode == 0
    report = json.loads(done.stderr)
    energy = next(total for total in report["totals"] if total["event"] == "core_energy")
    assert (energy["unit"], energy["quality"], report["completed"]) == ("joules", "exact", True)
    assert Decimal(energy["value"]) > 0
    assert report["user"] + report["system"] >= 0.3
    assert host.tree.find(GroupRef("", "burn")) is None
    assert "core_energy" in host.ctl("show", "burn").stdout


def test_command_is_in_its_group_from_its_first_instruction(host: Host) -> None:
    listing = f"import os; print(os.getpid() in map(int, open('{host.top}/resctrl/gold/mon_groups/first/tasks')))"
    done = host.ctl("run", "--key", "first", "--class", "gold", "--", sys.executable, "-c", listing)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_task_that_still_runs_is_reported_and_not_ended(host: Host) -> None:
    done = host.ctl("run", "--", "sh", "-c", "sleep 600 >&- 2>&- & echo $!")
    survivor = int(done.stdout)
    assert "\n1 task of the command is still running; what it uses" in done.stderr
    os.kill(survivor, signal.SIGKILL)


def test_command_that_is_not_found_leaves_no_group(host: Host) -> None:
    assert host.ctl("run", "--key", "none", "--", "/no/such/program").returncode == 127
    assert host.tree.find(GroupRef("", "none")) is None


def test_inner_run_and_outer_run_are_exact(host: Host, tmp_path: Path) -> None:
    """The outer one includes the inner one, and what its tasks use after its end."""
    file = tmp_path / "inner"
    inner = command(host.socket, "run", "-j", "-o", str(file), "--key", "inside", "--", sys.executable, "-c", BURN)
    script = f"{shlex.join(inner)}; {shlex.join([sys.executable, '-c', BURN])}"
    done = host.ctl("run", "-I", "50", "--key", "around", "-j", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    *intervals, outer = map(json.loads, done.stderr.splitlines())
    report = json.loads(file.read_text())
    (inside, quality, _), (around, outer_quality, _) = energy_in(report), energy_in(outer)
    assert (quality, outer_quality) == ("exact", "exact")
    assert 0 < inside < around
    assert sum(energy_in(interval)[0] for interval in intervals) == around
    assert (report["workload"]["partOf"], outer["workload"]["nested"]) == (["around"], 1)
    shown = json.loads(host.ctl("show", "-j", "around").stdout)
    assert energy_in({"totals": shown["nested"]})[0] == inside
    assert energy_in(shown)[0] == around - inside
    assert energy_in({"totals": outer["nested"]})[0] == inside
    text = host.ctl("show", "around").stdout
    assert re.search(r"EVENT +IN NESTED +PER SECOND +QUALITY\n *activity ", text), text
    assert re.search(r"\n +Nested: 1 workload\n", text), text


def test_tasks_that_an_inner_run_leaves_are_counted_in_the_outer_one(host: Host, tmp_path: Path) -> None:
    go = tmp_path / "go"
    burn = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n{BURN}"
    leaving = f"{shlex.join([sys.executable, '-c', burn])} >/dev/null 2>&1 & echo $!"
    inner = shlex.join(command(host.socket, "run", "--key", "left", "--", "sh", "-c", leaving))
    group = f"{host.top}/resctrl/mon_groups/stays/tasks"
    script = f"pid=$({inner}); grep -x $pid {group}; touch {go}; while kill -0 $pid 2>/dev/null; do sleep 0.1; done"
    done = host.ctl("run", "--key", "stays", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[0-9]+\n", done.stdout), done.stdout
    assert "1 task of the command is still running; what it uses from now on is not counted here." in done.stderr
    assert "The totals include 1 nested workload." in done.stderr
    assert {total["quality"] for total in json.loads(host.ctl("show", "-j", "stays").stdout)["totals"]} == {"exact"}


def test_inner_run_that_outlives_the_outer_one_is_reported(host: Host) -> None:
    inner = shlex.join(command(host.socket, "run", "-q", "--key", "inner", "--", "sh", "-c", "echo ready; sleep 600"))
    # Only the line "ready" ends the outer command. The inner run keeps neither of its streams.
    script = f"mkfifo $0; {inner} >$0 2>&- <&- & read line <$0; echo $!"
    done = host.ctl("run", "--key", "outer", "-j", "--", "sh", "-c", script, str(host.top / "fifo"))
    os.kill(int(done.stdout), signal.SIGTERM)
    assert json.loads(done.stderr)["nestedLeft"] == ["inner"]


def test_outer_run_is_late_if_the_inner_run_takes_over(host: Host) -> None:
    inner = [*command(host.socket, "run"), "-q"]
    done = host.ctl("run", "--json", "--", *inner, "--key", "inner", "--take-over", "--", "true")
    assert done.returncode == 0
    for total in json.loads(done.stderr)["totals"]:
        assert (total["quality"], total["reason"]) == (
            "late",
            "tasks were moved out of the group, and their use outside is not counted: workload inner took them over",
        )


def test_inner_run_in_a_foreign_group_is_refused(host: Host) -> None:
    foreign = host.top / "resctrl" / "mon_groups" / "theirs"
    foreign.mkdir()
    try:
        inner = shlex.join([*command(host.socket, "run"), "-q", "--", "true"])
        refused = subprocess.run(
            ["sh", "-c", f"echo $$ > {foreign}/tasks && {inner}"],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        foreign.rmdir()
    assert refused.returncode == 125
    assert "With --best-effort, the command runs in that group, and is counted there" in refused.stderr
    assert "is already in the monitoring group 'theirs' of class /" in refused.stderr


@pytest.mark.parametrize("options", [[], ["--class", "gold"]])
def test_outer_run_is_never_exact_without_what_the_inner_run_used(
    host: Host, tmp_path: Path, options: list[str]
) -> None:
    """Its intervals are late too, from the moment when the inner run takes the command over."""
    inner = command(host.socket, "run", "-j", "-o", str(tmp_path / "inner"), "--key", "part", "--take-over", *options)
    done = host.ctl("run", "-I", "20", "-j", "--", *inner, "--", sys.executable, "-c", BURN)
    assert done.returncode == 0, done.stderr
    *intervals, outer = map(json.loads, done.stderr.splitlines())
    assert energy_in(json.loads((tmp_path / "inner").read_text()))[1] == "exact"
    reason = "tasks were moved out of the group, and their use outside is not counted: workload part took them over"
    for total in [*outer["totals"], *intervals[-1]["totals"]]:
        assert (total["quality"], total["reason"]) == ("late", reason)


def are_free(groups: list[Path]) -> bool:
    """Return whether all these groups can be created; remove them."""
    made = []
    try:
        for path in groups:
            path.mkdir()
            made.append(path)
    except OSError:
        return False
    finally:
        for path in made:
            path.rmdir()
    return True


def test_inner_run_with_best_effort_is_counted_in_the_outer_run(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "inner"
    inner = command(
        host.socket, "run", "--best-effort", "-j", "-q", "-o", str(file), "--", sys.executable, "-c", BURN
    )
    groups = host.top / "resctrl" / "mon_groups"
    fill = shlex.join([sys.executable, "-c", FILL, str(host.top / "resctrl")])
    try:
        done = host.ctl("run", "--key", "around", "-j", "--", "sh", "-c", f"{fill} && {shlex.join(inner)}")
    finally:
        for path in groups.glob("fill-*"):
            path.rmdir()
        # The RMIDs are in limbo now: the workloads of the next tests would wait for them.
        wait_until(lambda: are_free([groups / f"fill-{number}" for number in range(8)]))
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    outer, report = json.loads(done.stderr), json.loads(file.read_text())
    value, quality, reason = energy_in(report)
    assert (0 < value <= energy_in(outer)[0], quality, energy_in(outer)[1]) == (True, "estimated", "exact")
    assert reason == "the command ran in the group of workload around, and the use of other tasks there is counted"
    assert (report["workload"]["key"], report["isDifference"], "levels" in report) == ("around", True, False)


def test_workload_from_create_to_release(host: Host, sleeper: int) -> None:
    assert host.ctl("create", "web", "--attribute", "pod.name=cart").stdout.startswith("web: idle in class / (")
    assigned = host.ctl("assign", "web", "--pid", str(sleeper)).stdout
    assert "1 task moved" in assigned
    assert re.search(
        r"The member had used up to 0\.[0-9]{3} s of CPU time before, .* the totals of the workload are late\.",
        assigned,
    )
    row = next(line for line in host.ctl("list").stdout.splitlines() if line.startswith("cart "))
    assert re.fullmatch(r"cart +\d+s +[0-9.]+([KM]i)?B +0B +0B/s +0J +0W +late", row)
    assert host.ctl("move", "web", "gold").stdout.startswith("web: active in class gold (")
    assert sleeper in host.tree.tasks(GroupRef("gold", "web"))
    shown = json.loads(host.ctl("show", "-j", "web").stdout)
    assert shown["workload"]["members"][0]["pid"] == sleeper
    assert {reading["event"] for reading in shown["readings"]} >= {"core_energy", "llc_occupancy"}
    released = host.ctl("release", "web")
    assert released.stdout.startswith("web: completed")
    assert host.tree.find(GroupRef("gold", "web")) is None


def test_recording_has_the_final_totals_of_a_short_command(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "file"
    words = command(host.socket, "record", "-o", str(path), "-d", "86400", "burn-*")
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        wait_until(lambda: path.exists() and path.read_text().count("\n") == 2)
        done = host.ctl("run", "--key", "burn-short", "--json", "--", sys.executable, "-c", BURN)
        assert done.returncode == 0, done.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    header, first, last = map(json.loads, path.read_text().splitlines())
    assert header["events"]["core_energy"] == "joules"
    assert first["workloads"] == []
    (used,) = last["workloads"]
    assert (used["key"], used["state"], "completedAt" in used) == ("burn-short", "completed", True)
    totals = {total["event"]: total["value"] for total in json.loads(done.stderr)["totals"]}
    assert {event: total["value"] for event, total in used["totals"].items()} == totals


def test_watch_ends_with_the_program_that_reads_it(host: Host) -> None:
    words = command(host.socket, "watch", "-q", "read-*")
    assert host.ctl("create", "read-once").returncode == 0
    with subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "read-once\n"
        process.stdout.close()
        try:
            assert process.wait(60) == 1  # no further change comes
        finally:
            process.kill()
        assert process.stderr.read() == ""
    assert host.ctl("release", "read-once").returncode == 0


def test_errors_of_the_daemon_have_their_exit_status(host: Host, sleeper: int) -> None:
    assert host.ctl("show", "missing").returncode == 4
    assert host.ctl("assign", "x", "--pid", "2147483647").returncode == 4
    assert host.ctl("create", "..").returncode == 2
    mismatch = host.ctl("assign", "x", "--pid", str(sleeper), "--class", "gold")
    assert (mismatch.returncode, mismatch.stdout) == (1, "")
    assert mismatch.stderr.startswith(f"resctrlctl: cannot assign process {sleeper} to 'x': ")
    assert host.ctl("assign", "x", "--pid", "1").returncode == 77


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
def test_missing_class_is_the_same_error_for_each_verb(host: Host, sleeper: int, arguments: tuple[str, ...]) -> None:
    host.ctl("create", "standing")
    done = host.ctl(*(str(sleeper) if word == "PID" else word for word in arguments))
    assert done.returncode == (125 if arguments[0] == "run" else 1)
    message = f"{host.top}/resctrl/missing: there is no such class. 'resctrlctl status' lists the classes\n"
    assert done.stderr.endswith(message)
    assert host.tree.find(GroupRef("", "x")) is None


def test_tree_and_daemon_have_the_same_readings(host: Host, sleeper: int) -> None:
    host.ctl("create", "same")
    host.ctl("assign", "same", "--pid", str(sleeper))
    from_daemon = json.loads(host.ctl("show", "-j", "same").stdout)
    found = host.tree.find(GroupRef("", "same"))
    assert found is not None
    view = TreeView(host.tree, found.gid).read("same")
    assert [(reading.domain, reading.event, reading.unit) for reading in view.readings] == [
        (reading["domain"], reading["event"], reading["unit"]) for reading in from_daemon["readings"]
    ]
    assert view.workload.path == from_daemon["workload"]["path"]
    host.ctl("release", "same")


def test_root_of_a_simulation_has_the_workloads_of_its_daemon(host: Host) -> None:
    assert host.ctl("create", "seen", "--attribute", "unit=seen.service").returncode == 0
    try:
        options = ["--root", f"{host.top}/resctrl", "--socket", "/none"]
        listed = json.loads(host.ctl("list", "-aj", *options).stdout)
        by_key = {usage["workload"]["key"]: usage["workload"] for usage in listed["usages"]}
        assert by_key["seen"]["attributes"] == {"unit": "seen.service"}
        assert "seen" not in [group["name"] for group in listed["foreign"]]
        shown = json.loads(host.ctl("show", "-j", "seen", *options).stdout)
        assert shown["workload"]["claims"][0]["owner"] == "cli"
        assert {total["event"] for total in shown["totals"]} >= {"core_energy"}
        linked = host.top / "elsewhere"
        linked.symlink_to(host.top / "resctrl")
        assert "seen.service" in host.ctl("list", "--root", str(linked), "--socket", "/none").stdout
    finally:
        host.ctl("release", "seen")


@pytest.mark.parametrize("words", [("list",), ("show", "web")])
def test_error_without_the_daemon_of_a_simulation_names_its_root(host: Host, words: tuple[str, ...]) -> None:
    """README: list and show also work while the daemon is stopped."""
    done = host.ctl(*words, "--socket", f"{host.top}/run/none")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.endswith(
        f". To read the groups of the simulation without it, use: --root {host.top}/resctrl\n"
    ), done.stderr


@pytest.mark.parametrize("source", ["daemon", "tree"])
def test_show_prints_the_foreign_groups_of_all_classes_with_that_name(host: Host, source: str) -> None:
    folders = [
        host.top / "resctrl" / "mon_groups" / "pqos-1",
        host.top / "resctrl" / "gold" / "mon_groups" / "pqos-1",
    ]
    for folder in folders:
        os.mkdir(folder)
    before = {folder: folder.stat() for folder in folders}
    options = ["--root", f"{host.top}/resctrl", "--socket", "/none"] if source == "tree" else []
    try:
        listed = json.loads(host.ctl("list", "-aj", *options).stdout)
        assert {"class": "", "name": "pqos-1", "path": str(folders[0])} in listed["foreign"]
        done = host.ctl("show", "-j", "pqos-1", *options)
        assert done.returncode == 0, done.stderr
        replies = [json.loads(line) for line in done.stdout.splitlines()]
        assert [reply["foreign"]["class"] for reply in replies] == ["", "gold"]
        assert all({reading["event"] for reading in reply["readings"]} >= {"core_energy"} for reply in replies)
        assert "foreign: another program created it" in host.ctl("show", str(folders[1]), *options).stdout
        listed_by_path = host.ctl("show", "gold/mon_groups/pqos-1", "-p", "path", "--value", *options)
        assert listed_by_path.stdout == f"{folders[1]}\n"
        assert host.ctl("show", "pqos-2", *options).returncode == 4
        # The daemon has not changed them.
        assert {folder: (folder.stat().st_gid, folder.stat().st_mtime_ns) for folder in folders} == {
            folder: (status.st_gid, status.st_mtime_ns) for folder, status in before.items()
        }
        assert host.ctl("release", "pqos-1").returncode == 4
    finally:
        for folder in folders:
            os.rmdir(folder)


def test_show_prefers_a_workload_to_a_class_with_its_name(host: Host) -> None:
    def shown(name: str) -> Any:
        done = host.ctl("show", "-j", name)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    assert shown("gold")["class"]["name"] == "gold"
    assert host.ctl("create", "gold", "--class", "gold").returncode == 0
    try:
        assert shown("gold")["workload"]["key"] == "gold"
        of_class = shown("gold/")
        assert (of_class["class"]["workloads"], of_class["groups"], of_class["foreign"]) == (1, 1, 0)
        assert (shown("/")["class"]["name"], shown("/")["path"]) == ("", f"{host.top}/resctrl")
    finally:
        host.ctl("release", "gold")


def test_task_in_another_class_is_counted_there_in_a_further_group(host: Host, sleeper: int) -> None:
    assert host.ctl("create", "two", "--class", "gold").returncode == 0
    done = host.ctl("assign", "two", "--pid", str(sleeper))
    assert done.stdout.startswith("two: active in classes gold, / (")
    assert "the tasks stay in their class, where the workload has a further group" in done.stderr
    assert host.tree.membership(sleeper) == Membership("", "two")
    refused = host.ctl("assign", "two", "--pid", str(sleeper), "--class", "gold")
    assert refused.returncode == 1
    assert "Can't move task to different control group" in refused.stderr
    assert host.tree.membership(sleeper) == Membership("", "two")
    moved = host.ctl("assign", "two", "--pid", str(sleeper), "--class", "gold", "--allow-class-change")
    assert (moved.returncode, moved.stderr) == (0, "")
    assert host.tree.membership(sleeper) == Membership("gold", "two")
    host.ctl("release", "two")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGQUIT"])
def test_second_signal_after_the_command_stops_the_wait_for_a_hung_daemon(host: Host, name: str) -> None:
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
            wait_until(lambda: not processes.descendants(process.pid))
            process.send_signal(signal.Signals[name])
            assert "Send the signal again to stop waiting" in process.stderr.readline()
            process.send_signal(signal.Signals[name])
            _, report = process.communicate(timeout=60)
        finally:
            host.daemon.send_signal(signal.SIGCONT)
    assert process.returncode == 7
    assert f"No totals: cannot release 'hung-{name}': interrupted while resctrlmond did not answer." in report
    assert "elapsed" in report


@contextlib.contextmanager
def stopped(host: Host) -> Iterator[None]:
    """Stop the daemon, so that it hangs, and continue it at the end."""
    host.daemon.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        host.daemon.send_signal(signal.SIGCONT)


def test_each_verb_waits_5_seconds_for_a_hung_daemon(host: Host, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    verbs = [
        ["list"],
        ["show", "k"],
        ["status"],
        ["machine"],
        ["sums"],
        ["classes"],
        ["list", "--pods"],
        ["top", "-b", "-n", "1"],
        ["record", "-o", str(tmp_path / "use.jsonl")],
        ["create", "k"],
        ["assign", "k", "--pid", str(os.getpid())],
        ["release", "k"],
        ["move", "k", "gold"],
        ["run", "--key", "k", "--", "touch", str(ran)],
        ["run", "--pid", str(os.getpid()), "--", "touch", str(ran)],
    ]
    with stopped(host):
        begun = time.monotonic()
        processes_of = [
            subprocess.Popen(
                command(host.socket, *verb),
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for verb in verbs
        ]
        errors = [process.communicate(timeout=60)[1] for process in processes_of]
        took_s = time.monotonic() - begun
    statuses = [process.returncode for process in processes_of]
    assert statuses == [1] * 13 + [125] * 2, errors
    for verb, error in zip(verbs, errors, strict=True):
        assert f"no answer from {host.socket} within 5 s. See: systemctl status" in error, verb
        assert ("With --best-effort, the command runs in any case" in error) == (verb[0] == "run"), error
    assert 5 < took_s < 30, "15 processes start at once"
    assert not ran.exists()
    assert host.ctl("list", "--columns", "key", "--no-legend", "-f", "key=k").stdout == ""


def test_best_effort_runs_the_command_once_beside_a_hung_daemon(host: Host, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    words = ("run", "--best-effort", "--key", "beside", "--", "sh", "-c", f"echo ran >>{ran}; exit 7")
    with stopped(host):
        done = host.ctl(*words)
        assert (done.returncode, ran.read_text()) == (7, "ran\n"), done.stderr
    assert f"no answer from {host.socket} within 5 s" in done.stderr
    assert "The command runs unmonitored\n" in done.stderr
    assert host.ctl("show", "beside").returncode == 4
    assert ran.read_text() == "ran\n"


def run_stopping_the_daemon(host: Host, *words: str) -> subprocess.CompletedProcess[str]:
    """Call ``resctrlctl run`` with a daemon that stops before Assign, after it has answered questions."""
    code = f"""\
import os, signal, sys
from resctrlctl import command
from resctrlctl.connection import daemon

call = daemon.Daemon.call
daemon._CHANGE_S = 1.0

def stopping(self, action, method, *rest):
    if method.name == "Assign":
        os.kill({host.daemon.pid}, signal.SIGSTOP)
    return call(self, action, method, *rest)

daemon.Daemon.call = stopping
sys.exit(command.main(["run", "--socket", {host.socket!r}, *sys.argv[1:]]))
"""
    arguments = [sys.executable, "-c", code, *words]
    try:
        return subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    finally:
        host.daemon.send_signal(signal.SIGCONT)


def test_late_assign_of_a_command_that_was_not_executed_leaves_no_workload(host: Host) -> None:
    done = run_stopping_the_daemon(host, "--key", "unused", "--", "true")
    assert done.returncode == 125
    assert done.stderr.endswith("With --best-effort, the command runs in any case\n"), done.stderr
    # The daemon answers calls of root in order of their connections, so it has carried out Assign by now.
    assert host.ctl("show", "unused").returncode == 4
    assert host.tree.find(GroupRef("", "unused")) is None


def test_late_assign_of_a_command_that_runs_ends_with_the_command(host: Host, tmp_path: Path) -> None:
    ran, group = tmp_path / "ran", f"{host.top}/resctrl/mon_groups/begun/tasks"
    waiting = f"kill -CONT {host.daemon.pid}; echo ran >>{ran}; until grep -qx $$ {group}; do sleep 0.1; done; exit 7"
    done = run_stopping_the_daemon(host, "--best-effort", "--key", "begun", "--", "sh", "-c", waiting)
    assert (done.returncode, ran.read_text()) == (7, "ran\n"), done.stderr
    assert "The command runs unmonitored\n" in done.stderr
    wait_until(lambda: host.tree.find(GroupRef("", "begun")) is None)
    shown = json.loads(host.ctl("show", "-j", "begun").stdout)
    assert (shown["workload"]["state"], energy_in(shown)[1] == "exact") == ("completed", False)


def test_message_has_the_command_that_ends_a_late_assign_of_a_control_group(host: Host, cgroup: Path) -> None:
    words = ("--key", "whole", "--cgroup", str(cgroup), "--", "true")
    done = run_stopping_the_daemon(host, *words)
    assert done.returncode == 125
    assert "resctrlctl release whole --claim run. With --best-effort" in done.stderr
    # The daemon answers calls of root in order of their connections, so it has carried out Assign by now.
    host.ctl("release", "whole", "--claim", "run")
    assert host.tree.find(GroupRef("", "whole")) is None


def test_third_signal_ends_a_blocked_resctrlctl(tmp_path: Path) -> None:
    """resctrlctl is blocked because it writes its report to a full pipe."""
    code = (
        "import os, signal\n"
        "from resctrlctl.run.child import HeldChild\n"
        "child = HeldChild(['sh', '-c', 'exit 7'])\n"
        "child.wait(child.execute())\n"
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
            # A signal is not queued while the same one is pending (signal(7)).
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert process.returncode == 7


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    """A process with a child that uses CPU time and memory until the end of the test."""
    code = "import os, time\nif os.fork() == 0:\n  while True: x = bytearray(1 << 20)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], text=True) as process:
        wait_until(lambda: processes.descendants(process.pid))
        (child,) = processes.descendants(process.pid)
        yield process
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def cgroup(worker: subprocess.Popen[str]) -> Iterator[Path]:
    """A control group that holds the worker and its child."""
    path = cgroup_root() / f"resctrlmond-run-{os.getpid()}.service"
    path.mkdir()
    try:
        for pid in [worker.pid, *processes.descendants(worker.pid)]:
            (path / "cgroup.procs").write_text(str(pid))
        yield path
    finally:
        for line in (path / "cgroup.procs").read_text().split():
            (path.parent / "cgroup.procs").write_text(line)
        path.rmdir()


@pytest.fixture
def container(host: Host) -> Iterator[Callable[[str], Path]]:
    """A function that assigns a container before it runs, and returns its control group."""
    started: list[tuple[str, Path, subprocess.Popen[str]]] = []

    def start(key: str) -> Path:
        path = cgroup_root() / f"resctrlmond-{os.getpid()}-{key}"
        path.mkdir()
        # Without a child: the simulator may miss the last use of a task that ends, and charges it to no group.
        code = f"input()\n{BURN}\ntime.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
        started.append((key, path, process))
        wait_until(lambda: processes.stat_fields(process.pid)[0] == b"S")  # it reads
        (path / "cgroup.procs").write_text(str(process.pid))
        request = types.AssignRequest(
            key=key, pid=process.pid, own_cgroup=str(path), kind="container", member="c1", claim="test", late=False
        )
        with contextlib.closing(Client(host.socket)) as client:
            client.call("org.resctrlmon.Manager.Assign", request, reply=types.AssignReply)
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
        return path

    yield start
    for key, path, process in started:
        host.ctl("release", key, "--claim", "test")
        for pid in (path / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        process.wait()
        assert process.stdin
        process.stdin.close()
        path.rmdir()


def why(host: Host, key: str) -> tuple[set[str], dict[str, tuple[bool, str]]]:
    """Return the qualities of the totals of a workload, and its proofs by their kind."""
    found = json.loads(host.ctl("show", "--why", "-j", key).stdout)
    proofs = {proof["kind"]: (proof["shown"], proof["text"]) for proof in found["proofs"]}
    return {total["quality"] for total in found["totals"]}, proofs


def inside(proofs: dict[str, tuple[bool, str]]) -> float:
    """Return the CPU time (s) that the proof of a closed workload has inside its groups."""
    found = re.search(r"used ([0-9.]+) s of CPU time in its groups", proofs["closed"][1])
    assert found, proofs
    return float(found[1])


def test_show_why_of_an_exact_container(host: Host, container: Callable[[str], Path]) -> None:
    container("proven")
    wait_until(lambda: inside(why(host, "proven")[1]) > 0)
    qualities, proofs = why(host, "proven")
    assert qualities == {"exact"}, proofs
    assert [kind for kind, (shown, _) in proofs.items() if shown] == [*map(str, ProofKind)], proofs
    assert proofs["entered"][1].startswith("the first task of c1 was in the group before it ran")
    assert re.search(r" and 0\.00[01] s outside \(0\.[0-3] %\), as seen [0-9.]+ s ago", proofs["closed"][1]), proofs
    assert re.search(
        r"\nclosed +yes +since then, tasks in its control groups", host.ctl("show", "--why", "proven").stdout
    )


def test_show_why_of_a_late_container_has_the_time_of_an_exec_session(
    host: Host, container: Callable[[str], Path]
) -> None:
    path = container("session")
    burn = f"import os\nopen({str(path / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n{BURN}"
    subprocess.run([sys.executable, "-c", burn], check=True)
    qualities, proofs = why(host, "session")
    assert qualities == {"late"}
    # "entered" depends on whether a search found the process while it ran.
    assert (proofs["closed"][0], proofs["alone"][0], proofs["watched"][0]) == (False, True, True), proofs
    outside = re.search(r" and ([0-9.]+) s outside ", proofs["closed"][1])
    assert outside
    assert 0.001 < float(outside[1]) < 1  # until a search found it
    assert f"used {outside[1]} s of CPU time outside the group" in host.ctl("show", "session").stdout


def test_show_why_of_a_command_has_the_moves_of_other_programs(host: Host) -> None:
    assert host.ctl("run", "--key", "plain", "--", "true").returncode == 0
    qualities, proofs = why(host, "plain")
    assert qualities == {"exact"}
    assert [kind for kind, (shown, _) in proofs.items() if shown] == ["entered", "closed", "alone", "read", "watched"]
    assert "other programs have moved no task out of its groups" in proofs["closed"][1]
    assert "other programs have moved no task into its groups" in proofs["alone"][1]
    assert proofs["read"][1].endswith("at the end")


def test_show_why_of_an_estimated_container(host: Host, container: Callable[[str], Path]) -> None:
    container("unseen")
    Control(str(host.top / "resctrl")).set_witness(restart=True)
    qualities, proofs = why(host, "unseen")
    assert qualities == {"estimated"}
    assert [kind for kind, (shown, _) in proofs.items() if shown] == ["entered", "read"]
    assert "was loaded again during the run" in proofs["watched"][1]


def energy_of(done: subprocess.CompletedProcess[str]) -> tuple[Decimal, str, str]:
    """Return the core energy of a report in JSON, with its quality and reason."""
    return energy_in(json.loads(done.stderr))


def energy_in(report: dict[str, Any]) -> tuple[Decimal, str, str]:
    """Return the core energy of a report, with its quality and reason."""
    (total,) = [total for total in report["totals"] if total["event"] == "core_energy"]
    return Decimal(total["value"]), total["quality"], total.get("reason", "")


def test_run_measures_a_process_with_its_descendants_and_returns_them(
    host: Host, worker: subprocess.Popen[str]
) -> None:
    (child,) = processes.descendants(worker.pid)
    listing = f"import os; print({child} in map(int, open('{host.top}/resctrl/mon_groups/look/tasks')))"
    looking = [sys.executable, "-c", f"{UNTIL_USED}\n{listing}", str(child)]
    done = host.ctl("run", "-p", str(worker.pid), "--key", "look", "-j", "--", *looking)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    value, quality, reason = energy_of(done)
    assert value > 0
    assert (quality, "ran and had used up to" in reason) == ("late", True)
    report = json.loads(done.stderr)
    assert (report["target"], report["completed"]) == (f"process {worker.pid}", True)
    assert {host.tree.membership(pid) for pid in (worker.pid, child)} == {Membership("", "")}
    assert host.tree.find(GroupRef("", "look")) is None


def test_command_that_measures_a_process_is_not_counted(host: Host, sleeper: int) -> None:
    done = host.ctl("run", "-p", str(sleeper), "-j", "--", sys.executable, "-c", BURN)
    assert energy_of(done)[:2] == (Decimal(0), "late")
    text = host.ctl("run", "-p", str(sleeper), "--", "true").stderr
    assert text.startswith(f"\nprocess {sleeper} during true: run-")
    assert "user" not in text


def test_run_measures_a_control_group(host: Host, worker: subprocess.Popen[str], cgroup: Path) -> None:
    (child,) = processes.descendants(worker.pid)
    done = host.ctl("run", "--cgroup", str(cgroup), "-j", "--", sys.executable, "-c", UNTIL_USED, str(child))
    assert done.returncode == 0, done.stderr
    value, quality, _ = energy_of(done)
    assert (value > 0, quality) == (True, "late")
    assert json.loads(done.stderr)["target"] == f"control group {cgroup}"
    assert host.tree.membership(worker.pid) == Membership("", "")


def test_run_measures_the_control_group_of_a_unit(
    host: Host, worker: subprocess.Popen[str], cgroup: Path, tmp_path: Path
) -> None:
    systemctl = tmp_path / "systemctl"
    # The path below the mount point of the hierarchy; nothing for a unit that does not run.
    script = f'test "$*" = "show --property=ControlGroup --value -- web" && echo /{cgroup.name}; true'
    systemctl.write_text(f"#!/bin/sh\n{script}\n")
    systemctl.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def measure(unit: str) -> subprocess.CompletedProcess[str]:
        words = command(host.socket, "run", "--unit", unit, "-j", "true")
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)

    done = measure("web")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr)["target"] == f"control group {cgroup}"
    done = measure("none")
    message = "resctrlctl: cannot measure unit 'none': it does not run. See: systemctl status none\n"
    assert (done.returncode, done.stderr) == (125, message)


def test_target_that_is_all_of_a_workload_is_measured_there(host: Host, tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    wait = (
        f"import os, time\nopen({str(begun)!r}, 'w')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.05)\n{BURN}\ntime.sleep(600)"
    )
    with subprocess.Popen(
        command(host.socket, "run", "--key", "alone", "-q", sys.executable, "-c", wait),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        # It executes when it is a member; it is in the group before that.
        wait_until(begun.exists)
        (pid,) = processes.descendants(process.pid)
        before = energy(host, "alone")
        burn = f"open({str(go)!r}, 'w')\n{UNTIL_USED}"
        done = host.ctl("run", "-p", str(pid), "-j", "--", sys.executable, "-c", burn, str(pid))
        assert done.returncode == 0, done.stderr
        value, quality, _ = energy_of(done)
        after = energy(host, "alone")
        # All use since the baseline is counted, before and after.
        assert (0 < value <= after - before, quality) == (True, "exact")
        report = json.loads(done.stderr)
        assert (report["workload"]["key"], report["isDifference"], report["completed"]) == ("alone", True, False)
        assert host.tree.membership(pid) == Membership("", "alone")
        os.kill(pid, signal.SIGKILL)


def energy(host: Host, key: str) -> Decimal:
    return Decimal(host.ctl("show", key, "-p", "core_energy", "--value").stdout)


def test_target_that_is_a_part_of_a_workload_is_refused(
    host: Host, worker: subprocess.Popen[str], sleeper: int, tmp_path: Path
) -> None:
    for pid in (worker.pid, sleeper):
        host.ctl("assign", "both", "--tree", "--pid", str(pid))
    (child,) = processes.descendants(worker.pid)
    member = host.ctl("run", "-p", str(worker.pid), "touch", str(tmp_path / "ran"))
    assert (member.returncode, member.stderr) == (
        125,
        f"resctrlctl: cannot measure process {worker.pid}: workload 'both' has or had other members too. "
        "For the totals of all, use: resctrlctl show both\n",
    )
    part = host.ctl("run", "-p", str(child), "touch", str(tmp_path / "ran"))
    assert (part.returncode, "tasks of it are in monitoring groups of other workloads" in part.stderr) == (125, True)
    host.ctl("release", "both")
    host.ctl("assign", "part", "--pid", str(child))
    part = host.ctl("run", "-p", str(worker.pid), "touch", str(tmp_path / "ran"))
    assert (part.returncode, "tasks of it are in monitoring groups of other workloads" in part.stderr) == (125, True)
    host.ctl("release", "part")
    assert not (tmp_path / "ran").exists()
    assert host.tree.membership(worker.pid) == Membership("", "")


def test_first_process_of_a_control_group_is_not_the_control_group(
    host: Host, worker: subprocess.Popen[str], cgroup: Path
) -> None:
    request = types.AssignRequest(key="box", pid=worker.pid, own_cgroup=str(cgroup), kind="container", claim="test")
    with contextlib.closing(Client(host.socket)) as client:
        client.call("org.resctrlmon.Manager.Assign", request, reply=types.AssignReply)
    refused = host.ctl("run", "-p", str(worker.pid), "true")
    assert (refused.returncode, refused.stderr.endswith(f"Use --cgroup {cgroup}\n")) == (125, True), refused.stderr
    done = host.ctl("run", "--cgroup", str(cgroup), "-j", "true")
    assert json.loads(done.stderr)["workload"]["key"] == "box"
    host.ctl("release", "box", "--claim", "test")


def test_process_that_has_ended_is_not_measured(host: Host) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    done = host.ctl("run", "-p", str(process.pid), "true")
    assert done.returncode == 125
    assert done.stderr.startswith(f"resctrlctl: cannot measure process {process.pid}: there is no process")


@pytest.mark.parametrize("target", [True, False])
def test_workload_that_ends_before_the_command_is_late(
    host: Host, worker: subprocess.Popen[str], target: bool
) -> None:
    # Without a target, the command itself is the workload, which would otherwise be exact.
    options = ["-p", str(worker.pid)] if target else []
    release = " ".join(command(host.socket, "release", "cut", "--claim", "run", "-q"))
    script = f"PYTHONPATH={ROOT} {release} >/dev/null"
    done = host.ctl("run", "--key", "cut", *options, "-j", "sh", "-c", script)
    _, quality, reason = energy_of(done)
    assert quality == "late"
    assert reason.endswith("the workload ended before the command, and later use is not counted")
    assert json.loads(done.stderr)["endedEarly"] is True
    # The average over the elapsed time would be that of a shorter time.
    done = host.ctl("run", "--key", "cut", *options, "-x", ";", "-e", "core_energy", "sh", "-c", script)
    event, _, total, _, per_second, quality = done.stderr.splitlines()[0].split(";")
    assert (event, bool(total), per_second, quality) == ("core_energy", True, "", "late")


def test_intervals_add_up_to_the_total(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "report"
    # Until the first interval is written, however slow resctrlctl is.
    burn = f"{BURN}\nimport os\nwhile not (os.path.exists({str(file)!r}) and os.path.getsize({str(file)!r})): pass"
    done = host.ctl("run", "-I", "50", "-j", "-o", str(file), "--", sys.executable, "-c", burn)
    assert done.returncode == 0
    *intervals, report = map(json.loads, file.read_text().splitlines())
    assert len(intervals) > 1
    for number, total in enumerate(report["totals"]):
        assert sum(Decimal(interval["totals"][number]["value"]) for interval in intervals) == Decimal(total["value"])
        assert {
            (interval["totals"][number]["quality"], interval["totals"][number].get("reason"))
            for interval in intervals
        } == {("exact", None)}
    assert int(report["levels"][0]["peak"]) >= int(report["levels"][0]["average"])


def test_intervals_after_the_end_of_the_workload_are_late(host: Host, tmp_path: Path) -> None:
    release = " ".join(command(host.socket, "release", "cut-short", "--claim", "run", "-q"))
    file = tmp_path / "report"
    script = f"PYTHONPATH={ROOT} {release} >/dev/null; until grep -q late {file}; do sleep 0.02; done"
    done = host.ctl("run", "--key", "cut-short", "-I", "20", "-x", ",", "-o", str(file), "sh", "-c", script)
    assert done.returncode == 0


def test_tasks_that_an_earlier_member_of_the_same_id_left_are_not_of_the_target(
    host: Host, worker: subprocess.Popen[str], sleeper: int
) -> None:
    def assign(**of: Any) -> None:
        request = types.AssignRequest(key="again", member="m", claim="test", include_descendants=True, **of)
        with contextlib.closing(Client(host.socket)) as client:
            client.call("org.resctrlmon.Manager.Assign", request, reply=types.AssignReply)

    (child,) = processes.descendants(worker.pid)
    assign(pid=worker.pid, late=True)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    # The daemon ends the member, and its child runs on in the group.
    wait_until(lambda: json.loads(host.ctl("show", "-j", "again").stdout)["workload"]["members"][0].get("endedAt"))
    assert host.tree.membership(child) == Membership("", "again")
    assign(pid=sleeper, late=False)
    assert len(json.loads(host.ctl("show", "-j", "again").stdout)["workload"]["members"]) == 1
    refused = host.ctl("run", "-p", str(sleeper), "true")
    os.kill(child, signal.SIGKILL)
    assert (refused.returncode, "has other tasks too" in refused.stderr) == (125, True), refused.stderr
    wait_until(lambda: host.tree.tasks(GroupRef("", "again")) == [sleeper])
    assert host.ctl("run", "-p", str(sleeper), "true").returncode == 0
    host.ctl("release", "again", "--claim", "test")


SSHD = """\
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
AllowStreamLocalForwarding no
AllowTcpForwarding no
SetEnv PATH={folder}:/usr/bin:/bin RESCTRLMOND_SOCKET={socket}
"""
SSH_CONFIG = """\
Host there
  ProxyCommand {sshd} -i -f {folder}/sshd_config
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known_hosts
  LogLevel ERROR
"""


@pytest.fixture(scope="module")
def there(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which "there" is a host with sshd and the daemon. sshd(8) serves one connection with -i."""
    folder = tmp_path_factory.mktemp("sshd")
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if os.getuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd requires it of root
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "sshd_config").write_text(SSHD.format(folder=folder, socket=host.socket))
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder, sshd=sshd))
    for name, line in (
        ("ssh", f'ssh -F {folder}/ssh_config "$@"'),
        ("resctrlctl", f'env PYTHONPATH={ROOT} {sys.executable} -m resctrlctl "$@"'),
    ):
        (folder / name).write_text(f"#!/bin/sh\nexec {line}\n")
        (folder / name).chmod(0o755)
    return ENVIRONMENT | {"SYSTEMD_SSH": str(folder / "ssh"), "RESCTRLMOND_SOCKET": "/none/here"}


def remotely(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "resctrlctl", "-H", "there", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_verbs_work_over_sshd_that_forwards_nothing(host: Host, there: dict[str, str], sleeper: int) -> None:
    def ctl(*arguments: str) -> str:
        with remotely(there, *arguments) as process:
            out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        return out

    assert ctl("assign", "over-ssh", "--pid", str(sleeper)).startswith("over-ssh: active")
    assert (host.top / "resctrl" / "mon_groups" / "over-ssh" / "tasks").read_text() == f"{sleeper}\n"
    assert ctl("list", "-q", "--filter", "key=over-ssh") == "over-ssh\n"
    assert ctl("show", "over-ssh", "-p", "state", "--value") == "active\n"
    assert json.loads(ctl("top", "-b", "-n", "1", "-d", "0.5", "-j"))["rmidsUsed"] > 0
    assert ctl("release", "over-ssh").startswith("over-ssh: ")
    assert host.tree.find(GroupRef("", "over-ssh")) is None


def test_watch_over_sshd_prints_changes_as_they_come(host: Host, there: dict[str, str]) -> None:
    with remotely(there, "watch", "-q", "watched-*") as process:
        assert process.stdout is not None
        assert host.ctl("create", "watched-1").returncode == 0
        assert process.stdout.readline() == "watched-1\n"
        assert host.ctl("create", "watched-2").returncode == 0
        assert process.stdout.readline() == "watched-2\n"
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    for key in ("watched-1", "watched-2"):
        host.ctl("release", key)


def test_user_whom_sshd_refuses_gets_the_message_of_ssh(there: dict[str, str]) -> None:
    with remotely(there | {"SYSTEMD_SSH": "/usr/bin/ssh"}, "status") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.startswith("ssh: Could not resolve hostname there: ")
    assert err.splitlines()[-1] == (
        "resctrlctl: cannot connect to there: ssh failed with exit status 255 (its message is above)"
    )
