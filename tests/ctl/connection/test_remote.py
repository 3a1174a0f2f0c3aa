# SPDX-License-Identifier: Apache-2.0
"""resctrlctl --host, over a program in the place of ssh; test_with_daemon.py uses sshd."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from resctrlctl import command
from resctrlctl.arguments.verbs import VERBS
from resctrlctl.base.errors import CommandError
from resctrlctl.connection.daemon import Daemon
from resctrlctl.connection.remote import Remote, ssh_command
from resctrlctl.host import status
from resctrlmond.api import signatures, types
from resctrlmond.resctrl import processes
from tests.ctl.conftest import ROOT, Ctl
from tests.ctl.fake_manager import FakeManager, error
from tests.wait import wait_until

# Runs the command of ssh here, as the shell of the other host does: ssh joins its words with spaces. It records its
# process id, so that a test can wait for its end, and its words.
SSH = """\
#!/bin/sh
echo $$ >>{folder}/pids
echo "$@" >>{folder}/calls
while [ "$1" != -- ]; do shift; done
shift 2
PATH={folder}:$PATH RESCTRLMOND_SOCKET={socket}
export PATH RESCTRLMOND_SOCKET
{before}
exec sh -c "exec $*"
"""
RESCTRLCTL = """\
#!/bin/sh
PYTHONPATH={root}:$PYTHONPATH exec {python} -W error -m resctrlctl "$@"
"""


@dataclass
class Other:
    """Another host: a program in the place of ssh. ``ctl`` runs resctrlctl with the option -H for it."""

    folder: Path
    environment: dict[str, str]
    socket: str

    def set_ssh(self, before: str = "") -> None:
        """Write the program. ``before`` are shell commands that precede the command of ssh."""
        program = self.folder / "ssh"
        program.write_text(SSH.format(folder=self.folder, socket=self.socket, before=before))
        program.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start resctrlctl."""
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "resctrlctl", "-H", "root@web1", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run resctrlctl."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    @property
    def connections(self) -> list[int]:
        """The processes that stand in for ssh, also those that have ended."""
        with contextlib.suppress(FileNotFoundError):
            return [int(line) for line in (self.folder / "pids").read_text().splitlines()]
        return []


