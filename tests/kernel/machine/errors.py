# SPDX-License-Identifier: Apache-2.0
"""Errors of the guest or its build. Each message states what failed, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class MachineError(Exception):
    """The parent of all errors of the test machine."""


class MissingPackagesError(MachineError):
    """The host lacks Debian packages, and this user may not install them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)
        names = " ".join(packages)
        super().__init__(
            f"the kernel tests need these Debian packages on this host: {names}; "
            f"install them as root: apt-get install -y --no-install-recommends {names}"
        )


class BuildError(MachineError):
    """A step of building the guest failed; the message has the end of the tool's output."""


class GuestDiedError(MachineError):
    """The guest panicked, stopped or no longer answers; the message has the end of its console."""

    def __init__(self, what: str, console: str) -> None:
        self.console = console
        super().__init__(f"{what}; the end of the guest's console:\n{console[-4000:] or '(nothing)'}")


class CommandError(MachineError):
    """A checked command in the guest returned a status other than 0."""

    def __init__(self, command: str, returncode: int, stdout: str, stderr: str) -> None:
        self.command, self.returncode, self.stdout, self.stderr = command, returncode, stdout, stderr
        super().__init__(f"in the guest, status {returncode}: {command}\n{stdout[-8000:]}{stderr[-8000:]}".rstrip())


class CommandTimeoutError(MachineError):
    """A command in the guest was killed at its time-out, with its session."""

    def __init__(self, command: str, timeout: float, stdout: str, stderr: str) -> None:
        self.command, self.timeout, self.stdout, self.stderr = command, timeout, stdout, stderr
        super().__init__(
            f"in the guest, killed after {timeout:g} s: {command}\n{stdout[-8000:]}{stderr[-8000:]}".rstrip()
        )
