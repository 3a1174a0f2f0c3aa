# SPDX-License-Identifier: Apache-2.0
"""``resctrlmond --simulate``: start or find the simulator below one directory, and adapt the configuration to it.

The simulator is a separate process and outlives a daemon that is killed, as the kernel does. The file
``simulator.pid`` names the simulator that a daemon started: the daemon stops it when it is stopped itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
from collections.abc import Iterator

import msgspec

from resctrlmond.configuration.config import Config
from resctrlmond.daemon.path_safety import unsafe_part
from resctrlmond.daemon.startup import Exit, StartupError
from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.tree import Tree

log = logging.getLogger("resctrlmond")

# The signals that stop the daemon.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def session_bus() -> str:
    """Return the address of the user's session bus; "" if there is none."""
    return os.environ.get("DBUS_SESSION_BUS_ADDRESS", "")


def config_below(directory: str, loaded: Config) -> Config:
    """Return the configuration with all paths below the directory; D-Bus is off if there is no session bus.

    The units of the host are not watched: they use nothing in a simulation.
    """
    if loaded.units:
        log.warning("a simulation watches no units of systemd: the configuration key units is ignored")
    top = os.path.abspath(directory)
    return msgspec.structs.replace(
        loaded,
        resctrl=os.path.join(top, "resctrl"),
        runtime_dir=os.path.join(top, "run"),
        # Empty paths follow runtime_dir.
        groups_dir="",
        varlink_socket="",
        dbus=loaded.dbus and bool(session_bus()),
        units=(),
    )


@contextlib.contextmanager
def simulator(directory: str, config: Config, profile: str) -> Iterator[None]:
    """Mount the simulation for the block, or use the mounted one. Raises ResctrlError, StartupError.

    STOP_SIGNALS are blocked from now on, until the block can handle them: their default action would end this process
    and leave the simulator.
    A simulator that was mounted before stays if the block raises, because another daemon may use it. If the block
    ends without an error, it stays only if no daemon started it.
    """
    # Not at the top: on real hardware the simulator and its FUSE library need not be installed.
    try:
        from resctrlmond.sim.fuse.mount import Simulation, unmount  # noqa: PLC0415
    except ModuleNotFoundError as error:
        # Distributions leave it out.
        raise ResctrlError(
            f"the simulator is not installed: the Python module {error.name} is missing",
            remedy="Install it: python3 -m pip install 'resctrlmond[sim]', or in the source tree '.[sim]'",
        ) from error

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    top = os.path.abspath(directory)
    _refuse_unsafe(top)
    pid_file = os.path.join(top, "simulator.pid")
    if os.path.ismount(config.resctrl):
        mounted = Tree.open(config.resctrl, allow_simulation=True).simulation
        if mounted is None:
            raise ResctrlError(
                "the real resctrl is mounted here", path=config.resctrl, remedy="Run without --simulate"
            )
        _announce(mounted, config)
        yield
        if _is_running(pid_file):
            unmount(config.resctrl)
            os.unlink(pid_file)
            _log_end(config)
        else:
            log.info("the simulator on %s keeps running, with its groups: no daemon started it", config.resctrl)
        return
    try:
        os.makedirs(config.resctrl, exist_ok=True)
    except OSError as error:
        raise ResctrlError(
            "cannot create the directory to simulate in",
            path=config.resctrl,
            errno=error.errno or 0,
            remedy=f"Choose another directory, or, if a simulator died there: umount --lazy {config.resctrl}",
        ) from error
    # Once more, because another user may have created it meanwhile, in a directory such as /tmp.
    _refuse_unsafe(top)
    try:
        # As on a machine that has been running for a while: energy counters do not start at 0.
        simulation = Simulation(config.resctrl, profile, residue=1, outlives=True)
    except ValueError as error:
        raise StartupError(ResctrlError(str(error)), Exit.USAGE) from error
    with simulation:
        started = processes.stat(simulation.pid)
        with open(pid_file, "w", encoding="ascii") as file:
            file.write(f"{simulation.pid} {started.start_time if started else 0}\n")
        _announce(profile, config)
        yield
    _log_end(config)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(pid_file)


def _announce(profile: str, config: Config) -> None:
    log.warning("this is a simulation (profile %s) on %s: no figure comes from hardware", profile, config.resctrl)
    log.info("to use it: RESCTRLMOND_SOCKET=%s resctrlctl list", config.varlink_socket)


def _log_end(config: Config) -> None:
    log.info("the simulator on %s was ended, and its groups are gone", config.resctrl)


def _is_running(pid_file: str) -> bool:
    """Return whether the simulator that a daemon started is running. Its start time identifies the process.

    One whose file cannot be read is not known to be such a simulator.
    """
    try:
        with open(pid_file, encoding="ascii") as file:
            pid, start_time = map(int, file.read(64).split())
    except (OSError, ValueError):
        return False
    return processes.is_same(pid, start_time)


def _refuse_unsafe(top: str) -> None:
    """Refuse a directory of another user, or where others could change what a path of the simulation leads to.

    Raises ResctrlError.
    """
    try:
        unsafe = unsafe_part(top)
    except OSError as error:
        raise ResctrlError(
            "cannot look at the directory to simulate in",
            path=str(error.filename or top),
            errno=error.errno or 0,
            remedy="Choose another directory",
        ) from error
    if unsafe is not None:
        part, reason = unsafe
        raise ResctrlError(
            f"cannot simulate in {top}, because other users can change it: {part} {reason}",
            path=top,
            errno=errno.EPERM,
            remedy="Choose a directory of your own, with parents that only you or root can change",
        )
    if os.path.isdir(top) and os.stat(top).st_uid != os.geteuid() and not os.access(top, os.W_OK, effective_ids=True):
        raise ResctrlError(
            "the directory belongs to another user, who may run a simulation there",
            path=top,
            errno=errno.EACCES,
            remedy=f"Choose a directory of your own, such as {top}-{os.geteuid()}, or run the commands as that user",
        )
