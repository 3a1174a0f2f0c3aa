#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""The OCI hook: sends a container's state from stdin to resctrlmond and never stops the container from starting.

Usage: resctrlmon-oci-hook STAGE [--strict] [--socket PATH] [--timeout SECONDS] [--start-timeout SECONDS]
                           [--journal PATH]

STAGE is the OCI stage that the runtime runs the hook at (createRuntime, poststop, ...). Whatever goes wrong, the
hook writes one line to the journal and exits 0; with --strict it also writes to stderr and exits 1. It waits no
longer than --timeout (2 s) for stdin, and then as long for the daemon. While a daemon starts or stops, that time
does not run, and the hook waits no longer than --start-timeout (10 s) in all. If the daemon replies that the call
waits for those of other containers, the hook waits no longer than the reply allows, at most 60 s. If the time is up
before the message was sent, the hook sends it without waiting: the daemon assigns the container, late. A runtime
that may not reach the daemon (EACCES on its socket: rootless Podman) does not use resctrlmond: exit 0 without a
message, also with --strict.

Every start of a container waits for this file, so it imports only what the interpreter has built in: json
and socket would more than double its run. There is no "from __future__" here, as that is an import too.
"""

import _signal  # type: ignore[import-not-found]  # no stubs; "signal" would import enum
import _socket
import posix
import sys
import time

SOCKET = "/run/resctrlmond/org.resctrlmon.Manager"
JOURNAL = "/run/systemd/journal/socket"

# resctrlmond.service.start_lock.SUFFIX: a daemon that starts or stops holds a lock on the file of this name.
START_LOCK = ".starting"

# resctrlmond.service.message_ids.MessageId.UNMONITORED: the journal's catalogue explains it.
MESSAGE_ID = "47f76e48a28c4accae8c5c9183767327"

# The longest state, string in it, message to the daemon with its closing NUL, and answer. A pod has up to 256 KiB of
# annotations, and JSON has up to six bytes for one of them, such as "<". CRI-O includes all annotations once more, in
# one string.
MAX_STATE = 1 << 23
MAX_STRING = 1 << 15
MAX_MESSAGE = 1 << 21
MAX_REPLY = 1 << 16
_CHUNK = 1 << 16
# asm-generic/socket.h. Not in the module of Python 3.11.
_SO_SNDBUFFORCE = 32

# The longest time in seconds that the daemon can make the hook wait in its queue (HookTimeout).
MAX_QUEUE_TIMEOUT = 60.0

# Seconds between two looks at the clock and the lock, and in the queue, where hundreds of hooks would keep the daemon
# from its work.
_TICK = 0.1
_QUEUE_TICK = 0.5
# For how many ticks after its timeout the hook reads a state that is there.
_MORE_TICKS = 10
_READING = "reading the state"
_WAITING = "waiting for resctrlmond"

# JSON has no control character in a string; a state has at most those of its layout: tab, newline, return.
_CONTROL = bytes(range(9)) + b"\x0b\x0c" + bytes(range(14, 32))


class HookError(Exception):
    """Why the daemon did not take the container, in one sentence for the journal."""


class Run:
    """One run of the hook: its arguments, and its current step.

    ``mistake`` is the error in the arguments ("" if there is none). It is reported only after stdin was read: a
    runtime that finds the pipe closed may take that for a failure.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.stage = ""
        self.strict = "--strict" in arguments
        self.socket = SOCKET
        self.journal = JOURNAL
        self.timeout = 2.0
        self.start_timeout = 10.0
        self.queue_timeout = 0.0
        self.is_queued = False
        self.state = bytearray()
        self.more_ticks = _MORE_TICKS
        self.message = b""
        self.is_sent = False
        self.begin = self.counted = time.monotonic()
        self.mistake = ""
        self.step = _READING
        words = iter(arguments)
        for word in words:
            if word in ("--socket", "--journal", "--timeout", "--start-timeout"):
                self._set(word, next(words, ""))
            elif word != "--strict":
                # Letters need no escaping in the message. The daemon knows the stages.
                if self.stage or not (word.isascii() and word.isalpha()):
                    self.mistake = f"unknown argument {word!a}"
                self.stage = self.stage or word
        if not self.stage:
            self.mistake = "the stage is missing"

    def _set(self, option: str, value: str) -> None:
        if option.endswith("timeout"):
            try:
                seconds = float(value)
            except ValueError:
                seconds = -1.0
            # False for a NaN. With a --start-timeout of 0 a start is not waited for.
            if not 0 <= seconds <= 3600 or (option == "--timeout" and not seconds):
                self.mistake = f"{option} {value!a} is not a number of seconds"
            elif option == "--timeout":
                self.timeout = seconds
            else:
                self.start_timeout = seconds
        elif not value:
            self.mistake = f"{option} requires a path"
        elif option == "--socket":
            self.socket = value
        else:
            self.journal = value

    def begin_call(self, message: bytes) -> None:
        """Begin to wait for the daemon. The time counts anew: the daemon does not delay the reading of the state."""
        self.message = message
        self.begin = self.counted = time.monotonic()
        self.step = _WAITING

    def set_queue_timeout(self, seconds: float) -> None:
        """Set how long the hook may last because its call is queued."""
        self.queue_timeout = seconds
        # Once: the timer must not begin anew with each of endless replies.
        if not self.is_queued:
            _signal.setitimer(_signal.ITIMER_REAL, _QUEUE_TICK, _QUEUE_TICK)
        self.is_queued = True


