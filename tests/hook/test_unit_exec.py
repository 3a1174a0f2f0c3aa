# SPDX-License-Identifier: Apache-2.0
"""The program before the commands of services: it calls the daemon, and executes the command whatever happens.

Each test runs the program as it is, and with sanitizers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.api import definitions
from resctrlmond.host import unit_exec
from tests.hook.builds import ROOT, SHIPPED

CALL_BEGIN = b'{"method":"org.resctrlmon.Unit.AssignSelf","more":true,"parameters":{"childrenUs":'
CALL = CALL_BEGIN + b"0}}\0"
NOTICE = b'{"continues":true}\0'
REPLY = b'{"parameters":{"key":"a.service","state":"active","exact":true}}\0'
# Prints what the command got, as JSON.
COMMAND = """
import json, os, signal, sys
status = open("/proc/self/status").read()
fds = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
       if os.path.exists(f"/proc/self/fd/{fd}")}
print(json.dumps({
    "argv0": open("/proc/self/cmdline", "rb").read().split(bytes(1))[0].decode(),
    "arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid(), "fds": fds,
    # SigQ counts those of all processes of the user.
    "signals": [line for line in status.splitlines() if line.startswith("Sig") and not line.startswith("SigQ")],
    "cwd": os.getcwd(),
}))
"""


class Daemon:
    """A process that listens on the socket of the program, and handles each connection with ``answer``."""

    def __init__(self, folder: Path, answer: Callable[[socket.socket], None] | None, backlog: int = 16) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{folder}/unit.socket")
        self.listener.listen(backlog)
        self.received: list[bytes] = []
        self.peers: list[int] = []
        self.kept: list[socket.socket] = []
        if answer is not None:
            threading.Thread(target=self._serve, args=[answer], daemon=True).start()

    def _serve(self, answer: Callable[[socket.socket], None]) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.kept.append(connection)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                self.peers.append(struct.unpack("3i", credentials)[0])
                self.received.append(connection.recv(4096))
                answer(connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        for one in (self.listener, *self.kept):
            one.close()


def execute(words: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder with the socket, and return its output and status."""
    return subprocess.run(
        words,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


@pytest.fixture(params=["tested"] if SHIPPED else ["tested", "sanitized"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Compile a form of the program, whose socket is in the working directory."""
    name = f"build/resctrlmon-unit-exec-{request.param}"
    subprocess.run(["make", "-s", "-C", str(ROOT), name], check=True, timeout=300, stdout=subprocess.DEVNULL)
    return shutil.copy(str(ROOT / name), str(tmp_path / "program"))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[socket.socket], None] | None, backlog: int = 16) -> Daemon:
            daemon = Daemon(tmp_path, answer, backlog)
            stack.callback(daemon.close)
            return daemon

        yield start


def reply(connection: socket.socket) -> None:
    connection.sendall(REPLY)


def run(program: str, tmp_path: Path, *arguments: str, **options: Any) -> dict[str, Any]:
    """Run the command through the program, and return what the command got."""
    words = [program, sys.executable, "-IS", "-c", COMMAND, *arguments]
    done = execute(words, tmp_path, **options)
    assert done.returncode == 0
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_command_gets_what_the_program_got(program: str, tmp_path: Path, serve: Callable[..., Daemon]) -> None:
    daemon = serve(reply)
    read, write = os.pipe()

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1, signal.SIGALRM})

    words = ["", "a b", "$HOME", "ä\n", "--help", "@"]
    environment = {"A": "1", "EMPTY": "", "NOTIFY_SOCKET": "@x"}
    options: dict[str, Any] = {"env": environment, "pass_fds": [read], "preexec_fn": prepare, "stdin": read}
    through = run(program, tmp_path, *words, **options)
    os.close(write)
    plain = execute([sys.executable, "-IS", "-c", COMMAND, *words], tmp_path, **options)
    expected = json.loads(plain.stdout)
    os.close(read)
    assert through["pid"] in daemon.peers
    expected["pid"] = through["pid"]
    for found in (through, expected):  # the pipes of the output, and Python's own directory descriptor
        found["fds"] = {
            fd: path for fd, path in found["fds"].items() if fd not in ("1", "2", "3") and fd != str(read)
        }
    assert through == expected
    assert through["arguments"] == words
    assert daemon.received == [CALL]
    assert not any(path.startswith("socket:") for path in through["fds"].values())


def test_first_argument_can_differ_from_the_command(
    program: str, tmp_path: Path, serve: Callable[..., Daemon]
) -> None:
    serve(reply)
    words = [
        program,
        "@",
        "/bin/sh",
        "other name",
        "-c",
        'echo "$0" "$@"; tr "\\0" "\\n" </proc/$$/cmdline',
        "0",
        "1 2",
    ]
    done = execute(words, tmp_path)
    assert done.stdout.splitlines()[:2] == ["0 1 2", "other name"]


def test_command_waits_for_the_reply(program: str, tmp_path: Path, serve: Callable[..., Daemon]) -> None:
    marks = []

    def answer(connection: socket.socket) -> None:
        connection.sendall(REPLY[:-1])
        marks.append((tmp_path / "ran").exists())
        connection.sendall(REPLY[-1:])

    serve(answer)
    subprocess.run([program, "/bin/touch", "ran"], cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "ran").exists()
    assert marks == [False]


def hang(_connection: socket.socket) -> None:
    pass


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def refuse(connection: socket.socket) -> None:
    connection.sendall(b'{"error":"org.resctrlmon.Manager.PermissionDenied","parameters":{"message":"no"}}\0')


def flood(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(10)
        while True:
            connection.sendall(b"x" * 65536)


@pytest.mark.parametrize("answer", [close, reset, refuse, hang, flood])
def test_command_runs_whatever_the_daemon_does(
    program: str, tmp_path: Path, serve: Callable[..., Daemon], answer: Callable[[socket.socket], None]
) -> None:
    serve(answer)

    def seconds() -> float:
        begin = time.monotonic()
        done = subprocess.run([program, "/bin/sh", "-c", "exit 7"], cwd=tmp_path, timeout=60, check=False)
        assert done.returncode == 7
        return time.monotonic() - begin

    if answer is hang:
        assert seconds() >= 1.9
    else:
        # A busy machine can delay single runs for any time.
        assert any(seconds() < 1.9 for _ in range(20))


def test_program_waits_longer_while_it_gets_notices(
    program: str, tmp_path: Path, serve: Callable[..., Daemon]
) -> None:
    """Notices arrive in parts, and several at once. After the last one, the time counts anew."""
    sent: list[float] = []

    def notify(connection: socket.socket) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < 2.5:
            connection.sendall(NOTICE[:7])
            threading.Event().wait(0.2)
            connection.sendall(NOTICE[7:] + NOTICE)
        sent.append(time.monotonic())

    serve(notify)
    done = subprocess.run([program, "/bin/sh", "-c", "exit 7"], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 7
    assert time.monotonic() - sent[0] > 1.9


def test_command_runs_without_a_daemon(program: str, tmp_path: Path, serve: Callable[..., Daemon]) -> None:
    assert run(program, tmp_path)["argv0"] == sys.executable
    (tmp_path / "unit.socket").write_text("not a socket")
    assert run(program, tmp_path)["argv0"] == sys.executable
    (tmp_path / "unit.socket").unlink()
    serve(None).listener.close()  # the file is left
    assert run(program, tmp_path)["argv0"] == sys.executable


def test_command_runs_if_the_queue_of_the_daemon_is_full(
    program: str, tmp_path: Path, serve: Callable[..., Daemon]
) -> None:
    daemon = serve(None, backlog=0)
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(str(tmp_path / "unit.socket"))
        begin = time.monotonic()
        assert subprocess.run([program, "/bin/true"], cwd=tmp_path, timeout=60, check=False).returncode == 0
        assert time.monotonic() - begin > 1.9
        # With room again in time, it connects.
        child = subprocess.Popen([program, "/bin/true"], cwd=tmp_path)
        accepted = [daemon.listener.accept()[0], daemon.listener.accept()[0]]
        daemon.kept += accepted
        assert accepted[1].recv(4096) == CALL
        accepted[1].sendall(REPLY)
        assert child.wait(60) == 0


def test_command_runs_if_the_caller_may_not_connect(
    program: str, tmp_path: Path, serve: Callable[..., Daemon]
) -> None:
    daemon = serve(reply)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    is_root = os.geteuid() == 0
    (tmp_path / "unit.socket").chmod(0o600 if is_root else 0)
    options: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if is_root else {}
    assert subprocess.run([program, "/bin/true"], cwd=tmp_path, timeout=60, check=False, **options).returncode == 0
    assert daemon.received == []
    (tmp_path / "unit.socket").chmod(0o666)
    assert subprocess.run([program, "/bin/true"], cwd=tmp_path, timeout=60, check=False, **options).returncode == 0
    assert daemon.received == [CALL]


def test_command_runs_without_free_descriptors(program: str, tmp_path: Path, serve: Callable[..., Daemon]) -> None:
    daemon = serve(reply)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))

    # The static program needs no descriptor; those with sanitizers and the command open libraries.
    done = subprocess.run(
        [program, "/bin/true"], cwd=tmp_path, timeout=60, check=False, preexec_fn=limit, stderr=subprocess.PIPE
    )
    assert b"resctrlmon-unit-exec" not in done.stderr
    assert daemon.received == []


@pytest.mark.parametrize(
    ("command", "message"),
    [("./missing", "No such file or directory"), ("/etc/passwd", "Permission denied"), ("/", "Permission denied")],
)
def test_command_that_cannot_be_executed_gives_the_status_of_systemd(
    program: str, tmp_path: Path, command: str, message: str
) -> None:
    done = execute([program, command], tmp_path)
    assert (done.returncode, done.stderr) == (203, f"resctrlmon-unit-exec: {command}: {message}\n")


@pytest.mark.parametrize("words", [[], ["@"], ["@", "/bin/true"]])
def test_wrong_arguments_are_refused(program: str, tmp_path: Path, words: list[str]) -> None:
    done = execute([program, *words], tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "resctrlmon-unit-exec: usage: resctrlmon-unit-exec [@] COMMAND [ARGUMENT...]\n",
    )


def test_call_states_the_cpu_time_of_the_children(program: str, tmp_path: Path, serve: Callable[..., Daemon]) -> None:
    daemon = serve(reply)
    work = "(i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["/bin/sh", "-c", f'{work}; exec "$0" /bin/true', program], cwd=tmp_path, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_us = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e6
    (call,) = daemon.received
    children_us = json.loads(call[:-1])["parameters"]["childrenUs"]
    assert 0.7 * used_us < children_us <= used_us


def test_program_is_static_and_names_the_socket_and_method_of_the_daemon() -> None:
    name = "build/resctrlmon-unit-exec"
    subprocess.run(["make", "-s", "-C", str(ROOT), name], check=True, timeout=300, stdout=subprocess.DEVNULL)
    data = (ROOT / name).read_bytes()
    assert b"/lib64/ld-linux" not in data
    assert unit_exec.SOCKET.encode() in data
    assert b"org.resctrlmon.Unit.AssignSelf" in data
    assert re.search(r"^method AssignSelf\(", definitions.read("org.resctrlmon.Unit.varlink"), re.MULTILINE)
    socket_unit = (ROOT / "systemd" / "resctrlmond-unit.socket").read_text()
    assert f"ListenStream={unit_exec.SOCKET}\n" in socket_unit
    source = (ROOT / "hook" / "unit_exec.c").read_text()
    limits = f"LONGEST = {unit_exec.WAIT_S * 1000:.0f}, LONGEST_IN_ALL = {unit_exec.LONGEST_WAIT_S * 1000:.0f},"
    assert limits in source
