# SPDX-License-Identifier: Apache-2.0
"""resctrl itself, apart from FUSE: what mkdir, rmdir, rename and writes do, and what files show."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable, Collection

from resctrlmond.sim.commands import CommandStatus, parse_int, parse_unsigned, task_tokens
from resctrlmond.sim.counters import Counters
from resctrlmond.sim.groups import Group, Handlers, NodeFactory
from resctrlmond.sim.profiles import Event, Kind, Profile
from resctrlmond.sim.rmids import RmidPool
from resctrlmond.sim.tasks import DEFAULT, Ids, Tasks, TaskTable
from resctrlmond.sim.tree import Caller, Directory, Node, error, walk

# A counter may lag by as much on real hardware: cores push telemetry every 2 ms.
LAG_SECONDS = 0.002
SAMPLE_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """``monotonic`` in seconds rules limbo and cache decay; ``wall_ns`` stamps new nodes."""

    monotonic: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns


class Resctrl:
    """One mounted resctrl of the newest kernels (6.16 and later, where mkdir clears last_cmd_status).

    Operations take nodes of ``root`` and raise ``OSError`` with the kernel's errno; names and modes are checked,
    file permissions are the caller's business. Not thread-safe.
    """

    def __init__(
        self,
        profile: Profile,
        table: TaskTable,
        clock: Clock | None = None,
        residue_seed: int | None = None,
    ) -> None:
        self.profile = profile
        self.clock = clock or Clock()
        self.status = CommandStatus()
        self.counters = Counters(profile, residue_seed)
        occupancy = self.counters.occupancy if profile.has_limbo else None
        self.rmids = RmidPool(profile.num_rmids, profile.domains, profile.default_threshold, occupancy)
        self._table = table
        self._tasks = Tasks(table, self._charge)
        self._host_start = dict(table.host_cpu_ns())
        self._sampled = float("-inf")
        self._handlers = Handlers(
            show_tasks=self._show_tasks,
            write_tasks=self._write_tasks,
            show_counter=self._show_counter,
            show_status=self.status.show,
            show_threshold=lambda: f"{self.rmids.threshold}\n",
            write_threshold=self._write_threshold,
        )
        # Every directory that stands for a group (kernfs' priv), and every control group by its CLOSID.
        self._group_of: dict[Directory, Group] = {}
        now_ns = self.clock.wall_ns()
        self.root = Directory("", 0o755, (0, 0), now_ns)
        self.default = Group("", DEFAULT, self.root)
        self._classes = {DEFAULT.closid: self.default}
        factory = self._factory((0, 0), now_ns)
        self._group_of.update(dict.fromkeys(factory.fill_group(self.default), self.default))
        factory.fill_info(self.root)

    def _factory(self, owner: tuple[int, int], now_ns: int) -> NodeFactory:
        return NodeFactory(self.profile, self._table.cpus, self._handlers, owner, now_ns)

    # Looking at tasks

    def poll(self) -> None:
        """To be called often: sees new threads while their parents live, and counts CPU time every 50 ms."""
        now = self.clock.monotonic()
        if self._tasks:
            self._tasks.look()
            if now - self._sampled >= SAMPLE_SECONDS:
                self._sample(None)

    def _look(self, rmids: Collection[int] | None) -> None:
        """The state of tasks as it is now, as far as it concerns these RMIDs (None: all)."""
        if self._tasks:
            self._tasks.look()
            self._sample(rmids)

    def _sample(self, rmids: Collection[int] | None) -> None:
        self._tasks.sample(rmids)
        now = self.clock.monotonic()
        self._update_cache(now)
        if rmids is None:
            self._sampled = now

    def _update_cache(self, now: float) -> None:
        self.counters.hold_cache(self._tasks.live(self._domain_of), now)

    def _domain_of(self, cpu: int) -> int:
        return self.profile.domain_of(cpu, self._table.cpus)

    def _charge(self, rmid: int, cpu: int, ns: int) -> None:
        self.counters.charge(rmid, self._domain_of(cpu), ns)

    def task_groups(self, tid: int) -> str | None:
        """What ``/proc/TID/cpu_resctrl_groups`` would read; None if there is no such task."""
        if self._tasks:
            self._tasks.look()
            self._tasks.check(tid)
        if self._table.stat(tid) is None:
            return None
        ids = self._tasks.ids(tid)
        control = self._classes[ids.closid]
        inside = (child.name for child in control.children.values() if child.ids.rmid == ids.rmid)
        return f"res:{control.name or '/'}\nmon:{next(inside, '')}\n"

    def rmid_counts(self) -> str:
        """How many RMIDs are used (root's own among them), in limbo and free: what no file of resctrl shows."""
        used, limbo, free = self.rmids.counts(self.clock.monotonic())
        return f"used={used} limbo={limbo} free={free}\n"

    # mkdir, rmdir, rename

    def mkdir(self, parent: Directory, name: str, mode: int, caller: Caller) -> None:
        """Makes a control group in root, or a monitoring group in a ``mon_groups`` (rdtgroup_mkdir())."""
        if name in parent.children:
            raise error(errno.EEXIST)
        if "\n" in name:
            raise error(errno.EINVAL)
        control = parent is self.root and self.profile.can_allocate
        over = self._group_of.get(parent)
        if over is None:
            raise error(errno.ENODEV)
        self.status.clear()
        if not control and (parent.name != "mon_groups" or name == "mon_groups"):
            raise error(errno.EPERM)
        ids = self._allocate(None if control else over.ids.closid)
        factory = self._factory((caller.uid, caller.gid), self.clock.wall_ns())
        directory = factory.directory(parent, name, mode & 0o7777)
        group = Group(name, ids, directory, None if control else over)
        self._group_of.update(dict.fromkeys(factory.fill_group(group), group))
        if control:
            self._classes[ids.closid] = group
        else:
            over.children[name] = group
        self.counters.restart_traffic(ids.rmid)

    def _allocate(self, closid: int | None) -> Ids:
        """An RMID for that class, or, with None, for the lowest free one."""
        if closid is None:
            closid = next((free for free in range(self.profile.num_closids) if free not in self._classes), None)
        if closid is None:
            self.status.say("Out of CLOSIDs")
            raise error(errno.ENOSPC)
        try:
            return Ids(closid, self.rmids.allocate(self.clock.monotonic()))
        except OSError:
            self.status.say("Out of RMIDs")
            raise

    def rmdir(self, node: Node) -> None:
        """Removes a group, with tasks or without; its tasks go to the group above (rdtgroup_rmdir())."""
        group = self._group_of.get(node) if isinstance(node, Directory) else None
        if group is None or group.directory is not node or group is self.default:
            raise error(errno.EPERM)
        self._look(group.rmids)
        # A control group takes its monitoring groups along; all their tasks end in root's.
        after = group.parent or self.default
        for gone in [*group.children.values(), group]:
            self._tasks.regroup(gone.ids, after.ids)
        now = self.clock.monotonic()
        self._update_cache(now)
        for rmid in group.rmids:
            self.rmids.free(rmid, now)
        if group.parent:
            del group.parent.children[group.name]
        else:
            del self._classes[group.ids.closid]
        for inner in walk(node):
            if isinstance(inner, Directory):
                self._group_of.pop(inner, None)
        assert node.parent is not None
        node.parent.remove(node, self.clock.wall_ns())

    def rename(self, node: Node, target: Directory, name: str) -> None:
        """Renames a monitoring group or moves it to another class; RMID and counters stay (rdtgroup_rename())."""
        home = node if isinstance(node, Directory) else node.parent
        group = self._group_of.get(home) if home else None
        above = self._group_of.get(target)
        if group is None or above is None:
            raise error(errno.ENOENT)
        self.status.clear()
        self._check_rename(node, group, target, name)
        assert group.parent is not None
        assert node.parent is not None
        self._look(group.rmids)
        now_ns = self.clock.wall_ns()
        node.parent.detach(node, now_ns)
        node.name = name
        node.ctime_ns = now_ns
        target.add(node)
        del group.parent.children[group.name]
        before = group.ids
        group.name, group.parent, group.ids = name, above, Ids(above.ids.closid, before.rmid)
        above.children[name] = group
        self._tasks.regroup(before, group.ids)

    def _check_rename(self, node: Node, group: Group, target: Directory, name: str) -> None:
        if not isinstance(node, Directory):
            self.status.say("Source and destination must be directories")
        elif group.parent is None or node is not group.directory:
            self.status.say("Source must be a MON group")
        elif target.name != "mon_groups" or name == "mon_groups":
            self.status.say("Destination must be a mon_groups subdirectory")
        elif name in target.children:
            raise error(errno.EEXIST)
        else:
            return
        raise error(errno.EPERM)

    # What files show and take

    def _show_tasks(self, group: Group) -> str:
        self._look(None if group is self.default else group.rmids)
        if group.parent is not None:
            tids = [m.tid for m in self._tasks.members() if m.ids.rmid == group.ids.rmid]
        elif not self.profile.can_allocate:
            tids = []
        elif group is self.default:
            tids = [tid for tid in self._table.threads() if self._tasks.ids(tid).closid == 0]
        else:
            tids = [m.tid for m in self._tasks.members() if m.ids.closid == group.ids.closid]
        return "".join(f"{tid}\n" for tid in tids)

    def _show_counter(self, group: Group, event: Event, domain: int) -> str:
        now = self.clock.monotonic()
        if now - group.sampled >= LAG_SECONDS:
            # Root's own share is what the others leave, so it takes all of them.
            self._look(None if group is self.default else group.rmids)
            group.sampled = now
        if group is self.default and event.kind is not Kind.OCCUPANCY:
            self._settle_root()
        return self.counters.text(event, group.rmids, domain, now)

    def _settle_root(self) -> None:
        used = [0] * self.profile.domains
        for cpu, ns in self._table.host_cpu_ns().items():
            used[self._domain_of(cpu)] += ns - self._host_start.get(cpu, 0)
        for domain, ns in enumerate(used):
            self.counters.settle_root(domain, ns)

    def _write_threshold(self, command: str) -> None:
        value = parse_unsigned(command)
        if value is None or value > self.profile.cache_bytes:
            raise error(errno.EINVAL)
        self.rmids.threshold = self.profile.round_down(value)

    def _write_tasks(self, group: Group, caller: Caller, command: str) -> None:
        """rdtgroup_tasks_write(): stops at the first task that fails; the ones before it have moved."""
        self.status.clear()
        self._tasks.look()
        try:
            for token in task_tokens(command):
                self._run_token(group, caller, token)
        finally:
            self._update_cache(self.clock.monotonic())

    def _run_token(self, group: Group, caller: Caller, token: str) -> None:
        number = parse_int(token)
        if number is None:
            self.status.say(f"Task list parsing error pid {token}")
            raise error(errno.EINVAL)
        if number < 0:
            self.status.say(f"Invalid pid {number}")
            raise error(errno.EINVAL)
        try:
            self._move_task(group, caller, number)
        except OSError:
            self.status.say(f"Error while processing task {number}")
            raise

    def _move_task(self, group: Group, caller: Caller, number: int) -> None:
        """One thread into the group; 0 is the caller itself. Raises ESRCH, EPERM or EINVAL."""
        tid = number or caller.tid
        credentials = self._table.credentials(tid)
        if credentials is None:
            self.status.say(f"No task {tid}")
            raise error(errno.ESRCH)
        if caller.uid not in (0, *credentials):
            self.status.say(f"No permission to move task {tid}")
            raise error(errno.EPERM)
        self._tasks.check(tid)
        before = self._tasks.ids(tid)
        if before == group.ids:
            return
        if group.parent is not None and before.closid != group.ids.closid:
            self.status.say("Can't move task to different control group")
            raise error(errno.EINVAL)
        if not self._tasks.join(tid, group.ids):
            self.status.say(f"No task {tid}")
            raise error(errno.ESRCH)
