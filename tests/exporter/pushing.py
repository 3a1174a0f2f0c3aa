# SPDX-License-Identifier: Apache-2.0
"""The exporter as a process that pushes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_WAIT_S = 60.0
INTERVAL_S = 0.1


class PushProcess:
    """An exporter that pushes to ``url``, and reads from the daemon at ``manager_socket``."""

    def __init__(self, top: Path, manager_socket: str, url: str, *options: str, **environment: str) -> None:
        self.log = top / "push.log"
        fixed = ("--manager-socket", manager_socket, "--timeout", "60", "--interval", str(INTERVAL_S))
        self._command = [sys.executable, "-m", "resctrlmond.exporter", *fixed, "--otlp", url, *options]
        without = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
        self._environment = {**without, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and do not wait for its first push."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self._command, env=self._environment, stderr=output)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stop it with SIGTERM, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_WAIT_S)

    def close(self) -> None:
        """End it, and show what it logged."""
        print(self.log.read_text())
        if self._process is not None and self._process.poll() is None:
            self.kill()
