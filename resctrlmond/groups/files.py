# SPDX-License-Identifier: Apache-2.0
"""Small files that are whole or not there: written to a temporary name and renamed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from resctrlmond.groups.errors import NotWritten
from resctrlmond.resctrl.errors import LACKS, not_read, remedy_for, undoing

# A record or snapshot file is a few kilobytes; what is larger was not written by us.
_LIMIT = 4 * 1024 * 1024
_TOO_LARGE = (
    "This is a bug in resctrlmond, which should have refused the request that made the file too large: report it"
)
_NO_ROOM = "Check that /run is writable and has free space and inodes: df /run, df -i /run"
_IN_THE_WAY = "Somebody put something else in the place of a file of resctrlmond: move it away"
_REMEDIES = {
    errno.ENOENT: "Somebody removed a directory of resctrlmond: 'systemctl restart resctrlmond' creates it again",
    errno.EFBIG: _TOO_LARGE,
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ELOOP), _IN_THE_WAY),
}


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn what goes wrong with our own files in here into NotWritten; ``path`` is where, if the error says none."""
    try:
        yield
    except OSError as error:
        raise NotWritten(
            "cannot write the state of a workload",
            path=str(error.filename or path),
            errno=error.errno or 0,
            remedy=remedy_for(error.errno or 0) or _REMEDIES.get(error.errno or 0, _NO_ROOM),
        ) from error


def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Put ``data`` at ``path`` in one step, with exactly that mode. Raises OSError, and leaves nothing then.

    What ``read_file`` would refuse for its size is not written (EFBIG): it would be lost at the next start.

    The folder is in /run, a tmpfs that lives as long as resctrl does: a crash of the machine empties both, so there
    is nothing to fsync for. The temporary name starts with a dot, which no key does.
    """
    if len(data) > _LIMIT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        # Where there is no space left, half a file is in the way of the next one.
        with undoing(path):
            os.unlink(temporary)
        raise


def read_file(path: str) -> bytes:
    """Read a whole file that is no link and not absurdly large; OSError says what else it is.

    Raises NotRead where the fault is not the file's: what it holds is not known then, and not to be guessed.
    """
    try:
        return _read_file(path)
    except OSError as error:
        if error.errno in LACKS or error.errno == errno.EIO:
            raise not_read(error, "read the saved state of a workload", path) from error
        raise


def _read_file(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        chunks = []
        size = 0
        while chunk := os.read(fd, 1 << 20):
            size += len(chunk)
            if size > _LIMIT:
                raise OSError(errno.EFBIG, "larger than any file of resctrlmond", path)
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)
