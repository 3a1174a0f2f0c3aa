# SPDX-License-Identifier: Apache-2.0
"""Control a mounted simulation from a test: faults, other agents, virtual tasks, and the true use."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from resctrlmond.sim import messages
from resctrlmond.sim.messages import ACT, FAULT, TRUTH, VIRTUAL, Fault, Truth

__all__ = ["Control", "Fault", "Truth"]


class Control:
    """The control of the simulation mounted on ``mountpoint``, for root only.

    Methods raise ``OSError``: EPERM without root, EOPNOTSUPP if the mount is not a simulation or its tasks are not
    virtual, EINVAL for an invalid order, and the errors of the order itself (ENOENT, ESRCH, EEXIST, ENOSPC...).
    """

    def __init__(self, mountpoint: str) -> None:
        self._root = mountpoint

    def _send(self, attribute: str, order: object) -> None:
        os.setxattr(self._root, attribute, msgspec.json.encode(order))

    # -- faults

    def set_faults(self, *faults: Fault) -> None:
        """Replace all faults by these."""
        self._send(FAULT, faults)

    @property
    def faults(self) -> Sequence[Fault]:
        """Return the faults that still apply."""
        return msgspec.json.decode(os.getxattr(self._root, FAULT), type=list[Fault])

    # -- other agents and the machine

    def make_group(self, group: str) -> None:
        """Create a group as another agent, such as ``mon_groups/theirs``."""
        self._send(ACT, messages.MakeGroup(group))

    def remove_group(self, group: str) -> None:
        """Remove a group as another agent."""
        self._send(ACT, messages.RemoveGroup(group))

    def steal(self, tid: int, group: str = "") -> None:
        """Move a thread into a group as another agent; "" is the root's."""
        self._send(ACT, messages.Steal(tid, group))

    def overlook(self, tid: int) -> None:
        """Let the next rmdir of its group miss a thread, which keeps an RMID that another group gets later."""
        self._send(ACT, messages.Overlook(tid))

    def run_overflow_worker(self, runs: bool) -> None:
        """Set whether the kernel reads bandwidth counters before they wrap."""
        self._send(ACT, messages.OverflowWorker(runs))

    def offline(self, domain: str) -> None:
        """Take all CPUs of a domain offline, such as ``mon_L3_01``."""
        self._send(ACT, messages.Offline(domain))

    def online(self, domain: str) -> None:
        """Take all CPUs of the domain online."""
        self._send(ACT, messages.Online(domain))

    def cpu_offline(self, cpu: int) -> None:
        """Take one CPU offline."""
        self._send(ACT, messages.CpuOffline(cpu))

    def cpu_online(self, cpu: int) -> None:
        """Take one CPU online."""
        self._send(ACT, messages.CpuOnline(cpu))

    def set_witness(
        self, *, available: bool = True, restart: bool = False, rows: int = 65_536, keep: int = 3600
    ) -> None:
        """Load or unload the witness, begin it again, and set the capacity of its rows and how long it keeps them."""
        self._send(ACT, messages.SetWitness(available=available, restart=restart, rows=rows, keep=keep))

    # -- virtual tasks, if the simulation was started with them

    def _bear(self, order: messages.Virtual) -> int:
        self._send(VIRTUAL, order)
        answer: dict[str, int] = msgspec.json.decode(os.getxattr(self._root, VIRTUAL), type=dict[str, int])
        return answer["tid"]

    def spawn(self, *, tid: int = 0, uid: int = 0) -> int:
        """Start a process in no group. Return its number."""
        return self._bear(messages.Spawn(tid, uid))

    def fork(self, by: int, *, tid: int = 0) -> int:
        """Fork a process from a thread, in the same group. Return its number."""
        return self._bear(messages.ForkTask(by, tid))

    def thread(self, by: int, *, tid: int = 0) -> int:
        """Start another thread in the process of a thread. Return its number."""
        return self._bear(messages.Thread(by, tid))

    def exit(self, tid: int) -> None:
        """End a thread."""
        self._send(VIRTUAL, messages.ExitTask(tid))

    def run(self, tid: int, ns: int, cpu: int = 0) -> None:
        """Let a thread use this many nanoseconds of CPU time on that CPU, all of it now."""
        self._send(VIRTUAL, messages.Run(tid, ns, cpu))

    def set_cgroup(self, tid: int, cgroup: str | list[int]) -> None:
        """Move a thread to a control group: a directory, or inode numbers of it and of those above it.

        [] is the control group of the real process with this number.
        """
        self._send(VIRTUAL, messages.SetCgroup(tid, cgroup))

    def advance(self, seconds: float) -> None:
        """Move the simulation's clock forward."""
        self._send(VIRTUAL, messages.Advance(seconds))

    # -- the true use

    def truth(self, *, tid: int | None = None, rmid: int | None = None) -> Truth:
        """Return the true use of all tasks and RMIDs, or only of those with the number ``tid`` or ``rmid``.

        If this exceeds 64 KiB, tasks are left out, the oldest first (``left_off`` counts them), then RMIDs without a
        group. If it is still too much, ERANGE is raised.
        """
        attribute = TRUTH
        if tid is not None:
            attribute += f".{tid}"
        elif rmid is not None:
            attribute += f".rmid.{rmid}"
        return msgspec.json.decode(os.getxattr(self._root, attribute), type=Truth)
