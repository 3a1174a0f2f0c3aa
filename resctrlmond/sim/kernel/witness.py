# SPDX-License-Identifier: Apache-2.0
"""The files of resctrlmond-witness(8): which task used CPU time with which RMID, and the writes to files."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import grp
import re
from collections.abc import Callable, Collection, Iterator, Mapping

from resctrlmond.sim.kernel.groups import NodeFactory
from resctrlmond.sim.kernel.tasks import DEFAULT, ROOT, Cgroups, Ids, Member, RemovedCgroup, Tasks, TaskTable
from resctrlmond.sim.kernel.tree import Caller, Directory

NAME = ".witness"
GROUP = "resctrlmon"
ROWS, MOVES, KEEP_SECONDS = 65_536, 4096, 3600
ANCESTORS = 16  # control groups above that of a row: what is used further below is counted on that level
# After the report of an exit, the kernel frees the memory of the task (do_exit() in kernel/exit.c). No report has the
# CPU time of that. It is at most TAIL_NS and this part of the task's time.
TAIL_NS, TAIL_PART, MOST_TAIL_NS = 10**6, 8, 10**7
TAIL_ENDS_NS = 10**8  # after the report
COMM_BYTES, TEXT_BYTES = 15, 63
# The program in the kernel does not find a task by an octal or hexadecimal number.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,6}", re.ASCII)


@dataclasses.dataclass(slots=True)
class _Row:
    cgroups: Cgroups
    cpu_ns: int = 0
    tasks: int = 0
    changed: int = 0


@dataclasses.dataclass(slots=True)
class _Tail:
    ns: int = 0
    reported: int = 0


class Witness:
    """Sums of CPU time by control group and RMID, removed control groups, and the last writes to files.

    The time of a member is charged when it leaves its group or its control group, and when it ends. The time of real
    tasks of the default group is the rest of each control group; see ``settle``. ``boot_ns`` is CLOCK_BOOTTIME.
    """

    def __init__(self, table: TaskTable, boot_ns: Callable[[], int]) -> None:
        self._table = table
        self._boot_ns = boot_ns
        self.capacity, self.keep_s = ROWS, KEEP_SECONDS
        # By control group: the use of members and of removed control groups, and the rest.
        self._elsewhere: collections.Counter[Cgroups] = collections.Counter()
        self._rests: dict[Cgroups, int] = {}
        # The most that ended members may have used after their reports.
        self._tails: dict[tuple[Cgroups, Ids], _Tail] = {}
        self.restart()

    def restart(self) -> None:
        """Begin again without rows and moves. Use that was not charged yet is charged later."""
        self._begun = self._boot_ns()
        self._rows: dict[tuple[Ids, int], _Row] = {}
        self._removed: dict[RemovedCgroup, int] = {}
        self._gaps = self._lost_removals = self._number = self._dropped = 0
        self._moves: collections.deque[Callable[[], str]] = collections.deque(maxlen=MOVES)

    # -- sums

    def use(self, member: Member, ns: int) -> None:
        """Record CPU time of a member, which is charged later."""
        member.uncharged += ns
        self._elsewhere[member.cgroups] += ns

    def charge(self, member: Member, ended: int = 0) -> None:
        """Charge the use of a member to its group and its control group."""
        if member.uncharged or ended:
            self.add(member.ids, member.cgroups, member.uncharged, ended)
            member.uncharged = 0
        if ended:
            tail = self._tails.setdefault((member.cgroups, member.ids), _Tail())
            tail.ns += min(TAIL_NS + member.cpu_ns // TAIL_PART, MOST_TAIL_NS)
            tail.reported = self._boot_ns()

    def add(self, ids: Ids, cgroups: Cgroups, ns: int, ended: int = 0) -> None:
        """Add CPU time and ended tasks to a row; count a gap if there is no room for a new one."""
        cgroups = cgroups[-ANCESTORS - 1 :]
        row = self._rows.get((ids, cgroups[0]))
        if row is None:
            if len(self._rows) >= self.capacity:
                self._gaps += 1
                return
            row = self._rows[ids, cgroups[0]] = _Row(cgroups)
        row.cpu_ns += ns
        row.tasks += ended
        row.changed = self._boot_ns()

    def settle(self, usage: Mapping[Cgroups, int]) -> None:
        """Charge the rest of the use of each control group to ended members, and then to tasks of the default group.

        ``usage`` has the CPU time of all existing control groups including those below them, from before the last
        charge of members, so that the rest is not too large. Nothing is known about virtual tasks in it.
        """
        if not usage:
            return
        for gone in sorted((self._elsewhere.keys() | self._rests.keys()) - usage.keys(), key=len, reverse=True):
            # The usage of the control group above it continues to include that of a removed one.
            if above := gone[1:]:
                self._elsewhere[above] += self._elsewhere.pop(gone, 0) + self._rests.pop(gone, 0)
        known: collections.Counter[int] = collections.Counter()
        for cgroups, ns in self._elsewhere.items():
            known.update(dict.fromkeys(cgroups, ns))
        tails = self._tails_by_cgroup(usage.keys())
        for cgroups in sorted(usage, key=len, reverse=True):
            rest = self._rests.get(cgroups, 0)
            grown = max(0, usage[cgroups] - known[cgroups[0]] - rest)
            for former, ids, tail in tails[cgroups]:
                if used := min(grown, tail.ns):
                    self.add(ids, former, used)
                    self._elsewhere[cgroups] += used
                    known.update(dict.fromkeys(cgroups, used))
                    grown, tail.ns = grown - used, tail.ns - used
            if grown:
                self.add(DEFAULT, cgroups, grown)
            self._rests[cgroups] = rest + grown
            known.update(dict.fromkeys(cgroups, rest + grown))

    def _tails_by_cgroup(self, existing: Collection[Cgroups]) -> Mapping[Cgroups, list[tuple[Cgroups, Ids, _Tail]]]:
        """Return the tails by the nearest control group that exists, and forget those that are complete."""
        found: dict[Cgroups, list[tuple[Cgroups, Ids, _Tail]]] = collections.defaultdict(list)
        for (cgroups, ids), tail in self._tails.items():
            above = cgroups
            while above and above not in existing:
                above = above[1:]
            found[above].append((cgroups, ids, tail))
        since = self._boot_ns() - TAIL_ENDS_NS
        self._tails = {key: tail for key, tail in self._tails.items() if tail.reported > since}
        return found

    # -- removed control groups

    def find_removed(self) -> None:
        """Record the control groups that were removed. Each one for which there is no room is a gap."""
        for cgroup in self._table.removed_cgroups():
            if len(self._removed) < self.capacity:
                self._removed[cgroup] = self._boot_ns()
            else:
                self._lost_removals += 1
            self._drop_old()

    def _drop_old(self) -> None:
        """If a table is three quarters full, drop the control groups that were removed longer than ``keep_s`` ago."""
        since = self._boot_ns() - self.keep_s * 10**9
        old = {cgroup.inode: at for cgroup, at in self._removed.items() if at < since}
        if old and max(len(self._rows), len(self._removed)) * 4 >= self.capacity * 3:
            self._dropped = max(self._dropped, *old.values())
            self._rows = {key: row for key, row in self._rows.items() if key[1] not in old}
            self._removed = {cgroup: at for cgroup, at in self._removed.items() if cgroup.inode not in old}

    # -- moves

    def _next(self, record: Callable[[], str]) -> int:
        self._number += 1
        number = self._number
        self._moves.append(lambda: f"{number} {record()}\n")
        return number

    @contextlib.contextmanager
    def writing(
        self, directory: Directory, file: str, caller: Caller, command: str
    ) -> Iterator[Callable[[int, Ids, Ids], None]]:
        """Record a write to a file of a directory, and its result.

        Yields a function that records the move of a thread from one group to another.
        """
        tgid, comm = self._table.caller(caller.tid)
        text, begun = command.encode(errors="surrogateescape"), self._boot_ns()
        tokens = re.split("[,\n\t \0]", command) if file == "tasks" else ()
        unresolved = sum(1 for token in tokens if token and not _NUMBER.fullmatch(token))
        name = _word(directory.name.encode(errors="surrogateescape"), TEXT_BYTES) or "/"
        writer = f"{unresolved} {tgid} {caller.tid} {_word(comm, COMM_BYTES)} {file} {name} {_word(text, TEXT_BYTES)}"
        result = "- -"
        write = self._next(lambda: f"write {begun} {directory.inode} {result} {writer}")

        def moved(tid: int, before: Ids, after: Ids) -> None:
            stat = self._table.stat(tid)
            if stat is None:
                return
            where = (self._table.cgroups(tid) or ROOT)[0]
            ids = f"{before.closid} {before.rmid} {after.closid} {after.rmid}"
            task = f"{self._table.caller(tid)[0]} {tid} {self._table.start_ns(stat)}"
            line = f"task {self._boot_ns()} {write} {task} {where} {ids} {stat.cpu_ns}"
            self._next(lambda: line)

        code = -5  # EIO
        try:
            yield moved
            code = len(text)
        except OSError as failure:
            code = -(failure.errno or 5)
            raise
        finally:
            result = f"{code} {self._boot_ns() - begun}"

    # -- files

    def fill(self, parent: Directory, now_ns: int, look: Callable[[], None], tasks: Tasks) -> Directory:
        """Create the files. ``look`` charges all use until now."""
        try:
            group = grp.getgrnam(GROUP).gr_gid
        except KeyError:
            group = 0
        factory = NodeFactory((0, group), now_ns)
        made = factory.directory(parent, NAME, 0o750)
        made.is_hidden = True

        def add(name: str, show: Callable[[], str]) -> None:
            factory.file(made, name, 0o440, show, None)

        def after_look(show: Callable[[], str]) -> Callable[[], str]:
            def show_now() -> str:
                look()
                return show()

            return show_now

        add("tasks", after_look(lambda: "".join(self._tasks(tasks))))
        add("ended", after_look(self._ended))
        add("removed", after_look(self._show_removed))
        add("moves", lambda: "".join(line() for line in self._moves))
        add("status", self._status)
        return made

    def _tasks(self, tasks: Tasks) -> Iterator[str]:
        for tid, tgid in self._table.threads().items():
            stat = self._table.stat(tid)
            if stat is None:
                continue
            member = tasks.locate(tid, stat.start)
            cgroups = member.cgroups if member else self._table.cgroups(tid) or ROOT
            ids = member.ids if member else DEFAULT
            # All use of tasks of the default group is charged at once.
            charged = member.cpu_ns - member.uncharged if member else stat.cpu_ns
            used = max(stat.cpu_ns, charged)
            yield (
                f"{tgid} {tid} {self._table.start_ns(stat)} {ids.closid} {ids.rmid} {used} {charged} "
                f"{stat.has_ended:d} {_path(cgroups)}\n"
            )

    def _ended(self) -> str:
        return "".join(
            f"{ids.closid} {ids.rmid} {row.cpu_ns} {row.tasks} {row.changed} {_path(row.cgroups)}\n"
            for (ids, _), row in self._rows.items()
        )

    def _show_removed(self) -> str:
        return "".join(f"{cgroup.inode} {at} {cgroup.parent} {cgroup.name}\n" for cgroup, at in self._removed.items())

    def _status(self) -> str:
        # The kernel has the time of a removal. A run that begins now began after it.
        self.find_removed()
        return (
            f"format 4\nbegun {self._begun}\ngaps {self._gaps} 0 0 {self._lost_removals}\n"
            f"rows {len(self._rows)} {self.capacity}\nmoves {self._number} {MOVES}\nkeep {self.keep_s}\n"
            f"dropped {self._dropped}\ncgroup_moves 1\ntask_moves 1\n"
        )


def _path(cgroups: Cgroups) -> str:
    return ",".join(map(str, cgroups[-ANCESTORS - 1 :]))


def _word(text: bytes, most: int) -> str:
    """Return a text without its last newline as one word, with ? for blanks and for what is not printable."""
    kept = text.split(b"\0", 1)[0][:most].removesuffix(b"\n")
    return "".join(chr(byte) if 32 < byte < 127 else "?" for byte in kept)
