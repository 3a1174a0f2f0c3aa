# SPDX-License-Identifier: Apache-2.0
"""Calls of org.resctrlmon.Unit to a daemon that is about to start, as at boot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from resctrlmond.client import Client, VarlinkError
from resctrlmond.host import unit_exec
from tests.daemon.conftest import Machine
from tests.hook.builds import ROOT
from tests.wait import wait_until_served

DAEMON = """
import asyncio, sys
from resctrlmond.configuration.config import Config
from resctrlmond.daemon.daemon import Daemon
from resctrlmond.daemon.startup import prepare

top = sys.argv[1]
config = Config(
    resctrl=f"{top}/resctrl", runtime_dir=f"{top}/run", varlink_socket=f"{top}/varlink", units=("*.service",)
)
setup = prepare(config, 4242, allow_simulation=True)
asyncio.run(Daemon(config, setup, lambda: config, bus=f"unix:path={top}/bus").run())
"""


def test_call_is_served_before_the_bus_answers(machine: Machine) -> None:
    bus = socket.socket(socket.AF_UNIX)
    bus.bind(f"{machine.top}/bus")
    bus.listen()
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, str(machine.top)], cwd=ROOT)
    try:
        path = Path(machine.run, os.path.basename(unit_exec.SOCKET))
        wait_until_served(path)
        # Its answer is about this caller: units are watched already.
        with Client(str(path)) as client, pytest.raises(VarlinkError, match="control group of process"):
            client.call("org.resctrlmon.Unit.AssignSelf")
    finally:
        daemon.kill()
        daemon.wait()
        bus.close()
