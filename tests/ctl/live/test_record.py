# SPDX-License-Identifier: Apache-2.0
"""The verb record: what is in the file, whatever happens to the daemon, the disk and the program."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from resctrlmond.workloads.model.workload import State
from tests.ctl.conftest import Ctl, command
from tests.ctl.fake_manager import LATER, FakeManager, error
from tests.wait import wait_until


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a recording; each must be complete."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def keys_of(line: dict[str, Any]) -> list[str]:
    return [used["key"] for used in line["workloads"]]


@pytest.fixture
def start(
    manager: FakeManager, environment: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts record with a file in ``tmp_path``."""
    started: list[subprocess.Popen[str]] = []

    def run(*options: str) -> subprocess.Popen[str]:
        words = command(manager.socket, "record", "-d", "0.5", "-o", str(tmp_path / "file"), *options)
        started.append(subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_file_has_a_header_and_a_line_for_each_reading(manager: FakeManager, ctl: Ctl, tmp_path: Path) -> None:
    manager.add("web", attributes={"unit": "web.service"})
    path = tmp_path / "file"
    done = ctl("record", "-o", str(path), "-d", "0.5", "-n", "2")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"resctrlctl: 2 readings written to {path}. To show them: resctrlctl plot {path}\n"
    header, *readings = lines_of(path)
    assert {**header, "readAt": "", "host": ""} == {
        "type": "header",
        "readAt": "",
        "format": 1,
        "version": "0.1.0",
        "host": "",
        "intervalS": 0.5,
        "events": {"llc_occupancy": "bytes"},
    }
    assert header["host"] == os.uname().nodename
    assert [list(reading) for reading in readings] == [["type", "readAt", "workloads"]] * 2
    assert readings[1]["workloads"] == [
        {
            "key": "web",
            "generation": 1,
            "name": "web.service",
            "state": "active",
            "readAt": LATER,
            "createdAt": "2026-11-21T11:13:22.500000Z",
            "totals": {
                "core_energy": {"value": "12.345678", "quality": "exact"},
                "mbm_total_bytes": {"quality": "unknown"},
            },
            "levels": {"llc_occupancy": "1572864"},
        }
    ]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ((), ["cart", "db", "run-7-1"]),
        (("shop/*",), ["cart"]),
        (("db", "sleep 600"), ["db"]),
        (("d?", "c*"), ["cart", "db"]),
        (("--filter", "namespace=shop"), ["cart"]),
        (("d*", "--filter", "namespace=shop"), []),
    ],
)
def test_names_and_filters_select(manager: FakeManager, ctl: Ctl, words: tuple[str, ...], keys: list[str]) -> None:
    manager.add("cart", attributes={"pod.namespace": "shop", "pod.name": "cart-0"})
    manager.add("db")
    manager.add("run-7-1", attributes={"command": "sleep 600"})
    done = ctl("record", "-o", "-", "-n", "1", *words)
    _, reading = map(json.loads, done.stdout.splitlines())
    assert keys_of(reading) == keys
    assert ("no workload matches now" in done.stderr) == (not keys)
    names = {used["key"]: used["name"] for used in reading["workloads"]}
    assert names.get("run-7-1", "sleep 600") == "sleep 600"


