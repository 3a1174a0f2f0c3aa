# SPDX-License-Identifier: Apache-2.0
"""Start a command in a child process that waits before it executes, so that it can be assigned to a group first."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

import msgspec

from resctrlctl.base.errors import OWN_FAILURE
from resctrlmond.resctrl import processes

# The exit statuses of env(1), nice(1) and timeout(1), beside OWN_FAILURE.
CANNOT_EXECUTE = 126
NOT_FOUND = 127
# The status that a shell reports for a process that SIGKILL ended.
KILLED = 128 + signal.SIGKILL

# The terminal sends these to the whole foreground process group, so the command gets them without resctrlctl.
_FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT})
# After the command has ended, these ask resctrlctl itself to end.
_INTERRUPTS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})
# This many interrupts after the end of the command end resctrlctl in any state.
_MAX_INTERRUPTS = 3
# Not forwarded: signals that report a fault or a limit of this process, that stop and continue it, or that have no
# effect by default. Every other signal ends a process that does not handle it, and is meant for the command.
_NOT_FORWARDED = frozenset(
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
# Python ignores these at its start. A command expects the default (the module subprocess restores it too).
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class CommandResult(msgspec.Struct, frozen=True):
    """The exit status of a command as a shell reports it (128 + n for signal n), and its times in seconds.

    ``user_s`` and ``system_s`` include the descendants that were waited for (getrusage(2)).
    """

    status: int
    elapsed_s: float
    user_s: float
    system_s: float


class CannotExecute(Exception):
    """The kernel refused to execute the command. ``status`` is 127 if the command is not found, else 126."""

    def __init__(self, command: str, number: int) -> None:
        super().__init__(f"cannot execute {command!r}: {os.strerror(number)}")
        self.status = NOT_FOUND if number == errno.ENOENT else CANNOT_EXECUTE


class HeldChild:
    """A child process that waits before it executes ``command``.

    The child is in the caller's process group and keeps its terminal, directory, environment and descriptors. Two
    pipes connect it to its parent: one starts it, the other returns the errno of execve(2). This object owns the
    parent's ends of them and a pidfd of the child. If the parent ends before ``execute``, the child reads the end of
    the first pipe and exits. The process must have no threads.

    From the start of the child, signals do not end the parent. They are forwarded to the child, unless they are
    ignored, or the terminal sent them to the child as well, or the child sent them (as sudo(8) does). SIGINT,
    SIGTERM and SIGQUIT that arrive after the end of the child call ``interrupted`` in a separate thread; the third
    one ends the parent.
    """

    def __init__(self, command: list[str], interrupted: Callable[[], None] = lambda: None) -> None:
        self._command = command
        self._interrupted = interrupted
        self._status: int | None = None
        forwarded = {
            number
            for number in signal.valid_signals() - _NOT_FORWARDED
            if signal.getsignal(number) not in (signal.SIG_IGN, None)
        }
        # Blocked before the fork, so that no later signal ends the process that must release the group.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
        start_read, self._start_pipe = os.pipe()
        self._error_pipe, error_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for number in forwarded & _FROM_TERMINAL:
                signal.signal(number, signal.SIG_DFL)  # Python would raise KeyboardInterrupt
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(self._start_pipe)
            os.close(self._error_pipe)
            _wait_and_execute(command, start_read, error_write)
        os.close(start_read)
        os.close(error_write)
        # Only this process reaps the child, so the pid cannot be reused yet. The pidfd stays valid after that.
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
            if info.si_signo in _INTERRUPTS and (status := self._exit_status()) is not None:
                interrupts += 1
                if interrupts == _MAX_INTERRUPTS:
                    os._exit(status)
                self._interrupted()
                continue
            if info.si_signo in _FROM_TERMINAL and info.si_code == _SI_KERNEL:
                continue
            with contextlib.suppress(ProcessLookupError):  # the child has ended, and the report is being written
                signal.pidfd_send_signal(self.pidfd, info.si_signo)

    def execute(self) -> float:
        """Let the child execute the command; return the monotonic time (s) before that.

        Returns when the command executes, or when a signal has ended the child before. Raises CannotExecute, with the
        child reaped.
        """
        begun = time.monotonic()
        try:
            os.write(self._start_pipe, b"\0")
        except BrokenPipeError:
            pass  # a signal has ended the child already: wait() returns its status
        finally:
            os.close(self._start_pipe)
        # execve(2) closes the other end of the pipe: an end of file without an errno means success.
        with os.fdopen(self._error_pipe, "rb") as pipe:
            number = pipe.read()
        if number:
            self._reap()
            raise CannotExecute(self._command[0], int(number))
        return begun

    def wait(self, begun: float) -> CommandResult:
        """Wait for the end of the command; ``begun`` is the time that ``execute`` returned."""
        status, usage = self._reap()
        return CommandResult(status, time.monotonic() - begun, usage.ru_utime, usage.ru_stime)

    def kill(self) -> int:
        """End the child before it executes the command; return KILLED, or the status with which it had ended."""
        # Before the pipe is closed, because the child exits by itself when it is.
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self._start_pipe)
        os.close(self._error_pipe)
        return self._reap()[0]

    def _reap(self) -> tuple[int, resource.struct_rusage]:
        # Read the status before wait4(), because the kernel forgets it then, and _forward() needs it.
        status = self._status = _shell_status(os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT))
        _, _, usage = os.wait4(self.pid, 0)
        return status, usage

    def _exit_status(self) -> int | None:
        """Return the status with which the child ended; None while it lives."""
        if self._status is not None:
            return self._status
        try:
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return self._status  # the main thread has reaped the child since the check above
        return None if found is None else _shell_status(found)


def _shell_status(ended: os.waitid_result | None) -> int:
    """Return the status as a shell reports it."""
    assert ended is not None  # None is possible only with WNOHANG
    return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status


def _wait_and_execute(command: list[str], start_pipe: int, error_pipe: int) -> NoReturn:
    # Runs in the child. It must never return into the parent's code.
    try:
        if os.read(start_pipe, 1):
            for number in _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)  # noqa: S606 (the command must run without a shell)
    except OSError as error:
        os.write(error_pipe, b"%d" % (error.errno or errno.ENOEXEC))
    except ValueError:
        # Python refuses an empty name itself; execve(2) returns ENOENT for it.
        os.write(error_pipe, b"%d" % errno.ENOENT)
    finally:
        os._exit(OWN_FAILURE)
