# SPDX-License-Identifier: Apache-2.0
"""The changes of a module that a random mutant can be: each is one small edit of its text.

Comments, docstrings, type annotations, texts of the log, messages of errors and assertions are never changed, nor are
the lengths of times, of which a second more or less is not a bug, and units.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_LOGS = {"log", "_log", "logging"}
_WITHOUT_EFFECT = {"overload", "override", "final", "abstractmethod", "runtime_checkable"}
_NOT_CHANGED = {"annotation", "returns", "decorator_list", "bases", "pattern", "type_params", "exc"}
_TIME = re.compile(r"(?:^|_)(?:timeout|stacklevel|[nm]?s|seconds)$", re.IGNORECASE)
_PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
]
_OTHER = dict(_PAIRS) | {second: first for first, second in _PAIRS}
# By the first word of the return type; None for all others.
_DEFAULTS = {"int": "0", "str": '""', "bytes": 'b""', "list": "[]", "dict": "{}", "set": "set()"}
_DEFAULTS |= {"frozenset": "frozenset()", "Sequence": "()", "Iterable": "()", "Mapping": "{}"}


@dataclass(frozen=True, slots=True)
class Change:
    """Replace the bytes from ``start`` to ``end`` by ``new``.

    ``lines`` are the line of the change and the first line of its statement. ``function`` has the names of the
    function and classes around it, "" for the module. ``text`` shows the change.
    """

    start: int
    end: int
    new: str
    lines: tuple[int, int]
    function: str
    text: str

    def applied(self, source: str) -> str:
        """Return the source with the change."""
        whole = source.encode()
        return (whole[: self.start] + self.new.encode() + whole[self.end :]).decode()


def changes(source: str) -> list[Change]:
    """Return all changes of a module, in the order of its text."""
    found = {(one.start, one.end, one.new): one for one in _Module(source).changes()}
    return [found[place] for place in sorted(found)]


class _Module:
    """The text of a module, and the function and the line of the statement that is looked at."""

    def __init__(self, source: str) -> None:
        self._bytes = source.encode()
        self._tree = ast.parse(source)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line.encode()))
        self._around: list[_Definition] = []
        self._line = 0

    def changes(self) -> Iterator[Change]:
        return self._below(self._tree)

    def _below(self, node: ast.AST) -> Iterator[Change]:
        """Return the changes of the parts of a node."""
        for field, value in ast.iter_fields(node):
            if field not in _NOT_CHANGED and not (isinstance(node, ast.ClassDef) and field == "keywords"):
                for part in value if isinstance(value, list) else [value]:
                    if isinstance(part, ast.AST) and not _is_left_alone(part, is_global=not self._around):
                        yield from self._of(part)

    def _of(self, node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            self._line = node.lineno
        if isinstance(node, _Definition):
            self._around.append(node)
            yield from self._without_decorators(node)
            yield from self._below(node)
            self._around.pop()
            return
        if isinstance(node, ast.stmt):
            yield from self._of_statement(node)
        elif isinstance(node, ast.expr):
            yield from (self._change(node, new) for new in self._other_values(node))
        for condition in _conditions(node):
            if not _is_negated_otherwise(condition):
                yield self._change(condition, f"(not ({self._text(condition)}))")
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            kind = self._text(node.type)
            if kind not in ("Exception", "BaseException"):
                yield self._change(node.type, "Exception", f"except {kind} -> except Exception")
            yield self._change(node.type, "()", f"except {kind} -> not caught")
        yield from self._below(node)

    def _without_decorators(self, node: _Definition) -> Iterator[Change]:
        for decorator in node.decorator_list:
            name = self._text(decorator)
            if name.split(".")[-1] not in _WITHOUT_EFFECT:
                start = self._bytes.rindex(b"@", 0, self._change(decorator, "").start)
                yield self._change(decorator, "", f"without @{name}", start)

    def _of_statement(self, node: ast.stmt) -> Iterator[Change]:
        is_start = bool(self._around) and self._around[-1].name in ("__init__", "__post_init__")
        if _is_effect(node) and not is_start:
            yield self._change(node, "pass")
        if isinstance(node, ast.Return) and node.value is not None:
            function, value = self._around[-1], self._text(node.value)
            kind = (
                ast.unparse(function.returns) if not isinstance(function, ast.ClassDef) and function.returns else ""
            )
            default = "None" if "None" in kind else _DEFAULTS.get(re.split(r"\W", kind)[0], "None")
            new = f"not ({value})" if kind == "bool" else default
            if new != value:
                yield self._change(node, f"return {new}")

    def _other_values(self, node: ast.expr) -> Iterator[str]:
        match node:
            case ast.Compare(left, ops, right):
                for at, operator in enumerate(ops):
                    other = [*ops[:at], _OTHER[type(operator)](), *ops[at + 1 :]]
                    yield f"({ast.unparse(ast.Compare(left, other, right))})"  # type: ignore[arg-type]
            case ast.BoolOp(op, values):
                yield f"({ast.unparse(ast.BoolOp(_OTHER[type(op)](), values))})"  # type: ignore[arg-type]
            case ast.BinOp(left, ast.Add() | ast.Sub() as op, right) if not (_is_text(left) or _is_text(right)):
                yield f"({ast.unparse(ast.BinOp(left, _OTHER[type(op)](), right))})"  # type: ignore[arg-type]
            case ast.UnaryOp(ast.Not(), operand):
                yield f"({self._text(operand)})"
            case ast.Constant(bool()):
                yield str(not node.value)
            case ast.Constant(int() | float()):
                yield from (f"({ast.unparse(node)} + 1)", f"({ast.unparse(node)} - 1)")
            case ast.Name("min" | "max", ast.Load()):
                yield "max" if node.id == "min" else "min"

    def _change(self, node: ast.stmt | ast.expr, new: str, text: str = "", start: int = -1) -> Change:
        begin = self._starts[node.lineno - 1] + node.col_offset if start < 0 else start
        end = self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        shown = text or f"{self._bytes[begin:end].decode()} -> {new}"
        function = ".".join(one.name for one in self._around)
        return Change(begin, end, new, (node.lineno, self._line), function, " ".join(shown.split()))

    def _text(self, node: ast.expr) -> str:
        change = self._change(node, "")
        return self._bytes[change.start : change.end].decode()


def _is_left_alone(node: ast.AST, *, is_global: bool) -> bool:
    """Whether nothing in it is changed. In Python 3.11, the parts of an f-string have no places."""
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.Call(ast.Attribute(ast.Name(name))):
            return name in _LOGS
        case ast.If(test):
            return "TYPE_CHECKING" in ast.unparse(test) or "__main__" in ast.unparse(test)
        case ast.Assign([ast.Name(name)]) if is_global:
            return name == "__all__" or bool(_TIME.search(name))
        case ast.keyword(str(name)):
            return name == "strict" or bool(_TIME.search(name))
        case ast.Subscript(ast.Name("Literal" | "Annotated")):
            return True
        case ast.Constant(float(number)):
            return number >= 1000  # a unit: 1e9 ns
        case ast.BoolOp(ast.Or(), [ast.Attribute(attr="errno"), ast.Constant()]):
            return True  # An error of the kernel has a number.
        case ast.Expr(value):
            return _is_left_alone(value, is_global=is_global)
    return False


def _is_effect(node: ast.stmt) -> bool:
    """Whether the statement can be left out, and something is not done then."""
    match node:
        case ast.Expr(ast.Call() | ast.Await()) | ast.Raise() | ast.Continue() | ast.Return(None) | ast.Delete():
            return True
        case ast.Assign([ast.Attribute() | ast.Subscript(), *_]) | ast.AugAssign():
            return True
    return False


def _conditions(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If(test) | ast.While(test) | ast.IfExp(test) | ast.match_case(guard=ast.expr() as test):
            return [test]
        case ast.comprehension(ifs=tests):
            return tests
    return []


def _is_negated_otherwise(node: ast.expr) -> bool:
    match node:
        case ast.UnaryOp(ast.Not()) | ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot()]):
            return True
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return True
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
