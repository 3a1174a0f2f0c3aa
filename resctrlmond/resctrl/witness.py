# SPDX-License-Identifier: Apache-2.0
"""Read what resctrlmond-witness(8) has seen: the CPU time, moves of tasks, and removed control groups."""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from resctrlmond.resctrl import cgroups, kernel_files
from resctrlmond.resctrl.errors import NotRead, not_read
from resctrlmond.resctrl.tree import Tree

FOLDER = "/sys/fs/bpf/resctrlmond"
STATE = "/run/resctrlmond/witness/state"
# In a simulation, which lists no such directory.
SIMULATED_FOLDER = ".witness"
FORMAT = 4

# How often to read the moves again if a record is incomplete, and the time between. The kernel may have interrupted
# the program that writes it.
_TRIES = 5
_RETRY_S = 0.001

# How many times as many moves are kept as the witness keeps.
_KEPT = 4

# The witness keeps so many bytes of a name. Some kernels accept longer names of control groups.
_NAME_BYTES = 255

# CLOSID and RMID, on arm64 PARTID and PMG.
Ids = tuple[int, int]


class Watch(msgspec.Struct, frozen=True):
    """Since when the witness has counted without a gap: the time of its start (ns since boot) and its gaps so far.

    While it is the same, the witness has missed nothing.
    """

    begun_ns: int
    gaps: int


class Use(msgspec.Struct, frozen=True):
    """CPU time (ns) that the tasks of one control group used with one RMID until ``at_ns`` (ns since boot).

    ``cgroups`` are the inode numbers of the control group and of those above it, nearest first. ``at_ns`` is 1 << 63
    for what a living task has used since it was charged last.
    """

    ids: Ids
    cpu_ns: int
    at_ns: int
    cgroups: tuple[int, ...]


class Move(msgspec.Struct, frozen=True):
    """A task that was moved by a write to the file ``tasks`` of ``directory`` (its inode number).

    ``number`` counts writes and moves from 1 on, ``at_ns`` is the time (ns since boot), ``writer`` the process that
    wrote (0: not known) and ``program`` its name, ``cgroup`` the inode number of the control group that the task was
    in. ``old`` and ``new`` are the IDs of the task.
    """

    number: int
    at_ns: int
    writer: int
    directory: int
    cgroup: int
    old: Ids
    new: Ids
    program: str = ""


class Write(msgspec.Struct, frozen=True):
    """A write to ``file`` in ``directory`` (its inode number), whose name is ``parent`` ("/" for the mount point).

    ``number``, ``writer`` and ``program`` are as in ``Move``. ``until_ns`` is the time (ns since boot) when it
    returned, 1 << 63 if that was not seen. ``is_refused``: the kernel returned an error.
    """

    number: int
    until_ns: int
    writer: int
    directory: int
    is_refused: bool
    file: str
    parent: str
    program: str


class Moves(msgspec.Struct, frozen=True):
    """All moves after number ``before`` until number ``last``, and what other processes wrote to files but ``tasks``.

    All since ``since_ns`` (ns since boot) are among ``tasks``, and ``others``, the writes. ``writes`` are the
    last ones to all files, by number. ``capacity`` is the number of records that the witness keeps. ``is_whole``:
    there was none after ``last`` that the witness was still writing. ``begun_ns`` is as in ``Watch``.
    """

    before: int = 0
    last: int = 0
    since_ns: int = 0
    tasks: tuple[Move, ...] = ()
    others: tuple[Write, ...] = ()
    writes: dict[int, Write] = {}
    capacity: int = 0
    is_whole: bool = True
    begun_ns: int = 0

    def after(self, number: int) -> Sequence[Move]:
        """Return the moves after a number."""
        return self.tasks[bisect.bisect_right(self.tasks, number, key=lambda move: move.number) :]

    def into(self, directory: int, since_ns: int) -> list[Move]:
        """Return the moves into a directory that was created at ``since_ns``: inode numbers are given again."""
        return [move for move in self.tasks if move.directory == directory and move.at_ns >= since_ns]


