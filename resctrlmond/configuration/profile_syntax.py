# SPDX-License-Identifier: Apache-2.0
"""Parse files with profiles. Check each key, and report errors with their file and line."""

from __future__ import annotations

import difflib
import enum
import pwd
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import yaml

from resctrlmond.configuration.config import parse_time_span
from resctrlmond.configuration.config_file import quoted, refuse_line, refuse_unknown_key
from resctrlmond.configuration.yaml_file import is_empty, parse_mapping
from resctrlmond.resctrl.errors import ResctrlError, printable
from resctrlmond.workloads.model.event_globs import has_wanted, problem_of
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.validation import MAX_PRIORITY, valid_class
from resctrlmond.workloads.profiles.companion_settings import (
    MAX_ARGUMENTS,
    Companion,
    Format,
    Restart,
    TemplateError,
    check_argument,
    check_template,
)
from resctrlmond.workloads.profiles.label_selector import Requirement, SelectorError, equal_labels, parse_selector
from resctrlmond.workloads.profiles.memory_settings import ANNOTATIONS, MemorySettings, Swap, parse_amount
from resctrlmond.workloads.profiles.profile import OF_CONTAINERS, RULE_GLOBS, Profile, Profiles, Rule, Watch

W = TypeVar("W", bound=enum.StrEnum)

KEYS = ("profiles", "rules", "default_profile", "default_unit_profile")
MEMORY_KEYS = ("swap", "memory_high", "allow_memory_annotations")
PROFILE_KEYS = (
    "watch",
    "class",
    "snapshot",
    "snapshot_ttl",
    "linger",
    "priority",
    "events",
    "expose",
    *MEMORY_KEYS,
    "companion",
)
COMPANION_KEYS = (
    "command",
    "template",
    "template_file",
    "template_format",
    "restart",
    "memory_max",
    "cpu_quota",
    "tasks_max",
)
RULE_KEYS = ("profile", "owner", *RULE_GLOBS, "labels", "user")

# The owners of claims whose members have profiles: the OCI hook, the NRI plugin, and the watch of systemd's units.
OWNERS = ("oci", "nri", SYSTEMD)

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_MANUAL = "See resctrlmond-profiles(5)"
_SWITCHES = {"true": True, "false": False}
_LONGEST_S = 366 * 86400
# A key, the profiles or rules, the keys of one, those of a companion, and a list of patterns or arguments.
_DEPTH = 5
_LEAST_MEMORY = 1 << 20
_MOST_CPU = 100_000
_MOST_TASKS = 1_000_000


@dataclass(slots=True)
class _Found:
    """The values of the files that were read. The defaults have their file and line.

    ``names`` are the references to profiles, with file and line.
    """

    profiles: dict[str, Profile] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    default: tuple[str, str] = ("", "")
    unit_default: tuple[str, str] = ("", "")
    names: list[tuple[str, str, int]] = field(default_factory=list)


def parse(data: bytes, path: str) -> Profiles:
    """Return the profiles from the bytes of the only file; ``path`` is for messages. Raises ConfigError."""
    return merge([(path, data)])


def merge(contents: Iterable[tuple[str, bytes]]) -> Profiles:
    """Return the profiles of several files, each with its path, in their order. Raises ConfigError."""
    found = _Found()
    for path, data in contents:
        _add(found, data, path)
    for name, path, line in found.names:
        if name not in found.profiles:
            remedy = _nearest(name, found.profiles, "Define it below 'profiles', in any file")
            refuse_line(path, line, f"there is no profile {quoted(name)}", remedy)
    return Profiles(found.profiles, tuple(found.rules), *found.default, *found.unit_default)


