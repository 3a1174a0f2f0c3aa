# SPDX-License-Identifier: Apache-2.0
"""Real processes that start threads, fork, end and make system calls on the commands of a test.

One small process forks all of them, so that an actor costs a fork and not the start of an interpreter. Commands and
replies are JSON, one message each; an command names a thread of the actor, which runs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Self

Command = dict[str, Any]
Reply = Any
MOST_BYTES = 1 << 20
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWPID = 0x20000000


def outcome(action: Callable[[], object]) -> str:
    """Return ``OK``, or the name of the errno with which ``action`` failed."""
    try:
        action()
    except OSError as failure:
        return errno.errorcode[failure.errno or 0]
    return "OK"


def write(path: str, text: str, flags: int = os.O_WRONLY) -> None:
    """Write ``text`` with one write(2), which a file of resctrl takes as one command."""
    fd = os.open(path, flags)
    try:
        os.write(fd, text.encode(errors="surrogateescape"))
    finally:
        os.close(fd)


def read(path: str) -> str:
    """Read a whole file, with system calls only: Python's file objects are slow on an emulated processor."""
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    finally:
        os.close(fd)
    return b"".join(parts).decode(errors="surrogateescape")


def wait_until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until ``done``. Raises TimeoutError after ``seconds``."""
    # Not tests/wait.py: this file is also run as a program, which cannot import other files of the tests.
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done within {seconds} s")
        time.sleep(0.002)


# -- inside an actor


class _Worker:
    """A thread that runs commands, one after another."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Callable[[], Reply] | None] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.tid = self.thread.native_id or 0

    def _run(self) -> None:
        for command in iter(self.commands.get, None):
            self.replies.put(command())

    def run(self, command: Callable[[], Reply]) -> Reply:
        self.commands.put(command)
        return self.replies.get()

    def end(self) -> None:
        self.commands.put(None)
        self.thread.join()
        wait_until(lambda: not os.path.exists(f"/proc/self/task/{self.tid}"))


class _ActorProcess:
    """The process of one actor."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.workers: dict[int, _Worker] = {}
        self.held: dict[int, int] = {}

    def run(self) -> None:
        """Run commands until "exit", or until the test closes the link."""
        # The actor's number in /proc, which differs from its own in a PID namespace.
        self.link.send(os.readlink("/proc/self").encode())
        while message := self.link.recv(MOST_BYTES):
            command: Command = json.loads(message)
            verb = getattr(self, "do_" + command.pop("verb"))
            worker = self.workers.get(command.pop("thread", 0))
            action = partial(verb, **command)
            reply = worker.run(action) if worker else action()
            if isinstance(reply, socket.socket):
                # The new process replies over its own link.
                socket.send_fds(self.link, [b"0"], [reply.fileno()])
                reply.close()
            else:
                self.link.send(json.dumps(reply).encode())
        os._exit(0)

    def do_thread(self) -> int:
        worker = _Worker()
        self.workers[worker.tid] = worker
        return worker.tid

    def do_end_thread(self, tid: int) -> int:
        self.workers.pop(tid).end()
        return tid

    def do_fork(self) -> socket.socket:
        return fork_actor(self.link)

    def do_reap(self, pid: int) -> int:
        return os.waitpid(pid, 0)[1]

    def do_exec(self) -> None:
        """Execute another program, which sleeps until it is killed."""
        self.link.send(b"0")
        os.execv("/bin/sleep", ["sleep", "600"])

    def do_exit(self) -> None:
        self.link.send(b"0")
        os._exit(0)

    def do_work(self, ns: int) -> int:
        """Use CPU time in this thread. Return the total of the thread."""
        until = time.thread_time_ns() + ns
        while time.thread_time_ns() < until:
            pass
        return time.thread_time_ns()

    def do_become(self, uid: int, gid: int) -> None:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)

    def do_unshare(self) -> int:
        """Unshare the PID namespace of the processes that are forked from here on."""
        return int(ctypes.CDLL(None).unshare(CLONE_NEWPID))

    def do_read(self, path: str) -> str:
        return read(path)

    def do_be(self, real: int, effective: int, saved: int) -> None:
        os.setresuid(real, effective, saved)

    def do_write_as(self, path: str, text: str, call: str, uid: int) -> str:
        """Open a file with the current uid, and write with another one: ``call`` is seteuid or setfsuid."""
        fd, change = os.open(path, os.O_WRONLY), getattr(ctypes.CDLL(None), call)
        change(uid)
        try:
            return outcome(lambda: os.write(fd, text.encode()))
        finally:
            change(0)
            os.close(fd)

    def do_write(self, path: str, text: str) -> str:
        return outcome(lambda: write(path, text))

    def do_open(self, path: str, flags: int) -> str:
        return outcome(lambda: os.close(os.open(path, flags)))

    def do_mkdir(self, path: str) -> str:
        return outcome(lambda: os.mkdir(path))

    def do_rmdir(self, path: str) -> str:
        return outcome(lambda: os.rmdir(path))

    def do_chmod(self, path: str, mode: int) -> str:
        return outcome(lambda: os.chmod(path, mode))

    def do_utime(self, path: str, ns: int) -> str:
        return outcome(lambda: os.utime(path, ns=(ns, ns)))


def fork_actor(*inherited: socket.socket) -> socket.socket:
    """Fork a new actor from the calling thread. Return its link, on which it first sends its pid."""
    own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for link in (*inherited, own_end):
                link.close()
            _ActorProcess(child_end).run()
        os._exit(1)
    child_end.close()
    return own_end


def _serve(link: socket.socket) -> None:
    """Fork the actors, and ignore SIGCHLD to reap them and their orphans."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while link.recv(1):
        made = fork_actor(link)
        socket.send_fds(link, [b"0"], [made.fileno()])
        made.close()


