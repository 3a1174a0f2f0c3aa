# SPDX-License-Identifier: Apache-2.0
"""A real process that runs commands, one on each line, and replies to each with one line."""

from __future__ import annotations

import os
import subprocess
import sys


class Commanded:
    """A Python process of its own session, running ``program``; its children die with it."""

    def __init__(self, program: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def do(self, command: str) -> str:
        """The answer to one command."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """As ``kill``."""
        self.kill()

    def kill(self) -> None:
        """End it and let nothing of it stay; again for one that is ended does nothing."""
        if self._process.returncode is None:
            os.killpg(self.pid, 9)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe
                pipe.close()
