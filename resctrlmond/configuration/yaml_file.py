# SPDX-License-Identifier: Apache-2.0
"""Read a configuration file in YAML strictly: one mapping, each key once, each error with its line."""

from __future__ import annotations

from typing import Any

import yaml

from resctrlmond.configuration.config_file import MAX_BYTES, PLAIN_VALUE_EXPECTED, ConfigError, quoted, refuse_line

_ANCHOR = "an anchor or alias is not allowed"
_TAG = "a tag is not allowed"


def parse_mapping(data: bytes, path: str, *, max_depth: int, remedy: str) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the keys and values of a file, as nodes with their positions; an empty list if the file sets nothing.

    Lists and mappings can be nested ``max_depth`` deep below the keys; 0 accepts plain values only. Anchors, aliases
    and tags are refused before anything is built from them, so that a file can cause neither deep recursion nor
    multiplied aliases, nor choose a constructor. A key that occurs twice in one mapping is refused. ``path`` is for
    messages only, ``remedy`` is the remedy for a text with wrong syntax. Raises ConfigError.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path}: larger than {MAX_BYTES} bytes", path=path, remedy="Check that it is the right file"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        refuse_line(
            path, data.count(b"\n", 0, error.start), "the text is not UTF-8", "Save the file in that encoding"
        )
    loader: _Loader | None = None
    try:
        loader = _Loader(text, max_depth)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        refuse_line(path, line, f"the character {chr(error.character)!r} is not allowed in YAML", "Remove it")
    except _DuplicateKey as error:
        refuse_line(path, error.line, error.message, error.remedy)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = "; ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in problem:
            problem, remedy = "a tab is not allowed here", "Indent with spaces, not with tabs"
        elif problem == _ANCHOR or error.context in ("while scanning an alias", "while scanning an anchor"):
            problem, remedy = _ANCHOR, 'Quote a text that begins with "*" or "&"'
        elif problem == _TAG or error.context in ("while scanning a tag", "while parsing a tag"):
            problem, remedy = _TAG, 'Quote a text that begins with "!", or remove the tag'
        refuse_line(path, mark.line if mark else 0, problem, remedy)
    except (ValueError, OverflowError):
        # From PyYAML: a number in an escape or directive that is too large for a character or an integer.
        refuse_line(path, loader.line if loader else 0, "not valid YAML", remedy)
    if root is None or is_empty(root):
        return []
    if not isinstance(root, yaml.MappingNode):
        refuse_line(path, root.start_mark.line, "this is not a key with a value", remedy)
    return list(root.value)


def is_empty(node: yaml.Node) -> bool:
    """Return whether a value is missing: neither quotes nor "null" are written."""
    return isinstance(node, yaml.ScalarNode) and not node.value and node.style is None


def is_plain(node: yaml.Node) -> bool:
    """Return whether a node is a plain value: neither a list nor a mapping."""
    return isinstance(node, yaml.ScalarNode)


def is_mapping(node: yaml.Node) -> bool:
    """Return whether a node is a mapping."""
    return isinstance(node, yaml.MappingNode)


def entries(node: yaml.Node) -> list[yaml.Node] | None:
    """Return the entries of a list; None for a node of another kind."""
    return list(node.value) if isinstance(node, yaml.SequenceNode) else None


def construct(node: yaml.Node) -> Any:
    """Return the plain value of a node. Raises ValueError."""
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (OverflowError, yaml.YAMLError) as error:
        # OverflowError for an endless 1:59:59:..., ConstructorError for =. ValueError for 2026-99-99 is PyYAML's own.
        raise ValueError(f"not a plain value: {error}") from error


class _DuplicateKey(Exception):
    def __init__(self, key: yaml.ScalarNode, first: yaml.ScalarNode) -> None:
        self.line = key.start_mark.line
        self.message = f"{quoted(key.value)} is set a second time"
        self.remedy = f"Line {first.start_mark.line + 1} sets it already: remove one of them"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without anchors, aliases and tags, with a limited depth and without duplicate keys."""

    def __init__(self, text: str, max_depth: int) -> None:
        super().__init__(text)
        self._max_depth = max_depth
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        problem = None
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            problem = _ANCHOR
        elif event.tag is not None:
            problem = _TAG
        elif not isinstance(event, yaml.ScalarEvent) and self._depth > self._max_depth:
            problem = "lists and mappings are nested too deeply"
            if self._max_depth <= 1:
                problem = PLAIN_VALUE_EXPECTED
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        try:
            node = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        if isinstance(node, yaml.MappingNode):
            _refuse_duplicates(node)
        return node


def _refuse_duplicates(mapping: yaml.MappingNode) -> None:
    found: dict[str, yaml.ScalarNode] = {}
    for key, _ in mapping.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in found:
                raise _DuplicateKey(key, found[key.value])
            found[key.value] = key
