# SPDX-License-Identifier: Apache-2.0
"""Keys, members, classes and attributes from outside are checked, and have one spelling."""

from __future__ import annotations

import os
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.errors import FORMAT_RANGES
from resctrlmond.workloads.model import validation
from resctrlmond.workloads.model.errors import InvalidAttributes, InvalidClass, InvalidKey, InvalidRequest

UID = "0f8fad5b-d9cb-469f-a165-70867728950e"
ALLOWED = string.ascii_letters + string.digits + "@:._-\\+,=~"
hostile = st.one_of(st.text(), st.text(alphabet=ALLOWED + "/\0\n %é", max_size=300))


@pytest.mark.parametrize(
    "key",
    [
        "a" * 64,
        "5" * 64,
        "getty@tty1.service",
        r"dev-disk-by\x2dlabel-root.device",
        r"\x2d.mount",
        "session-3.scope",
        "app:v1,x=y+z~",
        "a..b",
        "tasks.service",
        "A" * validation.MAX_KEY_LENGTH,
    ],
)
def test_names_of_containers_and_units_are_kept(key: str) -> None:
    assert validation.canonical_key(key) == key


@pytest.mark.parametrize(
    "key",
    [
        "",
        ".",
        "..",
        ".hidden",
        "-rf",
        "../../etc",
        "a/b",
        "/",
        "a\0",
        "a\n",
        "a b",
        "a*",
        "é",
        "٣",  # a digit, but not an ASCII one
        "\ud800",
        "a" * (validation.MAX_KEY_LENGTH + 1),
        "mon_groups",
        "mon_data",
        "info",
        "tasks",
        "cpus",
        "cpus_list",
        "schemata",
        "mode",
        "size",
        "mon_hw_id",
        "ctrl_hw_id",
    ],
)
def test_invalid_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        validation.canonical_key(key)
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("given_uid", [UID, UID.upper(), UID.replace("-", ""), UID.replace("-", "").upper()])
def test_every_spelling_of_a_pod_uid_is_one_key(given_uid: str) -> None:
    assert validation.is_pod_uid(given_uid)
    assert validation.canonical_key(given_uid) == UID


@pytest.mark.parametrize(
    "text", ["", UID[:-1], UID + "0", UID + "\n", "g" + UID[1:], UID.replace("-", "_"), "a" * 64, "a" * 31]
)
def test_text_that_is_not_a_pod_uid(text: str) -> None:
    assert not validation.is_pod_uid(text)


@given(st.uuids())
def test_dashed_and_compact_are_the_same_workload(uid: object) -> None:
    dashed = str(uid)
    assert validation.canonical_key(dashed) == validation.canonical_key(dashed.replace("-", "").upper()) == dashed


@given(hostile)
def test_a_key_is_one_part_of_a_path_and_stays_as_it_is(text: str) -> None:
    try:
        key = validation.canonical_key(text)
    except InvalidKey:
        return
    assert validation.canonical_key(key) == key
    assert os.path.normpath(f"/records/{key}") == f"/records/{key}"
    assert os.path.dirname(f"/records/{key}") == "/records"
    assert len(os.fsencode(f"{key}.json")) + 40 < os.pathconf("/", "PC_NAME_MAX")
    assert set(key) <= set(ALLOWED)


@given(st.text(alphabet=ALLOWED, max_size=8))
def test_a_key_is_refused_only_for_a_stated_reason(text: str) -> None:
    reserved = text in {"", "info", "mode", "size", "cpus", "tasks", "mon_data", "schemata"}
    if reserved or text.startswith((".", "-")):
        with pytest.raises(InvalidKey):
            validation.canonical_key(text)
    else:
        assert validation.canonical_key(text) == text


@pytest.mark.parametrize(("name", "canonical"), [("", ""), ("/", ""), ("gold", "gold"), ("a b\tc", "a b\tc")])
def test_the_canonical_name_of_a_class(name: str, canonical: str) -> None:
    assert validation.valid_class(name) == canonical


@pytest.mark.parametrize(
    "name",
    [
        ".",
        "..",
        "a/b",
        "//",
        "gold/",
        "a\0",
        "a\n",
        "\udc80",
        "mon_groups",
        "mon_data",
        "info",
        "x" * 256,
        "é" * 128,
    ],
)
def test_invalid_class_is_refused(name: str) -> None:
    with pytest.raises(InvalidClass):
        validation.valid_class(name)


@given(hostile)
def test_a_class_is_at_most_one_part_of_a_path(text: str) -> None:
    try:
        name = validation.valid_class(text)
    except InvalidClass:
        return
    assert validation.valid_class(name) == name
    assert os.path.dirname(os.path.normpath(f"/resctrl/{name or 'x'}")) == "/resctrl"
    assert len(os.fsencode(name)) <= os.pathconf("/", "PC_NAME_MAX")


@pytest.mark.parametrize(
    "member", ["a" * 64, "my_container-1.2+3", r"dev-disk\x2d1@a:b.service", "-x", ".x", "...", "a" * 255]
)
def test_member_is_valid_if_runc_accepts_its_id(member: str) -> None:
    validation.check_member_id(member)


@pytest.mark.parametrize("member", ["", ".", "..", "../x", "a/b", "a\n", "a\0", "a b", "é", "a;b", "a" * 256])
def test_invalid_member_is_refused(member: str) -> None:
    with pytest.raises(InvalidKey):
        validation.check_member_id(member)


def test_attributes_at_the_limits_are_accepted() -> None:
    validation.check_attributes({})
    validation.check_attributes({f"{i:0128}": "é" * 448 for i in range(64)})
    validation.check_attributes({"a" * 128: "é" * 4096})


@pytest.mark.parametrize(
    "attributes",
    [
        {str(i): "" for i in range(65)},
        {**{f"{i:0128}": "é" * 448 for i in range(63)}, "x" * 128: "é" * 449},
        {"": "x"},
        {"n" * 129: "x"},
        {"n": "x" * 4097},
        {"n": "two\nlines"},
        {"n": "\x1b[2J"},
        {"n": "\x9b2J"},
        {"n\0": "x"},
        {"n": "\ud800"},
    ],
)
def test_attributes_above_the_limits_are_refused(attributes: dict[str, str]) -> None:
    with pytest.raises(InvalidAttributes) as caught:
        validation.check_attributes(attributes)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("character", ["\u202e", "\u2066", "\u200b", "\u2028", "\ufeff", "\U000e0041", "\u00ad"])
def test_format_characters_are_refused(character: str) -> None:
    for attributes in ({"n": f"a{character}b"}, {f"a{character}b": "v"}):
        with pytest.raises(InvalidAttributes, match="format characters"):
            validation.check_attributes(attributes)
    with pytest.raises(InvalidRequest, match="format characters"):
        validation.check_word("claim", f"agent{character}")
    assert validation.attribute_value(f"a{character}b") == "ab"


def test_every_format_character_is_known() -> None:
    """Check the characters that this Python knows: its Unicode data may be newer than the table."""
    known = {code for first, last in FORMAT_RANGES for code in range(first, last + 1)}
    assert known >= {code for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cf", "Zl", "Zp")}
    assert not any(unicodedata.category(chr(code))[0] in "LNPS" for code in known)


@given(st.text(max_size=5000))
def test_any_text_becomes_a_valid_value(text: str) -> None:
    value = validation.attribute_value(text)
    validation.check_attributes({"name": value})
    assert validation.attribute_value(value) == value
