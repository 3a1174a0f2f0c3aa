# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of small files, each written under a temporary name and then renamed; removal of folders."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from resctrlmond.resctrl.errors import LACKS, Converted, not_read, remedy_for
from resctrlmond.resctrl.undo import undoing
from resctrlmond.workloads.model.errors import NotWritten

# A record or snapshot file has a few kilobytes: the daemon does not write a larger one, unless the caller knows why.
_LIMIT = 4 * 1024 * 1024
_CHUNK = 64 * 1024
# A read of less than a page is the whole file: an error comes in the place of a page.
_PAGE = 4096
_TOO_LARGE = (
    "This is a bug in resctrlmond, which should have refused the request that made the file too large: report it"
)
_NO_ROOM = "Check that its filesystem is writable and has free space and inodes: df and df -i show this"
_IN_THE_WAY = "Something else was put in the place of a file of resctrlmond: move it away"
_REMEDIES = {
    errno.ENOENT: "A directory of resctrlmond was removed: 'systemctl restart resctrlmond' creates it again",
    errno.EFBIG: _TOO_LARGE,
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ELOOP), _IN_THE_WAY),
}


# The mode bits that the process's umask removes; None if they are unknown.
_umask: int | None = None


def set_umask(mask: int) -> None:
    """Set the umask of the process. Files whose mode has none of its bits are then created with their mode."""
    global _umask  # noqa: PLW0603 - one for the process, as the umask
    os.umask(mask)
    _umask = mask


def writing(path: str) -> Converted:
    """Convert an OSError of the block to NotWritten. ``path`` is reported if the error does not name a file."""
    return Converted(_not_written, path)


def _not_written(error: OSError, path: str) -> NotWritten:
    return NotWritten(
        "cannot write the state of a workload",
        path=str(error.filename or path),
        errno=error.errno or 0,
        remedy=remedy_for(error.errno or 0) or _REMEDIES.get(error.errno or 0, _NO_ROOM),
    )


def write_file(path: str, data: bytes, mode: int = 0o644, *, is_new: bool = False, limit: int = _LIMIT) -> None:
    """Replace the file ``path`` in one step by a file with the content ``data`` and exactly the mode ``mode``.

    Raises OSError: the file ``path`` is unchanged then, and the temporary file is removed. Data that is too large for
    ``read_file`` is rejected (EFBIG), because the daemon could not read it at its next start.

    There is no fsync, because the folder is in /run, a tmpfs: a crash of the machine empties it together with
    resctrl. The name of the temporary file starts with a dot, which a key cannot start with. ``is_new``: write the
    file without a temporary name, because it is in a folder that is renamed as a whole later.
    """
    if len(data) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    if is_new:
        temporary = path
    else:
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.new"
    fd = _create(temporary, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if _umask is None or mode & _umask:
                os.fchmod(fd, mode)
        finally:
            os.close(fd)
        if not is_new:
            os.rename(temporary, path)
    except OSError:
        # After ENOSPC, a partial file takes space that the next write needs.
        with undoing(path):
            os.unlink(temporary)
        raise


def _create(path: str, mode: int) -> int:
    """Create a file, and return its descriptor. What a crash has left there is removed: its mode may differ."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, mode)


def read_file(path: str, limit: int = _LIMIT) -> bytes:
    """Return the whole content of a file. Raises OSError if it is missing, a link, a folder or too large.

    Raises NotRead if the error is not a property of the file (for example EMFILE or EIO): the content is unknown
    then, and the caller must not replace it by a default.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            content = chunk = os.read(fd, _CHUNK)
            while len(chunk) >= _PAGE:
                chunk = os.read(fd, _CHUNK)
                content += chunk
                if len(content) > limit:
                    raise OSError(errno.EFBIG, "larger than any file of resctrlmond", path)
            return content
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in LACKS or error.errno == errno.EIO:
            raise not_read(error, "read the saved state of a workload", path) from error
        raise


def read_text(path: str) -> str:
    """Return the text of a file without the end of its line; "" if it is missing. Raises NotRead."""
    try:
        return read_file(path).decode("ascii", "replace").strip()
    except OSError:
        return ""


def make_folders(path: str, mode: int) -> None:
    """Create a folder and its missing parents, all with that mode (os.makedirs() sets it on the last only)."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folders(os.path.dirname(path), mode)
        os.mkdir(path, mode)


def remove(path: str) -> None:
    """Remove a folder with its content, or a file that was put in its place, if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            remove_tree(path)
        else:
            os.unlink(path)


def remove_tree(path: str, *, dir_fd: int | None = None) -> None:
    """Remove a directory with its content. Links are removed, and not followed. Raises OSError.

    As shutil.rmtree() does, whose module loads the formats of archives: 0.8 MiB.
    """
    for _, folders, files, folder in os.fwalk(path, topdown=False, onerror=_fail, dir_fd=dir_fd):
        for name in files:
            os.unlink(name, dir_fd=folder)
        for name in folders:
            try:
                os.rmdir(name, dir_fd=folder)
            except NotADirectoryError:  # a link to a directory
                os.unlink(name, dir_fd=folder)
    os.rmdir(path, dir_fd=dir_fd)


def _fail(error: OSError) -> None:
    raise error
