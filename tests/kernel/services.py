# SPDX-License-Identifier: Apache-2.0
"""Programs of services in a guest: one that owns a name on the bus, and one that reloads by SIGHUP."""

from __future__ import annotations

from .host import Host
from .install import RELOAD_DBUS

OWNER = "/run/owner.py"
READY = "/run/ready.py"

_OWNER = """\
import asyncio

from dbus_fast import BusType
from dbus_fast.aio import MessageBus


async def main():
    bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
    await bus.request_name("org.resctrlmon.Test")
    await asyncio.sleep(600)


asyncio.run(main())
"""
_POLICY = "<busconfig><policy user='root'><allow own='org.resctrlmon.Test'/></policy></busconfig>"
# sd_notify(3), "Type=notify-reload".
_READY = """\
import os
import signal
import socket
import time


def notify(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])


def reload(*_):
    notify(f"RELOADING=1\\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    notify("READY=1\\nSTATUS=reloaded")


signal.signal(signal.SIGHUP, reload)
notify("READY=1")
while True:
    signal.pause()
"""


def write_programs(host: Host) -> None:
    """Write both programs, and let root own the name org.resctrlmon.Test."""
    host.guest.write(OWNER, _OWNER)
    host.guest.write(READY, _READY)
    host.guest.write("/etc/dbus-1/system.d/org.resctrlmon.Test.conf", _POLICY)
    host.run(RELOAD_DBUS)
