# SPDX-License-Identifier: Apache-2.0
"""Generate sequences of operations from a seed: mostly valid ones, many at limits, some that can only fail."""

from __future__ import annotations

import random
from collections.abc import Callable

Operation = list[str]
Sequence = list[Operation]

LENGTH = 30
BEGINNING = 3  # operations that create groups to work on
MON = ["mon_groups/a", "mon_groups/b", "mon_groups/c"]
CLASSES = ["x", "y"]
INNER = ["x/mon_groups/a", "x/mon_groups/d", "y/mon_groups/a"]
NOWHERE = [
    "mon_groups/mon_groups",
    "mon_groups/q\nr",
    "mon_groups/a/z",
    "x/z",
    "mon_data/z",
    "mon_groups/a/mon_data/z",
    "info/z",
    "info/L3_MON/z",
    "tasks",
    "info",
    "tasks/z",
    "mon_groups/none/z",
]
FIXED = [
    "mon_groups",
    "mon_data",
    "info",
    "info/L3_MON",
    "mon_data/mon_L3_00",
    "mon_groups/a/mon_data",
    "x/mon_groups",
]
COUNTERS = ["mon_data/mon_L3_00/mbm_total_bytes", "mon_data/mon_L3_01/mbm_local_bytes"]
FILES = ["tasks", "cpus", "cpus_list", "schemata", "size", "mode", *COUNTERS]
WRITABLE = ["tasks", "tasks", "cpus", "cpus_list", "schemata", "mode", COUNTERS[0]]
INFO = ["info/last_cmd_status", "info/L3_MON/num_rmids", "info/L3_MON/mon_features", "info/none"]
INFO += ["info/L3/bit_usage", "info/L3/cbm_mask"]
TOKENS = ["abc", "", "-5", "4194303", "0x", "08", "2147483648", "1 2", "x,y", "-0x7", "99999999999999999999", "0b1"]
COMMANDS = ["\n", "\0", ",", "\n{P0}", "{P0}\n{P1}", "{P0},,{P1}", "{P0},\n{P1}", " ", "{P0} {P1}", "{P0}x"]
# Good ones on some machine at least, twice as often as bad ones.
LISTS = ["0", "1\n", "2", "3", "0-1", "1-3", "0,2", "2-3", "0-3", "all", "N", "1-N", "0-3:1/2", "\n", "0", "1"]
INFO_WRITABLE = [*INFO, "info/L3_MON/mbm_assign_mode", "info/L3_MON/mbm_assign_mode"]
INFO_COMMANDS = ["default\n", "mbm_event\n", "default", "foo\n", "\n", "0\n", "abc"]
BAD_LISTS = ["4", "9999", "zz", "3-1", "0-", "-1", "0x1", "0:1/2", "5000000000"]
MASKS = ["1", "2", "3\n", "4", "8", "c", "e", "f", "01", "a,", "0", "\n", "00000003"]
BAD_MASKS = ["10", "zz", "0x1", "1-2", "1,1", "000000001", "ffffffff"]
DOMAINS = ["0=1", "0=3", "0=7", "0=5", "0=2", "1=4", "1=1", "1=6", "0= 6 ", "1=0x7", "0=1;1=2", "1=3;0=4", "0=7;1=7"]
BAD_DOMAINS = ["0=0", "0=8", "0=zz", "0", "x=1", "2=1", "0=1;0=2", "", "0=1;;", "1=ff", "0=-1"]
RESOURCES = ["L3", "L3", "L3", "L3", "L3", " L3 ", "L2", "MB", ""]
CLASS_MODES = ["shareable", "exclusive", "pseudo-locksetup", "pseudo-locked", "", "shareable "]
MODES = ["0", "400", "644", "600", "755", "700", "222"]
ATTRIBUTED = ["", "", "/tasks", "/mon_data", "/cpus", "/cpus_list", "/schemata"]
SLOTS = ["f", "g"]
STATES = ["offline", "online"]


