# SPDX-License-Identifier: Apache-2.0
"""Build the packages of this tree, and reuse them until a file of the tree changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.kernel.machine import cache

from . import builder
from .source import changelog, source

# Source and packages, unsigned, and an index of them.
BUILD = """\
cd "$(ls -d resctrlmond-*/)"
export DEB_BUILD_OPTIONS="noautodbgsym $1"
dpkg-buildpackage --build=full --unsigned-source --unsigned-changes --unsigned-buildinfo 2>&1
mkdir ../out; cd ..
dpkg-scanpackages --multiversion . 2>/dev/null >Packages
mv Packages *.deb *.dsc *.orig.tar.* *.debian.tar.* *.changes *.buildinfo out/
"""


def packages(text: str | None = None, added: Mapping[str, str] | None = None) -> Path:
    """The folder with .deb, source and .changes, which is an archive for apt; built if it is not there.

    The build runs the tests that a build can. ``text`` is another changelog, for a later version, in which
    some files have more text (``added``).
    """
    archive = source(text or changelog(), added)
    key = cache.key(archive, BUILD, builder.RUN, *builder.packages())
    options = "nocheck" if text else ""
    return cache.artifact("packages", key, lambda place: build(place, archive, options)) / "out"


def build(place: Path, archive: bytes, options: str = "", script: str = BUILD) -> None:
    """Build once, into *place*/out, with the build's output as build.log; ``options`` are DEB_BUILD_OPTIONS."""
    cache.progress("building the Debian packages")
    (place / "build.log").write_text(builder.run(place, archive, script, options), encoding="utf-8")
