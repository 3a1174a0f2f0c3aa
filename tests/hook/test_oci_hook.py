# SPDX-License-Identifier: Apache-2.0
"""The hook, run as a runtime runs it: it sends the state to the daemon, and never prevents a container's start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond import oci_hook
from resctrlmond.api.varlink import messages as wire
from resctrlmond.start_lock import SUFFIX, StartLock

PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
HOOK = Path(oci_hook.__file__)
STATE = b'{"ociVersion":"1.0.2","id":"4d4d","status":"creating","pid":4711,"bundle":"/b","annotations":{"k":"v"}}'
OK = b'{"parameters":{"state":"active"}}\0'
NOBODY = 65534
texts = st.text(st.characters(codec="utf-8")) | st.sampled_from(["error", ',"error":"a.b"}', '"}'])
values = st.recursive(texts | st.integers(0, 9), lambda inner: st.lists(inner) | st.dictionaries(texts, inner))
parameters = st.dictionaries(texts, values, max_size=4)


@dataclass
class Result:
    """The result of one run of the hook: exit code, stderr and duration in seconds."""

    code: int
    stderr: str
    seconds: float


class Host:
    """A host as the hook sees it: the sockets of the daemon and the journal, and the hook, in one directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        os.chmod(directory, 0o755)  # access for the test with an unprivileged caller
        self.hook = f"{directory}/hook"
        Path(self.hook).write_bytes(HOOK.read_bytes())
        os.chmod(self.hook, 0o755)
        self.daemon_path = f"{directory}/daemon"
        self.daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.journal_path = f"{directory}/journal"
        self.journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.journal.bind(self.journal_path)
        self.journal.setblocking(False)
        os.chmod(self.journal_path, 0o666)
        self.received = b""
        self.threads: list[threading.Thread] = []

    def close(self) -> None:
        self.daemon.close()
        self.journal.close()
        for thread in self.threads:
            thread.join(60)

    def listen(self, backlog: int = 8) -> None:
        self.daemon.bind(self.daemon_path)
        self.daemon.listen(backlog)

    def serve(self, *answer: bytes) -> None:
        """Reply to one message in these pieces. ``received`` has everything that the hook sends."""
        self.listen()
        self.daemon.settimeout(60)

        def one() -> None:
            connection, _ = self.daemon.accept()
            with connection:
                connection.settimeout(60)
                while not self.received.endswith(b"\0"):
                    chunk = connection.recv(65536)
                    if not chunk:
                        return
                    self.received += chunk
                for piece in answer:
                    connection.sendall(piece)
                    time.sleep(0.01)
                if answer:
                    connection.shutdown(socket.SHUT_WR)
                # A hook that leaves part of the answer unread resets the connection.
                with contextlib.suppress(ConnectionResetError):
                    while chunk := connection.recv(65536):
                        self.received += chunk

        self.threads.append(threading.Thread(target=one))
        self.threads[-1].start()

    def argv(self, *arguments: str) -> list[str]:
        paths = ["--socket", self.daemon_path, "--journal", self.journal_path]
        return [PYTHON, "-IS", self.hook, *arguments, *paths]

    def run(self, *arguments: str, state: bytes = STATE, **options: Any) -> Result:
        start = time.monotonic()
        done = subprocess.run(
            self.argv(*(arguments or ("createRuntime",))),
            check=False,
            **{"input": state, "env": {}, "capture_output": True, "timeout": 30, **options},
        )
        seconds = time.monotonic() - start
        assert not done.stdout
        return Result(done.returncode, (done.stderr or b"").decode(), seconds)

    def lines(self) -> list[dict[str, str]]:
        """Return the journal's entries, as fields."""
        entries: list[dict[str, str]] = []
        while True:
            try:
                text = self.journal.recv(1 << 16).decode()
            except BlockingIOError:
                return entries
            assert text.endswith("\n")
            fields = [line.split("=", 1) for line in text[:-1].split("\n")]
            names = ["MESSAGE", "MESSAGE_ID", "PRIORITY", "SYSLOG_IDENTIFIER", "RESCTRLMON_STAGE"]
            assert [name for name, _ in fields] == names
            entries.append(dict(fields))

    def the_line(self) -> str:
        """Return the message of the only entry."""
        (entry,) = self.lines()
        assert (entry["PRIORITY"], entry["SYSLOG_IDENTIFIER"]) == ("4", "resctrlmon-oci-hook")
        return entry["MESSAGE"]

    def parameters(self) -> dict[str, str]:
        """Return the parameters of the daemon's call, after the end of the hook."""
        for thread in self.threads:
            thread.join(60)
        assert self.received.count(b"\0") == 1
        call = json.loads(self.received[:-1])
        assert call.keys() == {"method", "parameters"}
        assert call["method"] == "org.resctrlmon.Hook.Run"
        parameters: dict[str, str] = call["parameters"]
        return parameters


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as directory:
        made = Host(directory)
        yield made
        made.close()


