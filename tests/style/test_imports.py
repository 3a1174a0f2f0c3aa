# SPDX-License-Identifier: Apache-2.0
"""Packages and the rooms in them import each other in one direction only."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from .english import ROOT

# The rooms of a package, from the highest: each imports only rooms below it.
ROOMS = {
    "resctrlmond.workloads": (
        *("upkeep", "rmids", "verbs", "groups", "evidence", "machine", "profiles"),
        *("records", "figures", "model"),
    ),
    "resctrlctl": (
        *("arguments", "doctor", "live", "host", "units", "run"),
        *("workloads", "connection", "screen", "base"),
    ),
}


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


@pytest.mark.parametrize("parent", ROOMS)
def test_each_room_imports_only_rooms_below_it(parent: str) -> None:
    rooms = ROOMS[parent]
    found = packages(parent)
    assert sorted(found) == sorted(rooms)
    upwards = [(room, other) for above, room in enumerate(rooms) for other in rooms[:above] if other in found[room]]
    assert upwards == []


@pytest.mark.parametrize("parent", ROOMS)
def test_rooms_do_not_import_the_modules_beside_them(parent: str) -> None:
    folder = ROOT.joinpath(*parent.split("."))
    beside = {f"{parent}.{path.stem}" for path in folder.glob("*.py")} - {f"{parent}.__init__"}
    for room in ROOMS[parent]:
        for module in (folder / room).rglob("*.py"):
            names = set(imported(module))
            assert not {name for name in names | {name.rpartition(".")[0] for name in names} if name in beside}, (
                module
            )


def test_the_varlink_and_dbus_interfaces_do_not_import_each_other() -> None:
    assert packages("resctrlmond.api") == {"varlink": set(), "dbus": set()}


def test_each_layer_imports_only_layers_below_it() -> None:
    found = packages("resctrlmond")
    assert found["host"] == found["resctrl"] == set()
    assert found["service"] == {"resctrl"}
    assert found["workloads"] == {"host", "resctrl", "service"}
    assert found["api"] == {"resctrl", "service", "workloads"}
    assert found["configuration"] == {"host", "resctrl", "workloads"}
