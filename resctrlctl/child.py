# SPDX-License-Identifier: Apache-2.0
"""A command that is held before it executes, so that it can be put in its group first."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from resctrlmond.resctrl import processes

# As env(1), nice(1) and timeout(1) have it.
OWN_FAILURE = 125
CANNOT_EXECUTE = 126
NOT_FOUND = 127
# A shell's status of what SIGKILL ended.
KILLED = 128 + signal.SIGKILL

# The terminal sends these to the whole foreground process group: the command has its own copy.
_FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT})
# These ask resctrlctl itself to end, once its command has ended.
_INTERRUPTS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})
# So many of them after the command's end, whatever the process is doing, end it.
_MOST_INTERRUPTS = 3
# Not forwarded: what reports a fault or a limit of this process, what stops and continues it, and what does nothing
# by default. Every other signal ends a process that does not handle it, and is meant for the command.
_OWN = frozenset(
    {
        signal.SIGKILL,
        signal.SIGSTOP,
        *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP),
        *(signal.SIGPIPE, signal.SIGXCPU, signal.SIGXFSZ),
        *(signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
        *(signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH),
    }
)
# The si_code of a signal that the kernel sends, such as for a key of the terminal (SI_KERNEL of sigaction(2)).
_SI_KERNEL = 0x80
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
    From then on signals do not end the parent: they are forwarded to the child, unless they were ignored, or came to
    the child as well from the terminal, or from the child (as sudo(8) does). SIGINT, SIGTERM and SIGQUIT that come
    after the child's end call ``interrupted``, in a thread of its own; the third one ends the parent.
    """

    def __init__(self, command: list[str], interrupted: Callable[[], None] = lambda: None) -> None:
        self._command = command
        self._interrupted = interrupted
        self._status: int | None = None
        forwarded = {
            number
            for number in signal.valid_signals() - _OWN
            if signal.getsignal(number) not in (signal.SIG_IGN, None)
        }
        # Before the fork, so that no signal at any later moment ends what has to release the group.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
        gate_read, self._gate = os.pipe()
        self._refused, refused_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for number in forwarded & _FROM_TERMINAL:
                signal.signal(number, signal.SIG_DFL)  # Python would raise KeyboardInterrupt
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(self._gate)
            os.close(self._refused)
            _wait_and_execute(command, gate_read, refused_write)
        os.close(gate_read)
        os.close(refused_write)
        # Nobody but us reaps the child, so until we do the number is its own; the pidfd is so ever after.
        self.pidfd = os.pidfd_open(self.pid)
        threading.Thread(target=self._forward, args=(forwarded - before,), name="signals", daemon=True).start()
        found = processes.stat(self.pid)
        self.start_time = found.start_time if found else 0

    def _forward(self, numbers: Iterable[int]) -> NoReturn:
        interrupts = 0
        while True:
            info = signal.sigwaitinfo(numbers)
            if info.si_pid == self.pid:
                continue
            if info.si_signo in _INTERRUPTS and (status := self._ended_with()) is not None:
                interrupts += 1
                if interrupts == _MOST_INTERRUPTS:
                    os._exit(status)
                self._interrupted()
                continue
            if info.si_signo in _FROM_TERMINAL and info.si_code == _SI_KERNEL:
                continue
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the report is being written
                signal.pidfd_send_signal(self.pidfd, info.si_signo)

    def let_go(self) -> float:
        """Let the child execute the command; return the monotonic time (s) before that.

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
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self._gate)
        os.close(self._refused)
        return self._reap()[0]

    def _reap(self) -> tuple[int, resource.struct_rusage]:
        # Kept before the child is reaped, because nobody can ask the kernel for it afterwards.
        status = self._status = _status_of(os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT))
        _, _, usage = os.wait4(self.pid, 0)
        return status, usage

    def _ended_with(self) -> int | None:
        """The status that the child ended with; None while it lives."""
        if self._status is not None:
            return self._status
        try:
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return self._status  # reaped meanwhile
        return None if found is None else _status_of(found)


def _status_of(ended: os.waitid_result | None) -> int:
    """The status as a shell has it."""
    assert ended is not None  # only with WNOHANG
    return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status


def _wait_and_execute(command: list[str], gate: int, refused: int) -> NoReturn:
    # In the child: whatever happens, this never returns into the parent's code.
    try:
        if os.read(gate, 1):
            for number in _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)  # noqa: S606 (no shell is the point)
    except OSError as error:
        os.write(refused, b"%d" % (error.errno or errno.ENOEXEC))
    except ValueError:
        # Python refuses an empty name itself; execve(2) has ENOENT for it.
        os.write(refused, b"%d" % errno.ENOENT)
    finally:
        os._exit(OWN_FAILURE)
