# SPDX-License-Identifier: Apache-2.0
"""The folders of companions: one for each workload that has one, with its configuration file and the name of its run.

Only root can read them (0700, files 0600). No link is followed: each name is opened relative to its folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from resctrlmond.workloads.records.atomic_files import remove_tree

FOLDER = "companions"
# Written last: a folder without it is not complete.
_RUN = ".run"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST_RUN = 64


class CompanionFiles:
    """The folders below the folder of the daemon. All methods raise OSError."""

    def __init__(self, runtime_dir: str) -> None:
        self._parent = runtime_dir
        self.folder = f"{runtime_dir}/{FOLDER}"

    def path(self, key: str) -> str:
        """Return the folder of a workload's companion. It need not exist."""
        return f"{self.folder}/{key}"

    @property
    def exists(self) -> bool:
        """Whether there is a folder for companions: a companion may run."""
        return os.path.lexists(self.folder)

    def runs(self) -> dict[str, str]:
        """Return the run of each folder by its key; "" for a folder that is not complete."""
        found = {}
        with contextlib.suppress(FileNotFoundError), self._opened() as top:
            for key in os.listdir(top):
                found[key] = _run_in(top, key)
        return found

    def write(self, key: str, run: str, name: str, text: str | None) -> None:
        """Create the folder of a companion anew, with a file of that name if there is a text."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        with self._opened() as top:
            _remove(top, key)
            os.mkdir(key, 0o700, dir_fd=top)
            with _opened(key, top) as folder:
                if text is not None:
                    _write(folder, name, text.encode())
                _write(folder, _RUN, run.encode())

    def remove(self, key: str) -> None:
        """Remove the folder of a companion, and with the last one the folder for all."""
        with contextlib.suppress(FileNotFoundError):
            with self._opened() as top:
                _remove(top, key)
            try:
                os.rmdir(self.folder)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        with _opened(self.folder) as top:
            yield top


@contextlib.contextmanager
def _opened(name: str, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(name, _OPEN_FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _run_in(top: int, key: str) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError), _opened(key, top) as folder:
        descriptor = os.open(_RUN, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            return os.read(descriptor, _LONGEST_RUN).decode()
        finally:
            os.close(descriptor)
    return ""


def _write(folder: int, name: str, data: bytes) -> None:
    """Write a file under a temporary name, and rename it."""
    temporary = f".{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    with open(descriptor, "wb") as file:
        file.write(data)
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _remove(top: int, key: str) -> None:
    try:
        if stat.S_ISDIR(os.stat(key, dir_fd=top, follow_symlinks=False).st_mode):
            remove_tree(key, dir_fd=top)
        else:
            os.unlink(key, dir_fd=top)
    except FileNotFoundError:
        pass