def _add(found: _Found, data: bytes, path: str) -> None:
    shown = printable(path)
    for key, node in parse_mapping(data, shown, max_depth=_DEPTH, remedy=_MANUAL):
        match _text(key, shown, "a key"):
            case "profiles":
                for name, profile in [] if is_empty(node) else _mapping(node, shown, "profiles"):
                    one = _profile(name, profile, shown)
                    found.profiles[one.name] = one
            case "rules":
                for rule in [] if is_empty(node) else _sequence(node, shown, "rules"):
                    found.rules.append(_rule(found, rule, shown))
            case "default_profile":
                found.default = _default(found, node, shown, "default_profile")
            case "default_unit_profile":
                found.unit_default = _default(found, node, shown, "default_unit_profile")
            case other:
                refuse_unknown_key(shown, key.start_mark.line, other, KEYS)


def _default(found: _Found, node: yaml.Node, path: str, key: str) -> tuple[str, str]:
    """Return the name of a default profile, with its file and line."""
    name, line = _text(node, path, key), node.start_mark.line
    if not name:
        refuse_line(path, line, f"{key} has no value", "Name a profile")
    found.names.append((name, path, line))
    return name, _origin(node, path)


def _profile(key: yaml.Node, node: yaml.Node, path: str) -> Profile:
    name = _text(key, path, "the name of a profile")
    line = key.start_mark.line
    if _NAME.fullmatch(name) is None:
        remedy = 'Use at most 63 ASCII letters, digits and "_.-", with a letter or digit at both ends'
        refuse_line(path, line, f"{quoted(name)} is not a valid name of a profile", remedy)
    values: dict[str, yaml.Node] = {}
    # A profile without keys watches as the daemon does.
    for setting, value in [] if is_empty(node) else _mapping(node, path, f"profile {name}"):
        word = _text(setting, path, "a key")
        if word not in PROFILE_KEYS:
            refuse_unknown_key(path, setting.start_mark.line, word, PROFILE_KEYS)
        values[word] = value
    keeps_files = _switch(values["snapshot"], path, "snapshot") if "snapshot" in values else True
    if not keeps_files and "snapshot_ttl" in values:
        refuse_line(
            path,
            values["snapshot_ttl"].start_mark.line,
            "snapshot_ttl has no effect with 'snapshot: false', which keeps no files",
            "Remove one of the two keys",
        )
    watch = _watch(values["watch"], path) if "watch" in values else Watch.POD
    if watch is Watch.NONE and "companion" in values:
        refuse_line(
            path,
            values["companion"].start_mark.line,
            "a container that is not watched has no companion: the daemon does not know when it ends",
            "Use 'watch: container', or remove 'companion'",
        )
    exposes = _switch(values["expose"], path, "expose") if "expose" in values else False
    if exposes and watch is Watch.NONE:
        refuse_line(
            path,
            values["expose"].start_mark.line,
            "there is nothing to expose with 'watch: none', which leaves the container in no group",
            "Remove one of the two keys",
        )
    return Profile(
        name=name,
        watch=watch,
        class_=_class(values["class"], path) if "class" in values else None,
        snapshot_ttl_s=_time_span(values["snapshot_ttl"], path, "snapshot_ttl") if "snapshot_ttl" in values else None,
        linger_s=_time_span(values["linger"], path, "linger") if "linger" in values else None,
        priority=_priority(values["priority"], path) if "priority" in values else None,
        origin=_origin(key, path),
        memory=_memory(values, path),
        keeps_files=keeps_files,
        events=_events(values["events"], path) if "events" in values else (),
        companion=_companion(values["companion"], path) if "companion" in values else None,
        exposes=exposes,
        class_origin=_origin(values["class"], path) if "class" in values else "",
    )


def _memory(values: Mapping[str, yaml.Node], path: str) -> MemorySettings:
    swap, high, allowed = (values.get(key) for key in MEMORY_KEYS)
    return MemorySettings(
        swap=_swap(swap, path) if swap else Swap.LEAVE,
        high=_amount(high, path, "memory_high") if high else None,
        allowed=_allowed(allowed, path) if allowed else {},
    )


