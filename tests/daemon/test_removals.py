# SPDX-License-Identifier: Apache-2.0
"""Directories that are removed are told at once, by the kernel's inotify."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resctrlmond.daemon.removals import Removals

PARENTS = ("kubepods", "kubepods/besteffort", "kubepods/burstable")
NAMES = ("pod1", "pod2", "pod\udcff")  # the last one is no UTF-8


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def removals(told: list[str]) -> Iterator[Removals]:
    with contextlib.closing(Removals(told.append)) as removals:
        yield removals


def made(tmp_path: Path, *names: str) -> list[str]:
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    return [str(tmp_path / name) for name in names]


def test_only_removed_directories_are_reported(removals: Removals, told: list[str], tmp_path: Path) -> None:
    watched, other, forgotten = made(tmp_path, "watched", "other", "forgotten")
    (tmp_path / "watched-too").write_text("")
    removals.watch(watched)
    removals.watch(forgotten)
    removals.forget(forgotten)
    removals.read()
    assert told == []
    os.rmdir(other)
    os.rmdir(forgotten)
    (tmp_path / "watched-too").unlink()
    os.rmdir(watched)
    removals.read()
    assert told == [watched]
    removals.read()
    assert told == [watched], "told once"


def test_one_that_comes_back_is_still_watched(removals: Removals, told: list[str], tmp_path: Path) -> None:
    (path,) = made(tmp_path, "pod")
    removals.watch(path)
    for number in (1, 2):
        os.rmdir(path)
        removals.read()
        assert told == [path] * number
        os.mkdir(path)


def test_the_last_one_forgotten_ends_the_watch_of_its_parent(removals: Removals, tmp_path: Path) -> None:
    one, two = made(tmp_path, "one", "two")
    for path in (one, two):
        removals.watch(path)
    removals.forget(one)
    assert watches(removals) == 1
    removals.forget(two)
    assert watches(removals) == 0
    removals.forget(two)


def test_removals_with_the_parent_are_reported(removals: Removals, told: list[str], tmp_path: Path) -> None:
    one, two = made(tmp_path, "slice/one", "slice/two")
    for path in (one, two):
        removals.watch(path)
    shutil.rmtree(tmp_path / "slice")
    removals.read()
    assert set(told) == {one, two}
    removals.forget(one)
    made(tmp_path, "slice/one")
    removals.watch(one)
    told.clear()
    os.rmdir(one)
    removals.read()
    assert told == [one], "in a parent made anew"


def test_a_parent_that_is_not_there(removals: Removals, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        removals.watch(str(tmp_path / "gone" / "pod"))
    removals.forget(str(tmp_path / "gone" / "pod"))


def test_events_that_the_kernel_dropped_tell_of_every_path(
    removals: Removals, told: list[str], tmp_path: Path
) -> None:
    """Its queue holds fs.inotify.max_queued_events; the removal of ours is among those it had no room for."""
    room = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    ours, stays = made(tmp_path, "ours", "stays")
    for path in (ours, stays):
        removals.watch(path)
    for number in range(room + 1):
        # Events that are alike follow each other as one: no two names are.
        os.mkdir(tmp_path / str(number))
        os.rmdir(tmp_path / str(number))
    os.rmdir(ours)
    for _ in range(room):
        removals.read()
    assert {ours, stays} == set(told)


def watches(removals: Removals) -> int:
    return Path(f"/proc/self/fdinfo/{removals.fd}").read_text().count("inotify wd")


class Churn(RuleBasedStateMachine):
    """Whatever is made, removed, watched and forgotten: a watched path that goes is told."""

    def __init__(self) -> None:
        super().__init__()
        self.top = tempfile.mkdtemp()
        self.told: set[str] = set()
        self.removals = Removals(self.told.add)
        self.owed: set[str] = set()
        self.watched: set[str] = set()

    def teardown(self) -> None:
        self.removals.close()
        shutil.rmtree(self.top)

    @rule(parent=st.sampled_from(PARENTS), name=st.sampled_from(NAMES))
    def make(self, parent: str, name: str) -> None:
        os.makedirs(os.path.join(self.top, parent, name), exist_ok=True)

    @rule(parent=st.sampled_from(PARENTS), name=st.sampled_from(NAMES))
    def remove(self, parent: str, name: str) -> None:
        path = os.path.join(self.top, parent, name)
        if os.path.isdir(path):
            os.rmdir(path)
            self.owed |= self.watched & {path}

    @rule(parent=st.sampled_from(PARENTS))
    def remove_all(self, parent: str) -> None:
        above = os.path.join(self.top, parent) + os.sep
        if os.path.isdir(above):
            shutil.rmtree(above)
            gone = {path for path in self.watched if path.startswith(above)}
            self.owed |= gone
            # Its watch went with it: who wants a new one there says so.
            self.watched -= gone

    @rule(parent=st.sampled_from(PARENTS), name=st.sampled_from(NAMES))
    def watch(self, parent: str, name: str) -> None:
        path = os.path.join(self.top, parent, name)
        self.removals.read()
        if os.path.isdir(path):
            self.removals.watch(path)
            self.watched.add(path)

    @rule(parent=st.sampled_from(PARENTS), name=st.sampled_from(NAMES))
    def forget(self, parent: str, name: str) -> None:
        path = os.path.join(self.top, parent, name)
        self.look()
        self.removals.forget(path)
        self.watched.discard(path)

    @rule()
    def look(self) -> None:
        self.removals.read()
        assert self.owed <= self.told
        self.told.clear()
        self.owed.clear()

    @invariant()
    def no_more_watches_than_parents(self) -> None:
        assert watches(self.removals) <= len({os.path.dirname(path) for path in self.watched})


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
