# SPDX-License-Identifier: Apache-2.0
"""The D-Bus server as its clients see it: verbs, errors, properties, introspection and log control."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from typing import Any
from xml.etree import ElementTree

import dbus_fast
import dbus_fast.aio
import pytest
from dbus_fast import Variant

from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.states import ProofKind
from resctrlmond.workloads.upkeep.tree_status import TreeStatus
from resctrlmond.workloads.verbs.create import create
from tests.api.private_bus import (
    INTROSPECTABLE,
    INVALID_ARGS,
    LIMITS_EXCEEDED,
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
    descriptors,
    eventually,
)
from tests.workloads.builders import save


def test_life_of_a_workload(host: BusHost, process: subprocess.Popen[bytes]) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            group = await client.call("Create", "sa{sv}", "web.service", {"attributes": Variant("a{ss}", {"a": "b"})})
            assert group["state"] == "idle"
            assert group["attributes"] == {"a": "b"}
            assert group["claims"][0]["owner"] == "uid:0"
            options = {"pid": Variant("u", process.pid), "member": Variant("s", "main"), "claim": Variant("s", "cli")}
            done = await client.call("Assign", "sa{sv}", "web.service", options)
            assert (done["moved"], done["tasksOutside"], done["workload"]["state"]) == (1, 0, "active")
            assert done["workload"]["members"][0]["pid"] == process.pid
            # The process ran before the call, so the baseline is late.
            assert (done["workload"]["baseline"], done["descendantsOutside"]) == ("late", 0)
            assert done["workload"]["members"][0]["cpuTimeBeforeNs"] > 0
            workload, proofs = await client.call("Get", "s", "web.service")
            assert workload == done["workload"]
            assert [proof["kind"] for proof in proofs] == [*map(str, ProofKind)]
            read = await client.call("Read", "s", "web.service")
            assert read["readings"] and read["totals"]
            assert all(
                isinstance(reading["text"], str) and isinstance(reading["nested"], bool)
                for reading in read["readings"]
            )
            assert any(reading["value"].isdecimal() for reading in read["readings"] if reading["status"] == "ok")
            options = {"withEnded": Variant("b", True), "domains": Variant("b", True)}
            usages, last = await client.call("ReadAll", "a{sv}", options)
            assert ([usage["workload"]["key"] for usage in usages], last) == (["web.service"], "")
            assert usages[0]["totals"] and usages[0]["levels"][0]["event"] == "llc_occupancy"
            names = {one["event"] for one in (*usages[0]["totals"], *usages[0]["levels"])}
            assert {use["event"] for use in usages[0]["domains"]} == names
            assert {use["domain"] for use in usages[0]["domains"]} <= {one["domain"] for one in read["readings"]}
            groups, foreign = await client.call("List")
            assert done["workload"] in groups
            assert isinstance(foreign, list)
            assert (await client.call("Move", "ss", "web.service", ""))["class"] == ""
            assert not (await client.call("Release", "sa{sv}", "web.service", {}))["completed"]
            over = await client.call("Release", "sa{sv}", "web.service", {"claim": Variant("s", "cli")})
            assert over["completed"] and over["workload"]["state"] == "completed"

    asyncio.run(run())


@pytest.mark.parametrize("case", ["waits", "wants no reply", "has left", "waited too long"])
def test_assign_is_late_if_the_caller_does_not_wait_for_the_reply(
    host: BusHost, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "waited too long":
        monkeypatch.setattr(host.module, "PATIENCE_S", -1.0)
    call = dbus_fast.Message(
        destination=NAME,
        path=ROOT,
        interface=MANAGER,
        member="Assign",
        signature="sa{sv}",
        body=["k", {"pid": Variant("u", process.pid), "late": Variant("b", False)}],
        flags=dbus_fast.MessageFlag.NO_REPLY_EXPECTED if case == "wants no reply" else dbus_fast.MessageFlag.NONE,
    )

    async def run() -> None:
        async with host.serving(), Client(host.address) as other:
            with host.manager.context.store.transaction("k") if case == "has left" else contextlib.nullcontext():
                async with Client(host.address) as caller:
                    await caller.call("List")
                    await caller.bus.send(call)
                    # The server handles calls of a connection in order, so it has started the first call by now.
                    await caller.call("List")
                    if case != "has left":
                        await eventually(lambda: is_active("k"))
                await other.call("List")
            await eventually(lambda: is_active("k"))
            assert baseline_of(host.manager.context.store.known("k")) == ("exact" if case == "waits" else "late")

    def is_active(key: str) -> bool:
        return any(record.key == key and record.state == "active" for record in host.manager.context.store.all())

    asyncio.run(run())


def test_members_and_reconcile(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            await client.call("Create", "sa{sv}", "pod", {"claim": Variant("s", "nri")})
            added = await client.call("AddMember", "ssa{sv}", "pod", "box", {"claim": Variant("s", "nri")})
            assert [(member["id"], member["kind"]) for member in added["members"]] == [("box", "sandbox")]
            removed = await client.call("RemoveMember", "ssa{sv}", "pod", "box", {"reason": Variant("s", "gone")})
            assert removed["members"][0]["reason"] == "gone"
            await client.call("Create", "sa{sv}", "pod2", {"claim": Variant("s", "nri")})
            done = await client.call("Reconcile", "sas", "nri", ["pod2", "pod3"])
            assert done["kept"] == ["pod2"]
            assert [(failure["key"], failure["error"]) for failure in done["failures"]] == [
                ("pod3", "NoSuchWorkload")
            ]
            assert (await client.call("Reconcile", "sas", "nri", []))["released"] == ["pod2"]
            status = await client.call("Status")
            assert status["mounted"] and status["simulation"]
            assert status["capacity"][0]["rmids"] >= status["rmids"] > 0
            assert status["bandwidth"]["mode"] == "dedicated"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("call", "name", "expected"),
    [
        (("Get", "s", "none"), "NoSuchWorkload", "there is no workload none"),
        (("Get", "s", "../up"), "InvalidKey", "not allowed"),
        (("Create", "sa{sv}", "e", {"class": Variant("s", "no-such")}), "NoSuchClass", "no-such"),
        (("Assign", "sa{sv}", "e", {}), "InvalidRequest", "pid"),
        (("Assign", "sa{sv}", "e", {"pid": Variant("i", -5)}), None, ""),
        (("Assign", "sa{sv}", "e", {"pid": Variant("t", 2**64 - 1)}), None, ""),
    ],
)
def test_typed_errors(host: BusHost, call: tuple[Any, ...], name: str | None, expected: str) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            error, text = await client.refused(*call)
            assert error.startswith("org.resctrlmon1.Error.")
            assert error.rpartition(".")[2] == name if name else "Internal" not in error
            assert expected in text

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "options", "field"),
    [
        ("Create", {"colour": Variant("s", "red")}, "colour"),
        ("Create", {"allowPending": Variant("s", "yes")}, "allowPending"),
        ("Create", {"key": Variant("s", "other")}, "key"),
        ("Create", {"attributes": Variant("a{sv}", {"a": Variant("x", 1)})}, "attributes"),
        ("Create", {"claim": Variant("ay", b"bytes")}, "claim"),
        ("Assign", {"pid": Variant("s", "1")}, "pid"),
        ("Assign", {"pid": Variant("b", True)}, "pid"),
        ("Assign", {"pid": Variant("d", 1.0)}, "pid"),
        ("Assign", {"pid": Variant("v", Variant("s", "1"))}, "pid"),
        ("Assign", {"pid": Variant("h", 0)}, "pid"),
        ("Assign", {"allow_class_change": Variant("b", True)}, "allow_class_change"),
    ],
)
def test_invalid_options_are_refused(host: BusHost, method: str, options: dict[str, Variant], field: str) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            name, text = await client.refused(method, "sa{sv}", "strict", options)
            assert name == INVALID_ARGS
            assert text.startswith(f"{field}")
            assert "key" not in text.partition("Known options are ")[2].split(", ")
            assert (await client.refused("Get", "s", "strict"))[0].endswith("NoSuchWorkload")

    asyncio.run(run())


def test_calls_of_unknown_methods_interfaces_and_objects_fail(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            error = "org.freedesktop.DBus.Error."
            assert (await client.refused("Get", "i", 5))[0] == INVALID_ARGS
            assert (await client.refused("Fly"))[0] == f"{error}UnknownMethod"
            assert (await client.refused("List", interface="org.example.I"))[0] == f"{error}UnknownInterface"
            assert (await client.refused("List", path="/elsewhere"))[0] == f"{error}UnknownObject"
            for element in ("_2", "_61", "_2e" * 2500):
                target = {"path": f"{ROOT}/workload/{element}", "interface": WORKLOAD}
                name, text = await client.refused("Read", **target)
                assert name == f"{error}UnknownObject"
                assert len(text) < 1100
            target = {"path": f"{ROOT}/workload/none", "interface": WORKLOAD}
            assert (await client.refused("Read", **target))[0] == "org.resctrlmon1.Error.NoSuchWorkload"
            # The interface is optional.
            assert "version" in await client.call("Status", interface=None)

    asyncio.run(run())


def test_unexpected_errors_are_logged_and_not_sent(
    host: BusHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing_get(key: str) -> None:
        raise RuntimeError("an internal secret")

    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            monkeypatch.setattr(host.manager.context.store, "known", failing_get)
            name, text = await client.refused("Get", "s", "any")
            assert name == "org.resctrlmon1.Error.InternalError"
            assert "secret" not in text

    asyncio.run(run())
    assert "an internal secret" in caplog.text


def test_nul_in_a_claim_does_not_close_the_connection(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            record = await asyncio.to_thread(create, host.manager.context, "nul", owner="cli")
            save(host.manager.context.store, record.with_claim("a\0b", "now"))
            assert (await client.call("Get", "s", "nul"))[0]["claims"][1]["owner"] == "a\ufffdb"
            assert await client.call(
                "Get", "ss", WORKLOAD, "Claims", path=f"{ROOT}/workload/nul", interface=PROPERTIES
            )
            assert server.connected

    asyncio.run(run())


def test_properties(host: BusHost, process: subprocess.Popen[bytes]) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            await client.call("Assign", "sa{sv}", "1-p", {"pid": Variant("x", process.pid)})
            target = {"path": f"{ROOT}/workload/_31_2dp", "interface": PROPERTIES}
            found = await client.call("GetAll", "s", WORKLOAD, **target)
            assert found["Key"] == "1-p"
            assert found["State"] == "active"
            group, _ = await client.call("Get", "s", "1-p")
            assert found["Members"] == group["members"]
            assert [member["id"] for member in group["members"]] == [f"pid-{process.pid}"]
            assert found["Claims"] == group["claims"]
            assert [claim["owner"] for claim in group["claims"]] == ["uid:0"]
            assert found["Priority"] == 0
            assert found["InLimbo"] is False
            assert found["Classes"] == []
            assert found["Path"].endswith("/mon_groups/1-p")
            assert found["CompletedAt"] == found["Reason"] == ""
            assert await client.call("Get", "ss", WORKLOAD, "Generation", **target) == found["Generation"]
            assert await client.call("GetAll", "s", "", **target) == found
            objects = await client.call("GetManagedObjects", interface=OBJECT_MANAGER)
            assert objects[target["path"]] == {WORKLOAD: found}
            error = "org.freedesktop.DBus.Error."
            assert (await client.refused("Get", "ss", WORKLOAD, "Colour", **target))[0] == f"{error}UnknownProperty"
            assert (await client.refused("Get", "ss", MANAGER, "Key", **target))[0] == f"{error}UnknownInterface"
            change = ("Set", "ssv", WORKLOAD, "Key", Variant("s", "x"))
            assert (await client.refused(*change, **target))[0] == f"{error}PropertyReadOnly"
            target["interface"] = WORKLOAD
            assert (await client.call("Read", **target))["workload"]["key"] == "1-p"
            assert (await client.call("Release", "a{sv}", {}, **target))["completed"]

    asyncio.run(run())


def test_busctl_and_introspection(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            created = await host.busctl(
                "call", NAME, ROOT, MANAGER, "Create", "sa{sv}", "b.c", "1", "class", "s", "follow"
            )
            assert created["data"][0]["state"] == {"type": "s", "data": "idle"}
            path = f"{ROOT}/workload/b_2ec"
            assert path in await host.busctl("tree", "--list", NAME)
            assert await host.busctl("get-property", NAME, path, WORKLOAD, "Key") == {"type": "s", "data": "b.c"}
            shown = await host.busctl("introspect", NAME, path)
            assert all(name in str(shown) for name in ("Release", "Members", "PropertiesChanged"))
            xml = await client.call("Introspect", interface=INTROSPECTABLE)
            interfaces = ElementTree.fromstring(xml).findall("interface")
            assert [interface.attrib["name"] for interface in interfaces][:2] == [MANAGER, OBJECT_MANAGER]
            parent = await client.call("Introspect", interface=INTROSPECTABLE, path="/org")
            assert '<node name="resctrlmon1"/>' in parent

    asyncio.run(run())


def test_log_control(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving():
            assert (await host.busctl("get-property", NAME, *LOG_CONTROL, "SyslogIdentifier"))[
                "data"
            ] == "resctrlmond"
            assert (await host.busctl("get-property", NAME, *LOG_CONTROL, "LogTarget"))["data"] == "console"
            await host.busctl("set-property", NAME, *LOG_CONTROL, "LogLevel", "s", "err")
            assert host.levels == ["info", "error"]
            assert (await host.busctl("get-property", NAME, *LOG_CONTROL, "LogLevel"))["data"] == "err"
            with pytest.raises(BusctlError, match="LogLevel is one of"):
                await host.busctl("set-property", NAME, *LOG_CONTROL, "LogLevel", "s", "loud")
            with pytest.raises(BusctlError, match="Access denied"):
                await host.busctl(
                    "set-property", NAME, *LOG_CONTROL, "LogLevel", "s", "info", uid=NOBODY, groups=(READERS,)
                )
            with pytest.raises(BusctlError, match=r"cannot be set|[Rr]ead-only"):
                await host.busctl("set-property", NAME, *LOG_CONTROL, "LogTarget", "s", "null")
            assert host.levels == ["info", "error"]

    asyncio.run(run())


def test_fifty_concurrent_calls_are_served(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            keys = [f"many-{number}" for number in range(25)]
            created = await asyncio.gather(*(client.call("Create", "sa{sv}", key, {}) for key in (*keys, *keys)))
            assert [reply["key"] for reply in created] == [*keys, *keys]
            assert all(reply["generation"] == created[0]["generation"] for reply in created)
            for key in keys:
                await client.call("Release", "sa{sv}", key, {})

    asyncio.run(run())


def test_waiting_calls_of_a_client_are_limited(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client, Client(host.address) as other:
            go_on = threading.Event()
            monkeypatch.setattr(host.manager.watcher, "look", lambda: (go_on.wait(60), TreeStatus(""))[1])
            calls = [asyncio.ensure_future(client.call("List")) for _ in range(70)]
            assert await eventually(lambda: sum(call.done() for call in calls) == 6)
            refused = [call.exception() for call in calls if call.done()]
            assert {error.type for error in refused if isinstance(error, dbus_fast.DBusError)} == {LIMITS_EXCEEDED}
            waiting = asyncio.ensure_future(other.call("Status"))
            go_on.set()
            assert "version" in await waiting
            await asyncio.gather(*calls, return_exceptions=True)
            assert sum(call.exception() is None for call in calls) == 64
            await client.call("List")

    asyncio.run(run())


def test_caller_that_expects_no_reply_gets_none(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            replies: list[dbus_fast.Message] = []
            kinds = (dbus_fast.MessageType.METHOD_RETURN, dbus_fast.MessageType.ERROR)

            def record(message: dbus_fast.Message) -> None:
                if message.message_type in kinds:
                    replies.append(message)

            client.bus.add_message_handler(record)
            for member, body in (("Create", ["quiet", {}]), ("Create", ["../", {}])):
                await client.bus.send(
                    dbus_fast.Message(
                        destination=NAME,
                        path=ROOT,
                        interface=MANAGER,
                        member=member,
                        signature="sa{sv}",
                        body=body,
                        flags=dbus_fast.MessageFlag.NO_REPLY_EXPECTED,
                    )
                )
            assert await eventually(lambda: host.manager.context.store.get("quiet") is not None)
            assert (await client.call("Get", "s", "quiet"))[0]["key"] == "quiet"
            assert len(replies) == 1

    asyncio.run(run())


def test_pidfd_is_passed_as_a_unix_fd(host: BusHost, process: subprocess.Popen[bytes]) -> None:
    """Only a pidfd identifies a process to a daemon in another PID namespace."""

    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            await client.call("Status")
            before = descriptors()
            pidfd = os.pidfd_open(process.pid)
            other = os.open("/dev/null", os.O_RDONLY)
            bus = await dbus_fast.aio.MessageBus(bus_address=host.address, negotiate_unix_fd=True).connect()
            try:
                for index, passed in ((0, [pidfd]), (1, [other, pidfd])):
                    options = {"pidFd": Variant("h", index), "takeOver": Variant("b", True)}
                    reply = await bus.call(
                        dbus_fast.Message(
                            destination=NAME,
                            path=ROOT,
                            interface=MANAGER,
                            member="Assign",
                            signature="sa{sv}",
                            body=[f"by-pidfd-{index}", options],
                            unix_fds=passed,
                        )
                    )
                    assert reply is not None
                    result = dbus_fast.unpack_variants(reply.body)[0]
                    assert result["workload"]["members"][0]["pid"] == process.pid, result
            finally:
                bus.disconnect()
                os.close(other)
                os.close(pidfd)
            assert (await client.refused("Assign", "sa{sv}", "key", {"pidFd": Variant("x", 0)}))[0] == INVALID_ARGS
            error, text = await client.refused("Create", "sa{sv}", "key", {"priority": Variant("h", 0)})
            assert (error, text) == (INVALID_ARGS, "priority: file descriptors are not accepted")
            assert not server._connection._bus.gate._descriptors
            assert await eventually(lambda: descriptors() <= before)

    asyncio.run(run())
