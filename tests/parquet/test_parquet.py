# SPDX-License-Identifier: Apache-2.0
"""The Parquet files of resctrlctl record, read back with pyarrow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from resctrlctl.base.errors import CommandError
from resctrlctl.live import parquet
from resctrlctl.live.parquet import convert
from tests.ctl.conftest import Ctl, command, ctl, environment, manager
from tests.ctl.fake_manager import LATER, FakeManager, error
from tests.ctl.live.test_plot import header, reading, text_of, used
from tests.wait import wait_until

__all__ = ["ctl", "environment", "manager"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_row_has_each_event_of_each_workload_in_each_reading(manager: FakeManager, ctl: Ctl, tmp_path: Path) -> None:
    manager.add("web", attributes={"unit": "web.service"})
    path, lines = tmp_path / "use.parquet", tmp_path / "use.jsonl"
    done = ctl("record", "--parquet", "-o", str(path), "-d", "0.5", "-n", "2")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"resctrlctl: 2 readings written to {path}\n"
    assert not Path(f"{path}.jsonl").exists()
    assert ctl("record", "-o", str(lines), "-n", "1").returncode == 0
    (web,) = json.loads(lines.read_text().splitlines()[1])["workloads"]
    rows = rows_of(path)
    events = sorted({*web["totals"], *web["levels"]})
    assert [row["event"] for row in rows] == 2 * events
    assert {(row["key"], row["generation"], row["name"], row["state"]) for row in rows} == {
        ("web", 1, "web.service", "active")
    }
    assert {row["readAt"] for row in rows} == {datetime.fromisoformat(LATER)}
    assert len({row["reading"] for row in rows}) == 2
    for row in rows:
        total = web["totals"].get(row["event"], {})
        assert row["quality"] == total.get("quality")
        assert row["value"] == (Decimal(total["value"]) if "value" in total else None)
        level = web["levels"].get(row["event"])
        assert row["level"] == (None if level is None else Decimal(level))
    assert any(row["value"] for row in rows)
    assert any(row["level"] for row in rows)
    metadata = json.loads(pq.read_schema(path).metadata[b"resctrlctl"])
    assert (metadata["type"], metadata["host"]) == ("header", os.uname().nodename)


def test_numbers_keep_all_digits(tmp_path: Path) -> None:
    lines, path = tmp_path / "lines", tmp_path / "file"
    numbers = {"core_energy": "98765432109876543.123456", "mbm_total_bytes": str(2**64 - 1), "activity": None}
    totals = {event: {"quality": "exact"} | ({"value": text} if text else {}) for event, text in numbers.items()}
    lines.write_bytes(text_of(header(), reading(0, used("a", 0, None, totals=totals))))
    convert(str(lines), str(path))
    found = {row["event"]: row["value"] for row in rows_of(path)}
    assert {event: found[event] for event in numbers} == {
        event: None if text is None else Decimal(text) for event, text in numbers.items()
    }


def test_rows_of_a_long_recording_are_converted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, path = tmp_path / "lines", tmp_path / "file"
    lines.write_bytes(text_of(header(), *(reading(number, used("a", number, number)) for number in range(50))))
    monkeypatch.setattr(parquet, "_BATCH", 7)
    convert(str(lines), str(path))
    assert pq.ParquetFile(path).num_row_groups > 1
    readings = [row["reading"] for row in rows_of(path)]
    assert readings == sorted(readings)
    assert len(set(readings)) == 50
    assert readings[0].utcoffset() == timedelta(0)


def test_recording_without_workloads_and_a_workload_without_figures(
    manager: FakeManager, ctl: Ctl, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    assert ctl("record", "--parquet", "-o", str(path), "-n", "1").returncode == 0
    assert rows_of(path) == []
    lines = tmp_path / "lines"
    lines.write_bytes(text_of(header(), reading(0, used("a", 0, None, levels={}, error="the kernel hangs"))))
    convert(str(lines), str(path))
    assert [(row["key"], row["event"], row["error"]) for row in rows_of(path)] == [("a", None, "the kernel hangs")]


def test_signal_ends_the_recording_with_a_complete_file(
    manager: FakeManager, environment: dict[str, str], tmp_path: Path
) -> None:
    manager.add("web")
    path = tmp_path / "file"
    lines = Path(f"{path}.jsonl")
    words = command(manager.socket, "record", "--parquet", "-d", "86400", "-o", str(path))
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: lines.exists() and lines.read_text().count("\n") == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert len({row["reading"] for row in rows_of(path)}) == 2
    assert not lines.exists()


def test_killed_recording_remains_as_lines_and_is_not_overwritten(
    manager: FakeManager, ctl: Ctl, environment: dict[str, str], tmp_path: Path
) -> None:
    manager.add("web")
    path = tmp_path / "file"
    lines = Path(f"{path}.jsonl")
    words = command(manager.socket, "record", "--parquet", "-d", "86400", "-o", str(path))
    with subprocess.Popen(words, env=environment) as process:
        wait_until(lambda: lines.exists() and lines.read_text().count("\n") == 2)
        process.kill()
    before = lines.read_text()
    done = ctl("record", "--parquet", "-n", "1", "-o", str(path))
    assert done.returncode == 1
    assert done.stderr == (
        f"resctrlctl: {lines} exists: it may be what is left of a recording that was killed. To show it: "
        f"resctrlctl plot {lines}. Remove or rename it\n"
    )
    assert lines.read_text() == before
    assert not path.exists()


def test_file_that_cannot_be_written_leaves_the_lines(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.mkdir()
    done = ctl("record", "--parquet", "-n", "1", "-o", str(path))
    lines = f"{path}.jsonl"
    assert (done.returncode, done.stderr) == (
        1,
        f"resctrlctl: cannot write {path}: Is a directory. The recording is kept as lines in {lines}\n",
    )
    assert Path(lines).read_text().count("\n") == 2
    with pytest.raises(CommandError, match="cannot write /dev/full: No space left on device"):
        convert(lines, "/dev/full")


def test_new_file_is_private(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert ctl("record", "--parquet", "-o", str(path), "-n", "1").returncode == 0
    assert path.stat().st_mode & 0o777 == 0o600


def test_exit_status_is_that_of_the_last_reading_with_parquet_too(
    manager: FakeManager, environment: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    manager.refuse_later["ReadAll"] = error("PermissionDenied", "access is denied")
    words = command(manager.socket, "record", "--parquet", "-d", "0.5", "-n", "3", "-o", str(path))
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        process.communicate(timeout=60)
    assert process.returncode == 77
    assert rows_of(path) == []
