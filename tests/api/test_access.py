# SPDX-License-Identifier: Apache-2.0
"""Calls of each method over each interface: real processes of users without the right are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.api.access import Access, Policy
from resctrlmond.api.dbus.interfaces import INTERFACES, PEER
from resctrlmond.api.service import Service
from resctrlmond.api.signatures import UNIT
from resctrlmond.api.sockets import listen
from resctrlmond.api.varlink import interfaces as varlink
from resctrlmond.api.verbs import VERBS
from resctrlmond.api.workers import Workers
from resctrlmond.workloads.manager import Manager
from tests.api.private_bus import (
    INTROSPECTABLE,
    LOG_CONTROL,
    MANAGER,
    NAME,
    NOBODY,
    OBJECT_MANAGER,
    PROPERTIES,
    READ_ONLY,
    READERS,
    ROOT,
    WORKLOAD,
    BusHost,
    Client,
)
from tests.api.varlink_server import public_directory

LOG, LOG_INTERFACE = LOG_CONTROL
DENIED = {"org.resctrlmon1.Error.PermissionDenied", "org.freedesktop.DBus.Error.AccessDenied"}

# Both print the error of each call, as JSON. Their arguments: groups, an address, calls as JSON.
VARLINK_CLIENT = f"""
import json, os, socket, sys
os.setgroups(json.loads(sys.argv[1])); os.setgid({NOBODY}); os.setuid({NOBODY})
errors = []
for call in json.loads(sys.argv[3]):
    # One for each call: a reply may be the first of several.
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[2])
    stream = connection.makefile("rwb")
    stream.write(json.dumps(call).encode() + bytes(1))
    stream.flush()
    data = b""
    while not call.get("oneway") and not data.endswith(bytes(1)):
        data += stream.read(1)
    errors.append(json.loads(data[:-1]).get("error") if data else None)
print(json.dumps(errors))
"""
DBUS_CLIENT = f"""
import asyncio, json, os, sys, dbus_fast, dbus_fast.aio
os.setgroups(json.loads(sys.argv[1])); os.setgid({NOBODY}); os.setuid({NOBODY})
VALUES = {{"s": "seen", "as": [], "a{{sv}}": {{}}, "v": dbus_fast.Variant("s", "debug")}}
async def main():
    bus = await dbus_fast.aio.MessageBus(bus_address=sys.argv[2]).connect()
    errors = []
    for path, interface, member, types, names in json.loads(sys.argv[3]):
        body = [name or VALUES[type_] for type_, name in zip(types, names)]
        call = dbus_fast.Message("{NAME}", path, interface, member, signature="".join(types), body=body)
        errors.append((await bus.call(call)).error_name)
    bus.disconnect()
    print(json.dumps(errors))
