# SPDX-License-Identifier: Apache-2.0
"""The examined machine: its files below a root directory, and its programs."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
from dataclasses import dataclass

from resctrlctl.base.defaults import SOCKET
from resctrlmond.resctrl.mounts import Mount, parse

_PROGRAMS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# __SO_ACCEPTCON in the column Flags of /proc/net/unix.
_ACCEPTS_CONNECTIONS = "00010000"
# systemctl waits for the bus, which may hang.
_TIMEOUT_S = 10.0
# Longer than any record of the kernel's log (PRINTK_MESSAGE_MAX).
_RECORD_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Host:
    """A machine whose files are below ``root``. ``socket`` is the socket of resctrlmond; "" for that of the machine.

    A file that does not exist reads as "". All methods raise OSError for a file that exists and cannot be read.
    """

    root: str = "/"
    socket: str = ""

    def path(self, path: str) -> str:
        """Return the place of an absolute path of the machine."""
        return self.root.rstrip("/") + path

    @property
    def daemon_socket(self) -> str:
        """The path of the socket of resctrlmond."""
        return self.socket or self.path(SOCKET)

    def read(self, path: str) -> str:
        """Return the text of a file; "" if it does not exist."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """Return the names in a directory that match a pattern of the shell; [] if it does not exist."""
        try:
            return sorted(fnmatch.filter(os.listdir(self.path(folder)), pattern))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: str) -> bool:
        """Return whether a file exists."""
        return os.path.exists(self.path(path))

    def program(self, name: str) -> str:
        """Return the path of an installed program; "" if it is not installed."""
        return next((f"{folder}/{name}" for folder in _PROGRAMS if self.is_executable(f"{folder}/{name}")), "")

    def is_executable(self, path: str) -> bool:
        """Return whether a file is an executable program."""
        found = self.path(path)
        return os.access(found, os.X_OK) and not os.path.isdir(found)

    def is_listening(self, path: str) -> bool:
        """Return whether a process listens on a socket in /run. Its file may remain when the process has ended."""
        # Num RefCount Protocol Flags Type St Inode Path; the path is as the process wrote it.
        rows = (line.split(maxsplit=7) for line in self.read("/proc/net/unix").splitlines())
        listening = {row[7] for row in rows if len(row) == 8 and row[3] == _ACCEPTS_CONNECTIONS}
        return not listening.isdisjoint({path, f"/var{path}"})

    def run(self, name: str, *arguments: str) -> str | None:
        """Return the output of a program; None if it is not installed or fails."""
        program = self.program(name)
        if not program:
            return None
        try:
            done = subprocess.run(
                [self.path(program), *arguments],
                env=os.environ | {"LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode("utf-8", "replace")

    def mounts(self) -> list[Mount]:
        """Return the mounts in the order of creation."""
        lines = self.read("/proc/self/mountinfo").split("\n")
        return [parse(line) for line in lines if line]

    def kernel_log(self) -> tuple[str, bool]:
        """Return the messages of the kernel, and whether those of its start are among them."""
        # Each read of the device returns one record: "priority,number,time,flags;text" and lines that begin with a
        # space (Documentation/ABI/testing/dev-kmsg).
        descriptor = os.open(self.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        records = []
        try:
            while True:
                try:
                    record = os.read(descriptor, _RECORD_BYTES)
                except BlockingIOError:
                    break
                except BrokenPipeError:  # the kernel overwrote the record that was next
                    continue
                if not record:
                    break
                records.append(record)
        finally:
            os.close(descriptor)
        text = b"".join(records).decode("utf-8", "replace")
        first = re.match(r"\d+,(\d+),", text)
        return text, first is not None and first[1] == "0"
