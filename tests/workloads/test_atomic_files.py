# SPDX-License-Identifier: Apache-2.0
"""A file is replaced in one step, with exactly its mode."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.workloads import atomic_files
from resctrlmond.workloads.atomic_files import read_file, set_umask, write_file


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
