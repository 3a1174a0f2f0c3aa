# SPDX-License-Identifier: Apache-2.0
"""Run idle real processes, which represent the virtual tasks of the simulation in /proc and in control groups."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from resctrlmond.resctrl.mounts import mounts

# Forks what waits to be killed: with so many more threads, after joining a control group. A fork of something small
# is ten times as fast as a start.
_ZYGOTE = """
import ctypes, os, signal, sys, threading
prctl, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    threads, _, cgroup = line.rstrip("\\n").partition(" ")
    if os.fork():
        continue
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(0)
    if cgroup:
        with open(cgroup + "/cgroup.procs", "w") as procs:
            procs.write("0")
    started = []
    for _ in range(int(threads)):
        started.append(threading.Thread(target=threading.Event().wait, daemon=True))
        started[-1].start()
    os.write(1, (" ".join(map(str, [os.getpid(), *(one.native_id for one in started)])) + "\\n").encode())
    while True:
        signal.pause()
"""


class Crew:
    """Starts and ends processes, and control groups for them; a context manager that removes all of them."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2" and mount.root == "/")
        self.cgroup = os.path.join(top, f"resctrlmond-truth-{os.getpid()}")

    def __enter__(self) -> Self:
        os.mkdir(self.cgroup)
        self._zygote = subprocess.Popen(
            [sys.executable, "-IS", "-c", _ZYGOTE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._zygote.pid, signal.SIGKILL)
        self._zygote.wait()
        for pipe in (self._zygote.stdin, self._zygote.stdout):
            assert pipe
            pipe.close()
        for pid in list(self._pidfds):
            self.end(pid)
        for name in os.listdir(self.cgroup):
            if os.path.isdir(os.path.join(self.cgroup, name)):
                remove_cgroup(os.path.join(self.cgroup, name))
        remove_cgroup(self.cgroup)

    def start(self, threads: int = 0, cgroup: str = "") -> list[int]:
        """Start a process in the control group. Return its pid and the ids of its further threads."""
        assert self._zygote.stdin
        assert self._zygote.stdout
        self._zygote.stdin.write(f"{threads} {cgroup}\n")
        self._zygote.stdin.flush()
        tids = [int(word) for word in self._zygote.stdout.readline().split()]
        self._pidfds[tids[0]] = os.pidfd_open(tids[0])
        return tids

    def make_cgroup(self, name: str) -> str:
        """Create an empty control group."""
        path = os.path.join(self.cgroup, name)
        os.mkdir(path)
        return path

    def end(self, pid: int) -> None:
        """End a process, and wait for its end."""
        pidfd = self._pidfds.pop(pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os.close(pidfd)


def remove_cgroup(path: str) -> None:
    """Remove a control group whose processes are exiting."""
    deadline = time.monotonic() + 60
    while Path(path, "cgroup.events").exists():
        try:
            os.rmdir(path)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
