# SPDX-License-Identifier: Apache-2.0
"""The packages import each other in one direction only."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from .english import ROOT


def imported(module: Path) -> Iterator[str]:
    """Return the modules and names that a module imports, also inside functions."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def packages(parent: str) -> dict[str, set[str]]:
    """Return the packages in a package, each with those that it imports."""
    own = parent.split(".")
    folder = ROOT.joinpath(*own)
    found: dict[str, set[str]] = {path.parent.name: set() for path in folder.glob("*/__init__.py")}
    for name in found:
        parts = [other.split(".") for module in (folder / name).rglob("*.py") for other in imported(module)]
        found[name] = {other[len(own)] for other in parts if other[: len(own)] == own} & found.keys() - {name}
    return found


@pytest.mark.parametrize("parent", ["resctrlmond", "resctrlmond.sim"])
def test_packages_have_no_circular_imports(parent: str) -> None:
    found = packages(parent)
    assert any(found.values())
    graphlib.TopologicalSorter(found).prepare()


def test_the_varlink_and_dbus_interfaces_do_not_import_each_other() -> None:
    assert packages("resctrlmond.api") == {"varlink": set(), "dbus": set()}


def test_each_layer_imports_only_layers_below_it() -> None:
    found = packages("resctrlmond")
    assert found["resctrl"] == set()
    assert found["workloads"] == {"resctrl"}
    assert found["api"] == {"resctrl", "workloads"}
