# SPDX-License-Identifier: Apache-2.0
"""What is built once is whole or absent, is built by one run at a time, and does not pile up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .install import PROJECT
from .machine import MissingPackagesError, cache, packages


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESCTRLMOND_CACHE", str(tmp_path))


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.folder() == tmp_path
    monkeypatch.delenv("RESCTRLMOND_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg/resctrlmond"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(place: Path) -> None:
        (place / "half").write_text("half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        cache.artifact("thing", "1", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert (cache.artifact("thing", "1", lambda place: (place / "whole").touch()) / "whole").exists()


def test_leftovers_of_killed_and_unused_builds_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".building-thing-killed").mkdir()
    for name, age in (("thing-old", cache.KEEP_UNUSED_SECONDS + 60), ("thing-young", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, time.time() - age))
    cache.artifact("thing", "new", lambda place: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "thing-new", "thing-young"]


def test_a_second_run_waits_and_builds_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, time; from tests.kernel.machine import cache\n"
        "def build(place): (place / 'by').write_text(sys.argv[1]); print('building', flush=True); time.sleep(1)\n"
        "print((cache.artifact('thing', '1', build) / 'by').read_text())"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen([*command, "first"], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "building\n"
        second = subprocess.run([*command, "second"], cwd=PROJECT, capture_output=True, text=True, check=True)
        assert first.stdout.read() == "first\n"
    assert second.stdout == "first\n"
    assert "waiting" in second.stderr


def test_a_key_tells_its_parts_apart(tmp_path: Path) -> None:
    file = tmp_path / "recipe"
    file.write_text("ab")
    assert cache.key("ab", "c") != cache.key("a", "bc")
    assert cache.key(file) == cache.key("ab") == cache.key(b"ab")


def test_all_missing_packages_are_named_to_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.PROGRAMS, "no-such-program-a", "package-a")
    monkeypatch.setitem(packages.PROGRAMS, "no-such-program-b", "package-b")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingPackagesError, match="apt-get install -y --no-install-recommends package-a package-b"):
        packages.require()
