# SPDX-License-Identifier: Apache-2.0
"""A manager to ask, and resctrlctl as a process."""

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
    """UTC and no terminal's width, here and in processes that are started with it."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def ctl(manager: FakeManager, environment: dict[str, str]) -> Ctl:
    """Runs resctrlctl as a process of its own against the manager, with pipes for its output."""

    def call(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(manager.socket, *arguments),
            env=environment | settings,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


def command(socket: str, *arguments: str) -> list[str]:
    """The command line that runs resctrlctl from this tree, warnings being errors there too."""
    return [sys.executable, "-W", "error", "-m", "resctrlctl", "--socket", socket, *arguments]
