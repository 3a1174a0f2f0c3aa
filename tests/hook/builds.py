# SPDX-License-Identifier: Apache-2.0
"""The builds of the OCI hook that the tests run: as it is installed, and with sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "hook" / "oci_hook.c"
# The build of a package tests the program that it ships, with the compiler's options of the distribution.
SHIPPED = os.environ.get("RESCTRLMOND_OCI_HOOK", "")
BUILDS = ["plain"] if SHIPPED else ["plain", "sanitized"]


def compile_hook(build: str = "plain") -> Path:
    """Compile the hook with the Makefile, and return the program.

    Raises CalledProcessError with the compiler's messages shown.
    """
    if SHIPPED:
        return Path(SHIPPED)
    program = ROOT / "build" / f"resctrlmon-oci-hook{'-sanitized' if build == 'sanitized' else ''}"
    command = ["make", "-s", "-C", str(ROOT), str(program.relative_to(ROOT))]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return program
