# SPDX-License-Identifier: Apache-2.0
"""Directories and files as kernfs keeps them: owner, mode and times stay for the life of a node, sizes are 0."""

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
    """Who makes a system call: fsuid, fsgid, the calling thread's id, and the supplementary groups."""

    uid: int
    gid: int
    tid: int
    groups: frozenset[int] = frozenset()


def error(number: int) -> OSError:
    """The ``OSError`` of that errno."""
    return OSError(number, os.strerror(number))


class Node:
    """What files and directories share. ``removed`` nodes answer ENODEV to whoever still holds them open."""

    kind = 0

    def __init__(self, name: str, mode: int, owner: tuple[int, int], now_ns: int) -> None:
        self.name = name
        self.mode = mode
        self.uid, self.gid = owner
        self.atime_ns = self.mtime_ns = self.ctime_ns = now_ns
        self.inode = next(_inode_numbers)
        self.parent: Directory | None = None
        self.removed = False

    @property
    def links(self) -> int:
        """``st_nlink``."""
        return 1

    def attributes(self) -> dict[str, int]:
        """What stat(2) says, times in nanoseconds."""
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

        In a simulation that a plain user runs for himself, he has that power: nobody else reaches it.
        """
        if caller.uid in (0, _RUNS_IT):
            # CAP_DAC_OVERRIDE executes a file only if somebody may.
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
    """A file that is made when it is read: ``show`` gives the whole content, ``store`` takes one command.

    None means that the file has no such operation at all. ``store`` raises ``OSError``.
    """

    kind = stat.S_IFREG

    def __init__(
        self, name: str, mode: int, owner: tuple[int, int], now_ns: int, *, show: Show, store: Store | None
    ) -> None:
        super().__init__(name, mode, owner, now_ns)
        self.show = show
        self.store = store

    def check_open(self, flags: int) -> None:
        """KERNFS_ROOT_EXTRA_OPEN_PERM_CHECK: even root opens for writing only what anybody may write (EACCES)."""
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
        return 2 + sum(isinstance(child, Directory) for child in self.children.values())

    def add(self, child: Node) -> None:
        """Hangs ``child`` in here; the directory's mtime is the child's birth."""
        child.parent = self
        self.children[child.name] = child
        self.mtime_ns = self.ctime_ns = child.ctime_ns

    def detach(self, child: Node, now_ns: int) -> None:
        """Takes ``child`` out, alive."""
        del self.children[child.name]
        child.parent = None
        self.mtime_ns = self.ctime_ns = now_ns

    def remove(self, child: Node, now_ns: int) -> None:
        """Takes ``child`` out for ever, with all that is in it."""
        self.detach(child, now_ns)
        for node in walk(child):
            node.removed = True

    def listing(self) -> list[Node]:
        """The children in the order readdir(3) gives them: by a hash of the name, not by age or alphabet."""
        return sorted(self.children.values(), key=lambda node: zlib.crc32(node.name.encode(errors="surrogateescape")))


def walk(node: Node) -> Iterator[Node]:
    """``node`` and everything below it."""
    yield node
    if isinstance(node, Directory):
        for child in node.children.values():
            yield from walk(child)


def lookup(root: Directory, path: str, caller: Caller) -> Node:
    """The node at an absolute path. Raises ENOENT, ENOTDIR, or EACCES where a directory may not be searched."""
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
