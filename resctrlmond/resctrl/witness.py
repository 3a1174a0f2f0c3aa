# SPDX-License-Identifier: Apache-2.0
"""Read what resctrlmond-witness(8) has seen: which control group used CPU time with which CLOSID and RMID."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence

import msgspec

from resctrlmond.resctrl import kernel_files
from resctrlmond.resctrl.errors import NotRead, not_read
from resctrlmond.resctrl.tree import Tree

FOLDER = "/sys/fs/bpf/resctrlmond"
STATE = "/run/resctrlmond/witness/state"
# In a simulation, which lists no such directory.
SIMULATED_FOLDER = ".witness"
FORMAT = 1

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

    ``cgroups`` are the inode numbers of the control group and of those above it, nearest first.
    """

    ids: Ids
    cpu_ns: int
    at_ns: int
    cgroups: tuple[int, ...]


class Entry(msgspec.Struct, frozen=True):
    """The IDs of the tasks that writes have moved into a group, and the control groups that these were in."""

    ids: Ids
    cgroups: frozenset[int] = frozenset()


class Seen:
    """A look at the witness."""

    def __init__(self, watch: Watch, uses: Iterable[Use]) -> None:
        self.watch = watch
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

    def __init__(self, tree: Tree) -> None:
        simulated = os.path.join(tree.path, SIMULATED_FOLDER)
        self.folder = FOLDER if tree.simulation is None else simulated

    def watch(self) -> Watch:
        """Return since when the witness has counted without a gap."""
        text = self._read("status")
        try:
            found = {name: values for name, *values in map(str.split, text.splitlines())}
            is_known = int(found["format"][0]) == FORMAT
            # Without these, the time before a move is charged to the RMID or the control group after it.
            is_whole = found["cgroup_moves"] == ["1"] and found["task_moves"] == ["1"]
            watch = Watch(int(found["begun"][0]), sum(map(int, found["gaps"])))
        except (ValueError, LookupError) as error:
            raise self._not_understood("status") from error
        if not is_known:
            raise self._not_understood("status")
        if not is_whole:
            raise NotRead("does not see all moves of tasks on this kernel", path=self._path("status"))
        return watch

    def why_unavailable(self) -> str:
        """Return why the witness could not be loaded, as its loader has written; "" if it does not say."""
        try:
            lines = kernel_files.read(STATE).decode(errors="replace").splitlines()
        except OSError:
            return ""
        words = dict(line.partition(" ")[::2] for line in lines)
        return words.get("detail", "") if words.get("state") == "unavailable" else ""

    def look(self, cgroups: Collection[int] = (), ids: Collection[Ids] = ()) -> Seen:
        """Return what the witness has seen until now, or at least what it has seen there.

        That is in these control groups and below, and with these IDs: to parse all takes longer than an Assign. A
        task that ends during the call may be counted twice, never not at all.
        """
        tasks, ended = self._read("tasks").splitlines(), self._read("ended").splitlines()
        if cgroups or ids:
            # The digits may be part of another number.
            wanted = [*map(str, cgroups), *(f"{closid} {rmid} " for closid, rmid in ids)]
            tasks, ended = (
                [line for line in lines if any(map(line.__contains__, wanted))] for lines in (tasks, ended)
            )
        # Read last: if a use was refused, the gap is known.
        watch = self.watch()
        try:
            return Seen(watch, [*_parse_tasks(tasks), *_parse_ended(ended)])
        except ValueError as error:
            raise self._not_understood("tasks or ended") from error

    def entry(self, directory: int, since_ns: int) -> Entry | None:
        """Return what writes to the file ``tasks`` of a directory have moved there, by its inode number.

        ``since_ns`` (ns since boot) is when the directory was created: inode numbers are given again. None if no
        write since then has moved a task there. Raises NotRead if writes may have, and are not in the file any more.
        """
        lines = self._read("moves").splitlines()
        try:
            # Only these lines are parsed, of thousands: a container may be starting.
            found = (line.split() for line in lines if f" {directory} " in line)
            writes = [
                words[0]
                for words in found
                if words[1] == "write" and int(words[3]) == directory and int(words[2]) >= since_ns
            ]
            named = [line for line in lines if any(" task " in line and f" {write} " in line for write in writes)]
            moved = [words for words in map(str.split, named) if words[3] in writes]
            if moved:
                last = max(moved, key=lambda words: int(words[3]))
                return Entry((int(last[10]), int(last[11])), frozenset(int(words[7]) for words in moved))
            numbers = [(int(number), int(at_ns)) for number, _, at_ns, _ in (line.split(" ", 3) for line in lines)]
        except (ValueError, LookupError) as error:
            raise self._not_understood("moves") from error
        oldest = min(numbers, default=(1, 0))
        if oldest[0] > 1 and oldest[1] >= since_ns:
            raise NotRead("does not have the moves into the group any more", path=self._path("moves"))
        return None

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _read(self, name: str) -> str:
        path = self._path(name)
        try:
            return kernel_files.read(path).decode("ascii", "replace")
        except OSError as error:
            raise not_read(error, "read what the witness has seen", path) from error

    def _not_understood(self, name: str) -> NotRead:
        return NotRead("is not in the format of resctrlmond-witness(8)", path=self._path(name))


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


def _chain(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
