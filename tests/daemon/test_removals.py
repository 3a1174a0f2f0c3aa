# SPDX-License-Identifier: Apache-2.0
"""Removed directories are reported at once, through the kernel's inotify."""

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
NAMES = ("pod1", "pod2", "pod\udcff")  # the last name is not valid UTF-8


@pytest.fixture
def reported() -> list[str]:
    return []


@pytest.fixture
def removals(reported: list[str]) -> Iterator[Removals]:
    with contextlib.closing(Removals(reported.append)) as removals:
        yield removals


def make_directories(tmp_path: Path, *names: str) -> list[str]:
    """Create directories, and return their paths."""
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    return [str(tmp_path / name) for name in names]


def test_only_removed_directories_are_reported(removals: Removals, reported: list[str], tmp_path: Path) -> None:
    watched, other, forgotten = make_directories(tmp_path, "watched", "other", "forgotten")
    (tmp_path / "watched-too").write_text("")
    removals.watch(watched)
    removals.watch(forgotten)
    removals.forget(forgotten)
    removals.read()
    assert reported == []
    os.rmdir(other)
    os.rmdir(forgotten)
    (tmp_path / "watched-too").unlink()
    os.rmdir(watched)
    removals.read()
    assert reported == [watched]
    removals.read()
    assert reported == [watched], "a removal was reported twice"


def test_directory_that_is_created_again_is_still_watched(
    removals: Removals, reported: list[str], tmp_path: Path
) -> None:
    (path,) = make_directories(tmp_path, "pod")
    removals.watch(path)
    for number in (1, 2):
        os.rmdir(path)
        removals.read()
        assert reported == [path] * number
        os.mkdir(path)


def test_watch_of_a_parent_ends_with_its_last_watched_directory(removals: Removals, tmp_path: Path) -> None:
    first, second = make_directories(tmp_path, "first", "second")
    for path in (first, second):
        removals.watch(path)
    removals.forget(first)
    assert watches(removals) == 1
    removals.forget(second)
    assert watches(removals) == 0
    removals.forget(second)


def test_removals_with_the_parent_are_reported(removals: Removals, reported: list[str], tmp_path: Path) -> None:
    first, second = make_directories(tmp_path, "slice/first", "slice/second")
    for path in (first, second):
        removals.watch(path)
    shutil.rmtree(tmp_path / "slice")
    removals.read()
    assert set(reported) == {first, second}
    removals.forget(first)
    make_directories(tmp_path, "slice/first")
    removals.watch(first)
    reported.clear()
    os.rmdir(first)
    removals.read()
    assert reported == [first], "not reported in a parent that was created again"


def test_watch_in_a_missing_parent_fails(removals: Removals, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        removals.watch(str(tmp_path / "gone" / "pod"))
    removals.forget(str(tmp_path / "gone" / "pod"))


def test_every_path_is_reported_if_the_kernel_dropped_events(
    removals: Removals, reported: list[str], tmp_path: Path
) -> None:
    """The kernel keeps fs.inotify.max_queued_events; here it drops the event of the watched directory."""
    max_events = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    removed, kept = make_directories(tmp_path, "removed", "kept")
    for path in (removed, kept):
        removals.watch(path)
    for number in range(max_events + 1):
        # Different names, because the kernel merges successive equal events.
        os.mkdir(tmp_path / str(number))
        os.rmdir(tmp_path / str(number))
    os.rmdir(removed)
    for _ in range(max_events):
        removals.read()
    assert {removed, kept} == set(reported)


def watches(removals: Removals) -> int:
    """Return the number of inotify watches."""
    return Path(f"/proc/self/fdinfo/{removals.fd}").read_text().count("inotify wd")


class Churn(RuleBasedStateMachine):
    """Create, remove, watch and forget directories in any order: each removal of a watched path is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.top = tempfile.mkdtemp()
        self.reported: set[str] = set()
        self.removals = Removals(self.reported.add)
        self.expected: set[str] = set()
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
            self.expected |= self.watched & {path}

    @rule(parent=st.sampled_from(PARENTS))
    def remove_all(self, parent: str) -> None:
        prefix = os.path.join(self.top, parent) + os.sep
        if os.path.isdir(prefix):
            shutil.rmtree(prefix)
            removed = {path for path in self.watched if path.startswith(prefix)}
            self.expected |= removed
            # The kernel removed the watch with the parent, so a new directory there requires a new call of watch().
            self.watched -= removed

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
        self.read()
        self.removals.forget(path)
        self.watched.discard(path)

    @rule()
    def read(self) -> None:
        self.removals.read()
        assert self.expected <= self.reported
        self.reported.clear()
        self.expected.clear()

    @invariant()
    def has_no_more_watches_than_parents(self) -> None:
        assert watches(self.removals) <= len({os.path.dirname(path) for path in self.watched})


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
