# SPDX-License-Identifier: Apache-2.0
"""Conditions on labels, in the syntax of Kubernetes' label selectors. No I/O."""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping

import msgspec

# The syntax of label names and values (Kubernetes, "Labels and Selectors", "Syntax and character set").
_WORD = "[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_PREFIX = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*"
_NAME = re.compile(rf"(?=.{{1,317}}\Z)(?:(?=[^/]{{1,253}}/){_PREFIX}/)?{_WORD}")
_VALUE = re.compile(f"(?:{_WORD})?")
_TOKEN = re.compile(r"\s*(==|!=|[=!,()<>]|[^\s=!,()<>]+)")

_EXAMPLE = 'Write it as for "kubectl -l", as in "app in (web, api), tier!=cache, !canary"'


class SelectorError(ValueError):
    """A selector that cannot be parsed. The text states the error and its position."""


class Operator(enum.Enum):
    """Comparisons of a label. ``LIKE`` is that of nri-resctrl-mon: a missing label is equal to an empty one."""

    IN = "in"
    NOT_IN = "notin"
    EXISTS = "exists"
    ABSENT = "!"
    LIKE = "like"


class Requirement(msgspec.Struct, frozen=True):
    """One condition on the labels of a pod."""

    label: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels match. Labels without this one match NOT_IN."""
        match self.operator:
            case Operator.EXISTS:
                return self.label in labels
            case Operator.ABSENT:
                return self.label not in labels
            case Operator.LIKE:
                return labels.get(self.label, "") in self.values
            case Operator.IN:
                return self.label in labels and labels[self.label] in self.values
            case Operator.NOT_IN:
                return self.label not in labels or labels[self.label] not in self.values

    def __str__(self) -> str:
        values = ", ".join(sorted(self.values))
        match self.operator:
            case Operator.EXISTS:
                return self.label
            case Operator.ABSENT:
                return f"!{self.label}"
            case Operator.LIKE:
                return f"{self.label}: {values}"
            case _:
                return f"{self.label} {self.operator.value} ({values})"


def equal_labels(labels: Mapping[str, str]) -> tuple[Requirement, ...]:
    """Return the requirements that all of these labels are equal. Raises SelectorError for an invalid label."""
    return tuple(
        Requirement(_label(name), Operator.LIKE, frozenset({_label_value(value)})) for name, value in labels.items()
    )


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """Parse a selector as kubectl does: label=value, ==, !=, in (), notin (), label, !label.

    The numeric comparisons > and < are not supported. Raises SelectorError.
    """
    tokens = deque(_tokens(text))
    found = []
    while tokens:
        found.append(_requirement(tokens))
        if tokens:
            _expect(tokens, {","})
            if not tokens:
                raise SelectorError(f"nothing follows the last comma. {_EXAMPLE}")
    return tuple(found)


def _tokens(text: str) -> Iterator[str]:
    position = 0
    text = text.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        assert found, "every character is in a token"
        yield found[1]
        position = found.end()


def _requirement(tokens: deque[str]) -> Requirement:
    if tokens[0] == "!":
        tokens.popleft()
        return Requirement(_label(_next(tokens)), Operator.ABSENT)
    label = _label(tokens.popleft())
    if not tokens or tokens[0] == ",":
        return Requirement(label, Operator.EXISTS)
    operator = _expect(tokens, {"=", "==", "!=", "in", "notin"})
    if operator in ("in", "notin"):
        return Requirement(label, Operator(operator), _set(tokens))
    value = tokens.popleft() if tokens and tokens[0] != "," else ""
    return Requirement(label, Operator.NOT_IN if operator == "!=" else Operator.IN, frozenset({_label_value(value)}))


def _set(tokens: deque[str]) -> frozenset[str]:
    _expect(tokens, {"("})
    values = set()
    while True:
        values.add(_label_value(tokens.popleft() if tokens and tokens[0] not in ",)" else ""))
        if _expect(tokens, {",", ")"}) == ")":
            return frozenset(values)


def _next(tokens: deque[str]) -> str:
    if not tokens:
        raise SelectorError(f"it ends too early. {_EXAMPLE}")
    return tokens.popleft()


def _expect(tokens: deque[str], wanted: Collection[str]) -> str:
    found = _next(tokens)
    if found not in wanted:
        raise SelectorError(f"expected {' or '.join(map(repr, sorted(wanted)))}, found {found[:64]!a}. {_EXAMPLE}")
    return found


def _label(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise SelectorError(f"{text[:64]!a} is not a valid label name")
    return text


def _label_value(text: str) -> str:
    if _VALUE.fullmatch(text) is None:
        raise SelectorError(f"{text[:64]!a} is not a valid label value")
    return text
