# SPDX-License-Identifier: Apache-2.0
"""Profiles with companions: only files that no user but root can change may define them, and their templates."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.configuration.profile_files import check, load
from resctrlmond.configuration.profile_syntax import parse
from resctrlmond.daemon.companion_files import CompanionFiles
from resctrlmond.workloads.profiles.companion_settings import VARIABLES, render

EXAMPLES = Path(__file__).parents[2] / "packaging" / "examples"
INLINE = "profiles: {a: {companion: {command: [/bin/true], template: $KEY}}}"
OTHER_USER = 65534


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of profiles that only root can write."""
    found = tmp_path / "profiles.d"
    found.mkdir(mode=0o755)
    (found / "10.yaml").write_text(INLINE)
    return found


def refusal(directory: Path) -> str:
    """Return why the profiles are refused; "" if they are not."""
    try:
        load((str(directory),), with_companions=True)
    except ConfigError as error:
        assert error.remedy
        return str(error)
    return ""


def link_to_file_of_other(directory: Path) -> None:
    elsewhere = directory.parent / "elsewhere"
    elsewhere.mkdir()
    os.rename(directory / "10.yaml", elsewhere / "10.yaml")
    (directory / "10.yaml").symlink_to(elsewhere / "10.yaml")
    os.chown(elsewhere, OTHER_USER, -1)


def link_by_folder_of_other(directory: Path) -> None:
    """The first link and the file are of root, and another user can change the link in between."""
    own, others = directory.parent / "own", directory.parent / "others"
    own.mkdir()
    others.mkdir()
    os.rename(directory / "10.yaml", own / "10.yaml")
    (others / "link").symlink_to(own / "10.yaml")
    (directory / "10.yaml").symlink_to("../others/link")
    os.chown(others, OTHER_USER, -1)


def link_to_folder_of_other(directory: Path) -> None:
    own, others = directory.parent / "own", directory.parent / "others"
    others.mkdir()
    os.rename(directory, own)
    (others / "link").symlink_to(own)
    directory.symlink_to(others / "link")
    os.chown(others, OTHER_USER, -1)


def link_of_other(directory: Path) -> None:
    own = directory.parent / "own"
    os.rename(directory, own)
    directory.symlink_to("own")
    os.chown(directory, OTHER_USER, -1, follow_symlinks=False)


def link_of_root(directory: Path) -> None:
    own = directory.parent / "own"
    os.rename(directory, own)
    directory.symlink_to("./own/../own/.")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda top: None, ""),
        (lambda top: os.chown(top / "10.yaml", OTHER_USER, -1), r"10.yaml is owned by the user 65534"),
        (lambda top: (top / "10.yaml").chmod(0o664), "users other than root can write .*10.yaml"),
        (lambda top: (top / "10.yaml").chmod(0o646), "users other than root can write .*10.yaml"),
        (lambda top: os.chown(top, OTHER_USER, -1), "profiles.d is owned by the user 65534"),
        (lambda top: top.chmod(0o775), "users other than root can write .*profiles.d"),
        (lambda top: top.parent.chmod(0o777), "users other than root can write "),
        (link_to_file_of_other, "elsewhere is owned by the user 65534"),
        (link_by_folder_of_other, "others is owned by the user 65534"),
        (link_to_folder_of_other, "others is owned by the user 65534"),
        (link_of_other, "profiles.d is owned by the user 65534"),
        (link_of_root, ""),
    ],
)
def test_file_that_another_user_can_change_defines_no_companion(
    directory: Path, change: Callable[[Path], None], expected: str
) -> None:
    change(directory)
    found = refusal(directory)
    if expected:
        assert found.startswith(f"{directory}/10.yaml:1: profile a: a companion runs as root, and ")
    assert re.search(expected, found), found
    # For what needs no trust, as the NRI plugin and "profiles list" read them.
    assert load((str(directory),)).by_name
    (directory / "10.yaml").unlink()
    (directory / "10.yaml").write_text("profiles: {a: }")
    assert refusal(directory) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'command: [/bin/x, "a\0b"]', "an argument has a null character"),
        (r'command: [/bin/x, "a\ud800"]', r"a character cannot be encoded in UTF-8: '\ud800'"),
        (r'command: [/bin/x], template_format: plain, template: "\udfff"', r"in UTF-8: '\udfff'"),
    ],
)
def test_text_that_no_process_can_get_is_refused(directory: Path, text: str, expected: str) -> None:
    """The bus ends the connection of a sender of such a text, which starts and stops all other companions too."""
    (directory / "10.yaml").write_text(f"profiles:\n  a:\n    companion: {{{text}}}")
    assert refusal(directory).startswith(f"{directory}/10.yaml:3: ")
    assert expected in refusal(directory)


