# SPDX-License-Identifier: Apache-2.0
"""Check and prepare the requirements of the daemon; each failure has its own message and exit status."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import platform
import stat
from collections.abc import Mapping

import msgspec

from resctrlmond.configuration.config import Config
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.resctrl.errors import MonitoringUnavailable, NotMounted, PermissionDenied, ResctrlError, reading
from resctrlmond.resctrl.mounts import boot_id, fstype_of
from resctrlmond.resctrl.tree import Tree
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store


class Exit(enum.IntEnum):
    """The exit statuses of resctrlmond, from sysexits(3) if there is a fitting one. resctrlmond(8) explains them."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NO_GROUP = 67
    NOT_MOUNTED = 69
    NO_MONITORING = 71
    OLD_HOST = 72
    ALREADY_RUNNING = 75
    DENIED = 77
    CONFIG = 78


class StartupError(ResctrlError):
    """The daemon cannot start. ``exit`` is the exit status."""

    def __init__(self, cause: ResctrlError, exit_: Exit) -> None:
        super().__init__(cause.message, path=cause.path, errno=cause.errno, status=cause.status, remedy=cause.remedy)
        self.exit = exit_


# The records name commands and pods: other users must not read them.
_RECORDS_MODE = 0o750

_EXITS: dict[type[ResctrlError], Exit] = {
    ConfigError: Exit.CONFIG,
    NotMounted: Exit.NOT_MOUNTED,
    MonitoringUnavailable: Exit.NO_MONITORING,
    PermissionDenied: Exit.DENIED,
}


def as_startup_error(error: ResctrlError) -> StartupError:
    """Return the error as a StartupError with the exit status of its type."""
    return error if isinstance(error, StartupError) else StartupError(error, _EXITS.get(type(error), Exit.FAILURE))


class Setup(msgspec.Struct, frozen=True):
    """The prepared parts of a daemon: its manager before the recovery, the mark, and the lock of its folder."""

    manager: Manager
    snapshots: Snapshots
    gid: int
    lock: int


def group_settings(config: Config) -> Settings:
    """Return the part of the configuration that is about groups: its times have names that end in "_s"."""
    return Settings(**{name: getattr(config, name.removesuffix("_s")) for name in Settings.__struct_fields__})


def needs_restart() -> list[str]:
    """Return the configuration keys that a reload cannot apply."""
    of_settings = (name.removesuffix("_s") for name in Settings.__struct_fields__)
    reloaded = {"groups_mode", "log_level", "units", *of_settings}
    return [name for name in Config.__struct_fields__ if name not in reloaded]


def prepare(config: Config, gid: int, *, allow_simulation: bool = False) -> Setup:
    """Check the machine, create the folders, and lock out other daemons. Raises StartupError."""
    try:
        _set_group(gid)
        lock = _lock(config.runtime_dir, is_service=not allow_simulation)
        tree = Tree.open(config.resctrl, allow_simulation=allow_simulation)
        tree.capacity()
        if tree.simulation is None:
            check_host(_os_release())
        mode = int(config.groups_mode, 8)
        own = (os.path.join(config.runtime_dir, name) for name in ("records", "completed", "exposed"))
        records, completed, exposed = own
        for folder in (records, completed, exposed, config.groups_dir):
            os.makedirs(folder, exist_ok=True)
            # Before chmod(): the former group must not get rights that are meant for the new one.
            give_to_group(folder, gid)
        os.chmod(records, _RECORDS_MODE)
        if tree.simulation is None:
            check_folders(config)
        snapshots = Snapshots(config.groups_dir, completed)
        snapshots.set_mode(mode)
        # Not the folders in it: a container whose root is another user of the host must be able to read these.
        os.chmod(exposed, mode)
    except ResctrlError as error:
        raise as_startup_error(error) from error
    except OSError as error:
        raise StartupError(
            ResctrlError(
                "cannot create the file or directory",
                path=error.filename or config.runtime_dir,
                errno=error.errno or 0,
                remedy="Check runtime_dir and groups_dir, and that their filesystem has free space and inodes "
                "(df, df -i)",
            ),
            Exit.FAILURE,
        ) from error
    manager = Manager(tree, Store(records), snapshots, Mark(gid, boot_id()), group_settings(config))
    return Setup(manager, snapshots, gid, lock)


