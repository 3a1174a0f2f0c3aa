# SPDX-License-Identifier: Apache-2.0
"""The forms of the OCI hook: the Python file, and the compiled program, also with sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from resctrlmond import oci_hook

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "hook" / "oci_hook.c"
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
PYTHON_FORM = Path(oci_hook.__file__)
# The build of a package tests the program that it ships, with the compiler's options of the distribution.
SHIPPED = os.environ.get("RESCTRLMOND_OCI_HOOK", "")
COMPILED = ["compiled"] if SHIPPED else ["compiled", "sanitized"]
FORMS = ["python", *COMPILED]


def make(name: str) -> Path:
    """Compile a form of the hook with the Makefile. Raises CalledProcessError with the compiler's messages shown."""
    if SHIPPED:
        return Path(SHIPPED)
    program = ROOT / "build" / f"resctrlmon-oci-hook{'-sanitized' if name == 'sanitized' else ''}"
    command = ["make", "-s", "-C", str(ROOT), str(program.relative_to(ROOT))]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return program


def file_of(form: str) -> Path:
    """Return the file of a form, compiled if necessary."""
    return PYTHON_FORM if form == "python" else make(form)


def command_of(form: str, file: str | Path) -> list[str]:
    """Return the command that runs a form, or a copy of it."""
    return [PYTHON, "-IS", str(file)] if form == "python" else [str(file)]
