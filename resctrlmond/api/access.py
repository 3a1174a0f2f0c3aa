# SPDX-License-Identifier: Apache-2.0
"""Access control: root may call every verb; members of two Unix groups may call the verbs that read.

Every user may call the verbs about the caller's own process, which have a socket of their own.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from resctrlmond.resctrl.errors import PermissionDenied
from resctrlmond.resctrl.processes import Descriptor


class Access(enum.Enum):
    """Whether a verb only reads, changes something, or concerns the caller's own process only."""

    READ = "read"
    WRITE = "write"
    SELF = "self"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a verb, with the credentials of its connection, never of the message.

    ``groups`` includes the primary group. ``pid`` may belong to another process by now. ``pid_namespaces`` is the
    number of nested PID namespaces in which the caller has a pid, beginning with the daemon's own: 1 is the daemon's
    own, 0 is unknown. ``descriptors`` came with the message, which was received at ``received_ns`` (``boot_ns()``; 0
    if that is unknown). ``waits`` returns whether the caller still waits for the reply; it can be called from any
    thread. ``is_held``: a pidfd holds the process, so that ``pid`` is its number as long as ``waits`` returns True.
    """

    uid: int
    groups: frozenset[int]
    pid: int
    waits: Callable[[], bool] = field(default=lambda: True, compare=False)
    pid_namespaces: int = 0
    descriptors: tuple[Descriptor, ...] = ()
    received_ns: int = 0
    is_held: bool = False

    def check_pid(self, pid: int, remedy: str) -> None:
        """Raise PermissionDenied unless the caller is in the daemon's PID namespace and uses the same pids."""
        if self.pid_namespaces != 1:
            where = (
                "runs in another PID namespace"
                if self.pid_namespaces
                else "has ended, or is in an unknown PID namespace"
            )
            raise PermissionDenied(f"the caller {where}, so its pid {pid} cannot be used", remedy=remedy)


def is_privileged(uid: int) -> bool:
    """Return whether the user is root or the daemon's own user, which is not root in a simulation.

    Privileged users may call every verb. Other users may only read.
    """
    return uid == 0 or uid == os.geteuid()


class Policy:
    """The access rules. ``readers`` are the Unix groups whose members may read."""

    def __init__(self, *readers: int) -> None:
        self._readers = frozenset(readers)

    def check(self, caller: Caller, access: Access, verb: str) -> None:
        """Raise PermissionDenied unless the caller may call a verb with this access."""
        if is_privileged(caller.uid) or access is Access.SELF:
            return
        if access is Access.READ and self._readers & caller.groups:
            return
        groups = " or ".join(map(str, sorted(self._readers)))
        raise PermissionDenied(
            f"user {caller.uid} may not call {verb}",
            remedy="Call as root"
            if access is Access.WRITE
            else f"Call as root, or as a member of the group with id {groups}",
        )
