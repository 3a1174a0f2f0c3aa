# SPDX-License-Identifier: Apache-2.0
"""Run systemctl(1) and systemd-analyze(1)."""

from __future__ import annotations

import os
import subprocess

# systemctl waits for the bus, which may hang, and at a reload for the READY=1 of the service.
TIMEOUT_S = 60


def run(*command: str, errors: str = "replace") -> subprocess.CompletedProcess[str]:
    """Run a program of systemd to its end, with its messages in English, and return its output as text.

    ``errors`` is the handler for output that is not UTF-8. Raises OSError, and subprocess.SubprocessError after
    TIMEOUT_S.
    """
    return subprocess.run(
        command,
        env=os.environ | {"LC_ALL": "C", "SYSTEMD_COLORS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors=errors,
        timeout=TIMEOUT_S,
        check=False,
    )
