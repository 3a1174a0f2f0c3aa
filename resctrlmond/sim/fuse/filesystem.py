# SPDX-License-Identifier: Apache-2.0
"""The model as a FUSE filesystem: paths, descriptors and permissions, which are not part of the model."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from resctrlmond.sim.control.orders import Orders
from resctrlmond.sim.host.procs import ProcTable
from resctrlmond.sim.host.virtual import VirtualTasks
from resctrlmond.sim.kernel.clock import Stopwatch
from resctrlmond.sim.kernel.model import Resctrl
from resctrlmond.sim.kernel.tree import READ, SEARCH, WRITE, Caller, Directory, File, Node, error, lookup
from resctrlmond.sim.messages import Operation

SIMULATION_ATTRIBUTE = "user.resctrlmond.simulation"
MODALIAS_ATTRIBUTE = "user.resctrlmond.modalias"
TASK_ATTRIBUTE = "user.resctrlmond.task."
INEXACT_ATTRIBUTE = "user.resctrlmond.inexact"
RMIDS_ATTRIBUTE = "user.resctrlmond.rmids"
MOST_WRITTEN = 4096  # kernfs' atomic_write_len, one page
_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2


@dataclasses.dataclass(slots=True)
class _Open:
    """An open file or directory. ``content`` is the result of the read at offset 0."""

    node: Node
    content: bytes = b""


class Filesystem:
    """The operations that mfusepy calls. Paths are absolute within the mount.

    ``context`` returns (fsuid, fsgid, thread ID) of the caller. Different threads may call all operations and
    ``poll``: one lock serializes them, like rdtgroup_mutex.
    """

    use_ns = True  # times are integers of nanoseconds

    def __init__(
        self,
        model: Resctrl,
        procs: ProcTable,
        context: Callable[[], tuple[int, int, int]],
        ready: Callable[[], None],
        virtual: tuple[VirtualTasks, Stopwatch] | None = None,
    ) -> None:
        self._model = model
        self._orders = Orders(model, virtual)
        self._procs = procs
        self._context = context
        self._ready = ready
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._next_handle = 1

    def poll(self) -> None:
        """Sample the tasks, so that short-lived children are seen between two requests."""
        # Do not wait long: a request may be slow because of a fault, and the polling thread also handles signals.
        if self._lock.acquire(timeout=0.1):
            try:
                self._model.accounting.poll()
            finally:
                self._lock.release()

    def init_with_config(self, _connection: Any, config: Any) -> None:
        """Configure the new mount. ``config`` is libfuse 3's ``struct fuse_config`` (fuse.h)."""
        config.direct_io = True  # files have data although their size is 0
        config.use_ino = True
        config.entry_timeout = config.attr_timeout = config.negative_timeout = 0.0
        # Open files are identified by their handle: those of a removed group have no path, and must get ENODEV.
        config.nullpath_ok = True
        # Without it, libfuse would rename an open file instead of an unlink, which must fail with EPERM.
        config.hard_remove = True
        self._ready()

    # -- callers and paths

    def _caller(self) -> Caller:
        uid, gid, tid = self._context()
        return Caller(uid, gid, tid, frozenset() if uid == 0 else self._procs.groups(tid))

    def _find(self, path: str) -> Node:
        return lookup(self._model.root, path, self._caller())

    def _find_owned(self, path: str) -> Node:
        """Return a node whose attributes the caller may change: only its owner and root may (EPERM)."""
        node = self._find(path)
        if self._context()[0] not in (0, node.uid):
            raise error(errno.EPERM)
        return node

    def _find_parent(self, path: str) -> tuple[Directory, str]:
        """Return the directory of ``path``, which the caller may change, and the last name.

        Raises EPERM for the hidden directory and in it.
        """
        above, _, name = path.rpartition("/")
        node = self._find(above)
        if not isinstance(node, Directory):
            raise error(errno.ENOTDIR)
        if not node.allows(self._caller(), WRITE | SEARCH):
            raise error(errno.EACCES)
        if node.is_hidden or (name in node.children and node.children[name].is_hidden):
            raise error(errno.EPERM)
        return node, name

    def _opened(self, node: Node) -> int:
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._open[handle] = _Open(node)
        return handle

    # Attributes

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
        """stat(2)."""
        with self._lock:
            node = self._open[fh].node if path is None and fh is not None else self._find(path or "/")
            return node.attributes()

    def access(self, path: str, amode: int) -> int:
        """access(2)."""
        with self._lock:
            if not self._find(path).allows(self._caller(), amode & 7):
                raise error(errno.EACCES)
            return 0

    def chmod(self, path: str, mode: int) -> int:
        """Implement chmod(2); the mode is kept for the life of the node."""
        with self._lock:
            node = self._find_owned(path)
            node.mode = mode & 0o7777
            node.ctime_ns = self._model.clock.wall_ns()
            node.has_times = True
            return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        """Implement chown(2), for root; -1 does not change an ID."""
        with self._lock:
            node = self._find(path)
            if self._context()[0] != 0:
                raise error(errno.EPERM)
            node.uid = node.uid if uid == -1 else uid
            node.gid = node.gid if gid == -1 else gid
            node.ctime_ns = self._model.clock.wall_ns()
            node.has_times = True
            return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        """Implement utimensat(2): the mtime of a group's directory is kept, also over rename."""
        with self._lock:
            node = self._find_owned(path)
            now = self._model.clock.wall_ns()
            atime, mtime = times or (now, now)
            chosen = {_UTIME_NOW: now}
            if atime != _UTIME_OMIT:
                node.atime_ns = chosen.get(atime, atime)
            if mtime != _UTIME_OMIT:
                node.mtime_ns = chosen.get(mtime, mtime)
            node.ctime_ns = now
            node.has_times = True
            return 0

    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:  # noqa: ARG002
        """Implement truncate(2) and O_TRUNC: accepted without effect."""
        return 0

    def statfs(self, _path: str) -> dict[str, int]:
        """Implement statfs(2): no blocks and no inodes, like every kernfs."""
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 255}

    # -- extended attributes, which are not part of resctrl itself

    def getxattr(self, path: str, name: str, _position: int = 0) -> bytes:
        """Return an attribute of the root directory; the page resctrlmond-sim(1) lists them."""
        with self._lock:
            if path != "/" or not name.startswith("user.resctrlmond."):
                raise error(errno.EOPNOTSUPP)
            if name == SIMULATION_ATTRIBUTE:
                return self._model.profile.name.encode()
            if name == MODALIAS_ATTRIBUTE:
                return f"cpu:type:x86,ven{self._model.profile.vendor}fam0006mod0001:feature:\n".encode()
            if name == INEXACT_ATTRIBUTE:
                return self._model.inexact.encode()
            if name == RMIDS_ATTRIBUTE:
                return self._model.rmid_counts().encode()
            if (value := self._orders.get(name)) is not None:
                return value
            tid = name.removeprefix(TASK_ATTRIBUTE)
            groups = self._model.task_groups(int(tid)) if tid.isascii() and tid.isdigit() else None
            if groups is None:
                raise error(errno.ENODATA)
            return groups.encode(errors="surrogateescape")

    def listxattr(self, path: str) -> list[str]:
        """List only the attribute that marks the root of a simulation."""
        return [SIMULATION_ATTRIBUTE] if path == "/" else []

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> int:  # noqa: ARG002
        """Run an order to the root directory, for root only."""
        with self._lock:
            if path != "/":
                raise error(errno.EOPNOTSUPP)
            if self._context()[0] != 0:
                raise error(errno.EPERM)
            self._orders.set(name, value)
            return 0

    def removexattr(self, path: str, name: str) -> int:  # noqa: ARG002
        """Refuse: this is not simulated."""
        raise error(errno.EOPNOTSUPP)

    # Directories

    def opendir(self, path: str) -> int:
        """opendir(3)."""
        with self._lock:
            node = self._find(path)
            if not node.allows(self._caller(), READ):
                raise error(errno.EACCES)
            return self._opened(node)

    def readdir(self, _path: str | None, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """readdir(3)."""
        with self._lock:
            node = self._open[fh].node
            assert isinstance(node, Directory), "opendir() is for directories"
            entries = [(".", node), ("..", node.parent or node), *((n.name, n) for n in node.listing())]
            return iter([(name, entry.attributes(), 0) for name, entry in entries])

    def releasedir(self, path: str | None, fh: int) -> int:
        """closedir(3)."""
        return self.release(path, fh)

    def mkdir(self, path: str, mode: int) -> int:
        """Create a group; the kernel has applied the umask to ``mode``."""
        with self._lock:
            parent, name = self._find_parent(path)
            self._model.faults.strike(Operation.MKDIR, path.lstrip("/"))
            self._model.mkdir(parent, name, mode, self._caller())
            return 0

    def rmdir(self, path: str) -> int:
        """Remove a group with everything in it."""
        with self._lock:
            self._find_parent(path)
            self._model.faults.strike(Operation.RMDIR, path.lstrip("/"))
            self._model.rmdir(self._find(path), self._caller())
            return 0

    def rename(self, old: str, new: str) -> int:
        """Rename or move a group."""
        with self._lock:
            self._find_parent(old)
            target, name = self._find_parent(new)
            self._model.rename(self._find(old), target, name)
            return 0

    # -- files cannot be created or removed

    def create(self, path: str, mode: int, flags: int) -> int:  # noqa: ARG002
        """Refuse open(2) with O_CREAT of a name that does not exist."""
        raise error(errno.EACCES)

    def mknod(self, path: str, mode: int, dev: int) -> int:  # noqa: ARG002
        """mknod(2)."""
        raise error(errno.EPERM)

    def unlink(self, _path: str) -> int:
        """unlink(2)."""
        raise error(errno.EPERM)

    def symlink(self, target: str, source: str) -> int:  # noqa: ARG002
        """symlink(2)."""
        raise error(errno.EPERM)

    def link(self, target: str, source: str) -> int:  # noqa: ARG002
        """link(2)."""
        raise error(errno.EPERM)

    # -- open files

    def open(self, path: str, flags: int) -> int:
        """Open a file: check the mode bits, which root passes, and then kernfs' own check, which no user passes."""
        with self._lock:
            node = self._find(path)
            access = flags & os.O_ACCMODE
            want = (READ if access != os.O_WRONLY else 0) | (WRITE if access != os.O_RDONLY else 0)
            if not node.allows(self._caller(), want):
                raise error(errno.EACCES)
            if isinstance(node, File):
                node.check_open(flags)
            return self._opened(node)

    def release(self, _path: str | None, fh: int) -> int:
        """Close the last descriptor of an open file."""
        with self._lock:
            self._open.pop(fh, None)
            return 0

    def read(self, _path: str | None, size: int, offset: int, fh: int) -> bytes:
        """Read a file: offset 0 creates the content, others continue in it. ENODEV if the group was removed."""
        with self._lock:
            opened = self._open[fh]
            if opened.node.removed:
                raise error(errno.ENODEV)
            assert isinstance(opened.node, File), "read() is for files"
            if offset == 0:
                self._model.reader = self._context()[2]
                opened.content = opened.node.show().encode(errors="surrogateescape")
            return opened.content[offset : offset + size]

    def write(self, _path: str | None, data: bytes, _offset: int, fh: int) -> int:
        """Write a file: each call is one command, at any offset; E2BIG for more than 4096 bytes."""
        with self._lock:
            node = self._open[fh].node
            if len(data) > MOST_WRITTEN:
                raise error(errno.E2BIG)
            if node.removed:
                raise error(errno.ENODEV)
            assert isinstance(node, File), "write() is for files"
            self._model.write(node, self._caller(), data.decode(errors="surrogateescape"))
            return len(data)
