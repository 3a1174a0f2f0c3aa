# SPDX-License-Identifier: Apache-2.0
"""The packages that the host needs: detected, and installed if the user is root, or listed if not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

from .cache import progress
from .errors import MissingPackagesError
from .tools import ENVIRONMENT, tool

PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "zstd": "zstd",
    "depmod": "kmod",
    "tar": "tar",
}
PROGRAMS_OF_USERS = {"newuidmap": "uidmap"}  # maps the guest's owners to the user's range of ids
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def missing(names: Iterable[str] = PROGRAMS) -> list[str]:
    """List the Debian packages of missing programs, sorted. Users other than root also need programs that map ids."""
    programs = {name: PROGRAMS[name] for name in names} | ({} if os.geteuid() == 0 else PROGRAMS_OF_USERS)
    found = {package for program, package in programs.items() if not shutil.which(program, path=ENVIRONMENT["PATH"])}
    if not os.path.exists(KEYRING):
        found.add("debian-archive-keyring")
    return sorted(found)


def require(names: Iterable[str] = PROGRAMS) -> None:
    """Install missing programs if the user is root, by default all that build and run the guest.

    Raises MissingPackagesError for other users.
    """
    packages = missing(names)
    if not packages:
        return
    if os.geteuid() != 0:
        raise MissingPackagesError(packages)
    progress(f"installing {' '.join(packages)}")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    tool(["apt-get", "update"], env=environment)
    tool(["apt-get", "install", "-y", "--no-install-recommends", *packages], env=environment)
    if packages := missing(names):
        raise MissingPackagesError(packages)
