# SPDX-License-Identifier: Apache-2.0
"""Only a valid text of a counter is a number, and every file of mon_data is read."""

from __future__ import annotations

import os
import re
import shutil
import socket
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.counters import (
    EVENTS,
    Kind,
    Layout,
    Reading,
    Status,
    Value,
    event,
    parse_value,
    read_mon_data,
)

U64 = 2**64 - 1


@pytest.mark.parametrize(
    ("text", "status", "number"),
    [
        ("0\n", Status.OK, 0),
        ("0", Status.OK, 0),
        ("9223372036854775808\n", Status.OK, 2**63),
        (f"{U64}\n", Status.OK, U64),
        ("12.345678\n", Status.OK, Decimal("12.345678")),
        ("0.0\n", Status.OK, Decimal("0.0")),
        (f"{U64}.999999\n", Status.OK, Decimal(f"{U64}.999999")),
        ("Unavailable\n", Status.UNAVAILABLE, None),
        ("Unavailable", Status.UNAVAILABLE, None),
        ("Error\n", Status.ERROR, None),
        ("Unassigned\n", Status.UNASSIGNED, None),
    ],
)
def test_values_that_the_kernel_writes_are_parsed(text: str, status: Status, number: int | Decimal | None) -> None:
    value = parse_value(text)
    assert value == Value(status, text.removesuffix("\n"), number)
    assert type(value.number) is type(number)
    assert str(value.number) == str(number)


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", " ", "1\n\n", "\n1", " 1", "1 ", "1 \n", "\t1", "1\r\n", "1\x00", "1\n2\n", "1,5", "1_000"),
        *("NaN", "nan", "inf", "Infinity", "-inf", "sNaN", "1e3", "1E3", "1.5e3", "+1", "-1", "-0", "0x10", "0b1"),
        *(".5", "5.", ".", "1.2.3", "--1", "1.0000000001", "123456789012345678901", "1L", "1u", "True", "None"),
        *("\u0661", "\uff11\uff12", "\u00b2", "\u0be7.\u0be7", "1\u2009", "\ufeff1", "1\u2028"),
        *("unavailable", "Unavailable ", "Unavailable\n\n", "UNAVAILABLE", "Unavailable 5", "Error: 5", "Erro", "ok"),
    ],
)
def test_text_that_the_kernel_never_writes_is_not_a_number(text: str) -> None:
    value = parse_value(text)
    assert (value.status, value.number) == (Status.ERROR, None)
    assert value.text == text.removesuffix("\n")


@given(st.integers(0, U64))
def test_every_u64_is_exact(number: int) -> None:
    value = parse_value(f"{number}\n")
    assert (value.status, value.number) == (Status.OK, number)


@given(st.integers(0, U64), st.integers(0, 10**9 - 1), st.integers(1, 9))
def test_every_decimal_is_exact(whole: int, part: int, places: int) -> None:
    text = f"{whole}.{part % 10**places:0{places}d}"
    value = parse_value(text + "\n")
    assert isinstance(value.number, Decimal)
    assert format(value.number, "f") == text


@given(st.text())
def test_an_unknown_text_is_never_a_number(text: str) -> None:
    value = parse_value(text)
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?\n?", text, re.ASCII):
        assert value.number is None
        assert value.status is not Status.OK
    assert len(value.text) <= 100
    assert (value.number is not None) == (value.status is Status.OK)


@given(st.text("0123456789.+-eExX_ \n\u0661\uff11", max_size=30))
def test_almost_a_number_is_a_number_only_if_it_is_one(text: str) -> None:
    is_number = re.fullmatch(r"[0-9]{1,20}(\.[0-9]{1,9})?\n?", text, re.ASCII) is not None
    assert (parse_value(text).status is Status.OK) is is_number


def test_an_unknown_event_is_kept() -> None:
    assert event("uops_imagined").kind is Kind.UNKNOWN
    assert event("uops_imagined").unit == ""
    assert event("llc_occupancy").kind is Kind.GAUGE


def test_every_event_is_under_its_own_name() -> None:
    assert all(name == known.name and known.meaning and known.source for name, known in EVENTS.items())


