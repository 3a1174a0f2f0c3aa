# SPDX-License-Identifier: Apache-2.0
"""The unit file and the drop-ins of a service, as systemd merges them, and its commands as they are written there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence

import msgspec

from resctrlctl.base import systemd_programs
from resctrlctl.base.errors import CommandError
from resctrlmond.resctrl.errors import printable

# The settings with commands of a service (systemd.service(5)), in the order in which systemd runs them.
COMMANDS = (
    "ExecCondition",
    "ExecStartPre",
    "ExecStart",
    "ExecStartPost",
    "ExecReload",
    "ExecReloadPost",
    "ExecStop",
    "ExecStopPost",
)
# The line that systemctl cat writes before each file.
_HEADER = re.compile(r"# (/[^\n]+)\n")


class UnitLine(msgspec.Struct, frozen=True):
    """A line of a unit file: its key and value, as they are written, and the file."""

    key: str
    value: str
    path: str


def files_of(unit: str) -> list[tuple[str, str]]:
    """Return the paths and texts of the files of a unit, in the order in which systemd applies them.

    Raises CommandError if the unit has none.
    """
    try:
        done = systemd_programs.run("systemctl", "cat", "--no-pager", "--", unit, errors="surrogateescape")
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"cannot read the files of {printable(unit)}: {error}") from error
    if done.returncode or not done.stdout.strip():
        why = printable(done.stderr.strip()) or "it has no unit file"
        raise CommandError(f"cannot read the files of {printable(unit)}: {why}")
    return list(split(unit, done.stdout, _read))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        raise CommandError(f"cannot read {printable(path)}: {error.strerror}") from error


def split(unit: str, text: str, read: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file in the output of systemctl cat. Raises CommandError."""
    # A comment in a file can look like the line before the next file: only what a file really has is its text.
    while text := text.lstrip("\n"):
        header = _HEADER.match(text)
        if header is None:
            raise CommandError(
                f"cannot read the files of {printable(unit)}: the output of systemctl cat is not known"
            )
        text = text[header.end() :]
        content = read(header[1])
        if not text.startswith(content):
            raise CommandError(
                f"{printable(header[1])} has changed since systemctl cat read it. Run systemctl daemon-reload, and "
                "try again"
            )
        yield header[1], content
        text = text[len(content) :]


def settings(files: Sequence[tuple[str, str]], wanted: str = "Service") -> list[UnitLine]:
    """Return all settings of a section, in the order in which systemd applies them."""
    found: list[UnitLine] = []
    for path, text in files:
        section = ""
        for line in _logical_lines(text):
            if line.startswith("["):
                section = line[1:].rstrip("]")
            elif section == wanted and "=" in line:
                key, _, value = line.partition("=")
                found.append(UnitLine(key.strip(), value.strip(), path))
    return found


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the lines without comments, each with those that continue it (systemd.syntax(7))."""
    begun = ""
    for raw in text.split("\n"):
        line = raw.lstrip(" \t\r")
        if line.startswith(("#", ";")):
            continue
        begun += line
        if (len(begun) - len(begun.rstrip("\\"))) % 2:
            begun = f"{begun[:-1]} "
            continue
        if begun.strip():
            yield begun.strip()
        begun = ""
    if begun.strip():
        yield begun.strip()


def current(found: Sequence[UnitLine], key: str) -> list[UnitLine]:
    """Return the settings of a key that are in effect: an empty value resets those before it."""
    kept: list[UnitLine] = []
    for setting in found:
        if setting.key == key:
            kept = [*kept, setting] if setting.value else []
    return kept
