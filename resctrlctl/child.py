# SPDX-License-Identifier: Apache-2.0
"""A command that is held before it executes, so that it can be put in its group first."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from resctrlmond.resctrl import processes

# As env(1), nice(1) and timeout(1) have it.
OWN_FAILURE = 125
CANNOT_EXECUTE = 126
NOT_FOUND = 127
# A shell's status of what SIGKILL ended.
KILLED = 128 + signal.SIGKILL

# The terminal sends these to the whole foreground process group: the command has its own copy.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
# These come to this process alone and mean the command.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
# Python ignores them at its start; a command expects the default (subprocess does the same).
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its status as a shell has it (128 + n for signal n), and the seconds it took.

    ``user_s`` and ``system_s`` count the command and those of its descendants that were waited for (getrusage(2)).
    """

    status: int
    elapsed_s: float
    user_s: float
    system_s: float


class CannotExecute(Exception):
    """The kernel refused to execute the command; ``status`` is 127 if there is none of that name, else 126."""

    def __init__(self, command: str, number: int) -> None:
        super().__init__(f"cannot execute {command!r}: {os.strerror(number)}")
        self.status = NOT_FOUND if number == errno.ENOENT else CANNOT_EXECUTE


class HeldChild:
    """A child process that waits before it executes ``command``.

    It is made in the caller's process group and keeps its terminal, directory, environment and descriptors, apart
    from two pipes to its parent. This object owns their other ends, and a pidfd for as long as it is there. If the
    parent dies before ``let_go``, the child sees the pipe's end and exits. Only for a process without threads.
    Signals are dealt with for the parent's rest of life: those from the terminal are the child's, SIGTERM and
    SIGHUP are forwarded unless they were ignored.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        before = {number: signal.getsignal(number) for number in _FROM_TERMINAL}
        for number in before:
            # Before the fork: a Ctrl-C at any later moment ends the command, and never what cleans up after it.
            signal.signal(number, signal.SIG_IGN)
        gate_read, self._gate = os.pipe()
        self._refused, refused_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for number, handler in before.items():
                # An interactive Python would raise KeyboardInterrupt here; a shell's background job ignores it.
                signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else signal.SIG_DFL)
            os.close(self._gate)
            os.close(self._refused)
            _wait_and_execute(command, gate_read, refused_write)
        os.close(gate_read)
        os.close(refused_write)
        # Nobody but us reaps the child, so until we do the number is its own; the pidfd is so ever after.
        self._pidfd = os.pidfd_open(self.pid)
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        found = processes.stat(self.pid)
        self.start_time = found.start_time if found else 0

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the report is being written
            signal.pidfd_send_signal(self._pidfd, number)

    def let_go(self) -> float:
        """Let the child execute the command; the monotonic time (s) when it was told to.

        Returns once it did, or once it ended before (by a signal). Raises CannotExecute, with the child reaped.
        """
        begun = time.monotonic()
        try:
            os.write(self._gate, b"\0")
        except BrokenPipeError:
            pass  # a signal ended it already: wait() tells which
        finally:
            os.close(self._gate)
        # The kernel closes the other end when the command is executed: an end without a word is success.
        with os.fdopen(self._refused, "rb") as refused:
            word = refused.read()
        if word:
            self._reap()
            raise CannotExecute(self._command[0], int(word))
        return begun

    def wait(self, begun: float) -> Ended:
        """Wait for the command's end; ``begun`` is what ``let_go`` returned."""
        status, usage = self._reap()
        return Ended(status, time.monotonic() - begun, usage.ru_utime, usage.ru_stime)

    def kill(self) -> int:
        """End the child, which was not let go and has executed nothing; KILLED, or the status it had ended with."""
        # Before the gate is closed, at which the child would exit by itself.
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._gate)
        os.close(self._refused)
        return self._reap()[0]

    def _reap(self) -> tuple[int, resource.struct_rusage]:
        _, raw, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(raw)
        return (code if code >= 0 else 128 - code), usage


def _wait_and_execute(command: list[str], gate: int, refused: int) -> NoReturn:
    # In the child: whatever happens, this never returns into the parent's code.
    try:
        if os.read(gate, 1):
            for number in _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)  # noqa: S606 (no shell is the point)
    except OSError as error:
        os.write(refused, b"%d" % (error.errno or errno.ENOEXEC))
    finally:
        os._exit(OWN_FAILURE)