@pytest.fixture
def other(manager: FakeManager, environment: dict[str, str], tmp_path: Path) -> Other:
    folder = tmp_path / "other"
    folder.mkdir()
    program = folder / "resctrlctl"
    program.write_text(RESCTRLCTL.format(root=ROOT, python=sys.executable))
    program.chmod(0o755)
    host = Other(
        folder,
        environment | {"SYSTEMD_SSH": str(folder / "ssh"), "RESCTRLMOND_SOCKET": "/none/of/this/machine"},
        manager.socket,
    )
    host.set_ssh()
    return host


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, whether or not its parent waited for it."""
    return (processes.stat_fields(pid) or [b"Z"])[0] == b"Z"


@pytest.mark.parametrize(
    "arguments",
    [
        *(["list"], ["list", "--all", "--json"], ["list", "--pods"], ["list", "--units"], ["list", "-q"]),
        *(["show", "web"], ["machine"], ["sums"], ["create", "new"], ["release", "web"], ["move", "web", "gold"]),
        *(["profiles", "explain", "web"], ["top", "-b", "-n", "1", "-d", "0.5", "--json"]),
    ],
    ids=" ".join,
)
def test_verb_prints_the_same_as_on_the_host_itself(
    arguments: list[str], other: Other, manager: FakeManager, ctl: Ctl
) -> None:
    manager.add("web")
    manager.add("new") if arguments[0] == "release" else None
    there = other.ctl(*arguments)
    assert (there.returncode, there.stderr) == (0, "")
    if arguments[0] in ("create", "release"):
        manager.workloads.clear()
        manager.add("web")
    here = ctl(*arguments)
    if arguments[0] != "top":  # its output has the time
        assert there.stdout == here.stdout
    assert all(map(has_ended, other.connections))


def test_calls_of_a_command_share_one_connection(other: Other, manager: FakeManager) -> None:
    manager.add("web")
    assert other.ctl("list", "--all").returncode == 0
    assert [name for name, _ in manager.calls] == ["ReadAll", "List", "ListUnwatched"]
    assert len(other.connections) == 1


def test_ssh_gets_the_host_after_its_options_and_fixed_words_for_the_shell(other: Other) -> None:
    other.ctl("list")
    options = "-x -T -e none -o ClearAllForwardings=yes"
    assert (other.folder / "calls").read_text() == f"{options} -- root@web1 resctrlctl bridge\n"


@pytest.mark.parametrize(
    ("host", "end"),
    [
        ("web1", ["--", "web1"]),
        ("root@web1:2222", ["-p", "2222", "--", "root@web1"]),
        ("fe80::1%eth0", ["--", "fe80::1%eth0"]),
        ("root@[::1]:22", ["-p", "22", "--", "root@::1"]),
        ("ssh://web1:22", ["--", "ssh://web1:22"]),
    ],
)
def test_host_may_have_a_user_and_a_port(host: str, end: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYSTEMD_SSH", raising=False)
    words = ssh_command(host)
    assert words[0] == "ssh"
    assert words[-len(end) :] == end


@pytest.mark.parametrize("host", ["-oProxyCommand=true", "a\nb", "\x1b[1m"])
def test_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(CommandError, match=r"argument --host: .* is not \[USER@\]HOST\[:PORT\]") as raised:
        ssh_command(host)
    assert raised.value.status == 2


def test_socket_of_the_option_is_one_of_the_other_host(other: Other, manager: FakeManager) -> None:
    manager.add("web")
    other.socket = "/none"
    other.set_ssh()
    assert "web" in other.ctl("--socket", manager.socket, "list").stdout


@pytest.mark.parametrize("path", ["/run/$(id)", "/run/a b", "/run/*", "run", "/run/'", "~/x"])
def test_socket_that_a_shell_would_change_is_refused(path: str, other: Other) -> None:
    done = other.ctl(f"--socket={path}", "list")
    assert (done.returncode, other.connections) == (2, [])
    assert "argument --socket: with --host" in done.stderr


def test_daemon_that_does_not_run_there_is_reported(other: Other) -> None:
    other.socket = "/none/there"
    other.set_ssh()
    done = other.ctl("list")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(
        "resctrlctl: cannot connect to root@web1: resctrlmond is not running: nothing listens on /none/there. "
    )
    assert done.stderr.count("\n") == 1


def test_refusal_of_the_daemon_keeps_its_message_and_status(other: Other, manager: FakeManager) -> None:
    manager.refuse["Move"] = error("PermissionDenied", "only root may move", remedy="Ask root")
    done = other.ctl("move", "web", "gold")
    assert done.returncode == 77
    assert done.stderr == "resctrlctl: cannot move 'web' to class gold: only root may move. Ask root\n"


@pytest.mark.parametrize(
    ("before", "status", "text"),
    [
        ("echo ssh: no such host >&2; exit 255", 1, "ssh failed with exit status 255 (its message is above)"),
        (
            "set -- /none/resctrlctl bridge",
            1,
            "resctrlctl was not found there (exit status 127): install resctrlmond",
        ),
        ("kill -TERM $$", 1, "signal 15 ended ssh"),
        ("exit 2", 1, "'resctrlctl bridge' ended with exit status 2 there"),
        ("exit 0", 1, "'resctrlctl bridge' ended with exit status 0 there"),
        ("echo 'resctrlctl bridge: no JSON'", 1, "the greeting of 'resctrlctl bridge' on root@web1 is not valid"),
        ("yes", 1, "root@web1 sends other text than the greeting of 'resctrlctl bridge'"),
    ],
    ids=["ssh", "not-found", "signal", "old", "nothing", "greeting", "noise"],
)
def test_failure_of_ssh_is_reported(before: str, status: int, text: str, other: Other) -> None:
    other.set_ssh(before)
    done = other.ctl("list")
    assert (done.returncode, done.stdout) == (status, "")
    own = [line for line in done.stderr.splitlines() if line.startswith("resctrlctl: ")]
    assert len(own) == 1
    assert f"cannot connect to root@web1: {text}" in own[0]
    if "no such host" in before:
        assert done.stderr.startswith("ssh: no such host\n")
    assert all(map(has_ended, other.connections))


def test_ssh_that_is_not_installed_is_reported(other: Other) -> None:
    other.environment["SYSTEMD_SSH"] = "/none/ssh"
    done = other.ctl("list")
    assert (done.returncode, done.stderr) == (
        1,
        "resctrlctl: cannot connect to root@web1: cannot execute /none/ssh: No such file or directory; "
        "install openssh-client\n",
    )


def test_lines_that_the_shell_prints_first_are_skipped(other: Other, manager: FakeManager) -> None:
    manager.add("web")
    other.set_ssh("echo Welcome; echo; printf 'no end of line'")
    done = other.ctl("list", "-q")
    assert (done.returncode, done.stdout) == (0, "web\n")


def test_connection_that_breaks_during_a_call_is_reported(other: Other, manager: FakeManager) -> None:
    manager.hangs.add("Status")
    with other.start("status") as process:
        wait_until(lambda: "Status" in [name for name, _ in manager.calls])
        # The stand-in is the bridge by now. ssh exits with 255 if the connection breaks.
        os.kill(other.connections[0], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (
        1,
        "resctrlctl: cannot ask for the status: root@web1: signal 9 ended ssh before the reply\n",
    )


def test_daemon_that_closes_the_connection_is_reported(other: Other, manager: FakeManager) -> None:
    manager.cuts["Status"] = 1
    done = other.ctl("status")
    assert done.returncode == 1
    assert "cannot ask for the status: root@web1: resctrlmond closed the connection" in done.stderr


def test_connection_that_has_ended_is_not_used_again(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next reading of top, for example, gets a new connection."""
    for name in ("SYSTEMD_SSH", "RESCTRLMOND_SOCKET"):
        monkeypatch.setenv(name, other.environment[name])
    with Remote("web1") as remote:
        daemon = Daemon(remote)
        daemon.call("ask", signatures.STATUS)
        os.kill(other.connections[0], signal.SIGKILL)
        wait_until(lambda: not remote._idle[0].is_alive())  # the kernel closes the sockets after the kill
        daemon.call("ask", signatures.STATUS)
    assert len(other.connections) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_bridge_ends_with_resctrlctl(number: int, other: Other, manager: FakeManager) -> None:
    manager.hangs.add("Status")
    with other.start("status") as process:
        wait_until(lambda: "Status" in [name for name, _ in manager.calls])
        process.send_signal(number)
        assert process.wait(60) == -number
    wait_until(lambda: all(map(has_ended, other.connections)))


