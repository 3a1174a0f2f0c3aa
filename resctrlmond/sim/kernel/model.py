# SPDX-License-Identifier: Apache-2.0
"""resctrl itself, without FUSE: the operations mkdir, rmdir, rename and write, and the contents of files."""

from __future__ import annotations

import errno
from functools import partial

from resctrlmond.sim.kernel.abmc import Assignments
from resctrlmond.sim.kernel.accounting import Accounting
from resctrlmond.sim.kernel.allocation import Allocation
from resctrlmond.sim.kernel.bmec import Configurations
from resctrlmond.sim.kernel.clock import Clock
from resctrlmond.sim.kernel.commands import CommandStatus
from resctrlmond.sim.kernel.counters import Counters
from resctrlmond.sim.kernel.cpus import Cpus
from resctrlmond.sim.kernel.domains import Domain, Domains
from resctrlmond.sim.kernel.faults import Faults
from resctrlmond.sim.kernel.groups import Group, GroupFiles, Handlers, NodeFactory
from resctrlmond.sim.kernel.hotplug import Hotplug
from resctrlmond.sim.kernel.info import InfoFiles
from resctrlmond.sim.kernel.joining import TasksFile
from resctrlmond.sim.kernel.readings import Readings
from resctrlmond.sim.kernel.rmids import RmidPool
from resctrlmond.sim.kernel.tasks import DEFAULT, Ids, TaskTable
from resctrlmond.sim.kernel.tree import Caller, Directory, File, Node, error, walk
from resctrlmond.sim.kernel.truth import Ledger
from resctrlmond.sim.kernel.witness import NAME, Witness
from resctrlmond.sim.messages import Operation, Truth
from resctrlmond.sim.profiles import HARDWARE_LAG_SECONDS, Event, Kind, Profile

_LAGS = (
    "its telemetry lags by {:g} ms, longer than the 2 ms of hardware that a reader waits for, so the last use of a "
    "task may be missing"
)
# The maximum age of the CPU time in a counter file; telemetry lags as much on real hardware.
FRESH_SECONDS = 0.002
ROOT_MODE = 0o555  # as kernfs makes it; info, mon_groups and mon_data inherit it