def test_dots_after_a_link_are_those_of_its_target(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "others" / "inner").mkdir(parents=True)
    (tmp_path / "others" / "template").write_text("key: $KEY")
    (tmp_path / "link").symlink_to("others/inner")
    os.chown(tmp_path / "others", OTHER_USER, -1)
    (directory / "10.yaml").write_text(
        f"profiles: {{a: {{companion: {{command: [/bin/true], template_file: {tmp_path}/link/../template}}}}}}"
    )
    assert "others is owned by the user 65534" in refusal(directory)


def test_template_is_read_from_a_file_of_root(directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("key: $KEY")
    (directory / "10.yaml").write_text(
        f"profiles: {{a: {{companion: {{command: [/bin/true], template_file: {template}}}}}}}"
    )
    profile = load((str(directory),), with_companions=True).find("a")
    assert profile is not None
    assert profile.companion is not None
    assert profile.companion.template == "key: $KEY"
    template.chmod(0o602)
    assert f"users other than root can write {template}" in refusal(directory)
    template.chmod(0o600)
    template.write_text("key: $KEI")
    assert f"profile a: {template}: there is no variable $KEI" in refusal(directory)
    template.write_bytes(b"\xff")
    assert f"the template {template} is not UTF-8" in refusal(directory)
    template.write_text("#" * 70000)
    assert f"the template {template} is larger than 65536 bytes" in refusal(directory)
    template.unlink()
    assert f"cannot read the template {template}: No such file or directory" in refusal(directory)
    os.mkfifo(template)
    assert f"cannot read the template {template}: Invalid argument" in refusal(directory)


def test_checked_file_may_be_in_the_folder_of_another_user(directory: Path, tmp_path: Path) -> None:
    new = tmp_path / "20.yaml"
    new.write_text(INLINE.replace("a:", "b:"))
    os.chown(new, OTHER_USER, -1)
    assert set(check(str(new), (str(directory),)).by_name) == {"a", "b"}
    os.chown(directory / "10.yaml", OTHER_USER, -1)
    with pytest.raises(ConfigError, match=r"10\.yaml is owned by the user 65534"):
        check(str(directory / "10.yaml"), (str(directory),))


def test_example_for_memtierd_gets_its_values() -> None:
    profiles = parse((EXAMPLES / "memtierd.yaml").read_bytes(), "memtierd.yaml")
    path = "/sys/fs/cgroup/kubepods.slice/cri-containerd-5e.scope"
    for profile in profiles.by_name.values():
        assert profile.companion is not None
        text = render(profile.companion, dict.fromkeys(VARIABLES, path)).text
        assert text is not None
        document = yaml.safe_load(text)
        inner = yaml.safe_load(document["policy"]["config"])
        assert inner["pidwatcher"]["config"] == f"cgroups:\n  - {path}\n"
    pod = yaml.safe_load((EXAMPLES / "pods" / "memtierd-pod.yaml").read_text())
    assert {*pod["metadata"]["annotations"].values()} == {*profiles.by_name, ""}


def test_files_of_a_companion_are_for_root_only(tmp_path: Path) -> None:
    files = CompanionFiles(str(tmp_path))
    assert not files.exists
    files.write("key", "7", "config.yaml", "a: 1\n")
    files.write("other", "8", "config", None)
    assert files.runs() == {"key": "7", "other": "8"}
    assert (tmp_path / "companions" / "key" / "config.yaml").read_text() == "a: 1\n"
    for path in (tmp_path / "companions").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    (tmp_path / "companions" / "key" / "left").touch()
    files.write("key", "9", "config.yaml", "a: 2\n")
    assert sorted(os.listdir(tmp_path / "companions" / "key")) == [".run", "config.yaml"]
    files.remove("key")
    files.remove("key")
    assert files.exists
    files.remove("other")
    assert not files.exists


def test_links_are_not_followed(tmp_path: Path) -> None:
    files = CompanionFiles(str(tmp_path / "run"))
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / ".run").write_text("7")
    (tmp_path / "run" / "companions").mkdir(parents=True)
    (tmp_path / "run" / "companions" / "key").symlink_to(kept)
    assert files.runs() == {"key": ""}
    files.write("key", "8", "config", "x")
    assert sorted(os.listdir(kept)) == [".run"]
    files.remove("key")
    (tmp_path / "run" / "companions").symlink_to(kept)
    with pytest.raises(NotADirectoryError):
        files.write("key", "8", "config", "x")
    assert sorted(os.listdir(kept)) == [".run"]
