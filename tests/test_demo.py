# SPDX-License-Identifier: Apache-2.0
"""``make demo``, the first command of README.md, runs to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.hook.builds import compile_hook

DEMO = Path(__file__).parent / "demo"


def test_the_demo_measures_two_commands_and_a_container_and_leaves_no_group() -> None:
    compile_hook()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([str(DEMO)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "Traceback" not in output
    assert output.count("core energy") == 2, "each command has its report"
    last = done.stdout.partition("/resctrl/mon_groups\n")[2]
    assert last.strip() == "# Done: daemon stopped, simulation unmounted", "a group is still there"
