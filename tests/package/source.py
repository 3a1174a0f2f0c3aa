# SPDX-License-Identifier: Apache-2.0
"""The Debian source: the tree as an .orig tarball, and packaging/debian, with the same bytes each time."""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

PROJECT = Path(__file__).parents[2]
DEBIAN = PROJECT / "packaging" / "debian"
# The parts of the source; all other files in a tree are built or belong to the user.
PARTS = (
    *("CONTRIBUTING.md", "LICENSE", "Makefile", "NEWS.md", "README.md", "pyproject.toml"),
    *("hook", "man", "packaging", "resctrlctl", "resctrlmond", "systemd", "tests", "witness"),
)
# Caches of Python, pytest, mypy and ruff, which appear inside the parts too.
_CACHE = re.compile(r"__pycache__|\..*_cache|\.hypothesis|.*\.egg-info")
_HEAD = re.compile(r"(\S+) \((\S+)\) .*\n")


def changelog() -> str:
    """Return debian/changelog without a change."""
    return (DEBIAN / "changelog").read_text(encoding="utf-8")


def version(text: str) -> str:
    """The version of the newest entry, with the Debian revision: 0.1.0-1."""
    head = _HEAD.match(text)
    assert head, "debian/changelog does not begin with an entry"
    return head[2]


def date(text: str) -> datetime:
    """When the newest entry was written; dpkg-buildpackage gives this moment to all that it makes."""
    trailer = re.search(r"^ -- .*>  (.*)$", text, re.MULTILINE)
    assert trailer, "debian/changelog has no entry with a date"
    return parsedate_to_datetime(trailer[1])


def next_entry(text: str, suffix: str) -> str:
    """The changelog with one more entry, for the same source under a higher version."""
    name = text.partition(" ")[0]
    trailer = next(line for line in text.splitlines() if line.startswith(" -- "))
    return f"{name} ({version(text)}{suffix}) unstable; urgency=medium\n\n  * Built again.\n\n{trailer}\n\n{text}"


def source(text: str, added: Mapping[str, str] | None = None) -> bytes:
    """A tar archive with NAME_VERSION.orig.tar.xz and the unpacked source; ``text`` is its debian/changelog.

    ``added`` are texts that are added at the end of files, by their paths in the tree.
    """
    name, upstream = text.partition(" ")[0], version(text).rpartition("-")[0]
    top, when = f"{name}-{upstream}", int(date(text).timestamp())
    orig = io.BytesIO()
    with tarfile.open(fileobj=orig, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for part in PARTS:
            _add(archive, PROJECT / part, f"{top}/{part}", when, added or {})
    both = io.BytesIO(orig.getvalue())
    with tarfile.open(fileobj=both, mode="a", format=tarfile.GNU_FORMAT) as archive:
        _add(archive, DEBIAN, f"{top}/debian", when, {})
        _put(archive, f"{top}/debian/changelog", text.encode(), when)
        _put(archive, f"{name}_{upstream}.orig.tar.xz", lzma.compress(orig.getvalue()), when)
    return both.getvalue()


def _add(archive: tarfile.TarFile, path: Path, name: str, when: int, added: Mapping[str, str]) -> None:
    for file in _files(path):
        is_program = bool(file.stat().st_mode & 0o100)
        below = file.relative_to(path)
        data = file.read_bytes() + added.get(str(file.relative_to(PROJECT)), "").encode()
        _put(archive, str(Path(name) / below), data, when, 0o755 if is_program else 0o644)


def _files(path: Path) -> Iterator[Path]:
    """The files at and below *path*, sorted."""
    if not path.is_dir():
        yield path
        return
    for child in sorted(path.iterdir()):
        if not _CACHE.fullmatch(child.name):
            yield from _files(child)


def _put(archive: tarfile.TarFile, name: str, data: bytes, when: int, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), when, mode
    archive.addfile(entry, io.BytesIO(data))
