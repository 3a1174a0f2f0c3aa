# SPDX-License-Identifier: Apache-2.0
"""Groups, and the nodes that each has: what fs/resctrl puts into a new group's directory and into info."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Iterator
from functools import partial

from resctrlmond.sim.commands import cpu_list, cpu_mask
from resctrlmond.sim.profiles import Event, Profile
from resctrlmond.sim.tasks import Ids
from resctrlmond.sim.tree import Caller, Directory, File, Show, Store, error

FILE_RW, FILE_RO = 0o644, 0o444


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """A control group (``parent`` is None) or a monitoring group in one."""

    name: str
    ids: Ids
    directory: Directory
    parent: Group | None = None
    children: dict[str, Group] = dataclasses.field(default_factory=dict)
    sampled: float = float("-inf")  # when its tasks' CPU time was last counted for a reader

    @property
    def rmids(self) -> list[int]:
        """The RMIDs that its counter files sum up: its own and those of the monitoring groups in it."""
        return [self.ids.rmid, *(child.ids.rmid for child in self.children.values())]


@dataclasses.dataclass(frozen=True, slots=True)
class Handlers:
    """What the files of a group do when they are read or written; given by the model."""

    show_tasks: Callable[[Group], str]
    write_tasks: Callable[[Group, Caller, str], None]
    show_counter: Callable[[Group, Event, int], str]
    show_status: Show
    show_threshold: Show
    write_threshold: Callable[[str], None]


def _no_command(_caller: Caller, _command: str) -> None:
    """A file of the kernel's table without a write handler: whoever gets it open for writing is told EINVAL."""
    raise error(errno.EINVAL)


class NodeFactory:
    """Makes nodes that all have one owner and one time of birth, as one mkdir(2) does."""

    def __init__(self, profile: Profile, cpus: int, handlers: Handlers, owner: tuple[int, int], now_ns: int) -> None:
        self._profile = profile
        self._cpus = cpus
        self._handlers = handlers
        self._owner = owner
        self._now_ns = now_ns

    def directory(self, parent: Directory, name: str, mode: int | None = None) -> Directory:
        """A new directory in ``parent``, with its mode unless another is given."""
        made = Directory(name, parent.mode if mode is None else mode, self._owner, self._now_ns)
        parent.add(made)
        return made

    def _file(self, parent: Directory, name: str, mode: int, show: Show, store: Store | None = _no_command) -> None:
        parent.add(File(name, mode, self._owner, self._now_ns, show=show, store=store))

    def fill_group(self, group: Group) -> list[Directory]:
        """All that is in a group's directory. Returns the directories, each of which stands for the group."""
        where, handlers = group.directory, self._handlers

        def write_tasks(caller: Caller, command: str) -> None:
            handlers.write_tasks(group, caller, command)

        self._file(where, "tasks", FILE_RW, partial(handlers.show_tasks, group), write_tasks)
        cpus = range(self._cpus) if group.ids == (0, 0) else ()
        # CPU masks and schemata can be read, but not changed, here: opening them for writing is refused.
        self._file(where, "cpus", FILE_RW, partial(cpu_mask, cpus, self._cpus), None)
        self._file(where, "cpus_list", FILE_RW, partial(cpu_list, cpus), None)
        made = [where]
        if group.parent is None:
            self._allocation_files(where)
            made.append(self.directory(where, "mon_groups"))
        made += self._counter_files(group)
        return made

    def _allocation_files(self, where: Directory) -> None:
        profile = self._profile
        mask = f"{(1 << profile.cbm_bits) - 1:x}"
        self._file(where, "schemata", FILE_RW, partial(self._by_domain, mask), None)
        self._file(where, "mode", FILE_RW, lambda: "shareable\n", None)
        self._file(where, "size", FILE_RO, partial(self._by_domain, str(profile.cache_bytes)))

    def _by_domain(self, value: str) -> str:
        if not self._profile.can_allocate:
            return ""
        return "L3:" + ";".join(f"{domain}={value}" for domain in range(self._profile.domains)) + "\n"

    def _counter_files(self, group: Group) -> Iterator[Directory]:
        top = self.directory(group.directory, "mon_data")
        yield top
        for resource, events in self._profile.resources:
            for domain in range(self._profile.domains):
                where = self.directory(top, f"mon_{resource}_{domain:02d}")
                for event in events:
                    # No write operation at all: EACCES whatever the mode.
                    show = partial(self._handlers.show_counter, group, event, domain)
                    self._file(where, event.name, FILE_RO, show, None)
                yield where

    def fill_info(self, root: Directory) -> None:
        """``info`` and all that is in it."""
        profile, handlers = self._profile, self._handlers
        info = self.directory(root, "info", 0o755)
        self._file(info, "last_cmd_status", FILE_RO, handlers.show_status)
        if profile.can_allocate:
            self._allocation_info(self.directory(info, "L3"))
        for resource, events in profile.resources:
            where = self.directory(info, f"{resource}_MON")
            features = "".join(f"{event.name}\n" for event in events)
            self._file(where, "num_rmids", FILE_RO, lambda: f"{profile.num_rmids}\n")
            self._file(where, "mon_features", FILE_RO, partial(str, features))
            if resource == "L3":
                self._file(where, "mbm_assign_mode", FILE_RW, lambda: "[default]\n", None)
                self._file(
                    where,
                    "max_threshold_occupancy",
                    FILE_RW,
                    handlers.show_threshold,
                    lambda _caller, command: handlers.write_threshold(command),
                )

    def _allocation_info(self, where: Directory) -> None:
        bits, domains = self._profile.cbm_bits, range(self._profile.domains)
        for name, text in {
            "num_closids": f"{self._profile.num_closids}\n",
            "cbm_mask": f"{(1 << bits) - 1:x}\n",
            "min_cbm_bits": "1\n",
            "shareable_bits": "0\n",
            "sparse_masks": "0\n",
            "bit_usage": ";".join(f"{domain}={'S' * bits}" for domain in domains) + "\n",
        }.items():
            self._file(where, name, FILE_RO, partial(str, text))
