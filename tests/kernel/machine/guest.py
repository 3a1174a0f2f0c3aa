# SPDX-License-Identifier: Apache-2.0
"""A running guest: run commands in it, copy files into it, and read its files."""

from __future__ import annotations

import io
import shlex
import tarfile
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.wait import wait_until

from .channel import Channel, Reply
from .errors import CommandError, CommandTimeoutError, GuestDiedError
from .qemu import Qemu

# The agent ends a command at its timeout. A guest that has not replied this many seconds later hangs.
GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class Completed:
    """The result of a command; bytes that are not UTF-8 are replaced. A signal's status is negative."""

    stdout: str
    stderr: str
    returncode: int

    @property
    def output(self) -> str:
        """Standard output followed by standard error."""
        return self.stdout + self.stderr


class BackgroundCommand:
    """A command that runs in the background."""

    def __init__(self, guest: Guest, command: str, timeout: float, future: Future[Reply]) -> None:
        self._guest, self._command, self._future = guest, command, future
        self._timeout, self._deadline = timeout, time.monotonic() + timeout + GRACE_SECONDS

    def done(self) -> bool:
        """Whether the command has ended."""
        return self._future.done()

    def wait(self, check: bool = True) -> Completed:
        """Wait for its end. Raises CommandTimeoutError, GuestDiedError and, with *check*, CommandError."""
        reply = self.reply()
        completed = Completed(
            reply.stdout.decode(errors="replace"), reply.stderr.decode(errors="replace"), reply.returncode
        )
        if check and completed.returncode != 0:
            raise CommandError(self._command, completed.returncode, completed.stdout, completed.stderr)
        return completed

    def reply(self) -> Reply:
        """Return the outputs as bytes, for any status."""
        try:
            reply = self._future.result(max(0.0, self._deadline - time.monotonic()))
        except EOFError as error:
            raise GuestDiedError(f"the guest ended during: {self._command}", self._guest.console()) from error
        except TimeoutError as error:
            raise GuestDiedError(
                f"the guest no longer replies; the command was: {self._command}", self._guest.console()
            ) from error
        if reply.timed_out:
            raise CommandTimeoutError(
                self._command,
                self._timeout,
                reply.stdout.decode(errors="replace"),
                reply.stderr.decode(errors="replace"),
            )
        return reply


class Guest:
    """A guest whose systemd has booted. Commands run as root in /root in bash, in no session of logind."""

    def __init__(self, qemu: Qemu) -> None:
        self._qemu = qemu
        self.profile = qemu.profile.name
        self._channel = Channel(qemu.agent)

    def start(self, command: str, timeout: float = 60.0, stdin: bytes = b"") -> BackgroundCommand:
        """Start a command and return at once. Its session is killed after *timeout* seconds."""
        try:
            future = self._channel.request(command, stdin, timeout)
        except EOFError as error:
            raise GuestDiedError(f"the guest has ended; the command was: {command}", self.console()) from error
        return BackgroundCommand(self, command, timeout, future)

    def run(self, command: str, timeout: float = 60.0, check: bool = True, stdin: bytes = b"") -> Completed:
        """Run a shell command to its end. Its background processes continue."""
        return self.start(command, timeout, stdin).wait(check)

    def put(self, local: Path, remote: str) -> None:
        """Copy a file or folder to the path *remote*, owned by root, with its modes. Keeps other files there."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(local, remote.strip("/") or ".", filter=_by_root)
        parent = shlex.quote(str(Path(remote).parent))
        # Without --no-overwrite-dir, a tree copied to / would change the modes of the guest's own folders.
        self.run(f"mkdir -p {parent} && tar -xpf - -C / --no-overwrite-dir", stdin=buffer.getvalue())

    def write(self, remote: str, data: str | bytes, mode: int = 0o644) -> None:
        """Write a file, and create its folders if needed."""
        path = shlex.quote(remote)
        content = data.encode() if isinstance(data, str) else data
        self.run(f"mkdir -p $(dirname {path}) && cat >{path} && chmod {mode:o} {path}", stdin=content)

    def read(self, path: str) -> bytes:
        """Return a file's content. Raises CommandError if it cannot be read."""
        running = self.start(f"cat -- {shlex.quote(path)}")
        reply = running.reply()
        if reply.returncode != 0:
            running.wait()
        return reply.stdout

    def set_clock(self) -> None:
        """Set the guest's clock to the host's time: the clock of a restored guest is that of the saved state."""
        self.run(f"date --set=@{time.time():.6f}")

    def reboot(self, timeout: float = 600.0) -> None:
        """Reboot, with the disk as it is now, and return when the agent runs again, which is before the boot ends."""
        self._qemu.ask("set-action", {"reboot": "reset"})
        self.run("systemctl reboot")
        # QEMU passes no request to the guest before the next agent opens its port.
        wait_until(lambda: not self._has_agent(), interval_s=0.1, timeout_s=timeout, failure="the agent runs")
        self.run("true", timeout)

    def _has_agent(self) -> bool:
        return any(one["label"] == "agent" and one["frontend-open"] for one in self._qemu.ask("query-chardev"))

    def console(self) -> str:
        """Return what the guest has written to its console since it was started."""
        return self._qemu.console()

    @property
    def qemu(self) -> Qemu:
        """The QEMU process, for its monitor."""
        return self._qemu

    def close(self) -> None:
        """End the guest, and discard its disk."""
        self._channel.close()
        self._qemu.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry
