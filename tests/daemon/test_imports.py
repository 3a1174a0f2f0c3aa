# SPDX-License-Identifier: Apache-2.0
"""The daemon imports only what it needs: imports are most of its start, and a third of its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
# Modules of which each takes at least 0.2 MiB or a millisecond.
HEAVY = {"difflib", "importlib.resources", "secrets", "tempfile", "yaml"}
START = """
import sys
from resctrlmond import config
from resctrlmond.daemon import command
config.load(sys.argv[1])
print(*sys.modules)
"""


def test_daemon_with_the_sample_file_imports_no_heavy_module() -> None:
    # Without the module site, because the .pth files of an environment for development import modules too.
    packages = str(Path(msgspec.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-S", "-c", START, str(ROOT / "systemd" / "resctrlmond.yaml")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), packages])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    modules = set(done.stdout.split())
    assert "resctrlmond.daemon.daemon" in modules
    assert sorted(modules & HEAVY) == []
