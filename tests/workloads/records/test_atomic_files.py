# SPDX-License-Identifier: Apache-2.0
"""A file is replaced in one step, with exactly its mode."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.workloads.records import atomic_files
from resctrlmond.workloads.records.atomic_files import read_file, remove_tree, set_umask, write_file


@pytest.fixture(params=[None, 0o022, 0o077])
def umask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int | None]:
    """The umask that the daemon has set; None if it has set none."""
    monkeypatch.setattr(atomic_files, "_umask", None)
    before = os.umask(0o077)
    if request.param is not None:
        set_umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_file_has_exactly_its_mode_for_any_umask(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "k.json"
    # A daemon that was killed has left it, with another mode.
    (tmp_path / ".k.json.new").write_text("longer than the new content")
    (tmp_path / ".k.json.new").chmod(0o666)
    write_file(str(path), b"{}\n", mode)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"{}\n"
    assert os.listdir(tmp_path) == ["k.json"]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 65536, 200_000])
def test_file_of_any_size_is_read_whole(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    write_file(str(tmp_path / "k"), content)
    assert read_file(str(tmp_path / "k")) == content


def test_folder_is_removed_with_its_content_and_without_what_its_links_name(tmp_path: Path) -> None:
    kept, top = tmp_path / "kept", tmp_path / "top"
    (kept / "inner").mkdir(parents=True)
    (kept / "file").touch()
    (top / "inner" / "empty").mkdir(parents=True)
    (top / "inner" / "file").touch()
    (top / "inner" / "folder").symlink_to(kept)
    (top / "nowhere").symlink_to("missing")
    (tmp_path / "link").symlink_to(kept)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        remove_tree("top", dir_fd=folder)
    finally:
        os.close(folder)
    with pytest.raises(NotADirectoryError):
        remove_tree(str(tmp_path / "link"))
    with pytest.raises(FileNotFoundError):
        remove_tree(str(top))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link"]
    assert sorted(path.name for path in kept.iterdir()) == ["file", "inner"]


def test_daemon_does_not_load_the_formats_of_archives() -> None:
    """They take 0.8 MiB of its memory."""
    script = "import resctrlmond.daemon.daemon, sys; print({'shutil', 'lzma', 'bz2'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert done.stdout == "set()\n"
