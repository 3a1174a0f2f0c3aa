# SPDX-License-Identifier: Apache-2.0
"""``resctrlmond --simulate``: the simulated machine below one directory, and the configuration for it.

The simulator is a process of its own and outlives a daemon that is killed, as the kernel does. The file
``simulator.pid`` says which process a daemon started: the daemon that stops in order ends it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator

import msgspec

from resctrlmond.config import Config
from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.tree import Tree
from resctrlmond.startup import Exit, StartupError

log = logging.getLogger("resctrlmond")


def session_bus() -> str:
    """The address of the caller's session bus; "" if there is none."""
    return os.environ.get("DBUS_SESSION_BUS_ADDRESS", "")


def config_below(directory: str, loaded: Config) -> Config:
    """The configuration with all of its paths below the directory; D-Bus is off if there is no session bus."""
    top = os.path.abspath(directory)
    return msgspec.structs.replace(
        loaded,
        resctrl=os.path.join(top, "resctrl"),
        runtime_dir=os.path.join(top, "run"),
        groups_dir=os.path.join(top, "run", "groups"),
        varlink_socket=os.path.join(top, "run", "org.resctrlmon.Manager"),
        dbus=loaded.dbus and bool(session_bus()),
    )


@contextlib.contextmanager
def simulator(directory: str, config: Config, profile: str) -> Iterator[None]:
    """Mount the simulation for the block, or use the one that is mounted. Raises ResctrlError, StartupError.

    One that is mounted stays if the block raises, because another daemon may use it. If the block ends without an
    error, only a simulator that no daemon started stays.
    """
    # Only here: the simulator and its FUSE library are no part of a real daemon.
    try:
        from resctrlmond.sim.mount import Simulation, unmount  # noqa: PLC0415
    except ModuleNotFoundError as error:
        # Distributions leave it out.
        raise ResctrlError(
            f"the simulator is not installed: there is no module {error.name}",
            remedy="It comes with pip: python3 -m pip install 'resctrlmond[sim]', from the source tree '.[sim]'",
        ) from error

    _refuse_what_others_may_change(os.path.abspath(directory))
    pid_file = os.path.join(os.path.abspath(directory), "simulator.pid")
    if os.path.ismount(config.resctrl):
        mounted = Tree.open(config.resctrl, allow_simulation=True).simulation
        if mounted is None:
            raise ResctrlError("is the real resctrl", path=config.resctrl, remedy="Run without --simulate")
        _announce(mounted, config)
        yield
        if _is_running(pid_file):
            unmount(config.resctrl)
            os.unlink(pid_file)
        return
    try:
        os.makedirs(config.resctrl, exist_ok=True)
    except OSError as error:
        raise ResctrlError(
            "cannot make the directory to simulate in",
            path=config.resctrl,
            errno=error.errno or 0,
            remedy=f"Choose another one, or, if a simulation died there: umount --lazy {config.resctrl}",
        ) from error
    try:
        # Residue as on a machine that has been up for a while: energy counters do not begin at 0.
        simulation = Simulation(config.resctrl, profile, residue=1, outlives=True)
    except ValueError as error:
        raise StartupError(ResctrlError(str(error)), Exit.USAGE) from error
    with simulation:
        started = processes.stat(simulation.pid)
        with open(pid_file, "w", encoding="ascii") as file:
            file.write(f"{simulation.pid} {started.start_time if started else 0}\n")
        _announce(profile, config)
        yield
    with contextlib.suppress(FileNotFoundError):
        os.unlink(pid_file)


def _announce(profile: str, config: Config) -> None:
    log.warning("this is a simulation (profile %s) on %s: no figure comes from hardware", profile, config.resctrl)
    log.info("talk to it with: RESCTRLMOND_SOCKET=%s resctrlctl list", config.varlink_socket)


def _is_running(pid_file: str) -> bool:
    """Whether the simulator that a daemon started still runs; its start time tells it from a later process."""
    try:
        with open(pid_file, encoding="ascii") as file:
            pid, start_time = map(int, file.read(64).split())
    except (FileNotFoundError, ValueError):
        return False
    found = processes.stat(pid)
    return found is not None and found.start_time == start_time


def _refuse_what_others_may_change(top: str) -> None:
    """Where others may write, they choose what our paths lead to: /tmp/sim may have been made by somebody else."""
    try:
        owners = {os.lstat(top).st_uid, os.stat(top).st_uid}
        mode = os.stat(top).st_mode
    except OSError:
        return  # it is not there yet, or cannot be: who makes it says so
    if not owners <= {0, os.geteuid()} or mode & stat.S_IWOTH:
        raise ResctrlError(
            "cannot simulate in a directory that others may change",
            path=top,
            errno=errno.EPERM,
            remedy="Choose one of your own, or one that does not exist yet",
        )
