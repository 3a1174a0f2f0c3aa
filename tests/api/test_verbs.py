# SPDX-License-Identifier: Apache-2.0
"""The interface descriptions agree with the verbs field by field, and every error has a name in each interface."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import importlib
import os
import pkgutil
import threading
import types as builtin_types
import typing
from collections.abc import Iterable

import msgspec
import pytest
from varlink import scanner

import resctrlmond
from resctrlmond.api import errors, exit_codes, types
from resctrlmond.api.access import Access, Caller, Policy
from resctrlmond.api.dbus.server import NameTaken
from resctrlmond.api.service import Service
from resctrlmond.api.signatures import HOOK, MANAGER, UNIT
from resctrlmond.api.varlink.interfaces import description
from resctrlmond.api.verbs import VERBS
from resctrlmond.api.workers import Workers
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.daemon.startup import StartupError
from resctrlmond.resctrl.errors import NoSuchGroup, PermissionDenied, ResctrlError, RmidsExhausted
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.states import CallKind, Quality
from resctrlmond.workloads.model.workload import State, Workload

# The type of a field or parameter: a name, a list, or a mapping by field.
Shape = typing.Any

_PLAIN = {str: "string", bool: "bool", int: "int", float: "float"}


def parsed(interface: str) -> scanner.Interface:
    """Return the description of an interface, parsed by another implementation of varlink."""
    return scanner.Interface(description(interface))


class Idl:
    """Shapes of the types in the description of an interface."""

    def __init__(self, interface: scanner.Interface) -> None:
        self.members = interface.members

    def shape(self, kind: object) -> Shape:
        """Return the shape of a type of the description."""
        match kind:
            case scanner._Maybe():
                return ["?", self.shape(kind.element_type)]
            case scanner._Array():
                return ["[]", self.shape(kind.element_type)]
            case scanner._Dict():
                return ["[string]", self.shape(kind.element_type)]
            case scanner._CustomType():
                return self.shape(self.members[kind.name].type)
            case scanner._Enum():
                return sorted(kind.fields)
            case scanner._Struct():
                return {name: self.shape(field) for name, field in kind.fields.items()}
            case _:
                return _PLAIN[type(kind)]


def shape_of(annotation: object) -> Shape:
    """Return the shape in which varlink sends a value with this annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return shape_of(arguments[0])
    if origin in (typing.Union, builtin_types.UnionType):
        [inner] = [argument for argument in arguments if argument is not type(None)]
        return ["?", shape_of(inner)]
    if origin in (list, tuple):
        return ["[]", shape_of(arguments[0])]
    if origin is dict:
        assert arguments[0] is str
        return ["[string]", shape_of(arguments[1])]
    if isinstance(annotation, type) and issubclass(annotation, enum.StrEnum):
        return sorted(annotation)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return fields_of(annotation)
    return _PLAIN[annotation]  # type: ignore[index]


def fields_of(struct: type[msgspec.Struct]) -> Shape:
    """Return the shapes of a request's or a reply's fields, by name."""
    shapes = {}
    for field in msgspec.structs.fields(struct):
        shape = shape_of(field.type)
        is_optional = isinstance(shape, list) and shape[0] == "?"
        if struct.__struct_config__.forbid_unknown_fields:
            # A field of a request that a caller can omit can also be null.
            assert is_optional == (not field.required), field
        elif not field.required and not is_optional:
            # A reply omits a field that has its default.
            shape = ["?", shape]
        shapes[field.encode_name] = shape
    return shapes


@pytest.mark.parametrize("name", [MANAGER, HOOK, UNIT])
def test_description_has_the_name_of_its_interface(name: str) -> None:
    assert parsed(name).name == name


@pytest.mark.parametrize("interface", [MANAGER, HOOK, UNIT])
def test_each_interface_has_its_verbs_and_no_others(interface: str) -> None:
    methods = {name for name, member in parsed(interface).members.items() if isinstance(member, scanner._Method)}
    assert methods == {verb.name for verb in VERBS.values() if verb.interface == interface}


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_is_described_field_by_field(name: str) -> None:
    interface = parsed(VERBS[name].interface)
    method, idl = interface.members[name], Idl(interface)
    assert idl.shape(method.in_type) == fields_of(VERBS[name].request)
    assert idl.shape(method.out_type) == fields_of(VERBS[name].reply)
    assert VERBS[name].name == name


