# SPDX-License-Identifier: Apache-2.0
"""Each fault of other owners of monitoring groups (peers.md) has a test that excludes it here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TOP = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("peers.md")
FAULTS = 35


def rows() -> list[list[str]]:
    """Return the rows of the page's table: number, fault, and the test that excludes it."""
    lines = (line for line in PAGE.read_text().splitlines() if re.match(r"\| [0-9]+ \|", line))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def functions(file: str) -> set[str]:
    """Return the names of the functions in a file of this tree."""
    tree = ast.parse((TOP / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_fault_has_a_row_and_its_tests_exist() -> None:
    assert [int(row[0]) for row in rows()] == list(range(1, FAULTS + 1))
    for number, fault, shown in rows():
        named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", shown)
        assert named, number
        assert len(fault) > 20, number
        for file, name in named:
            assert name in functions(file), (number, file, name)
