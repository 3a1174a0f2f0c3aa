# SPDX-License-Identifier: Apache-2.0
"""Check docstrings, comments, names and commit subjects for words that a stranger does not understand."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("resctrlmond", "resctrlctl", "tests")

# A sentence that begins like this has no verb, or no noun as its subject.
_FUNCTION_WORD = re.compile(r"(?:Who|What|Whose|Which|Of)\b")
# Patterns without false alarms only: "there is no X", "is no longer" and "users who" are plain English.
_DIALECT = {
    "is no": re.compile(
        r"(?<!\bthere )\b(?:is|are|was|were) no (?!(?:longer|more|less|fewer|better|other|earlier|later)\b)", re.I
    ),
    "who": re.compile(r"(?<!user )(?<!users )(?<!people )(?<!administrator )(?<!administrators )\bwho\b", re.I),
    "whoever": re.compile(r"\bwho(?:so)?ever\b", re.I),
    "told": re.compile(r"\btold\b|\btells? of\b", re.I),
    "noted": re.compile(r"\bnoted\b", re.I),
    "somebody": re.compile(r"\b(?:some|any|every)body\b", re.I),
    "of ours": re.compile(r"\bof ours\b", re.I),
    "mended": re.compile(r"\bmended\b", re.I),
}
_TEST_NAME = re.compile(
    r"test_(?:who|what|whose|which|of)_|(?<!_there)_(?:is|are)_no_(?!longer_|more_)"
    r"|_(?:who|whoever|told|tells?|said|says?|noted|(?:some|any|every)body|ours)(?:_|$)"
)
# Nouns that end in -ing.
_NOUNS = frozenset({"Accounting", "Finding", "Listing", "Reading", "Ring", "String"})

_SUBJECT = re.compile(r"[a-z0-9._-]+: \S.*")
MAX_SUBJECT = 72


def modules(directory: str) -> list[Path]:
    """Return the Python modules of one directory, without its subdirectories and without generated code."""
    return sorted(path for path in (ROOT / directory).glob("*.py") if not path.stem.endswith("_pb2"))


def directories() -> list[str]:
    """List all directories that have modules, relative to the project."""
    found = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    return sorted(str(directory.relative_to(ROOT)) for directory in found)


def findings(path: Path) -> list[str]:
    """List the violations in one module, with their lines."""
    source = path.read_text(encoding="utf-8")
    return [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in sorted(check(source))]


def check(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of each violation in the text of a module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("ing") and node.name.lstrip("_") not in _NOUNS:
            yield node.lineno, f"class {node.name}: use a noun"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_dialect_test(node.name):
            yield node.lineno, f"{node.name}: name the behaviour, with a noun as the subject"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield from ((node.body[0].lineno, found) for found in _of_text("docstring", " ".join(text.split())))
    for line, text in _comments(source):
        yield from ((line, found) for found in _of_text("comment", text))


def check_subject(subject: str) -> str:
    """Return what is wrong with the subject of a commit; "" if it is ``area: imperative`` and short enough."""
    if len(subject) > MAX_SUBJECT:
        return f"longer than {MAX_SUBJECT} characters: {subject}"
    return "" if _SUBJECT.fullmatch(subject) else f"not of the form 'area: imperative': {subject}"


def _is_dialect_test(name: str) -> bool:
    return name.startswith("test_") and _TEST_NAME.search(name) is not None


def _of_text(kind: str, text: str) -> Iterator[str]:
    first = _FUNCTION_WORD.match(text)
    if first:
        yield f"{kind} begins with {first[0]!r}"
    for name, pattern in _DIALECT.items():
        for found in pattern.finditer(text):
            yield f"{kind} has {name!r}: {text[max(0, found.start() - 30) : found.end() + 20]!r}"


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with its first line; successive comment lines are one comment."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        is_own_line = token.line.lstrip().startswith("#")
        if not (block and is_own_line and token.start[0] == last + 1):
            if block:
                yield first, " ".join(block)
            block, first = [], token.start[0]
        block.append(token.string.lstrip("#").strip())
        last = token.start[0] if is_own_line else 0
    if block:
        yield first, " ".join(block)


def documents() -> list[Path]:
    """List the texts that users read: manual pages, Markdown files, units, sample configurations, the catalogue."""
    return sorted([*ROOT.glob("man/*.scd"), *ROOT.glob("*.md"), *ROOT.glob("systemd/*")])


def check_document(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of each dialect pattern in a document."""
    for number, line in enumerate(text.splitlines(), 1):
        for name in ("is no", "whoever", "told", "noted", "of ours", "mended"):
            if _DIALECT[name].search(line):
                yield number, f"has {name!r}: {line.strip()!r}"