def test_enums_of_the_description_have_all_values() -> None:
    members = parsed(MANAGER).members
    assert sorted(members["State"].type.fields) == sorted(State)
    assert sorted(members["Quality"].type.fields) == sorted(Quality)


def test_every_described_type_is_used() -> None:
    interface = parsed(MANAGER)
    text = description(MANAGER)
    for name, member in interface.members.items():
        if not isinstance(member, (scanner._Method, scanner._Error)):
            assert text.count(name) > 1, name


def all_errors() -> set[type[ResctrlError]]:
    """Return all subclasses of ResctrlError in the daemon."""
    for module in pkgutil.walk_packages(resctrlmond.__path__, "resctrlmond."):
        # The adapters are separate processes that need further libraries.
        if not module.name.endswith("__main__") and module.name.split(".")[1] in ("api", "groups", "resctrl", "sim"):
            importlib.import_module(module.name)
    found: set[type[ResctrlError]] = set()
    pending = [ResctrlError]
    while pending:
        kinds = pending.pop().__subclasses__()
        found.update(kinds)
        pending.extend(kinds)
    return {kind for kind in found if kind.__module__.startswith("resctrlmond.")}


def names(kinds: Iterable[type[ResctrlError]]) -> set[str]:
    """Return the full names of classes: other tests import a module twice, so a class can exist twice."""
    return {f"{kind.__module__}.{kind.__name__}" for kind in kinds}


def test_every_error_that_reaches_an_interface_has_a_name() -> None:
    start_up = names([ConfigError, StartupError, NameTaken])
    simulator = {name for name in names(all_errors()) if name.startswith("resctrlmond.sim.")}
    assert names(all_errors()) - start_up - simulator == names(errors.ERRORS)


def test_every_error_is_described_with_its_fields() -> None:
    interface = parsed(MANAGER)
    idl = Idl(interface)
    described = {
        name: idl.shape(member.type) for name, member in interface.members.items() if type(member) is scanner._Error
    }
    optional = ["?", "string"]
    common = {"message": "string", "path": optional, "errno": optional, "status": optional, "remedy": optional}
    expected = {row.name: common for row in errors.ERRORS.values()}
    expected |= {"RmidsExhausted": {**common, "inLimbo": "bool"}, "InternalError": {}}
    assert described == expected


@pytest.mark.parametrize("kind", errors.ERRORS)
def test_parameters_of_an_error_agree_with_the_description(kind: type[ResctrlError]) -> None:
    bare, full = kind("text"), kind("text", path="/p", errno=28, status="refused", remedy="retry")
    limbo = {"inLimbo": False} if kind is RmidsExhausted else {}
    assert errors.parameters(bare) == {"message": "text", **limbo}
    assert errors.parameters(full) == {
        "message": "text",
        "path": "/p",
        "errno": "ENOSPC",
        "status": "refused",
        "remedy": "retry",
        **limbo,
    }
    row = errors.name_of(full)
    assert row.name == kind.__name__
    assert row.varlink == f"{MANAGER}.{row.name}"
    assert row.dbus == f"org.resctrlmon1.Error.{row.name}"
    for name in (row.name, row.varlink, row.dbus):
        assert exit_codes.exit_code(name) == row.exit_code
    assert row.exit_code != 0


def test_exit_code_of_an_unknown_error_is_failure() -> None:
    assert exit_codes.exit_code("org.varlink.service.MethodNotFound") == exit_codes.FAILURE
    assert exit_codes.exit_code("InternalError") == exit_codes.FAILURE


def test_exit_codes_belong_to_errors() -> None:
    assert exit_codes.EXIT_CODES.keys() <= {row.name for row in errors.ERRORS.values()}