def read_state(run: Run) -> None:
    """Read all of stdin. Bytes past the limit are read and dropped: a runtime may fail on a closed pipe."""
    while chunk := posix.read(0, _CHUNK):
        if len(run.state) <= MAX_STATE:
            run.state.extend(chunk)


def has_state(run: Run) -> bool:
    """Whether more of the state can be read without waiting. Not for ever: a stdin may never pause."""
    if run.step != _READING or len(run.state) > MAX_STATE or not run.more_ticks:
        return False
    run.more_ticks -= 1
    import select  # noqa: PLC0415  (only if the time is up)

    return bool(select.select([0], [], [], 0)[0])


def request(stage: str, state: bytes) -> bytes:
    """Return the varlink call ``org.resctrlmon.Hook.Run`` with the runtime's state as a JSON string.

    A string, not an inserted object: the state cannot end the string, and so can neither add nor replace a member of
    the message. Raises HookError if the state is empty, too long or not text.
    """
    if not state.strip():
        raise HookError("the runtime wrote no state to stdin")
    if len(state) > MAX_STATE:
        raise HookError(f"the state is longer than {MAX_STATE} bytes")
    if len(state) > MAX_STRING:
        state = shortened(state)
    if len(state.translate(None, _CONTROL)) != len(state):
        raise HookError("the state contains control characters")
    try:
        state.decode()
    except UnicodeDecodeError:
        raise HookError("the state is not UTF-8") from None
    string = state.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    string = string.replace(b"\n", b"\\n").replace(b"\r", b"\\r").replace(b"\t", b"\\t")
    # The daemon sees the end of a container by itself: its hook does not wait in the queue.
    more = b"" if stage == "poststop" else b'"more":true,'
    message = b'{"method":"org.resctrlmon.Hook.Run",%b"parameters":{"stage":"%b","state":"%b"}}\0'
    message %= (more, stage.encode(), string)
    if len(message) > MAX_MESSAGE:
        raise HookError(f"the message with the state is longer than {MAX_MESSAGE} bytes")
    return message


def shortened(state: bytes) -> bytes:
    """Return the state with "..." in the place of each string that is longer than MAX_STRING.

    resctrlmond uses no such text, and the annotations that the user of a pod writes must not keep its container from
    being counted.
    """
    import re  # noqa: PLC0415  (only for long states)

    # The quantifiers are possessive: otherwise, each escape would take memory.
    string = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
    return string.sub(lambda found: found[0] if len(found[0]) <= MAX_STRING + 2 else b'"..."', state)


def is_refusal(reply: bytes) -> bool:
    """Whether the reply is an error or not varlink, found without parsing it.

    This is right for the replies of resctrlmond: JSON without blanks, in which an ``error`` is a string and the first
    or the last member. Similar text elsewhere is deeper inside, or has its quotes escaped.
    """
    if not reply.startswith(b"{") or reply.startswith(b'{"error":"'):
        return True
    _, found, name = reply.rpartition(b',"error":"')
    return bool(found) and name.endswith(b'"}') and b'"' not in name[:-2]