# -- in the process of the tests


class Actor:
    """The handle of one actor; ``pid`` is its process, which is also its first thread."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.pid: int = json.loads(link.recv(MOST_BYTES))
        self._children: list[Actor] = []

    def call(self, verb: str, thread: int = 0, **details: object) -> Reply:
        """Run a command in a thread (0: the first one), and return its reply."""
        self._link.send(json.dumps({"verb": verb, "thread": thread, **details}).encode())
        return json.loads(self._link.recv(MOST_BYTES))

    def thread(self) -> int:
        """Start a thread and return its number."""
        made: int = self.call("thread")
        return made

    def fork(self, thread: int = 0) -> Actor:
        """Fork a child process from that thread."""
        self._link.send(json.dumps({"verb": "fork", "thread": thread}).encode())
        child = Actor(_received(self._link))
        self._children.append(child)
        return child

    def exit(self) -> None:
        """End the process; it is a zombie until its parent reaps it."""
        self.call("exit")
        wait_until(lambda: state(self.pid) in ("Z", ""))

    def exec(self) -> None:
        """Execute another program, which accepts no commands; ``close`` ends it."""
        self.call("exec")
        wait_until(lambda: os.readlink(f"/proc/{self.pid}/exe").endswith(("sleep", "busybox", "coreutils")))

    def close(self) -> None:
        """End the process and its children, and wait for their ends."""
        for child in self._children:
            child.close()
        if self._link.fileno() != -1:
            self._link.close()
            if state(self.pid) not in ("Z", ""):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                wait_until(lambda: state(self.pid) in ("Z", ""))


def _received(link: socket.socket) -> socket.socket:
    _, fds, _, _ = socket.recv_fds(link, 1, 1)
    return socket.socket(fileno=fds[0])


def state(pid: int) -> str:
    """Return the letter of proc_pid_stat(5), "Z" for a zombie; "" if there is no such process."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class ActorPool:
    """Starts actors; a context manager that ends all of them."""

    def __init__(self) -> None:
        self._link, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-W", "ignore", "-S", os.path.abspath(__file__), str(child_end.fileno())]
        self._server = subprocess.Popen(command, pass_fds=[child_end.fileno()], start_new_session=True)
        child_end.close()
        self._actors: list[Actor] = []

    def actor(self) -> Actor:
        """Start a new actor, a child of a process that is in no group."""
        self._link.send(b"0")
        self._actors.append(Actor(_received(self._link)))
        return self._actors[-1]

    def end_all(self) -> None:
        """End all actors."""
        while self._actors:
            self._actors.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()
        self._link.close()
        self._server.wait()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
