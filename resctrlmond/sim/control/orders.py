# SPDX-License-Identifier: Apache-2.0
"""Orders of root in the extended attributes of the root directory: faults, acts of other agents, virtual tasks."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping

import msgspec

from resctrlmond.sim import messages
from resctrlmond.sim.host.virtual import VirtualTasks
from resctrlmond.sim.kernel.clock import Stopwatch
from resctrlmond.sim.kernel.model import Resctrl
from resctrlmond.sim.kernel.tree import Caller, Directory, Node, error, lookup
from resctrlmond.sim.messages import ACT, FAULT, TRUTH, VIRTUAL

# The largest value of an extended attribute (XATTR_SIZE_MAX, linux/limits.h).
MOST_BYTES = 65_536
_TRUTH = re.compile(re.escape(TRUTH) + r"(?:\.([0-9]{1,9})|\.rmid\.([0-9]{1,9}))?", re.ASCII)
_ANOTHER_AGENT = Caller(0, 0, 0)


class Orders:
    """Runs orders on the model. ``virtual`` and its clock exist only with virtual tasks."""

    def __init__(self, model: Resctrl, virtual: tuple[VirtualTasks, Stopwatch] | None) -> None:
        self._model = model
        self._virtual = virtual
        self._answer = b"{}"  # the reply to the last order for virtual tasks
        self._takers: Mapping[str, Callable[[bytes], None]] = {
            FAULT: self._set_faults,
            ACT: self._act,
            VIRTUAL: self._order,
        }

    @property
    def names(self) -> list[str]:
        """Return the attributes that can be written."""
        return [FAULT, ACT, *([VIRTUAL] if self._virtual else [])]

    def get(self, name: str) -> bytes | None:
        """Return the value of an attribute; None if it is unknown. Raises ERANGE if it is too long."""
        if name == FAULT:
            return self._model.faults.show()
        if name == VIRTUAL and self._virtual:
            return self._answer
        match = _TRUTH.fullmatch(name)
        return self._truth(*(int(number) if number else None for number in match.groups())) if match else None

    def _truth(self, tid: int | None, rmid: int | None) -> bytes:
        truth = self._model.truth(tid, rmid)
        data = msgspec.json.encode(truth)
        if len(data) > MOST_BYTES:
            truth.rmids = [row for row in truth.rmids if row.group is not None]
            data = msgspec.json.encode(truth)
        while len(data) > MOST_BYTES and truth.tasks:
            # The oldest first; each can still be requested by its number.
            dropped = len(truth.tasks) // 2 + 1
            truth.tasks, truth.left_off = truth.tasks[dropped:], truth.left_off + dropped
            data = msgspec.json.encode(truth)
        if len(data) > MOST_BYTES:
            raise error(errno.ERANGE)
        return data

    def set(self, name: str, value: bytes) -> None:
        """Run an order. Raises EOPNOTSUPP for an unknown attribute, EINVAL for an invalid order."""
        if name not in self.names:
            raise error(errno.EOPNOTSUPP)
        try:
            self._takers[name](value)
        except msgspec.DecodeError as failure:
            raise error(errno.EINVAL) from failure

    def _set_faults(self, value: bytes) -> None:
        self._model.faults.set(msgspec.json.decode(value, type=list[messages.Fault]))

    def _node(self, path: str) -> Node:
        return lookup(self._model.root, path, _ANOTHER_AGENT)

    def _act(self, value: bytes) -> None:
        order = msgspec.json.decode(value, type=messages.Act)
        match order:
            case messages.MakeGroup(group):
                above, _, name = group.rpartition("/")
                parent = self._node(above)
                if not isinstance(parent, Directory):
                    raise error(errno.ENOTDIR)
                self._model.mkdir(parent, name, 0o755, _ANOTHER_AGENT)
            case messages.RemoveGroup(group):
                self._model.rmdir(self._node(group), _ANOTHER_AGENT)
            case messages.Steal(tid, group):
                self._model.steal(self._node(group), tid)
            case messages.Overlook(tid):
                self._model.overlook(tid)
            case messages.OverflowWorker(runs):
                self._model.run_overflow_worker(runs=runs)
            case messages.Offline(domain):
                self._model.hotplug.set_domain(domain, False)
            case messages.Online(domain):
                self._model.hotplug.set_domain(domain, True)
            case messages.CpuOffline(cpu):
                self._model.hotplug.set_cpu(cpu, False)
            case messages.CpuOnline(cpu):
                self._model.hotplug.set_cpu(cpu, True)
            case messages.SetWitness(available=available, restart=restart, rows=rows, keep=keep):
                self._model.set_witness(available=available, restart=restart, rows=rows, keep=keep)

    def _order(self, value: bytes) -> None:
        assert self._virtual is not None
        tasks, stopwatch = self._virtual
        order = msgspec.json.decode(value, type=messages.Virtual)
        tid = 0
        match order:
            case messages.Spawn(number, uid):
                tid = tasks.fork(uid=uid, tid=number)
            case messages.ForkTask(by, number):
                tid = tasks.fork(by, tid=number)
            case messages.Thread(by, number):
                tid = tasks.fork(by, thread=True, tid=number)
            case messages.ExitTask(tid):
                self._model.accounting.look_at(tid)
                if tid != 1:
                    self._model.accounting.end(tid)
                tasks.exit(tid)
            case messages.Run(tid, ns, cpu):
                # Its use until now belongs to the previous CPU.
                self._model.accounting.look_at(tid)
                tasks.run(tid, ns, cpu)
                self._model.accounting.charge_default(tid, cpu, ns)
            case messages.SetCgroup(tid, cgroup):
                tasks.set_cgroup(tid, cgroup)
            case messages.Advance(seconds):
                stopwatch.advance(seconds)
        self._model.accounting.look_at(tid)
        self._answer = msgspec.json.encode({"tid": tid})
