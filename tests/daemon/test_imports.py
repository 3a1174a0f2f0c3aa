# SPDX-License-Identifier: Apache-2.0
"""The daemon imports only what it needs: imports are most of its start, and a third of its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
# Modules of which each takes at least 0.2 MiB or a millisecond.
HEAVY = {"difflib", "importlib.resources", "secrets", "tempfile", "yaml"}
START = """
import sys
from resctrlmond.configuration import config
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


@pytest.mark.parametrize(
    ("module", "library", "package", "extra"),
    [
        ("exporter", "prometheus_client", "python3-prometheus-client", "exporter"),
        ("nri", "google", "python3-protobuf", "nri"),
    ],
)
def test_command_without_its_library_names_the_package(module: str, library: str, package: str, extra: str) -> None:
    """As after 'pip install resctrlmond', which installs all commands, and the libraries of no extra."""
    start = f"from resctrlmond.{module}.__main__ import main; sys.exit(main())"
    script = f"import sys; sys.modules[{library!r}] = None; {start}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"Debian package {package}" in done.stderr
    assert f"pip install 'resctrlmond[{extra}]'" in done.stderr


def test_import_that_fails_for_another_reason_is_not_hidden() -> None:
    script = "import sys; sys.modules['yaml'] = None; from resctrlmond.nri.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "python3-protobuf" in done.stderr) == (1, False)
    assert "import of yaml halted" in done.stderr
