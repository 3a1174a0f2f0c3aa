# SPDX-License-Identifier: Apache-2.0
"""The guest is built from the mirror that the host itself uses, in any format of its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from .machine.packages import KEYRING
from .machine.sources import FALLBACK, Mirror, mirror

DEB822 = f"""\
Types: deb
URIs: https://packages.example.org/apt
Suites: cloud
Components: main

Types: deb
# a comment inside
URIs: http://security.debian.org/debian-security
Suites: trixie-security
Components: main

Types: deb deb-src
URIs: http://mirror.example.org/debian/
Suites: trixie trixie-updates
Components: main
 contrib
Signed-By: {KEYRING}
"""
EMBEDDED = """\
Types: deb
URIs: http://mirror.example.org/debian/
Suites: trixie
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEY865UxYJKwYBBAHaRw8BAQdAd7Z0srwuhlB6JKFkcf4HU4SSS/xcRfwEQWzr
"""
ONE_LINE = f"""\
# deb http://old.example.org/debian bookworm main
deb-src http://source.example.org/debian bookworm main
deb http://security.debian.org/debian-security bookworm-security main
deb [ arch=amd64 signed-by={KEYRING} ] http://mirror.example.org/debian/ bookworm main contrib # selected
"""
DISABLED = DEB822.replace("Types: deb deb-src", "Types: deb\nEnabled: no")


@pytest.mark.parametrize(
    ("name", "text", "uri"),
    [
        ("sources.list.d/debian.sources", DEB822, "http://mirror.example.org/debian/"),
        ("sources.list.d/debian.sources", EMBEDDED, "http://mirror.example.org/debian/"),
        ("sources.list", ONE_LINE, "http://mirror.example.org/debian/"),
        ("sources.list.d/more.list", ONE_LINE, "http://mirror.example.org/debian/"),
        ("sources.list.d/debian.sources", DISABLED, FALLBACK.uri),
        ("sources.list.d/debian.sources.save", DEB822, FALLBACK.uri),
        ("sources.list", "", FALLBACK.uri),
    ],
)
def test_mirror_of_the_host_is_found(tmp_path: Path, name: str, text: str, uri: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / name).write_text(text)
    assert mirror(tmp_path) == Mirror(uri, KEYRING)


def test_source_line_has_keyring_and_suite() -> None:
    line = Mirror("http://mirror/debian", "/key.gpg").line("sid")
    assert line == "deb [signed-by=/key.gpg check-valid-until=no] http://mirror/debian sid main"
