# SPDX-License-Identifier: Apache-2.0
"""resctrlctl hooks: links are created and removed, and other files are not changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from resctrlctl.command import main
from resctrlctl.host import hooks

NAMES = ["resctrlmon-createRuntime.json", "resctrlmon-other.json"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program that the hook files name."""
    program = tmp_path / "resctrlmon-oci-hook"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def source(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the installed hook files."""
    source = tmp_path / "installed"
    source.mkdir()
    for name in NAMES:
        (source / name).write_text(json.dumps({"version": "1.0.0", "hook": {"path": str(program)}}))
    monkeypatch.setattr(hooks, "SOURCE", str(source))
    return source


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The directory that the runtimes read. It does not exist yet."""
    return tmp_path / "share" / "hooks.d"


def call(action: str, target: Path, *options: str) -> int:
    return main(["hooks", action, "--hooks-dir", str(target), *options])


def states(target: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    assert call("status", target, "--json") == 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["hooksDir"] == str(target)
    assert [hook["path"] for hook in reply["hooks"]] == [str(target / name) for name in NAMES]
    return {hook["name"]: hook["state"] for hook in reply["hooks"]}


@pytest.mark.usefixtures("source")
def test_enable_status_and_disable(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert states(target, capsys) == dict.fromkeys(NAMES, "disabled")
    assert call("enable", target) == 0
    assert capsys.readouterr().out == "".join(f"{name}: enabled\n" for name in NAMES)
    assert json.loads((target / NAMES[0]).read_text())["version"] == "1.0.0"
    assert states(target, capsys) == dict.fromkeys(NAMES, "enabled")
    assert call("disable", target) == 0
    assert capsys.readouterr().out == "".join(f"{name}: disabled\n" for name in NAMES)
    assert list(target.iterdir()) == []


@pytest.mark.usefixtures("source")
def test_status_as_a_table(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("enable", target, "--quiet")
    assert call("status", target) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["HOOK", "STATE", "PATH"]
    assert [line.split() for line in lines[1:]] == [[name, "enabled", str(target / name)] for name in NAMES]


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(("action", "state"), [("enable", "enabled"), ("disable", "disabled")])
def test_repeated_action_changes_nothing(
    action: str, state: str, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(action, target)
    before = sorted(target.iterdir()) if target.exists() else None
    capsys.readouterr()
    assert call(action, target) == 0
    assert capsys.readouterr().out == f"the hooks are {state} already\n"
    assert (sorted(target.iterdir()) if target.exists() else None) == before


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_foreign_file_is_not_replaced_or_removed(
    kind: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.mkdir(parents=True)
    foreign = target / NAMES[1]
    if kind == "file":
        foreign.write_text("{}")
    else:
        if kind == "link":
            (tmp_path / "elsewhere").write_text("{}")
        foreign.symlink_to(tmp_path / "elsewhere")
    assert states(target, capsys)[NAMES[1]] == "foreign"
    assert call("enable", target) == 1
    assert str(foreign) in capsys.readouterr().err
    assert not (target / NAMES[0]).exists(), "enable linked a part of the hooks"
    assert call("disable", target) == 0
    assert os.listdir(target) == [NAMES[1]]


@pytest.mark.parametrize("mode", [None, 0o644])
def test_hook_without_its_program_is_not_enabled(
    mode: int | None, source: Path, program: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if mode is None:
        program.unlink()
    else:
        program.chmod(mode)
    assert call("enable", target) == 1
    error = capsys.readouterr().err
    assert str(source) in error
    assert str(program) in error
    assert not target.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"hook": 1}', '{"hook": {}}', "\xff"])
def test_damaged_hook_file_is_not_enabled(
    text: str, source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / NAMES[1]).write_bytes(text.encode("latin-1"))
    assert call("enable", target) == 1
    assert str(source / NAMES[1]) in capsys.readouterr().err
    assert not target.exists()


def test_enable_fails_without_installed_hook_files(
    source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES:
        (source / name).unlink()
    assert call("enable", target) == 1
    assert "make install" in capsys.readouterr().err


def test_disable_removes_links_to_missing_hook_files(
    source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call("enable", target)
    for name in NAMES:
        (source / name).unlink()
    source.rmdir()
    assert call("disable", target) == 0
    assert list(target.iterdir()) == []
