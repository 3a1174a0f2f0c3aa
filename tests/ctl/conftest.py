# SPDX-License-Identifier: Apache-2.0
"""Fixtures: an in-memory manager behind a real socket, and resctrlctl as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.ctl.fake_manager import FakeManager, serving

ROOT = Path(__file__).resolve().parents[2]
Ctl: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    """The in-memory manager behind a real socket."""
    with serving(tmp_path) as fake:
        yield fake


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with UTC and without COLUMNS and NO_COLOR, which also applies to this process."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def ctl(manager: FakeManager, environment: dict[str, str]) -> Ctl:
    """A function that runs resctrlctl as a process against the manager and returns its output."""

    def call(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(manager.socket, *arguments),
            env=environment | settings,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return call


def command(socket: str, *arguments: str) -> list[str]:
    """Return the command line that runs resctrlctl from this tree, with warnings as errors."""
    return [sys.executable, "-W", "error", "-m", "resctrlctl", "--socket", socket, *arguments]
