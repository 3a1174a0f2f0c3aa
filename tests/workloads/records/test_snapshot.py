# SPDX-License-Identifier: Apache-2.0
"""The begin and end files are complete or missing, after any interruption or obstacle."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import NoReturn

import pytest

from resctrlmond.resctrl.counters import Reading, parse_value
from resctrlmond.workloads.model import clock
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.records.snapshot import Snapshots
from tests.workloads.conftest import contents

OLD = "2000-01-01T00:00:00.000000Z"


def values(energy: str, domain: str = "mon_PERF_PKG_00") -> list[Reading]:
    return [Reading(domain, "core_energy", parse_value(energy)), Reading(domain, "activity", parse_value("Error"))]


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    for name in ("groups", "completed"):
        (tmp_path / name).mkdir()
    return Snapshots(str(tmp_path / "groups"), str(tmp_path / "completed"))


def test_the_public_layout(snapshots: Snapshots) -> None:
    snapshots.begin("k", OLD, "/sys/fs/resctrl/mon_groups/k", values("1.250000"))
    domain = "mon_data/mon_PERF_PKG_00"
    live = f"-> /sys/fs/resctrl/mon_groups/k/{domain}"
    assert contents(snapshots.path("k")) == {
        "created_at": f"{OLD}\n",
        f"{domain}/core_energy": f"{live}/core_energy",
        f"{domain}/core_energy.begin": "1.250000\n",
        f"{domain}/activity": f"{live}/activity",
        f"{domain}/activity.begin": "Error\n",
    }
    assert snapshots.exists("k")
    assert not snapshots.is_complete("k")
    snapshots.end("k", OLD, values("2.500000"))
    assert contents(snapshots.path("k")) == {
        "created_at": f"{OLD}\n",
        "completed_at": f"{OLD}\n",
        f"{domain}/core_energy.begin": "1.250000\n",
        f"{domain}/core_energy.end": "2.500000\n",
        f"{domain}/activity.begin": "Error\n",
        f"{domain}/activity.end": "Error\n",
    }
    assert snapshots.is_complete("k")
    assert snapshots.begin_values("k") == sorted(values("1.250000"), key=lambda one: one.event)
    assert snapshots.end_values("k") == sorted(values("2.500000"), key=lambda one: one.event)


def test_equal_values_take_the_memory_of_one_file(snapshots: Snapshots) -> None:
    """Each took a page and an inode: 2.5 GiB for 4096 workloads on a machine with 32 L3 caches."""
    domains = [f"mon_L3_{number:02}" for number in range(32)]
    snapshots.begin("k", OLD, "/live", [Reading(domain, "mbm_total_bytes", parse_value("0")) for domain in domains])
    # An earlier end was interrupted, after it had written another value.
    (Path(snapshots.path("k")) / "mon_data/mon_L3_07/mbm_total_bytes.end").write_text("6\n")
    numbers = {domain: "7" if domain == "mon_L3_03" else "0" for domain in domains}
    end = [Reading(domain, "mbm_total_bytes", parse_value(number)) for domain, number in numbers.items()]
    snapshots.end("k", OLD, end)
    assert {reading.value.text for reading in snapshots.begin_values("k")} == {"0"}
    assert snapshots.end_values("k") == end
    files = [path.stat() for path in (Path(snapshots.path("k")) / "mon_data").rglob("*.*")]
    assert len(files) == 64
    # The begin values, the end values, the 7, and the file that was there.
    assert len({file.st_ino for file in files}) == 4


def test_begin_values_are_kept_in_memory_until_the_end_while_their_folder_exists(snapshots: Snapshots) -> None:
    """Each total needs them, and each is in a file of its own."""
    begin = sorted(values("1"), key=lambda one: one.event)
    for key in ("ended", "removed", "reloaded"):
        snapshots.begin(key, OLD, "/live", values("1"))
        (Path(snapshots.path(key)) / "mon_data/mon_PERF_PKG_00/core_energy.begin").write_text("7\n")
        assert snapshots.begin_values(key) == begin
    snapshots.end("ended", OLD, values("8"))
    snapshots.load_begin("reloaded")
    for key in ("ended", "reloaded"):
        assert snapshots.begin_values(key) == sorted(values("7"), key=lambda one: one.event)
    (Path(snapshots.path("removed")) / "mon_data").rename(Path(snapshots.path("removed")) / "moved")
    assert snapshots.begin_values("removed") == []


@contextlib.contextmanager
def keeping(snapshots: Snapshots, key: str, found: list[Reading]) -> Iterator[None]:
    """Keep the begin values while ``completed_at`` is about to be written."""
    found += snapshots.begin_values(key)
    yield


def test_totals_at_the_end_are_those_of_the_begin_files(snapshots: Snapshots) -> None:
    for key in ("untouched", "changed", "replaced", "removed"):
        snapshots.begin(key, OLD, "/live", values("1"))
        file = Path(snapshots.path(key)) / "mon_data/mon_PERF_PKG_00/core_energy.begin"
        if key == "changed":
            file.write_text("7\n")
        elif key == "replaced":
            other = file.with_name("other")
            other.write_text("7\n")
            other.rename(file)
        elif key == "removed":
            file.unlink()
        found: list[Reading] = []
        snapshots.end(key, OLD, values("8"), keeping(snapshots, key, found))
        energy = [one.value.text for one in found if one.event == "core_energy"]
        assert energy == {"untouched": ["1"], "removed": []}.get(key, ["7"])
        assert not any(path.is_symlink() for path in Path(snapshots.path(key)).rglob("*"))


def test_run_that_has_just_begun_has_no_other_files(snapshots: Snapshots) -> None:
    snapshots.begin("k", OLD, "/live", values("1.25"))
    assert snapshots.last_read("k") == {}
    assert snapshots.quality("k") == ""
    assert not snapshots.is_complete("k")


def test_files_that_are_written_after_the_begin_are_read(snapshots: Snapshots) -> None:
    snapshots.begin("a", OLD, "/live", values("1.25"))
    snapshots.write_quality("a", "core_energy exact\n")
    assert snapshots.quality("a") == "core_energy exact\n"

    snapshots.begin("b", OLD, "/live", values("1.25"))
    snapshots.checkpoint("b", OLD, values("2.5"))
    assert snapshots.last_read("b")["mon_PERF_PKG_00"].values["core_energy"] == "2.5"

    snapshots.begin("c", OLD, "/live", values("1.25"))
    assert snapshots.keep_read(OLD, time.monotonic_ns(), "c", values("2.5"), {})
    assert snapshots.last_read("c")["mon_PERF_PKG_00"].values["core_energy"] == "2.5"

    snapshots.begin("d", OLD, "/live", [Reading("mon_PERF_PKG_00", "activity", parse_value("3.5"))])
    snapshots.note_gaps("d", [Reading("mon_PERF_PKG_00", "activity", parse_value("Error"))], {})
    assert snapshots.last_read("d")["mon_PERF_PKG_00"].gaps == ("activity",)

    snapshots.begin("e", OLD, "/live", values("1.25"))
    snapshots.end("e", OLD, values("2.5"))
    assert snapshots.is_complete("e")


def test_files_of_an_earlier_run_that_comes_back_are_read(snapshots: Snapshots) -> None:
    """The run that took its key did not get beyond its begin values."""
    snapshots.begin("k", OLD, "/live", values("1.25"))
    snapshots.write_quality("k", "core_energy exact\n")
    snapshots.end("k", OLD, values("2.5"))
    snapshots.set_aside("k", 1)
    snapshots.begin("k", OLD, "/live", values("7.0"))
    snapshots.delete("k")
    snapshots.bring_back("k", 1)
    assert snapshots.is_complete("k")
    assert snapshots.quality("k") == "core_energy exact\n"


def test_checkpoint_is_read_after_a_begin_that_failed(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots.begin("k", OLD, "/live", values("1.25"))
    snapshots.checkpoint("k", OLD, values("2.5"))

    def fail(_source: str, target: str) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO), target)

    with monkeypatch.context() as patched:
        patched.setattr("resctrlmond.workloads.records.snapshot.os.rename", fail)
        with pytest.raises(NotWritten):
            snapshots.begin("k", OLD, "/live", values("3.5"))
    assert snapshots.last_read("k")["mon_PERF_PKG_00"].values["core_energy"] == "2.5"
    snapshots.begin("k", OLD, "/live", values("3.5"))
    assert snapshots.last_read("k") == {}
    assert "checkpoint" not in contents(snapshots.path("k"))


def test_all_users_may_read_for_any_umask(snapshots: Snapshots) -> None:
    snapshots.begin("k", OLD, "/live", values("1"))
    assert os.stat(
        os.path.join(snapshots.path("k"), "mon_data/mon_PERF_PKG_00/core_energy.begin")
    ).st_mode & 0o777 == (0o644)


def test_sub_domains_are_one_level_deeper(snapshots: Snapshots) -> None:
    snapshots.begin("k", OLD, "/live", values("1", "mon_L3_00/mon_sub_L3_01"))
    assert {one.domain for one in snapshots.begin_values("k")} == {"mon_L3_00/mon_sub_L3_01"}


def test_files_of_an_interrupted_begin_are_replaced_and_removed(snapshots: Snapshots) -> None:
    for key in ("k", "other"):
        half = Path(snapshots.groups) / f".{key}.new" / "mon_data" / "mon_L3_07"
        half.mkdir(parents=True)
        (half / "core_energy.begin").write_text("999\n")
    snapshots.begin("k", OLD, "/live", values("1"))
    assert not [name for name in contents(snapshots.path("k")) if "mon_L3_07" in name]
    snapshots.remove_incomplete()
    assert os.listdir(snapshots.groups) == ["k"]


def test_earlier_run_of_the_key_is_not_part_of_the_new_run(snapshots: Snapshots) -> None:
    snapshots.begin("k", OLD, "/live", values("1"))
    snapshots.end("k", OLD, values("2"))
    snapshots.begin("k", OLD, "/live", values("3"))
    assert not snapshots.is_complete("k")
    assert snapshots.end_values("k") == []


def test_failed_begin_keeps_the_earlier_files(snapshots: Snapshots) -> None:
    snapshots.begin("k", OLD, "/live", values("1"))
    before = contents(snapshots.groups)
    with pytest.raises(NotWritten, match="ENAMETOOLONG"):
        snapshots.begin("k", OLD, "/live", [*values("3"), Reading("x" * 300, "e", parse_value("1"))])
    assert contents(snapshots.groups) == before
    assert os.listdir(snapshots.groups) == ["k"]


def test_interrupted_end_is_written_again(snapshots: Snapshots) -> None:
    snapshots.begin("k", OLD, "/live", values("1"))
    with pytest.raises(NotWritten):
        snapshots.end("k", OLD, [*values("2"), Reading("x" * 300, "e", parse_value("1"))])
    assert not snapshots.is_complete("k")
    snapshots.end("k", OLD, values("5"))
    assert {one.value.text for one in snapshots.end_values("k")} == {"5", "Error"}


def test_interrupted_relinking_is_repeated(snapshots: Snapshots) -> None:
    snapshots.begin("k", OLD, "/old", values("1"))
    place = Path(snapshots.path("k")) / "mon_data" / "mon_PERF_PKG_00"
    (place / ".core_energy.new").symlink_to("/half")
    snapshots.relink("k", "/new")
    assert os.readlink(place / "core_energy") == "/new/mon_data/mon_PERF_PKG_00/core_energy"
    assert os.readlink(place / "activity") == "/new/mon_data/mon_PERF_PKG_00/activity"
    assert not (place / ".core_energy.new").exists()


def test_setting_aside_bringing_back_and_pruning(snapshots: Snapshots) -> None:
    for generation, completed in ((1, OLD), (2, utc_now())):
        snapshots.begin("k", OLD, "/live", values("1"))
        snapshots.end("k", completed, values("2"))
        snapshots.set_aside("k", generation)
        snapshots.set_aside("k", generation)
    assert os.listdir(snapshots.groups) == []
    assert snapshots.completed.list_keys() == ["k"]
    assert sorted(os.listdir(os.path.join(snapshots.completed.folder, "k"))) == ["1", "2"]
    snapshots.completed.prune("k", 60)
    assert os.listdir(os.path.join(snapshots.completed.folder, "k")) == ["2"]
    snapshots.bring_back("k", 2)
    assert snapshots.is_complete("k")
    snapshots.bring_back("k", 2)
    snapshots.completed.prune("k", 60)
    assert os.listdir(snapshots.completed.folder) == []


def test_a_step_of_the_clock_makes_no_ended_run_old_or_young(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(generation: int, at: str, ago_s: float) -> None:
        snapshots.begin("k", OLD, "/live", values("1"))
        snapshots.end("k", at, values("2"))
        snapshots.set_aside("k", generation, int(boot_ns() - ago_s * 1e9))

    ended(1, OLD, 1)  # the clock was set ahead by years when it had ended
    ended(2, utc_now(), 7200)  # the clock was set back
    snapshots.completed.prune("k", 3600)
    assert os.listdir(os.path.join(snapshots.completed.folder, "k")) == ["1"]
    # The age of a run that ended before this daemon started is by the time of day, once.
    unseen = Snapshots(snapshots.groups, snapshots.completed.folder)
    stamp = Path(snapshots.completed.folder) / "k" / "1" / "completed_at"
    stamp.write_text(f"{utc_now()}\n")
    unseen.completed.prune("k", 3600)

    class SetAhead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> SetAhead:
            return super().now(tz) + timedelta(days=1)

    monkeypatch.setattr(clock, "datetime", SetAhead)
    unseen.completed.prune("k", 3600)
    assert stamp.exists()


def test_the_end_of_an_earlier_run_is_read_once(snapshots: Snapshots) -> None:
    """It was read twice a second for each ended run."""
    snapshots.begin("k", OLD, "/live", values("1"))
    snapshots.end("k", utc_now(), values("2"))
    snapshots.set_aside("k", 1)
    snapshots.completed.prune("k", 3600)
    stamp = Path(snapshots.completed.folder) / "k" / "1" / "completed_at"
    stamp.unlink()
    snapshots.completed.prune("k", 3600)
    assert [generation for _, generation, _ in snapshots.completed.runs()] == [1]


def test_unknown_file_among_the_ended_runs_is_reported_and_not_fatal(snapshots: Snapshots) -> None:
    (Path(snapshots.completed.folder) / "junk").write_text("?")
    with pytest.raises(NotWritten, match="junk"):
        snapshots.completed.prune("junk", 60)


def test_links_are_never_followed(snapshots: Snapshots, tmp_path: Path) -> None:
    """A link in the place of a run is removed, and its target is not."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    os.symlink(victim, snapshots.path("k"))
    snapshots.delete("k")
    assert not os.path.lexists(snapshots.path("k"))
    assert (victim / "file").read_text() == "kept"


def test_begin_values_that_are_read_while_the_next_run_begins_are_not_those_of_it(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread without a transaction loads them, and the totals of the next run were too large, and exact."""
    snapshots.begin("k", OLD, "/live", values("1.250000"))
    snapshots.end("k", OLD, values("2.500000"))
    last = Snapshots(snapshots.groups, snapshots.completed.folder)
    read = Snapshots._values

    def slow_read(of: Snapshots, subfolder: str, suffix: str) -> list[Reading]:
        found = read(of, subfolder, suffix)
        monkeypatch.undo()
        last.set_aside("k", 1)
        last.begin("k", OLD, "/live", values("9.000000"))
        return found

    monkeypatch.setattr(Snapshots, "_values", slow_read)
    last.load_begin("k")
    assert [one.value.text for one in last.begin_values("k") if one.event == "core_energy"] == ["9.000000"]