def _companion(node: yaml.Node, path: str) -> Companion:
    values: dict[str, yaml.Node] = {}
    for key, value in _mapping(node, path, "companion"):
        word = _text(key, path, "a key")
        if word not in COMPANION_KEYS:
            refuse_unknown_key(path, key.start_mark.line, word, COMPANION_KEYS)
        values[word] = value
    if "command" not in values:
        refuse_line(path, node.start_mark.line, "the companion has no command", "Add 'command: [/PROGRAM, ARGUMENT]'")
    if "template" in values and "template_file" in values:
        refuse_line(
            path,
            values["template_file"].start_mark.line,
            "the companion has both template and template_file",
            "Remove one of them",
        )
    named = values.get("template_format")
    format_ = Format.YAML if named is None else _word(named, path, "template_format", Format)
    if named is not None and not {"template", "template_file"} & set(values):
        refuse_line(
            path,
            named.start_mark.line,
            "template_format without a template",
            "Add 'template' or 'template_file'",
        )
    default = Companion(())
    return Companion(
        command=_command(values["command"], path),
        template=_template(values["template"], path, format_) if "template" in values else None,
        template_file=_absolute(values["template_file"], path) if "template_file" in values else "",
        format=format_,
        restart=_word(values["restart"], path, "restart", Restart) if "restart" in values else default.restart,
        memory_max=_memory_max(values["memory_max"], path) if "memory_max" in values else default.memory_max,
        cpu_quota=_cpu_quota(values["cpu_quota"], path) if "cpu_quota" in values else default.cpu_quota,
        tasks_max=_tasks_max(values["tasks_max"], path) if "tasks_max" in values else default.tasks_max,
    )


def _rule(found: _Found, node: yaml.Node, path: str) -> Rule:
    values: dict[str, yaml.Node] = {}
    for key, value in _mapping(node, path, "a rule"):
        word = _text(key, path, "a key")
        if word not in RULE_KEYS:
            refuse_unknown_key(path, key.start_mark.line, word, RULE_KEYS)
        values[word] = value
    line = node.start_mark.line
    if "profile" not in values:
        refuse_line(path, line, "the rule names no profile", "Add 'profile: NAME'")
    if len(values) == 1:
        remedy = "For all containers, use 'default_profile', and for all units 'default_unit_profile'"
        refuse_line(path, line, "the rule has no condition", remedy)
    name = _text(values["profile"], path, "profile")
    found.names.append((name, path, values["profile"].start_mark.line))
    owners = _owners(values["owner"], path) if "owner" in values else frozenset()
    if "labels" in values and owners == {"oci"}:
        refuse_line(
            path,
            values["labels"].start_mark.line,
            "the rule can never match: Podman and CRI-O do not pass labels to the OCI hook",
            "Use an annotation of the container, or another condition",
        )
    of_containers = next((key for key in OF_CONTAINERS if key in values), "")
    if of_containers and owners == {SYSTEMD}:
        refuse_line(
            path,
            values[of_containers].start_mark.line,
            f"the rule can never match: units of systemd have no {of_containers}",
            "Use the conditions unit, cgroup and user",
        )
    return Rule(
        profile=name,
        origin=_origin(node, path),
        owners=owners,
        globs={key: _patterns(values[key], path, key) for key in RULE_GLOBS if key in values},
        labels=_labels(values["labels"], path) if "labels" in values else (),
        users=_users(values["user"], path) if "user" in values else frozenset(),
    )


# -- values


def _watch(node: yaml.Node, path: str) -> Watch:
    return _word(node, path, "watch", Watch)


def _swap(node: yaml.Node, path: str) -> Swap:
    return _word(node, path, "swap", Swap)


def _word(node: yaml.Node, path: str, key: str, words: type[W]) -> W:
    text = _text(node, path, key)
    known = [str(word) for word in words]
    if text not in known:
        expected = f"Expected one of {', '.join(known)}"
        refuse_line(path, node.start_mark.line, f"{key} cannot be {quoted(text)}", _nearest(text, known, expected))
    return words(text)


