# SPDX-License-Identifier: Apache-2.0
"""Read the files of the witness: those of the simulator, and texts that no program writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resctrlmond.resctrl.errors import NotRead
from resctrlmond.resctrl.witness import Entry, Use, Watch, Witness

STATUS = "format 1\nbegun 5\ngaps 2 1\nrows 3 65536\nmoves 4 4096\nkeep 3600000000000\ncgroup_moves 1\ntask_moves 1\n"
SECOND = 10**9
TASKS = f"7 7 {3 * SECOND} 0 4 900 600 0 11,1\n7 8 {3 * SECOND} 0 0 50 50 1 11,1\n"
ENDED = "0 4 1000 2 77 11,1\n"
MOVES = (
    "2 write 9 500 2 30 0 7 7 sh 7\n"
    "3 task 9 2 7 7 1 11 0 0 0 4 12\n"
    "4 write 9 501 -3 30 1 7 7 sh ?9\n"
    "6 write 9 502 - - 0 7 7 sh 7\n"
    "1 task 8 0 7 7 1 11 0 0 0 9 12\n"
)


def witness(folder: Path, **texts: str) -> Witness:
    """Return the witness with these files."""
    for name, text in {"status": STATUS, "tasks": TASKS, "ended": ENDED, "moves": MOVES, **texts}.items():
        (folder / name).write_text(text)
    found = Witness.__new__(Witness)
    found.folder = str(folder)
    return found


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


def test_ids_are_those_of_the_last_move_by_a_write_to_the_directory(tmp_path: Path) -> None:
    found = witness(tmp_path)
    assert found.entry(500, 9) == Entry((0, 4), frozenset({11}))
    assert found.entry(501, 9) is None, "refused"
    assert found.entry(502, 9) is None, "not ended"
    assert found.entry(9, 9) is None
    assert found.entry(500, 10) is None, "of an earlier directory"


def test_moves_that_were_overwritten_leave_the_ids_unknown(tmp_path: Path) -> None:
    found = witness(tmp_path, moves=MOVES.replace("1 task 8 0", "2 task 9 0").replace("2 write", "7 write"))
    with pytest.raises(NotRead, match="does not have the moves"):
        found.entry(9, 9)
    assert found.entry(9, 10) is None, "all are of before"
    assert witness(tmp_path, moves="").entry(9, 9) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        STATUS.replace("format 1", "format 2"),
        STATUS.replace("task_moves 1", "task_moves 0"),
        STATUS.replace("cgroup_moves 1", "cgroup_moves 0"),
        STATUS.replace("gaps 2 1", "gaps x"),
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
@given(st.sampled_from(["status", "tasks", "ended", "moves"]), st.data())
def test_damaged_text_raises_the_typed_error_only(tmp_path: Path, name: str, data: st.DataObject) -> None:
    good = {"status": STATUS, "tasks": TASKS, "ended": ENDED, "moves": MOVES}[name]
    at, length = data.draw(st.integers(0, len(good))), data.draw(st.integers(0, 9))
    text = good[:at] + data.draw(st.text(st.characters(codec="ascii"), max_size=9)) + good[at + length :]
    found = witness(tmp_path, **{name: text})
    try:
        found.look()
        found.entry(500, 9)
    except NotRead:
        pass
