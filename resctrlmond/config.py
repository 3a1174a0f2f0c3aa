# SPDX-License-Identifier: Apache-2.0
"""The daemon's configuration: one YAML file, checked key by key, refused with the line that is wrong."""

from __future__ import annotations

import difflib
import grp
import os
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import yaml
from msgspec import Meta

from resctrlmond.resctrl.errors import ResctrlError

DEFAULT_PATH = "/etc/resctrlmond/resctrlmond.yaml"

# A configuration with every key and all of its comments has some 4 KiB.
MAX_BYTES = 64 * 1024
# sun_path of unix(7) has 108 bytes, the last one NUL.
_MAX_SOCKET_BYTES = 107

_MICROSECONDS = {
    unit: factor
    for units, factor in (
        ("us usec", 1),
        ("ms msec", 1_000),
        ("s sec second seconds", 1_000_000),
        ("m min minute minutes", 60_000_000),
        ("h hr hour hours", 3_600_000_000),
        ("d day days", 86_400_000_000),
        ("w week weeks", 604_800_000_000),
    )
    for unit in units.split()
}
_TIME_SPAN_PART = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)\s*", re.ASCII)

# The descriptions are the operator's: an error says "expected <description>".
TimeSpan = Annotated[
    float,
    Meta(ge=0, le=366 * 86400, description='a time span of at most a year, as in "5min", "1h 30min" or 90 (seconds)'),
]
AbsolutePath = Annotated[
    str,
    Meta(
        pattern=r"\A(?:/(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f]+)+\Z",
        max_length=1024,
        description='an absolute path without "//", "." and "..", and without a slash at its end',
    ),
]
# Group 0 owns every group that root makes by hand: as our mark it would claim them all.
UnixGroup = Annotated[
    Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_.-]{0,30}\Z")] | Annotated[int, Meta(ge=1, le=2**32 - 2)],
    Meta(description="the name or the number of a Unix group other than 0"),
]
GroupPrefix = Annotated[
    str,
    Meta(
        pattern=r"\A(?:[A-Za-z0-9@:_\\+,=~][A-Za-z0-9@:._\-\\+,=~]*)?\Z",
        max_length=32,
        description='at most 32 letters, digits and "@:._-\\+,=~", the first neither "." nor "-"',
    ),
]
# As text: YAML takes 0750 for a number, and 750 for another one.
FolderMode = Annotated[
    Literal["0755", "0750", "0700"],
    Meta(description="one of 0755 (everybody), 0750 (the group) and 0700 (root only)"),
]
LogLevel = Annotated[
    Literal["debug", "info", "notice", "warning", "error"],
    Meta(description="one of debug, info, notice, warning, error"),
]
Switch = Annotated[bool, Meta(description="true or false")]


class ConfigError(ResctrlError):
    """The configuration cannot be used: ``message`` begins with the file, and the line where there is one."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set. Times are in seconds; the two paths with the default "" follow ``runtime_dir``.

    ``resctrl``: where resctrl is mounted.
    ``runtime_dir``: the folder of the records, of ended runs and, unless set apart, of all that follows.
    ``groups_dir``: the folder of begin and end values, one folder per workload; on the filesystem of
    ``runtime_dir``. Default: ``groups`` in ``runtime_dir``.
    ``groups_mode``: the mode of ``groups_dir``, of the ended runs and of every folder in them: who may read values.
    ``varlink_socket``: the varlink socket, where systemd hands none over. Default: ``org.resctrlmon.Manager`` in
    ``runtime_dir``.
    ``group``: the Unix group, by name or number, that marks our monitoring groups and may read at the doors.
    ``group_prefix``: goes before the directory name in resctrl of a key that is no pod UID.
    ``snapshot_ttl``: how long the values of an ended run stay readable.
    ``linger``: how long a workload other than a pod keeps its group after its last member.
    ``pod_linger``: how long a pod's group waits for the next container where the pod has no control group of its
    own to tell that it is gone.
    ``checkpoint_interval``: how often the values of groups that stand are kept, for when one goes away unasked; 0
    for never.
    ``log_level``: the least severe messages to log.
    ``dbus``: whether to serve ``org.resctrlmon1`` on the system bus.
    """

    resctrl: AbsolutePath = "/sys/fs/resctrl"
    runtime_dir: AbsolutePath = "/run/resctrlmond"
    groups_dir: AbsolutePath = ""
    groups_mode: FolderMode = "0755"
    varlink_socket: AbsolutePath = ""
    group: UnixGroup = "resctrlmon"
    group_prefix: GroupPrefix = ""
    snapshot_ttl: TimeSpan = 300.0
    linger: TimeSpan = 0.0
    pod_linger: TimeSpan = 300.0
    checkpoint_interval: TimeSpan = 60.0
    log_level: LogLevel = "info"
    dbus: Switch = True

    def __post_init__(self) -> None:
        if not self.groups_dir:
            msgspec.structs.force_setattr(self, "groups_dir", f"{self.runtime_dir}/groups")
        if not self.varlink_socket:
            path = f"{self.runtime_dir}/org.resctrlmon.Manager"
            msgspec.structs.force_setattr(self, "varlink_socket", path)

    def group_id(self) -> int:
        """The number of ``group``; ConfigError if there is no such group, or if it is root's."""
        remedy = "Create it with 'systemd-sysusers', or name another one with the key 'group'"
        if isinstance(self.group, int):
            return self.group
        try:
            number = grp.getgrnam(self.group).gr_gid
        except KeyError:
            raise ConfigError(f"there is no Unix group '{self.group}'", remedy=remedy) from None
        if number == 0:
            raise ConfigError(
                f"the Unix group '{self.group}' has the number 0, root's: it cannot tell our groups from root's",
                remedy=remedy,
            )
        return number


_FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}


def load(path: str | None = None) -> Config:
    """The configuration in a file; without ``path`` in ``DEFAULT_PATH``, which may be missing.

    Raises ConfigError for a file that cannot be read or is wrong.
    """
    data = contents(path, DEFAULT_PATH, "the defaults hold")
    return Config() if data is None else parse(data, path or DEFAULT_PATH)


def contents(path: str | None, default: str, otherwise: str) -> bytes | None:
    """The bytes of a configuration file; None where none was named and the ``default`` one is missing.

    One byte more than is allowed tells of what is too large. ``otherwise``: what holds without a file. Raises
    ConfigError.
    """
    name = default if path is None else path
    try:
        with open(name, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        if path is None and isinstance(error, FileNotFoundError):
            return None
        remedy = f"Check the file. Without --config and without {default}, {otherwise}"
        raise ConfigError(
            "cannot read the configuration", path=name, errno=error.errno or 0, remedy=remedy
        ) from error


def parse(data: bytes, path: str) -> Config:
    """The configuration in the bytes of a file; ``path`` is for messages only. Raises ConfigError."""
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path}: larger than {MAX_BYTES} bytes", path=path, remedy="Check that it is the right file"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        refuse_line(path, data.count(b"\n", 0, error.start), "not UTF-8", "Save the file in that encoding")
    nodes = _compose(text, path)
    values = {key: _value(key, node, path) for key, node in nodes.items()}
    config = Config(**values)
    _check_paths(config, {key: node.start_mark.line for key, node in nodes.items()}, path)
    return config