class Resctrl:
    """One mounted resctrl.

    Operations take nodes of ``root`` and raise ``OSError`` with the kernel's errno. Names and modes are checked; the
    caller checks file permissions. Not thread-safe.

    The rules are those of fs/resctrl in Linux 7, or of Linux 6.12 (arch/x86/kernel/cpu/resctrl/rdtgroup.c) if the
    profile has it: there, mkdir and rmdir do not change last_cmd_status, mkdir in a place for no group fails with
    EPERM even in info, and there is no mbm_assign_mode. In addition, in Linux 6.1, tasks takes one number, there is
    no rename, and an RMID without cache lines in the domain of the rmdir does not wait for that domain's worker.
    """

    def __init__(
        self, profile: Profile, table: TaskTable, clock: Clock | None = None, residue_seed: int | None = None
    ) -> None:
        self.profile = profile
        self.clock = clock or Clock()
        self.status = CommandStatus(is_old=profile.is_old)
        self.faults = Faults()
        self.domains = Domains(profile)
        self.counters = Counters(profile, residue_seed)
        self.ledger = Ledger(profile, self.counters)
        occupancy = self.counters.occupancy if profile.has_limbo else None
        self.rmids = RmidPool(profile.num_rmids, profile.nodes, profile.default_threshold, occupancy)
        self._table = table
        self.reader = 0  # the thread that reads; 0: a thread of this PID namespace
        self.witness = Witness(table, self.clock.boot_ns)
        self.accounting = Accounting(
            profile, table, self.counters, self.ledger, witness=self.witness, now=self.clock.monotonic
        )
        self._tasks = self.accounting.tasks
        self.assignments = Assignments(
            profile, self.status, self.counters, self.domains.online_caches, self.accounting.look
        )
        self.configurations = Configurations(
            profile, self.status, self.counters, self.domains.online_caches, self.accounting.look
        )
        self._tasks_file = TasksFile(profile, self.status, table, self._tasks)
        self._readings = Readings(self.counters, self.domains, self.assignments, self.configurations, self.faults)
        self.root = Directory("", ROOT_MODE, (0, 0), self.clock.wall_ns())
        self.default = Group("", DEFAULT, self.root)
        # Every directory of a group (kernfs' priv), and every control group by its CLOSID.
        self._group_of: dict[Directory, Group] = {}
        self._classes = {DEFAULT.closid: self.default}
        self.cpus = Cpus(table.cpus, self.status, self._classes.values)
        self.cpus.set_online(range(table.cpus), True)
        self.allocation = Allocation(profile, self.status, self._classes.values, self.domains.online_caches)
        self._group_files = GroupFiles(profile, self.domains, table.cpus, self._handlers())
        self.hotplug = Hotplug(
            domains=self.domains,
            cpus=self.cpus,
            rmids=self.rmids,
            counters=self.counters,
            assignments=self.assignments,
            allocation=self.allocation,
            accounting=self.accounting,
            place=self._place,
        )
        self._populate()

    def _handlers(self) -> Handlers:
        return Handlers(
            touch=self._touch,
            show_tasks=self._show_tasks,
            write_tasks=self._write_tasks,
            write_cpus=partial(self._write_cpus, as_list=False),
            write_cpus_list=partial(self._write_cpus, as_list=True),
            show_schemata=self.allocation.show_schemata,
            write_schemata=self.allocation.write_schemata,
            write_mode=self.allocation.write_mode,
            show_size=self.allocation.show_size,
            show_counter=self._show_counter,
            show_assignments=lambda group: self.assignments.show_group(group.ids.rmid),
            write_assignments=lambda group, command: self.assignments.write_group(group.ids.rmid, command),
        )

    def _touch(self) -> None:
        """Lock a live group for an operation: newer kernels clear last_cmd_status (rdtgroup_kn_lock_live())."""
        if not self.profile.is_old:
            self.status.clear()

    def _populate(self) -> None:
        factory = NodeFactory((0, 0), self.clock.wall_ns())
        self._fill(self.default, factory)
        info = InfoFiles(
            profile=self.profile,
            status=self.status,
            rmids=self.rmids,
            assignments=self.assignments,
            configurations=self.configurations,
            allocation=self.allocation,
        )
        info.fill(self.root, factory)
        now = self.clock.wall_ns()
        self._witness_files = self.witness.fill(self.root, now, self.accounting.look_for_witness, self._tasks)
        self.assignments.new_group(DEFAULT.rmid)

    def _fill(self, group: Group, factory: NodeFactory) -> None:
        self._group_of.update(dict.fromkeys(self._group_files.fill(group, factory), group))

    @property
    def groups(self) -> list[Group]:
        """Return all groups, the root's own first."""
        return [group for control in self._classes.values() for group in control.members]

    def truth(self, tid: int | None = None, rmid: int | None = None) -> Truth:
        """Return the true use of all tasks and RMIDs, or of the threads with this number, or of this RMID."""
        self.accounting.look()
        self.accounting.charge_root()
        return self.ledger.report({group.ids.rmid: group.path for group in self.groups}, tid, rmid)

    def task_groups(self, tid: int) -> str | None:
        """Return the text of ``/proc/TID/cpu_resctrl_groups``; None if there is no such task."""
        if self._tasks:
            self._tasks.look()
            self._tasks.check(tid)
        if self._table.stat(tid) is None:
            return None
        ids = self._tasks.ids(tid)
        if ids.closid not in self._classes:
            return None  # a removed class of a task that rmdir missed (ENOENT)
        control = self._classes[ids.closid]
        inside = (child.name for child in control.children.values() if child.ids.rmid == ids.rmid)
        return f"res:{control.name or '/'}\nmon:{next(inside, '')}\n"

    @property
    def inexact(self) -> str:
        """Return why the use of tasks may be missing from their groups, "" if nothing can be missing."""
        lag = self.profile.lag_seconds
        lags = self.profile.package_events and lag > HARDWARE_LAG_SECONDS
        return self._table.inexact or (_LAGS.format(lag * 1000) if lags else "")

    def rmid_counts(self) -> str:
        """Return the numbers of used RMIDs (including root's), in limbo, and free. resctrl has no file for this."""
        used, limbo, free = self.rmids.counts(self.clock.monotonic())
        return f"used={used} limbo={limbo} free={free}\n"

    # mkdir, rmdir, rename

    def mkdir(self, parent: Directory, name: str, mode: int, caller: Caller) -> None:
        """Create a control group in root, or a monitoring group in a ``mon_groups`` (rdtgroup_mkdir())."""
        if name in parent.children:
            raise error(errno.EEXIST)
        if "\n" in name:
            raise error(errno.EINVAL)
        control = parent is self.root and self.profile.can_allocate
        over = self._may_hold(parent, name, control=control)
        ids = self._allocate(None if control else over.ids.closid)
        if control:
            self._begin_class(ids)
        factory = NodeFactory((caller.uid, caller.gid), self.clock.wall_ns())
        directory = factory.directory(parent, name, mode & 0o7777)
        group = Group(name, ids, directory, None if control else over)
        self._fill(group, factory)
        if control:
            self._classes[ids.closid] = group
        else:
            over.children[name] = group
        self.counters.begin_group(ids.rmid)
        self.assignments.new_group(ids.rmid)

    def _may_hold(self, parent: Directory, name: str, *, control: bool) -> Group:
        """Return the group of ``parent``. Raises EPERM or ENODEV if no group can be created there."""
        permitted = control or (parent.name == "mon_groups" and name != "mon_groups")
        over = self._group_of.get(parent)
        if self.profile.is_old and not permitted:
            raise error(errno.EPERM)
        if over is None:
            raise error(errno.ENODEV)
        self._touch()
        if not permitted:
            raise error(errno.EPERM)
        return over

    def _allocate(self, closid: int | None) -> Ids:
        """Allocate an RMID for that class; None: for the lowest free one."""
        if closid is None:
            closid = next((free for free in range(self.profile.num_closids) if free not in self._classes), None)
        if closid is None:
            self.status.add("Out of CLOSIDs")
            raise error(errno.ENOSPC)
        try:
            return Ids(closid, self.rmids.allocate(self.clock.monotonic()))
        except OSError:
            self.status.add("Out of RMIDs")
            raise

    def _begin_class(self, ids: Ids) -> None:
        try:
            self.allocation.begin(ids.closid)
        except OSError:
            self.rmids.free(ids.rmid, self.clock.monotonic())
            raise

    def _group_at(self, node: Node) -> Group | None:
        """Return the group whose own directory this is."""
        group = self._group_of.get(node) if isinstance(node, Directory) else None
        return group if group and group.directory is node else None

    def _node_of(self, caller: Caller) -> int:
        """Return the node where a system call runs, as far as it is known."""
        stat = self._table.stat(caller.tid)
        return self.accounting.node_of(stat.cpu) if stat else 0

    def rmdir(self, node: Node, caller: Caller) -> None:
        """Remove a group, with or without tasks, which move to its parent (rdtgroup_rmdir())."""
        if isinstance(node, Directory) and node in self._group_of:
            self._touch()
        group = self._group_at(node)
        if group is None or group is self.default:
            raise error(errno.EPERM)
        self.accounting.look(group.rmids)
        # A control group is removed with its monitoring groups; all their tasks move to root.
        after = group.parent or self.default
        for gone in [*group.children.values(), group]:
            self._tasks.regroup(gone.ids, after.ids)
        now = self.clock.monotonic()
        self.accounting.update_cache()
        here = self._node_of(caller) if self.profile.is_oldest else None
        for rmid in group.rmids:
            self.assignments.drop_group(rmid)
            self.rmids.free(rmid, now, here)
        self.cpus.release(group)
        if group.parent:
            del group.parent.children[group.name]
        else:
            del self._classes[group.ids.closid]
        self.accounting.give_cpus(self.cpus.owners())
        self._remove(node)

    def _remove(self, node: Node) -> None:
        for inner in walk(node):
            if isinstance(inner, Directory):
                self._group_of.pop(inner, None)
        assert node.parent is not None
        node.parent.remove(node, self.clock.wall_ns())

    def rename(self, node: Node, target: Directory, name: str) -> None:
        """Rename a monitoring group or move it to another class; RMID and counters stay (rdtgroup_rename())."""
        if self.profile.is_oldest:
            raise error(errno.EPERM)  # since Linux 6.5
        home = node if isinstance(node, Directory) else node.parent
        group = self._group_of.get(home) if home else None
        above = self._group_of.get(target)
        # The kernel mistakes a file of info/L3_MON for a group's: its directory has a resource instead of a group.
        of_resource = home is not node and home is not None and home.parent is self.root.children["info"]
        if (group is None and not of_resource) or above is None:
            raise error(errno.ENOENT)
        self.status.clear()
        self._check_rename(node, group, target, name)
        assert group is not None
        assert group.parent is not None
        assert node.parent is not None
        self.accounting.look(group.rmids)
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

    def _check_rename(self, node: Node, group: Group | None, target: Directory, name: str) -> None:
        if not isinstance(node, Directory):
            self.status.add("Source and destination must be directories", end="")
        elif group is None or group.parent is None or node is not group.directory:
            self.status.add("Source must be a MON group")
        elif target.name != "mon_groups" or name == "mon_groups":
            self.status.add("Destination must be a mon_groups subdirectory")
        elif group.cpus and self._group_of.get(target) is not group.parent:
            self.status.add("Cannot move a MON group that monitors CPUs")
        elif name in target.children:
            raise error(errno.EEXIST)
        else:
            return
        raise error(errno.EPERM)

    def write(self, file: File, caller: Caller, command: str) -> None:
        """Write one command to a file. Raises OSError."""
        assert file.store is not None, "check_open() lets no user write to a file without that operation"
        assert file.parent is not None
        if file.name in ("schemata", "tasks"):  # the latter is recorded with the moves of tasks
            file.store(caller, command)
        else:
            with self.witness.writing(file.parent, file.name, caller, command):
                file.store(caller, command)

    def steal(self, node: Node, tid: int) -> None:
        """Move one thread into the group of that directory as another agent, without faults."""
        group = self._group_at(node)
        if group is None:
            raise error(errno.ENOENT)
        self._tasks.look()
        caller = Caller(0, 0, tid)
        with self.witness.writing(group.directory, "tasks", caller, str(tid)) as moved:
            self._tasks_file.write(group, caller, str(tid), moved)
        self.accounting.update_cache()

    def overlook(self, tid: int) -> None:
        """Let the next rmdir that should move this thread miss it. Raises ESRCH if it is in no group."""
        self._tasks.look()
        if not self._tasks.overlook(tid):
            raise error(errno.ESRCH)

    def set_witness(self, *, available: bool, restart: bool, rows: int, keep: int) -> None:
        """Hide or show the files of the witness, begin its sums again, and set its capacity and ``keep_s``."""
        if available:
            self.root.children[NAME] = self._witness_files
        else:
            self.root.children.pop(NAME, None)
        self.witness.capacity, self.witness.keep_s = rows, keep
        if restart:
            self.accounting.look_for_witness()
            self.witness.restart()

    def run_overflow_worker(self, *, runs: bool) -> None:
        """Stop or start the worker. While it is stopped, bandwidth that wraps a counter between two reads is lost."""
        self.accounting.look()
        self._readings.run_worker(self.groups, runs=runs)

    def _place(self, leaf: Domain, whole: Domain | None, online: bool) -> None:
        """Create or remove the directories of a domain that has appeared or disappeared."""
        factory = NodeFactory((0, 0), self.clock.wall_ns())
        for group in self.groups:
            where, shown = self._group_files.place(group, leaf, whole, online=online)
            if online:
                made = self._group_files.add_domain(group, where, shown, factory)
                self._group_of.update(dict.fromkeys(made, group))
            else:
                self._remove(where.children[shown.name])

    # -- contents of files

    def _show_tasks(self, group: Group) -> str:
        self.accounting.look(None if group is self.default else group.rmids)
        return self._tasks_file.show(group, self.reader)

    def _write_tasks(self, group: Group, caller: Caller, command: str) -> None:
        with self.witness.writing(group.directory, "tasks", caller, command) as moved:
            self.faults.strike(Operation.TASKS, group.path)
            self._tasks.look()
            try:
                self._tasks_file.write(group, caller, command, moved)
            finally:
                self.accounting.update_cache()

    def _write_cpus(self, group: Group, command: str, *, as_list: bool) -> None:
        self._touch()
        self.accounting.look()
        self.cpus.write(group, command, as_list=as_list)
        self.accounting.give_cpus(self.cpus.owners())

    def _show_counter(self, group: Group, event: Event, domain: Domain) -> str:
        self.faults.strike(Operation.READ, group.path, domain.name, event.name)
        now = self.clock.monotonic()
        if now - group.sampled >= FRESH_SECONDS:
            # Root's share is the rest of all others, so it needs all of them.
            self.accounting.look(None if group is self.default else group.rmids)
            group.sampled = now
        if group is self.default and event.kind is not Kind.OCCUPANCY:
            self.accounting.charge_root()
        return self._readings.text(group, event, domain, now)
