# SPDX-License-Identifier: Apache-2.0
"""The crun of Debian's unstable suite, which runs in a guest of the stable one with two libraries of its own.

crun has monitoring groups of its own (``linux.intelRdt.enableMonitoring``) from 1.28 on.
"""

from __future__ import annotations

import os
from pathlib import Path

from . import cache
from .debian import UNSTABLE
from .sources import mirror
from .tools import tool

LIBRARIES = "usr/lib/x86_64-linux-gnu"


def crun() -> Path:
    """Return a folder with ``usr/bin/crun`` and the ``LIBRARIES`` that a guest does not have."""
    return cache.artifact("crun", cache.key(Path(__file__)), _build)


def _build(place: Path) -> None:
    cache.progress(f"fetching crun of Debian {UNSTABLE}")
    archive = place / "crun.tar"
    tool(
        [
            "mmdebstrap",
            "--mode=root" if os.geteuid() == 0 else "--mode=unshare",
            "--variant=extract",
            "--format=tar",
            "--include=crun",
            UNSTABLE,
            archive,
            mirror().line(UNSTABLE),
        ]
    )
    names = ["./usr/bin/crun", *(f"./{LIBRARIES}/{name}.so.*" for name in ("libblake3", "libjson-c"))]
    tool(["tar", "-C", place, "--wildcards", "-xf", archive, *names])
    archive.unlink()
