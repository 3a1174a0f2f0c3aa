#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""The OCI hook: hands a container's state from stdin to resctrlmond and never stands in the container's way.

Usage: resctrlmon-oci-hook STAGE [--strict] [--socket PATH] [--timeout SECONDS] [--journal PATH]

STAGE is the OCI stage that the runtime runs the hook at (createRuntime, poststop, ...). Whatever goes wrong,
the hook writes one line to the journal and exits 0; with --strict it exits 1 and says so on stderr too. It
lasts no longer than --timeout (2 s), the reading of stdin included. A runtime that may not reach the daemon
(EACCES on its socket: rootless Podman) is none of its users: exit 0, no word, also with --strict.

Every start of a container waits for this file, so it imports only what the interpreter has built in: json
and socket would more than double its run. There is no "from __future__" here, as that is an import too.
"""

import _signal  # type: ignore[import-not-found]  # no stubs; "signal" would import enum
import _socket
import posix
import sys

SOCKET = "/run/resctrlmond/org.resctrlmon.Manager"
JOURNAL = "/run/systemd/journal/socket"

# resctrlmond.message_ids.MessageId.UNMONITORED: the journal's catalogue explains it.
MESSAGE_ID = "47f76e48a28c4accae8c5c9183767327"

# The longest message to the daemon, its closing NUL included, and the longest answer.
MAX_MESSAGE = 1 << 20
MAX_REPLY = 1 << 16
_CHUNK = 1 << 16

# JSON has no control character in a string; a state has at most those of its layout: tab, newline, return.
_CONTROL = bytes(range(9)) + b"\x0b\x0c" + bytes(range(14, 32))


class HookError(Exception):
    """Why the daemon did not hear of the container, in one sentence for the journal."""


class Run:
    """One run of the hook: what its arguments ask for, and how far it has come.

    ``mistake`` is what is wrong with the arguments ("" if nothing). It is told only after stdin was read: a
    runtime that finds the pipe closed may take that for a failure.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.stage = ""
        self.strict = "--strict" in arguments
        self.socket = SOCKET
        self.journal = JOURNAL
        self.timeout = 2.0
        self.mistake = ""
        self.step = "reading the state"
        words = iter(arguments)
        for word in words:
            if word in ("--socket", "--journal", "--timeout"):
                self._set(word, next(words, ""))
            elif word != "--strict":
                # Letters need no escaping in the message; which stages there are, the daemon knows.
                if self.stage or not (word.isascii() and word.isalpha()):
                    self.mistake = f"unknown argument {word!a}"
                self.stage = self.stage or word
        if not self.stage:
            self.mistake = "no stage was given"

    def _set(self, option: str, value: str) -> None:
        if option == "--timeout":
            try:
                seconds = float(value)
            except ValueError:
                seconds = 0.0
            if 0 < seconds <= 3600:
                self.timeout = seconds
            else:
                self.mistake = f"--timeout {value!a} is no number of seconds"
        elif not value:
            self.mistake = f"{option} needs a path"
        elif option == "--socket":
            self.socket = value
        else:
            self.journal = value


def read_state() -> bytes:
    """All of stdin; what is past the bound is dropped, but read, lest the runtime meet a closed pipe."""
    state = b""
    while chunk := posix.read(0, _CHUNK):
        if len(state) <= MAX_MESSAGE:
            state += chunk
    return state


def request(stage: str, state: bytes) -> bytes:
    """The varlink call ``org.resctrlmon.Hook.Run`` with the state, as the runtime gave it, in a JSON string.

    A string, not an object pasted in: whatever the state holds, it cannot end the string, and so neither add
    nor replace a member of the message. Raises HookError if the state is empty, too long or no text.
    """
    if not state.strip():
        raise HookError("the runtime gave no state on stdin")
    if len(state) > MAX_MESSAGE:
        raise HookError(f"the state is longer than {MAX_MESSAGE} bytes")
    if len(state.translate(None, _CONTROL)) != len(state):
        raise HookError("the state holds control characters")
    try:
        state.decode()
    except UnicodeDecodeError:
        raise HookError("the state is not UTF-8") from None
    string = state.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    string = string.replace(b"\n", b"\\n").replace(b"\r", b"\\r").replace(b"\t", b"\\t")
    message = b'{"method":"org.resctrlmon.Hook.Run","parameters":{"stage":"%b","state":"%b"}}\0'
    message %= (stage.encode(), string)
    if len(message) > MAX_MESSAGE:
        raise HookError(f"the message with the state is longer than {MAX_MESSAGE} bytes")
    return message


def is_refusal(reply: bytes) -> bool:
    """Whether the answer is an error, or no varlink at all, told without parsing it.

    It holds for what resctrlmond writes: JSON without blanks, in which an ``error`` is a string and the first
    or the last member. Text that only looks like it is deeper inside, or has its quotes escaped.
    """
    if not reply.startswith(b"{") or reply.startswith(b'{"error":"'):
        return True
    _, found, name = reply.rpartition(b',"error":"')
    return bool(found) and name.endswith(b'"}') and b'"' not in name[:-2]


