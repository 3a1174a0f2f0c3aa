# SPDX-License-Identifier: Apache-2.0
"""Install the project in a guest as a package does: the files, and a reload of systemd and dbus."""

from __future__ import annotations

from pathlib import Path

from .machine import Guest, Machine, cache
from .machine.tools import tool

PROJECT = Path(__file__).parents[2]
# An emulated processor is tens of times slower than the start timeout of the unit assumes.
PATIENCE = "/run/systemd/system/resctrlmond.service.d/emulated.conf"
RELOAD_DBUS = "busctl call org.freedesktop.DBus /org/freedesktop/DBus org.freedesktop.DBus ReloadConfig"


def stage(destdir: Path, project: Path = PROJECT) -> Path:
    """Fill *destdir* with the tree of a Debian host's /. Raises BuildError with make's output."""
    tool(["make", "-C", project, "install", f"DESTDIR={destdir}", "PREFIX=/usr", "PYTHON=python3"])
    return destdir


def install(guest: Guest, staged: Path) -> None:
    """Unpack a staged tree in the guest and run the steps of a package's postinst, without starting anything."""
    guest.put(staged, "/")
    guest.write(PATIENCE, "[Service]\nTimeoutStartSec=300\n")
    compiled = " ".join(f"/usr/{path.relative_to(staged / 'usr')}" for path in _packages(staged))
    steps = [
        f"systemd-sysusers {_names(staged, 'usr/lib/sysusers.d')}",
        f"python3 -m compileall -q {compiled}",
        "journalctl --update-catalog",
        "systemctl daemon-reload",
        RELOAD_DBUS,
    ]
    guest.run(" && ".join(steps), timeout=100)


def start_installed(machine: Machine, staged: Path) -> Guest:
    """Start a guest in which the staged tree is installed. The first one of each tree is saved for all later ones."""
    return machine.start_prepared("installed", _content(staged), lambda guest: install(guest, staged))


def _content(staged: Path) -> str:
    """Return a hash of the tree and of this file."""
    parts: list[str | bytes | Path] = [Path(__file__)]
    for path in sorted(staged.rglob("*")):
        status = path.lstat()
        parts.append(f"{path.relative_to(staged)} {status.st_mode:o}")
        if path.is_symlink():
            parts.append(str(path.readlink()))
        elif path.is_file():
            parts.append(path)
    return cache.key(*parts)


def _packages(staged: Path) -> list[Path]:
    return sorted(path.parent for path in staged.glob("usr/lib/python3/dist-packages/*/__init__.py"))


def _names(staged: Path, folder: str) -> str:
    """Return the project's own files: without a name, the tools would process those of the whole system."""
    return " ".join(path.name for path in sorted((staged / folder).glob("*.conf"))) or "/dev/null"
