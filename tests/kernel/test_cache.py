# SPDX-License-Identifier: Apache-2.0
"""A build is complete or missing, is done by one run at a time, and old builds are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]
    assert (cache.artifact("thing", "1", lambda place: (place / "whole").touch()) / "whole").exists()


def test_leftovers_of_killed_and_unused_builds_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".building-thing=killed").mkdir()
    for name, age in (("thing-old", cache.KEEP_UNUSED_SECONDS + 60), ("thing-young", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, time.time() - age))
    cache.artifact("thing", "new", lambda place: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing-new", "thing-young", "thing.lock"]


def test_build_states_how_long_unused_ones_are_kept(tmp_path: Path) -> None:
    for name, age in (("thing-old", 70), ("thing-young", 0), ("other-old", 70)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, time.time() - age))
    cache.artifact("thing", "new", lambda place: None, keep_unused_seconds=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-old", "thing-new", "thing-young", "thing.lock"]


def test_a_second_run_waits_and_builds_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from tests.kernel.machine import cache\n"
        "def build(place): print('building', flush=True); (place / 'by').write_text(input())\n"
        "print((cache.artifact('thing', '1', build) / 'by').read_text())"
    )

    def run() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, cwd=PROJECT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    with run() as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "building\n"
        with run() as second:
            assert second.stderr is not None
            assert "waiting" in second.stderr.readline()
            assert first.communicate("first\n", timeout=60)[0] == "first\n"
            assert second.communicate("second\n", timeout=60)[0] == "first\n"


def test_builds_of_different_names_run_concurrently(tmp_path: Path) -> None:
    met = threading.Barrier(2, timeout=60)

    def build(place: Path) -> None:
        met.wait()
        (place / "whole").touch()
        met.wait()

    with ThreadPoolExecutor() as pool:
        for made in pool.map(lambda name: cache.artifact(name, "1", build), ("state-cat", "state-cat-6.12")):
            assert (made / "whole").exists()


def test_build_does_not_remove_a_running_build_of_a_longer_name(tmp_path: Path) -> None:
    def build(place: Path) -> None:
        cache.artifact("state-cat", "1", lambda other: None)
        (place / "whole").touch()

    assert (cache.artifact("state-cat-6.12", "1", build) / "whole").exists()


def test_key_distinguishes_its_parts(tmp_path: Path) -> None:
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
