# SPDX-License-Identifier: Apache-2.0
"""resctrlctl imports only the modules that its verb needs: all of the time until a verb begins is imports."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from resctrlctl.arguments import VERBS
from resctrlmond import __version__
from tests.ctl.conftest import ROOT
from tests.ctl.fake_manager import FakeManager

MAIN = """
import os, sys
os._exit = lambda status: print('modules:', *sys.modules, file=sys.stderr)
from resctrlctl.__main__ import main
main()
"""
# The lower layers, which only the daemon and the view without it need, and modules of which one costs milliseconds.
ENGINE = {
    "resctrlmond.resctrl.tree",
    "resctrlmond.resctrl.counters",
    "resctrlmond.resctrl.bandwidth",
    "resctrlmond.resctrl.mounts",
    "resctrlmond.workloads.model.workload",
    "resctrlmond.workloads.figures.accounting",
    "resctrlmond.workloads.model.pods",
    "resctrlmond.workloads.records.snapshot",
    "resctrlmond.workloads.records.store",
    "resctrlmond.workloads.manager",
    "resctrlmond.api.errors",
    "resctrlmond.api.translate",
    "resctrlmond.api.verbs",
    "resctrlmond.daemon",
    "resctrlctl.workloads.tree_view",
    "asyncio",
    "bz2",
    "ctypes",
    "dataclasses",
    "dbus_fast",
    "logging",
    "lzma",
    "rich",
    "shutil",
    "subprocess",
    "yaml",
}
VERB_MODULES = {
    "resctrlctl.workloads.queries",
    "resctrlctl.workloads.control",
    "resctrlctl.host.hooks",
    "resctrlctl.run.verb",
}
# Modules that no command line needs before its verb is called.
INTERFACE = {
    "_socket",
    "json",
    "threading",
    "typing",
    "resctrlctl.connection.daemon",
    "resctrlctl.screen.output",
    "resctrlctl.connection.replies",
}
# Modules that verbs do without: the import of each takes a twentieth of the time of a verb or more.
AVOIDED = {"importlib", "locale", "msgspec", "resctrlmond.api.types", "socket", "typing", "typing_extensions"}


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Without the module site, because the .pth files of an environment for development import modules too.
    packages = str(Path(msgspec.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-S", "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), packages])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def imported(*arguments: str) -> set[str]:
    """Return the modules that resctrlctl imports for a command line."""
    done = run(MAIN, *arguments)
    modules = set(done.stderr.rpartition("modules:")[2].split())
    assert "resctrlctl.command" in modules, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return modules


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["run", "--help"], ["bogus"], ["list", "--bogus"]], ids=" ".join
)
def test_version_help_and_errors_import_no_verb(arguments: list[str]) -> None:
    modules = imported("--socket", "/none", *arguments)
    assert sorted(modules & (ENGINE | VERB_MODULES | INTERFACE)) == []


def test_version_alone_does_not_import_the_parser() -> None:
    modules = imported("--version")
    assert sorted(modules & (ENGINE | VERB_MODULES | INTERFACE | {"argparse", "resctrlctl.arguments"})) == []


@pytest.mark.parametrize(
    ("arguments", "module"),
    [(["list"], "queries"), (["show", "web"], "queries"), (["release", "web"], "control")],
    ids=["list", "show", "release"],
)
def test_verb_imports_neither_the_engine_nor_other_verbs(
    arguments: list[str], module: str, manager: FakeManager
) -> None:
    manager.add("web")
    modules = imported("--socket", manager.socket, *arguments)
    assert modules & VERB_MODULES == {f"resctrlctl.workloads.{module}"}
    assert sorted(modules & (ENGINE | {"threading"})) == []


def test_run_imports_neither_the_engine_nor_other_verbs(manager: FakeManager) -> None:
    modules = imported("--socket", manager.socket, "run", "--", "true")
    assert modules & VERB_MODULES == {"resctrlctl.run.verb"}
    assert sorted(modules & ENGINE) == []


@pytest.mark.parametrize(
    "arguments",
    [
        *(["list"], ["list", "--json"], ["list", "--filter", "state=active"], ["show", "web"], ["run", "--", "true"]),
        *(["top", "-b", "-n", "1", "-d", "0.5"], ["release", "web"]),
    ],
    ids=" ".join,
)
def test_verb_does_without_modules_that_take_long(arguments: list[str], manager: FakeManager) -> None:
    manager.add("web")
    modules = imported("--socket", manager.socket, *arguments)
    assert "resctrlctl.connection.replies" in modules
    assert sorted(modules & (AVOIDED | ENGINE)) == []


def test_list_and_run_do_not_import_what_only_other_verbs_need(manager: FakeManager) -> None:
    assert "resctrlctl.connection.host_replies" not in imported("--socket", manager.socket, "list")
    modules = imported("--socket", manager.socket, "run", "--", "true")
    assert sorted(modules & {"resctrlctl.connection.host_replies", "datetime", "encodings.ascii"}) == []


def test_list_of_workloads_does_not_import_the_screens_of_other_verbs(manager: FakeManager) -> None:
    manager.add("web")
    assert "resctrlctl.workloads.render" not in imported("--socket", manager.socket, "list")


def test_exit_does_not_free_the_imported_modules() -> None:
    code = "import atexit; from resctrlctl.__main__ import main; atexit.register(print, 'freed'); main()"
    done = run(code, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"resctrlctl {__version__}\n", "")


def test_table_of_verbs_names_functions() -> None:
    for name, (_, place, _) in VERBS.items():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(f"resctrlctl.{module}"), function)), name