@pytest.mark.parametrize("answer", [(OK,), (b"{}\0",), (OK[:3], OK[3:-1], b"\0")], ids=["whole", "empty", "pieces"])
def test_the_state_is_handed_over_as_it_was_given(host: Host, answer: tuple[bytes, ...]) -> None:
    host.serve(*answer)
    result = host.run("createRuntime", "--strict")
    assert (result.code, result.stderr) == (0, "")
    assert host.parameters() == {"stage": "createRuntime", "state": STATE.decode()}
    assert host.lines() == []


@pytest.mark.parametrize(
    "state",
    [
        '{} },"x":{',
        '{},"stage":"poststop"',
        '"}}\\',
        '\\","stage":"poststop","x":"',
        '{\n\t"id": "a\\u0000\\"b\\\\",\r\n "é": "\U0001f980 \u2028"}',
        "%b %s {0}",
        "\x7f",
    ],
)
def test_a_hostile_state_stays_inside_its_string(host: Host, state: str) -> None:
    host.serve(OK)
    assert host.run(state=state.encode()).code == 0
    assert host.parameters() == {"stage": "createRuntime", "state": state}


@given(st.text(st.characters(codec="utf-8")) | st.text(alphabet='\\"{}[]:,\n\r\tu0d8\0\x1f\x0b'))
def test_every_text_arrives_unchanged_or_is_refused(state: str) -> None:
    refused = not state.encode().strip() or any(c < " " and c not in "\t\n\r" for c in state)
    try:
        message = oci_hook.request("poststop", state.encode())
    except oci_hook.HookError:
        assert refused
        return
    assert not refused
    assert json.loads(message[:-1])["parameters"] == {"stage": "poststop", "state": state}
    call = wire.decode(message[:-1], wire.Call)
    assert call.method == "org.resctrlmon.Hook.Run"
    assert wire.decode_parameters(call.parameters, dict[str, str]) == {"stage": "poststop", "state": state}


def test_a_long_state_is_handed_over(host: Host) -> None:
    host.serve(OK)
    state = json.dumps({"annotations": {"a": '"' * 200_000}}).encode()
    assert host.run(state=state).code == 0
    assert host.parameters()["state"] == state.decode()


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (b"", "no state"),
        (b" \n", "no state"),
        (STATE + b"\0", "control characters"),
        (b"\x1b" + STATE, "control characters"),
        (b'{"id":"\xff"}', "not UTF-8"),
        (b'{"id":"\xed\xa0\x80"}', "not UTF-8"),
        (b"x" * (1 << 20), "longer"),
        (b'"' * (1 << 19), "longer"),
    ],
    ids=["empty", "blank", "nul", "escape", "latin-1", "surrogate", "too long", "too long once escaped"],
)
def test_invalid_state_is_not_sent(host: Host, state: bytes, reason: str) -> None:
    host.listen()
    assert host.run(state=state).code == 0
    line = host.the_line()
    assert reason in line
    assert line.endswith("; the container starts anyway, and may be unmonitored")