def check_host(release: Mapping[str, str]) -> None:
    """Refuse a Debian release older than 13: its systemd does not know the unit's Type=notify-reload (253).

    ``release`` is os-release(5). Testing and sid have no VERSION_ID. Raises StartupError.
    """
    version = release.get("VERSION_ID", "")
    if release.get("ID") == "debian" and version.isdecimal() and int(version) < 13:
        raise StartupError(
            ResctrlError(
                "resctrlmond needs Debian 13 or later with systemd 253 or later, and this host runs "
                + release.get("PRETTY_NAME", f"Debian {version}"),
                remedy="Upgrade the host",
            ),
            Exit.OLD_HOST,
        )


def check_folders(config: Config) -> None:
    """Refuse folders that the daemon cannot use. For a folder that does not exist, check its closest parent.

    Raises ConfigError, NotRead.
    """
    runtime_dir, groups_dir = (_existing(key, getattr(config, key)) for key in ("runtime_dir", "groups_dir"))
    check_in_memory("runtime_dir", runtime_dir)
    check_in_memory("groups_dir", groups_dir)
    with reading("find out which filesystem it is on", groups_dir):
        is_same = os.stat(runtime_dir).st_dev == os.stat(groups_dir).st_dev
    if not is_same:
        raise ConfigError(
            "groups_dir is on another filesystem than runtime_dir: ended runs cannot be moved from one to the other",
            path=config.groups_dir,
            remedy="Set groups_dir to a folder on the filesystem of runtime_dir",
        )


def _existing(key: str, path: str) -> str:
    """Return the path, or its closest parent that exists. Raises ConfigError if that is not a folder."""
    while path != "/" and not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        raise ConfigError(f"{key} is not a folder", path=path, remedy=f"Remove the file, or set {key} to a folder")
    return path


def check_in_memory(key: str, path: str) -> None:
    """Refuse a folder on a disk: nothing is synced to it, and records must not outlive a boot, as groups do not.

    Raises ConfigError.
    """
    if (fstype := fstype_of(path)) not in ("tmpfs", "ramfs"):
        raise ConfigError(
            f"{key} is on {fstype or 'an unknown filesystem'}, not on tmpfs: values would be lost or outlive a boot",
            path=path,
            remedy=f"Set {key} to a folder in /run, or mount a tmpfs there",
        )


def give_to_group(folder: str, gid: int) -> None:
    """Give a folder, with all that this user owns in it, to a Unix group. Links are not followed.

    After a change of the key ``group`` the files of earlier starts still have the former group. The folder itself is
    the last: if it has the group, all below it have. Raises ResctrlError.
    """
    try:
        if os.lstat(folder).st_gid == gid:
            return
        waiting = [folder]
        while waiting:
            # An administrator may remove files meanwhile.
            with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        _give(entry.path, gid)
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
        _give(folder, gid)
    except OSError as error:
        raise ResctrlError(
            f"cannot give the file to the group id {gid}, which the key 'group' names",
            path=str(error.filename or folder),
            errno=error.errno or 0,
            remedy=f"Do it by hand: chgrp --recursive {gid} {folder}",
        ) from error


def _give(path: str, gid: int) -> None:
    found = os.lstat(path)
    # chown(2) refuses (EPERM) files of other users, because the daemon has no CAP_CHOWN.
    if found.st_gid != gid and found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
        os.chown(path, -1, gid, follow_symlinks=False)


def _os_release() -> Mapping[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _set_group(gid: int) -> None:
    """Run with the group that marks monitoring groups: kernfs gives it to each directory of this process."""
    if os.getegid() == gid:
        return
    try:
        os.setegid(gid)
    except OSError as error:
        # EINVAL: the id does not exist in the user namespace of the unit, which has 65536 ids.
        raise PermissionDenied(
            f"cannot run with the group id {gid}, which marks the monitoring groups of resctrlmond",
            errno=error.errno or 0,
            remedy="Start resctrlmond as root, or with Group= in its unit (one above 65535 needs PrivateUsers=no)",
        ) from error


def _lock(runtime_dir: str, *, is_service: bool) -> int:
    """Lock the runtime folder for the lifetime of this process; return the descriptor."""
    os.makedirs(runtime_dir, 0o755, exist_ok=True)
    path = os.path.join(runtime_dir, "lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StartupError(
            ResctrlError(
                "another resctrlmond is running and owns this folder",
                path=path,
                remedy="Use that daemon, or stop it "
                + ("(systemctl stop resctrlmond)" if is_service else "with Ctrl-C or SIGTERM"),
            ),
            Exit.ALREADY_RUNNING,
        ) from error
    return fd
