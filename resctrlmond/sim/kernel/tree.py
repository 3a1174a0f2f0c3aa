# SPDX-License-Identifier: Apache-2.0
"""Directories and files as in kernfs: owner, mode and times are kept for the life of a node, sizes are 0."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import stat
import zlib
from collections.abc import Callable, Iterator

READ, WRITE, SEARCH = 4, 2, 1

_inode_numbers = itertools.count(2)
_RUNS_IT = os.geteuid()


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a system call: fsuid, fsgid, thread ID, and supplementary groups."""

    uid: int
    gid: int
    tid: int
    groups: frozenset[int] = frozenset()


def error(number: int) -> OSError:
    """Return the ``OSError`` of that errno."""
    return OSError(number, os.strerror(number))


class Node:
    """A file or directory. ``removed`` nodes return ENODEV to processes that have them open."""

    kind = 0

    def __init__(self, name: str, mode: int, owner: tuple[int, int], now_ns: int) -> None:
        self.name = name
        self.mode = mode
        self.uid, self.gid = owner
        self.atime_ns = self.mtime_ns = self.ctime_ns = now_ns
        # kernfs has times for a node if its owner is not root, or once its attributes were set (kernfs_add_one() and
        # kernfs_setattr()).
        self.has_times = owner != (0, 0)
        self.inode = next(_inode_numbers)
        self.parent: Directory | None = None
        self.removed = False
        self.is_hidden = False  # found by its name, but not listed

    @property
    def links(self) -> int:
        """``st_nlink``."""
        return 1

    def attributes(self) -> dict[str, int]:
        """Return the result of stat(2), with times in nanoseconds."""
        return {
            "st_mode": self.kind | self.mode,
            "st_ino": self.inode,
            "st_nlink": self.links,
            "st_uid": self.uid,
            "st_gid": self.gid,
            "st_size": 0,
            "st_atime": self.atime_ns,
            "st_mtime": self.mtime_ns,
            "st_ctime": self.ctime_ns,
        }

    def allows(self, caller: Caller, want: int) -> bool:
        """Whether the mode bits, or root's power to override them, grant ``want`` (READ | WRITE | SEARCH).

        The user of a simulation without root has that power: no other user can access it.
        """
        if caller.uid in (0, _RUNS_IT):
            # CAP_DAC_OVERRIDE executes a file only if a mode bit allows it for some user.
            return bool(not want & SEARCH or stat.S_ISDIR(self.kind) or self.mode & 0o111)
        if caller.uid == self.uid:
            granted = self.mode >> 6
        elif self.gid == caller.gid or self.gid in caller.groups:
            granted = self.mode >> 3
        else:
            granted = self.mode
        return want & ~granted & 7 == 0


Show = Callable[[], str]
Store = Callable[[Caller, str], None]


class File(Node):
    """A file that is created at each read: ``show`` returns the whole content, ``store`` takes one command.

    None means that the file has no such operation. ``store`` raises ``OSError``.
    """

    kind = stat.S_IFREG

    def __init__(
        self, name: str, mode: int, owner: tuple[int, int], now_ns: int, *, show: Show, store: Store | None
    ) -> None:
        super().__init__(name, mode, owner, now_ns)
        self.show = show
        self.store = store

    def check_open(self, flags: int) -> None:
        """Refuse root too if the mode bits allow no user to write (EACCES, KERNFS_ROOT_EXTRA_OPEN_PERM_CHECK)."""
        access = flags & os.O_ACCMODE
        if access != os.O_RDONLY and (not self.mode & 0o222 or self.store is None):
            raise error(errno.EACCES)
        if access != os.O_WRONLY and not self.mode & 0o444:
            raise error(errno.EACCES)


class Directory(Node):
    """A directory; ``children`` by name."""

    kind = stat.S_IFDIR

    def __init__(self, name: str, mode: int, owner: tuple[int, int], now_ns: int) -> None:
        super().__init__(name, mode, owner, now_ns)
        self.children: dict[str, Node] = {}

    @property
    def links(self) -> int:
        return 2 + sum(isinstance(child, Directory) and not child.is_hidden for child in self.children.values())

    def add(self, child: Node) -> None:
        """Add ``child``; its birth becomes the mtime of a directory that has times."""
        child.parent = self
        self.children[child.name] = child
        if self.has_times:
            self.mtime_ns = self.ctime_ns = child.ctime_ns

    def detach(self, child: Node, now_ns: int) -> None:
        """Take ``child`` out without removing it."""
        del self.children[child.name]
        child.parent = None
        if self.has_times:
            self.mtime_ns = self.ctime_ns = now_ns

    def remove(self, child: Node, now_ns: int) -> None:
        """Remove ``child`` with everything in it."""
        self.detach(child, now_ns)
        for node in walk(child):
            node.removed = True

    def listing(self) -> list[Node]:
        """Return the children in the order of readdir(3): by a hash of the name, not by age or alphabet."""
        listed = (node for node in self.children.values() if not node.is_hidden)
        return sorted(listed, key=lambda node: zlib.crc32(node.name.encode(errors="surrogateescape")))


def walk(node: Node) -> Iterator[Node]:
    """Yield ``node`` and everything below it."""
    yield node
    if isinstance(node, Directory):
        for child in node.children.values():
            yield from walk(child)


def lookup(root: Directory, path: str, caller: Caller) -> Node:
    """Return the node at an absolute path. Raises ENOENT, ENOTDIR, or EACCES if a directory may not be searched."""
    node: Node = root
    for name in path.split("/"):
        if not name:
            continue
        if not isinstance(node, Directory):
            raise error(errno.ENOTDIR)
        if not node.allows(caller, SEARCH):
            raise error(errno.EACCES)
        if name not in node.children:
            raise error(errno.ENOENT)
        node = node.children[name]
    return node
