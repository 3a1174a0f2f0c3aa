# SPDX-License-Identifier: Apache-2.0
"""What the host must have: found missing, installed if we are root, named all at once if we are not."""

from __future__ import annotations

import os
import shutil

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
PROGRAMS_OF_USERS = {"newuidmap": "uidmap"}  # maps the guest's owners into the user's own range of ids
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def missing() -> list[str]:
    """The Debian packages whose programs are not there, sorted."""
    programs = PROGRAMS if os.geteuid() == 0 else PROGRAMS | PROGRAMS_OF_USERS
    found = {package for program, package in programs.items() if not shutil.which(program, path=ENVIRONMENT["PATH"])}
    if not os.path.exists(KEYRING):
        found.add("debian-archive-keyring")
    return sorted(found)


def require() -> None:
    """Make sure that the host can build and run the guest; MissingPackagesError if it cannot and is not ours."""
    packages = missing()
    if not packages:
        return
    if os.geteuid() != 0:
        raise MissingPackagesError(packages)
    progress(f"installing {' '.join(packages)}")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    tool(["apt-get", "update"], env=environment)
    tool(["apt-get", "install", "-y", "--no-install-recommends", *packages], env=environment)
    if packages := missing():
        raise MissingPackagesError(packages)
