# SPDX-License-Identifier: Apache-2.0
"""The folder of what is built once: outside the source tree, each thing by one build at a time, whole or absent."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

KEEP_UNUSED_SECONDS = 2 * 24 * 3600


def folder() -> Path:
    """$RESCTRLMOND_CACHE, or resctrlmond below the user's XDG cache folder; made if it is not there."""
    if own := os.environ.get("RESCTRLMOND_CACHE"):
        path = Path(own).absolute()
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "resctrlmond"
    path.mkdir(parents=True, exist_ok=True)
    return path


def key(*parts: str | bytes | Path) -> str:
    """A short hash of all that goes into a build; of a path, the file's content counts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()[:16]


def artifact(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The finished folder <name>-<key>; made by *build*, which fills an empty folder, if it is not there.

    The folder appears by rename(2) when the build is done, so that an interrupted one is never taken for a
    whole one. A second run waits for the first one's build of *name* instead of building too.
    """
    place = folder() / f"{name}-{key}"
    if not place.is_dir():
        with _lock(name):
            if not place.is_dir():
                _build(place, name, build)
    os.utime(place)
    return place


def progress(text: str) -> None:
    """Print what takes the time, for the user."""
    print(f"test machine: {text}", file=sys.stderr, flush=True)


def _build(place: Path, name: str, build: Callable[[Path], None]) -> None:
    _sweep(name)
    scratch = Path(tempfile.mkdtemp(prefix=f".building-{name}=", dir=place.parent))
    begun = time.monotonic()
    try:
        build(scratch)
        scratch.chmod(0o755)
        scratch.rename(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"{name} is ready ({time.monotonic() - begun:.0f} s)")


def _sweep(name: str) -> None:
    """Remove what killed builds left behind and what other recipes made and nobody used for two days."""
    for leftover in folder().glob(f".building-{name}=*"):  # ours is the only build of it: the lock is held
        shutil.rmtree(leftover, ignore_errors=True)
    for old in folder().glob(f"{name}-*"):
        if time.time() - old.stat().st_mtime > KEEP_UNUSED_SECONDS:
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """Let one builder of *name* in at a time."""
    with (folder() / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another build of {name} runs in {folder()}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
