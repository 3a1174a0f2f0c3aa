# SPDX-License-Identifier: Apache-2.0
"""The verbs of the manager to interrupt, each with the state before it."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from resctrlmond.resctrl.mounts import mounts
from resctrlmond.resctrl.processes import Descriptor
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.profiles.requests import Assignment, UnitCommand
from resctrlmond.workloads.rmids import overflow, rmid_transfer
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import add_member, remove_member
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.release import reconcile, release
from tests.workloads.builders import drop
from tests.workloads.conftest import UID, Host, assignment, join

CTR = "4d" * 32
SERVICE = "shop.service"


@dataclass
class Scene:
    """A machine with a workload, and processes that live until the scene is over."""

    host: Host
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    # A container for which its runtime has a group of its own.
    container: str = field(default_factory=lambda: uuid.uuid4().hex * 2)
    # Those of units.
    cgroups: list[str] = field(default_factory=list)
    # The pidfd of the process that waits before a command.
    pidfd: Descriptor | None = None

    def process(self, class_: str = "") -> int:
        """Start a process in a class."""
        child = subprocess.Popen(["sleep", "600"])
        self.children.append(child)
        if class_:
            self.host.tree.write_task(class_, child.pid)
        return child.pid

    def end_processes(self) -> None:
        """End all processes."""
        for child in self.children:
            child.kill()
            child.wait()
        self.children.clear()
        for path in self.cgroups:
            os.rmdir(path)
        self.cgroups.clear()

    def cgroup(self, name: str) -> str:
        """Create the control group of a unit, and return its path."""
        top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
        path = os.path.join(top, f"resctrlmond-crash-{os.getpid()}-{name}")
        os.mkdir(path)
        self.cgroups.append(path)
        return path

    def unit(self, name: str, priority: int) -> None:
        """Start a unit with a process, and assign it as the watch of units does."""
        path = self.cgroup(name)
        join(path, self.process())
        assign(
            self.host.ctx,
            Assignment(key=name, owner=SYSTEMD, cgroup=path, kind="unit", member=name, priority=priority),
        )


def _unit_waits(scene: Scene) -> None:
    """Start two units, of which the second has a higher priority, and waits."""
    scene.unit("low.service", -2)
    # No RMID is free beyond the reserve.
    scene.host.ctx.config.settings = Settings(reserve=65536, overflow=0)
    scene.unit("high.service", -1)


def _take_rmid(scene: Scene) -> None:
    # In the process that is interrupted only.
    rmid_transfer.MIN_RUN_S = 0.0
    scene.host.manager.maintenance.tick()


def _units_without_rmid(scene: Scene) -> None:
    """Start units, of which two wait and may share a group."""
    scene.unit("own.service", -1)
    scene.host.ctx.config.settings = Settings(reserve=scene.host.tree.free_rmids() - 1, overflow=4)
    scene.unit("first.service", -1)
    scene.unit("second.service", -1)


def _unit_in_shared_group(scene: Scene) -> None:
    """Start units, of which one shares a group and gets an RMID now."""
    _units_without_rmid(scene)
    scene.host.manager.maintenance.tick()
    assert scene.host.get("overflow@-.slice").living
    scene.host.ctx.config.settings = Settings(reserve=0, overflow=4)


def _end_shared_group(scene: Scene) -> None:
    # In the process that is interrupted only.
    overflow.LINGER_S = 0.0
    scene.host.ctx.config.settings = Settings(reserve=0, overflow=0)
    scene.host.manager.maintenance.tick()


def _command(scene: Scene) -> None:
    """Start a process of SERVICE, which waits before its command."""
    if not scene.cgroups:
        scene.cgroup(SERVICE)
    join(scene.cgroups[0], scene.process())
    scene.pidfd = Descriptor(os.pidfd_open(_pid(scene)))


def _assign_self(scene: Scene) -> None:
    """Assign that process as its call does after systemd has stated the commands of the service."""
    assign(
        scene.host.ctx,
        Assignment(
            key=SERVICE,
            owner=SYSTEMD,
            pidfd=scene.pidfd,
            kind="unit",
            member=SERVICE,
            own_cgroup=scene.cgroups[0],
            late=False,
            unit_command=UnitCommand(commands=tuple(f"ExecStart={child.pid}" for child in scene.children)),
        ),
    )


def _command_runs(scene: Scene) -> None:
    """Start a command of SERVICE in its group, and a process that waits before the next one."""
    _command(scene)
    _assign_self(scene)
    assert baseline_of(scene.host.get(SERVICE)) is Quality.EXACT
    _command(scene)


def check_service(scene: Scene, pids: set[int]) -> None:
    """Check that SERVICE is not exact if processes that it names have begun outside its group."""
    workload = scene.host.ctx.store.get(SERVICE)
    member = workload.member(SERVICE) if workload is not None else None
    if workload is None or member is None:
        return
    wrong = [name for name in member.commands if int(name.rpartition("=")[2]) in pids]
    is_exact = baseline_of(workload) is Quality.EXACT
    assert not (wrong and is_exact), f"exact, although {wrong} began outside"


def _joined(scene: Scene) -> None:
    assign(scene.host.ctx, assignment(CTR, scene.process(), "oci", member="c1"))


def _spread(scene: Scene) -> None:
    pod = "/nowhere"
    assign(scene.host.ctx, assignment(UID, scene.process(), "oci", member="c1", pod_cgroup=pod))
    assign(scene.host.ctx, assignment(UID, scene.process("gold"), "oci", member="c2", pod_cgroup=pod))


def _ended(scene: Scene) -> None:
    _joined(scene)
    release(scene.host.ctx, CTR, owner="oci")


def _pid(scene: Scene) -> int:
    return scene.children[-1].pid


def _in_group_of_runtime(scene: Scene) -> None:
    """Start a container of a pod, which its runtime puts into a group of its own, created if needed."""
    ref = GroupRef("", scene.container)
    if scene.host.tree.find(ref) is None:
        scene.host.make_foreign(scene.container)
    scene.host.tree.write_task(ref.path, scene.process())


def _observe(scene: Scene) -> None:
    assign(scene.host.ctx, assignment(UID, _pid(scene), "oci", member=scene.container, kind="container"))


def _in_pod(scene: Scene) -> None:
    assign(scene.host.ctx, assignment(UID, scene.process(), "oci", member="c1"))
    _in_group_of_runtime(scene)


def _observed(scene: Scene) -> None:
    _in_pod(scene)
    _observe(scene)


def _observed_and_dead(scene: Scene) -> None:
    _observed(scene)
    child = scene.children.pop()
    child.kill()
    child.wait()


def _observed_before(scene: Scene) -> None:
    _observed_and_dead(scene)
    scene.host.manager.maintenance.record_ends(scene.container)
    _in_group_of_runtime(scene)


def _observed_and_removed(scene: Scene) -> None:
    _observed(scene)
    scene.host.manager.maintenance.tick()
    os.rmdir(scene.host.tree.full_path(GroupRef("", scene.container)))


@dataclass(frozen=True)
class Verb:
    """A verb: ``before`` prepares the state, and ``action`` calls the verb.

    With ``recovers_by_tick``, the next tick corrects the effects of an error; otherwise a restart is necessary. With
    ``is_loss``, another program removes a group before the verb, so that its run is lost; without it, no run may be
    lost.
    """

    before: Callable[[Scene], object]
    action: Callable[[Scene], object]
    recovers_by_tick: bool = True
    is_loss: bool = False


def _after_crash(scene: Scene) -> None:
    """Prepare the state after a crash: an ended workload, one in two classes, and a group without a record."""
    _spread(scene)
    assign(scene.host.ctx, assignment(CTR, scene.process(), "oci"))
    scene.children[-1].kill()
    scene.children[-1].wait()
    create(scene.host.ctx, "unrecorded", owner="other")
    drop(scene.host.ctx.store, "unrecorded")
    scene.host.ctx.snapshots.delete("unrecorded")
    _in_group_of_runtime(scene)
    _observe(scene)


def _lost(scene: Scene) -> None:
    _spread(scene)
    scene.host.manager.maintenance.tick()
    os.rmdir(scene.host.tree.full_path(scene.host.get(UID).groups[1:][0].ref))


VERBS: dict[str, Verb] = {
    "Create": Verb(lambda scene: None, lambda scene: create(scene.host.ctx, "web", owner="other")),
    "Assign": Verb(
        Scene.process,
        lambda scene: assign(scene.host.ctx, assignment(CTR, _pid(scene), "oci", member="c1")),
    ),
    "Assign (again)": Verb(
        _ended, lambda scene: assign(scene.host.ctx, assignment(CTR, _pid(scene), "oci", member="c1"))
    ),
    "Assign (another class)": Verb(
        lambda scene: (
            assign(scene.host.ctx, assignment(UID, scene.process(), "oci", pod_cgroup="/nowhere")),
            scene.process("gold"),
        ),
        lambda scene: assign(scene.host.ctx, assignment(UID, _pid(scene), "oci", pod_cgroup="/nowhere")),
    ),
    "Assign (observed)": Verb(_in_pod, _observe),
    "Assign (observed again)": Verb(_observed_before, _observe),
    "AssignSelf": Verb(_command, _assign_self),
    "AssignSelf (next command)": Verb(_command_runs, _assign_self),
    "Release": Verb(_joined, lambda scene: release(scene.host.ctx, CTR, owner="oci")),
    "Release (two classes)": Verb(_spread, lambda scene: release(scene.host.ctx, UID, owner="oci")),
    "AddMember": Verb(_joined, lambda scene: add_member(scene.host.ctx, CTR, "c2", owner="oci")),
    "RemoveMember": Verb(_joined, lambda scene: remove_member(scene.host.ctx, CTR, "c1")),
    "Reconcile": Verb(_spread, lambda scene: reconcile(scene.host.ctx, "oci", [])),
    "Move": Verb(_joined, lambda scene: move(scene.host.ctx, CTR, "gold")),
    "tick (checkpoint)": Verb(_spread, lambda scene: scene.host.manager.maintenance.tick()),
    "tick (loss)": Verb(_lost, lambda scene: scene.host.manager.maintenance.tick(), is_loss=True),
    "tick (RMID of a unit)": Verb(_unit_waits, _take_rmid),
    "tick (units share a group)": Verb(_units_without_rmid, lambda scene: scene.host.manager.maintenance.tick()),
    "tick (unit leaves a shared group)": Verb(
        _unit_in_shared_group, lambda scene: scene.host.manager.maintenance.tick()
    ),
    "tick (end of a shared group)": Verb(_unit_in_shared_group, _end_shared_group),
    "end of an observed container": Verb(
        _observed_and_dead, lambda scene: scene.host.manager.maintenance.record_ends(scene.container)
    ),
    "tick (loss of an observed group)": Verb(
        _observed_and_removed, lambda scene: scene.host.manager.maintenance.tick(), is_loss=True
    ),
    # A group without a record that could not be removed is among the problems of Status until the next start.
    "recovery": Verb(_after_crash, lambda scene: scene.host.restart(), recovers_by_tick=False),
}
