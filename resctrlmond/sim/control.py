# SPDX-License-Identifier: Apache-2.0
"""Steers a mounted simulation from a test: faults, other agents, virtual tasks, and the truth to compare with."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from resctrlmond.sim import messages
from resctrlmond.sim.messages import ACT, FAULT, TRUTH, VIRTUAL, Fault, Truth

__all__ = ["Control", "Fault", "Truth"]


class Control:
    """The control of the simulation mounted on ``mountpoint``, for root alone.

    Methods raise ``OSError``: EPERM without root, EOPNOTSUPP where the mount is no simulation or its tasks are not
    virtual, EINVAL for an order that makes no sense, and what the order itself fails with (ENOENT, ESRCH, EEXIST,
    ENOSPC...).
    """

    def __init__(self, mountpoint: str) -> None:
        self._root = mountpoint

    def _say(self, attribute: str, order: object) -> None:
        os.setxattr(self._root, attribute, msgspec.json.encode(order))

    # What goes wrong

    def set_faults(self, *faults: Fault) -> None:
        """These faults and no others from here on; none ends all."""
        self._say(FAULT, faults)

    @property
    def faults(self) -> Sequence[Fault]:
        """The faults that are in force still."""
        return msgspec.json.decode(os.getxattr(self._root, FAULT), type=list[Fault])

    # What other agents and the machine do

    def make_group(self, group: str) -> None:
        """Another agent makes a group, such as ``mon_groups/theirs``."""
        self._say(ACT, messages.MakeGroup(group))

    def remove_group(self, group: str) -> None:
        """Another agent removes a group."""
        self._say(ACT, messages.RemoveGroup(group))

    def steal(self, tid: int, group: str = "") -> None:
        """Another agent moves a thread into a group; "" is the root's."""
        self._say(ACT, messages.Steal(tid, group))

    def overlook(self, tid: int) -> None:
        """The next rmdir of its group leaves a thread behind, with an RMID that is another group's later."""
        self._say(ACT, messages.Overlook(tid))

    def run_overflow_worker(self, runs: bool) -> None:
        """Whether the kernel looks at bandwidth counters before they wrap."""
        self._say(ACT, messages.OverflowWorker(runs))

    def offline(self, domain: str) -> None:
        """All CPUs of a domain, such as ``mon_L3_01``, go offline."""
        self._say(ACT, messages.Offline(domain))

    def online(self, domain: str) -> None:
        """All CPUs of the domain come back."""
        self._say(ACT, messages.Online(domain))

    def cpu_offline(self, cpu: int) -> None:
        """One CPU goes offline."""
        self._say(ACT, messages.CpuOffline(cpu))

    def cpu_online(self, cpu: int) -> None:
        """One CPU comes back."""
        self._say(ACT, messages.CpuOnline(cpu))

    # Virtual tasks, where the simulation was started with them

    def _bear(self, order: messages.Virtual) -> int:
        self._say(VIRTUAL, order)
        answer: dict[str, int] = msgspec.json.decode(os.getxattr(self._root, VIRTUAL), type=dict[str, int])
        return answer["tid"]

    def spawn(self, *, tid: int = 0, uid: int = 0) -> int:
        """A new process in no group; returns its number."""
        return self._bear(messages.Spawn(tid, uid))

    def fork(self, by: int, *, tid: int = 0) -> int:
        """A thread forks a process, which is in the same group; returns its number."""
        return self._bear(messages.ForkTask(by, tid))

    def thread(self, by: int, *, tid: int = 0) -> int:
        """A thread starts another one in its process; returns its number."""
        return self._bear(messages.Thread(by, tid))

    def exit(self, tid: int) -> None:
        """A thread ends."""
        self._say(VIRTUAL, messages.ExitTask(tid))

    def run(self, tid: int, ns: int, cpu: int = 0) -> None:
        """A thread uses so many nanoseconds of CPU time on that CPU, all of it now."""
        self._say(VIRTUAL, messages.Run(tid, ns, cpu))

    def advance(self, seconds: float) -> None:
        """The simulation's clock is put forward."""
        self._say(VIRTUAL, messages.Advance(seconds))

    # What is true

    def truth(self, *, tid: int | None = None, rmid: int | None = None) -> Truth:
        """What every task and RMID used in truth; with ``tid`` or ``rmid`` only of what has or had that number.

        Where all does not fit into 64 KiB, tasks are left off, the oldest first (``left_off`` says how many), then
        RMIDs without a group; if that is still too much, ERANGE is raised.
        """
        attribute = TRUTH
        if tid is not None:
            attribute += f".{tid}"
        elif rmid is not None:
            attribute += f".rmid.{rmid}"
        return msgspec.json.decode(os.getxattr(self._root, attribute), type=Truth)
