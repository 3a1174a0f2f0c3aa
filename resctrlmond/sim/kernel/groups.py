# SPDX-License-Identifier: Apache-2.0
"""Groups and their nodes: the files that fs/resctrl creates in the directory of a new group."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Iterator
from functools import partial

from resctrlmond.sim.kernel.cpusets import cpu_list, cpu_mask
from resctrlmond.sim.kernel.domains import Domain, Domains
from resctrlmond.sim.kernel.tasks import Ids
from resctrlmond.sim.kernel.tree import Caller, Directory, File, Show, Store, error
from resctrlmond.sim.profiles import Event, Profile

FILE_RW, FILE_RO = 0o644, 0o444


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """A control group (``parent`` is None) or a monitoring group in one."""

    name: str
    ids: Ids
    directory: Directory
    parent: Group | None = None
    children: dict[str, Group] = dataclasses.field(default_factory=dict)
    cpus: set[int] = dataclasses.field(default_factory=set)
    mode: str = "shareable"
    sampled: float = float("-inf")  # the time of the last update of its tasks' CPU time for a reader

    @property
    def members(self) -> list[Group]:
        """Return the groups whose sum the counter files are: this one and its monitoring groups."""
        return [self, *self.children.values()]

    @property
    def rmids(self) -> list[int]:
        """Return the RMIDs of ``members``."""
        return [group.ids.rmid for group in self.members]

    @property
    def path(self) -> str:
        """Return the directory below the root, "" for the root's own group."""
        if self.parent is None:
            return self.name
        return f"{self.parent.path}/mon_groups/{self.name}".lstrip("/")


@dataclasses.dataclass(frozen=True, slots=True)
class Handlers:
    """The model's functions for reads and writes of a group's files."""

    touch: Callable[[], None]
    show_tasks: Callable[[Group], str]
    write_tasks: Callable[[Group, Caller, str], None]
    write_cpus: Callable[[Group, str], None]
    write_cpus_list: Callable[[Group, str], None]
    show_schemata: Callable[[Group], str]
    write_schemata: Callable[[Group, str], None]
    write_mode: Callable[[Group, str], None]
    show_size: Callable[[Group], str]
    show_counter: Callable[[Group, Event, Domain], str]
    show_assignments: Callable[[Group], str]
    write_assignments: Callable[[Group, str], None]


def no_command(_caller: Caller, _command: str) -> None:
    """Fail with EINVAL: the kernel has no write handler for this file."""
    raise error(errno.EINVAL)


class NodeFactory:
    """Creates nodes with the same owner and birth time, like one mkdir(2)."""

    def __init__(self, owner: tuple[int, int], now_ns: int) -> None:
        self._owner = owner
        self._now_ns = now_ns

    def directory(self, parent: Directory, name: str, mode: int | None = None) -> Directory:
        """Create a directory in ``parent``, with its mode by default."""
        made = Directory(name, parent.mode if mode is None else mode, self._owner, self._now_ns)
        parent.add(made)
        return made

    def file(self, parent: Directory, name: str, mode: int, show: Show, store: Store | None = no_command) -> None:
        """Create a file in ``parent``. ``store`` of None: it cannot be opened for writing."""
        parent.add(File(name, mode, self._owner, self._now_ns, show=show, store=store))


class GroupFiles:
    """Fills the directories of groups."""

    def __init__(self, profile: Profile, domains: Domains, cpus: int, handlers: Handlers) -> None:
        self._profile = profile
        self._domains = domains
        self._cpus = cpus
        self._handlers = handlers

    def fill(self, group: Group, factory: NodeFactory) -> list[Directory]:
        """Create all nodes of a group's directory. Return the directories, each of which belongs to the group."""
        where, handlers = group.directory, self._handlers

        def write_tasks(caller: Caller, command: str) -> None:
            handlers.write_tasks(group, caller, command)

        factory.file(where, "tasks", FILE_RW, self._locked(partial(handlers.show_tasks, group)), write_tasks)

        def add(name: str, show: Show, write: Callable[[Group, str], None]) -> None:
            factory.file(where, name, FILE_RW, self._locked(show), lambda _caller, command: write(group, command))

        add("cpus", lambda: cpu_mask(group.cpus, self._cpus), handlers.write_cpus)
        add("cpus_list", lambda: cpu_list(group.cpus), handlers.write_cpus_list)
        if self._profile.mbm_counters:
            add("mbm_L3_assignments", partial(handlers.show_assignments, group), handlers.write_assignments)
        if self._profile.debug:
            self._show_ids(group, factory)
        made = [where]
        if group.parent is None:
            add("schemata", partial(handlers.show_schemata, group), handlers.write_schemata)
            add("mode", lambda: f"{group.mode}\n", handlers.write_mode)
            factory.file(where, "size", FILE_RO, self._locked(partial(handlers.show_size, group)))
            made.append(factory.directory(where, "mon_groups"))
        top = factory.directory(where, "mon_data")
        made.append(top)
        for domain in self._domains.all:
            made += self.add_domain(group, top, domain, factory)
        return made

    def _show_ids(self, group: Group, factory: NodeFactory) -> None:
        """Add the files of the mount option debug (rdtgroup_rmid_show() and rdtgroup_closid_show() in rdtgroup.c)."""
        where = group.directory
        factory.file(where, "mon_hw_id", FILE_RO, self._locked(lambda: f"{group.ids.rmid}\n"))
        if group.parent is None:
            factory.file(where, "ctrl_hw_id", FILE_RO, self._locked(lambda: f"{group.ids.closid}\n"))

    def _locked(self, show: Show) -> Show:
        """Lock the group while a file is read."""

        def show_locked() -> str:
            self._handlers.touch()
            return show()

        return show_locked

    def add_domain(self, group: Group, top: Directory, domain: Domain, factory: NodeFactory) -> Iterator[Directory]:
        """Create the directory of a domain and those of its parts, if they are online."""
        if not self._domains.is_online(domain):
            return
        where = factory.directory(top, domain.name)
        for event in domain.events:
            # EACCES for any mode, because there is no write operation.
            show = partial(self._handlers.show_counter, group, event, domain)
            factory.file(where, event.name, FILE_RO, self._locked(show), None)
        yield where
        for part in domain.parts:
            yield from self.add_domain(group, where, part, factory)

    def place(self, group: Group, leaf: Domain, whole: Domain | None, *, online: bool) -> tuple[Directory, Domain]:
        """Return the directory that contains a switched domain in a group, and the domain that appears or disappears.

        This is the L3 (``whole``) if the domain is its first node to appear or its last one to disappear.
        """
        top = group.directory.children["mon_data"]
        assert isinstance(top, Directory)
        if whole is None:
            return top, leaf
        outer = top.children.get(whole.name)
        if isinstance(outer, Directory) and (online or self._domains.is_online(whole)):
            return outer, leaf
        return top, whole
