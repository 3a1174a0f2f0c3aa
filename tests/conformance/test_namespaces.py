# SPDX-License-Identifier: Apache-2.0
"""Writers and readers in a PID namespace of their own, as in a container: numbers are theirs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest

from .actors import Actor
from .target import Resctrl


class Container(NamedTuple):
    """Return process 1 of a PID namespace, and its child, process 2."""

    first: Actor
    second: Actor


@pytest.fixture
def a(fs: Resctrl) -> str:
    return fs.create("mon_groups/a")


@pytest.fixture
def container(actor: Actor) -> Container:
    assert actor.call("unshare") == 0
    first = actor.fork()
    return Container(first, first.fork())


def where(fs: Resctrl, actor: Actor) -> str:
    return fs.groups_of(actor.pid)[1]


def test_numbers_are_of_the_namespace_of_the_writer(fs: Resctrl, a: str, container: Container) -> None:
    """A write of 1 moves the first process of the writer's namespace, not that of the host."""
    before = fs.groups_of(1)
    assert container.first.call("write", path=fs.path(a, "tasks"), text="1") == "OK"
    assert (where(fs, container.first), where(fs, container.second), fs.groups_of(1)) == ("a", "", before)
    assert container.first.call("write", path=fs.path(a, "tasks"), text="2") == "OK"
    assert where(fs, container.second) == "a"


def test_0_is_the_writing_process(fs: Resctrl, a: str, container: Container) -> None:
    """0 is the writing process in every namespace."""
    assert container.second.call("write", path=fs.path(a, "tasks"), text="0") == "OK"
    assert (where(fs, container.first), where(fs, container.second)) == ("", "a")


def test_number_outside_the_namespace_is_esrch(
    fs: Resctrl, a: str, actors: Callable[[], Actor], container: Container
) -> None:
    """A number that exists only on the host is ESRCH, with the number as it was written."""
    outside = actors().pid
    assert container.first.call("write", path=fs.path(a, "tasks"), text=f"{outside}") == "ESRCH"
    assert fs.status == f"No task {outside}\nError while processing task {outside}\n"


def test_reader_sees_numbers_of_its_namespace(
    fs: Resctrl, a: str, actors: Callable[[], Actor], container: Container
) -> None:
    """Each reader has the numbers of its namespace, and threads that are not in it are left out."""
    outside = actors().pid
    fs.write(f"{a}/tasks", f"{outside},{container.first.pid},{container.second.pid}")
    assert sorted(container.first.call("read", path=fs.path(a, "tasks")).split()) == ["1", "2"]
    assert fs.members(a) == {outside, container.first.pid, container.second.pid}


def test_a_refusal_has_the_hosts_number(fs: Resctrl, a: str, container: Container) -> None:
    """A refused move shows the task's number on the host, and the number that was written."""
    os.chmod(fs.path(a, "tasks"), 0o666)
    container.second.call("become", uid=65534, gid=65534)
    assert container.second.call("write", path=fs.path(a, "tasks"), text="1") == "EPERM"
    refused = f"No permission to move task {container.first.pid}\n"
    assert fs.status == f"{refused}Error while processing task 1\n"


def test_inner_namespaces_are_seen_from_outside(fs: Resctrl, a: str, container: Container) -> None:
    """A process in a nested namespace has a number in both."""
    assert container.second.call("unshare") == 0
    inner = container.second.fork()
    fs.write(f"{a}/tasks", inner.pid)
    assert container.first.call("read", path=fs.path(a, "tasks")) == "3\n"
    assert inner.call("read", path=fs.path(a, "tasks")) == "1\n"
    assert inner.call("write", path=fs.path(a, "tasks"), text="2") == "ESRCH"
