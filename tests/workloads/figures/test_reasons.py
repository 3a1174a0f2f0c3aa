# SPDX-License-Identifier: Apache-2.0
"""The table of reasons is complete, and each use of a reason has its values."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest

import resctrlmond.daemon
import resctrlmond.workloads
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.model.states import Quality
from tests.workloads.known_reasons import reasons_in

_FOLDERS = (resctrlmond.workloads, resctrlmond.daemon)
_MODULES = [ast.parse(path.read_text()) for folder in _FOLDERS for path in Path(folder.__path__[0]).rglob("*.py")]


def fields(reason: Reason) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(reason.template) if field}


def named(node: ast.AST) -> Reason | None:
    """Return the reason that an expression such as ``Reason.LOST`` names."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason":
        return Reason[node.attr]
    return None


def test_each_reason_is_used() -> None:
    assert {reason for module in _MODULES for node in ast.walk(module) if (reason := named(node))} == set(Reason)


def test_each_text_gets_its_values() -> None:
    """A missing value would be an error when the daemon has to report the reason."""
    texts = [
        (reason, {keyword.arg for keyword in call.keywords})
        for module in _MODULES
        for call in ast.walk(module)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "text"
        if (reason := named(call.func.value))
    ]
    doubts = [
        (reason, {keyword.arg for keyword in call.keywords if keyword.arg != "events"})
        for module in _MODULES
        for call in ast.walk(module)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "doubt"
        if (reason := named(call.args[0]))
    ]
    texts += doubts
    assert len(texts) > 40
    assert {reason for reason, _ in texts} == set(Reason)
    assert [(reason, values) for reason, values in texts if values != fields(reason)] == []


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_recognized_by_its_text(reason: Reason) -> None:
    assert Quality.EXACT not in reason.qualities
    text = reason.text(**dict.fromkeys(fields(reason), "x"))
    assert reasons_in(f"{text}; {Reason.NO_BASELINE.text()}") == [reason, Reason.NO_BASELINE]
    assert reasons_in(f"{text}; other") is None or reason.template.endswith("}")
