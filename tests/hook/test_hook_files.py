# SPDX-License-Identifier: Apache-2.0
"""The files that tell Podman and CRI-O of the hook (oci-hooks(5))."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resctrlmond.oci_hook import Run

DIRECTORY = Path(__file__).parents[2] / "systemd"


@pytest.mark.parametrize("stage", ["createRuntime", "poststop"])
def test_a_hook_file_runs_the_hook_at_its_stage(stage: str) -> None:
    file = json.loads((DIRECTORY / f"resctrlmon-{stage}.json").read_text())
    hook = file["hook"]
    assert file == {"version": "1.0.0", "hook": hook, "when": {"always": True}, "stages": [stage]}
    assert hook["path"] == "/usr/libexec/resctrlmon-oci-hook"
    # args[0] is the program's name, as in execve(2).
    run = Run(hook["args"][1:])
    assert (run.stage, run.strict, run.mistake) == (stage, False, "")
    # Whole seconds, and more than the hook's own bound, which lets the container start; this one does not.
    assert isinstance(hook["timeout"], int)
    assert hook["timeout"] > run.timeout
