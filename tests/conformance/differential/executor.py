# SPDX-License-Identifier: Apache-2.0
"""Run sequences of operations on one target, and return the observation after each operation.

``python3 -m tests.conformance.differential.executor TARGET IN OUT``: TARGET is ``kernel`` or the name of a
simulation, IN a JSON list of sequences, OUT gets a JSON list with a list of observations for each. Needs the standard
library only.
"""

from __future__ import annotations

import json
import os
import re
import stat
import string
import sys
from pathlib import Path
from typing import Any

from tests.conformance.actors import Actor, ActorPool, outcome, state, wait_until, write
from tests.conformance.differential.generator import Operation, Sequence
from tests.conformance.target import Resctrl, kernel, simulation

Observation = dict[str, Any]
MARK = 10**18  # above each time that utime sets, below the time of the clock
GONE = "no such actor"
# Groups, members, CPUs and masks are compared after every third operation and the last: differences stay, and an
# emulated processor is slow.
LOOK = 3
# Files whose content is the same on both.
COMPARED_FILES = {
    "last_cmd_status",
    "mon_features",
    "cpus",
    "cpus_list",
    "schemata",
    "size",
    "mode",
    "bit_usage",
    "cbm_mask",
}


class _Symbols(string.Formatter):
    """Replaces the names of tasks in a command: ``{P0}`` as it is, ``{P0:x}`` and ``{P0:o}`` in other bases."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return {"x": f"{value:#x}", "o": f"0{value:o}"}.get(format_spec, str(value))


class Executor:
    """Runs one sequence on an empty tree."""

    def __init__(self, fs: Resctrl, actor_pool: ActorPool) -> None:
        self._fs = fs
        self._tids: dict[str, int] = {}
        self._actors: dict[str, Actor] = {}
        self._threads: dict[str, Actor] = {}
        self._parents: dict[str, Actor] = {}
        self._slots: dict[str, int] = {}
        for name in ("P0", "P1", "N"):
            self._actors[name] = actor_pool.actor()
            self._tids[name] = self._actors[name].pid
        self._actors["N"].call("become", uid=65534, gid=65534)

    def run(self, sequence: Sequence) -> list[Observation]:
        """Return the observation after each operation."""
        try:
            return [
                self._do(operation) | (self._look() if number % LOOK == 0 or number == len(sequence) else {})
                for number, operation in enumerate(sequence, start=1)
            ]
        finally:
            for fd in self._slots.values():
                os.close(fd)

    def _do(self, operation: Operation) -> Observation:
        verb, *words = operation
        result = getattr(self, "do_" + verb)(*words)
        return {
            "result": self._symbolic(result) if isinstance(result, str) else result,
            "status": self._symbolic(self._fs.status),
        }

    def _look(self) -> Observation:
        groups = [".", *self._groups()]
        named = [group for group in groups if not group.endswith(" more")]
        return {
            "members": {group: self._members(group) for group in groups},
            "cpus": {group: self._text(group, "cpus_list") for group in named},
            "masks": {group: self._text(group, "schemata") for group in named if "mon_groups" not in group},
            "where": {name: self._where(tid) for name, tid in self._tids.items()},
        }

    def _groups(self) -> list[str]:
        names = [f"mon_groups/{name}" for name in self._fs.names("mon_groups")]
        for control in self._fs.names():
            if control not in ("info", "mon_data", "mon_groups") and os.path.isdir(self._fs.path(control)):
                names += [
                    control,
                    *(f"{control}/mon_groups/{name}" for name in self._fs.names(control, "mon_groups")),
                ]
        # A full pool has more groups than are worth asking, all alike.
        return [name for name in names if "fill-" not in name] + [f"{sum('fill-' in name for name in names)} more"]

    def _members(self, group: str) -> list[str] | str:
        if group.endswith(" more"):
            return ""
        try:
            listed = self._fs.members(group)
        except PermissionError:
            return "EACCES"
        return [name for name, tid in self._tids.items() if tid in listed]

    def _text(self, group: str, name: str) -> str:
        found: list[str] = []
        result = outcome(lambda: found.append(self._fs.read(group, name)))
        return found[0] if found else result

    def _where(self, tid: int) -> str:
        try:
            return "|".join(self._fs.groups_of(tid))
        except (FileNotFoundError, ProcessLookupError):
            return "gone"
        except OSError as failure:
            # ENODATA: the simulation's answer for a missing task.
            return "gone" if failure.errno == 61 else str(failure.errno)

    def _symbolic(self, text: str) -> str:
        names = {str(tid): f"<{name}>" for name, tid in self._tids.items()}
        return re.sub(r"\d+", lambda match: names.get(match[0], match[0]), text)

    def _command(self, text: str) -> str:
        return _Symbols().vformat(text, (), self._tids)

    # Groups and files

    def _clear_status(self) -> None:
        """Clear last_cmd_status of Linux 6.12, which adds to it at each mkdir that has to wait."""
        if not self._fs.is_6_16:
            self._fs.write("tasks", "\n")

    def do_mkdir(self, path: str) -> str:
        self._clear_status()
        result = self._fs.mkdir(path)
        if result in ("OK", "ENOSPC"):
            self._clear_status()
        return result

    def do_rmdir(self, path: str) -> str:
        return outcome(lambda: self._fs.rmdir(path))

    def do_rename(self, old: str, new: str) -> str:
        return outcome(lambda: os.rename(self._fs.path(old), self._fs.path(new)))

    def do_write(self, path: str, text: str) -> str:
        if self._unknown(text):
            return GONE
        return outcome(lambda: write(self._fs.path(path), self._command(text)))

    def do_read(self, path: str) -> str:
        found: list[str] = []
        result = outcome(lambda: found.append(self._fs.read(path)))
        # The tasks in a group's files are compared elsewhere; counts depend on the machine.
        return found[0] if found and path.rpartition("/")[2] in COMPARED_FILES else result

    def do_list(self, path: str) -> str | list[str]:
        found: list[str] = []
        result = outcome(lambda: found.extend(self._fs.names(path)))
        return [name for name in found if not name.startswith("fill-")] if result == "OK" else result

    def do_stat(self, path: str) -> list[str] | str:
        try:
            seen = os.lstat(self._fs.path(path))
        except OSError as failure:
            return str(failure.errno)
        links = seen.st_nlink if stat.S_ISREG(seen.st_mode) else 0
        marked = seen.st_mtime_ns if seen.st_mtime_ns < MARK else "now"
        return [f"{seen.st_mode:o}", f"{seen.st_uid}:{seen.st_gid}", f"{links} {seen.st_size}", str(marked)]

    def do_chmod(self, path: str, mode: str) -> str:
        return outcome(lambda: os.chmod(self._fs.path(path), int(mode, 8)))

    def do_chown(self, path: str, uid: str) -> str:
        return outcome(lambda: os.chown(self._fs.path(path), int(uid), int(uid)))

    def do_utime(self, path: str, ns: str) -> str:
        return outcome(lambda: os.utime(self._fs.path(path), ns=(int(ns), int(ns))))

    def do_unlink(self, path: str) -> str:
        return outcome(lambda: os.unlink(self._fs.path(path)))

    def do_create(self, path: str) -> str:
        return outcome(lambda: os.close(os.open(self._fs.path(path), os.O_CREAT | os.O_WRONLY)))

    def do_truncate(self, path: str) -> str:
        return outcome(lambda: os.truncate(self._fs.path(path), 0))

    def do_fill(self) -> int:
        made = self._fs.fill()
        self._clear_status()
        return made

    def do_remount(self) -> str:
        result = self._fs.unmount()
        self._fs.mount()
        return result

    def do_cpu(self, number: str, online: str) -> str:
        """Take a CPU offline or online, if it exists and is not the first."""
        if not 0 < int(number) < self._fs.cpus:
            return "no such CPU"
        self._fs.switch(online == "online", int(number))
        return "OK"

    # Descriptors

    def do_open(self, slot: str, path: str) -> str:
        self.do_close(slot)

        def open_for(flags: int) -> str:
            return outcome(lambda: self._slots.update({slot: os.open(self._fs.path(path), flags)}))

        result = open_for(os.O_RDWR)
        return result if result == "OK" else open_for(os.O_RDONLY)

    def do_pread(self, slot: str) -> str:
        return outcome(lambda: os.pread(self._slots[slot], 4096, 0)) if slot in self._slots else "closed"

    def do_pwrite(self, slot: str, text: str) -> str:
        if slot not in self._slots or self._unknown(text):
            return "closed"
        return outcome(lambda: os.write(self._slots[slot], self._command(text).encode()))

    def do_close(self, slot: str) -> str:
        if slot not in self._slots:
            return "closed"
        os.close(self._slots.pop(slot))
        return "OK"

    # Tasks

    def _unknown(self, text: str) -> bool:
        """Return whether the text names a task that was never created."""
        fields = (field for _, field, _, _ in string.Formatter().parse(text) if field)
        return not set(fields) <= self._tids.keys()

    def _teller(self, name: str) -> tuple[Actor, int] | None:
        """Return the actor and the thread of a task; None if the task has ended."""
        actor = self._actors.get(name) or self._threads.get(name)
        if actor is None or state(actor.pid) in ("Z", ""):
            return None
        return actor, self._tids[name] if name in self._threads else 0

    def do_as(self, name: str, verb: str, path: str, text: str = "") -> str:
        teller = self._teller(name)
        if teller is None or self._unknown(text):
            return GONE
        details: dict[str, object] = {"path": self._fs.path(path)}
        if verb == "write":
            details["text"] = self._command(text)
        if verb == "open":
            details["flags"] = os.O_RDONLY
        actor, thread = teller
        return str(actor.call(verb, thread=thread, **details))

    def do_fork(self, name: str, child: str) -> str:
        teller = self._teller(name)
        if teller is None:
            return GONE
        actor, thread = teller
        self._actors[child] = actor.fork(thread)
        self._parents[child] = actor
        self._tids[child] = self._actors[child].pid
        return "OK"

    def do_thread(self, name: str, thread: str) -> str:
        actor = self._actors.get(name)
        if actor is None or self._teller(name) is None:
            return GONE
        self._threads[thread] = actor
        self._tids[thread] = actor.thread()
        return "OK"

    def do_exit(self, name: str) -> str:
        teller = self._teller(name)
        if teller is None or name in ("P0", "P1", "N"):
            return GONE
        if name in self._threads:
            self._threads.pop(name).call("end_thread", tid=self._tids[name])
        else:
            self._end(self._actors[name], self._parents.get(name))
        return "OK"

    def _end(self, actor: Actor, parent: Actor | None) -> None:
        """End a process, and wait for all effects, which other processors apply later."""
        actor.exit()
        if parent and state(parent.pid) in ("Z", ""):
            # init reaps an orphan as soon as it is a zombie.
            wait_until(lambda: state(actor.pid) == "")
        threads = [self._tids[name] for name, owner in self._threads.items() if owner is actor]
        wait_until(lambda: not any(state(tid) for tid in threads))
        # Its zombies are reaped just after it has become one itself.
        orphans = [self._tids[child] for child, owner in self._parents.items() if owner is actor]
        wait_until(lambda: not {"Z", "X"} & {state(pid) for pid in orphans})

    def do_reap(self, name: str) -> str:
        parent = self._parents.get(name)
        if parent is None or state(self._tids[name]) != "Z" or state(parent.pid) in ("Z", ""):
            return GONE
        parent.call("reap", pid=self._tids[name])
        self._parents.pop(name)
        return "OK"


def execute(fs: Resctrl, sequences: list[Sequence]) -> list[list[Observation]]:
    """Return the observations on one target, sequence by sequence."""
    found = []
    with ActorPool() as actor_pool:
        for sequence in sequences:
            fs.write("tasks", "\n")
            found.append(Executor(fs, actor_pool).run(sequence))
            actor_pool.end_all()
            fs.mount()
            fs.switch(True, *range(1, fs.cpus))
            fs.clean()
    return found


def main(arguments: list[str]) -> int:
    """Run the sequences of a file, and print the observations."""
    target, source, result = arguments
    fs = kernel() if target == "kernel" else simulation(target)
    try:
        Path(result).write_text(json.dumps(execute(fs, json.loads(Path(source).read_text()))))
    finally:
        fs.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
