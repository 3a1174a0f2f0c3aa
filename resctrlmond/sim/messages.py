# SPDX-License-Identifier: Apache-2.0
"""What is said through the extended attributes of a simulation's root: JSON of these shapes, both ways."""

from __future__ import annotations

import enum
import errno
from typing import Annotated

import msgspec

FAULT = "user.resctrlmond.fault"
ACT = "user.resctrlmond.act"
TRUTH = "user.resctrlmond.truth"
VIRTUAL = "user.resctrlmond.virtual"

# What a counter file can say instead of a number (fs/resctrl/ctrlmondata.c, rdtgroup_mondata_show()).
WORDS = ("Unavailable", "Error", "Unassigned")

Number = Annotated[int, msgspec.Meta(ge=1, le=4_194_304)]  # PID_MAX_LIMIT (linux/threads.h)
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]


class Operation(enum.StrEnum):
    """What a fault befalls."""

    READ = "read"
    MKDIR = "mkdir"
    RMDIR = "rmdir"
    TASKS = "tasks"


class Fault(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One thing that goes wrong, ``times`` times (None: until the faults are set anew).

    ``group`` (the directory's path below the root, "" for the root itself; of mkdir the new one's), ``domain``
    (``mon_L3_00``, ``mon_sub_L3_01``) and ``event`` are patterns as of fnmatch(3); the last two are for reads.

    ``answer``: for reads ``Unavailable``, ``Error`` or ``Unassigned``, which is what the hardware says of that
    group's own RMID, or for every operation the name of an errno, which the system call fails with; "" for
    nothing but slowness. ``milliseconds`` the operation takes longer, and all others wait for it, as they do for
    rdtgroup_mutex.
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
            raise ValueError(f"{self.answer!r} is no answer to {self.on}: name an errno, or of reads {WORDS}")


class MakeGroup(msgspec.Struct, tag_field="do", tag="mkdir", forbid_unknown_fields=True):
    """Another agent makes the group ``group``."""

    group: str


class RemoveGroup(msgspec.Struct, tag_field="do", tag="rmdir", forbid_unknown_fields=True):
    """Another agent removes the group ``group``, whosoever it is."""

    group: str


class Steal(msgspec.Struct, tag_field="do", tag="steal", forbid_unknown_fields=True):
    """Another agent moves one thread into the group ``group``."""

    tid: Number
    group: str


class Overlook(msgspec.Struct, tag_field="do", tag="overlook", forbid_unknown_fields=True):
    """The next rmdir or rename of its group does not see this thread, as one that is being forked.

    It keeps the RMID that it has, and is in the group that gets the RMID next.
    """

    tid: Number


class Offline(msgspec.Struct, tag_field="do", tag="offline", forbid_unknown_fields=True):
    """All CPUs of ``domain`` (``mon_L3_00``, ``mon_sub_L3_01``) go offline; of ``mon_PERF_PKG_00`` its files go."""

    domain: str


class Online(msgspec.Struct, tag_field="do", tag="online", forbid_unknown_fields=True):
    """All CPUs of ``domain`` come back."""

    domain: str


class CpuOffline(msgspec.Struct, tag_field="do", tag="cpu-offline", forbid_unknown_fields=True):
    """The CPU with that number goes offline."""

    cpu: int


class CpuOnline(msgspec.Struct, tag_field="do", tag="cpu-online", forbid_unknown_fields=True):
    """That CPU comes back."""

    cpu: int


class OverflowWorker(msgspec.Struct, tag_field="do", tag="overflow-worker", forbid_unknown_fields=True):
    """The kernel's worker that looks at bandwidth counters before they wrap is starved, or runs again."""

    runs: bool


Act = MakeGroup | RemoveGroup | Steal | Overlook | OverflowWorker | Offline | Online | CpuOffline | CpuOnline


class Spawn(msgspec.Struct, tag_field="do", tag="spawn", forbid_unknown_fields=True):
    """A process is forked by the first task (number 1), which is in no group; ``tid`` 0: any free number."""

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


class Advance(msgspec.Struct, tag_field="do", tag="advance", forbid_unknown_fields=True):
    """The simulation's clock goes forward: limbo is worked through, cache drains, telemetry is pushed."""

    seconds: Seconds


Virtual = Spawn | ForkTask | Thread | ExitTask | Run | Advance


class Used(msgspec.Struct, omit_defaults=True):
    """CPU time on one node of the L3 caches, exact, and what it stands for.

    ``picojoules`` is exact (2500 for each nanosecond, 0 where nothing counts energy), ``bytes`` of
    mbm_total_bytes is rounded down.
    """

    rmid: int
    node: int
    cpu_ns: int
    picojoules: int
    bytes: int


class TaskTruth(msgspec.Struct):
    """What one thread used in each RMID. ``start`` tells its number from others' (0: never seen alive)."""

    tid: int
    start: int
    ended: bool
    used: list[Used]


class RmidTruth(msgspec.Struct):
    """One RMID that has a group, or ever counted: ``since_mkdir`` is its group's own, ``total`` since power-on."""

    rmid: int
    group: str | None  # the directory's path below the root; None: it has none now
    since_mkdir: list[Used]
    total: list[Used]


class Truth(msgspec.Struct):
    """All that was charged, without lag, unit or fault. ``left_off`` counts tasks forgotten, or too many to fit."""

    tasks: list[TaskTruth]
    rmids: list[RmidTruth]
    left_off: int = 0
