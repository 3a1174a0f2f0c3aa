# SPDX-License-Identifier: Apache-2.0
"""Find processes of programs that are known to manage monitoring groups or RMIDs too.

``daemon/group_losses.py`` names them as the possible cause of removed groups; ``nri/rival.py`` warns about
nri-resctrl-mon. Two owners of monitoring groups on one host interfere with each other.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import msgspec

# The folder of nri-resctrl-mon's values, which exists even if it runs in another PID namespace.
NRI_RESCTRL_MON_FOLDER = "/run/nri-resctrl-mon"


class Program(msgspec.Struct, frozen=True):
    """A known program. ``comm`` matches its name in /proc/PID/comm, which the kernel cuts to 15 characters."""

    name: str
    comm: re.Pattern[str]
    effect: str


PROGRAMS = tuple(
    Program(name, re.compile(comm), effect)
    for name, comm, effect in (
        (
            "nri-resctrl-mon",
            # A plugin that a runtime starts has an index before its name.
            r"(?:nri|[0-9]{2})-resctrl-mon|[0-9]{2}-nri-resctrl-",
            "removes groups of pods that it does not know, every 30 s",
        ),
        (
            "kepler",
            r"kepler",
            "adopts and removes groups named after pod UIDs in its active resctrl mode; run it in passive mode",
        ),
        (
            "memory-bandwidth-exporter",
            r"memory-bandwidt",
            "belongs to OPEA and creates and removes monitoring groups of containers",
        ),
        (
            "intel-cmt-cat",
            r"pqos|pqos-os|pqos-msr|rdtset",
            "belongs to intel-cmt-cat and removes monitoring groups when it resets",
        ),
        (
            "pcm",
            r"pcm(?:-[a-z0-9-]+)?(?:\.x)?",
            "belongs to Intel PCM and may write RMIDs to the processors' registers without resctrl",
        ),
    )
)
NRI_RESCTRL_MON = PROGRAMS[0]


class ProgramProcess(msgspec.Struct, frozen=True):
    """A process of a known program. ``comm`` is its name."""

    pid: int
    comm: str
    program: Program


def find_processes(programs: tuple[Program, ...] = PROGRAMS, proc: str = "/proc") -> Iterator[ProgramProcess]:
    """Yield the processes of root with the name of one of these programs, in the order of their ids.

    Any user can give a process such a name, but only root can write to resctrl or to the processors' registers.
    """
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        with contextlib.suppress(OSError):
            # The folder's owner is the process's effective user, unless the process is not dumpable: then it is root.
            if os.stat(f"{proc}/{pid}").st_uid != 0:
                continue
            # Not the command line: its reader waits for the process's memory.
            with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as file:
                comm = file.read().rstrip("\n")
            found = next((program for program in programs if program.comm.fullmatch(comm)), None)
            if found is not None:
                yield ProgramProcess(pid, comm, found)
