# SPDX-License-Identifier: Apache-2.0
"""The command resctrlmond: parse arguments, load the configuration, run the daemon, and return its exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence

from resctrlmond import __version__
from resctrlmond.configuration import config, profile_files
from resctrlmond.configuration.config import Config
from resctrlmond.daemon.companion_files import CompanionFiles
from resctrlmond.daemon.daemon import PROGRESS_S, Daemon
from resctrlmond.daemon.ledger import ledger_of
from resctrlmond.daemon.simulated import config_below, session_bus, simulator
from resctrlmond.daemon.startup import Exit, StartupError, as_startup_error, check_folders, prepare
from resctrlmond.daemon.unit_memory_file import UnitMemoryFile
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.service import journal
from resctrlmond.service.arguments import Parser, not_empty
from resctrlmond.service.message_ids import MessageId
from resctrlmond.service.notify import Notify
from resctrlmond.service.start_lock import StartLock
from resctrlmond.workloads.profiles.profile import Profiles
from resctrlmond.workloads.records.atomic_files import set_umask

log = logging.getLogger("resctrlmond")

_PROFILE = "intel-aet"

# systemd and Debian do not assign the ids from 65520 to 65533 to a user. They exist in containers with 65536 ids too.
_UNUSED_GID = 65533


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resctrlmond",
        description="Manage the resctrl monitoring groups of this host, for pods, containers, services and commands.",
        epilog="For the exit status see resctrlmond(8).",
    )
    parser.add_argument(
        "--config", type=not_empty, metavar="FILE", help=f"configuration file (default: {config.DEFAULT_PATH})"
    )
    parser.add_argument(
        "--profiles-dir",
        type=not_empty,
        metavar="DIRECTORY",
        help="the directory of profiles to read instead of those in /etc/resctrlmond and /usr/lib/resctrlmond",
    )
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="check the configuration, its group and its directories, and the profiles, and exit; a running daemon "
        "is not affected",
    )
    parser.add_argument(
        "--simulate",
        type=not_empty,
        metavar="DIRECTORY",
        help="manage a simulated resctrl on DIRECTORY/resctrl, with all other files in DIRECTORY. A simulator that "
        "is already mounted there is used. The simulator outlives a daemon that is killed",
    )
    parser.add_argument("--profile", help=f"the machine to simulate (default: {_PROFILE})")
    parser.add_argument(
        "--release-all",
        action="store_true",
        help="end every workload, remove all monitoring groups with the mark of resctrlmond, and exit",
    )
    parser.add_argument("--version", action="version", version=f"resctrlmond {__version__}")
    return parser


def main(arguments: Sequence[str] | None, start_lock: StartLock) -> int:
    """Run the daemon until it is stopped; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.profile is not None and not options.simulate:
        parser.error("--profile needs --simulate DIRECTORY")
    journal.setup("info")
    if options.check_config:
        return _check_config(options)
    # The caller's umask would narrow groups_mode in each new folder; no mode that it offers has a bit of this one.
    set_umask(0o022)
    try:
        with contextlib.ExitStack() as stack:
            loaded = _load(options)
            journal.setup(loaded.log_level)
            profile_files.chosen(options.profiles_dir)  # other mistakes in profiles do not stop the start
            if options.simulate:
                stack.enter_context(simulator(options.simulate, loaded, options.profile or _PROFILE))
                gid = _simulation_gid(loaded)
            else:
                gid = _gid(loaded)
            if options.release_all:
                return _release_all(options, loaded, gid)
            return _serve(options, loaded, gid, start_lock)
    except ResctrlError as error:
        failed = as_startup_error(error)
        log.error("%s", failed, extra=journal.fields(failed, message_id=MessageId.CANNOT_START))
        return failed.exit


