# SPDX-License-Identifier: Apache-2.0
"""The files that configure the hook for Podman and CRI-O (oci-hooks(5))."""

from __future__ import annotations

import json
from pathlib import Path

from resctrlmond.oci_hook import Run

DIRECTORY = Path(__file__).parents[2] / "systemd"


def test_the_hook_file_runs_the_hook_before_the_program_of_a_container() -> None:
    [path] = DIRECTORY.glob("*.json")
    file = json.loads(path.read_text())
    hook = file["hook"]
    assert file == {"version": "1.0.0", "hook": hook, "when": {"always": True}, "stages": ["createRuntime"]}
    assert hook["path"] == "/usr/libexec/resctrlmon-oci-hook"
    # args[0] is the program's name, as in execve(2).
    run = Run(hook["args"][1:])
    assert (run.stage, run.strict, run.mistake) == ("createRuntime", False, "")
    # The runtime's limit counts from fork(2), and crun(1), runc(8) and podman(1) fail the container when it passes. A
    # host may be too busy to schedule the hook for longer than any limit; the hook ends itself instead.
    assert "timeout" not in hook
    assert 0 < run.timeout <= 5