def _switch(node: yaml.Node, path: str, key: str) -> bool:
    text = _text(node, path, key)
    if text not in _SWITCHES:
        remedy = _nearest(text, _SWITCHES, "Expected true or false")
        refuse_line(path, node.start_mark.line, f"{key} cannot be {quoted(text)}", remedy)
    return _SWITCHES[text]


def _events(node: yaml.Node, path: str) -> tuple[str, ...]:
    found = _patterns(node, path, "events")
    for glob in found:
        if problem := problem_of(glob):
            refuse_line(path, node.start_mark.line, f"events: {quoted(glob)} is {problem}", _MANUAL)
    if not has_wanted(found):
        remedy = 'Add "*" to the list, for all other events'
        refuse_line(path, node.start_mark.line, "events selects no event: it only excludes some", remedy)
    return found


def _amount(node: yaml.Node, path: str, key: str) -> int:
    text = _text(node, path, key)
    try:
        return parse_amount(text)
    except ValueError:
        _refuse_value(node, path, key, "max, or bytes with K, M, G or T (1024 each), as in 512M")


def _allowed(node: yaml.Node, path: str) -> dict[str, int]:
    names = tuple(ANNOTATIONS.values())
    found = {}
    for key, value in [] if is_empty(node) else _mapping(node, path, "allow_memory_annotations"):
        name = _text(key, path, "a key")
        if name not in names:
            refuse_unknown_key(path, key.start_mark.line, name, names)
        found[name] = _amount(value, path, name)
    return found


def _command(node: yaml.Node, path: str) -> tuple[str, ...]:
    arguments = _sequence(node, path, "command")
    if not 1 <= len(arguments) <= MAX_ARGUMENTS:
        refuse_line(
            path, node.start_mark.line, f"command does not have 1 to {MAX_ARGUMENTS} words", "Name a program first"
        )
    program, *others = (_text(argument, path, "an argument") for argument in arguments)
    if not program.startswith("/") or not program.isprintable() or "$" in program:
        _refuse_value(arguments[0], path, "the program of command", "an absolute path without variables")
    for argument, text in zip(arguments[1:], others, strict=True):
        try:
            check_argument(text)
        except TemplateError as error:
            refuse_line(path, argument.start_mark.line, str(error), _MANUAL)
    return (program, *others)


def _template(node: yaml.Node, path: str, format_: Format) -> str:
    text = _text(node, path, "template")
    try:
        check_template(text, format_)
    except TemplateError as error:
        refuse_line(path, node.start_mark.line, str(error), _MANUAL)
    return text


def _absolute(node: yaml.Node, path: str) -> str:
    text = _text(node, path, "template_file")
    if not text.startswith("/") or not text.isprintable():
        _refuse_value(node, path, "template_file", "an absolute path")
    return text


def _memory_max(node: yaml.Node, path: str) -> int:
    found = _amount(node, path, "memory_max")
    if found < _LEAST_MEMORY:
        _refuse_value(node, path, "memory_max", "at least 1M")
    return found


def _cpu_quota(node: yaml.Node, path: str) -> int:
    text = _text(node, path, "cpu_quota")
    if not re.fullmatch(r"[1-9][0-9]{0,6}%", text, re.ASCII) or int(text[:-1]) > _MOST_CPU:
        _refuse_value(node, path, "cpu_quota", "percent of one CPU, as in 50%")
    return int(text[:-1])


def _tasks_max(node: yaml.Node, path: str) -> int:
    text = _text(node, path, "tasks_max")
    if not re.fullmatch(r"[1-9][0-9]{0,6}", text, re.ASCII) or int(text) > _MOST_TASKS:
        _refuse_value(node, path, "tasks_max", f"a number from 1 to {_MOST_TASKS}")
    return int(text)


