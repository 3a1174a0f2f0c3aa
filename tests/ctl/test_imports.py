# SPDX-License-Identifier: Apache-2.0
"""Verbs that ask the daemon import neither its layers nor the libraries that only some verbs need."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from resctrlctl.arguments.verbs import VERBS
from tests.ctl.conftest import ROOT
from tests.ctl.fake_manager import FakeManager

MAIN = """
import atexit, sys
atexit.register(lambda: print('modules:', *sys.modules, file=sys.stderr))
from resctrlctl.__main__ import main
main()
"""
# Modules that read the resctrl filesystem, as resctrlctl does if the daemon is not running.
DAEMON = {
    "resctrlmond.daemon",
    "resctrlmond.api.verbs",
    "resctrlmond.api.translate",
    "resctrlctl.workloads.tree_view",
}
LIBRARIES = {"asyncio", "curses", "dbus_fast", "logging", "matplotlib", "pyarrow", "rich", "yaml"}


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["bogus"], ["list"], ["list", "--json"], ["show", "web"], ["release", "web"]],
    ids=" ".join,
)
def test_verb_imports_neither_the_daemon_nor_what_other_verbs_need(
    arguments: list[str], manager: FakeManager
) -> None:
    manager.add("web")
    command = [sys.executable, "-c", MAIN, "--socket", manager.socket, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    modules = set(done.stderr.rpartition("modules:")[2].split())
    assert "resctrlctl.command" in modules, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert sorted(modules & (DAEMON | LIBRARIES)) == []


def test_table_of_verbs_names_functions() -> None:
    for name, (_, place, _) in VERBS.items():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(f"resctrlctl.{module}"), function)), name
