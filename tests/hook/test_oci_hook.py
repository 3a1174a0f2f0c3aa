# SPDX-License-Identifier: Apache-2.0
"""The hook, run as a runtime runs it: it sends the state to the daemon, and never prevents a container's start.

Each test runs the hook as it is installed, and with sanitizers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from resctrlmond.api import oci_state
from resctrlmond.api.oci_state import parse_state
from resctrlmond.api.varlink import messages as wire
from resctrlmond.api.varlink.frames import VarlinkError
from resctrlmond.service.start_lock import SUFFIX, StartLock
from resctrlmond.workloads.profiles.profile import ANNOTATIONS
from tests.hook.builds import BUILDS, ROOT, compile_hook
from tests.wait import wait_until

STATE = b'{"ociVersion":"1.0.2","id":"4d4d","status":"creating","pid":4711,"bundle":"/b","annotations":{"k":"v"}}'
OK = b'{"parameters":{"state":"active"}}\0'
NOBODY = 65534
# A longer string of a state is replaced, and a longer state, message or reply is a failure.
MAX_STRING, MAX_STATE, MAX_MESSAGE, MAX_REPLY = 1 << 15, 1 << 23, 1 << 21, 1 << 16
STARTS_ANYWAY, DOES_NOT_START = (
    "the container starts anyway, and may be unmonitored",
    "the container does not start (--strict)",
)
texts = st.text(st.characters(codec="utf-8")) | st.sampled_from(["error", ',"error":"a.b"}', '"}'])
values = st.recursive(texts | st.integers(0, 9), lambda inner: st.lists(inner) | st.dictionaries(texts, inner))
parameters = st.dictionaries(texts, values, max_size=4)
# Each example runs the hook once, on one host.
on_one_host = settings(
    max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@dataclass
class Result:
    """The result of one run of the hook: exit code, stderr and duration in seconds."""

    code: int
    stderr: str
    seconds: float


class Host:
    """A host as the hook sees it: the sockets of the daemon and the journal, and the hook, in one directory."""

    def __init__(self, directory: str, build: str) -> None:
        self.directory = directory
        os.chmod(directory, 0o755)  # access for the test with an unprivileged caller
        self.hook = shutil.copy(compile_hook(build), f"{directory}/hook")
        self.daemon_path = f"{directory}/daemon"
        self.daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.journal_path = f"{directory}/journal"
        self.journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.journal.bind(self.journal_path)
        self.journal.setblocking(False)
        os.chmod(self.journal_path, 0o666)
        self.received = b""
        self.reply = OK
        self.threads: list[threading.Thread] = []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.daemon.shutdown(socket.SHUT_RDWR)  # ends the accept() of serve_each
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

    def serve_each(self) -> None:
        """Reply to every message with ``reply``. ``received`` has the last message."""
        self.listen(64)

        def each() -> None:
            while True:
                try:
                    connection, _ = self.daemon.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(ConnectionError):
                    received = b""
                    while (chunk := connection.recv(65536)) and not (received := received + chunk).endswith(b"\0"):
                        pass
                    self.received = received
                    connection.sendall(self.reply)

        self.threads.append(threading.Thread(target=each))
        self.threads[-1].start()

    def outcome(self, state: bytes = STATE, reply: bytes = OK) -> tuple[int, bytes, list[str]]:
        """Run the hook with --strict, served by serve_each. Return its exit code, its message and its journal."""
        self.received, self.reply = b"", reply
        code = self.run("createRuntime", "--strict", state=state).code
        return code, self.received, [line["MESSAGE"] for line in self.lines()]

    def argv(self, *arguments: str) -> list[str]:
        # On a busy machine, this process may reply later than within the 2 s of the hook's own time-out.
        waits = () if "--timeout" in arguments else ("--timeout", "20")
        return [self.hook, *arguments, *waits, "--socket", self.daemon_path, "--journal", self.journal_path]

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
        assert call.keys() == {"method", "more", "parameters"}
        assert (call["method"], call["more"]) == ("org.resctrlmon.Hook.Run", True)
        parameters: dict[str, str] = call["parameters"]
        return parameters


@contextlib.contextmanager
def host_with(build: str) -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as directory:
        made = Host(directory, build)
        yield made
        made.close()


@pytest.fixture(params=BUILDS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with host_with(request.param) as made:
        yield made


@pytest.fixture
def served(host: Host) -> Host:
    """Return a host whose daemon replies to every message."""
    host.serve_each()
    return host


@pytest.mark.parametrize("answer", [(OK,), (b"{}\0",), (OK[:3], OK[3:-1], b"\0")], ids=["whole", "empty", "pieces"])
def test_state_is_sent_unchanged(host: Host, answer: tuple[bytes, ...]) -> None:
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


@on_one_host
@given(st.text(st.characters(codec="utf-8")) | st.text(alphabet='\\"{}[]:,\n\r\tu0d8\0\x1f\x0b'))
def test_every_text_arrives_unchanged_or_is_refused(served: Host, state: str) -> None:
    refused = not state.encode().strip() or any(c < " " and c not in "\t\n\r" for c in state)
    code, message, _ = served.outcome(state.encode())
    assert (code, message == b"") == (refused, refused)
    if refused:
        return
    assert json.loads(message[:-1])["parameters"] == {"stage": "createRuntime", "state": state}
    call = wire.decode(message[:-1], wire.Call)
    assert call.method == "org.resctrlmon.Hook.Run"
    assert wire.decode_parameters(call.parameters, dict[str, str]) == {"stage": "createRuntime", "state": state}


# Pieces of states and of characters, so that mutated states are often nearly valid.
PIECES = [STATE, b"\\", b'"', b"\n", b"\r\t", b" ", b"\0", b"\x1f", b"\x7f", b"\xe2\x80\xa8", b"x" * 70_000]
# Characters at the limits of UTF-8, and bytes just past them (RFC 3629).
PIECES += [b"\xc2\x80", b"\xed\x9f\xbf", b"\xee\x80\x80", b"\xf0\x90\x80\x80", b"\xf4\x8f\xbf\xbf"]
PIECES += [b"\x80", b"\xc1\xbf", b"\xc3", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80"]
PIECES += [b"\xf8\x88\x80\x80\x80", b"\xff"]
stdin = st.binary(max_size=40) | st.lists(st.sampled_from(PIECES) | st.binary(max_size=3)).map(b"".join)


def reason_against(state: bytes) -> str:
    """Return why the hook does not send the state, "" if it sends it."""
    if not state.strip():
        return "the runtime wrote no state to stdin"
    if len(state) > MAX_STATE:
        return f"the state is longer than {MAX_STATE} bytes"
    state = shorten(state)
    if re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]", state):
        return "the state contains control characters"
    try:
        state.decode()
    except UnicodeDecodeError:
        return "the state is not UTF-8"
    return ""


def shorten(state: bytes) -> bytes:
    """Return the state with "..." in the place of each string that is too long."""
    string = re.compile(rb'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
    return string.sub(lambda found: found[0] if len(found[1]) <= MAX_STRING else b'"..."', state)


def check_stdin(served: Host, state: bytes) -> None:
    """Run the hook with these bytes, and compare its message and its line in the journal with those expected."""
    code, message, lines = served.outcome(state)
    if reason := reason_against(state):
        assert (code, message, lines) == (1, b"", [f"{reason}; {DOES_NOT_START}"])
    else:
        assert (code, lines) == (0, [])
        assert json.loads(message[:-1])["parameters"]["state"] == shorten(state).decode()


def test_only_valid_characters_are_sent(served: Host) -> None:
    for piece in PIECES:
        check_stdin(served, b'"%b"' % piece)


@on_one_host
@given(stdin)
def test_any_stdin_is_sent_or_refused_with_its_reason(served: Host, state: bytes) -> None:
    check_stdin(served, state)


WORDS = ['{"error":"', '{"parameters":{', ',"error":"a.b"}', '{"error":"a.b","parameters":{', '"message":"']
WORDS += ['"remedy":"', "a.b", '"', "}", "\\", "\\\\", '\\"', "\\n", "\\u0041", "\\u00", ",", "{", "\n", "\x7f", "\0"]
WORDS += ["x" * 5000, '{"parameters":{"queueTimeoutMs":', "25", '},"continues":true}', '"continues":true}\0{}']


def is_error(reply: str) -> bool:
    """Whether the reply is an error, or not varlink."""
    return not reply.startswith("{") or bool(re.search(r'^\{"error":"|,"error":"[^"]*"\}\Z', reply))


def text_of(reply: str, name: str) -> str:
    """Return the text of a member of the reply, "" if it has none. Each escaped control character is a blank."""
    found = re.search(rf'"{name}":"((?:[^"\\]|\\u.{{0,4}}|\\.?)*+)', reply, re.DOTALL)
    escape = re.compile(r'\\(?:u.{0,4}|(["\\/])|.?)', re.DOTALL)
    return escape.sub(lambda each: each[1] or " ", found[1]) if found else ""


def line_about(replies: str) -> str:
    """Return the line that the hook writes about the replies of the daemon, "" if it accepted the call."""
    for reply in replies.split("\0")[:-1]:
        if is_error(reply):
            start = reply[:4096]
            words = text_of(start, "message") or text_of(start, "error") or start[:200]
            remedy = text_of(start, "remedy")
            return f"resctrlmond refused: {words}. {remedy}" if remedy else f"resctrlmond refused: {words}"
        if not reply.endswith('"continues":true}'):
            return ""
    return "resctrlmond closed the connection without a reply"


@on_one_host
@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_any_reply_is_accepted_or_logged(served: Host, reply: str) -> None:
    code, message, lines = served.outcome(reply=reply.encode() + b"\0")
    assert json.loads(message[:-1])["parameters"]["state"] == STATE.decode()
    line = re.sub(r"[\n\x7f]", " ", line_about(f"{reply}\0"))
    assert (code, lines) == ((1, [f"{line}; {DOES_NOT_START}"]) if line else (0, []))


@on_one_host
@given(st.binary())
def test_any_bytes_in_reply_are_survived(served: Host, reply: bytes) -> None:
    code, message, lines = served.outcome(reply=reply)
    assert message
    assert (code, len(lines)) in ((0, 0), (1, 1))


@example("0x1")
@example("")
@on_one_host
@given(st.lists(st.sampled_from([*"019.eE+-xn", "inf", "nan", "e400"])).map("".join))
def test_only_a_number_of_seconds_is_a_timeout(served: Host, number: str) -> None:
    try:
        is_valid = 0 <= float(number) <= 3600
    except ValueError:
        is_valid = False
    served.run("createRuntime", "--start-timeout", number)
    lines = [entry["MESSAGE"] for entry in served.lines()]
    reason = f"wrong arguments: --start-timeout '{number}' is not a number of seconds; {STARTS_ANYWAY}"
    assert lines == ([] if is_valid else [reason])


def test_a_long_state_is_handed_over(host: Host) -> None:
    host.serve(OK)
    state = json.dumps({"annotations": {str(number): '"' * 10_000 for number in range(40)}}).encode()
    assert host.run(state=state).code == 0
    assert host.parameters()["state"] == state.decode()


def as_crio_writes(annotations: dict[str, str]) -> dict[str, Any]:
    """Return a state with the annotations of a pod, and all of them once more in one annotation."""
    again = {"io.kubernetes.cri-o.Annotations": as_go_writes(annotations).decode()}
    return {"ociVersion": "1.0.2", "id": "4d4d", "status": "created", "pid": 4711, "annotations": annotations | again}


def as_go_writes(document: object) -> bytes:
    """Return the JSON of Go, which escapes "<"."""
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c").encode()


@pytest.mark.parametrize("length", [200, 250_000])
@pytest.mark.parametrize("letter", ["<", "\x01", '"', "\\", "a"], ids=ascii)
def test_annotations_of_a_pod_do_not_keep_its_state_from_the_daemon(host: Host, letter: str, length: int) -> None:
    """256 KiB of them, the limit of Kubernetes, made the state too long, and the container unmonitored."""
    left = 256 * 1024 - 100
    given = {f"a.example/{number}": letter * length for number in range(left // (length + 16))}
    given["io.kubernetes.pod.uid"] = "0f8fad5b-d9cb-469f-a165-70867728950e"
    host.serve(OK)
    assert host.run(state=as_go_writes(as_crio_writes(given))).code == 0
    assert host.lines() == []
    sent = parse_state(host.parameters()["state"])
    assert (sent.id, sent.pid) == ("4d4d", 4711)
    assert sent.annotations["io.kubernetes.cri-o.Annotations"] == "..."
    expected = letter * length if length == 200 else "..."
    assert sent.annotations["a.example/0"] == expected
    assert sent.annotations["io.kubernetes.pod.uid"] == given["io.kubernetes.pod.uid"]


@pytest.mark.parametrize("tail", [b'"', b'\\""', b'\\\\"'], ids=ascii)
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_only_strings_above_the_limit_are_shortened(host: Host, tail: bytes, more: int) -> None:
    text = b"x" * (MAX_STRING + more - len(tail) + 1) + tail
    host.serve(OK)
    assert host.run(state=b'{"a\\"":"' + text + b',"b":"' + text + b',"id":"\\\\"}').code == 0
    text = text if more <= 0 else b'..."'
    sent = b'{"a\\"":"' + text + b',"b":"' + text + b',"id":"\\\\"}'
    assert host.parameters()["state"] == sent.decode()


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (b"", "no state"),
        (b" \n", "no state"),
        (STATE + b"\0", "control characters"),
        (b"\x1b" + STATE, "control characters"),
        (b'{"id":"\xff"}', "not UTF-8"),
        (b'{"id":"\xed\xa0\x80"}', "not UTF-8"),
        (b"x" * (MAX_STATE + 1), "longer than 8388608"),
        (b'""' * (1 << 19), "longer than 2097152"),
    ],
    ids=["empty", "blank", "nul", "escape", "latin-1", "surrogate", "too long", "too long once escaped"],
)
def test_invalid_state_is_not_sent(host: Host, state: bytes, reason: str) -> None:
    host.listen()
    assert host.run(state=state).code == 0
    line = host.the_line()
    assert reason in line
    assert line.endswith(f"; {STARTS_ANYWAY}")


def test_the_runtime_can_write_all_of_an_over_long_state(host: Host) -> None:
    hook = subprocess.Popen(host.argv("createRuntime"), stdin=subprocess.PIPE, env={})
    assert hook.stdin
    with hook.stdin as pipe:
        pipe.write(b"x" * (10 << 20))  # a BrokenPipeError would end the test here
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
    assert line.endswith(f"; {STARTS_ANYWAY}")


def test_without_a_daemon_the_container_ends(host: Host) -> None:
    assert host.run("poststop").code == 0
    assert host.the_line().endswith("; resctrlmond must detect the container's end by itself")


def test_strict_stops_the_container_with_the_reason_on_stderr(host: Host) -> None:
    result = host.run("createRuntime", "--strict")
    assert result.code == 1
    line = host.the_line()
    assert line.endswith(f"; {DOES_NOT_START}")
    assert result.stderr == f"resctrlmon-oci-hook: {line}\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"error":"org.resctrlmon.Hook.InvalidOciState","parameters":{"message":"a\nb"}}\0', "refused: a b;"),
        (b"HTTP/1.1 400 Bad Request\0", "HTTP/1.1 400"),
        (b"\0", "refused"),
        (OK[:-1], "without a reply"),
        (b"{" * 2 * MAX_REPLY, "longer than 65536"),
    ],
    ids=["error", "no varlink", "nothing", "cut off", "endless"],
)
def test_error_reply_is_logged(host: Host, answer: bytes, reason: str) -> None:
    host.serve(answer)
    assert host.run().code == 0
    assert reason in host.the_line()


@on_one_host
@given(parameters, st.from_regex(r"[a-z]+(\.[a-zA-Z0-9]+)+", fullmatch=True))
def test_hook_distinguishes_errors_from_replies(served: Host, fields: dict[str, object], name: str) -> None:
    # The hook parses no JSON, so this holds it to the daemon's own encoder.
    assert served.outcome(reply=wire.encode(wire.Reply(wire.encode_parameters(fields))))[0] == 0
    assert served.outcome(reply=wire.encode(wire.error_reply(VarlinkError(name, fields))))[0] == 1


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
def test_a_refusal_is_an_error_at_the_top(served: Host, reply: bytes, refusal: bool) -> None:
    assert served.outcome(reply=reply + b"\0")[0] == refusal


# Characters that a terminal shows, and some that it would execute or that end a line.
# The hook knows the characters to hide by ranges, not by a table of Unicode.
shown = st.characters(codec="utf-8", exclude_categories=["C", "Z"]).filter(
    lambda character: unicodedata.ucd_3_2_0.category(character) != "Cn"
)
written = st.text(shown | st.sampled_from(' "\\/\n\t\x1b\x7f\x9b\xa0\xad\u200f\u2028\u202e\ufeff'), max_size=60)


@on_one_host
@given(st.dictionaries(st.sampled_from(["message", "remedy", "path", "status"]), written, min_size=1))
def test_refusal_is_logged_as_text_and_not_as_json(served: Host, fields: dict[str, str]) -> None:
    # The hook parses no JSON, so this holds it to the daemon's own encoder.
    reply = wire.encode(wire.error_reply(VarlinkError("org.resctrlmon.Manager.InvalidOciState", dict(fields))))
    printed = {name: "".join(c if c.isprintable() else " " for c in text) for name, text in fields.items()}
    words = printed.get("message") or "org.resctrlmon.Manager.InvalidOciState"
    remedy = f". {printed['remedy']}" if printed.get("remedy") else ""
    [line] = served.outcome(reply=reply)[2]
    assert line == f"resctrlmond refused: {words}{remedy}; {DOES_NOT_START}"


@pytest.mark.parametrize("reply", [b"", b"[]", b'{"error":"', b'{"error":"a","p":{"message":"a\\'])
def test_malformed_reply_is_logged(served: Host, reply: bytes) -> None:
    code, _, [line] = served.outcome(reply=reply + b"\0")
    assert (code, line[:21]) == (1, "resctrlmond refused: ")


def test_a_daemon_that_never_answers_is_not_waited_for_long(host: Host) -> None:
    host.serve()
    result = host.run("createRuntime", "--timeout", "0.3")
    assert result.code == 0
    assert 0.3 <= result.seconds < 20
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
    assert 0.3 <= result.seconds < 20
    assert "gave up waiting for resctrlmond" in host.the_line()
    for one in waiting:
        one.close()


def test_behind_a_full_backlog_the_hook_waits_its_turn(host: Host) -> None:
    waiting = fill_backlog(host)
    hook = subprocess.Popen(host.argv("createRuntime", "--timeout", "60"), stdin=subprocess.PIPE, env={})
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


def pause(hook: subprocess.Popen[bytes], seconds: float) -> None:
    """Keep the hook from running, as a busy host does."""
    hook.send_signal(signal.SIGSTOP)
    time.sleep(seconds)


def has_socket(pid: int) -> bool:
    fds = f"/proc/{pid}/fd"
    return any(os.readlink(f"{fds}/{fd}").startswith("socket:") for fd in os.listdir(fds) if int(fd) > 2)


def test_a_call_that_was_not_sent_in_time_is_sent_without_waiting(host: Host) -> None:
    """The daemon assigns the container late. Without the call, the container has no group."""
    waiting = fill_backlog(host)
    host.daemon.settimeout(60)
    with running(host, "createRuntime", "--timeout", "5") as hook:
        wait_until(lambda: has_socket(hook.pid))
        pause(hook, 5.5)
        for one in waiting[:-1]:
            host.daemon.accept()[0].close()
            one.close()
        hook.send_signal(signal.SIGCONT)
        assert hook.wait(60) == 0
        # The first connection stays empty if the hook was stopped before its connect(), which then succeeds.
        while not host.received:
            connection, _ = host.daemon.accept()
            with connection:
                host.received = connection.recv(1 << 16)
    waiting[-1].close()
    assert host.parameters()["state"] == STATE.decode()
    assert "gave up waiting for resctrlmond after 5 s" in host.the_line()


def test_a_long_call_that_was_not_sent_in_time_is_sent_as_a_whole(host: Host) -> None:
    """The daemon does not read yet: a message that does not fit into the socket would be lost."""
    waiting = fill_backlog(host)
    host.daemon.settimeout(60)
    long = json.loads(STATE) | {"annotations": {f"a{number}": "x" * 10_000 for number in range(90)}}
    with running(host, "createRuntime", "--timeout", "5", state=json.dumps(long).encode()) as hook:
        wait_until(lambda: has_socket(hook.pid))
        pause(hook, 5.5)
        for one in waiting[:-1]:
            host.daemon.accept()[0].close()
            one.close()
        hook.send_signal(signal.SIGCONT)
        assert hook.wait(60) == 0
        while not host.received:
            connection, _ = host.daemon.accept()
            with connection:
                while chunk := connection.recv(1 << 16):
                    host.received += chunk
    waiting[-1].close()
    assert json.loads(host.parameters()["state"]) == long


def test_a_state_that_is_there_is_read_after_the_timeout(host: Host) -> None:
    host.serve(OK)
    hook = subprocess.Popen(host.argv("createRuntime", "--timeout", "5"), stdin=subprocess.PIPE, env={}, bufsize=0)
    with hook:
        assert hook.stdin
        hook.stdin.write(STATE)
        pipe, unread = hook.stdin.fileno(), bytearray(4)
        wait_until(lambda: fcntl.ioctl(pipe, termios.FIONREAD, unread) == 0 and not any(unread))
        pause(hook, 5.5)
        hook.stdin.close()
        hook.send_signal(signal.SIGCONT)
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


def notice(milliseconds: float) -> bytes:
    """Return the reply of the daemon to a call that is queued."""
    reply = wire.Reply(wire.encode_parameters({"queueTimeoutMs": milliseconds}), continues=True)
    return wire.encode(reply)


def test_a_hook_whose_call_is_queued_waits_longer(host: Host) -> None:
    host.listen()
    is_waiting, lines = False, list[dict[str, str]]()
    # Longer at the next attempt if the machine was too slow for the notice to arrive within the time.
    for timeout_s in (0.3, 3, 30):
        with running(host, "createRuntime", "--timeout", str(timeout_s)) as hook:
            connection, _ = host.daemon.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(notice(60_000))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    hook.wait(timeout_s + 1.7)
                is_waiting = hook.poll() is None
                connection.sendall(OK)
            assert hook.wait(60) == 0
        lines = host.lines()
        if is_waiting:
            break
    assert is_waiting, lines
    assert lines == []


def test_a_hook_whose_call_is_queued_does_not_wait_too_long(host: Host) -> None:
    """The daemon hangs after it has replied that the call is queued."""
    host.listen()
    seconds, line = 0.0, ""
    # As above.
    for factor in (1, 10):
        begin = time.monotonic()
        with running(host, "createRuntime", "--timeout", f"{0.3 * factor}") as hook:
            connection, _ = host.daemon.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(notice(1200 * factor))
                hook.wait(60)
        seconds, line = time.monotonic() - begin, host.the_line()
        assert hook.returncode == 0
        if "the calls of other containers" in line:
            break
    assert seconds > factor
    assert f"after {1.2 * factor:g} s: the calls of other containers were before it" in line


@pytest.mark.parametrize("first", [notice(200), b'{"continues":true}\0', notice(60_000) + notice(0), notice(-1)])
def test_a_hook_whose_call_is_queued_waits_no_longer_than_allowed(host: Host, first: bytes) -> None:
    host.serve(first)
    assert host.run("createRuntime", "--timeout", "0.3").code == 0
    assert "gave up waiting for resctrlmond after 0.3 s" in host.the_line()


def test_no_daemon_makes_a_hook_wait_for_more_than_a_minute() -> None:
    with host_with("plain") as host:
        host.serve(notice(10**12))
        assert host.run("createRuntime", timeout=180).code == 0
        assert "gave up waiting for resctrlmond after 60 s" in host.the_line()


def test_endless_notices_do_not_extend_the_wait(host: Host) -> None:
    host.listen()
    with running(host, "createRuntime", "--timeout", "0.3") as hook:
        connection, _ = host.daemon.accept()
        with connection, contextlib.suppress(ConnectionError):
            while True:
                connection.sendall((notice(0) + notice(1000)) * 50)
        assert hook.wait(60) == 0
    assert "gave up waiting for resctrlmond after " in host.the_line()


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("notices", [b"", notice(60_000), notice(60_000) * 3000], ids=["none", "one", "many"])
def test_the_reply_after_the_notices_counts(host: Host, notices: bytes, is_whole: bool) -> None:
    reply = notices + b'{"error":"org.resctrlmon.Hook.InvalidOciState"}\0'
    middle = max(len(reply) - 60, 0)
    host.serve(*((reply,) if is_whole else (reply[:middle], reply[middle:-20], reply[-20:])))
    assert host.run("createRuntime", "--strict", "--timeout", "20").code == 1
    assert "refused: org.resctrlmon.Hook.InvalidOciState;" in host.the_line()


def test_queued_call_is_sent_to_the_next_daemon_if_a_stopping_daemon_closes_it(host: Host) -> None:
    host.listen()
    host.daemon.settimeout(30)
    with running(host, "createRuntime", "--timeout", "60") as hook:
        for answer in (notice(60_000), notice(60_000) + OK):
            connection, _ = host.daemon.accept()
            with connection:
                assert connection.recv(1 << 16)
                connection.sendall(answer)
        assert hook.wait(60) == 0
    assert host.lines() == []


def test_the_end_of_a_container_does_not_wait_in_the_queue(host: Host) -> None:
    host.serve(OK)
    assert host.run("poststop").code == 0
    assert json.loads(host.received[:-1]).keys() == {"method", "parameters"}


@contextlib.contextmanager
def running(host: Host, *arguments: str, state: bytes = STATE) -> Iterator[subprocess.Popen[bytes]]:
    """A run of the hook that has been given its state."""
    hook = subprocess.Popen(host.argv(*arguments), stdin=subprocess.PIPE, env={})
    assert hook.stdin
    with hook:
        hook.stdin.write(state)
        hook.stdin.close()
        yield hook


def test_a_daemon_that_starts_is_waited_for(host: Host, starting: StartLock) -> None:
    host.listen()
    with running(host, "createRuntime", "--timeout", "0.3", "--start-timeout", "60") as hook:
        with pytest.raises(subprocess.TimeoutExpired):
            hook.wait(2)
        connection, _ = host.daemon.accept()
        with connection:
            # Not after the release: between the two, this process could be stopped for longer than the hook waits.
            connection.sendall(OK)
            starting.release()
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
        "import sys, time; from resctrlmond.service.start_lock import StartLock; "
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
def test_call_is_sent_to_the_next_daemon_if_a_stopping_daemon_closes_the_connection(
    host: Host, is_reset: bool
) -> None:
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


def test_daemon_that_closes_each_connection_is_called_twice(host: Host) -> None:
    host.listen()
    host.daemon.settimeout(30)
    with running(host, "createRuntime", "--timeout", "60") as hook:
        for _ in range(2):
            connection, _ = host.daemon.accept()
            connection.close()
        assert hook.wait(60) == 0
    assert "closed the connection without a reply" in host.the_line()


def test_a_stdin_that_never_pauses_is_not_waited_for_long(host: Host) -> None:
    with open("/dev/zero", "rb") as endless:
        result = host.run("createRuntime", "--timeout", "0.3", input=None, stdin=endless)
    assert result.code == 0
    assert 0.3 <= result.seconds < 20
    assert "gave up reading the state after 0.3 s" in host.the_line()


def test_state_in_pieces_is_sent_complete(host: Host) -> None:
    host.serve(OK)
    hook = subprocess.Popen(host.argv("createRuntime", "--timeout", "60"), stdin=subprocess.PIPE, env={}, bufsize=0)
    with hook:
        assert hook.stdin
        for byte in STATE:
            hook.stdin.write(bytes([byte]))
            time.sleep(0.001)
        hook.stdin.close()
        assert hook.wait(60) == 0
    assert host.parameters()["state"] == STATE.decode()


def test_signals_end_no_wait(host: Host) -> None:
    host.listen()
    host.daemon.settimeout(60)
    with running(host, "createRuntime", "--timeout", "60") as hook:
        connection, _ = host.daemon.accept()
        with connection:
            for piece in (OK[:9], OK[9:]):
                for _ in range(50):
                    hook.send_signal(signal.SIGALRM)
                    time.sleep(0.001)
                connection.sendall(piece)
            assert hook.wait(60) == 0
    assert host.lines() == []


def test_a_stderr_that_is_closed_changes_no_exit_code(host: Host) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = host.run("createRuntime", "--strict", capture_output=False, stdout=writer, stderr=writer)
    os.close(writer)
    assert result.code == 1
    assert "the container does not start" in host.the_line()


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
    assert 0.3 <= result.seconds < 20
    assert "gave up reading the state after 0.3 s" in host.the_line()


def test_hook_does_not_wait_for_an_unread_journal(host: Host) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as noise:
        noise.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                noise.sendto(b"MESSAGE=noise\n", host.journal_path)
    result = host.run("createRuntime", "--timeout", "60", timeout=120)
    assert result.code == 0
    assert result.seconds < 20


def test_hook_waits_only_briefly_for_an_unread_stderr(host: Host) -> None:
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
    assert result.seconds < 20
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
    # Root may connect for any mode.
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


def test_help_has_the_stages_and_options(host: Host) -> None:
    done = subprocess.run([host.hook, "--help"], input=STATE, env={}, capture_output=True, timeout=30, check=True)
    text = done.stdout.decode()
    stages = ["createRuntime", "prestart", "poststop"]
    options = ["--strict", "--socket", "--timeout", "--start-timeout", "--journal", "--help"]
    assert (text.startswith("Usage: "), done.stderr) == (True, b"")
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ")] == stages + options
    assert max(map(len, text.splitlines())) <= 118


def test_help_beside_a_stage_is_a_wrong_argument(host: Host) -> None:
    assert host.run("createRuntime", "--help").code == 0
    assert "wrong arguments: unknown argument '--help'" in host.the_line()


def test_page_has_each_annotation_that_is_read() -> None:
    page = (ROOT / "man" / "resctrlmon-oci-hook.8.scd").read_text()
    assert {name for name in [*oci_state._USED, *ANNOTATIONS] if f"_{name}_" not in page} == set()


def test_state_on_the_page_is_valid() -> None:
    page = (ROOT / "man" / "resctrlmon-oci-hook.8.scd").read_text()
    (state,) = re.findall(r"# echo '(.*)' \|$", page, re.MULTILINE)
    assert parse_state(state.replace("'$!'", "4711")).pid == 4711


def test_the_hook_file_runs_the_hook_before_the_program_of_a_container(host: Host) -> None:
    [path] = (ROOT / "systemd").glob("*.json")
    file = json.loads(path.read_text())
    hook = file["hook"]
    assert file == {"version": "1.0.0", "hook": hook, "when": {"always": True}, "stages": ["createRuntime"]}
    assert hook["path"] == "/usr/libexec/resctrlmon-oci-hook"
    # The runtime's limit counts from fork(2), and crun(1), runc(8) and podman(1) fail the container when it passes. A
    # host may be too busy to schedule the hook for longer than any limit; the hook ends itself instead.
    assert "timeout" not in hook
    host.serve()
    # args[0] is the program's name, as in execve(2). No option is added: the file's time limit is the hook's own.
    command = [host.hook, *hook["args"][1:], "--socket", host.daemon_path, "--journal", host.journal_path]
    done = subprocess.run(command, check=False, input=STATE, env={}, timeout=60)
    assert done.returncode == 0
    assert host.parameters()["stage"] == "createRuntime"
    assert host.the_line() == f"gave up waiting for resctrlmond after 2 s; {STARTS_ANYWAY}"
