# SPDX-License-Identifier: Apache-2.0
"""Interrupt a verb of the manager at a system call, by SIGKILL or an error, and check the state that it leaves."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.tree import Found
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.verbs.release import release
from tests.crash.fault import Fault
from tests.crash.sweep import Point
from tests.crash.verbs import SERVICE, VERBS, Scene, Verb, check_service
from tests.daemon.ledger_host import FileJournal, LedgerHost
from tests.workloads.builders import drop
from tests.workloads.conftest import MARK

# The system calls that change a file or the tree. Some openat(2) calls only read: these only cost time.
CHANGES = "openat,write,fchmod,/^mkdir,rmdir,/^rename,/^unlink,/^symlink,utimensat"
ANY = CHANGES + ",read,getdents64,newfstatat,readlink,getxattr,/^pidfd_open"

CALLS = {
    Fault.KILL: CHANGES,
    Fault.EIO: ANY,
    Fault.ENOSPC: CHANGES,
    Fault.EINTR: "openat,read,write",
    Fault.EMFILE: "openat,/^pidfd_open",
}


class End(enum.IntEnum):
    """How the interrupted process ended."""

    DONE = 0
    REFUSED = 3  # with a ResctrlError
    RAW = 4  # with another exception, for which the interfaces return InternalError
    BROKEN = 5  # an invariant does not hold


@dataclass
class Harness:
    """Injects faults into the verbs of one manager."""

    host: LedgerHost
    log: str

    def points(self, name: str, fault: Fault) -> list[Point]:
        """Return the system calls of the verb at which the fault can be injected."""
        scene = self._scene(VERBS[name])
        trace = os.path.join(os.path.dirname(self.log), "trace")
        end = End(self._run(scene, VERBS[name], ["-e", f"trace={CALLS[fault]}", "-o", trace]))
        assert end is End.DONE, f"without a fault: {end.name.lower()}: {self._logged_error()}"
        self._drain(scene, "counting", VERBS[name])
        with open(trace, encoding="utf-8", errors="replace") as lines:
            made = Counter(line.partition("(")[0] for line in lines if "(" in line)
        return [(call, number) for call, most in sorted(made.items()) for number in range(1, most + 1)]

    def inject(self, name: str, fault: Fault, call: str, number: int) -> str:
        """Inject a fault at the verb's system call with this name and number, from 1, and return how the verb ended.

        Raises AssertionError if a check fails afterwards.
        """
        verb = VERBS[name]
        scene = self._scene(verb)
        inject = ["-e", f"trace={call}", "-e", f"inject={call}:{fault.value}:when={number}", "-o", "/dev/null"]
        try:
            return self._run_and_check(scene, verb, inject)
        finally:
            scene.end_processes()

    def _run_and_check(self, scene: Scene, verb: Verb, inject: list[str]) -> str:
        others = self._other_groups()
        status = self._run(scene, verb, inject)
        outcome = "killed" if status == -signal.SIGKILL else End(status).name.lower()
        assert outcome not in ("raw", "broken"), f"{outcome}: {self._logged_error()}"
        # A process that waits before a command of a service executes it when its call ends, whatever the result.
        living = [child for child in scene.children if child.poll() is None]
        outside = {child.pid for child in living if self.host.tree.membership(child.pid).group != SERVICE}
        self.host.restart()
        try:
            check_service(scene, outside)
            self.host.check()
            self.host.check_ledger()
            self.host.check_sums()
        except AssertionError as error:
            raise AssertionError(f"after the restart: {error}") from error
        self._check_not_lost(verb, "after the restart")
        keys = {record.key for record in self.host.ctx.store.all()}
        assert set(self.host.folder("groups")) <= keys, "files of a run without a record"
        self._drain(scene, "after the fault", verb)
        assert self._other_groups() == others, "a group of another program was changed"
        return outcome

    def _check_not_lost(self, verb: Verb, where: str) -> None:
        """Check that no workload is lost, which happens only if another program removes its group."""
        over = {
            record.key: (record.state, record.reason) for record in self.host.ctx.store.all() if record.state.is_over
        }
        assert verb.is_loss or all(state is State.COMPLETED for state, _ in over.values()), (where, over)

    def _other_groups(self) -> list[tuple[Found, int]]:
        """Return the groups of other programs, and the modes of their directories."""
        found = [found for found in self.host.tree.scan() if found.gid != MARK]
        return [(group, os.stat(group.path).st_mode) for group in found]

    def _scene(self, verb: Verb) -> Scene:
        if not self.host.tree.has_class("gold"):
            self.host.make_class("gold")
        scene = Scene(self.host)
        verb.before(scene)
        return scene

    def _run(self, scene: Scene, verb: Verb, tracing: list[str]) -> int:
        """Run the verb in a process of its own under strace, and return the exit code of that process."""
        child = os.fork()
        if child == 0:
            os._exit(self._interrupted(scene, verb))
        _wait_stopped(child)
        strace = subprocess.Popen(["strace", "-qq", *tracing, "-p", str(child)], stderr=subprocess.PIPE)
        while _tracer(child) != strace.pid:
            assert strace.poll() is None, strace.communicate()[1]
            time.sleep(0.002)
        os.kill(child, signal.SIGCONT)
        ended = _wait_stopped(child)
        strace.send_signal(signal.SIGINT)
        strace.communicate()
        if ended is None:
            # After the fault, the process checks its state without strace.
            os.kill(child, signal.SIGCONT)
            ended = os.waitpid(child, 0)[1]
        return os.waitstatus_to_exitcode(ended)

    def _interrupted(self, scene: Scene, verb: Verb) -> End:
        os.kill(os.getpid(), signal.SIGSTOP)
        end = End.DONE
        try:
            verb.action(scene)
        except ResctrlError:
            self._log_error()
            end = End.REFUSED
        except BaseException:
            self._log_error()
            end = End.RAW
        os.kill(os.getpid(), signal.SIGSTOP)
        if not verb.recovers_by_tick:
            return end
        try:
            # The daemon continues: the next tick corrects the result of the error.
            scene.host.manager.maintenance.tick()
            scene.host.check()
        except BaseException:
            self._log_error()
            return End.BROKEN
        return end

    def _log_error(self) -> None:
        with open(self.log, "w", encoding="utf-8") as log:
            traceback.print_exc(file=log)

    def _logged_error(self) -> str:
        with open(self.log, encoding="utf-8") as log:
            return log.read()

    def _drain(self, scene: Scene, where: str, verb: Verb) -> None:
        """End all processes, release all claims, and check that no group, task or record is left."""
        scene.end_processes()
        manager = self.host.restart()
        for record in manager.context.store.all():
            for claim in record.claims:
                release(manager.context, record.key, owner=claim.owner)
        manager.maintenance.tick()
        assert self.host.marked_groups() == [], where
        states = {record.key: record.state for record in manager.context.store.all()}
        assert set(states.values()) <= {State.COMPLETED, State.LOST}, (where, states)
        self._check_not_lost(verb, where)
        self.host.check()
        self.host.check_ledger()
        self.host.check_sums()
        for record in manager.context.store.all():
            manager.context.snapshots.delete(record.key)
            drop(manager.context.store, record.key)


def _wait_stopped(child: int) -> int | None:
    """Wait until the child stops itself, and return None, or until it ends, and return its wait status."""
    _, status = os.waitpid(child, os.WUNTRACED)
    return None if os.WIFSTOPPED(status) else status


def _tracer(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("TracerPid:"))


@contextlib.contextmanager
def machine(top: Path) -> Iterator[Harness]:
    """Mount a simulation of its own for one verb."""
    for folder in ("resctrl", "run"):
        (top / folder).mkdir(parents=True)
    with Simulation(str(top / "resctrl"), "intel-rdt", 2000):
        host = LedgerHost(str(top / "resctrl"), str(top / "run"), FileJournal(top / "journal"))
        yield Harness(host, str(top / "log"))
