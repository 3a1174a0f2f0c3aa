# SPDX-License-Identifier: Apache-2.0
"""Read the adapter's configuration: a YAML file with keys of nri-resctrl-mon, in the same meaning."""

from __future__ import annotations

import difflib
from typing import Any

import yaml

from resctrlmond.config import MAX_BYTES, ConfigError, read_contents, refuse_line
from resctrlmond.nri.selection import Requirement, Selection, SelectorError, equal, selector

DEFAULT_PATH = "/etc/resctrlmond/nri.yaml"

KEYS = ("namespaces", "labelSelector", "annotations")
# Keys of nri-resctrl-mon that are set elsewhere: an error is better than a key without effect.
THEIRS = {
    "resctrlPath": "Remove it: resctrlmond knows the path ('resctrl' in resctrlmond.yaml)",
    "telemetry": "Remove it: what was used is read from resctrlmond",
    "snapshotDir": "Remove it: 'groups_dir' in resctrlmond.yaml is that",
    "snapshotTTL": "Remove it: 'snapshot_ttl' in resctrlmond.yaml is that",
}


def load(path: str | None = None) -> Selection:
    """Read the selection from a file; without ``path`` from ``DEFAULT_PATH``, which may be missing. Raises
    ConfigError.
    """
    data = read_contents(path, DEFAULT_PATH, "all pods are monitored")
    return Selection() if data is None else parse(data, path or DEFAULT_PATH)


def parse(data: bytes, path: str) -> Selection:
    """Parse the selection in a file, or in the text of a runtime. ``path`` is for messages only.

    Every plain value is taken as text: the value of a label may look like a number. Raises ConfigError.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes", path=path, remedy="Is it the right file?")
    nodes = _compose(data, path)
    namespaces, annotations, requirements = frozenset[str](), frozenset[str](), tuple[Requirement, ...]()
    if "namespaces" in nodes:
        namespaces = _names(nodes["namespaces"], path, "namespaces", "a namespace")
    if "labelSelector" in nodes:
        requirements = _requirements(nodes["labelSelector"], path)
    if "annotations" in nodes:
        annotations = _names(nodes["annotations"], path, "annotations", "an annotation")
    return Selection(namespaces, requirements, annotations)


class _Loader(yaml.SafeLoader):
    """PyYAML's composer without anchors, aliases and tags, and with a limited depth."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        kind = "an anchor or alias" if isinstance(event, yaml.AliasEvent) or event.anchor is not None else ""
        kind = kind or ("a tag" if event.tag is not None else "")
        kind = kind or ("too deep a nesting" if self._depth > 8 else "")
        if kind:
            raise yaml.MarkedYAMLError(problem=f"{kind} is not taken", problem_mark=event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _compose(data: bytes, path: str) -> dict[str, yaml.Node]:
    """Return the value of each key, with its position."""
    loader: _Loader | None = None
    try:
        loader = _Loader(data.decode())
        root = loader.get_single_node()
    except UnicodeDecodeError as error:
        refuse_line(path, data.count(b"\n", 0, error.start), "not UTF-8", "Save the file in that encoding")
    except yaml.reader.ReaderError as error:
        line = data.decode().count("\n", 0, error.position)
        refuse_line(path, line, f"the character {chr(error.character)!r} is not allowed in YAML", "Remove it")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = "; ".join(part for part in (error.context, error.problem) if part)
        refuse_line(path, mark.line if mark else 0, what, "See resctrlmon-nri(8)")
    except (ValueError, OverflowError):
        # PyYAML raises these for a number in an escape or a directive that is out of range.
        refuse_line(path, loader.line if loader else 0, "not valid YAML", "See resctrlmon-nri(8)")
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
        return {}
    if not isinstance(root, yaml.MappingNode):
        refuse_line(path, root.start_mark.line, "no key and value", "See resctrlmon-nri(8)")
    found: dict[str, yaml.Node] = {}
    for key, value in root.value:
        name, line = _text(key, path, "a key"), key.start_mark.line
        if name in THEIRS:
            refuse_line(path, line, f"{name} is not a key of this adapter", THEIRS[name])
        if name not in KEYS:
            close = difflib.get_close_matches(name[:64], KEYS, n=1)
            remedy = f"Did you mean {close[0]}?" if close else f"Known keys are {', '.join(KEYS)}"
            refuse_line(path, line, f"unknown key {name[:64]!r}", remedy)
        if name in found:
            refuse_line(path, line, f"{name} is set a second time", "Keep one")
        found[name] = value
    return found


def _names(node: yaml.Node, path: str, key: str, what: str) -> frozenset[str]:
    if _is_empty(node):
        return frozenset()
    if not isinstance(node, yaml.SequenceNode):
        refuse_line(path, node.start_mark.line, f"{key} is not a list", "Write it as [shop, web]")
    found = set()
    for entry in node.value:
        name = _text(entry, path, what)
        if not name:
            refuse_line(path, entry.start_mark.line, f"{what} has no name", "Remove it")
        found.add(name)
    return frozenset(found)


def _requirements(node: yaml.Node, path: str) -> tuple[Requirement, ...]:
    try:
        if isinstance(node, yaml.MappingNode):
            pairs = [(_text(key, path, "a label"), _text(value, path, "a value")) for key, value in node.value]
            if len(dict(pairs)) < len(pairs):
                refuse_line(path, node.start_mark.line, "labelSelector names a label twice", "Keep one")
            return equal(dict(pairs))
        return selector(_text(node, path, "labelSelector"))
    except SelectorError as error:
        refuse_line(path, node.start_mark.line, f"labelSelector: {error}", "See resctrlmon-nri(8)")


def _text(node: yaml.Node, path: str, what: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        refuse_line(path, node.start_mark.line, f"{what} is a list or a mapping", "Write one plain value")
    return str(node.value)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and not node.value