def test_recording_ends_with_a_last_reading_after_ctrl_c(other: Other, manager: FakeManager, tmp_path: Path) -> None:
    """Ctrl-C on the terminal ends ssh too."""
    manager.add("web")
    file = tmp_path / "use.jsonl"
    with other.start("record", "-o", str(file)) as process:
        wait_until(lambda: file.exists() and file.read_text().count("\n") >= 3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["host"] == os.uname().nodename
    assert all("workloads" in line for line in lines[1:]), lines
    # The last reading does not use the connection that Ctrl-C may be about to end.
    assert len(other.connections) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        *(["run", "true"], ["hooks", "status"], ["units"], ["doctor"], ["report"], ["classes"], ["plot", "f"]),
        *(["profiles", "list"], ["list", "--root", "/r"], ["show", "--root", "/r", "k"]),
    ],
    ids=" ".join,
)
def test_verb_for_this_machine_is_refused(arguments: list[str], other: Other) -> None:
    done = other.ctl(*arguments)
    assert (done.returncode, done.stdout) == (125 if arguments[0] == "run" else 2, "")
    assert done.stderr.startswith(f"resctrlctl {arguments[0]}: argument ")
    assert "not allowed" in done.stderr
    assert other.connections == []


def test_each_verb_works_with_host_or_is_refused(other: Other) -> None:
    """A new verb is added to one of the two lists above, and to the manual page."""
    man = (ROOT / "man" / "resctrlctl.1.scd").read_text().partition("# OTHER HOSTS\n")[2].partition(". The other")[0]
    refused = {"run", "hooks", "units", "doctor", "report", "classes", "plot"}
    allowed = {verb for verb in VERBS if f"*{verb}*" in man or f"*{verb} explain*" in man}
    assert allowed | refused == set(VERBS)
    assert not allowed & refused


def test_assign_names_a_process_of_the_other_host(other: Other, manager: FakeManager) -> None:
    """The daemon gets the number, and no descriptor of a process of this machine."""
    done = other.ctl("assign", "web", "--pid", str(os.getpid()))
    assert (done.returncode, done.stderr) == (0, "")
    (request,) = manager.called("Assign")
    assert (request.pid, request.pid_fd) == (os.getpid(), None)


def test_status_shows_no_runtimes_of_this_machine(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "runtimes_without_hook", lambda: pytest.fail("it examines this machine"))
    for name in ("SYSTEMD_SSH", "RESCTRLMOND_SOCKET"):
        monkeypatch.setenv(name, other.environment[name])
    assert command.main(["-H", "web1", "status"]) == 0


def test_foreign_group_of_the_other_host_has_no_tasks_and_rates(
    other: Other, manager: FakeManager, tmp_path: Path
) -> None:
    """A directory of this host may have the same path."""
    (tmp_path / "tasks").write_text("1\n2\n")
    manager.foreign.append(types.Foreign(class_="", name="theirs", path=str(tmp_path)))
    manager.refuse["Read"] = error("NoSuchWorkload", "there is no such workload")
    done = other.ctl("show", "theirs", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["foreign"]["name"], report["tasks"], report["rates"]) == ("theirs", None, [])
    done = other.ctl("show", "/")
    assert done.returncode == 4
    assert done.stderr.endswith(
        "there is no such workload. No foreign group has this name or path either, and classes are shown only on "
        "their host\n"
    )
    # A path of a class is not a valid key, but a valid name for show.
    manager.refuse["Read"] = error("InvalidKey", "the key contains a slash")
    assert other.ctl("show", "gold/").returncode == 4
