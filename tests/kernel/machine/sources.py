# SPDX-License-Identifier: Apache-2.0
"""Find the Debian mirror of this host, and create a private apt configuration that reads another suite from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .packages import KEYRING
from .tools import tool

APT = Path("/etc/apt")


@dataclass(frozen=True)
class Mirror:
    """A Debian archive: its URI without a suite, and the keyring that verifies it."""

    uri: str
    keyring: str

    def line(self, suite: str) -> str:
        """Return a line of sources.list(5) for *suite*.

        The Release files of sid and the backports expire after a week, and some mirrors are not updated. The
        signature is checked nevertheless.
        """
        return f"deb [signed-by={self.keyring} check-valid-until=no] {self.uri} {suite} main"


FALLBACK = Mirror("http://deb.debian.org/debian", KEYRING)


def mirror(apt: Path = APT) -> Mirror:
    """Return the first of the host's apt sources that is Debian's main archive; deb.debian.org if there is none."""
    files = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    for file in files:
        if file.suffix in {".list", ".sources"} and file.is_file():
            text = file.read_text(errors="replace")
            for found in _stanzas(text) if file.suffix == ".sources" else _lines(text):
                return found
    return FALLBACK


def _lines(text: str) -> Iterator[Mirror]:
    """Find mirrors in the one-line style: deb [ option=value … ] uri suite component…."""
    for line in text.splitlines():
        if match := re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]*)", line):
            options, uri, suite, components = match.groups()
            signed_by = re.search(r"signed-by=(\S+)", options or "", re.IGNORECASE)
            yield from _debian([uri], [suite], components.split(), signed_by[1] if signed_by else "")


def _stanzas(text: str) -> Iterator[Mirror]:
    """Find mirrors in the deb822 style: paragraphs of fields, sources.list(5)."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
        found = re.findall(r"(?m)^([\w-]+):[ \t]*(.*(?:\n[ \t].*)*)", paragraph)
        field = {name.lower(): value.split() for name, value in found}
        if "deb" in field.get("types", []) and field.get("enabled", ["yes"])[0].lower() not in {
            "no",
            "false",
            "0",
        }:
            signed_by = field.get("signed-by", [""])
            yield from _debian(
                field.get("uris", []),
                field.get("suites", []),
                field.get("components", []),
                (signed_by or [""])[0],
            )


def _debian(uris: list[str], suites: list[str], components: list[str], signed_by: str) -> Iterator[Mirror]:
    """Select the main archive, which has every suite below one URI. Skip security and vendors' archives."""
    for uri in uris:
        if "main" in components and re.search(r"/debian/?$", uri) and not any("security" in name for name in suites):
            # If the source contains a key, or names none, Debian's own keyring verifies Debian's archive.
            yield Mirror(uri, signed_by if signed_by.startswith("/") and Path(signed_by).exists() else KEYRING)


def private_apt(where: Path, suite: str) -> dict[str, str]:
    """Read the index of *suite* into *where*, without changes to the host. Return the environment for apt."""
    for name in ("lists/partial", "cache/archives/partial", "state"):
        (where / name).mkdir(parents=True, exist_ok=True)
    (where / "sources.list").write_text(mirror().line(suite) + "\n")
    (where / "status").touch()
    configuration = {
        "Dir::State": where / "state",
        "Dir::State::Lists": where / "lists",
        "Dir::State::status": where / "status",
        "Dir::Cache": where / "cache",
        "Dir::Etc::sourcelist": where / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "APT::Sandbox::User": "",  # _apt cannot read the cache folder
        "Acquire::Languages": "none",
        "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled": "false",
    }
    (where / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in configuration.items()))
    environment = {"APT_CONFIG": str(where / "apt.conf")}
    tool(["apt-get", "-q", "update"], env=environment)
    return environment
