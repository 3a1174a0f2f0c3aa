# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: neither a slow machine nor a shell's background is a failure."""

from __future__ import annotations

import os
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

OWN = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give each run a directory of its own.

    pytest's default is a directory that all runs share, where it removes those of earlier runs, and fails if a run
    that was killed left a mount in them.
    """
    if config.option.basetemp is None:
        config.stash[OWN] = Path(tempfile.mkdtemp(prefix="tests-"))
        config.option.basetemp = config.stash[OWN] / "t"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the directory of a run that passed; that of a run that failed is kept to be read."""
    own = session.config.stash.get(OWN, None)
    if own is not None and exitstatus == pytest.ExitCode.OK:
        session.config.add_cleanup(lambda: _remove(own))


def _remove(own: Path) -> None:
    # rm and not rmtree: what a test left mounted there is not to be emptied.
    subprocess.run(["rm", "-rf", "--one-file-system", own], stderr=subprocess.DEVNULL, check=False)
