# SPDX-License-Identifier: Apache-2.0
"""Run a part of the workloads on one machine, with each agent in turn."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from resctrlmond.resctrl.tree import Tree
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.upkeep import maintenance
from tests.truth.compare import Tally
from tests.truth.crew import Crew
from tests.truth.daemon import Daemon
from tests.truth.ours import Ours
from tests.truth.peers import GoresctrlMonitor, InProcess, NriResctrlMon
from tests.truth.script import CLASSES, write
from tests.truth.world import World, mounted

# The simulated counters lag by LAG_MS. While the manager in this process sleeps, SLOWER times as long goes by
# there: so the lag is as long as the hardware's 2 ms, and passes only while the manager waits for it, not while it
# does other work. It is shorter than a second of the script, so checkpoints have all that was used before.
LAG_MS, SLOWER = 900, 450
# So few that the bursts of the script exhaust them.
RMIDS = 44
NAMES = ("resctrlmond", "nri-resctrl-mon", "goresctrl")


@dataclass(frozen=True, slots=True)
class Part:
    """A number of workloads on a machine of its own. ``by_daemon``: through the daemon and its socket."""

    seed: int
    workloads: int
    by_daemon: bool = False

    def __str__(self) -> str:
        return f"--seed {self.seed} --workloads {self.workloads}{' --by-daemon' if self.by_daemon else ''}"


def end_orderly() -> None:
    """Unmount the machine and end its processes when this process gets a signal to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def run(part: Part) -> list[Tally]:
    """Run the part for resctrlmond and for both models, and return the results."""
    # The daemon detects sessions every five seconds of the real clock, which is too slow here.
    script = write(part.seed, part.workloads, sessions=not part.by_daemon)
    ours = Tally(NAMES[0])
    # The waits of another process cannot be observed: it gets the lag of the hardware. All RMIDs have old counts.
    lag_ms = None if part.by_daemon else LAG_MS
    with contextlib.ExitStack() as stack:
        simulation, top = stack.enter_context(mounted("intel-aet", RMIDS, residue=part.seed, lag_ms=lag_ms))
        crew = stack.enter_context(Crew())
        control = Control(simulation.mountpoint)

        def make_class(name: str) -> None:
            os.mkdir(os.path.join(simulation.mountpoint, name))

        world = World(control, crew, make_class)
        if part.by_daemon:
            with contextlib.closing(Daemon(top, part.seed)) as daemon:
                world.play(script, daemon, ours.add)
                left = daemon.left()
                ours.kills += daemon.kills
        else:
            stack.enter_context(_slow_machine(control))
            agent = Ours(simulation, os.path.join(top, "run"), part.seed)
            world.play(script, agent, ours.add)
            left = [found.path for found in agent.host.marked_groups()]
            ours.kills += agent.kills
            ours.violations += agent.pools.problems
            ours.pools_exact += agent.pools.exact
            ours.pools_estimated += agent.pools.estimated
            ours.restarts += agent.restarts - agent.kills
        ours.violations += [f"{group} was left behind" for group in left]
        ours.violations += [f"class {name} is gone" for name in CLASSES if not os.path.isdir(f"{top}/resctrl/{name}")]
    return [ours, *_peers(part, ours)]


def _peers(part: Part, ours: Tally) -> Iterator[Tally]:
    for name, kind in zip(NAMES[1:], (NriResctrlMon, GoresctrlMonitor), strict=True):
        script = write(part.seed, part.workloads, sessions=not part.by_daemon)
        machine = InProcess(RMIDS, part.seed)
        tally = Tally(name)
        world = World(machine, None, machine.resctrl.mkdir)
        world.play(script, kind(machine, part.seed), lambda life, tally=tally: tally.add(life, judged=False))  # type: ignore[misc]
        if tally.used != ours.used:
            ours.violations.append(f"the truth is not the same for {name}: {tally.used}, {ours.used}")
        yield tally


@contextlib.contextmanager
def _slow_machine(control: Control) -> Iterator[None]:
    """Let SLOWER times as much time pass on the simulated machine while the manager in this process sleeps.

    For this manager, the lag is therefore not longer than that of hardware, and the simulation is exact.
    """
    sleep = time.sleep

    def slept(seconds: float) -> None:
        sleep(seconds)
        control.advance(seconds * SLOWER)

    with (
        mock.patch.object(time, "sleep", slept),
        mock.patch.object(Tree, "inexact", return_value=""),
        # Virtual tasks use no CPU time of their real control groups, so they seem to sleep.
        mock.patch.object(maintenance, "_MAX_SKIPPED", 0),
    ):
        yield
