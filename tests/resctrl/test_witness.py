# SPDX-License-Identifier: Apache-2.0
"""Read the files of the witness: those of the simulator, and texts that no program writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resctrlmond.resctrl import kernel_files
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.resctrl.tree import Tree
from resctrlmond.resctrl.witness import Move, RemovedCgroup, Use, Watch, Witness

STATUS = (
    "format 4\nbegun 5\ngaps 2 1\nrows 3 65536\nmoves 4 4096\nkeep 3600\ndropped 9\ncgroup_moves 1\ntask_moves 1\n"
)
SECOND = 10**9
TASKS = f"7 7 {3 * SECOND} 0 4 900 600 0 11,1\n7 8 {3 * SECOND} 0 0 50 50 1 11,1\n"
ENDED = "0 4 1000 2 77 11,1\n"
MOVES = (
    "2 write 9 500 2 30 0 7 7 sh tasks a 7\n"
    "3 task 9 2 7 7 1 11 0 0 0 4 12\n"
    "4 write 9 501 -3 30 1 7 7 sh tasks a ?9\n"
    "6 write 9 502 - - 0 7 7 sh tasks a 7\n"
    "1 task 8 0 7 7 1 11 0 0 0 9 12\n"
)
REMOVED = b"21 70 11 a.service\n22 71 21 of a \xff\r\x1c  name\n"


def witness(folder: Path, **texts: str) -> Witness:
    """Return the witness with these files."""
    put(folder, **{"status": STATUS, "tasks": TASKS, "ended": ENDED, "removed": "", "moves": MOVES, **texts})
    found = Witness(Tree(str(folder), str(folder)))
    found.folder = str(folder)
    return found


def put(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / name).write_bytes(os.fsencode(text))


def test_watch_has_the_begin_and_all_gaps(tmp_path: Path) -> None:
    assert witness(tmp_path).watch() == Watch(5, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("state unavailable\nreason no-btf\ndetail the kernel has no BTF\n", "the kernel has no BTF"),
        ("state loaded\n", ""),
        ("", ""),
    ],
)
def test_loader_states_why_there_is_no_witness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    found = witness(tmp_path)
    monkeypatch.setattr("resctrlmond.resctrl.witness.STATE", str(tmp_path / "state"))
    assert found.why_unavailable() == ""
    (tmp_path / "state").write_text(text)
    assert found.why_unavailable() == why


def test_look_has_charged_time_and_the_rest_of_living_tasks(tmp_path: Path) -> None:
    seen = witness(tmp_path).look()
    assert list(seen.of_rmid(4)) == [Use((0, 4), 300, 1 << 63, (11, 1)), Use((0, 4), 1000, 77, (11, 1))]
    assert len(list(seen.of_cgroups((11, 1)))) == 2, "each once"
    assert (seen.watch, seen.dropped_ns) == (Watch(5, 3), 9)


@pytest.mark.parametrize("wanted", [{}, {"cgroups": (11,)}])
def test_drop_during_a_look_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]) -> None:
    """The witness states it before it removes a row."""
    found = witness(tmp_path)
    read = kernel_files.read

    def read_and_drop(path: str) -> bytes:
        text = read(path)
        put(tmp_path, ended="", status=STATUS.replace("dropped 9", "dropped 12"))
        return text

    monkeypatch.setattr("resctrlmond.resctrl.witness.kernel_files.read", read_and_drop)
    assert found.look(**wanted).dropped_ns == 12


def test_removed_control_group_has_its_parent_and_any_name(tmp_path: Path) -> None:
    found = witness(tmp_path)
    assert found.removed() == []
    (tmp_path / "removed").write_bytes(REMOVED)
    assert found.removed() == [
        RemovedCgroup(21, 70, 11, "a.service"),
        RemovedCgroup(22, 71, 21, os.fsdecode(b"of a \xff\r\x1c  name")),
    ]


@pytest.mark.parametrize("text", ["\n", "21 70 11\n", "21 70 11 \n", "x 70 11 a\n", "21 70 11 a\n22 71 21 b"])
def test_removed_control_groups_that_are_not_understood_are_not_read(tmp_path: Path, text: str) -> None:
    found = witness(tmp_path, removed=text)
    with pytest.raises(NotRead, match="removed"):
        found.removed()
    with pytest.raises(NotRead, match="removed"):
        found.at_paths(())


EXISTS = 1 << 63  # the time of the removal of a control group that exists


class Slice:
    """A real control group with one below it, and lines of removed ones."""

    def __init__(self, folder: Path) -> None:
        top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
        self.path = tempfile.mkdtemp(prefix="resctrlmond-test-", dir=top)
        self.top, self.inode = os.stat(top).st_ino, os.stat(self.path).st_ino
        self.name = os.path.basename(self.path)
        self.service = f"{self.path}/a.service"
        self._folder = folder

    def start(self) -> int:
        os.mkdir(self.service)
        return os.stat(self.service).st_ino

    def at(self, path: str, *removed: tuple[int, int, int, str]) -> dict[int, int]:
        text = "".join(f"{inode} {at_ns} {parent} {name}\n" for inode, at_ns, parent, name in removed)
        return witness(self._folder, removed=text).at_paths([path]).get(path, {})


@pytest.fixture
def slice_(tmp_path: Path) -> Iterator[Slice]:
    made = Slice(tmp_path)
    yield made
    for path in (made.service, made.path):
        with suppress(FileNotFoundError):
            os.rmdir(path)


def test_control_groups_at_a_path_are_the_one_that_exists_and_the_removed_ones(slice_: Slice) -> None:
    above = slice_.inode
    removed = (
        (901, 20, above, "a.service"),
        (902, 10, above, "a.service"),
        (903, 20, above, "b.service"),
        (904, 20, slice_.top, "a.service"),
    )
    assert slice_.at(slice_.service) == {}
    assert slice_.at(slice_.service, *removed) == {901: 20, 902: 10}
    now = slice_.start()
    assert slice_.at(slice_.service, *removed) == {now: EXISTS, 901: 20, 902: 10}


def test_control_group_whose_parent_was_removed_and_created_again_is_found(slice_: Slice) -> None:
    # In any order: the kernel lists them in that of a hash table.
    removed = (
        (901, 20, 801, "a.service"),
        (902, 20, slice_.inode, "a.service"),
        (903, 20, 802, "a.service"),
        (801, 21, slice_.top, slice_.name),
        (802, 21, slice_.top, "other.slice"),
    )
    now = slice_.start()
    assert slice_.at(slice_.service, *removed) == {now: EXISTS, 901: 20, 902: 20}
    assert slice_.at(slice_.path, *removed) == {slice_.inode: EXISTS, 801: 21}
    os.rmdir(slice_.service)
    os.rmdir(slice_.path)
    assert slice_.at(slice_.service, *removed) == {901: 20}


def test_control_group_that_is_removed_between_the_looks_is_found_once(slice_: Slice) -> None:
    now = slice_.start()
    assert slice_.at(slice_.service, (now, 20, slice_.inode, "a.service")) == {now: 20}


def test_control_group_with_a_name_that_the_witness_has_cut_is_found(slice_: Slice) -> None:
    assert slice_.at(f"{slice_.path}/{'é' * 200}", (901, 20, slice_.inode, "é" * 127 + "\udcc3")) == {901: 20}


def test_path_outside_control_groups_has_none(slice_: Slice) -> None:
    removed = (901, 20, slice_.top, "run")
    assert slice_.at("/run", removed) == {}


def test_path_of_which_no_control_group_was_removed_is_left_out(slice_: Slice) -> None:
    """It is the same one as before: it is not looked up for each container at each look."""
    slice_.start()
    assert slice_.at(slice_.service, (901, 20, slice_.inode, "b.service")) == {}


def test_moves_have_the_writer_the_directory_and_the_ids(tmp_path: Path) -> None:
    found = witness(tmp_path).moves()
    assert found.tasks == (Move(1, 8, 0, 0, 11, (0, 0), (0, 9)), Move(3, 9, 7, 500, 11, (0, 0), (0, 4), "sh"))
    assert (found.before, found.last, found.since_ns) == (0, 4, 0)
    assert found.into(500, 9) == [found.tasks[1]]
    assert found.into(501, 9) == [], "refused"
    assert found.into(500, 10) == [], "of an earlier directory"


def test_moves_that_were_read_before_are_kept_after_they_were_overwritten(tmp_path: Path) -> None:
    found = witness(tmp_path)
    before = found.moves()
    put(
        tmp_path,
        status=STATUS.replace("moves 4", "moves 6"),
        moves="5 write 11 500 2 1 0 9 9 sh tasks a 3\n6 task 12 5 3 3 1 9 0 0 0 4 1\n",
    )
    now = found.moves()
    assert now.tasks == (*before.tasks, Move(6, 12, 9, 500, 9, (0, 0), (0, 4), "sh"))
    assert (now.before, now.last, now.since_ns) == (0, 6, 0)


def test_moves_that_were_overwritten_before_they_were_read_are_a_gap(tmp_path: Path) -> None:
    found = witness(tmp_path)
    found.moves()
    put(
        tmp_path,
        status=STATUS.replace("moves 4 4096", "moves 7 2"),
        moves="6 write 11 500 2 1 0 9 9 sh tasks a 3\n7 task 12 6 3 3 1 9 0 0 0 4 1\n",
    )
    now = found.moves()
    assert (now.before, now.last, now.since_ns, now.is_whole) == (5, 7, 11, True)
    assert [move.number for move in now.tasks] == [7]


def test_record_that_is_not_complete_is_read_later(tmp_path: Path) -> None:
    """The kernel interrupted the program that writes it."""
    found = witness(tmp_path)
    before = found.moves()
    late, last = "5 write 11 500 2 1 0 9 9 sh tasks a 3\n", "6 task 12 5 3 3 1 9 0 0 0 4 1\n"
    put(tmp_path, status=STATUS.replace("moves 4", "moves 6"), moves=last)
    now = found.moves()
    assert (now.before, now.last, now.tasks, now.is_whole) == (0, 4, before.tasks, False)
    put(tmp_path, moves=late + last)
    now = found.moves()
    assert (now.before, now.last, now.is_whole) == (0, 6, True)
    assert now.tasks == (*before.tasks, Move(6, 12, 9, 500, 9, (0, 0), (0, 4), "sh"))


def test_no_more_moves_are_kept_than_four_times_those_of_the_witness(tmp_path: Path) -> None:
    found = witness(tmp_path, status=STATUS.replace("moves 4 4096", "moves 0 2"), moves="")
    now = found.moves()
    for number in range(1, 10):
        put(
            tmp_path,
            status=STATUS.replace("moves 4 4096", f"moves {number} 2"),
            moves=f"{number} task {number} 0 3 3 1 9 0 0 0 4 1\n",
        )
        now = found.moves()
        assert [move.number for move in now.tasks] == list(range(now.before + 1, number + 1))
    assert (now.before, now.since_ns) == (4, 5)


def test_moves_of_a_witness_that_was_loaded_again_are_all_new(tmp_path: Path) -> None:
    found = witness(tmp_path)
    found.moves()
    put(
        tmp_path,
        status=STATUS.replace("begun 5", "begun 6").replace("moves 4", "moves 1"),
        moves="1 write 11 500 -3 1 0 9 9 sh tasks a 3\n",
    )
    assert found.moves().tasks == ()
    assert found.moves().last == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        STATUS.replace("format 4", "format 3"),
        STATUS.replace("task_moves 1", "task_moves 0"),
        STATUS.replace("cgroup_moves 1", "cgroup_moves 0"),
        STATUS.replace("gaps 2 1", "gaps x"),
        STATUS.replace("dropped 9\n", ""),
        STATUS.replace("dropped 9", "dropped"),
        STATUS.replace("dropped 9", "dropped x"),
        STATUS.replace("dropped 9", "dropped 9 9"),
    ],
)
def test_witness_that_is_not_understood_is_not_one(tmp_path: Path, text: str) -> None:
    with pytest.raises(NotRead):
        witness(tmp_path, status=text).watch()


def test_missing_file_is_reported(tmp_path: Path) -> None:
    found = witness(tmp_path)
    (tmp_path / "ended").unlink()
    with pytest.raises(NotRead, match="ended"):
        found.look()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["status", "tasks", "ended", "removed", "moves"]), st.data())
def test_damaged_text_raises_the_typed_error_only(tmp_path: Path, name: str, data: st.DataObject) -> None:
    removed = os.fsdecode(REMOVED)
    good = {"status": STATUS, "tasks": TASKS, "ended": ENDED, "removed": removed, "moves": MOVES}[name]
    at, length = data.draw(st.integers(0, len(good))), data.draw(st.integers(0, 9))
    text = good[:at] + data.draw(st.text(st.characters(codec="ascii"), max_size=9)) + good[at + length :]
    found = witness(tmp_path, **{name: text})
    try:
        found.look()
        found.moves()
        found.removed()
    except NotRead:
        pass
