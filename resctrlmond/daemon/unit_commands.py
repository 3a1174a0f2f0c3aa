# SPDX-License-Identifier: Apache-2.0
"""The commands that systemd runs for a service, as far as they run through resctrlmon-unit-exec.

``resctrlctl units exact`` has systemd run each command of a service through that program, which has the daemon put
its process into the group, and executes the command after that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from resctrlmond.host.unit_exec import is_program


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a service: its setting, and its program in the unit file.

    ``pid`` is its process since the last start of the service, 0 for none; ``started_s`` is the time of that
    (``time.monotonic``), and ``has_ended`` whether systemd has seen its end.
    """

    setting: str
    program: str
    pid: int = 0
    started_s: float = 0.0
    has_ended: bool = False

    @property
    def name(self) -> str:
        """The name of this process of the command in the record of a member."""
        return f"{self.setting}={self.pid}"


@dataclass(frozen=True, slots=True)
class Service:
    """A service: its control group relative to the root, and its commands."""

    cgroup: str
    commands: tuple[Command, ...]

    def command_of(self, pid: int) -> Command | None:
        """Return the command whose process this is; None if systemd has not started it through the program."""
        running = (one for one in self.commands if one.pid == pid and not one.has_ended and is_program(one.program))
        return next(running, None)


def kept(service: Service, known: Iterable[str], more: Command) -> tuple[str, ...]:
    """Return the names of the known processes that systemd still states, and of one more."""
    current = {command.name for command in service.commands}
    return (*(name for name in known if name in current and name != more.name), more.name)
