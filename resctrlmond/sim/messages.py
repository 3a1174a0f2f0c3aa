# SPDX-License-Identifier: Apache-2.0
"""Orders and replies in the extended attributes of a simulation's root: JSON of these shapes."""

from __future__ import annotations

import enum
import errno
from typing import Annotated

import msgspec

FAULT = "user.resctrlmond.fault"
ACT = "user.resctrlmond.act"
TRUTH = "user.resctrlmond.truth"
VIRTUAL = "user.resctrlmond.virtual"

# Words in a counter file in place of a number (fs/resctrl/ctrlmondata.c, rdtgroup_mondata_show()).
WORDS = ("Unavailable", "Error", "Unassigned")

Number = Annotated[int, msgspec.Meta(ge=1, le=4_194_304)]  # PID_MAX_LIMIT (linux/threads.h)
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]


class Operation(enum.StrEnum):
    """The operation that a fault affects."""

    READ = "read"
    MKDIR = "mkdir"
    RMDIR = "rmdir"
    TASKS = "tasks"


class Fault(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One fault, which applies ``times`` times (None: until the faults are replaced).

    ``group`` (the directory's path below the root, "" for the root itself; for mkdir that of the new group),
    ``domain`` (``mon_L3_00``, ``mon_sub_L3_01``) and ``event`` are patterns of fnmatch(3); the last two are for
    reads.

    ``answer``: for reads ``Unavailable``, ``Error`` or ``Unassigned``, as the hardware's state of that group's own
    RMID; for every operation the name of an errno, with which the system call fails; "" for a delay only. The
    operation takes ``milliseconds`` longer, and all others wait for it, as for rdtgroup_mutex.
    """

    on: Operation = Operation.READ
    group: str = "*"
    domain: str = "*"
    event: str = "*"
    answer: str = ""
    milliseconds: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0
    times: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        words = WORDS if self.on is Operation.READ else ()
        if self.answer and self.answer not in words and self.answer not in errno.errorcode.values():
            raise ValueError(
                f"{self.answer!r} is not a valid answer to {self.on}: use the name of an errno or, for reads, {WORDS}"
            )


class MakeGroup(msgspec.Struct, tag_field="do", tag="mkdir", forbid_unknown_fields=True):
    """Another agent creates the group ``group``."""

    group: str


class RemoveGroup(msgspec.Struct, tag_field="do", tag="rmdir", forbid_unknown_fields=True):
    """Another agent removes the group ``group``, which may belong to any program."""

    group: str


class Steal(msgspec.Struct, tag_field="do", tag="steal", forbid_unknown_fields=True):
    """Another agent moves one thread into the group ``group``."""

    tid: Number
    group: str


class Overlook(msgspec.Struct, tag_field="do", tag="overlook", forbid_unknown_fields=True):
    """The next rmdir or rename of its group misses this thread, like one that is being forked.

    It keeps its RMID, and is in the group that gets the RMID next.
    """

    tid: Number


class Offline(msgspec.Struct, tag_field="do", tag="offline", forbid_unknown_fields=True):
    """All CPUs of ``domain`` (``mon_L3_00``, ``mon_sub_L3_01``) go offline; of ``mon_PERF_PKG_00`` only the files."""

    domain: str


class Online(msgspec.Struct, tag_field="do", tag="online", forbid_unknown_fields=True):
    """All CPUs of ``domain`` come online."""

    domain: str


class CpuOffline(msgspec.Struct, tag_field="do", tag="cpu-offline", forbid_unknown_fields=True):
    """The CPU with that number goes offline."""

    cpu: int


class CpuOnline(msgspec.Struct, tag_field="do", tag="cpu-online", forbid_unknown_fields=True):
    """The CPU with that number comes online."""

    cpu: int


class OverflowWorker(msgspec.Struct, tag_field="do", tag="overflow-worker", forbid_unknown_fields=True):
    """The kernel's worker that reads bandwidth counters before they wrap stops, or runs again."""

    runs: bool


class SetWitness(msgspec.Struct, tag_field="do", tag="witness", forbid_unknown_fields=True, kw_only=True):
    """The witness is loaded or unloaded, begins again if ``restart``, and has other limits (``keep`` in seconds)."""

    available: bool = True
    restart: bool = False
    rows: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 65_536
    keep: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 3600


Act = (
    MakeGroup
    | RemoveGroup
    | Steal
    | Overlook
    | OverflowWorker
    | Offline
    | Online
    | CpuOffline
    | CpuOnline
    | SetWitness
)


class Spawn(msgspec.Struct, tag_field="do", tag="spawn", forbid_unknown_fields=True):
    """The first task (number 1) forks a process in no group; ``tid`` 0: any free number."""

    tid: Annotated[int, msgspec.Meta(ge=0, le=4_194_304)] = 0
    uid: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0


class ForkTask(msgspec.Struct, tag_field="do", tag="fork", forbid_unknown_fields=True):
    """The thread ``by`` forks a process."""

    by: Number
    tid: Annotated[int, msgspec.Meta(ge=0, le=4_194_304)] = 0


class Thread(msgspec.Struct, tag_field="do", tag="thread", forbid_unknown_fields=True):
    """The thread ``by`` starts another one in its process."""

    by: Number
    tid: Annotated[int, msgspec.Meta(ge=0, le=4_194_304)] = 0


class ExitTask(msgspec.Struct, tag_field="do", tag="exit", forbid_unknown_fields=True):
    """The thread ``tid`` ends."""

    tid: Number


class Run(msgspec.Struct, tag_field="do", tag="run", forbid_unknown_fields=True):
    """The thread ``tid`` uses ``ns`` of CPU time on ``cpu``, all of it now."""

    tid: Number
    ns: Annotated[int, msgspec.Meta(ge=0, le=10**18)]
    cpu: Annotated[int, msgspec.Meta(ge=0)] = 0


class SetCgroup(msgspec.Struct, tag_field="do", tag="cgroup", forbid_unknown_fields=True):
    """The thread ``tid`` enters a control group: a directory, or inode numbers of it and of those above it.

    [] is the control group of the real process with this number.
    """

    tid: Number
    cgroup: str | list[Annotated[int, msgspec.Meta(ge=1)]]


class Advance(msgspec.Struct, tag_field="do", tag="advance", forbid_unknown_fields=True):
    """The simulation's clock moves forward: limbo is processed, cache drains, telemetry is pushed."""

    seconds: Seconds


Virtual = Spawn | ForkTask | Thread | ExitTask | Run | SetCgroup | Advance


class Used(msgspec.Struct, omit_defaults=True):
    """Exact CPU time on one node of the L3 caches, and the use that it represents.

    ``picojoules`` is exact (2500 for each nanosecond, 0 if nothing counts energy), ``bytes`` of mbm_total_bytes is
    rounded down.
    """

    rmid: int
    node: int
    cpu_ns: int
    picojoules: int
    bytes: int


class TaskTruth(msgspec.Struct):
    """The use of one thread in each RMID. ``start`` distinguishes reused numbers (0: never seen alive)."""

    tid: int
    start: int
    ended: bool
    used: list[Used]


class RmidTruth(msgspec.Struct):
    """One RMID that has a group or ever counted. ``since_mkdir``: the use of its group; ``total``: since power-on."""

    rmid: int
    group: str | None  # the directory's path below the root; None: it has no group now
    since_mkdir: list[Used]
    total: list[Used]


class Truth(msgspec.Struct):
    """The whole use, without lag, unit or fault. ``left_off`` counts tasks that were dropped or do not fit."""

    tasks: list[TaskTruth]
    rmids: list[RmidTruth]
    left_off: int = 0
