# SPDX-License-Identifier: Apache-2.0
"""The membership of a task is parsed byte for byte from the kernel's two lines."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.errors import KernelRefused, NoSuchProcess, NotMounted, ResctrlError
from resctrlmond.resctrl.membership import Membership, parse
from resctrlmond.resctrl.tree import Tree

from .conftest import Make
from .puppets import Puppet


def test_a_task_is_in_the_root_class_and_no_group(tree: Tree, puppet: Puppet) -> None:
    assert tree.membership(puppet.pid) == Membership("", "")


def test_a_task_is_where_it_was_put(tree: Tree, puppet: Puppet, make: Make) -> None:
    tree.write_task(make("a").path, puppet.pid)
    assert tree.membership(puppet.pid) == Membership("", "a")


def test_a_thread_has_a_membership_of_its_own(tree: Tree, puppet: Puppet, make: Make) -> None:
    thread = puppet.make("thread")
    tree.write_task(make("a").path, thread)
    assert tree.membership(thread) == Membership("", "a")
    assert tree.membership(puppet.pid) == Membership("", "")


@pytest.mark.allocation
def test_a_task_in_a_class(tree: Tree, puppet: Puppet, make: Make, class_: str) -> None:
    tree.write_task(class_, puppet.pid)
    assert tree.membership(puppet.pid) == Membership(class_, "")
    tree.write_task(make("a", class_).path, puppet.pid)
    assert tree.membership(puppet.pid) == Membership(class_, "a")


def test_a_dead_task_has_none(tree: Tree, puppets: Callable[[], Puppet]) -> None:
    puppet = puppets()
    puppet.kill()
    for tid in (puppet.pid, 0, 2**22 + 1):
        with pytest.raises(NoSuchProcess):
            tree.membership(tid)


@pytest.mark.parametrize("name", ["a b", ".a", "é", "a\x0bb", "a\x85b", "a:b", "mon:a"])
def test_group_with_any_name_is_read_completely(tree: Tree, puppet: Puppet, make: Make, name: str) -> None:
    tree.write_task(make(name).path, puppet.pid)
    assert tree.membership(puppet.pid) == Membership("", name)
    assert [found.ref.name for found in tree.scan()] == [name]


names = st.binary(min_size=1).filter(
    lambda name: not {b"\n", b"\0", b"/"} & {name[i : i + 1] for i in range(len(name))}
)


@given(names, st.binary())
def test_every_name_is_read_as_it_is(class_: bytes, group: bytes) -> None:
    expected = Membership(os.fsdecode(class_), os.fsdecode(group))
    assert parse(b"res:" + class_ + b"\nmon:" + group + b"\n", "here") == expected


def test_a_newline_that_rename_gave_a_group_makes_it_no_other_group() -> None:
    assert parse(b"res:/\nmon:a\nb\n", "here") == Membership("", "a\nb")


def test_two_empty_lines_are_not_mounted() -> None:
    with pytest.raises(NotMounted, match="/proc/7"):
        parse(b"res:\nmon:\n", "/proc/7")


@given(st.binary())
def test_another_text_is_never_a_membership(text: bytes) -> None:
    if not text.startswith(b"res:"):
        with pytest.raises(ResctrlError):
            parse(text, "here")


def test_another_text_is_shown() -> None:
    with pytest.raises(KernelRefused, match=r"here: .*b'res:/'"):
        parse(b"res:/", "here")
