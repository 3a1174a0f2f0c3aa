# SPDX-License-Identifier: Apache-2.0
"""Access rights of other users' processes to the D-Bus server."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from tests.api.private_bus import (
    INTROSPECTABLE,
    LOG_CONTROL,
    MANAGER,
    NAME,
    NOBODY,
    OBJECT_MANAGER,
    PROPERTIES,
    READERS,
    ROOT,
    WORKLOAD,
    BusctlError,
    BusHost,
    Client,
)

ACCESS_DENIED = "org.freedesktop.DBus.Error.AccessDenied"

# busctl prints a text of its own for org.freedesktop.DBus.Error.AccessDenied.
DENIED = "user 65534 may not call|Access denied"
READS = (
    ("call", NAME, ROOT, MANAGER, "List"),
    ("call", NAME, ROOT, MANAGER, "Status"),
    ("call", NAME, ROOT, MANAGER, "Get", "s", "seen"),
    ("call", NAME, f"{ROOT}/workload/seen", WORKLOAD, "Read"),
    ("get-property", NAME, f"{ROOT}/workload/seen", WORKLOAD, "Key"),
    ("get-property", NAME, *LOG_CONTROL, "LogLevel"),
    ("call", NAME, f"{ROOT}/workload/seen", PROPERTIES, "GetAll", "s", ""),
    ("call", NAME, ROOT, OBJECT_MANAGER, "GetManagedObjects"),
    ("call", NAME, f"{ROOT}/workload", INTROSPECTABLE, "Introspect"),
    ("call", NAME, f"{ROOT}/workload/seen", INTROSPECTABLE, "Introspect"),
)
WRITES = (
    ("call", NAME, ROOT, MANAGER, "Create", "sa{sv}", "mine", "0"),
    ("call", NAME, ROOT, MANAGER, "Assign", "sa{sv}", "mine", "1", "pid", "x", "1"),
    ("call", NAME, ROOT, MANAGER, "Release", "sa{sv}", "seen", "0"),
    ("call", NAME, ROOT, MANAGER, "Move", "ss", "seen", ""),
    ("call", NAME, ROOT, MANAGER, "Reconcile", "sas", "cli", "0"),
    ("call", NAME, f"{ROOT}/workload/seen", WORKLOAD, "Release", "a{sv}", "0"),
    ("set-property", NAME, f"{ROOT}/workload/seen", WORKLOAD, "Key", "s", "x"),
)


def test_other_users_have_no_access_and_the_group_can_only_read(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            await client.call("Create", "sa{sv}", "seen", {})
            for arguments in (*READS, *WRITES):
                with pytest.raises(BusctlError, match=DENIED):
                    await host.busctl(*arguments, uid=NOBODY)
            for arguments in READS:
                await host.busctl(*arguments, uid=NOBODY, groups=(READERS,))
            for arguments in WRITES:
                with pytest.raises(BusctlError, match=DENIED):
                    await host.busctl(*arguments, uid=NOBODY, groups=(READERS,))
            assert (await client.call("Get", "s", "seen"))[0]["state"] == "idle"

    asyncio.run(run())


def test_properties_are_denied_under_the_standard_name(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            await client.call("Create", "sa{sv}", "hidden", {})
            script = f"""
import asyncio, os, dbus_fast, dbus_fast.aio
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
async def main():
    bus = await dbus_fast.aio.MessageBus(bus_address={host.address!r}).connect()
    for path, interface, member, signature, body in [
        ("{ROOT}/workload/hidden", "{PROPERTIES}", "Get", "ss", ["{WORKLOAD}", "Key"]),
        ("{ROOT}/workload/none", "{PROPERTIES}", "GetAll", "s", [""]),
        ("{ROOT}", "{OBJECT_MANAGER}", "GetManagedObjects", "", []),
        ("{ROOT}", "{MANAGER}", "Get", "s", ["hidden"]),
    ]:
        reply = await bus.call(dbus_fast.Message("{NAME}", path, interface, member, signature=signature, body=body))
        print(reply.error_name)
    bus.disconnect()
asyncio.run(main())
"""
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
            out, _ = await process.communicate()
            assert out.decode().split() == [ACCESS_DENIED] * 3 + ["org.resctrlmon1.Error.PermissionDenied"]

    asyncio.run(run())