def text_of(reply: bytes, name: bytes) -> str:
    """The text of a member of the answer, "" if it has none, found without parsing the rest.

    Within a string a quote is escaped, so a member's name between two quotes can stand nowhere else.
    """
    found = reply.partition(b'"' + name + b'":"')[2]
    text, rest = "", found.decode("utf-8", "replace")
    while rest and rest[0] != '"':
        if rest[0] != "\\":
            text, rest = text + rest[0], rest[1:]
        elif rest[1:2] == "u":
            # A control character: a blank in a line for people.
            text, rest = text + " ", rest[6:]
        else:
            text, rest = text + (rest[1:2] if rest[1:2] in ('"', "\\", "/") else " "), rest[2:]
    return text


def refusal(reply: bytes) -> str:
    """Why resctrlmond refused, and what to do, in words; else the name of the error, or what came instead of one."""
    reply = reply[:4096]
    words = text_of(reply, b"message") or text_of(reply, b"error") or reply[:200].decode("utf-8", "replace")
    remedy = text_of(reply, b"remedy")
    return f"resctrlmond refused: {words}. {remedy}" if remedy else f"resctrlmond refused: {words}"


def call(path: str, message: bytes) -> None:
    """Send the message to the daemon and wait for its yes. Raises HookError, or OSError once connected."""
    daemon = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    # No settimeout(): connect() to a full backlog would fail at once instead of waiting its turn.
    try:
        daemon.connect(path)
    except PermissionError:
        posix._exit(0)
    except OSError as error:
        raise HookError(f"resctrlmond cannot be reached at {path}: {error.strerror or error}") from None
    daemon.sendall(message)
    reply = b""
    while b"\0" not in reply:
        chunk = daemon.recv(_CHUNK)
        if not chunk:
            raise HookError("resctrlmond closed the connection without an answer")
        reply += chunk
        if len(reply) > MAX_REPLY:
            raise HookError(f"resctrlmond's answer is longer than {MAX_REPLY} bytes")
    reply = reply[: reply.index(0)]
    if is_refusal(reply):
        raise HookError(refusal(reply))


def give_up(run: Run, reason: str) -> None:
    """Say in the journal what went wrong and what follows, then exit: 0, or 1 if strict."""
    code = 1 if run.strict else 0
    # The alarm goes on: it bounds a stderr that nobody reads.
    _signal.signal(_signal.SIGALRM, lambda *_: posix._exit(code))
    if run.stage == "poststop":
        outcome = "resctrlmond has to see the container's end by itself"
    elif run.strict:
        outcome = "the container does not start (--strict)"
    else:
        outcome = "the container starts unmonitored"
    # One line each: a newline would begin another field of the journal's protocol.
    text = "".join(c if c.isprintable() else " " for c in f"{reason}; {outcome}")
    stage = "".join(c for c in run.stage if c.isprintable())
    fields = f"MESSAGE={text}\nMESSAGE_ID={MESSAGE_ID}\nPRIORITY=4\nSYSLOG_IDENTIFIER=resctrlmon-oci-hook\n"
    fields += f"RESCTRLMON_STAGE={stage}\n"
    try:
        journal = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        journal.sendto(fields.encode(), _socket.MSG_DONTWAIT, run.journal)
    except OSError:
        pass  # no journal, or a full one: the container matters more than the line
    # None if the runtime closed it: descriptor 2 may be the socket by now.
    if run.strict and sys.stderr is not None:
        try:  # noqa: SIM105  (contextlib is an import)
            posix.write(2, f"resctrlmon-oci-hook: {text}\n".encode())
        except OSError:
            pass
    posix._exit(code)


def set_alarm(run: Run) -> None:
    """End the run with ``run.timeout``, wherever it is by then."""

    def ring(*_: object) -> None:
        give_up(run, f"gave up {run.step} after {run.timeout:g} s")

    _signal.signal(_signal.SIGALRM, ring)
    # Children inherit the mask; a runtime may have blocked everything.
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGALRM})
    # Again every 0.1 s: a signal that comes just before a system call begins to wait would not end the wait.
    _signal.setitimer(_signal.ITIMER_REAL, run.timeout, 0.1)


def main() -> None:
    """Run the hook and exit; never returns."""
    run = Run(sys.argv[1:])
    set_alarm(run)
    try:
        state = read_state()
        if run.mistake:
            raise HookError(f"wrong arguments: {run.mistake}")
        message = request(run.stage, state)
        run.step = "waiting for resctrlmond"
        call(run.socket, message)
    except HookError as error:
        give_up(run, str(error))
    except BaseException as error:
        give_up(run, f"failed {run.step}: {error}")
    # Not sys.exit(): tearing the interpreter down takes a fifth of the run.
    posix._exit(0)


if __name__ == "__main__":
    main()