def continues(reply: bytes) -> bool:
    """Whether another reply follows, which the last member shows. See ``is_refusal``."""
    return not is_refusal(reply) and reply.endswith(b'"continues":true}')


def queue_timeout(reply: bytes) -> float:
    """Return how long the hook may last (seconds) because its call is queued; 0 without that field."""
    digits = reply.partition(b'"queueTimeoutMs":')[2][:9]
    digits = digits[: len(digits) - len(digits.lstrip(b"0123456789"))]
    return min(int(digits or b"0") / 1000, MAX_QUEUE_TIMEOUT)


def text_of(reply: bytes, name: bytes) -> str:
    """Return the text of a member of the reply, "" if it has none, without parsing the rest.

    Within a string a quote is escaped, so a member's name between two quotes can be nowhere else.
    """
    found = reply.partition(b'"' + name + b'":"')[2]
    text, rest = "", found.decode("utf-8", "replace")
    while rest and rest[0] != '"':
        if rest[0] != "\\":
            text, rest = text + rest[0], rest[1:]
        elif rest[1:2] == "u":
            # A control character becomes a blank.
            text, rest = text + " ", rest[6:]
        else:
            text, rest = text + (rest[1:2] if rest[1:2] in ('"', "\\", "/") else " "), rest[2:]
    return text


def refusal(reply: bytes) -> str:
    """Return why resctrlmond refused and what to do; else the name of the error, or the beginning of the reply."""
    reply = reply[:4096]
    words = text_of(reply, b"message") or text_of(reply, b"error") or reply[:200].decode("utf-8", "replace")
    remedy = text_of(reply, b"remedy")
    return f"resctrlmond refused: {words}. {remedy}" if remedy else f"resctrlmond refused: {words}"


def connect(path: str) -> _socket.socket:
    """Connect to the daemon; exit if the caller may not. Raises HookError."""
    daemon = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    while True:
        # No settimeout(): with it, connect() to a full backlog fails at once (EAGAIN) and does not queue.
        try:
            daemon.connect(path)
        except PermissionError:
            posix._exit(0)
        except OSError as error:
            raise HookError(f"cannot connect to resctrlmond at {path}: {error.strerror or error}") from None
        try:
            daemon.getpeername()
            return daemon
        except OSError:
            # ENOTCONN: the timer's signal interrupted connect(), which Python then takes for a success (bpo-23618).
            pass


def hand_over(run: Run) -> None:
    """Send the message without waiting, if the daemon does not have it: it assigns the container, late.

    The message goes through a new connection, because the first one may have a part of it.
    """
    if run.step != _WAITING or run.is_sent:
        return
    try:
        daemon = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
        # The daemon may not read now, so the whole message must fit, with the kernel's own data.
        try:
            daemon.setsockopt(_socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2 * MAX_MESSAGE)
        except PermissionError:
            daemon.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, 2 * MAX_MESSAGE)
        daemon.connect(run.socket)
        daemon.send(run.message)
        daemon.close()
    except OSError:
        pass


def exchange(run: Run) -> bytes:
    """Send the message to the daemon and return its last reply, b"" if it closes the connection first."""
    run.is_sent = False
    daemon = connect(run.socket)
    reply = b""
    try:
        daemon.sendall(run.message)
        run.is_sent = True
        while True:
            first, end, rest = reply.partition(b"\0")
            if end and continues(first):
                run.set_queue_timeout(queue_timeout(first))
                reply = rest
            elif end or len(reply) > MAX_REPLY or not (chunk := daemon.recv(_CHUNK)):
                break
            else:
                reply += chunk
    except ConnectionError:
        pass
    return reply


def call(run: Run) -> None:
    """Send the message to the daemon and wait until it accepts it. Raises HookError, or OSError once connected."""
    # Again without a reply: a daemon that stops closes the connections whose call it has not begun, and the next
    # daemon accepts the second one. A repeated call changes nothing.
    reply = exchange(run) or exchange(run)
    reply, end, _ = reply.partition(b"\0")
    if len(reply) > MAX_REPLY:
        raise HookError(f"the reply of resctrlmond is longer than {MAX_REPLY} bytes")
    if not end:
        raise HookError("resctrlmond closed the connection without a reply")
    if is_refusal(reply):
        raise HookError(refusal(reply))


