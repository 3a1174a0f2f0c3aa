# SPDX-License-Identifier: Apache-2.0
"""Docstrings, comments, names, documents and commit subjects are plain English."""

from __future__ import annotations

from pathlib import Path

import pytest

from .english import ROOT, check, check_document, check_subject, directories, documents, findings, modules


@pytest.mark.parametrize("directory", directories())
def test_directory_has_plain_english(directory: str) -> None:
    found = [finding for path in modules(directory) for finding in findings(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module holds."""',
        'def f():\n    """Which of them is due."""',
        "# Of all values the largest.\nx = 1",
        "x = 1  # who of them comes first",
        '"""Return an error if the text is no key."""',
        '"""Return true.\n\nThe caller is told."""',
        "# The end was noted.\nx = 1",
        "# Somebody else removed it.\nx = 1",
        "# A group\n# of ours.\nx = 1",
        "class Sweeping: pass",
        "def test_who_comes_first(): pass",
        "def test_a_class_is_no_group(): pass",
        "def test_the_caller_is_told_of_it(): pass",
        "def test_a_reply_says_so(): pass",
    ],
)
def test_checker_finds_dialect(source: str) -> None:
    assert len(list(check(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Return what the kernel wrote."""',
        '"""Return None if there is no group, or if it is no longer mounted."""',
        '"""Refuse users who are not root."""',
        "x = 1  # the kernel's own\n# Second comment, of another statement.\ny = 2",
        "class Reading: pass",
        "def test_there_is_no_group(): pass",
    ],
)
def test_checker_accepts_plain_english(source: str) -> None:
    assert list(check(source)) == []


def test_checker_reports_the_line_of_a_finding() -> None:
    assert [line for line, _ in check("x = 1\n\n# First line\n# is no key.\n")] == [3]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_document_has_plain_english(document: Path) -> None:
    found = [f"{number}: {text}" for number, text in check_document(document.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_checker_finds_dialect_in_a_document() -> None:
    found = list(check_document("There is no group.\nIt is no group.\nThe caller is told.\n"))
    assert [number for number, _ in found] == [2, 3]


@pytest.mark.parametrize("subject", ["tests: add a check", "nri: retry after EAGAIN", "sim.mount: close the pipe"])
def test_commit_subject_with_area_is_accepted(subject: str) -> None:
    assert check_subject(subject) == ""


@pytest.mark.parametrize("subject", ["Add a check", "tests:", "Tests: add a check", "tests: " + "x" * 66])
def test_commit_subject_without_area_or_too_long_is_refused(subject: str) -> None:
    assert check_subject(subject)