ROOT, OWNER, READER, NOBODY = (
    Caller(0, frozenset({0}), 1),
    Caller(1000, frozenset({1000}), 1),
    Caller(1001, frozenset({1001, 77}), 1),
    Caller(65534, frozenset({65534}), 1),
)


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        (ROOT, set(Access)),
        (OWNER, set(Access)),
        (READER, {Access.READ, Access.SELF}),
        (NOBODY, {Access.SELF}),
        # Root's group is not root.
        (Caller(65534, frozenset({0}), 1), {Access.SELF}),
    ],
)
@pytest.mark.parametrize("access", Access)
def test_access_of_users_to_verbs(caller: Caller, allowed: set[Access], access: Access) -> None:
    policy = Policy(77)
    os.seteuid(OWNER.uid)
    try:
        if access in allowed:
            policy.check(caller, access, "Verb")
        else:
            with pytest.raises(PermissionDenied, match=rf"user {caller.uid} may not call Verb.*Call as root"):
                policy.check(caller, access, "Verb")
    finally:
        os.seteuid(0)


def test_only_verbs_that_read_are_for_readers() -> None:
    readers = {
        "List",
        "ListPods",
        "ListUnwatched",
        "Get",
        "Read",
        "ReadAll",
        "Machine",
        "Sums",
        "ReadForeign",
        "Status",
        "Watch",
    }
    assert {name for name, verb in VERBS.items() if verb.access is Access.READ} == readers
    # Each user may have the calling process assigned, and nothing else.
    assert {name for name, verb in VERBS.items() if verb.access is Access.SELF} == {"AssignSelf"}
    others = set(VERBS) - readers - {"AssignSelf"}
    assert {name for name, verb in VERBS.items() if verb.access is Access.WRITE} == others


def test_required_fields_of_a_group_are_always_sent() -> None:
    """A reply omits a field that has its default, so a required field must not have a default."""
    group = types.Workload(
        key="k",
        class_="",
        state=State.PENDING,
        generation=1,
        baseline=Quality.UNKNOWN,
        claims=(),
        members=(),
        attributes={},
    )
    sent = msgspec.json.decode(msgspec.json.encode(group))
    assert sent == {
        "key": "k",
        "class": "",
        "state": "pending",
        "generation": 1,
        "baseline": "unknown",
        "claims": [],
        "members": [],
        "attributes": {},
    }


def test_readers_leave_a_thread_to_root_and_to_other_readers(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node with 200 pods, a reader that called List in a loop occupied all threads, and Get of root took eight
    seconds."""
    go_on = threading.Event()
    started = 0

    def blocked() -> list[Workload]:
        nonlocal started
        started += 1
        go_on.wait(60)
        return []

    monkeypatch.setattr(manager.context.store, "all", blocked)

    async def run() -> None:
        with contextlib.closing(Workers()) as workers:
            service = Service(manager, Policy(77), workers)

            async def call(name: str, caller: Caller) -> types.Reply:
                request = VERBS[name].request(**{"key": "k"} if name == "Get" else {})
                return await service.call(VERBS[name], request, caller)

            flood = [asyncio.create_task(call("List", READER)) for _ in range(20)]
            others = [
                asyncio.create_task(call("List", dataclasses.replace(READER, uid=uid))) for uid in range(2000, 2010)
            ]
            while started < 3:
                await asyncio.sleep(0.001)
            async with asyncio.timeout(50):
                with pytest.raises(NoSuchGroup):
                    await call("Get", ROOT)
            assert started == 3
            go_on.set()
            await asyncio.gather(*flood, *others)

    asyncio.run(run())


def test_each_call_is_in_the_histogram_of_its_kind(manager: Manager) -> None:
    def counts() -> dict[CallKind, int]:
        return {kind: sum(histogram.counts) for kind, histogram in manager.latencies.histograms.items()}

    async def run() -> None:
        with contextlib.closing(Workers()) as workers:
            service = Service(manager, Policy(77), workers)
            await service.call(VERBS["List"], types.NoParameters(), ROOT)
            for name in ("Get", "Release"):
                with pytest.raises(ResctrlError):
                    await service.call(VERBS[name], VERBS[name].request(key="k"), ROOT)
            before_status = counts()
            found = await service.call(VERBS["Status"], types.NoParameters(), ROOT)
        assert isinstance(found, types.StatusReply)
        assert {of.calls: sum(of.counts) for of in found.latencies or ()} == before_status

    before = counts()
    asyncio.run(run())
    assert {kind: number - before[kind] for kind, number in counts().items()} == {
        CallKind.HOOK: 0,
        CallKind.READ: 3,
        CallKind.CHANGE: 1,
    }
