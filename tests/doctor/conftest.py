# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a machine as a directory, and those of resctrlctl."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ctl.conftest import ctl, environment, manager
from tests.ctl.fake_manager import FakeManager
from tests.doctor.machine_tree import MachineTree, answering_machine

__all__ = ["ctl", "environment", "machine", "manager"]


@pytest.fixture(autouse=True)
def as_root() -> None:
    """Fail as another user: only root can change the owners of files."""
    assert os.geteuid() == 0, "these tests require root"


@pytest.fixture
def machine(tmp_path: Path, manager: FakeManager) -> MachineTree:
    """A sound machine. A manager answers on its socket."""
    return answering_machine(tmp_path / "m", manager)
