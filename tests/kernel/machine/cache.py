# SPDX-License-Identifier: Apache-2.0
"""The cache of builds, outside the source tree: one build of each name at a time, complete or absent."""

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
    """Return $RESCTRLMOND_CACHE, or resctrlmond below the user's XDG cache folder, and create it if needed."""
    if own := os.environ.get("RESCTRLMOND_CACHE"):
        path = Path(own).absolute()
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "resctrlmond"
    path.mkdir(parents=True, exist_ok=True)
    return path


def key(*parts: str | bytes | Path) -> str:
    """Return a short hash of the inputs of a build; the content of the file for a path."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()[:16]


def artifact(
    name: str, key: str, build: Callable[[Path], None], keep_unused_seconds: float = KEEP_UNUSED_SECONDS
) -> Path:
    """Return the folder <name>-<key>. If it does not exist, *build* fills an empty folder.

    The folder is renamed when the build is complete, so that an interrupted build is not used. A second process
    waits for the first process to build *name*. A build removes the folders of *name* with other keys that were not
    used for *keep_unused_seconds*.
    """
    place = folder() / f"{name}-{key}"
    if not place.is_dir():
        with _lock(name):
            if not place.is_dir():
                _sweep(name, keep_unused_seconds)
                _build(place, name, build)
    os.utime(place)
    return place


def progress(text: str) -> None:
    """Print a step that takes time, for the user."""
    print(f"test machine: {text}", file=sys.stderr, flush=True)


def _build(place: Path, name: str, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".building-{name}=", dir=place.parent))
    begun = time.monotonic()
    try:
        build(scratch)
        scratch.chmod(0o755)
        scratch.rename(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"{name} is ready ({time.monotonic() - begun:.0f} s)")


def _sweep(name: str, keep_unused_seconds: float) -> None:
    """Remove the folders of killed builds, and folders of other recipes that were not used for that long."""
    for leftover in folder().glob(f".building-{name}=*"):  # this process has the lock, so there is no other build
        shutil.rmtree(leftover, ignore_errors=True)
    for old in folder().glob(f"{name}-*"):
        if time.time() - old.stat().st_mtime > keep_unused_seconds:
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """Hold the lock of *name*: one process at a time builds it."""
    with (folder() / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another build of {name} runs in {folder()}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
