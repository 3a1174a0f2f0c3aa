# SPDX-License-Identifier: Apache-2.0
"""The D-Bus description agrees with the verbs; object paths, requests and replies as D-Bus values."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from xml.etree import ElementTree

import dbus_fast
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resctrlmond.api import types
from resctrlmond.api.dbus import interfaces as names
from resctrlmond.api.dbus import values
from resctrlmond.api.dbus.library import DBusError, Variant
from resctrlmond.api.errors import ERRORS
from resctrlmond.api.signatures import MANAGER
from resctrlmond.api.types import Claim, Member
from resctrlmond.api.verbs import VERBS
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from tests.api.private_bus import BusHost, Client

DOC = "org.gtk.GDBus.DocString"
TEXT = st.text(st.characters(), max_size=30)
OPTIONAL_TEXT = st.none() | TEXT
NUMBER = st.integers(-(2**63), 2**63 - 1)
GROUPS = st.builds(
    types.Workload,
    key=TEXT,
    class_=TEXT,
    state=st.sampled_from(State),
    reason=OPTIONAL_TEXT,
    in_limbo=st.booleans(),
    path=OPTIONAL_TEXT,
    snapshot=OPTIONAL_TEXT,
    generation=NUMBER,
    baseline=st.sampled_from(Quality),
    claims=st.lists(st.builds(Claim, owner=TEXT, since=TEXT), max_size=3).map(tuple),
    members=st.lists(st.builds(Member, id=TEXT, kind=TEXT, owner=TEXT, pid=NUMBER), max_size=3).map(tuple),
    attributes=st.dictionaries(TEXT, TEXT, max_size=3),
    created_at=OPTIONAL_TEXT,
    completed_at=OPTIONAL_TEXT,
)


def test_description_has_every_verb_with_its_fields() -> None:
    methods = names.INTERFACES[names.MANAGER].methods
    verbs = {name for name, verb in VERBS.items() if verb.interface == MANAGER and verb.follow is None}
    assert methods.keys() == verbs | {"Subscribe", "Unsubscribe"}
    for name in verbs:
        method = methods[name]
        request, reply = values.fields(VERBS[name].request), values.fields(VERBS[name].reply)
        inputs = {argument.name: argument.type for argument in method.inputs}
        options = inputs.pop("options", None)
        assert inputs == {field: values.signature(request[field]) for field in inputs}, name
        assert options in (None, "a{sv}")
        assert options or inputs.keys() == request.keys(), name
        outputs = {argument.name: argument.type for argument in method.outputs}
        if outputs.keys() == {"result"}:
            assert outputs == {"result": "a{sv}"}
        else:
            assert outputs == {field: values.signature(reply[field]) for field in reply}, name


def test_description_names_every_option() -> None:
    for name, method in names.INTERFACES[names.MANAGER].methods.items():
        arguments = {argument.name for argument in method.inputs}
        described = documentation(names.MANAGER, f"method[@name='{name}']/arg[@name='options']")
        for field, shape in values.fields(VERBS[name].request).items() if name in VERBS else ():
            assert field in arguments or f"{field} ({values.signature(shape)}): " in described, f"{name}: {field}"


def documentation(interface: str, path: str) -> str:
    """Return the documentation of an element, "" if there is no such element."""
    element = ElementTree.fromstring(names.INTERFACES[interface].xml).find(f"{path}/annotation[@name='{DOC}']")
    return "" if element is None else element.attrib["value"]


def test_workload_has_a_property_for_each_field_of_a_workload() -> None:
    fields = values.fields(types.Workload)
    properties = names.INTERFACES[names.WORKLOAD].properties
    assert properties == {names.property_name(field): values.signature(shape) for field, shape in fields.items()}
    for name in properties:
        assert documentation(names.WORKLOAD, f"property[@name='{name}']"), name


@given(GROUPS)
def test_property_has_the_value_of_its_field_and_is_never_absent(workload: types.Workload) -> None:
    sent = values.whole(workload)
    for field in values.fields(types.Workload):
        property_ = values.variant(workload, field)
        if field in sent:
            assert property_ == sent[field]
        else:
            assert not property_.value
            assert property_.signature == names.INTERFACES[names.WORKLOAD].properties[names.property_name(field)]


def test_methods_of_workloads_are_verbs_without_the_key() -> None:
    for name, method in names.INTERFACES[names.WORKLOAD].methods.items():
        verb = names.INTERFACES[names.MANAGER].methods[name]
        assert method.inputs == verb.inputs[1:]
        assert method.outputs == verb.outputs


def test_every_error_has_a_name_that_the_bus_accepts() -> None:
    for row in ERRORS.values():
        assert DBusError(row.dbus, "text").type == f"org.resctrlmon1.Error.{row.name}"


# Each character takes up to 12 in an element, which has at most 600.
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
@example("")
@example("_")
@example("9a9")
@example("pod-1.é")
def test_paths_round_trip(key: str) -> None:
    element = names.path_element(key)
    assert re.fullmatch("[A-Za-z0-9_]+", element)
    assert not element[0].isdecimal()
    assert names.key_of(element) == key


def test_only_elements_of_the_longest_keys_are_decoded() -> None:
    """Decoding an element of 8 KiB takes 4 ms, so calls without a reply in a loop locked out all other callers."""
    assert names.key_of("_2d" * 200) == "-" * 200
    assert names.key_of("_2d" * 201) is None


@given(st.text(st.sampled_from("a9_5f-éA\udc80"), max_size=9))
def test_each_object_has_one_path(element: str) -> None:
    key = names.key_of(element)
    assert key is None or names.path_element(key) == element


@pytest.mark.parametrize(("key", "element"), [("", "_"), ("9a", "_39a"), ("a9", "a9"), ("a_b.c", "a_5fb_2ec")])
def test_paths_are_escaped_as_by_systemd(key: str, element: str) -> None:
    assert names.path_element(key) == element


@given(GROUPS)
def test_any_workload_can_be_marshalled(workload: types.Workload) -> None:
    found = values.whole(types.WorkloadReply(workload=workload))
    message = dbus_fast.Message(path="/a", interface="a.b", member="C", signature="a{sv}", body=[found])
    assert message._marshall(False)
    unpacked = dbus_fast.unpack_variants(found)["workload"]
    assert unpacked["key"] == values.text(workload.key)
    assert unpacked["generation"] == workload.generation
    assert len(unpacked["members"]) == len(workload.members)
    assert "\0" not in str(unpacked)


SIMPLE = st.sampled_from(["s", "x", "b", "u", "d", "as", "ay", "a{ss}", "o", "g", "h"])
VALUES_OF_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "s": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "x": NUMBER,
    "b": st.booleans(),
    "u": st.integers(0, 2**32 - 1),
    "d": st.floats(),
    "as": st.lists(st.just("a")),
    "ay": st.binary(),
    "a{ss}": st.dictionaries(st.just("a"), st.just("b")),
    "o": st.just("/a"),
    "g": st.just("s"),
    "h": st.just(0),
}
VARIANTS = SIMPLE.flatmap(lambda kind: VALUES_OF_TYPE[kind].map(lambda value: Variant(kind, value)))


@given(st.dictionaries(st.sampled_from(["pid", "cgroup", "class", "takeOver", "attributes", "other"]), VARIANTS))
def test_hostile_options_are_converted_or_refused(options: dict[str, Any]) -> None:
    try:
        request = values.request(types.AssignRequest, {"key": "k"}, options)
    except DBusError as error:
        assert error.type == values.INVALID_ARGS
        assert any(error.text.startswith(name) for name in options)
        return
    assert type(request.pid) in (int, type(None))
    assert type(request.cgroup) in (str, type(None))
    assert type(request.take_over) in (bool, type(None))
    assert "other" not in options


def test_text_is_unchanged_by_the_bus(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            for number, text in enumerate(["ünï", "\U0001f600", "a" * 4096]):
                options = {"attributes": dbus_fast.Variant("a{ss}", {"text": text})}
                created = await client.call("Create", "sa{sv}", f"text-{number}", options)
                assert created["attributes"] == {"text": text}

    asyncio.run(run())
