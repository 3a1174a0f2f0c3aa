# SPDX-License-Identifier: Apache-2.0
"""The use of the whole machine, divided into pools, so that nothing that the hardware counted is left out.

Each RMID belongs to one pool: the groups of workloads (``TRACKED``), the groups of other programs (``FOREIGN``), and
the classes, whose tasks are in no group (``UNTRACKED``). A group's RMID is counted from its first reading to its last
one; what the kernel's value of a class rises and falls by, when groups come and go, is not use (``class_counters``).
What the packages used beyond their cores is a pool too (``UNCORE``), if the host shows it.

Without a call, the daemon reads all groups only once, when counting begins (``since``). From the first call on, a
file keeps what was counted (``machine_state``), and the next daemon continues from it. No counter falls.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from decimal import Decimal, localcontext

import msgspec

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.class_counters import ClassCounters, Counter, GroupCounters, read_class
from resctrlmond.resctrl.counters import EVENTS, EXACTLY, Event, Kind, Reading, Value, event, repeated
from resctrlmond.resctrl.errors import NoSuchGroup, NotMounted, NotRead, ResctrlError, printable
from resctrlmond.resctrl.mounts import Mounting, superblock_at
from resctrlmond.resctrl.package_energy import PackageEnergy
from resctrlmond.resctrl.tree import Tree
from resctrlmond.workloads.figures import accounting, caveats, checkpoint
from resctrlmond.workloads.figures.checkpoint import Checkpoint, CounterHistory
from resctrlmond.workloads.figures.reasons import Reason, text_of
from resctrlmond.workloads.machine.state import (
    ClassUse,
    MachineFile,
    MachineState,
    OtherGroup,
    OwnUse,
    Sum,
    Sums,
    add_reason,
)
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.states import Pool, Quality
from resctrlmond.workloads.model.workload import Group, Workload
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store

log = logging.getLogger(__name__)

__all__ = ["REMOVED_BY_OTHERS", "Machine", "MachineUse", "Pool", "PoolUse"]

_CORE_ENERGY = "core_energy"
# New directories of other programs that no reading has found yet.
_MAX_UNSEEN = 1000
# More groups than that are not removed during one reading.
_MAX_REMOVED = 4096
_TRIES = 3
REMOVED_BY_OTHERS = "another program removed the group of a workload"
_GONE = "the group of an ended workload was gone before its removal"
_HAS_FALLEN = "the counters of a group began again"
_NOT_REPORTED = "changes of other programs were not reported"
_NOT_PROCESSED = "the last changes of other programs were not processed"
_NOT_SEEN = "changes of other programs were not seen while resctrlmond did not run"


class PoolUse(msgspec.Struct, frozen=True):
    """The use of one event in one domain by one pool since ``MachineUse.since``; of a gauge, its present value.

    The true number differs from ``number`` by at most ``skew``, because counters are read one after the other.
    """

    pool: Pool
    domain: str
    event: Event
    number: int | Decimal | None
    skew: int | Decimal
    quality: Quality
    reason: str = ""


class MachineUse(msgspec.Struct, frozen=True):
    """The use of all pools between two times (RFC 3339, UTC)."""

    since: str
    read_at: str
    pools: tuple[PoolUse, ...]


class Machine:
    """Adds up the pools. ``may_run`` returns whether tasks may still run in a workload's groups. Thread-safe.

    The guard is held while numbers are added, never during an access to resctrl.
    """

    def __init__(
        self,
        tree: Tree,
        store: Store,
        snapshots: Snapshots,
        *,
        gid: int,
        energy: PackageEnergy,
        may_run: Callable[[Workload], bool],
        file: MachineFile,
    ) -> None:
        self._tree = tree
        self._store = store
        self._snapshots = snapshots
        self._gid = gid
        self._energy = energy
        self._may_run = may_run
        self._guard = threading.Lock()
        self._state = MachineState()
        # The next state while counting begins: what other programs change meanwhile is of both.
        self._next: MachineState | None = None
        # Held while counting begins, which reads all classes.
        self._begin_lock = threading.Lock()
        # The mount of ``_state``, and what names it in the file.
        self._mounting: Mounting = (0, 0)
        self._root: Mounting = (0, 0)
        self._ends = 0
        # The groups with our mark that the last reading found without a record: they were being created.
        self._unrecorded: set[int] = set()
        # Held while the file is written.
        self._writing = threading.Lock()
        # Called in each reading, to process what other programs have done until then. Returns whether all is
        # processed.
        self.read_events: Callable[[], bool] = lambda: True
        self._file = file
        # Whether changes are written to the file: from the first call of read() on.
        self._is_kept = False
        # The version of the state in memory, and that of the file.
        self._version, self._written = 0, 0

    # -- the file

    def load(self) -> None:
        """Continue from the file of the last daemon, if it is valid. Call this before any group is changed.

        Raises NotRead.
        """
        root = superblock_at(self._tree.path)
        found = self._file.load(root)
        if found is None:
            return
        state, zones, missed = found
        self._energy.restore(zones, missed)
        with self._guard:
            self._state, self._mounting, self._root = state, self._tree.mounting(), root
            self._is_kept = True
            for pool in (Pool.FOREIGN, Pool.UNTRACKED):
                add_reason(state.flaws[pool], _NOT_SEEN)
            if self._may_be_configured():
                # Then counters begin again from 0, in the groups of workloads too.
                for name in (name for name, of in EVENTS.items() if of.restarts):
                    state.event_flaws.setdefault(name, _NOT_SEEN)

    def _follow_root(self) -> bool:
        """Take over the identity of the mount in the file, if a program changed it. Return whether it did.

        It has the ctime of the root directory, which chmod, chown and utime set, and then each class that is created
        or removed. What remains: if that happens while no daemon runs, or less than a tick before a kill, or on Linux
        before 6.8, where ``mounting()`` has this ctime too, the pools begin again.
        """
        root, mounting = superblock_at(self._tree.path), self._tree.mounting()
        with self._guard:
            # The mount was compared after the ctime was read: another one does not pass for this one.
            if (0, 0) in (root, mounting) or mounting != self._mounting or root == self._root:
                return False
            self._root = root
        return True

    def _may_be_configured(self) -> bool:
        """Return whether programs can change what the bandwidth counters count."""
        try:
            return bool(self._tree.bandwidth_configuration().transactions) or self._tree.bandwidth().can_assign
        except ResctrlError:
            return True

    def _save(self) -> None:
        """Write the file, if it is kept and out of date."""
        if not self._is_kept:
            return
        with self._guard:
            self._version += 1
            wanted = self._version
        with self._writing:
            if self._written >= wanted:
                return  # by another thread meanwhile
            try:
                with self._guard:
                    version = self._version
                    data = self._file.encode(self._state, self._root, self._energy.zones, self._energy.missed)
            except Exception:
                # A defect here must not keep a workload from ending.
                log.exception("the state of the pools cannot be written")
                self._file.remove()
                return
            self._file.write(data)
            self._written = version

    # -- what the daemon reports

    def ending(self, workload: Workload, group: Group, quality: Quality, *, has_new_tasks: bool = False) -> None:
        """Record whether the group of a workload is about to be read for the last time while tasks run in it.

        ``quality`` is the best one that its totals can have.
        ``has_new_tasks``: it was read, and other programs may have moved tasks into it since, which may have ended.
        What tasks use between that reading and the group's removal is in no pool.
        """
        if not self._state.since or group.observed:  # the group is of the pool FOREIGN
            return
        try:
            # Another program may have moved a task into it, and others count on its CPUs.
            has_new_tasks = has_new_tasks or group.has_doubt(Reason.HAS_CPUS.name)
            may_run = quality not in (Quality.EXACT, Quality.LATE) or self._may_run(workload)
            # Without a witness, no doubt states CPUs of the group.
            has_others = may_run and (
                bool(self._tree.cpus(group.ref)) or any(map(_may_run, self._tree.tasks(group.ref)))
            )
            is_empty = not has_new_tasks and not has_others
        except (NoSuchGroup, NotMounted):
            return
        except (ResctrlError, OSError):
            is_empty = False
        if not is_empty:
            self._add_flaw(Pool.TRACKED, "a workload ended while its tasks ran")

    def replacing(self, group: Group) -> None:
        """Record that a group without tasks is about to be removed, and that another one gets its nonce."""
        with self._guard:
            is_known = self._state.base.pop(group.nonce, None) is not None
        if is_known:
            self._save()

    def count_last(self, subfolder: str, group: Group, readings: Sequence[Reading], *, are_last: bool = True) -> None:
        """Count the use of a group up to these readings, and keep it. Its removal follows. Can be called again.

        ``are_last``: no earlier call had newer readings.
        """
        self._ends += 1
        if not self._state.since or group.observed:
            return
        try:
            base = self._base(group.nonce)
            past: Checkpoint = {}
            if self._snapshots.last_read(subfolder):
                past = self._snapshots.last_read_with(subfolder, "", readings, group.inodes)
            sums = _difference(
                base or self._begin(subfolder), _values(readings), _histories(past, is_of_run=not base)
            )
        except (ResctrlError, OSError) as error:
            self.lost(f"the values of an ended workload cannot be read: {error}")
            return
        with self._guard:
            if group.nonce in self._state.removed or (not are_last and group.nonce in self._state.counted):
                return
            self._state.counted[group.nonce] = sums
        self._save()

    def removed(self, group: Group, *, is_own: bool) -> None:
        """Add the use of a group, which was removed, to that of the others that are gone.

        Without ``is_own``, it was gone already. If that is after its last reading, its tasks may have used something
        that nobody read. This daemon may have removed it too, and was killed before it wrote that.
        """
        if not self._state.since:
            return
        is_flaw = False
        with self._guard, localcontext(EXACTLY):
            base = self._state.base.pop(group.nonce, None)
            if base is not None and group.nonce not in self._state.counted:
                # Its last values were written before ``since``, and then its removal failed.
                why = "a group that ended before the start was removed later"
                is_flaw = add_reason(self._state.flaws[Pool.TRACKED], why)
            if group.nonce in self._state.counted:
                if not is_own and REMOVED_BY_OTHERS not in self._state.flaws[Pool.TRACKED]:
                    is_flaw = add_reason(self._state.flaws[Pool.TRACKED], _GONE)
                self._fold(group.nonce)
        if is_flaw:
            self._save()

    def fold(self) -> None:
        """Add the use of groups that a kill left as counted: they were removed, and their records state that.

        Call this after the start. Raises NotRead, NotMounted.
        """
        with self._guard:
            left = self._state.counted.keys() - {
                group.nonce
                for workload in self._store.unfinished()
                for group in workload.groups
                if not group.state.is_over
            }
        if not left:
            return
        # One without a record that still exists may be used further.
        left -= {found.nonce for found in self._tree.scan() if found.gid == self._gid}
        with self._guard, localcontext(EXACTLY):
            left &= self._state.counted.keys()
            for nonce in left:
                self._fold(nonce)
        if left:
            self._save()

    def _fold(self, nonce: int) -> None:
        """Add the use of a counted group to that of the others that are gone. The guard must be held."""
        self._state.base.pop(nonce, None)
        _add(self._state.ended[Pool.TRACKED], self._state.counted.pop(nonce))
        self._state.removed[nonce] = None
        if len(self._state.removed) > _MAX_REMOVED:
            del self._state.removed[next(iter(self._state.removed))]

    def lost(self, reason: str) -> None:
        """Record why the pool of the workloads may lack some use: of a group removed before its last reading, say."""
        if self._state.since:
            self._add_flaw(Pool.TRACKED, reason)

    def created_by_others(self, directories: Iterable[str]) -> None:
        """Record that other programs created these directories (relative to the tree): a reading must find them."""
        with self._guard:
            for directory, state in itertools.product(directories, self._states()):
                if len(state.unseen) < _MAX_UNSEEN:
                    state.unseen[directory] = None
                else:
                    add_reason(state.flaws[Pool.FOREIGN], "too many groups of other programs came and went")

    def events_lost(self) -> None:
        """Record that the kernel did not report all changes of other programs."""
        with self._guard:
            pools = [state.flaws[pool] for state in self._states() for pool in (Pool.FOREIGN, Pool.UNTRACKED)]
            is_new = sum(add_reason(reasons, _NOT_REPORTED) for reasons in pools) > 0
        if is_new:
            self._save()
        self.resets_unknown()

    def resets_unknown(self) -> None:
        """Record that other programs may have reset counters."""
        if self._may_be_configured():
            self.counters_reset((name for name, of in EVENTS.items() if of.restarts), _NOT_REPORTED)

    def counters_reset(self, events: Iterable[str], why: str) -> None:
        """Record that another program may have reset the counters of these events."""
        with self._guard:
            before = len(self._state.event_flaws)
            for name, state in itertools.product(events, self._states()):
                state.event_flaws.setdefault(name, printable(why))
            is_new = len(self._state.event_flaws) > before
        if is_new:
            self._save()

    def tick(self, *, has_trouble: bool) -> None:
        """Begin to count, once, after the start; then keep the energy of the packages from being missed.

        ``has_trouble``: changes of other programs are not reported. Raises ResctrlError, OSError.
        """
        # A call of read() may be at it.
        if not self._state.since and self._begin_lock.acquire(blocking=False):
            try:
                if not self._state.since:
                    self._begin_all()
            finally:
                self._begin_lock.release()
        has_new_root = self._follow_root()
        if self._energy.update(only_due=True) or self._file.is_outdated or has_new_root:
            self._save()
        if has_trouble:
            self.events_lost()

    # -- reading

    def read(self) -> MachineUse:
        """Read all classes and groups, and return the use of each pool. Raises NotRead, NotMounted.

        Only one thread may call this at a time.
        """
        # Groups that other programs created and removed until now are not found by the reading.
        has_events = self.read_events()
        before, unseen = {}, dict[str, None]()
        for _ in range(_TRIES):
            with self._begin_lock:
                if not self._state.since or self._is_remounted():
                    self._begin_all()
            # Not those of which the events come during the reading, which may not find them.
            unseen = self._state.unseen.copy()
            self._energy.update()
            before = self._energy.used_joules()
            classes, is_whole = self._read_whole()
            if not self._is_remounted():
                break
        else:
            raise NotRead("resctrl was mounted again during each reading", path=self._tree.path)
        self._energy.update()
        # The cores are read at other times than the packages.
        meanwhile = {package: used - before[package] for package, used in self._energy.used_joules().items()}
        read_at = utc_now()
        moved = "" if is_whole else "a group moved during the reading"
        inexact = self._tree.inexact()
        of_traffic, of_kernel = self._traffic_caveat(), self._kernel_caveat()
        # A counter that another program has reset during the reading may look like one that has counted less.
        has_events = has_events and self.read_events()
        # No later reading finds one that is gone already.
        unseen |= {one: None for one in self._state.unseen.copy() if not os.path.lexists(f"{self._tree.path}/{one}")}
        caveat = "; ".join(filter(None, (inexact, moved, of_kernel, "" if has_events else _NOT_PROCESSED)))
        # An end of a workload waits for the guard, so it is held only while sums are added.
        live = self._live(classes)
        cores: dict[int, PoolUse] = {}
        with self._guard, localcontext(EXACTLY):
            self._find_unseen(classes, unseen)
            uses = [*self._pools(classes, live, cores, caveat, of_traffic), *self._uncore(cores, meanwhile)]
            found = MachineUse(self._state.since, read_at, tuple(map(self._show, uses)))
            self._is_kept = True
        self._save()
        return found

    def _show(self, use: PoolUse) -> PoolUse:
        """Return the use of a pool for a caller. Hold a counter that has fallen: a fall looks like a restart."""
        of = use.pool, use.domain, use.event.name
        if use.number is None or use.event.kind is Kind.GAUGE:
            return use
        held = self._state.shown.setdefault(of, use.number)
        if use.number >= held:
            self._state.shown[of] = use.number
            return use
        skew = use.skew + held - use.number
        if use.pool in (Pool.TRACKED, Pool.FOREIGN) and use.quality is Quality.EXACT:
            # These have no skew, so a counter began again.
            self._mark(use.pool, (use.domain, use.event.name), _HAS_FALLEN)
            use = msgspec.structs.replace(use, quality=Quality.ESTIMATED, reason=_HAS_FALLEN)
        return msgspec.structs.replace(use, number=held, skew=skew)

    def _is_remounted(self) -> bool:
        return self._tree.mounting() not in ((0, 0), self._mounting)

    def _states(self) -> list[MachineState]:
        """Return the state, and the next one while counting begins. The guard must be held."""
        return [self._state] if self._next is None else [self._state, self._next]

    def _begin_all(self) -> None:
        # Earlier changes of other programs are not of the new state.
        self.read_events()
        with self._guard:
            state = self._next = MachineState()
        try:
            self._begin_state(state)
        finally:
            with self._guard:
                self._next = None

    def _begin_state(self, state: MachineState) -> None:
        mounting, root = self._tree.mounting(), superblock_at(self._tree.path)
        since, ends = utc_now(), self._ends
        transactions = self._tree.bandwidth_configuration().transactions
        self._energy.begin()
        classes, is_whole = self._read_whole()
        for _ in range(_TRIES):
            is_read = all(own.is_read for of in classes.values() for own in of.own.values())
            if is_whole and is_read and ends == self._ends:
                break
            ends = self._ends  # another thread ends workloads
            self._energy.begin()
            classes, is_whole = self._read_whole()
        self._energy.update()
        with self._guard:
            state.since, state.domains, state.transactions = since, classes[""].domains, transactions
            state.removed, state.while_beginning = self._state.removed, self._energy.used_joules()
            if not is_whole or ends != self._ends:
                add_reason(state.flaws[Pool.TRACKED], "a workload ended or moved while counting began")
            self._state, self._mounting, self._root = state, mounting, root
            for name, found in classes.items():
                self._add_class(name, found)
                for inode, group in found.groups.items():
                    if group.gid == self._gid:
                        state.base[group.nonce] = state.pack(group.values)
                    else:
                        state.others[inode] = OtherGroup(state.pack(group.values), state.pack(group.values))

    def _read_classes(self) -> dict[str, ClassCounters]:
        """Read each class and its groups. One that goes meanwhile is left out."""
        found = {}
        for class_ in self._tree.classes():
            try:
                found[class_] = read_class(self._tree.path, class_)
            except NoSuchGroup:
                if not class_:
                    self._tree.check_mounted()
                    raise
        return found

    def _read_whole(self) -> tuple[dict[str, ClassCounters], bool]:
        """Read all classes. Returns them, and whether they have the groups of all workloads.

        One that moves to a class that was read before is not among them; one that moves to a later class is there
        twice.
        """
        classes: dict[str, ClassCounters] = {}
        for _ in range(_TRIES):
            before = self._recorded().keys()
            classes = self._read_classes()
            groups = [group for found in classes.values() for group in found.groups.values()]
            # One that another program removed meanwhile has only some of the counters.
            seen = {
                group.nonce
                for found in classes.values()
                for group in found.groups.values()
                if group.gid == self._gid and found.is_whole(group)
            }
            is_once = len(groups) == len({inode for found in classes.values() for inode in found.groups})
            with self._guard:
                gone = self._state.counted.keys() | self._state.removed.keys()
                missing = before & self._recorded().keys() - seen - gone
                if is_once and not missing:
                    return classes, True
        return classes, False

    def _recorded(self) -> dict[int, tuple[str, Group]]:
        """Return each group of a workload that is not of another program, with its folder, by its nonce."""
        return {
            group.nonce: (workload.subfolder(group), group)
            for workload in self._store.unfinished()
            for group in workload.existing_groups
            if not group.observed
        }

    def _live(self, classes: dict[str, ClassCounters]) -> dict[int, Sums]:
        """Return the use of each group of a workload until now, by nonce; without those that are being created."""
        recorded = self._recorded()
        found: dict[int, Sums] = {}
        unrecorded: set[int] = set()
        # The creation of a group can take longer than two readings.
        pending = {group.nonce for workload in self._store.unfinished() for group in workload.groups}
        for group in (group for of in classes.values() for group in of.groups.values() if group.gid == self._gid):
            subfolder, of_group = recorded.get(group.nonce, ("", None))
            if not subfolder and group.nonce not in self._state.base:
                if group.nonce not in pending:
                    unrecorded.add(group.nonce)
                continue
            try:
                base = self._base(group.nonce)
                begin = base or self._begin(subfolder)
                # One that was created during the reading has no values of the counters that were read before.
                begin = {counter: value for counter, value in begin.items() if counter in group.values}
                # Its readings may be newer than these.
                past = _histories(self._snapshots.last_read(subfolder), is_of_run=not base)
                found[group.nonce] = _difference(begin, group.values, past)
                self._note_gaps(subfolder, of_group, group.values)
            except (ResctrlError, OSError):
                reasons = {"its begin values cannot be read": None}
                found[group.nonce] = {counter: Sum(reasons=dict(reasons)) for counter in group.values}
        if unrecorded & self._unrecorded - self._state.counted.keys() - self._state.removed.keys():
            self._add_flaw(Pool.TRACKED, "a group with the mark of resctrlmond has no record")
        self._unrecorded = unrecorded
        return found

    def _pools(
        self,
        classes: dict[str, ClassCounters],
        live: dict[int, Sums],
        cores: dict[int, PoolUse],
        caveat: str,
        of_traffic: str,
    ) -> Iterable[PoolUse]:
        """Yield the use of the pools of all RMIDs; put that of the cores of each package into ``cores``."""
        self._see_domains(classes[""].domains)
        sums: dict[Pool, Sums] = {pool: _copy(self._state.ended[pool]) for pool in Pool}
        levels: dict[Pool, Sums] = {pool: {} for pool in Pool}
        self._add_own(classes, sums[Pool.UNTRACKED], levels[Pool.UNTRACKED])
        self._add_groups(classes, live, sums, levels)
        counters = {counter for found in classes.values() for counter in found.own}
        # Those of domains that are offline now.
        counters |= {counter for known in self._state.classes.values() for counter in known.own}
        counters |= {counter for of in sums.values() for counter in of}
        # A group may have no value of these now either.
        unread = {
            counter: own.reason for found in classes.values() for counter, own in found.own.items() if not own.is_read
        }
        for domain, name in sorted(counters):
            of = event(name)
            if of.kind is Kind.UNKNOWN:
                continue
            for pool in (Pool.TRACKED, Pool.FOREIGN, Pool.UNTRACKED):
                found = (levels if of.kind is Kind.GAUGE else sums)[pool].get((domain, name), Sum(is_known=True))
                reasons = dict(found.reasons)
                if of.kind is Kind.CUMULATIVE:
                    reasons |= self._state.flaws[pool]
                    if domain in self._state.domain_flaws:
                        reasons[self._state.domain_flaws[domain]] = None
                    if name in self._state.event_flaws:
                        reasons[self._state.event_flaws[name]] = None
                    if of.restarts and of_traffic:
                        reasons[of_traffic] = None
                for reason in filter(None, (caveat, unread.get((domain, name)))):
                    reasons[reason] = None
                use = _use(pool, domain, of, found, reasons)
                if name == _CORE_ENERGY:
                    _add_core(cores, use)
                yield use

    def _see_domains(self, domains: dict[str, int]) -> None:
        """Compare the domains of the root with those at the first reading: counters begin again from 0 there."""
        for domain in self._state.domains.keys() | domains.keys():
            if self._state.domains.get(domain) != domains.get(domain):
                # The value of a cache includes those of its Sub-NUMA nodes.
                self._state.domain_flaws[domain.partition("/")[0]] = f"{domain} was offline for a time"

    def _add_class(self, name: str, found: ClassCounters) -> None:
        own = {
            counter: OwnUse(of.low, of.width, of.low)
            for counter, of in found.own.items()
            if of.low is not None and event(counter[1]).kind is Kind.CUMULATIVE
        }
        self._state.classes[name] = ClassUse(found.inode, own)

    def _add_own(self, classes: dict[str, ClassCounters], sums: Sums, levels: Sums) -> None:
        for name, known in list(self._state.classes.items()):
            if name not in classes or classes[name].inode != known.inode:
                for counter, used in known.own.items():
                    _of(self._state.ended[Pool.UNTRACKED], counter).add(used.highest - used.base)
                    _of(sums, counter).add(used.highest - used.base)
                del self._state.classes[name]
                add_reason(self._state.flaws[Pool.UNTRACKED], f"class {name} was removed between two readings")
        for name, found in classes.items():
            if name not in self._state.classes:
                self._add_class(name, found)
                add_reason(self._state.flaws[Pool.UNTRACKED], f"class {name} was created between two readings")
            for counter, offline in self._state.classes[name].own.items():
                if counter not in found.own:  # its domain is offline
                    _of(sums, counter).add(offline.highest - offline.base, offline.width + offline.base_width)
            for counter, own in found.own.items():
                if event(counter[1]).kind is Kind.GAUGE:
                    _of(levels, counter).add(own.low, own.width, own.reason)
                    continue
                counted = self._state.classes[name].own.get(counter)
                if counted is None:
                    _of(sums, counter).add(None, 0, own.reason or "the counter had no number at first")
                    if own.low is not None:
                        counted = self._state.classes[name].own[counter] = OwnUse(own.low, own.width, own.low)
                        counted.reasons["the counter had no number at first"] = None
                    continue
                if own.is_read:
                    _advance(counted, own.low, own.width)
                number, skew = counted.highest - counted.base, counted.width + counted.base_width
                _of(sums, counter).add(number, skew, own.reason)
                _of(sums, counter).reasons |= counted.reasons

    def _add_groups(
        self,
        classes: dict[str, ClassCounters],
        live: dict[int, Sums],
        sums: dict[Pool, Sums],
        levels: dict[Pool, Sums],
    ) -> None:
        ours: dict[int, Sums] = {}
        for found in classes.values():
            for inode, group in found.groups.items():
                is_ours = group.gid == self._gid
                pool = Pool.TRACKED if is_ours else Pool.FOREIGN
                for counter, value in group.values.items():
                    if event(counter[1]).kind is Kind.GAUGE:
                        _of(levels[pool], counter).add(value.number, 0, _without_number(value))
                if is_ours:
                    if group.nonce not in self._state.removed:
                        ours[group.nonce] = live.get(group.nonce, {})
                else:
                    self._see_other(inode, group, sums[pool], is_whole=found.is_whole(group))
        for nonce, counted in self._state.counted.items():
            # If the removal of a group fails, it may be used further.
            ours[nonce] = _largest(ours.get(nonce, {}), counted)
        for sums_of in ours.values():
            _add(sums[Pool.TRACKED], sums_of)
        here = {inode for found in classes.values() for inode in found.groups}
        for inode in self._state.others.keys() - here:
            other = self._state.others.pop(inode)
            use = self._use_of_other(other)
            _add(self._state.ended[Pool.FOREIGN], use)
            _add(sums[Pool.FOREIGN], use)
            add_reason(self._state.flaws[Pool.FOREIGN], "a group of another program was removed between two readings")
        for inode in self._state.others.keys() & here:
            _add(sums[Pool.FOREIGN], self._use_of_other(self._state.others[inode]))

    def _use_of_other(self, other: OtherGroup) -> Sums:
        return _difference(self._state.unpack(other.first), self._state.unpack(other.last))

    def _see_other(self, inode: int, group: GroupCounters, sums: Sums, *, is_whole: bool) -> None:
        known = self._state.others.get(inode)
        if known is None:
            first, last = (self._state.pack(group.values) for _ in range(2))
            self._state.others[inode] = OtherGroup(first, last)
            add_reason(self._state.flaws[Pool.FOREIGN], "a group of another program was created between two readings")
        else:
            before = self._state.unpack(known.last)
            for counter, value in group.values.items():
                if why := _gap(counter, before.get(counter), value):
                    self._mark(Pool.FOREIGN, counter, why)
                    add_reason(_of(sums, counter).reasons, why)
            self._state.update(known.last, group.values)
            if not is_whole:
                add_reason(
                    self._state.flaws[Pool.FOREIGN], "a group of another program was removed during the reading"
                )

    def _mark(self, pool: Pool, counter: Counter, reason: str) -> None:
        """Record why the figure of a counter is not exact from now on. The guard must be held."""
        add_reason(_of(self._state.ended[pool], counter).reasons, reason)

    def _find_unseen(self, classes: dict[str, ClassCounters], unseen: Container[str]) -> None:
        """Find what other programs created; ``unseen`` is that of which the events were read before the reading."""
        here = {name for name in classes if name}
        groups = [group for found in classes.values() for group in found.groups.values()]
        here |= {os.path.relpath(group.path, self._tree.path) for group in groups}
        for directory in [one for one in self._state.unseen if one in here or one in unseen]:
            del self._state.unseen[directory]
            if directory not in here:
                pool = Pool.FOREIGN if "mon_groups" in directory.split("/") else Pool.UNTRACKED
                add_reason(self._state.flaws[pool], f"{directory} was created and removed between two readings")

    def _note_gaps(self, subfolder: str, group: Group | None, values: Mapping[Counter, Value]) -> None:
        """Save which counters of a workload have no number now, because its totals are not exact either."""
        without = [
            (domain, name, value)
            for (domain, name), value in values.items()
            if value.number is None and event(name).kind is Kind.CUMULATIVE and not value.is_never_active(event(name))
        ]
        if group is None or not without:
            return
        with contextlib.suppress(ResctrlError, OSError), self._snapshots.lock:
            if self._snapshots.is_complete(subfolder) or self._snapshots.created_at(subfolder) != group.created_at:
                return
            domains = {reading.domain for reading in self._snapshots.begin_values(subfolder)}
            gaps = [
                Reading(of, name, value)
                for domain, name, value in without
                # The totals have the Sub-NUMA nodes of a cache in its place.
                for of in sorted(domains)
                if of.partition("/")[0] == domain
            ]
            self._snapshots.note_gaps(subfolder, gaps, group.inodes)

    def _base(self, nonce: int) -> dict[Counter, Value]:
        """Return the values from which a group that existed at ``since`` counts; {} if it did not."""
        with self._guard:
            return self._state.unpack(self._state.base.get(nonce, []))

    def _begin(self, subfolder: str) -> dict[Counter, Value]:
        """Return the begin values of a group. Raises NotRead."""
        values = _values(self._snapshots.begin_values(subfolder)) if subfolder else {}
        if not values:
            # Without them, the use of former owners of the RMID would be counted.
            raise NotRead("its begin values are missing", path=subfolder)
        return values

    def _traffic_caveat(self) -> str:
        """Return why no traffic is exact now; "" if it is. Find events that count others than at ``since``."""
        try:
            now = self._tree.bandwidth_configuration()
        except ResctrlError as error:
            return f"it is unknown how traffic is counted: {error}"
        for changed in caveats.changed(self._state.transactions, now.transactions):
            self._state.event_flaws |= dict.fromkeys(changed.events, text_of(changed))
        return "the processor takes counters from one RMID for another" if now.mode is Mode.REALLOCATED else ""

    def _kernel_caveat(self) -> str:
        """Return why the use of no group is exact now; "" if the kernel counts its work in the group of the task."""
        try:
            mode = self._tree.bandwidth_configuration().kernel_mode
        except ResctrlError as error:
            return f"it is unknown in which group the kernel counts its work: {error}"
        return Reason.KERNEL_WORK.text(cause=f"info/kernel_mode is {mode}") if mode else ""

    def _uncore(self, cores: dict[int, PoolUse], meanwhile: dict[int, Decimal]) -> Iterable[PoolUse]:
        """Yield what the packages used beyond their cores. They used ``meanwhile`` while the cores were read."""
        missed = self._energy.missed
        for package, joules in sorted(self._energy.used_joules().items()):
            core = cores.get(package)
            if core is None or core.number is None:
                continue
            reasons = dict.fromkeys(filter(None, (core.reason, missed)))
            skew = core.skew + meanwhile[package] + self._state.while_beginning.get(package, 0)
            left = Sum(max(joules - core.number, Decimal(0)), skew, is_known=True)
            yield _use(Pool.UNCORE, core.domain, core.event, left, reasons)

    def _add_flaw(self, pool: Pool, reason: str) -> None:
        with self._guard:
            is_new = add_reason(self._state.flaws[pool], reason)
        if is_new:
            self._save()


def _may_run(tid: int) -> bool:
    """Return whether a task uses something or may have done so just now. A zombie does not. Raises NotRead."""
    found = processes.stat_fields(tid)
    return not found or found[0] not in (b"Z", b"X")


def _of(sums: Sums, counter: Counter) -> Sum:
    return sums.setdefault(counter, Sum())


def _add(sums: Sums, more: Sums) -> None:
    for counter, of in more.items():
        total = _of(sums, counter)
        if of.is_known:
            total.add(of.number, of.skew)
        for reason in of.reasons:
            add_reason(total.reasons, reason)


def _largest(first: Sums, second: Sums) -> Sums:
    """Return the larger use of each counter, of two readings of one group."""
    found = {**first, **second}
    for counter in first.keys() & second.keys():
        if first[counter].is_known and first[counter].number > second[counter].number:
            found[counter] = first[counter]
    return found


def _without_number(value: Value) -> str:
    """Return the reason for which a sum lacks the value of a group; "" if it does not."""
    return "" if value.number is not None else f'the kernel has no number for a group, but "{value.text}"'


def _gap(counter: Counter, before: Value | None, now: Value) -> str:
    """Return why the use of a group of another program between two readings is not known; "" if it is."""
    of = event(counter[1])
    if of.kind is not Kind.CUMULATIVE or now.is_never_active(of):
        return ""
    if now.number is None:
        # The hardware may reset the counter meanwhile (see ``Unavailable``).
        return f'a counter of another program had no number at a reading, but "{now.text}"'
    has_fallen = before is not None and before.number is not None and now.number < before.number
    return "a counter of another program began again" if has_fallen else ""


def _copy(sums: Sums) -> Sums:
    copied: Sums = {}
    _add(copied, sums)
    return copied


def _values(readings: Iterable[Reading]) -> dict[Counter, Value]:
    found = {(reading.domain, reading.event): reading.value for reading in readings if not reading.is_part}
    again = repeated(found)
    return {counter: value for counter, value in found.items() if counter not in again}


def _histories(last_read: Checkpoint, *, is_of_run: bool) -> dict[Counter, CounterHistory]:
    """Return the history of counters in a checkpoint, for outer domains.

    Without ``is_of_run``, the use is not counted from the begin of the run, and with Sub-NUMA nodes not for each of
    them, so only the fact that there is a history is of use.
    """
    found: dict[Counter, CounterHistory] = {}
    for (domain, name), history in checkpoint.histories(last_read).items():
        outer = domain.partition("/")[0]
        found[outer, name] = history if is_of_run and outer == domain else CounterHistory(has_gap=True)
    return found


def _difference(
    begin: dict[Counter, Value],
    end: dict[Counter, Value],
    past: Mapping[Counter, CounterHistory] | None = None,
) -> Sums:
    """Return what was used between two readings of a group, by the rules for totals of workloads."""
    sums: Sums = {}
    for domain in sorted({domain for domain, _ in end}):
        before, after = (
            [Reading(of, name, value) for (of, name), value in values.items() if of == domain]
            for values in (begin, end)
        )
        for total in accounting.totals(before, after, past=past):
            of = _of(sums, (domain, total.event.name))
            reason = total.reason if total.quality is not Quality.EXACT else ""
            of.add(total.number, 0, reason)
    return sums


def _advance(used: OwnUse, low: int | Decimal | None, width: int | Decimal) -> None:
    """Take a further reading into account. The use never falls: a lower number is the skew of the reading."""
    if low is None:
        used.reasons["a later reading had no number"] = None
        return
    if low + width < used.highest:
        # It began again from 0, as the domain was offline. What it counted until then is kept.
        used.reasons["the counter began again"] = None
        used.base, used.highest = low - (used.highest - used.base), low
    used.width = low + width - max(used.highest, low)
    used.highest = max(used.highest, low)


def _use(pool: Pool, domain: str, of: Event, found: Sum, reasons: dict[str, None]) -> PoolUse:
    # Other programs choose the names of classes and groups.
    reason = printable("; ".join(reasons))
    if not found.is_known:
        return PoolUse(pool, domain, of, None, 0, Quality.UNKNOWN, reason)
    quality = Quality.ESTIMATED if reasons else Quality.EXACT
    return PoolUse(pool, domain, of, found.number, found.skew, quality, reason)


def _add_core(cores: dict[int, PoolUse], use: PoolUse) -> None:
    package = use.domain.rpartition("_")[2]
    if not package.isdecimal():
        return
    before = cores.get(int(package))
    if before is None:
        cores[int(package)] = use
        return
    is_known = before.number is not None and use.number is not None
    total = Sum((before.number or 0) + (use.number or 0), before.skew + use.skew, is_known)
    reasons = dict.fromkeys(filter(None, (before.reason, use.reason)))
    cores[int(package)] = _use(use.pool, use.domain, use.event, total, reasons)