def give_up(run: Run, reason: str) -> None:
    """Write to the journal what went wrong and what follows, then exit: 0, or 1 if strict."""
    code = 1 if run.strict else 0
    # Nothing waits before the write to stderr.
    _signal.signal(_signal.SIGALRM, _signal.SIG_IGN)
    if run.stage == "poststop":
        outcome = "resctrlmond must detect the container's end by itself"
    elif run.strict:
        outcome = "the container does not start (--strict)"
    else:
        outcome = "the container starts anyway, and may be unmonitored"
    # A newline would begin another field of the journal's protocol.
    text = "".join(c if c.isprintable() else " " for c in f"{reason}; {outcome}")
    stage = "".join(c for c in run.stage if c.isprintable())
    fields = f"MESSAGE={text}\nMESSAGE_ID={MESSAGE_ID}\nPRIORITY=4\nSYSLOG_IDENTIFIER=resctrlmon-oci-hook\n"
    fields += f"RESCTRLMON_STAGE={stage}\n"
    try:
        journal = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        journal.sendto(fields.encode(), _socket.MSG_DONTWAIT, run.journal)
    except OSError:
        pass  # No journal, or a full one (EAGAIN): the container is more important than the message.
    # A stderr that is full and not read blocks.
    _signal.signal(_signal.SIGALRM, lambda *_: posix._exit(code))
    _signal.setitimer(_signal.ITIMER_REAL, 0.5, _TICK)
    # None if the runtime closed it: descriptor 2 may be the socket by now.
    if run.strict and sys.stderr is not None:
        try:  # noqa: SIM105  (contextlib is an import)
            posix.write(2, f"resctrlmon-oci-hook: {text}\n".encode())
        except OSError:
            pass
    posix._exit(code)


def is_starting(path: str) -> bool:
    """Whether a daemon that starts or stops holds the lock beside its socket."""
    try:
        file = posix.open(path + START_LOCK, posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC)
    except OSError:
        return False
    try:
        posix.lockf(file, posix.F_TEST, 0)
    except OSError as error:
        # EACCES or EAGAIN: another process holds it (lockf(3)).
        return isinstance(error, (PermissionError, BlockingIOError))
    finally:
        posix.close(file)
    return False


def set_alarm(run: Run) -> None:
    """End the run when its time is up, at whatever step."""
    # The daemon sees the end of a container by itself.
    start_timeout = 0.0 if run.stage == "poststop" else run.start_timeout

    def ring(*_: object) -> None:
        now = time.monotonic()
        timeout = max(run.timeout, run.queue_timeout)
        if run.step == _WAITING and now - run.begin < start_timeout and is_starting(run.socket):
            run.counted = now
        was_starting = run.counted > run.begin and now - run.begin >= max(start_timeout, timeout)
        # On a busy host, this process itself may not have run for so long.
        if (not was_starting and now - run.counted < timeout) or has_state(run):
            return
        hand_over(run)
        if was_starting:
            give_up(run, f"gave up {run.step} after {now - run.begin:.0f} s: it was starting or stopping")
        cause = ": the calls of other containers were before it" if run.queue_timeout else ""
        give_up(run, f"gave up {run.step} after {timeout:g} s{cause}")

    _signal.signal(_signal.SIGALRM, ring)
    # Children inherit the mask; a runtime may have blocked everything.
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGALRM})
    # Again and again: a signal that comes just before a system call begins to wait would not end the wait.
    _signal.setitimer(_signal.ITIMER_REAL, min(_TICK, run.timeout), _TICK)


def main() -> None:
    """Run the hook and exit; never returns."""
    run = Run(sys.argv[1:])
    set_alarm(run)
    try:
        read_state(run)
        if run.mistake:
            raise HookError(f"wrong arguments: {run.mistake}")
        run.begin_call(request(run.stage, bytes(run.state)))
        call(run)
    except HookError as error:
        give_up(run, str(error))
    except BaseException as error:
        give_up(run, f"failed {run.step}: {error}")
    # Not sys.exit(): tearing the interpreter down takes a fifth of the run.
    posix._exit(0)


if __name__ == "__main__":
    main()