class Generator:
    """Generates sequences; the same seed generates the same ones."""

    def __init__(self, seed: int, *, allocation: bool, fill: bool = True, switch: bool = False) -> None:
        self._random = random.Random(seed)
        self._groups = MON + (CLASSES + INNER if allocation else [])
        self._fill = fill
        self._tasks: list[str] = []
        self._live: list[str] = []
        self._born = 0
        self._kinds: list[tuple[int, Callable[[], Operation]]] = [
            (14, self._mkdir),
            (7, self._rmdir),
            (5, self._rename),
            (20, self._write),
            (9, self._write_cpus),
            (6, self._write_masks),
            (1, lambda: ["write", self._place("mode"), self._choose(CLASS_MODES) + self._end()]),
            (1, lambda: ["write", self._choose(INFO_WRITABLE), self._choose(INFO_COMMANDS)]),
            (4, self._write_self),
            (7, self._fork),
            (5, self._thread),
            (3, lambda: ["exit", self._task()]),
            (3, lambda: ["reap", self._task()]),
            (4, lambda: ["read", self._file()]),
            (2, lambda: ["list", self._path()]),
            (3, lambda: ["stat", self._node()]),
            (3, lambda: ["chmod", self._group() + self._choose(ATTRIBUTED), self._mode()]),
            (2, lambda: ["utime", self._group(), str(self._random.randrange(10**18))]),
            (2, lambda: ["chown", self._group() + self._choose(["", "/tasks"]), "65534"]),
            (4, self._as_nobody),
            (4, lambda: ["open", self._choose(SLOTS), self._group() + "/" + self._choose(WRITABLE)]),
            (4, lambda: ["pread", self._choose(SLOTS)]),
            (3, lambda: ["pwrite", self._choose(SLOTS), self._any_command()]),
            (2, lambda: ["close", self._choose(SLOTS)]),
            (1, lambda: [self._choose(["unlink", "truncate"]), self._node()]),
            (1, lambda: ["create", self._group() + "/" + self._choose([*WRITABLE, "new"])]),
        ]
        if switch:
            self._kinds.append((2, lambda: ["cpu", self._choose(["1", "2", "2", "3", "3"]), self._choose(STATES)]))

    def sequence(self) -> Sequence:
        """Return ``LENGTH`` operations on an empty tree, with processes P0, P1 of root and N of an ordinary user."""
        self._tasks, self._live, self._born = ["P0", "P1", "N"], [], 0
        weights = [weight for weight, _ in self._kinds]
        made = [self._mkdir() for _ in range(BEGINNING)]
        made += [self._random.choices(self._kinds, weights)[0][1]() for _ in range(LENGTH - BEGINNING)]
        made = [_with_text(operation) for operation in made]
        if self._fill and self._random.random() < 0.03:
            made.insert(self._random.randrange(LENGTH), ["fill"])
        if self._random.random() < 0.08:
            made.insert(self._random.randrange(LENGTH), ["remount"])
        return made

    def _choose(self, pool: list[str]) -> str:
        return self._random.choice(pool)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _group(self) -> str:
        """Return the name of a group, mostly of one that probably exists."""
        return self._choose(self._live if self._live and self._chance(0.85) else self._groups)

    def _path(self) -> str:
        return self._choose(NOWHERE + FIXED) if self._chance(0.25) else self._group()

    def _file(self) -> str:
        if self._chance(0.2):
            return self._choose(INFO)
        return (self._group() + "/" if self._chance(0.8) else "") + self._choose(FILES)

    def _node(self) -> str:
        return self._file() if self._chance(0.5) else self._path()

    def _mode(self) -> str:
        return self._choose(MODES)

    def _task(self) -> str:
        return self._choose(self._tasks)

    def _new(self) -> str:
        self._born += 1
        name = f"C{self._born}"
        self._tasks.append(name)
        return name

    def _mkdir(self) -> Operation:
        if self._chance(0.15):
            return ["mkdir", self._choose(NOWHERE)]
        path = self._choose(self._groups)
        if path not in self._live and ("/mon" not in path or path.partition("/")[0] in self._live):
            self._live.append(path)
        return ["mkdir", path]

    def _rmdir(self) -> Operation:
        if self._chance(0.25):
            return ["rmdir", self._choose(NOWHERE + FIXED)]
        path = self._group()
        self._live = [name for name in self._live if name != path and not name.startswith(f"{path}/")]
        return ["rmdir", path]

    def _rename(self) -> Operation:
        if self._chance(0.4):
            return ["rename", self._node(), self._choose([*NOWHERE, *FIXED, *self._groups])]
        old, new = self._group(), self._choose(self._groups)
        if old in self._live and "/" in old and "/" in new and new not in self._live:
            self._live[self._live.index(old)] = new
        return ["rename", old, new]

    def _token(self) -> str:
        if self._chance(0.15):
            return self._choose(TOKENS)
        form = self._choose(["", "", "", "", ":x", ":o"])
        return "{" + self._task() + form + "}"

    def _command(self) -> str:
        if self._chance(0.1):
            return self._choose(COMMANDS)
        tokens = [self._token() for _ in range(self._random.choice([1, 1, 1, 2, 3]))]
        return self._choose([",", ",", ", ", " ,\t"]).join(tokens) + self._choose(["", "\n", " ", ","])

    def _write(self) -> Operation:
        group = "." if self._chance(0.15) else self._group()
        return ["write", f"{group}/tasks", self._command()]

    def _end(self) -> str:
        """Return, nearly always, the newline that some files require."""
        return "" if self._chance(0.08) else "\n"

    def _place(self, name: str) -> str:
        return ("." if self._chance(0.3) else self._group()) + "/" + name

    def _cpus(self, name: str) -> str:
        good, bad = (MASKS, BAD_MASKS) if name == "cpus" else (LISTS, BAD_LISTS)
        return self._choose(bad if self._chance(0.15) else good)

    def _masks(self) -> str:
        lines = [
            self._choose(RESOURCES) + ":" + self._choose(BAD_DOMAINS if self._chance(0.25) else DOMAINS)
            for _ in range(self._random.choice([1, 1, 1, 1, 2]))
        ]
        return "\n".join(lines) + self._end()

    def _write_cpus(self) -> Operation:
        name = self._choose(["cpus", "cpus_list", "cpus_list"])
        return ["write", self._place(name), self._cpus(name)]

    def _write_masks(self) -> Operation:
        controls = [".", *(group for group in self._groups if "mon_groups" not in group)]
        return ["write", self._choose(controls) + "/schemata", self._masks()]

    def _any_command(self) -> str:
        kind = self._choose(["tasks", "tasks", "cpus", "cpus_list", "schemata"])
        if kind == "tasks":
            return self._command()
        return self._masks() if kind == "schemata" else self._cpus(kind)

    def _write_self(self) -> Operation:
        return ["as", self._task(), "write", self._group() + "/tasks", self._choose(["0", "0\n", "-0"])]

    def _fork(self) -> Operation:
        return ["fork", self._task(), self._new()]

    def _thread(self) -> Operation:
        return ["thread", self._task(), self._new()]

    def _as_nobody(self) -> Operation:
        verb = self._choose(["write", "mkdir", "rmdir", "open"])
        if verb == "write":
            return ["as", "N", "write", self._group() + "/tasks", self._command()]
        if verb == "rmdir":
            # For a file, the kernel returns EACCES; on FUSE, it first checks whether it is a directory.
            return ["as", "N", verb, self._choose([*FIXED, *self._groups])]
        return ["as", "N", verb, self._node() if verb == "open" else self._path()]


def _with_text(operation: Operation) -> Operation:
    """Return the operation, with a write of a newline in the place of an empty write.

    resctrl answers a write of no bytes (ENODEV for an open file of a removed group, EINVAL for some files). A
    filesystem in user space does not get it: generic_write_checks() in fs/read_write.c ends it before FUSE sends it.
    """
    is_write = operation[0] in ("write", "pwrite") or operation[2:3] == ["write"]
    return [*operation[:-1], "\n"] if is_write and not operation[-1] else operation