def test_end_is_recorded_once_with_the_final_totals(
    manager: FakeManager, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Also of a workload that no filter matches after its end, or that lived between two readings."""
    for key in ("before", "web"):
        manager.add(key)
    ended = {"state": State.COMPLETED, "completed_at": LATER}
    manager.workloads["before"] = replace(manager.workloads["before"], **ended)
    path = tmp_path / "file"
    process = start("--filter", "state=active", "--filter", "owner=cli")
    wait_until(lambda: path.exists() and len(lines_of(path)) > 2)
    manager.workloads["web"] = replace(manager.workloads["web"], **ended, claims=())
    wait_until(lambda: "completedAt" in path.read_text())
    manager.workloads["web"] = replace(manager.add("web"), generation=2)
    count = len(lines_of(path))
    wait_until(lambda: len(lines_of(path)) > count + 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    found = [used for line in lines_of(path)[1:] for used in line["workloads"]]
    assert {used["key"] for used in found} == {"web"}
    assert [used["completedAt"] for used in found if used["state"] == "completed"] == [LATER]
    generations = [used["generation"] for used in found]
    assert generations == sorted(generations)
    assert generations[-1] == 2


def test_run_of_a_key_that_the_daemon_had_forgotten_is_recorded(
    manager: FakeManager, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Its generation is that of the run before, which had ended and was in the file."""
    manager.add("web", state=State.COMPLETED, completed_at=LATER)
    path = tmp_path / "file"
    process = start()
    wait_until(lambda: path.exists() and len(lines_of(path)) > 1)
    manager.add("web", created_at=LATER)
    wait_until(lambda: "web" in path.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    found = [used["createdAt"] for line in lines_of(path)[1:] for used in line["workloads"]]
    assert set(found) == {LATER}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_takes_a_last_reading(
    manager: FakeManager,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    number: signal.Signals,
) -> None:
    manager.add("web")
    process = start("-d", "86400")
    wait_until(lambda: (tmp_path / "file").exists() and len(lines_of(tmp_path / "file")) == 2)
    manager.add("short", state=State.COMPLETED, completed_at=LATER)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "2 readings written" in text
    assert keys_of(lines_of(tmp_path / "file")[-1]) == ["web", "short"]


def test_recording_continues_after_an_outage_of_the_daemon(
    manager: FakeManager, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    manager.add("web")
    process = start()
    path = tmp_path / "file"
    wait_until(lambda: path.exists() and len(lines_of(path)) >= 2)
    assert process.stderr
    os.rename(manager.socket, manager.socket + ".away")
    text = process.stderr.readline()
    assert "resctrlmond is not running" in text
    assert text.endswith(". The recording continues when resctrlmond answers\n")
    os.rename(manager.socket + ".away", manager.socket)
    assert process.stderr.readline() == "resctrlctl: resctrlmond answers again: the recording continues\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    kinds = [line["type"] for line in lines_of(path)]
    assert kinds.count("outage") == 1
    assert kinds[-1] == "reading"


def test_exit_status_is_that_of_the_last_reading(
    manager: FakeManager, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    manager.refuse_later["ReadAll"] = error("PermissionDenied", "access is denied")
    process = start("-n", "3")
    process.communicate(timeout=60)
    assert process.returncode == 77
    assert [line["type"] for line in lines_of(tmp_path / "file")] == ["header", "reading", "outage"]


def test_earlier_recording_is_kept_if_the_daemon_does_not_run(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    done = ctl("--socket", str(tmp_path / "none"), "record", "-o", str(path))
    assert done.returncode == 3
    assert "resctrlmond is not running" in done.stderr
    assert path.read_text() == "earlier"


def test_full_disk_leaves_complete_lines(manager: FakeManager, environment: dict[str, str], tmp_path: Path) -> None:
    """A limit of the file's size cuts the last write as a full disk does."""
    manager.add("web")
    path = tmp_path / "file"
    done = subprocess.run(
        command(manager.socket, "record", "-o", str(path), "-d", "0.5", "-n", "50"),
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    readings = len(lines_of(path)) - 1
    assert readings >= 2
    assert done.stderr == f"resctrlctl: cannot write {path}: File too large. It has {readings} readings\n"


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/dev/full", "No space left on device"), ("/", "Is a directory"), ("/none/x", "No such file or directory")],
)
def test_file_that_cannot_be_written_is_named(ctl: Ctl, path: str, reason: str) -> None:
    done = ctl("record", "-o", path)
    assert (done.returncode, done.stderr) == (1, f"resctrlctl: cannot write {path}: {reason}\n")


def test_closed_pipe_ends_the_recording_without_a_message(manager: FakeManager, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        command(manager.socket, "record", "-o", "-", "-d", "0.5"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline().startswith('{"type":"header"')
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_new_file_is_private_and_an_existing_one_keeps_its_mode(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for mode in (0o600, 0o644):
        assert ctl("record", "-o", str(path), "-n", "1").returncode == 0
        assert path.stat().st_mode & 0o777 == mode
        path.chmod(0o644)


def test_file_is_required(ctl: Ctl) -> None:
    done = ctl("record")
    assert done.returncode == 2
    assert "-o/--output" in done.stderr


def test_names_are_escaped(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k", attributes={"unit": "\x1b[31m\nred"})
    done = ctl("record", "-o", "-", "-n", "1")
    assert done.stdout.replace("\n", "").isprintable()
    assert json.loads(done.stdout.splitlines()[1])["workloads"][0]["name"] == "\x1b[31m\nred"


def test_parquet_is_not_written_to_standard_output(ctl: Ctl) -> None:
    done = ctl("record", "--parquet", "-o", "-", "-n", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("resctrlctl: a Parquet file cannot be written to standard output: give --output a file\n")


def test_missing_pyarrow_names_the_remedy(ctl: Ctl, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError(\"No module named 'pyarrow'\")")
    path = tmp_path / "file"
    path.write_text("earlier")
    done = ctl(
        "record",
        "--parquet",
        "-o",
        str(path),
        "-n",
        "1",
        PYTHONPATH=os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]]),
    )
    assert done.returncode == 1
    assert done.stderr == (
        "resctrlctl: cannot write Parquet: pyarrow cannot be imported: No module named 'pyarrow'. Install "
        "python3-pyarrow, which Debian 13 does not have; or run 'pip install resctrlmond[parquet]' in a virtual "
        "environment; or record without --parquet\n"
    )
    assert path.read_text() == "earlier"
