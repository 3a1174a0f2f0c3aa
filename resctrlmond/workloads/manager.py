# SPDX-License-Identifier: Apache-2.0
"""The parts of a daemon that work on workloads, and what starts and runs them."""

from __future__ import annotations

import contextlib
import os
import time

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.package_energy import DEFAULT_FOLDER, PackageEnergy
from resctrlmond.resctrl.tree import Tree
from resctrlmond.workloads.evidence.foreign_writes import Resets
from resctrlmond.workloads.evidence.interference import Interference
from resctrlmond.workloads.evidence.run_state import RunStates
from resctrlmond.workloads.evidence.takeover import TakeOver
from resctrlmond.workloads.evidence.witnessed import Proofs
from resctrlmond.workloads.groups import ends, removal
from resctrlmond.workloads.groups.context import Context, Reloadable
from resctrlmond.workloads.machine.pools import Machine
from resctrlmond.workloads.machine.state import MachineFile
from resctrlmond.workloads.model.latency import Latencies
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.pods import Inventory
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.profiles.companions import CompanionStatus
from resctrlmond.workloads.records.quality_file import QualityFiles
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store
from resctrlmond.workloads.records.sums import Sums
from resctrlmond.workloads.records.usage import SharedPass, Usage
from resctrlmond.workloads.upkeep.exposures import Exposures
from resctrlmond.workloads.upkeep.maintenance import Maintenance
from resctrlmond.workloads.upkeep.recovery import Problem, Recovery
from resctrlmond.workloads.upkeep.tree_status import TreeWatcher
from resctrlmond.workloads.verbs.read import Usages, usage_of


class Manager:
    """The parts of a daemon that own the groups with the ``mark``: creates them, and starts, runs and ends them.

    ``alerts`` are the present problems of the host, by subject; "" is none. ``pods`` are the pods that owners
    reported. ``companions`` are the states of the companions, by the key of their workloads, and ``unit_memory``
    states what became of the memory settings of a workload that is a unit. ``latencies`` are the durations of calls,
    which the interfaces count. ``machine`` reads the use of the whole machine, for concurrent callers once.
    """

    def __init__(self, tree: Tree, store: Store, snapshots: Snapshots, mark: Mark, settings: Settings) -> None:
        self.pods = Inventory()
        self.alerts: dict[str, str] = {}
        self.companions: dict[str, CompanionStatus] = {}
        self.unit_memory: dict[str, str] = {}
        self.latencies = Latencies()
        quality = QualityFiles(snapshots)
        store.before_save = quality.before_save
        store.on_unsaved = snapshots.remove_quality
        # Simulated packages have no energy of their own.
        energy = PackageEnergy(DEFAULT_FOLDER if tree.simulation is None else "")
        run = os.path.dirname(store.folder)
        file = MachineFile(os.path.join(run, "machine.json"), mark.boot_id)
        machine = Machine(
            tree, store, snapshots, gid=mark.gid, energy=energy, may_run=ends.may_leave_tasks, file=file
        )
        runs = RunStates(store)
        interference = Interference(tree)
        interference.on_created, interference.on_events_lost = machine.created_by_others, machine.events_lost
        proofs = Proofs(tree)
        resets = self._resets = Resets(proofs.writes)
        resets.on_reset, resets.on_unknown = machine.counters_reset, machine.resets_unknown
        machine.read_events = lambda: all([interference.read_events(), resets.report()])
        self.context = Context(
            tree=tree,
            store=store,
            runs=runs,
            snapshots=snapshots,
            mark=mark,
            config=Reloadable(settings),
            quality=quality,
            take_over=TakeOver(tree, store, mark),
            interference=interference,
            machine=machine,
            proofs=proofs,
        )
        store.sums = Sums(sums_path(store.folder), mark.boot_id, quality.final_totals)
        self.maintenance = Maintenance(self.context)
        self.recovery = Recovery(self.context)
        self.watcher = TreeWatcher(tree, mark.gid, store.refs, self.context.proofs)
        self.usages = Usages(self.context, store.sums)
        self.machine = SharedPass(machine.read)
        self.exposures = Exposures(
            os.path.join(run, "exposed"),
            snapshots,
            store.get,
            self._read_exposed,
            lambda: self.maintenance.is_stopping,
        )
        self._found_at_start: list[Problem] = []

    def recover(self) -> None:
        """Continue where the last daemon stopped. This is the only way to start. See ``problems`` afterwards."""
        # Before a group is created, so that what other programs change is seen from now on.
        self.context.interference.start()
        self._resets.begin()
        self._found_at_start = self.recovery.recover()
        self.exposures.start()

    @property
    def problems(self) -> list[str]:
        """The problems that the start found and that last, and what fails at present."""
        return [*(problem.text for problem in self._found_at_start), *self.maintenance.problems]

    def tick(self) -> None:
        """Do the work of a second (``Maintenance.tick``), and forget the problems of the start that are over."""
        ctx = self.context
        self.maintenance.tick()
        self.usages.tick()
        self.exposures.tick(ctx.config.settings.expose_interval_s)
        self.machine.forget_old()
        with contextlib.suppress(ResctrlError, OSError):  # the next reading of the machine reports it
            # Before the writes are forgotten: nobody may read the machine for days.
            self._resets.report()
            ctx.machine.tick(has_trouble=ctx.interference.has_trouble)
        lasting = []
        for problem in self._found_at_start:
            try:
                if problem.lasts():
                    lasting.append(problem)
            except ResctrlError:
                lasting.append(problem)  # the tree cannot be read now
        self._found_at_start = lasting

    def release_all(self) -> list[str]:
        """End every workload, with its last values written, and remove every group that has our mark.

        Tasks lose their group and continue; groups of other programs are not touched. No daemon may be running.
        Returns the problems, [] if none of these groups is left. Raises NotMounted.
        """
        # As a start does, so that runs that a crash cut short, and groups without a record, end as what they are.
        self.recover()
        ctx, problems = self.context, []
        for key in [workload.key for workload in ctx.store.all()]:
            try:
                with ctx.store.transaction(key) as txn:
                    if not txn.workload.state.is_over:
                        removal.finish(ctx, txn, "resctrlmond released all its groups")
                    for claim in txn.workload.claims if txn.workload.is_interrupted else ():
                        txn.save(removal.without_claim(txn.workload, claim.owner))  # or a later start resumes it
            except (ResctrlError, OSError) as error:
                problems.append(f"{key}: {error}")
        self.exposures.tick(0)
        # Groups without a record whose names are not valid keys.
        for found in ctx.tree.scan():
            if found.gid != ctx.mark.gid:
                continue
            try:
                ctx.tree.remove(found.ref)
            except (ResctrlError, OSError) as error:
                problems.append(f"{found.path}: {error}")
        return problems

    def _read_exposed(self, key: str) -> Usage:
        """Return the use of a workload for its containers, in a tick."""
        self.maintenance.last_progress = time.monotonic()
        return usage_of(self.context, key).shown()


def sums_path(records: str) -> str:
    """Return the path of the file of the sums, which is beside the folder of the records."""
    return os.path.join(os.path.dirname(records), "sums.json")