def test_the_runtime_can_write_all_of_an_over_long_state(host: Host) -> None:
    hook = subprocess.Popen(host.argv("createRuntime"), stdin=subprocess.PIPE, env={})
    assert hook.stdin
    with hook.stdin as pipe:
        pipe.write(b"x" * (3 << 20))  # a BrokenPipeError would end the test here
    assert hook.wait(60) == 0
    assert "longer" in host.the_line()


def no_socket(host: Host) -> None:
    pass


def stale_socket(host: Host) -> None:
    host.daemon.bind(host.daemon_path)


def no_directory(host: Host) -> None:
    host.daemon_path = f"{host.directory}/none/daemon"


def too_long_a_path(host: Host) -> None:
    host.daemon_path = f"{host.directory}/{'x' * 120}"


@pytest.mark.parametrize("prepare", [no_socket, stale_socket, no_directory, too_long_a_path])
def test_without_a_daemon_the_container_starts(host: Host, prepare: Callable[[Host], None]) -> None:
    prepare(host)
    assert host.run("prestart").code == 0
    line = host.the_line()
    assert f"cannot connect to resctrlmond at {host.daemon_path}" in line
    assert line.endswith("; the container starts anyway, and may be unmonitored")


def test_without_a_daemon_the_container_ends(host: Host) -> None:
    assert host.run("poststop").code == 0
    assert host.the_line().endswith("; resctrlmond must detect the container's end by itself")


def test_strict_stops_the_container_and_says_why_on_stderr(host: Host) -> None:
    result = host.run("createRuntime", "--strict")
    assert result.code == 1
    line = host.the_line()
    assert line.endswith("; the container does not start (--strict)")
    assert result.stderr == f"resctrlmon-oci-hook: {line}\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"error":"org.resctrlmon.Hook.InvalidOciState","parameters":{"message":"a\nb"}}\0', "refused: a b;"),
        (b"HTTP/1.1 400 Bad Request\0", "HTTP/1.1 400"),
        (b"\0", "refused"),
        (OK[:-1], "without a reply"),
        (b"{" * (1 << 17), "longer"),
    ],
    ids=["error", "no varlink", "nothing", "cut off", "endless"],
)
def test_error_reply_is_logged(host: Host, answer: bytes, reason: str) -> None:
    host.serve(answer)
    assert host.run().code == 0
    assert reason in host.the_line()


@given(parameters, st.from_regex(r"[a-z]+(\.[a-zA-Z0-9]+)+", fullmatch=True))
def test_hook_distinguishes_errors_from_replies(fields: dict[str, object], name: str) -> None:
    # The hook parses no JSON, so this holds it to the daemon's own encoder.
    reply = wire.encode(wire.Reply(wire.encode_parameters(fields)))
    assert not oci_hook.is_refusal(reply[:-1])
    refusal = wire.encode(wire.error_reply(wire.VarlinkError(name, fields)))
    assert oci_hook.is_refusal(refusal[:-1])


@pytest.mark.parametrize(
    ("reply", "refusal"),
    [
        (b'{"error":"a.b"}', True),
        (b'{"error":"a.b","parameters":{"c":"d"}}', True),
        (b'{"parameters":{"c":"d"},"error":"a.b"}', True),
        (b"", True),
        (b"[]", True),
        (b"{}", False),
        (b'{"parameters":{"error":"a.b"}}', False),
        (b'{"parameters":{"c":1,"error":"a.b"}}', False),
        (rb'{"parameters":{"c":",\"error\":\"a.b"}}', False),
    ],
)
def test_a_refusal_is_an_error_at_the_top(reply: bytes, refusal: bool) -> None:
    assert oci_hook.is_refusal(reply) is refusal


@given(st.dictionaries(st.sampled_from(["message", "remedy", "path", "status"]), st.text(max_size=60), min_size=1))
def test_refusal_is_logged_as_text_and_not_as_json(fields: dict[str, str]) -> None:
    # The hook parses no JSON, so this holds it to the daemon's own encoder.
    reply = wire.encode(wire.error_reply(wire.VarlinkError("org.resctrlmon.Manager.InvalidOciState", dict(fields))))
    shown = {name: "".join(c if c >= " " else " " for c in text) for name, text in fields.items()}
    words = shown.get("message") or "org.resctrlmon.Manager.InvalidOciState"
    remedy = f". {shown['remedy']}" if shown.get("remedy") else ""
    assert oci_hook.refusal(reply[:-1]) == f"resctrlmond refused: {words}{remedy}"