class RemovedCgroup(msgspec.Struct, frozen=True):
    """A control group of v2 that was removed at ``at_ns`` (ns since boot).

    ``inode`` and ``parent`` are the inode numbers of its directory and of the one above it, which no other control
    group gets. ``name`` is the name of its directory, or the first 255 bytes of a longer one.
    """

    inode: int
    at_ns: int
    parent: int
    name: str


class Seen:
    """A look at the witness.

    ``dropped_ns`` is the newest removal (ns since boot) of a control group whose use may be missing in it, and its
    line in the file ``removed``, because the witness has dropped them; 0 if it has dropped none.
    """

    def __init__(self, watch: Watch, uses: Iterable[Use], dropped_ns: int = 0) -> None:
        self.watch = watch
        self.dropped_ns = dropped_ns
        self._of_rmid: dict[int, list[Use]] = {}
        self._of_cgroup: dict[int, list[Use]] = {}
        for use in uses:
            self._of_rmid.setdefault(use.ids[1], []).append(use)
            for cgroup in use.cgroups:
                self._of_cgroup.setdefault(cgroup, []).append(use)

    def of_rmid(self, rmid: int | None) -> Sequence[Use]:
        """Return all use with an RMID, in any class."""
        return self._of_rmid.get(rmid, ()) if rmid is not None else ()

    def of_cgroups(self, cgroups: Iterable[int]) -> Iterable[Use]:
        """Return all use in these control groups and below, each once."""
        return {id(use): use for cgroup in cgroups for use in self._of_cgroup.get(cgroup, ())}.values()


