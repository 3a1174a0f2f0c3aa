# SPDX-License-Identifier: Apache-2.0
"""Find out whether other users can change what a path leads to, as OpenSSH and systemd do for their files."""

from __future__ import annotations

import grp
import os
import pwd
import stat

# path_resolution(7): the kernel follows at most 40 links.
_MAX_LINKS = 40


def unsafe_part(path: str) -> tuple[str, str] | None:
    """Return the first part of an absolute path that another user can change, with the reason; None if none can be.

    Every directory and link from ``/`` on, and from the target of each link on, must belong to root or to this
    process's user. Others may write to a directory on the way only if it is sticky, as /tmp is: there they can
    neither remove nor rename entries of other users. They must not have write access to the last one. The path may
    end in parts that do not exist. Raises OSError for other errors.
    """
    at, rest, links = "/", path.split("/")[::-1], 0
    while rest:
        name = rest.pop()
        if name in ("", "."):
            continue
        if name == "..":
            at = os.path.dirname(at)
            continue
        at = os.path.join(at, name)
        try:
            if (reason := _unsafe(at)) is not None:
                return at, reason
            target = os.readlink(at) if os.path.islink(at) else None
        except FileNotFoundError:
            return None
        if target is not None:
            links += 1
            if links > _MAX_LINKS:
                return at, "is one of too many links"
            at = "/" if target.startswith("/") else os.path.dirname(at)
            rest += target.split("/")[::-1]
    writable = _writable_by(os.lstat(at))
    return None if writable is None else (at, f"can be written by {writable}")


def _unsafe(path: str) -> str | None:
    """Return why other users can change a file or directory, links not followed; None if they cannot."""
    found = os.lstat(path)
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to the user {_user_name(found.st_uid)}"
    # A link has no mode of its own.
    if not stat.S_ISLNK(found.st_mode) and not found.st_mode & stat.S_ISVTX and (others := _writable_by(found)):
        return f"can be written by {others}"
    return None


def _writable_by(found: os.stat_result) -> str | None:
    """Return the other users that can write to a file or directory; None if there are none."""
    if found.st_mode & stat.S_IWOTH:
        return "all users"
    if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
        return f"the group {_group_name(found.st_gid)}"
    return None


def _is_private(gid: int) -> bool:
    """Whether a group is root's, or has this process's user as its only member, as many distributions make one."""
    if gid == 0:
        return True
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