def _serve(options: argparse.Namespace, loaded: Config, gid: int, start_lock: StartLock) -> int:
    # Reported first, because a hanging filesystem would keep the start from reporting anything later.
    notify = Notify()
    notify.extend_start()
    notify.status(f"opening resctrl at {loaded.resctrl}")
    start_lock.release_after(PROGRESS_S)
    setup = prepare(loaded, gid, allow_simulation=bool(options.simulate))

    async def run() -> None:
        bus = session_bus() if options.simulate else None
        # A simulation, or a daemon on a terminal, is not the service.
        is_service = journal.target() == "journal" and not options.simulate
        ledger = ledger_of(loaded, setup, journal.JournalSocket()) if is_service else None
        reload, profiles = functools.partial(_load, options), functools.partial(_load_profiles, options)
        await Daemon(
            loaded, setup, reload, notify, profiles=profiles, bus=bus, start_lock=start_lock, ledger=ledger
        ).run()

    try:
        asyncio.run(run())
    except OSError as error:
        # Errors of sockets.listen() have a reason of their own.
        reason = error.strerror or str(error)
        raise ResctrlError(
            reason if reason.startswith("cannot") else f"cannot listen: {reason}",
            path=error.filename or "",
            errno=error.errno or 0,
            remedy="Check varlink_socket, and that its directory exists and can be written to",
        ) from error
    finally:
        os.close(setup.lock)
    return Exit.OK


def _release_all(options: argparse.Namespace, loaded: Config, gid: int) -> int:
    try:
        setup = prepare(loaded, gid, allow_simulation=bool(options.simulate))
    except StartupError as error:
        if error.exit not in (Exit.NOT_MOUNTED, Exit.NO_MONITORING):
            raise
        log.info("there is no monitoring group to remove: %s", error)
        problems = []
    else:
        try:
            problems = setup.manager.release_all()
        finally:
            os.close(setup.lock)
    bus = session_bus() if options.simulate else None
    problems += _stop_companions(loaded, bus)
    problems += _restore_units(loaded, bus)
    for problem in problems:
        log.error("cannot release: %s", problem)
    return Exit.FAILURE if problems else Exit.OK


def _stop_companions(loaded: Config, bus: str | None) -> list[str]:
    """Stop all companions. Return the problems, [] if none of them runs."""
    if bus == "" or not CompanionFiles(loaded.runtime_dir).exists:
        return []
    try:
        # Not at the top: it needs the D-Bus library.
        from resctrlmond.daemon.companions import stop_all  # noqa: PLC0415
    except ImportError as error:
        return [f"companions: {error}"]
    problem = asyncio.run(stop_all(loaded.runtime_dir, bus))
    return [problem] if problem else []


def _restore_units(loaded: Config, bus: str | None) -> list[str]:
    """Put the memory settings of units back. Return the problems, [] if no unit is changed."""
    if bus == "" or not UnitMemoryFile(loaded.runtime_dir).exists:
        return []
    try:
        # Not at the top: it needs the D-Bus library.
        from resctrlmond.daemon.unit_memory import restore_all  # noqa: PLC0415
    except ImportError as error:
        return [f"the memory settings of units: {error}"]
    problem = asyncio.run(restore_all(loaded.runtime_dir, bus))
    return [problem] if problem else []


def _check_config(options: argparse.Namespace) -> int:
    problems: list[ResctrlError] = [*config.problems(options.config)]

    def check(function: Callable[[], object]) -> None:
        try:
            function()
        except ResctrlError as error:
            problems.append(error)

    if not problems:
        loaded = _load(options)
        if not options.simulate:
            check(lambda: _gid(loaded))
            check(lambda: check_folders(loaded))
    check(lambda: _load_profiles(options))
    for error in problems:
        # Without the message id of a failed start: a daemon may be running.
        log.error("%s", error, extra=journal.fields(error))
    return as_startup_error(problems[0]).exit if problems else Exit.OK


def _load(options: argparse.Namespace) -> Config:
    loaded = config.load(options.config)
    return config_below(options.simulate, loaded) if options.simulate else loaded


def _load_profiles(options: argparse.Namespace) -> Profiles:
    return profile_files.load(profile_files.chosen(options.profiles_dir), with_companions=True)


def _gid(loaded: Config) -> int:
    try:
        gid = loaded.group_id()
        loaded.reader_ids(gid)  # checks the other group
        return gid
    except ResctrlError as error:
        failed = StartupError(error, Exit.NO_GROUP)
        if not os.path.isdir(loaded.resctrl):
            # The next error would be this one, which no group mends.
            failed.remedy += (
                f". This machine has no {loaded.resctrl} either: to try the commands on a simulated machine, use "
                "--simulate /tmp/sim"
            )
        raise failed from error


def _simulation_gid(loaded: Config) -> int:
    """Return the mark in a simulation: the configured group if it exists, else the user's own.

    For root, the latter would mark every group that root creates, so it is a group without members.
    """
    try:
        return loaded.group_id()
    except ResctrlError:
        return os.getegid() or _UNUSED_GID