class Witness:
    """The files of the witness of a tree. Methods raise NotRead if there is none, or the files are not understood."""

    def __init__(self, tree: Tree, own: Callable[[], int] = lambda: 0) -> None:
        """``own`` returns the ID of this process as the witness states it, 0 if that is not known."""
        simulated = os.path.join(tree.path, SIMULATED_FOLDER)
        self.folder = FOLDER if tree.simulation is None else simulated
        self._own = own
        self._moves = Moves()

    def watch(self) -> Watch:
        """Return since when the witness has counted without a gap."""
        return self._status()[0]

    def _status(self) -> tuple[Watch, int, int, int]:
        """Return the watch, the number of the last move, how many moves are kept, and ``dropped_ns`` of ``Seen``."""
        text = self._read("status")
        try:
            found = {name: values for name, *values in map(str.split, text.splitlines())}
            is_known = int(found["format"][0]) == FORMAT
            # Without these, the time before a move is charged to the RMID or the control group after it.
            is_whole = found["cgroup_moves"] == ["1"] and found["task_moves"] == ["1"]
            watch = Watch(int(found["begun"][0]), sum(map(int, found["gaps"])))
            last, capacity = map(int, found["moves"])
            (dropped_ns,) = map(int, found["dropped"])
        except (ValueError, LookupError) as error:
            raise self._not_understood("status") from error
        if not is_known:
            raise self._not_understood("status")
        if not is_whole:
            raise NotRead("does not see all moves of tasks on this kernel", path=self._path("status"))
        return watch, last, capacity, dropped_ns

    def watch_and_last_move(self) -> tuple[Watch, int]:
        """Return the watch and the number of the last write or move (``Move``)."""
        return self._status()[:2]

    def why_unavailable(self) -> str:
        """Return why the witness could not be loaded, as its loader has written; "" if it does not say."""
        try:
            lines = kernel_files.read(STATE).decode(errors="replace").splitlines()
        except OSError:
            return ""
        words = dict(line.partition(" ")[::2] for line in lines)
        return words.get("detail", "") if words.get("state") == "unavailable" else ""

    def look(self, cgroups: Collection[int] = (), rmids: Collection[int] = ()) -> Seen:
        """Return what the witness has seen until now, or at least what it has seen there.

        That is in these control groups and below, and with these RMIDs: to parse all takes longer than an Assign. A
        task that ends during the call may be counted twice, and is never missing. If it is counted to be subtracted,
        with ``cgroups`` or ``rmids``, it may be missing, and is never counted twice.
        """
        if cgroups or rmids:
            # The digits may be part of another number.
            wanted = [*map(str, cgroups), *(f" {rmid} " for rmid in rmids)]
            ended, tasks = self._lines("ended", wanted), self._lines("tasks", wanted)
            for _ in range(_TRIES):
                if ended == (now := self._lines("ended", wanted)):
                    break
                ended, tasks = now, self._lines("tasks", wanted)
        else:
            tasks, ended = self._read("tasks").splitlines(), self._read("ended").splitlines()
        # Read last: if a use was refused or dropped, the gap or the drop is known.
        watch, _, _, dropped_ns = self._status()
        try:
            return Seen(watch, [*_parse_tasks(tasks), *_parse_ended(ended)], dropped_ns)
        except ValueError as error:
            raise self._not_understood("tasks or ended") from error

    def _lines(self, name: str, wanted: Collection[str]) -> list[str]:
        return [line for line in self._read(name).splitlines() if any(map(line.__contains__, wanted))]

    def removed(self) -> list[RemovedCgroup]:
        """Return the control groups that were removed since the witness began, in no order.

        The witness may drop them an hour after their removal (``Seen.dropped_ns`` of a later look). If it could not
        record one, the gaps of ``watch`` are more after this call.
        """
        try:
            return _parse_removed(self._read_bytes("removed"))
        except ValueError as error:
            raise self._not_understood("removed") from error

    def at_paths(self, paths: Iterable[str]) -> dict[str, dict[int, int]]:
        """Return the inode numbers of all control groups that existed at each path since the witness began.

        Each with the time of its removal (ns since boot), the one that exists with 1 << 63. Paths are absolute, and
        need not exist. One that is not below the mount point of control groups, or of which no control group was
        removed, is left out. See ``removed`` for what may be missing.
        """
        names = {cgroup.name for cgroup in self.removed()}
        # Read first: a control group that is removed after this look is in the file that is read then.
        existing = {path: cgroups.inodes_to(path) for path in paths if _kept_name(os.path.basename(path)) in names}
        if not existing:
            return {}
        removed: dict[str, list[RemovedCgroup]] = {}
        for cgroup in self.removed():
            removed.setdefault(cgroup.name, []).append(cgroup)
        return {path: _lead_to(levels, removed) for path, levels in existing.items()}

    def moves(self) -> Moves:
        """Return the moves that were read before, and those that the witness has seen since."""
        now = known = self._moves
        for _ in range(_TRIES):
            watch, last, capacity, _ = self._status()
            if watch.begun_ns != known.begun_ns:
                known = Moves(begun_ns=watch.begun_ns)
            if last == known.last:
                return known
            now = self._with_new(known, last, capacity)
            if now.is_whole:
                break
            time.sleep(_RETRY_S)
        # Another thread may have read more meanwhile; then the next call reads these again.
        self._moves = now
        return now

    def _with_new(self, known: Moves, last: int, capacity: int) -> Moves:
        """Return the known moves with those that were made since, until ``last`` or an incomplete record."""
        found: dict[int, list[str]] = {}
        try:
            for line in self._read("moves").splitlines():
                if known.last < (number := int(line.partition(" ")[0])) <= last:
                    found[number] = line.split()
            # Older records were overwritten. A later one that is missing is not complete yet.
            oldest = max(known.last, last - capacity)
            until = next((number for number in range(oldest + 1, last + 1) if number not in found), last + 1) - 1
            writes = {number: write for number, write in known.writes.items() if number > last - capacity}
            new, new_others, own = list[Move](), list[Write](), self._own()
            for number, words in sorted(found.items()):
                is_new = oldest < number <= until
                if words[1] == "write":
                    write = writes[number] = _parse_write(words)
                    if is_new and write.file != "tasks" and write.writer != own:
                        new_others.append(write)
                elif is_new:
                    new.append(_parse_move(words, writes))
            tasks, before, since_ns = (*known.tasks, *new), known.before, known.since_ns
            others = (*known.others, *new_others)
            if oldest > known.last:
                tasks, others, before = tuple(new), tuple(new_others), oldest
                ats = (int(words[2]) for number, words in found.items() if number > oldest)
                since_ns = min(ats, default=time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        except (ValueError, LookupError) as error:
            raise self._not_understood("moves") from error
        if len(tasks) > _KEPT * capacity:
            dropped, tasks = tasks[: len(tasks) // 2], tasks[len(tasks) // 2 :]
            before, since_ns = dropped[-1].number, dropped[-1].at_ns + 1
        if len(others) > _KEPT * capacity:
            last_dropped, others = others[len(others) // 2], others[len(others) // 2 + 1 :]
            before, since_ns = max(before, last_dropped.number), max(since_ns, last_dropped.until_ns + 1)
        is_whole = until == last
        return Moves(before, until, since_ns, tasks, others, writes, capacity, is_whole, known.begun_ns)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _read(self, name: str) -> str:
        return self._read_bytes(name).decode("ascii", "replace")

    def _read_bytes(self, name: str) -> bytes:
        path = self._path(name)
        try:
            return kernel_files.read(path)
        except OSError as error:
            raise not_read(error, "read what the witness has seen", path) from error

    def _not_understood(self, name: str) -> NotRead:
        return NotRead("is not in the format of resctrlmond-witness(8)", path=self._path(name))


def _parse_write(words: Sequence[str]) -> Write:
    """Return a write. Raises ValueError, IndexError."""
    number, at_ns, directory, result, duration, writer = (words[0], *words[2:6], words[7])
    is_done = result != "-"
    return Write(
        number=int(number),
        until_ns=int(at_ns) + int(duration) if is_done else 1 << 63,
        writer=int(writer),
        directory=int(directory),
        is_refused=is_done and int(result) < 0,
        file=words[10],
        parent=words[11],
        program=words[9],
    )


def _parse_move(words: Sequence[str], writes: Mapping[int, Write]) -> Move:
    """Return a move. Raises ValueError, IndexError."""
    write = writes.get(int(words[3]))
    writer, directory, program = (write.writer, write.directory, write.program) if write else (0, 0, "")
    cgroup, *ids = map(int, words[7:12])
    return Move(int(words[0]), int(words[2]), writer, directory, cgroup, (ids[0], ids[1]), (ids[2], ids[3]), program)


def _parse_tasks(lines: Iterable[str]) -> list[Use]:
    """Return the CPU time of living tasks that is not in the file "ended" yet. Raises ValueError."""
    uses = []
    for line in lines:
        _, _, _, closid, rmid, cpu_ns, charged_ns, _, cgroups = line.split()
        if (rest := int(cpu_ns) - int(charged_ns)) > 0:
            # A living task may use more at any moment.
            uses.append(Use((int(closid), int(rmid)), rest, 1 << 63, _chain(cgroups)))
    return uses


def _parse_ended(lines: Iterable[str]) -> list[Use]:
    """Return the CPU time in the file "ended". Raises ValueError."""
    uses = []
    for line in lines:
        closid, rmid, cpu_ns, _, changed, cgroups = line.split()
        uses.append(Use((int(closid), int(rmid)), int(cpu_ns), int(changed), _chain(cgroups)))
    return uses


def _parse_removed(text: bytes) -> list[RemovedCgroup]:
    """Return the removed control groups. A name may have any character but a newline. Raises ValueError."""
    found = []
    *lines, rest = text.split(b"\n")
    for line in lines:
        inode, at_ns, parent, name = line.split(b" ", 3)
        found.append(RemovedCgroup(int(inode), int(at_ns), int(parent), os.fsdecode(name)))
    if rest or not all(cgroup.name for cgroup in found):
        raise ValueError
    return found


def _lead_to(
    existing: Iterable[tuple[str, int | None]], removed: Mapping[str, Sequence[RemovedCgroup]]
) -> dict[int, int]:
    """Return the control groups on the last level of a path, also below removed parents; see ``at_paths``.

    ``existing`` are the name and the inode number on each level from the root; ``removed`` is by name.
    """
    found: dict[int, int] = {}
    for name, inode in existing:
        gone = {each.inode: each.at_ns for each in removed.get(_kept_name(name), ()) if each.parent in found}
        # A control group that was removed between the two looks is in both.
        found = ({} if inode is None else {inode: 1 << 63}) | gone
    return found


def _kept_name(name: str) -> str:
    """Return as much of the name of a control group as the witness keeps."""
    return os.fsdecode(os.fsencode(name)[:_NAME_BYTES])


def _chain(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