# -- read_mon_data: nothing but files


def put(group: Path, path: str, text: str | bytes) -> None:
    file = group / "mon_data" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)


def read_known(group: Path, known: Layout) -> tuple[list[Reading], Layout]:
    fd = os.open(group, os.O_RDONLY)
    try:
        return read_mon_data(fd, known)
    finally:
        os.close(fd)


def read(group: Path) -> list[Reading]:
    return read_known(group, ())[0]


def number(domain: str, name: str, value: int) -> Reading:
    return Reading(domain, name, Value(Status.OK, str(value), value))


def test_readings_are_in_order_of_domain_and_event(tmp_path: Path) -> None:
    for domain, name in (("mon_L3_01", "a"), ("mon_L3_00", "b"), ("mon_L3_00", "a"), ("mon_PERF_PKG_00", "a")):
        put(tmp_path, f"{domain}/{name}", "1\n")
    assert [(reading.domain, reading.event) for reading in read(tmp_path)] == [
        ("mon_L3_00", "a"),
        ("mon_L3_00", "b"),
        ("mon_L3_01", "a"),
        ("mon_PERF_PKG_00", "a"),
    ]


def test_unknown_domains_and_events_are_kept(tmp_path: Path) -> None:
    put(tmp_path, "mon_L9_warp_00/tachyons", "5\n")
    put(tmp_path, "at_the_top", "6\n")
    assert read(tmp_path) == [number("", "at_the_top", 6), number("mon_L9_warp_00", "tachyons", 5)]


def test_the_value_of_a_cache_is_the_sum_of_its_nodes(tmp_path: Path) -> None:
    """The file of the cache reads 0 on kernels with an error (before Linux commit 594902c986e2)."""
    put(tmp_path, "mon_L3_00/llc_occupancy", "0\n")
    put(tmp_path, "mon_L3_00/mon_sub_L3_01/llc_occupancy", "3\n")
    put(tmp_path, "mon_L3_00/mon_sub_L3_02/llc_occupancy", "4\n")
    put(tmp_path, "mon_L3_01/llc_occupancy", "5\n")
    outer, *nodes, other = read(tmp_path)
    assert (outer, outer.is_part) == (number("mon_L3_00", "llc_occupancy", 7), False)
    assert nodes == [number(f"mon_L3_00/mon_sub_L3_0{node}", "llc_occupancy", node + 2) for node in (1, 2)]
    assert all(node.is_part for node in nodes)
    assert other == number("mon_L3_01", "llc_occupancy", 5)


def test_a_cache_has_no_value_if_a_node_has_none(tmp_path: Path) -> None:
    put(tmp_path, "mon_L3_00/llc_occupancy", "0\n")
    put(tmp_path, "mon_L3_00/mon_sub_L3_01/llc_occupancy", "3\n")
    put(tmp_path, "mon_L3_00/mon_sub_L3_02/llc_occupancy", "Unavailable\n")
    assert read(tmp_path)[0] == Reading("mon_L3_00", "llc_occupancy", Value(Status.UNAVAILABLE, "Unavailable"))


def test_directories_deeper_than_the_kernels_are_not_read(tmp_path: Path) -> None:
    put(tmp_path, "mon_L3_00/mon_sub_L3_00/deeper/llc_occupancy", "1\n")
    assert read(tmp_path) == []


def test_a_file_that_cannot_be_opened_is_an_error_with_its_reason(tmp_path: Path) -> None:
    put(tmp_path, "mon_L3_00/b", "1\n")
    domain = tmp_path / "mon_data/mon_L3_00"
    (domain / "a").symlink_to("a")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(domain / "c"))
    assert read(tmp_path) == [
        Reading("mon_L3_00", "a", Value(Status.ERROR, "Too many levels of symbolic links")),
        number("mon_L3_00", "b", 1),
        Reading("mon_L3_00", "c", Value(Status.ERROR, "No such device or address")),
    ]


def test_a_file_that_vanishes_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, "mon_L3_00/b", "1\n")
    (tmp_path / "mon_data/mon_L3_00/a").symlink_to("nowhere")
    assert read(tmp_path) == [number("mon_L3_00", "b", 1)]


