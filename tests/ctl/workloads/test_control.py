# SPDX-License-Identifier: Apache-2.0
"""create, assign, release and move: their requests, their output and their errors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from resctrlctl.base.errors import CommandError
from resctrlctl.connection import daemon
from resctrlctl.connection.daemon import Daemon
from resctrlmond.api import signatures, types
from resctrlmond.api.errors import ERRORS
from resctrlmond.api.types import Claim
from resctrlmond.api.varlink.frames import VarlinkError
from resctrlmond.client import synchronous
from resctrlmond.workloads.model.workload import EndRule
from tests.api.test_client import replying
from tests.ctl.conftest import Ctl, command
from tests.ctl.fake_manager import NOW, FakeManager, error


def test_reason_of_a_release_is_at_the_end_of_the_line(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("a1", reason="because")
    assert ctl("release", "a1", "--reason", "because").stdout.splitlines()[0] == (
        f"a1: completed in class / ({manager.tree}/a1): because"
    )


def test_create_sends_its_options(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("create", "web", "--class", "gold", "--attribute", "owner=a=b", "--no-pending")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"web: idle in class gold ({manager.tree}/web)\n"
    request = types.CreateRequest(
        key="web", class_="gold", claim="cli", attributes={"owner": "a=b"}, allow_pending=False
    )
    assert manager.called("Create") == [request]


def test_create_and_assign_send_a_priority(manager: FakeManager, ctl: Ctl) -> None:
    ctl("create", "web", "--priority", "-5")
    ctl("assign", "web", "--pid", str(os.getpid()), "--priority", "1000")
    assert [request.priority for verb in ("Create", "Assign") for request in manager.called(verb)] == [-5, 1000]
    assert ctl("create", "web", "--priority", "high").returncode == 2


def test_priority_is_accepted_with_no_pending(manager: FakeManager, ctl: Ctl) -> None:
    """The priority also decides about bandwidth counters, and about an RMID for which other workloads wait."""
    assert ctl("create", "web", "--priority", "1", "--no-pending").returncode == 0
    (request,) = manager.called("Create")
    assert (request.priority, request.allow_pending) == (1, False)


def test_create_omits_options_that_are_not_given(manager: FakeManager, ctl: Ctl) -> None:
    assert ctl("create", "web", "-q").stdout == ""
    assert manager.called("Create") == [types.CreateRequest(key="web", claim="cli")]


def test_assign_sends_a_process_as_a_pidfd(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("assign", "web", "--pid", str(os.getpid()), "--claim", "me", "--member", "m1")
    assert done.stdout == f"web: active in class / ({manager.tree}/web)\n3 tasks moved in 2 passes.\n"
    request = types.AssignRequest(key="web", pid=os.getpid(), claim="me", member="m1")
    assert manager.called("Assign") == [request]
    assert manager.by_pidfd == [os.getpid()]


def test_assign_prints_a_note_about_descendants_outside(manager: FakeManager, ctl: Ctl) -> None:
    manager.descendants_outside = 2
    done = ctl("assign", "web", "--pid", str(os.getpid()))
    assert done.stderr.endswith("2 descendants of the process stayed outside: use --tree to move them too\n")
    manager.descendants_outside = 0
    assert ctl("assign", "web", "--pid", str(os.getpid()), "--tree").stderr == ""
    assert manager.called("Assign")[1].include_descendants


def test_assign_sends_a_control_group_with_its_class(manager: FakeManager, ctl: Ctl) -> None:
    manager.tasks_outside = 1
    done = ctl(
        "assign", "web", "--cgroup", "/sys/fs/cgroup/x", "--class", "/", "--allow-class-change", "--take-over", "-j"
    )
    assert json.loads(done.stdout)["tasksOutside"] == 1
    assert "1 task stayed outside: they are in other monitoring groups. Use --take-over" in done.stderr
    (request,) = manager.called("Assign")
    assert request == types.AssignRequest(
        key="web", cgroup="/sys/fs/cgroup/x", class_="/", allow_class_change=True, take_over=True, claim="cli"
    )


@pytest.mark.parametrize(
    "tasks", [[], ["--pid", "1", "--cgroup", "/x"], ["--pid", "0"], ["--pid", "-5"], ["--pid", "x"]]
)
def test_assign_requires_one_process_or_one_control_group(ctl: Ctl, tasks: list[str]) -> None:
    done = ctl("assign", "web", *tasks)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("resctrlctl assign: ")
    assert done.stderr.count("\n") == 1


def test_release_prints_the_totals(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("web")
    done = ctl("release", "web", "--reason", "enough")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("web: completed in class /")
    assert "core_energy      12.345678 J  exact" in done.stdout
    assert manager.called("Release") == [types.ReleaseRequest(key="web", claim="cli", reason="enough")]


def test_quiet_release_prints_only_the_totals(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("web")
    lines = ctl("release", "web", "-q").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["EVENT", "core_energy", "mbm_total_bytes"]


def test_release_names_the_other_claims(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("web", claims=(Claim("cli", NOW, EndRule.RELEASE), Claim("oci", NOW, EndRule.CONTAINER)))
    assert ctl("release", "web").stdout.startswith("web: still claimed by oci\n")


def test_release_names_all_classes_of_a_workload(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("web", class_="gold", classes=("gold", ""))
    assert ctl("release", "web").stdout.startswith("web: completed in classes gold, / (")


def test_move_sends_the_class(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("web")
    assert ctl("move", "web", "gold").stdout.startswith("web: active in class gold")
    assert manager.called("Move") == [types.MoveRequest(key="web", class_="gold")]


@pytest.mark.parametrize("name", sorted(row.name for row in ERRORS.values()))
def test_each_error_has_its_exit_status(manager: FakeManager, ctl: Ctl, name: str) -> None:
    codes = {row.name: row.exit_code for row in ERRORS.values()}
    manager.refuse["Create"] = error(name, "it is so")
    done = ctl("create", "web")
    assert (done.returncode, done.stdout) == (codes[name], "")
    assert done.stderr == "resctrlctl: cannot create 'web': it is so\n"


def test_error_message_has_path_cause_and_remedy(manager: FakeManager, ctl: Ctl) -> None:
    manager.refuse["Create"] = error(
        "RmidsExhausted",
        "cannot create the monitoring group",
        path="/sys/fs/resctrl/mon_groups/web",
        errno="ENOSPC",
        status="Out of RMIDs",
        remedy="Release a group",
    )
    done = ctl("create", "web")
    assert done.returncode == 5
    assert done.stderr == (
        "resctrlctl: cannot create 'web': /sys/fs/resctrl/mon_groups/web: cannot create the monitoring group "
        "(ENOSPC); the kernel says: Out of RMIDs. Release a group\n"
    )


def test_argument_that_is_not_utf8_is_refused(manager: FakeManager, ctl: Ctl) -> None:
    done = ctl("assign", "web", "--cgroup", "\udcff")
    assert done.returncode == 2
    assert done.stderr == "resctrlctl assign: an argument is not UTF-8. See 'resctrlctl assign --help'\n"
    assert manager.calls == []


@pytest.mark.parametrize("arguments", [["status"], ["create", "web"], ["release", "web"], ["move", "web", "/"]])
def test_message_without_the_daemon_names_the_socket(
    manager: FakeManager, ctl: Ctl, tmp_path: Path, arguments: list[str]
) -> None:
    done = ctl(*arguments, "--socket", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (3, "")
    assert f"resctrlmond is not running: nothing listens on {tmp_path}/none. Start the daemon of that" in done.stderr


def test_message_without_the_daemon_of_the_machine_names_systemctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "none")
    monkeypatch.setattr(daemon, "SOCKET", path)
    monkeypatch.setattr(daemon, "_RESCTRL", str(tmp_path))
    with pytest.raises(CommandError, match="Start it: systemctl start resctrlmond"):
        Daemon(path).call("ask", signatures.STATUS)


def test_message_without_the_daemon_names_the_simulator_on_a_machine_without_resctrl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of the service would fail."""
    path = str(tmp_path / "none")
    monkeypatch.setattr(daemon, "SOCKET", path)
    monkeypatch.setattr(daemon, "_RESCTRL", path)
    with pytest.raises(CommandError, match=r"has no .*none; .*doctor\. To try .* resctrlmond --simulate /tmp/sim$"):
        Daemon(path).call("ask", signatures.STATUS)


