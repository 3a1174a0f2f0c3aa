# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: neither a slow machine nor a shell's background is a failure."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell has the commands of its background ignore these, and they hand that down to all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# nohup(1) ignores this one, and resctrlctl then rightly does not forward it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The developer's own bus and daemon are not the tests'.
# Nor are the options of the make that runs them a test's: --keep-going would make a failing make go on.
for name in ("DBUS_SESSION_BUS_ADDRESS", "RESCTRLMOND_SOCKET", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
    os.environ.pop(name, None)

KEPT = 3  # directories of failed runs
PREFIX = "rmond-"
FOR_TESTS = "t"  # pytest creates it for the first test that uses it

_OWN = pytest.StashKey[Path]()
_LOCK = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Name the run's own directory. It is created later, because --help and --markers have no session.

    pytest's default is a directory that all runs share, where it removes those of earlier runs, and fails if a run
    that was killed left a mount in them.
    """
    if config.option.basetemp is None:
        # Short, because tests create sockets below it, whose path has at most 107 bytes (sun_path of unix(7)).
        config.stash[_OWN] = Path(tempfile.gettempdir()).resolve() / f"{PREFIX}{secrets.token_hex(4)}"
        config.option.basetemp = config.stash[_OWN] / FOR_TESTS


def pytest_sessionstart(session: pytest.Session) -> None:
    """Create the run's directory, and lock it against removal by other runs."""
    stash = session.config.stash
    if _OWN in stash:
        stash[_OWN].mkdir(mode=0o700)
        stash[_LOCK] = os.open(stash[_OWN], os.O_RDONLY)
        fcntl.flock(stash[_LOCK], fcntl.LOCK_EX)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the run's directory. If tests failed, keep it to be read, and remove those of older failed runs."""
    stash = session.config.stash
    if _LOCK in stash:
        passed = exitstatus == pytest.ExitCode.OK
        session.config.add_cleanup(lambda: _clean_up(stash[_OWN], stash[_LOCK], passed=passed))


def _clean_up(own: Path, lock: int, *, passed: bool) -> None:
    if passed or not (own / FOR_TESTS).exists():
        _remove(own)
    os.close(lock)
    # A run that starts now has perhaps no lock yet, but then no directory for tests either.
    runs = [path.parent for path in own.parent.glob(f"{PREFIX}*/{FOR_TESTS}")]
    for path in sorted((path for path in runs if not _is_in_use(path)), key=_start, reverse=True)[KEPT:]:
        _remove(path)


def _start(own: Path) -> float:
    try:
        return own.stat().st_mtime
    except FileNotFoundError:  # Another run has removed it.
        return 0


def _is_in_use(own: Path) -> bool:
    """Whether the directory is of a run that has not ended, or of another user, or has a mount below it."""
    escaped = re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", f"{own}/")
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as table:
        if any(line.split(" ")[4].startswith(escaped) for line in table):
            return True
    try:
        lock = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # ENOENT: another run has removed it. EACCES, ELOOP: another user created it.
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(lock).st_uid != os.getuid()
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def _remove(own: Path) -> None:
    # rm and not rmtree: what a test left mounted there is not to be emptied.
    subprocess.run(["rm", "-rf", "--one-file-system", own], stderr=subprocess.DEVNULL, check=False)
