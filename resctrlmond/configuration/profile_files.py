# SPDX-License-Identifier: Apache-2.0
"""Read the profiles: YAML files in two directories. ``profile_syntax`` parses them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from resctrlmond.configuration.config_file import MAX_BYTES, ConfigError
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.profiles.companion_settings import TemplateError, check_template
from resctrlmond.workloads.profiles.profile import Profile, Profiles

# A file of the first directory replaces the file of the same name in the second one.
DIRECTORIES = ("/etc/resctrlmond/profiles.d", "/usr/lib/resctrlmond/profiles.d")
SUFFIX = ".yaml"
# The kernel follows 40 links in a path.
_MOST_STEPS = 4096


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


@dataclass(frozen=True, slots=True)
class _File:
    """The content of a file, with its owner and mode, which state the users that can write it."""

    path: str
    data: bytes
    owner: int = 0
    mode: int = 0


def load(directories: Sequence[str] = DIRECTORIES, *, with_companions: bool = False) -> Profiles:
    """Return the profiles of all files in these directories, in the order of the names. Raises ConfigError.

    ``with_companions``: read the templates of companions, and refuse companions in files that a user other than root
    can write. The daemon needs that, because it starts them.
    """
    found = [_read(path) for path in files(directories)]
    return _with_companions(_parsed(found), found) if with_companions else _parsed(found)


def check(path: str, directories: Sequence[str] = DIRECTORIES) -> Profiles:
    """Return the profiles as they would be with this file in the first directory. Raises ConfigError."""
    name = os.path.basename(path)
    if not os.path.exists(path):
        raise ConfigError("the file does not exist", path=printable(path), remedy="Check its path")
    if os.path.isdir(path):
        raise ConfigError("this is a directory", path=printable(path), remedy="Name a file in it")
    if not _is_read(name):
        raise ConfigError(
            f"the name of the file does not end in {SUFFIX}, or begins with a dot",
            path=printable(path),
            remedy="The daemon would not read it: rename it",
        )
    others = [other for other in files(directories) if os.path.basename(other) != name]
    found = [_read(one) for one in sorted([path, *others], key=os.path.basename)]
    # Root may copy the checked file from the folder of another user.
    is_elsewhere = os.path.dirname(os.path.abspath(path)) not in map(os.path.abspath, directories)
    return _with_companions(_parsed(found), [file for file in found if not (is_elsewhere and file.path == path)])


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


def _read(path: str) -> _File:
    # An empty file and a link to /dev/null set nothing. A pipe would block the daemon.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, 3):
                return _File(path, b"")
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return _File(path, file.read(MAX_BYTES + 1), status.st_uid, status.st_mode)
    except OSError as error:
        raise _not_read(path, error) from error


def _not_read(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        "cannot read the profiles",
        path=printable(path),
        errno=error.errno or 0,
        remedy=f"Check the file. A link to /dev/null turns off the file of that name in {DIRECTORIES[1]}",
    )


def _parsed(found: Iterable[_File]) -> Profiles:
    contents = [(file.path, file.data) for file in found]
    if not contents:
        return Profiles()
    # Not at the top: it needs PyYAML, which takes 1.3 MiB in the daemon.
    from resctrlmond.configuration import profile_syntax  # noqa: PLC0415

    return profile_syntax.merge(contents)


# -- companions


def _with_companions(profiles: Profiles, found: Iterable[_File]) -> Profiles:
    """Return the profiles with the templates of their companions. Raises ConfigError.

    Those of the files that were ``found`` are refused if a user other than root can write the file.
    """
    by_path = {printable(file.path): file for file in found}
    changed = {}
    for name, profile in profiles.by_name.items():
        companion = profile.companion
        if companion is None:
            continue
        file = by_path.get(profile.origin.rpartition(":")[0])
        if file is not None and (writer := _other_writer(file)):
            raise _untrusted(profile, f"a companion runs as root, and {writer}")
        if companion.template_file:
            template = _template(profile, companion.template_file)
            try:
                check_template(template, companion.format)
            except TemplateError as error:
                raise _untrusted(profile, f"{printable(companion.template_file)}: {error}") from error
            companion = msgspec.structs.replace(companion, template=template)
            changed[name] = msgspec.structs.replace(profile, companion=companion)
    return msgspec.structs.replace(profiles, by_name={**profiles.by_name, **changed}) if changed else profiles


def _template(profile: Profile, path: str) -> str:
    try:
        file = _read(path)
    except ConfigError as error:
        why = os.strerror(error.errno) if error.errno else error.message
        raise _untrusted(profile, f"cannot read the template {printable(path)}: {why}") from error
    if writer := _other_writer(file):
        raise _untrusted(profile, f"a companion runs as root, and {writer}")
    if len(file.data) > MAX_BYTES:
        raise _untrusted(profile, f"the template {printable(path)} is larger than {MAX_BYTES} bytes")
    try:
        return file.data.decode()
    except UnicodeDecodeError as error:
        raise _untrusted(profile, f"the template {printable(path)} is not UTF-8") from error


def _untrusted(profile: Profile, why: str) -> ConfigError:
    return ConfigError(
        f"{profile.origin}: profile {profile.name}: {why}",
        path=profile.origin.rpartition(":")[0],
        remedy="Correct the file, or remove 'companion' from the profile. See resctrlmond-profiles(5)",
    )


def _other_writer(file: _File) -> str:
    """Return how a user other than root can change the file; "" if none can.

    A directory with the sticky bit, such as /tmp, does not let other users replace a file of root.
    """
    if file.owner != 0:
        return f"{printable(file.path)} is owned by the user {file.owner}"
    if file.mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"users other than root can write {printable(file.path)}"
    try:
        way = [(path, os.lstat(path)) for path in _way_to(file.path)]
    except OSError as error:
        return f"{printable(error.filename or file.path)} cannot be examined: {error.strerror}"
    for path, status in way:
        if status.st_uid != 0:
            return f"{printable(path)} is owned by the user {status.st_uid}"
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if is_open and not stat.S_ISLNK(status.st_mode):
            return f"users other than root can write {printable(path)}"
    return ""


def _way_to(path: str) -> list[str]:
    """Return the directories and links that lead to a file: of each link, also those that lead to its target.

    Raises OSError.
    """
    found: dict[str, None] = {"/": None}
    # Not abspath(), which removes ".." after a link together with that link.
    done, left = "/", os.path.join(os.getcwd(), path).split("/")
    for _ in range(_MOST_STEPS):
        if not left:
            return list(found)
        name = left.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            done = os.path.dirname(done)
            continue
        one = os.path.join(done, name)
        if os.path.islink(one):
            target = os.readlink(one)
            done, left = "/" if target.startswith("/") else done, [*target.split("/"), *left]
        elif left:
            done = one
        else:
            return list(found)  # without the file itself
        found[one] = None
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