@pytest.mark.parametrize("reply", [b"", b"[]", b'{"error":7}', b'{"parameters":{"message":"a\\'])
def test_malformed_reply_is_logged(reply: bytes) -> None:
    assert oci_hook.refusal(reply).startswith("resctrlmond refused: ")


def test_a_daemon_that_never_answers_is_not_waited_for_long(host: Host) -> None:
    host.serve()
    result = host.run("createRuntime", "--timeout", "0.3")
    assert result.code == 0
    assert 0.3 <= result.seconds < 5
    assert "gave up waiting for resctrlmond after 0.3 s" in host.the_line()


def fill_backlog(host: Host) -> list[socket.socket]:
    host.listen(backlog=1)
    waiting = []
    while True:
        waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        waiting[-1].setblocking(False)
        try:
            waiting[-1].connect(host.daemon_path)
        except BlockingIOError:
            return waiting


def test_a_full_backlog_is_not_waited_for_long(host: Host) -> None:
    waiting = fill_backlog(host)
    result = host.run("createRuntime", "--timeout", "0.3")
    assert result.code == 0
    assert 0.3 <= result.seconds < 5
    assert "gave up waiting for resctrlmond" in host.the_line()
    for one in waiting:
        one.close()


def test_behind_a_full_backlog_the_hook_waits_its_turn(host: Host) -> None:
    waiting = fill_backlog(host)
    hook = subprocess.Popen(host.argv("createRuntime", "--timeout", "20"), stdin=subprocess.PIPE, env={})
    assert hook.stdin
    with hook.stdin as pipe:
        pipe.write(STATE)
    # Longer than the timer's signal needs to interrupt the connect().
    time.sleep(0.5)
    for one in waiting:
        one.close()
    host.daemon.settimeout(60)
    while not host.received:
        connection, _ = host.daemon.accept()
        with connection:
            host.received = connection.recv(1 << 16)
            if host.received:
                connection.sendall(OK)
    assert hook.wait(60) == 0
    assert host.parameters()["state"] == STATE.decode()
    assert host.lines() == []


@pytest.fixture
def starting(host: Host) -> Iterator[StartLock]:
    """The lock of a daemon that starts, held by this process."""
    lock = StartLock(host.daemon_path + SUFFIX)
    lock.take()
    assert lock.is_held
    yield lock
    lock.release()


