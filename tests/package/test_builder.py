# SPDX-License-Identifier: Apache-2.0
"""The Debian roots that the packages are built in leave the host as it was."""

from __future__ import annotations

import io
import os
import signal
import tarfile
from pathlib import Path

import pytest

from . import builder

# A first run fetches a Debian.
pytestmark = pytest.mark.timeout(1800)
BUSY = "mkdir out; (cd /sys; exec sleep 1000 >/dev/null 2>&1) & echo $! >out/pid"


def test_root_with_a_process_that_still_runs_is_unmounted_and_not_emptied(tmp_path: Path) -> None:
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    archive = builder.root("trixie", ["make"])
    # Only root runs it with the namespaces of the host. Otherwise the process ends with its namespace.
    is_root = os.geteuid() == 0
    builder.run(tmp_path, empty.getvalue(), BUSY, archive=archive, is_root=True, is_apart=not is_root)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    if is_root:
        os.kill(int((tmp_path / "out" / "pid").read_text()), signal.SIGKILL)