def time_span(text: str) -> float:
    """Seconds in a time span as systemd.time(7) writes it, units from us to weeks; ValueError for anything else.

    Months and years are left out: a mean month of 30.44 days is nobody's intention here.
    """
    total = Decimal(0)
    position = 0
    while part := _TIME_SPAN_PART.match(text, position):
        number, unit = part.groups()
        if not unit and part.span() != (0, len(text)):
            raise ValueError(f"a number without a unit in the time span {text!r}")
        if unit and unit not in _MICROSECONDS:
            raise ValueError(f"no unit of time: {unit!r}")
        total += Decimal(number) * _MICROSECONDS[unit or "s"]
        position = part.end()
    if not text or position != len(text):
        raise ValueError(f"no time span: {text!r}")
    return float(total / 1_000_000)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader for one flat mapping of plain values.

    Lists, mappings in mappings, anchors, aliases and tags are refused where they begin, before anything is built
    from them: no nesting to recurse into, no alias to multiply, no tag to choose a constructor by.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        kind = None
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            kind = "an anchor or alias"
        elif event.tag is not None:
            kind = "a tag"
        elif parent is not None and not isinstance(event, yaml.ScalarEvent):
            kind = "a list or a mapping"
        if kind:
            raise yaml.MarkedYAMLError(problem=f"{kind} where one plain value belongs", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def _compose(text: str, path: str) -> dict[str, yaml.ScalarNode]:
    """The value of each key with its marks; ConfigError unless the text is one flat mapping of known keys."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        refuse_line(path, line, f"the character {chr(error.character)!r} is not allowed in YAML", "Remove it")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = "; ".join(part for part in (error.context, error.problem) if part)
        refuse_line(path, mark.line if mark else 0, what, 'Write one "key: value" a line')
    except (ValueError, OverflowError):
        # PyYAML's own: a number in an escape or a directive that is beyond all characters, or all numbers.
        refuse_line(path, loader.line if loader else 0, "no YAML", 'Write one "key: value" a line')
    if root is None or _is_empty(root):
        return {}
    if not isinstance(root, yaml.MappingNode):
        refuse_line(path, root.start_mark.line, "no key and value", 'Write one "key: value" a line')
    found: dict[str, yaml.ScalarNode] = {}
    for key, value in root.value:
        line = key.start_mark.line
        if key.value not in _FIELDS:
            refuse_line(path, line, f"unknown key {_shown(key.value)}", _known_keys(key.value))
        if key.value in found:
            first = found[key.value].start_mark.line + 1
            refuse_line(path, line, f"{key.value} is set a second time", f"Line {first} sets it already; keep one")
        found[key.value] = value
    return found


def _value(key: str, node: yaml.ScalarNode, path: str) -> Any:
    """The value of one key, of the key's type."""
    kind = _FIELDS[key].type
    expected = next(meta.description for meta in kind.__metadata__ if meta.description)
    try:
        value = node.value if kind is FolderMode else yaml.SafeLoader("").construct_object(node)
        if kind is TimeSpan and isinstance(value, str):
            value = time_span(value)
        return msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, ValueError, OverflowError, yaml.YAMLError):
        # 2026-99-99 is a ValueError to PyYAML, 1:59:59:... without end an OverflowError, = a ConstructorError.
        remedy = f"Expected {expected}"
        if _is_empty(node):
            refuse_line(path, node.start_mark.line, f"{key} has no value", remedy)
        refuse_line(path, node.start_mark.line, f"{key} cannot be {_shown(node.value)}", remedy)


def _check_paths(config: Config, lines: Mapping[str, int], path: str) -> None:
    """What the paths must be to each other; a path that follows runtime_dir is reported at that key's line."""

    def refuse(key: str, what: str, remedy: str) -> NoReturn:
        refuse_line(path, lines.get(key, lines.get("runtime_dir", lines.get("resctrl", 0))), f"{key} {what}", remedy)

    for key in ("runtime_dir", "groups_dir", "varlink_socket"):
        if is_within(getattr(config, key), config.resctrl):
            refuse(key, "lies in resctrl", "resctrl holds groups only; use a folder in /run")
    if config.groups_dir == config.runtime_dir or any(
        is_within(config.groups_dir, f"{config.runtime_dir}/{own}") for own in ("records", "completed")
    ):
        refuse("groups_dir", "is where other files of the daemon are", "Use a folder of its own")
    if len(os.fsencode(config.varlink_socket)) > _MAX_SOCKET_BYTES:
        refuse(
            "varlink_socket",
            f"has more than {_MAX_SOCKET_BYTES} bytes",
            "Use a shorter path: unix(7) allows no more",
        )


def _is_empty(node: yaml.Node) -> bool:
    """Whether nothing is written where the value belongs, neither quotes nor "null"."""
    return isinstance(node, yaml.ScalarNode) and not node.value and node.style is None


def is_within(path: str, folder: str) -> bool:
    """Whether the path is the folder or below it, compared by component: /run/a-b is not within /run/a."""
    return path == folder or path.startswith(f"{folder}/")


def _known_keys(key: str) -> str:
    close = difflib.get_close_matches(key[:64], _FIELDS, n=1)
    return f"Did you mean {close[0]}?" if close else f"Known keys are {', '.join(sorted(_FIELDS))}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 64 else text[:61] + "...")


def refuse_line(path: str, line: int, what: str, remedy: str) -> NoReturn:
    """Raise ConfigError for a line, counted from 0 as YAML marks are."""
    raise ConfigError(f"{path}:{line + 1}: {what}", path=path, remedy=remedy) from None