@pytest.mark.parametrize(
    ("is_default", "remedy"),
    [
        (True, "members of the groups resctrlmon and resctrlmon-read may read"),
        (False, "the user who started that daemon"),
    ],
)
def test_socket_without_permission_is_access_denied(
    manager: FakeManager, monkeypatch: pytest.MonkeyPatch, is_default: bool, remedy: str
) -> None:
    os.chmod(manager.socket, 0)
    if is_default:
        monkeypatch.setattr(daemon, "SOCKET", manager.socket)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)  # root may use any socket
    try:
        with pytest.raises(CommandError, match=remedy) as failed:
            Daemon(manager.socket).call("ask", signatures.STATUS)
    finally:
        os.seteuid(was)
    assert failed.value.status == 77


def test_server_of_another_protocol_causes_an_error_message(ctl: Ctl, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "other"))
    listener.listen()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\0")

    thread = threading.Thread(target=answer)
    thread.start()
    done = ctl("status", "--socket", str(tmp_path / "other"))
    thread.join()
    listener.close()
    assert done.returncode == 1
    assert done.stderr.startswith("resctrlctl: cannot ask for the status: ")
    assert "Traceback" not in done.stderr


def test_error_message_cannot_control_the_terminal(manager: FakeManager, ctl: Ctl) -> None:
    """Messages contain paths, and a workload chooses the names in its own control group."""
    manager.refuse["Assign"] = error("NotRead", "cannot list the control group", path="/c/\x1b]0;owned\x07\n\u202e")
    done = ctl("assign", "web", "--cgroup", "/sys/fs/cgroup/x")
    assert "/c/\\x1b]0;owned\\x07\\n\\u202e: cannot list the control group" in done.stderr