@contextlib.contextmanager
def running(host: Host, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run of the hook that has been given its state."""
    hook = subprocess.Popen(host.argv(*arguments), stdin=subprocess.PIPE, env={})
    assert hook.stdin
    with hook:
        hook.stdin.write(STATE)
        hook.stdin.close()
        yield hook


def test_a_daemon_that_starts_is_waited_for(host: Host, starting: StartLock) -> None:
    host.listen()
    with running(host, "createRuntime", "--timeout", "0.3", "--start-timeout", "60") as hook:
        with pytest.raises(subprocess.TimeoutExpired):
            hook.wait(2)
        connection, _ = host.daemon.accept()
        with connection:
            starting.release()
            connection.sendall(OK)
            assert hook.wait(60) == 0
    assert host.lines() == []


def test_a_daemon_that_starts_is_not_waited_for_too_long(host: Host, starting: StartLock) -> None:
    host.listen()
    result = host.run("createRuntime", "--timeout", "0.3", "--start-timeout", "1.2")
    assert result.code == 0
    assert result.seconds > 1
    assert "gave up waiting for resctrlmond after 1 s: it was starting or stopping" in host.the_line()


@pytest.mark.parametrize("options", [["createRuntime", "--start-timeout", "0"], ["poststop"]], ids=ascii)
def test_the_start_of_a_daemon_is_not_waited_for_without_need(
    host: Host, starting: StartLock, options: list[str]
) -> None:
    host.listen()
    assert host.run(*options, "--timeout", "0.3").code == 0
    assert "gave up waiting for resctrlmond after 0.3 s" in host.the_line()


def test_a_start_that_ends_without_an_answer_is_waited_for_no_longer(host: Host, starting: StartLock) -> None:
    host.listen()
    with running(host, "createRuntime", "--timeout", "0.3", "--start-timeout", "3600") as hook:
        with pytest.raises(subprocess.TimeoutExpired):
            hook.wait(2)
        starting.release()
        assert hook.wait(60) == 0
    assert "gave up waiting for resctrlmond after 0.3 s" in host.the_line()


def test_a_daemon_that_was_killed_while_it_started_is_not_waited_for(host: Host) -> None:
    host.listen()
    code = (
        "import sys, time; from resctrlmond.start_lock import StartLock; "
        "lock = StartLock(sys.argv[1]); lock.take(); print(lock.is_held, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, host.daemon_path + SUFFIX]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout
        assert daemon.stdout.readline() == b"True\n"
        daemon.kill()
    assert host.run("createRuntime", "--timeout", "0.3", "--start-timeout", "3600").code == 0
    assert "gave up waiting for resctrlmond after 0.3 s" in host.the_line()


def test_a_start_that_hangs_in_the_kernel_is_not_waited_for(host: Host, starting: StartLock) -> None:
    host.listen()
    starting.release_after(0.5)
    assert host.run("createRuntime", "--timeout", "0.3", "--start-timeout", "3600").code == 0
    assert "gave up waiting for resctrlmond after 0.3 s" in host.the_line()


@pytest.mark.parametrize("is_reset", [False, True])
def test_the_next_daemon_is_asked_if_one_that_stops_closes_the_connection(host: Host, is_reset: bool) -> None:
    host.listen()
    host.daemon.settimeout(30)
    with running(host, "createRuntime", "--timeout", "60") as hook:
        connection, _ = host.daemon.accept()
        with connection:
            # Closed with data that was not read, a connection is reset.
            while not is_reset and not host.received.endswith(b"\0"):
                host.received += connection.recv(1 << 16)
            if is_reset:
                connection.recv(1, socket.MSG_PEEK)
        connection, _ = host.daemon.accept()
        with connection:
            host.received = b""
            while not host.received.endswith(b"\0"):
                host.received += connection.recv(1 << 16)
            connection.sendall(OK)
            assert hook.wait(60) == 0
    assert host.parameters()["state"] == STATE.decode()
    assert host.lines() == []


def test_a_daemon_that_closes_each_connection_is_asked_twice(host: Host) -> None:
    host.listen()
    host.daemon.settimeout(30)
    with running(host, "createRuntime", "--timeout", "60") as hook:
        for _ in range(2):
            connection, _ = host.daemon.accept()
            connection.close()
        assert hook.wait(60) == 0
    assert "closed the connection without a reply" in host.the_line()


@pytest.mark.parametrize("blocked", [set(), {signal.SIGALRM}], ids=["", "SIGALRM blocked by the runtime"])
def test_a_stdin_that_never_ends_is_not_waited_for_long(host: Host, blocked: set[signal.Signals]) -> None:
    reader, writer = os.pipe()
    os.write(writer, STATE)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        result = host.run("createRuntime", "--timeout", "0.3", "--strict", input=None, stdin=reader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
        os.close(writer)
    assert result.code == 1
    assert 0.3 <= result.seconds < 5
    assert "gave up reading the state after 0.3 s" in host.the_line()


def test_a_journal_that_nobody_reads_is_not_waited_for(host: Host) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as noise:
        noise.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                noise.sendto(b"MESSAGE=noise\n", host.journal_path)
    result = host.run("createRuntime", "--timeout", "20")
    assert result.code == 0
    assert result.seconds < 5


def test_a_stderr_that_nobody_reads_is_not_waited_for_long(host: Host) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while os.write(writer, b"x" * 4096):
            pass
    except BlockingIOError:
        os.set_blocking(writer, True)
    arguments = ["createRuntime", "--timeout", "0.5", "--strict"]
    result = host.run(*arguments, capture_output=False, stdout=writer, stderr=writer)
    os.close(reader)
    os.close(writer)
    assert result.code == 1
    assert result.seconds < 5
    assert "the container does not start" in host.the_line()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("strict", [[], ["--strict"]], ids=["", "strict"])
def test_without_stdout_and_stderr_the_hook_does_its_work(host: Host, strict: list[str], closed: str) -> None:
    host.serve(b'{"error":"org.resctrlmon.Hook.InvalidOciState"}\0')
    hook = host.argv("createRuntime", *strict)
    shell = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *hook]
    assert subprocess.run(shell, input=STATE, env={}, timeout=60, check=False).returncode == len(strict)
    assert host.parameters()["state"] == STATE.decode()
    assert "InvalidOciState" in host.the_line()


def test_without_stdin_there_is_no_state(host: Host) -> None:
    shell = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *host.argv("createRuntime")]
    subprocess.run(shell, env={}, timeout=60, check=True)
    assert "failed reading the state" in host.the_line()


def test_without_a_journal_the_container_starts(host: Host) -> None:
    os.unlink(host.journal_path)
    result = host.run()
    assert (result.code, result.stderr) == (0, "")


@pytest.mark.parametrize("strict", [[], ["--strict"]], ids=["", "strict"])
def test_runtime_without_access_to_the_daemon_is_ignored(host: Host, strict: list[str]) -> None:
    host.listen()
    os.chmod(host.daemon_path, 0o000)
    # Root may connect whatever the mode.
    user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    result = host.run("createRuntime", *strict, **user)
    assert (result.code, result.stderr) == (0, "")
    assert host.lines() == []


def test_a_hook_that_is_interrupted_lets_the_container_start(host: Host) -> None:
    host.serve()
    hook = subprocess.Popen(host.argv("createRuntime", "--timeout", "20"), stdin=subprocess.PIPE, env={})
    assert hook.stdin
    with hook.stdin as pipe:
        pipe.write(STATE)
    while not host.received.endswith(b"\0"):
        time.sleep(0.01)
    hook.send_signal(signal.SIGINT)
    assert hook.wait(60) == 0
    assert "failed waiting for resctrlmond" in host.the_line()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--strict"],
        ["createRuntime", "poststop"],
        ["create-runtime"],
        ['x","state":"'],
        ["créateRuntime"],
        ["a\nPRIORITY=0"],
        ["createRuntime", "--quick"],
        ["createRuntime", "--timeout", "0"],
        ["createRuntime", "--timeout", "-1"],
        ["createRuntime", "--timeout", "nan"],
        ["createRuntime", "--timeout", "inf"],
        ["createRuntime", "--timeout", "soon"],
        ["createRuntime", "--start-timeout", "-1"],
        ["createRuntime", "--start-timeout", "nan"],
        ["createRuntime", "--start-timeout", "soon"],
        ["createRuntime", "--socket", ""],
    ],
    ids=ascii,
)
def test_wrong_arguments_are_logged_and_nothing_is_sent(host: Host, arguments: list[str]) -> None:
    host.listen()
    assert host.run(*arguments).code == int("--strict" in arguments)
    assert "wrong arguments: " in host.the_line()
    host.daemon.setblocking(False)
    with pytest.raises(BlockingIOError):
        host.daemon.accept()


def modules(*command: str) -> set[str]:
    """Return the modules that the interpreter imports for the command."""
    argv = [PYTHON, "-IS", "-X", "importtime", *command]
    done = subprocess.run(argv, input=STATE, env={}, capture_output=True, timeout=60, check=True)
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip() for line in lines}


def test_the_hook_imports_next_to_nothing(host: Host) -> None:
    host.serve(OK)
    used = modules(*host.argv("createRuntime")[2:])
    assert host.parameters()["state"] == STATE.decode()
    assert "posix" in used
    assert used - modules("-c", "pass") <= {"_socket"}


def test_the_file_can_be_installed_as_it_is() -> None:
    assert HOOK.read_text().startswith("#!/usr/bin/python3 -IS\n")
    assert os.access(HOOK, os.X_OK)
