# SPDX-License-Identifier: Apache-2.0
"""Bugs that are planted in the simulator, to test that the suite finds them.

A mutant is chosen by the environment variable RESCTRL_CONFORMANCE_MUTANT; ``environment`` makes every Python process
that inherits it import this module's ``plant`` when it starts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "RESCTRL_CONFORMANCE_MUTANT"
SITE = "from tests.conformance.differential.mutants import plant\n\nplant()\n"


def _enospc_for_ebusy() -> None:
    from resctrlmond.sim.kernel.rmids import RmidPool

    right: Callable[..., int] = RmidPool.allocate

    def allocate(self: Any, now: float) -> int:
        try:
            return right(self, now)
        except OSError as failure:
            raise OSError(errno.ENOSPC, "") from failure

    RmidPool.allocate = allocate  # type: ignore[method-assign]


def _threads_follow_their_leader() -> None:
    from resctrlmond.sim.kernel.tasks import Tasks

    right: Callable[..., bool] = Tasks.join

    def join(self: Any, tid: int, ids: Any) -> bool:
        threads = [int(name) for name in os.listdir(f"/proc/{tid}/task")]
        moved = [right(self, thread, ids) for thread in threads]  # all, even if one fails
        return all(moved)

    Tasks.join = join  # type: ignore[method-assign]


def _children_begin_in_root() -> None:
    from resctrlmond.sim.kernel.tasks import Tasks

    Tasks._bear = lambda *_: None  # type: ignore[method-assign]


def _tasks_stay_behind_on_rmdir() -> None:
    from resctrlmond.sim.kernel.tasks import Tasks

    Tasks.regroup = lambda *_: None  # type: ignore[method-assign]


def _status_is_never_cleared() -> None:
    from resctrlmond.sim.kernel.commands import CommandStatus

    CommandStatus.clear = lambda self: None  # type: ignore[method-assign]


def _newlines_separate_tasks() -> None:
    from resctrlmond.sim.kernel import joining

    names = vars(joining)
    right = names["task_tokens"]
    names["task_tokens"] = lambda command: right(command.strip("\n").replace("\n", ","))


def _octal_is_decimal() -> None:
    from resctrlmond.sim.kernel import joining

    names = vars(joining)
    right = names["parse_int"]
    names["parse_int"] = lambda text: right(text.lstrip("0") or "0") if "x" not in text.lower() else right(text)


def _old_descriptors_live_on() -> None:
    from resctrlmond.sim.kernel.tree import Directory

    def remove(self: Any, child: Any, now_ns: int) -> None:
        self.detach(child, now_ns)

    Directory.remove = remove  # type: ignore[method-assign]


def _rename_loses_the_closid() -> None:
    from resctrlmond.sim.kernel.tasks import Tasks

    right: Callable[..., None] = Tasks.regroup

    def regroup(self: Any, before: Any, after: Any) -> None:
        if before.rmid != after.rmid:
            right(self, before, after)

    Tasks.regroup = regroup  # type: ignore[method-assign]


def _anybody_may_move_anybody() -> None:
    from resctrlmond.sim.host.procs import ProcTable

    right: Callable[..., tuple[int, int] | None] = ProcTable.credentials

    def credentials(self: Any, tid: int) -> tuple[int, int] | None:
        return (65534, 65534) if right(self, tid) else None

    ProcTable.credentials = credentials  # type: ignore[method-assign]


def _monitoring_groups_take_any_cpu() -> None:
    from resctrlmond.sim.kernel.cpus import Cpus

    def write(self: Any, group: Any, parent: Any, wanted: set[int]) -> None:
        for other in parent.children.values():
            other.cpus -= wanted
        group.cpus = wanted

    Cpus._write_monitoring = write  # type: ignore[method-assign]


def _removed_classes_keep_their_cpus() -> None:
    from resctrlmond.sim.kernel.cpus import Cpus

    Cpus.release = lambda *_: None  # type: ignore[method-assign]


def _monitoring_groups_keep_the_cpus_of_their_class() -> None:
    from resctrlmond.sim.kernel.cpus import Cpus

    right: Callable[..., None] = Cpus._write_control

    def write(self: Any, group: Any, wanted: set[int]) -> None:
        before = {child.name: child.cpus & wanted for child in group.children.values()}
        right(self, group, wanted)
        for child in group.children.values():
            child.cpus = before[child.name]

    Cpus._write_control = write  # type: ignore[method-assign]


def _half_a_command_is_taken() -> None:
    from resctrlmond.sim.kernel.allocation import Allocation

    right: Callable[..., None] = Allocation._stage

    def stage(self: Any, group: Any, domain: str, masks: Any) -> None:
        right(self, group, domain, masks)
        self._masks |= masks

    Allocation._stage = stage  # type: ignore[method-assign]


def _masks_outlive_their_class() -> None:
    from resctrlmond.sim.kernel.allocation import Allocation

    Allocation.begin = lambda *_: None  # type: ignore[method-assign]


def _the_last_freed_is_the_first_used() -> None:
    from resctrlmond.sim.kernel.rmids import RmidPool

    right: Callable[..., int] = RmidPool.allocate

    def allocate(self: Any, now: float) -> int:
        self._work_until(now)
        self._free.rotate(1)
        return right(self, now)

    RmidPool.allocate = allocate  # type: ignore[method-assign]


def _numbers_are_the_hosts() -> None:
    from resctrlmond.sim.host.pidns import PidNamespaces

    PidNamespaces._is_ours = lambda *_: True  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    plant.__name__.strip("_"): plant
    for plant in (
        _enospc_for_ebusy,
        _threads_follow_their_leader,
        _children_begin_in_root,
        _tasks_stay_behind_on_rmdir,
        _status_is_never_cleared,
        _newlines_separate_tasks,
        _octal_is_decimal,
        _old_descriptors_live_on,
        _rename_loses_the_closid,
        _anybody_may_move_anybody,
        _monitoring_groups_take_any_cpu,
        _removed_classes_keep_their_cpus,
        _monitoring_groups_keep_the_cpus_of_their_class,
        _half_a_command_is_taken,
        _masks_outlive_their_class,
        _the_last_freed_is_the_first_used,
        _numbers_are_the_hosts,
    )
}


def plant() -> None:
    """Plant the mutant that the environment names."""
    MUTANTS[os.environ[VARIABLE]]()


def environment(mutant: str, place: Path) -> dict[str, str]:
    """Return the environment of a process whose simulations have the bug; ``place`` is an empty directory."""
    (place / "sitecustomize.py").write_text(SITE)
    project = str(Path(__file__).parents[3])
    return {**os.environ, VARIABLE: mutant, "PYTHONPATH": os.pathsep.join([str(place), project])}
