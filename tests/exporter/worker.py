# SPDX-License-Identifier: Apache-2.0
"""A process that uses CPU time in two parts, and sleeps before and after each of them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.wait import wait_until

_SCRIPT = "echo; for part in 1 2; do read go; i=0; while [ $i -lt 10000 ]; do i=$((i+1)); done; echo; done; read go"


class Worker:
    """A process of one task. ``used_ns`` is the CPU time that the kernel has counted of it when it slept or ended."""

    def __init__(self) -> None:
        self._born = time.monotonic()
        self._process = subprocess.Popen(["sh", "-c", _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        self.lived_s = 0.0
        self._wait()

    def work(self) -> None:
        """Let it use CPU time until it sleeps again."""
        assert self._process.stdin
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        self._wait()

    def end(self) -> None:
        """Let it end, and wait for that."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.lived_s = time.monotonic() - self._born
        # A zombie still has its count.
        self.used_ns = self._read_used_ns()
        self._process.stdout.close()
        self._process.wait()

    def _wait(self) -> None:
        assert self._process.stdout
        assert self._process.stdout.readline()
        # The count of a task that runs is out of date until the next tick of the scheduler.
        wait_until(lambda: self._read_state() == "S", interval_s=0.001)
        self.used_ns = self._read_used_ns()

    def _read_state(self) -> str:
        """Return the state of the process (proc_pid_stat(5))."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def _read_used_ns(self) -> int:
        """Return the CPU time of the process (proc_pid_schedstat(5))."""
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0])