NO_COUNTERS = {
    "huge": b"1" * 10_000_000,
    "a number and more": b"5\n" + b"\0" * 5000,
    "no text": b"\xff\xfe",
    "too many digits": b"1" * 21,
}


@pytest.mark.parametrize("name", NO_COUNTERS)
def test_file_that_is_not_a_counter_is_an_error(tmp_path: Path, name: str) -> None:
    put(tmp_path, "mon_L3_00/a", NO_COUNTERS[name])
    (reading,) = read(tmp_path)
    assert (reading.value.status, reading.value.number) == (Status.ERROR, None)
    assert len(reading.value.text) <= 100


def test_without_mon_data_the_group_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path)


def test_an_empty_mon_data_has_no_readings(tmp_path: Path) -> None:
    (tmp_path / "mon_data").mkdir()
    assert read(tmp_path) == []


# -- with the names of an earlier reading


def put_domain(group: Path, domain: str) -> None:
    put(group, f"{domain}/llc_occupancy", "1\n")


def test_known_names_are_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for group in (first, second):
        for domain in ("mon_L3_00", "mon_L3_00/mon_sub_L3_00", "mon_L3_01"):
            put_domain(group, domain)
    _, known = read_known(first, ())
    monkeypatch.delattr(os, "scandir")
    readings, known_now = read_known(second, known)
    assert [reading.domain for reading in readings] == ["mon_L3_00", "mon_L3_00/mon_sub_L3_00", "mon_L3_01"]
    assert {reading.inode for reading in readings} == {
        (second / "mon_data" / reading.domain).stat().st_ino for reading in readings
    }
    assert known_now == known


# The directories of mon_data that come and that go between two readings.
CHANGES = {
    "one comes": (["mon_L3_02"], []),
    "one goes": ([], ["mon_L3_01"]),
    "one comes as another one goes": (["mon_L3_02"], ["mon_L3_01"]),
    "a part comes": (["mon_L3_00/mon_sub_L3_01"], []),
    "a part goes": ([], ["mon_L3_00/mon_sub_L3_00"]),
    "a part comes as another one goes": (["mon_L3_00/mon_sub_L3_01"], ["mon_L3_00/mon_sub_L3_00"]),
    "all go": ([], ["mon_L3_00", "mon_L3_01"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_domains_that_come_or_go_are_seen_with_known_names(tmp_path: Path, change: str) -> None:
    for domain in ("mon_L3_00", "mon_L3_00/mon_sub_L3_00", "mon_L3_01"):
        put_domain(tmp_path, domain)
    _, known = read_known(tmp_path, ())
    come, go = CHANGES[change]
    for domain in go:
        shutil.rmtree(tmp_path / "mon_data" / domain)
    for domain in come:
        put_domain(tmp_path, domain)
    readings, known_now = read_known(tmp_path, known)
    assert (readings, known_now) == read_known(tmp_path, ())
    assert {reading.domain for reading in readings}.issuperset(come)
    assert {reading.domain for reading in readings}.isdisjoint(go)


def test_a_domain_that_comes_back_has_its_new_inode_with_known_names(tmp_path: Path) -> None:
    put_domain(tmp_path, "mon_L3_00")
    _, known = read_known(tmp_path, ())
    domain = tmp_path / "mon_data/mon_L3_00"
    domain.rename(tmp_path / "old")  # so that its inode is not used again
    put_domain(tmp_path, "mon_L3_00")
    ((reading,), _) = read_known(tmp_path, known)
    assert reading.inode == domain.stat().st_ino


def test_a_known_file_that_cannot_be_opened_is_an_error_with_its_reason(tmp_path: Path) -> None:
    put(tmp_path, "mon_L3_00/a", "1\n")
    _, known = read_known(tmp_path, ())
    file = tmp_path / "mon_data/mon_L3_00/a"
    file.unlink()
    file.symlink_to("a")
    ((reading,), _) = read_known(tmp_path, known)
    assert reading == Reading("mon_L3_00", "a", Value(Status.ERROR, "Too many levels of symbolic links"))
