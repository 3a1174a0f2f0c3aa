# SPDX-License-Identifier: Apache-2.0
"""Who may do what: root writes; root and the members of the daemon's group read."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from resctrlmond.resctrl.errors import PermissionDenied
from resctrlmond.resctrl.processes import Descriptor


class Access(enum.Enum):
    """What a verb does to the machine."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, by the credentials of the connection, never of the message. ``groups`` includes ``gid``.

    ``pid_namespaces`` counts the nested PID namespaces, from ours on, in which the caller has a number: 1 is ours,
    0 is not known. ``descriptors`` came with the message.
    ``waits``: whether the caller still waits for the answer, for calls from any thread.
    """

    uid: int
    gid: int
    groups: frozenset[int]
    pid: int
    waits: Callable[[], bool] = field(default=lambda: True, compare=False)
    pid_namespaces: int = 0
    descriptors: tuple[Descriptor, ...] = ()

    def check_pid(self, pid: int, remedy: str) -> None:
        """Raise PermissionDenied unless the caller's numbers of processes are ours."""
        if self.pid_namespaces != 1:
            where = (
                "runs in another PID namespace"
                if self.pid_namespaces
                else "has ended, or is in an unknown PID namespace"
            )
            raise PermissionDenied(f"the caller {where}, so its pid {pid} cannot be used", remedy=remedy)


class Policy:
    """Decides by the caller's user and groups. ``readers`` is the Unix group whose members may read; ``owner`` the
    user that may do everything beside root (the one who runs a simulation for himself).
    """

    def __init__(self, readers: int, owner: int = 0) -> None:
        self._readers = readers
        self._owner = owner

    def may_everything(self, caller: Caller) -> bool:
        """Whether the caller is one of those who may do whatever there is."""
        return caller.uid in (0, self._owner)

    def check(self, caller: Caller, access: Access, verb: str) -> None:
        """Raise PermissionDenied unless ``caller`` may."""
        if self.may_everything(caller):
            return
        if access is Access.READ and self._readers in caller.groups:
            return
        raise PermissionDenied(
            f"user {caller.uid} may not call {verb}",
            remedy="Call as root"
            if access is Access.WRITE
            else f"Call as root, or as a member of the group with id {self._readers}",
        )
