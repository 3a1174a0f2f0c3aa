# SPDX-License-Identifier: Apache-2.0
"""Puts the project into a guest as a package would: the files, then what systemd and dbus must reread."""

from __future__ import annotations

from pathlib import Path

from .machine import Guest
from .machine.tools import tool

PROJECT = Path(__file__).parents[2]
# An emulated processor is tens of times slower than the unit's time to start is meant for.
PATIENCE = "/run/systemd/system/resctrlmond.service.d/emulated.conf"
RELOAD_DBUS = "busctl call org.freedesktop.DBus /org/freedesktop/DBus org.freedesktop.DBus ReloadConfig"


def stage(destdir: Path, project: Path = PROJECT) -> Path:
    """Fill *destdir* with the tree that belongs at / of a Debian host, or BuildError with make's output."""
    tool(["make", "-C", project, "install", f"DESTDIR={destdir}", "PREFIX=/usr", "PYTHON=python3"])
    return destdir


def install(guest: Guest, staged: Path) -> None:
    """Unpack a staged tree in the guest and do what a package's postinst does, short of starting anything."""
    guest.put(staged, "/")
    guest.write(PATIENCE, "[Service]\nTimeoutStartSec=300\n")
    compiled = " ".join(f"/usr/{path.relative_to(staged / 'usr')}" for path in _packages(staged))
    steps = [
        f"systemd-sysusers {_names(staged, 'usr/lib/sysusers.d')}",
        f"systemd-tmpfiles --create {_names(staged, 'usr/lib/tmpfiles.d')}",
        f"python3 -m compileall -q {compiled}",
        "journalctl --update-catalog",
        "systemctl daemon-reload",
        RELOAD_DBUS,
    ]
    guest.run(" && ".join(steps), timeout=100)


def _packages(staged: Path) -> list[Path]:
    return sorted(path.parent for path in staged.glob("usr/lib/python3/dist-packages/*/__init__.py"))


def _names(staged: Path, folder: str) -> str:
    """The project's own files: without a name the tools would work through the whole system's."""
    return " ".join(path.name for path in sorted((staged / folder).glob("*.conf"))) or "/dev/null"
