# SPDX-License-Identifier: Apache-2.0
"""Run the host's tools. Their output is shown only if they fail, and an interruption ends them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import BuildError

# On Debian, the folders of mke2fs and depmod are not in a user's PATH.
ENVIRONMENT = {
    **os.environ,
    "PATH": os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin",
    "LC_ALL": "C.UTF-8",
}


def tool(argv: Sequence[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its standard output. Raises BuildError with the end of both outputs if it fails."""
    command = [str(word) for word in argv]
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**ENVIRONMENT, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    with process:
        try:
            stdout, stderr = process.communicate()
        except BaseException:
            process.terminate()  # not SIGKILL: mmdebstrap removes its temporary root on SIGTERM
            process.wait(30)
            raise
    if process.returncode != 0:
        words = " ".join(command)
        raise BuildError(f"status {process.returncode}: {words[:400]}\n{stdout[-2000:]}{stderr[-4000:]}")
    return stdout