def test_method_unknown_to_an_older_daemon_has_a_remedy(manager: FakeManager, ctl: Ctl) -> None:
    manager.refuse["Create"] = VarlinkError("org.varlink.service.MethodNotImplemented", {"method": "Create"})
    done = ctl("create", "web")
    assert done.returncode == 1
    assert done.stderr.endswith("If resctrlmond was updated, restart it: systemctl restart resctrlmond\n")


def test_timeout_of_a_call_includes_the_connection(manager: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, late = synchronous.connect, 0.0
    monotonic = time.monotonic

    def accepted_late(path: str, timeout_s: float) -> Any:
        nonlocal late
        connection = connect(path, timeout_s)
        late = 30.0
        return connection

    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + late)
    monkeypatch.setattr(synchronous, "connect", accepted_late)
    with pytest.raises(CommandError, match=r"no answer from .* within 5 s"):
        Daemon(manager.socket).call("ask", signatures.STATUS)


def test_socket_path_that_is_too_long_has_a_remedy(ctl: Ctl) -> None:
    done = ctl("status", "--socket", "/" + "x" * 200)
    assert done.returncode == 1
    assert done.stderr.endswith("Check --socket and RESCTRLMOND_SOCKET\n")


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"[]", "a message is not a varlink reply: Expected `object`, got `array`"),
        (b"{", "a message is not a varlink reply: Input data was truncated"),
        (b'{"parameters":{"usages":NaN}}', "a message is not a varlink reply: JSON is malformed: invalid character"),
        # The rest of the message depends on the version of Python.
        (b'{"parameters":' + b"[" * 100_000, "a message is not a varlink reply: "),
        (b'{"error":5}', "a message is not a varlink reply: Expected `str | null`, got `int` - at `$.error`"),
        (b'{"parameters":5}', "the parameters of a message are not a JSON object"),
        (
            b'{"parameters":{"usages":[{"workload":{"key":5}}]}}',
            "the reply to org.resctrlmon.Manager.ReadAll is not valid: "
            "Expected `str`, got `int` - at `$.usages[0].workload.key`",
        ),
        (
            b'{"parameters":{"usages":[{}]}}',
            "the reply to org.resctrlmon.Manager.ReadAll is not valid: "
            "Object missing required field `workload` - at `$.usages[0]`",
        ),
    ],
    ids=["array", "no JSON", "NaN", "nesting", "error", "parameters", "type", "missing"],
)
def test_reply_that_is_not_valid_is_one_line_with_a_remedy(
    tmp_path: Path, environment: dict[str, str], reply: bytes, text: str
) -> None:
    path = str(tmp_path / "socket")
    with replying(path, reply + b"\0"):
        done = subprocess.run(
            command(path, "list"), env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"resctrlctl: cannot list the workloads: {path}: {text}"), done.stderr
    remedy = ". If resctrlmond was updated, restart it: systemctl restart resctrlmond\n"
    assert (done.stderr.endswith(remedy), done.stderr.count("\n")) == (True, 1), done.stderr
