# SPDX-License-Identifier: Apache-2.0
"""Create a listening unix socket at a path, or accept the sockets that systemd passes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator

# The kernel cuts it to net.core.somaxconn, which is 4096 by default.
BACKLOG = 4096

# The first descriptor that systemd passes (sd_listen_fds(3), SD_LISTEN_FDS_START).
_FIRST_PASSED = 3

# include/uapi/linux/posix_acl.h and posix_acl_xattr.h: the tags of entries in their order, and the ID of entries
# without one.
_USER_OBJ, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_READ_WRITE = 6


class AddressInUse(OSError):
    """Another server listens on the path, or the path is not a socket."""


def listen(path: str, mode: int = 0o660, gid: int = -1) -> socket.socket:
    """Create a listening stream socket at ``path`` with the given mode and group (-1: the group of the process).

    Replaces a socket file on which no process listens any more. The socket never has more rights than ``mode``,
    because it is created without rights for the group and others. A lock file beside the socket, which is kept,
    excludes other processes that do the same. Raises AddressInUse, or OSError with the path. The caller owns the
    socket and its file.
    """
    with _locked(f"{path}.lock"):
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound = False
        try:
            # The file gets the mode of the socket's inode (net/unix/af_unix.c, unix_bind_bsd()). The umask would
            # affect other threads.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(path)
            bound = True
            os.chown(path, -1, gid, follow_symlinks=False)
            os.chmod(path, mode)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if bound:
                os.unlink(path)
            # Python raises OSError without an errno for a path that is too long.
            number = error.errno or errno.ENAMETOOLONG
            raise OSError(number, f"cannot listen: {error.strerror or error}", path) from error
        return listener


def let_connect(path: str, gid: int) -> None:
    """Let the members of one more Unix group connect to the socket at ``path``, which stays that of its own group.

    Replaces the access control list of the file. Raises OSError, for example if the file system has no such lists.
    """
    entries = [
        (_USER_OBJ, _READ_WRITE, _NO_ID),
        (_GROUP_OBJ, _READ_WRITE, _NO_ID),
        (_GROUP, _READ_WRITE, gid),
        (_MASK, _READ_WRITE, _NO_ID),
        (_OTHER, 0, _NO_ID),
    ]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, "system.posix_acl_access", acl, follow_symlinks=False)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    # Not the directory itself: every user that can open it could lock it, and block the daemon for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressInUse(errno.EADDRINUSE, "not a socket; remove it", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # EAGAIN at once: the backlog of the listener is full.
        probe.setblocking(False)
        answer = probe.connect_ex(path)
    if answer != errno.ECONNREFUSED:
        remedy = "stop the server that listens there, or choose another path"
        raise AddressInUse(errno.EADDRINUSE, f"in use; {remedy}", path)
    os.unlink(path)


def passed_sockets() -> dict[str, socket.socket]:
    """Return the sockets of ``passed_listeners`` by their names. Raises ValueError also if a name is not unique."""
    passed = passed_listeners()
    listed = [name for name, _ in passed]
    if len(set(listed)) != len(listed):
        for _, listener in passed:
            listener.close()
        remedy = "give each socket unit a FileDescriptorName= of its own"
        raise ValueError(f"systemd passed two sockets with the same name ({', '.join(listed)}); {remedy}")
    return dict(passed)


def passed_listeners() -> list[tuple[str, socket.socket]]:
    """Return the sockets that systemd passed to this process, each with its ``FileDescriptorName=``.

    All sockets of one unit have the same name (sd_listen_fds(3)). Returns [] if none were passed to this process.
    Removes the variables from the environment, so that no child
    process uses them. Child processes do not inherit the sockets, and the caller owns them. Their backlog is
    ``Backlog=`` of the socket unit: do not call ``listen``. Raises ValueError if the variables are not valid.
    """
    pid, count, names = (os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    os.environ.pop("LISTEN_PIDFDID", None)
    if pid != str(os.getpid()) or not count:
        return []
    if not count.isdecimal():
        raise ValueError(f"LISTEN_FDS={count!r} is not a number of descriptors; start the service by its socket unit")
    listed = names.split(":") if names else ["unknown"] * int(count)
    if len(listed) != int(count):
        raise ValueError(f"LISTEN_FDNAMES={names!r} does not name LISTEN_FDS={count} descriptors")
    return [(name, _adopt(_FIRST_PASSED + index, name)) for index, name in enumerate(listed)]


def _adopt(descriptor: int, name: str) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        listener = socket.socket(fileno=descriptor)
        if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return listener
        problem = "does not listen"
    except OSError as error:
        problem = f"cannot be used: {error.strerror}"
    remedy = "set ListenStream= and Accept=no in the socket unit"
    raise ValueError(f"the descriptor {descriptor} ({name}) that systemd passed {problem}; {remedy}")
