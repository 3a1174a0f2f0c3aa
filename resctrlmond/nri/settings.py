# SPDX-License-Identifier: Apache-2.0
"""Read the adapter's configuration: a YAML file with keys of nri-resctrl-mon, in the same meaning."""

from __future__ import annotations

import yaml

from resctrlmond.configuration.config_file import read_contents, refuse_line, refuse_unknown_key
from resctrlmond.configuration.yaml_file import is_empty, parse_mapping
from resctrlmond.nri.selection import Selection
from resctrlmond.workloads.profiles.label_selector import Requirement, SelectorError, equal_labels, parse_selector

DEFAULT_PATH = "/etc/resctrlmond/nri.yaml"

_MANUAL = "See resctrlmon-nri(8)"

KEYS = ("namespaces", "labelSelector", "annotations")
# Keys of nri-resctrl-mon that are set elsewhere: an error is better than a key without effect.
FOREIGN_KEYS = {
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
    nodes: dict[str, yaml.Node] = {}
    for key, value in parse_mapping(data, path, max_depth=8, remedy=_MANUAL):
        name, line = _text(key, path, "a key"), key.start_mark.line
        if name in FOREIGN_KEYS:
            refuse_line(path, line, f"{name} is not a key of this adapter", FOREIGN_KEYS[name])
        if name not in KEYS:
            refuse_unknown_key(path, line, name, KEYS)
        nodes[name] = value
    namespaces, annotations, requirements = frozenset[str](), frozenset[str](), tuple[Requirement, ...]()
    if "namespaces" in nodes:
        namespaces = _names(nodes["namespaces"], path, "namespaces", "a namespace")
    if "labelSelector" in nodes:
        requirements = _requirements(nodes["labelSelector"], path)
    if "annotations" in nodes:
        annotations = _names(nodes["annotations"], path, "annotations", "an annotation")
    return Selection(namespaces, requirements, annotations)


def _names(node: yaml.Node, path: str, key: str, what: str) -> frozenset[str]:
    if is_empty(node):
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
            return equal_labels(dict(pairs))
        return parse_selector(_text(node, path, "labelSelector"))
    except SelectorError as error:
        refuse_line(path, node.start_mark.line, f"labelSelector: {error}", _MANUAL)


def _text(node: yaml.Node, path: str, what: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        refuse_line(path, node.start_mark.line, f"{what} is a list or a mapping", "Write one plain value")
    return str(node.value)
