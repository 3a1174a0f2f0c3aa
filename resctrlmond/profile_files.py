# SPDX-License-Identifier: Apache-2.0
"""Read the profiles: YAML files in two directories. ``profile_syntax`` parses them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence

from resctrlmond.config_file import MAX_BYTES, ConfigError
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.profiles import Profiles

# A file of the first directory replaces the file of the same name in the second one.
DIRECTORIES = ("/etc/resctrlmond/profiles.d", "/usr/lib/resctrlmond/profiles.d")
SUFFIX = ".yaml"


def chosen(directory: str | None) -> Sequence[str]:
    """Return the directory of --profiles-dir as the only one to read, or DIRECTORIES without that option.

    Raises ConfigError if the directory does not exist: only those of DIRECTORIES need not exist.
    """
    if directory is None:
        return DIRECTORIES
    if not os.path.exists(directory):
        raise ConfigError(
            "the directory of the profiles does not exist",
            path=printable(directory),
            remedy="Create it, or leave out --profiles-dir",
        )
    return (directory,)


def load(directories: Sequence[str] = DIRECTORIES) -> Profiles:
    """Return the profiles of all files in these directories, in the order of the names. Raises ConfigError."""
    return _parsed((path, _contents(path)) for path in files(directories))


def check(path: str, directories: Sequence[str] = DIRECTORIES) -> Profiles:
    """Return the profiles as they would be with this file in the first directory. Raises ConfigError."""
    name = os.path.basename(path)
    if not os.path.exists(path):
        raise ConfigError("the file does not exist", path=printable(path), remedy="Check its path")
    if not _is_read(name):
        raise ConfigError(
            f"the name of the file does not end in {SUFFIX}, or begins with a dot",
            path=printable(path),
            remedy="The daemon would not read it: rename it",
        )
    others = [other for other in files(directories) if os.path.basename(other) != name]
    return _parsed((one, _contents(one)) for one in sorted([path, *others], key=os.path.basename))


def files(directories: Sequence[str] = DIRECTORIES) -> list[str]:
    """Return the paths of the files that are read, in their order. Raises ConfigError."""
    found: dict[str, str] = {}
    for directory in directories:
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _not_read(directory, error) from error
        for name in names:
            if _is_read(name):
                found.setdefault(name, os.path.join(directory, name))
    return [found[name] for name in sorted(found)]


def _is_read(name: str) -> bool:
    return name.endswith(SUFFIX) and not name.startswith(".")


def _contents(path: str) -> bytes:
    # An empty file and a link to /dev/null set nothing. A pipe would block the daemon.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, 3):
                return b""
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _not_read(path, error) from error


def _not_read(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        "cannot read the profiles",
        path=printable(path),
        errno=error.errno or 0,
        remedy=f"Check the file. A link to /dev/null turns off the file of that name in {DIRECTORIES[1]}",
    )


def _parsed(contents: Iterable[tuple[str, bytes]]) -> Profiles:
    if not (found := list(contents)):
        return Profiles()
    # Not at the top: it needs PyYAML, which takes 1.3 MiB in the daemon.
    from resctrlmond import profile_syntax  # noqa: PLC0415

    return profile_syntax.merge(found)
