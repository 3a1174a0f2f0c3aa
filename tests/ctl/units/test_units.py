# SPDX-License-Identifier: Apache-2.0
"""resctrlctl units: globs are written to a drop-in, and the daemon is reloaded."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

import pytest

from resctrlctl.command import main
from resctrlmond.api.exit_codes import DENIED, USAGE
from resctrlmond.configuration import config
from tests.ctl.conftest import command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of drop-ins, which does not exist yet. systemctl writes its arguments to a file."""
    monkeypatch.setattr(config, "DEFAULT_PATH", str(tmp_path / "resctrlmond.yaml"))
    monkeypatch.setattr(config, "DROP_INS", str(tmp_path / "resctrlmond.d"))
    systemctl(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "resctrlmond.d"


def systemctl(folder: Path, end: str = "exit 0") -> None:
    program = folder / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >>{folder}/called\n{end}\n')
    program.chmod(0o755)


def called(folder: Path) -> list[str]:
    file = folder.parent / "called"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


RELOAD = ["is-active --quiet resctrlmond.service", "reload resctrlmond.service"]


def test_enable_disable_and_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["units", "status"]) == 0
    assert capsys.readouterr().out.startswith("no units are watched")
    assert main(["units", "enable", "nginx.service", "!a*", r"dev-a\x2db.service"]) == 0
    assert capsys.readouterr().out == "nginx.service: enabled\n!a*: enabled\ndev-a\\x2db.service: enabled\n"
    assert called(folder) == RELOAD
    assert config.load().units == ("nginx.service", "!a*", r"dev-a\x2db.service")
    assert [file.name for file in folder.iterdir()] == ["units.yaml"]
    assert main(["units", "enable", "nginx.service", "*.scope"]) == 0
    assert capsys.readouterr().out == "nginx.service: enabled already\n*.scope: enabled\n"
    assert main(["units", "disable", "!a*", r"dev-a\x2db.service", "other"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("other: not enabled\n")
    assert "Still enabled: nginx.service '*.scope'" in printed.err
    assert main(["units", "status", "--json"]) == 0
    path = str(folder / "units.yaml")
    expected = [{"glob": glob, "path": path} for glob in ("nginx.service", "*.scope")]
    assert json.loads(capsys.readouterr().out) == {"globs": expected, "exact": []}
    assert main(["units", "disable", "init", "nginx", "a.scope"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "init: not enabled",
        "nginx: not enabled. Did you mean nginx.service?",
        "a.scope: not enabled, but *.scope selects a.scope. To exclude it: resctrlctl units enable '!a.scope'",
    ]
    assert main(["units", "disable", "nginx.service", "*.scope", "--quiet"]) == 0
    assert list(folder.iterdir()) == []


def test_globs_of_other_files_are_shown_and_not_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder.parent / "resctrlmond.yaml"
    file.write_text("units: ['*.service']\n")
    assert main(["units", "enable", "*.service"]) == 0
    assert not folder.exists()
    assert called(folder) == []
    assert main(["units", "enable", "*.scope"]) == 0
    capsys.readouterr()
    assert main(["units"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["units", "status", "--no-legend", "--full"]) == 0
    # As the completions of shells read it.
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == rows[1:]
    assert rows[1:3] == [["*.service", str(file)], ["*.scope", str(folder / "units.yaml")]]
    assert main(["units", "disable", "*.scope", "*.service"]) == 1
    assert f"'*.service' is set in {file}: remove it there" in capsys.readouterr().err
    assert config.load().units == ("*.service", "*.scope")
    file.write_text("units: ['*.service', '*.scope']\n")
    assert main(["units", "disable", "*.scope"]) == 1
    assert f"'*.scope' is set in {file}: remove it there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["enable", "ok.service", "nginx"], "Did you mean nginx.service?"),
        (["enable", "a b"], "not the name or glob of a unit"),
        (["enable"], "enable: GLOB is missing"),
        (["disable"], "disable: GLOB is missing"),
        (["status", "x"], "an argument is not allowed"),
    ],
)
def test_wrong_requests_change_nothing(
    arguments: list[str], error: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["units", *arguments]) == USAGE
    assert error in capsys.readouterr().err
    assert not folder.exists()
    assert called(folder) == []


def test_output_that_cannot_be_written_is_not_taken_for_a_file(environment: dict[str, str]) -> None:
    with Path("/dev/full").open("w") as full:
        words = command("/none", "units")
        done = subprocess.run(words, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "resctrlctl: cannot write the output: No space left on device\n")


def test_drop_in_that_cannot_be_written_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert main(["units", "enable", "*.scope"]) == 1
    path = folder / "units.yaml"
    assert capsys.readouterr().err == f"resctrlctl: cannot watch units: {path}: No space left on device\n"
    assert not path.exists()


def test_wrong_file_is_reported_with_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    (folder / "a.yaml").write_text("units:\n- nginx\n")
    assert main(["units", "enable", "*.scope"]) == 1
    assert f"{folder}/a.yaml:2: units: 'nginx' is not a glob" in capsys.readouterr().err
    assert not (folder / "units.yaml").exists()


def test_daemon_that_does_not_run_is_not_reloaded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systemctl(folder.parent, "exit 3")
    assert main(["units", "enable", "*.scope"]) == 0
    assert "applies when it starts" in capsys.readouterr().err
    assert called(folder) == RELOAD[:1]


def test_failed_reload_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systemctl(folder.parent, '[ "$1" = is-active ] || { echo "Job failed." >&2; exit 1; }')
    assert main(["units", "enable", "*.scope"]) == 1
    assert "could not be reloaded: Job failed." in capsys.readouterr().err


def test_denied_access_has_its_exit_status(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.makedirs", refuse)
    assert main(["units", "enable", "*.scope"]) == DENIED
    assert "Run resctrlctl as root" in capsys.readouterr().err