def _class(node: yaml.Node, path: str) -> str | None:
    text = _text(node, path, "class")
    if text == "follow":
        return None
    expected = "Expected follow, the name of a class, or / for the root class"
    if not text:
        refuse_line(path, node.start_mark.line, "class has no value", expected)
    try:
        return valid_class(text)
    except ResctrlError as error:
        refuse_line(path, node.start_mark.line, error.message, expected)


def _time_span(node: yaml.Node, path: str, key: str) -> float:
    text = _text(node, path, key)
    try:
        seconds = parse_time_span(text)
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_S:
        _refuse_value(node, path, key, 'a time span of at most a year, as in "5min", "1h 30min" or 90 (seconds)')
    return seconds


def _priority(node: yaml.Node, path: str) -> int:
    text = _text(node, path, "priority")
    if not re.fullmatch(r"-?[0-9]{1,4}", text, re.ASCII) or not -MAX_PRIORITY <= int(text) <= MAX_PRIORITY:
        _refuse_value(node, path, "priority", f"a number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return int(text)


def _owners(node: yaml.Node, path: str) -> frozenset[str]:
    found = _patterns(node, path, "owner")
    for owner in found:
        if owner not in OWNERS:
            _refuse_value(node, path, "owner", "oci (the OCI hook), nri (the NRI plugin) or systemd (units)", owner)
    return frozenset(found)


def _users(node: yaml.Node, path: str) -> frozenset[int]:
    found = set()
    for user in _patterns(node, path, "user"):
        try:
            found.add(int(user) if re.fullmatch("[0-9]{1,10}", user, re.ASCII) else pwd.getpwnam(user).pw_uid)
        except (KeyError, ValueError):
            _refuse_value(node, path, "user", "the name or the number of a user of this host", user)
    return frozenset(found)


def _patterns(node: yaml.Node, path: str, key: str) -> tuple[str, ...]:
    """Return one text, or the texts of a list."""
    entries = node.value if isinstance(node, yaml.SequenceNode) else [node]
    found = tuple(_text(entry, path, key) for entry in entries)
    if not found or not all(found):
        refuse_line(path, node.start_mark.line, f"{key} has no value", "Write one text, or a list as [a, b]")
    return found


def _labels(node: yaml.Node, path: str) -> tuple[Requirement, ...]:
    try:
        if isinstance(node, yaml.MappingNode):
            found = equal_labels({_text(k, path, "a label"): _text(v, path, "a label") for k, v in node.value})
        else:
            found = parse_selector(_text(node, path, "labels"))
    except SelectorError as error:
        refuse_line(path, node.start_mark.line, f"labels: {error}", _MANUAL)
    if not found:
        refuse_line(path, node.start_mark.line, "labels has no value", _MANUAL)
    return found


# -- nodes


def _text(node: yaml.Node, path: str, what: str) -> str:
    # Every plain value is taken as text: a name may look like a number.
    if not isinstance(node, yaml.ScalarNode):
        refuse_line(path, node.start_mark.line, f"{what} is a list or a mapping", "Write one plain value")
    return str(node.value)


def _mapping(node: yaml.Node, path: str, what: str) -> list[tuple[yaml.Node, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        refuse_line(path, node.start_mark.line, f"{what} is not a mapping", f'Write lines "key: value". {_MANUAL}')
    return list(node.value)


def _sequence(node: yaml.Node, path: str, what: str) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        refuse_line(path, node.start_mark.line, f"{what} is not a list", f'Begin each entry with "- ". {_MANUAL}')
    return list(node.value)


def _origin(node: yaml.Node, path: str) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _nearest(text: str, known: Collection[str], otherwise: str) -> str:
    close = difflib.get_close_matches(text[:64], known, n=1)
    return f"Did you mean {close[0]}?" if close else otherwise


def _refuse_value(node: yaml.Node, path: str, key: str, expected: str, value: str | None = None) -> NoReturn:
    text = str(node.value) if value is None else value
    refuse_line(path, node.start_mark.line, f"{key} cannot be {quoted(text)}", f"Expected {expected}")