asyncio.run(main())
"""


async def errors_of(client: str, address: str, calls: list[Any], groups: list[int]) -> list[str | None]:
    """Return the name of the error, or None, of each call of another user."""
    words = (json.dumps(groups), address, json.dumps(calls))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", client, *words, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    errors: list[str | None] = json.loads(out)
    assert len(errors) == len(calls)
    return errors


def is_allowed(access: Access, groups: list[int]) -> bool:
    return access is Access.READ and bool({READERS, READ_ONLY} & set(groups))


@pytest.mark.parametrize("groups", [[], [READERS], [READ_ONLY]], ids=["other user", "reader", "other reader"])
def test_varlink_methods_are_denied_without_the_right(manager: Manager, groups: list[int]) -> None:
    # AssignSelf has a socket of its own, for each user.
    verbs = [verb for verb in VERBS.values() if verb.interface != UNIT]
    modes: list[dict[str, bool]] = [{}, {"more": True}, {"oneway": True}]
    calls = [{"method": verb.full_name, **mode} for mode in modes for verb in verbs]
    create: dict[str, object] = {"method": VERBS["Create"].full_name, "parameters": {"key": "not-created"}}
    calls += [{**create, "oneway": True}, create]

    async def run() -> list[str | None]:
        with contextlib.closing(Workers()) as workers, public_directory() as directory:
            path = str(Path(directory) / "socket")
            server = varlink.server(Service(manager, Policy(READERS, READ_ONLY), workers))
            await server.start(listen(path))
            os.chmod(path, 0o666)
            try:
                return await errors_of(VARLINK_CLIENT, path, calls, groups)
            finally:
                await server.close()

    errors = asyncio.run(run())
    denied = "org.resctrlmon.Manager.PermissionDenied"
    for mode in (0, 1):
        of_mode = errors[mode * len(verbs) : (mode + 1) * len(verbs)]
        found = {verb.name: error != denied for verb, error in zip(verbs, of_mode, strict=True)}
        assert found == {verb.name: is_allowed(verb.access, groups) for verb in verbs}
    assert errors[-1] == denied
    assert manager.context.store.get("not-created") is None


# The objects with the interfaces of each.
OBJECTS = {
    ROOT: (MANAGER, OBJECT_MANAGER),
    f"{ROOT}/workload": (),
    f"{ROOT}/workload/seen": (WORKLOAD,),
    LOG: (LOG_INTERFACE,),
}


def dbus_calls() -> list[tuple[Access, tuple[Any, ...]]]:
    """Return calls of each method and property of each object, with the right that each requires."""
    calls: list[tuple[Access, tuple[Any, ...]]] = []
    for path, own in OBJECTS.items():
        for interface in (*own, PROPERTIES, INTROSPECTABLE):
            for member, method in INTERFACES[interface].methods.items():
                # Subscribe and Unsubscribe are not verbs.
                is_verb = interface in (MANAGER, WORKLOAD) and member in VERBS
                is_write = VERBS[member].access is Access.WRITE if is_verb else member == "Set"
                access = Access.WRITE if is_write else Access.READ
                types = [argument.type for argument in method.inputs]
                if interface == INTROSPECTABLE and not path.startswith(f"{ROOT}/workload"):
                    continue  # allowed for all callers: it names no workload
                calls.append((access, (path, interface, member, types, [None] * len(types))))
                if interface in own:
                    calls.append((access, (path, None, member, types, [None] * len(types))))
        for interface in own:
            for name in INTERFACES[interface].properties:
                calls.append((Access.READ, (path, PROPERTIES, "Get", ["s", "s"], [interface, name])))
                calls.append((Access.WRITE, (path, PROPERTIES, "Set", ["s", "s", "v"], [interface, name, None])))
            calls.append((Access.READ, (path, PROPERTIES, "GetAll", ["s"], [interface])))
    assert PEER not in {call[1] for _, call in calls}
    return calls


@pytest.mark.parametrize("groups", [[], [READERS], [READ_ONLY]], ids=["other user", "reader", "other reader"])
@pytest.mark.parametrize("is_early", [True, False], ids=["before decoding", "after decoding"])
def test_dbus_methods_and_properties_are_denied_without_the_right(
    host: BusHost, monkeypatch: pytest.MonkeyPatch, groups: list[int], is_early: bool
) -> None:
    if not is_early:
        # The check of the header is only an optimization.
        monkeypatch.setattr(host.module.Objects, "check", lambda self, header, caller: None)

    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            await client.call("Create", "sa{sv}", "seen", {})
            # A connection has at most 64 calls that were not answered yet: these are sent one after another.
            calls = dbus_calls()
            errors = await errors_of(DBUS_CLIENT, host.address, [call for _, call in calls], groups)
            for (access, call), error in zip(calls, errors, strict=True):
                assert (error not in DENIED) == is_allowed(access, groups), (call, error)
            assert (await client.call("Get", "s", "seen"))[0]["state"] == "idle"
            assert host.levels == ["info"]

    asyncio.run(run())
