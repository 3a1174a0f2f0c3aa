# SPDX-License-Identifier: Apache-2.0
"""The command resctrlmond: arguments, configuration, start, and the exit code that says how it went."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import stat
import sys
from collections.abc import Sequence

from resctrlmond import __version__, config, journal
from resctrlmond.config import Config
from resctrlmond.daemon import Daemon
from resctrlmond.groups.farewell import release_all
from resctrlmond.message_ids import MessageId
from resctrlmond.notify import Notify
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.tree import Tree
from resctrlmond.startup import Exit, StartupError, prepare, startup_error

log = logging.getLogger("resctrlmond")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resctrlmond",
        description="Own the resctrl monitoring groups of this host, for pods, containers, services and commands.",
        epilog="Exit codes: see resctrlmond(8).",
    )
    parser.add_argument("--config", metavar="FILE", help=f"configuration file (default: {config.DEFAULT_PATH})")
    parser.add_argument(
        "--simulate",
        metavar="DIRECTORY",
        help="own a simulated resctrl, DIRECTORY/resctrl, with everything else in DIRECTORY, instead of the "
        "hardware's; it is mounted for as long as this runs, unless one is mounted there already",
    )
    parser.add_argument("--profile", default="intel-aet", help="machine to simulate (default: intel-aet)")
    parser.add_argument(
        "--release-all",
        action="store_true",
        help="end every workload, remove every monitoring group that bears our mark, and exit",
    )
    parser.add_argument("--version", action="version", version=f"resctrlmond {__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to stop; returns the exit code."""
    options = _parser().parse_args(arguments)
    journal.setup("info")
    try:
        with contextlib.ExitStack() as stack:
            loaded = _load(options)
            journal.setup(loaded.log_level)
            if options.simulate:
                _simulate(options, loaded, stack)
                gid = _simulation_gid(loaded)
            else:
                gid = _gid(loaded)
            return (_release_all if options.release_all else _serve)(options, loaded, gid)
    except ResctrlError as error:
        failed = startup_error(error)
        log.error("%s", failed, extra=journal.fields(failed, message_id=MessageId.CANNOT_START))
        return failed.exit


def _serve(options: argparse.Namespace, loaded: Config, gid: int) -> int:
    # A tree that hangs keeps the start from ending, and from saying anything later: said before it is touched.
    notify = Notify()
    notify.status(f"looking at resctrl on {loaded.resctrl}")
    ground = prepare(loaded, gid, allow_simulation=bool(options.simulate))

    async def run() -> None:
        await Daemon(loaded, ground, lambda: _load(options), notify).run()

    try:
        asyncio.run(run())
    except OSError as error:
        raise ResctrlError("cannot open a door", path=error.filename or "", errno=error.errno or 0) from error
    finally:
        os.close(ground.lock)
    return Exit.OK


def _release_all(options: argparse.Namespace, loaded: Config, gid: int) -> int:
    try:
        ground = prepare(loaded, gid, allow_simulation=bool(options.simulate))
    except StartupError as error:
        if error.exit not in (Exit.NOT_MOUNTED, Exit.NO_MONITORING):
            raise
        log.info("no monitoring group stands: %s", error)
        return Exit.OK
    try:
        problems = release_all(ground.manager)
    finally:
        os.close(ground.lock)
    for problem in problems:
        log.error("cannot be released: %s", problem)
    return Exit.FAILURE if problems else Exit.OK


def _load(options: argparse.Namespace) -> Config:
    loaded = config.load(options.config)
    if not options.simulate:
        return loaded
    top = os.path.abspath(options.simulate)
    return Config(
        resctrl=os.path.join(top, "resctrl"),
        runtime_dir=os.path.join(top, "run"),
        group=loaded.group,
        group_prefix=loaded.group_prefix,
        snapshot_ttl=loaded.snapshot_ttl,
        linger=loaded.linger,
        pod_linger=loaded.pod_linger,
        checkpoint_interval=loaded.checkpoint_interval,
        log_level=loaded.log_level,
        dbus=False,
    )


def _simulate(options: argparse.Namespace, loaded: Config, stack: contextlib.ExitStack) -> None:
    # Only here: the simulator and its FUSE library are no part of a real daemon.
    try:
        from resctrlmond.sim.mount import Simulation  # noqa: PLC0415
    except ModuleNotFoundError as error:
        # Distributions leave it out.
        raise ResctrlError(
            f"the simulator is not installed: there is no module {error.name}",
            remedy="It comes with pip: python3 -m pip install 'resctrlmond[sim]', from the source tree '.[sim]'",
        ) from error

    _refuse_what_others_may_change(os.path.abspath(options.simulate))
    profile = options.profile
    if os.path.ismount(loaded.resctrl):
        # One that outlives this daemon, as the kernel's does: python3 -m resctrlmond.sim DIRECTORY/resctrl
        profile = Tree.open(loaded.resctrl, allow_simulation=True).simulation
        if profile is None:
            raise ResctrlError("is the real resctrl", path=loaded.resctrl, remedy="Run without --simulate")
    else:
        try:
            os.makedirs(loaded.resctrl, exist_ok=True)
        except OSError as error:
            raise ResctrlError(
                "cannot make the directory to simulate in",
                path=loaded.resctrl,
                errno=error.errno or 0,
                remedy=f"Choose another one, or, if a simulation died there: umount --lazy {loaded.resctrl}",
            ) from error
        # Like a machine that has been up for a while: energy counters go on from where another workload left them.
        try:
            stack.enter_context(Simulation(loaded.resctrl, profile, residue=1))
        except ValueError as error:
            raise StartupError(ResctrlError(str(error)), Exit.USAGE) from error
    log.warning("this is a simulation (profile %s) on %s: no figure comes from hardware", profile, loaded.resctrl)
    log.info("talk to it with: resctrlctl --socket %s list", loaded.varlink_socket)


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


def _gid(loaded: Config) -> int:
    try:
        return loaded.group_id()
    except ResctrlError as error:
        raise StartupError(error, Exit.NO_GROUP) from error


def _simulation_gid(loaded: Config) -> int:
    """The mark in a simulation: the configured group where there is one, else any but root's, which others bear."""
    try:
        return loaded.group_id()
    except ResctrlError:
        return os.getegid() or 65534


if __name__ == "__main__":
    sys.exit(main())
