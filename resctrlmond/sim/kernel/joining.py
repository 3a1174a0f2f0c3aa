# SPDX-License-Identifier: Apache-2.0
"""The file tasks: the rules and messages of a move into a group, and the list of tasks."""

from __future__ import annotations

import errno
from collections.abc import Callable

from resctrlmond.sim.kernel.commands import SPACE, CommandStatus, parse_int, task_tokens
from resctrlmond.sim.kernel.groups import Group
from resctrlmond.sim.kernel.tasks import DEFAULT, Ids, Tasks, TaskTable
from resctrlmond.sim.kernel.tree import Caller, error
from resctrlmond.sim.profiles import Profile

# Takes a thread that was moved, and its group before and after.
Moved = Callable[[int, Ids, Ids], None]


class TasksFile:
    """Writes and reads of ``tasks`` (rdtgroup_tasks_write(), rdtgroup_tasks_show() in fs/resctrl/rdtgroup.c)."""

    def __init__(self, profile: Profile, status: CommandStatus, table: TaskTable, tasks: Tasks) -> None:
        self._profile = profile
        self._status = status
        self._table = table
        self._tasks = tasks

    def show(self, group: Group, reader: int) -> str:
        """Return a line for each thread, numbered for the thread ``reader``. A control group includes children."""
        if group.parent is not None:
            tids = [m.tid for m in self._tasks.members() if m.ids.rmid == group.ids.rmid]
        elif not self._profile.can_allocate:
            tids = []
        elif group.ids == DEFAULT:
            tids = [tid for tid in self._table.threads() if self._tasks.ids(tid).closid == 0]
        else:
            tids = [m.tid for m in self._tasks.members() if m.ids.closid == group.ids.closid]
        return "".join(f"{tid}\n" for tid in self._table.seen(tids, reader))

    def write(self, group: Group, caller: Caller, command: str, moved: Moved) -> None:
        """Move tasks, up to the first that fails; the ones before it have moved. ``moved`` is called with each."""
        if self._profile.is_oldest:
            self._write_one(group, caller, command, moved)
            return
        self._status.clear()
        for token in task_tokens(command):
            number = parse_int(token)
            if number is None:
                self._status.add(f"Task list parsing error pid {token}")
                raise error(errno.EINVAL)
            if number < 0:
                self._status.add(f"Invalid pid {number}")
                raise error(errno.EINVAL)
            try:
                self._move(group, caller, number, moved)
            except OSError:
                self._status.add(f"Error while processing task {number}")
                raise

    def _write_one(self, group: Group, caller: Caller, command: str, moved: Moved) -> None:
        """Move one number as before Linux 6.7 (arch/x86/kernel/cpu/resctrl/rdtgroup.c): no message if invalid."""
        number = parse_int(command.split("\0", 1)[0].strip(SPACE))
        if number is None or number < 0:
            raise error(errno.EINVAL)
        self._status.clear()
        self._move(group, caller, number, moved)

    def _move(self, group: Group, caller: Caller, number: int, moved: Moved) -> None:
        """Move one thread into the group; 0 is the caller itself. Raises ESRCH, EPERM or EINVAL."""
        tid = self._table.named(number, caller.tid) if number else caller.tid
        credentials = None if tid is None else self._table.credentials(tid)
        if tid is None or credentials is None:
            self._status.add(f"No task {number}")
            raise error(errno.ESRCH)
        # FUSE reports the fsuid; here the effective uid counts (rdtgroup_task_write_permission()).
        euid = self._table.euid(caller.tid)
        if (caller.uid if euid is None else euid) not in (0, *credentials):
            self._status.add(f"No permission to move task {tid}")
            raise error(errno.EPERM)
        self._tasks.check(tid)
        before = self._tasks.ids(tid)
        if before == group.ids:
            return
        if group.parent is not None and before.closid != group.ids.closid:
            self._status.add("Can't move task to different control group")
            raise error(errno.EINVAL)
        if not self._tasks.join(tid, group.ids):
            self._status.add(f"No task {number}")
            raise error(errno.ESRCH)
        moved(tid, before, group.ids)
