# SPDX-License-Identifier: Apache-2.0
"""Read the daemon's configuration: YAML files. Check each key, and report errors with their line."""

from __future__ import annotations

import contextlib
import grp
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from resctrlmond.configuration.config_file import (
    PLAIN_VALUE_EXPECTED,
    ConfigError,
    has_settings,
    quoted,
    read_contents,
    refuse_line,
    refuse_unknown_key,
)
from resctrlmond.host import unit_globs

if TYPE_CHECKING:
    import yaml

DEFAULT_PATH = "/etc/resctrlmond/resctrlmond.yaml"
# The folder of drop-ins. Each file sets keys again; globs of units are added.
DROP_INS = "/etc/resctrlmond/resctrlmond.d"

# Created with the package. Without it, a host that updates only the code would not start.
DEFAULT_READ_GROUP = "resctrlmon-read"

# sun_path of unix(7) has 108 bytes with its NUL.
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

# An error message contains the description: "Expected <description>".
TimeSpan = Annotated[
    float,
    Meta(ge=0, le=366 * 86400, description='a time span of at most a year, as in "5min", "1h 30min" or 90 (seconds)'),
]
HookTimeout = Annotated[
    float, Meta(ge=0, le=60, description='a time span of at most a minute, as in "10s", "500ms" or 10 (seconds)')
]
ExposeInterval = Annotated[
    float, Meta(ge=1, le=3600, description='a time span from a second to an hour, as in "10s" or "5min"')
]
AbsolutePath = Annotated[
    str,
    Meta(
        pattern=r"\A(?:/(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f]+)+\Z",
        max_length=1024,
        description='an absolute path without "//", "." and "..", and without a slash at its end',
    ),
]
# Root's group is refused: every monitoring group that root creates by hand would have the mark of resctrlmond.
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
# A text, because YAML reads 0750 as an octal number and 750 as a decimal one.
FolderMode = Annotated[
    Literal["0755", "0750", "0700"],
    Meta(description="one of 0755 (everybody), 0750 (the group) and 0700 (root only)"),
]
LogLevel = Annotated[
    Literal["debug", "info", "notice", "warning", "error"],
    Meta(description="one of debug, info, notice, warning, error"),
]
RmidCount = Annotated[int, Meta(ge=0, le=2**16, description="a number of RMIDs from 0 to 65536")]
Switch = Annotated[bool, Meta(description="true or false")]
Units = Annotated[tuple[str, ...], Meta(description='a list of globs, as in ["*.service", "!getty@*.service"]')]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the configuration. Times are in seconds; two paths, with the default "", depend on ``runtime_dir``.

    ``resctrl``: where resctrl is mounted.
    ``runtime_dir``: the folder of the records, of earlier runs and, by default, of ``groups_dir`` and the socket.
    ``groups_dir``: the folder of begin and end values, one folder per workload; on the filesystem of
    ``runtime_dir``. Default: ``groups`` in ``runtime_dir``.
    ``groups_mode``: the mode of ``groups_dir``, of the earlier runs and of every folder in them: the right to read
    values.
    ``varlink_socket``: the varlink socket, unless systemd passes one. Default: ``org.resctrlmon.Manager`` in
    ``runtime_dir``.
    ``group``: the Unix group, by name or number, that marks the daemon's monitoring groups; its members may read.
    ``read_group``: another Unix group, by name or number, whose members may read. It marks nothing, so a service can
    be a member of it. The default need not exist.
    ``group_prefix``: a prefix for the directory names in resctrl of keys that are not pod UIDs.
    ``snapshot_ttl``: how long the values of an ended run can be read.
    ``linger``: how long a workload other than a pod keeps its group after its last member has ended.
    ``pod_linger``: how long a pod without a control group of its own keeps its group after its last container.
    ``checkpoint_interval``: how often the values of existing groups are saved, in case another program removes one;
    0 for never.
    ``hook_queue_timeout``: the maximum duration of a hook whose call waits for those of other containers; 0: such a
    hook does not wait longer than others.
    ``expose_interval``: how often the files of a workload are written for its containers, if its profile exposes
    them.
    ``log_level``: the least severe messages to log.
    ``dbus``: whether to serve ``org.resctrlmon1`` on the system bus.
    ``units``: the systemd units to watch, as globs (``unit_globs.UnitGlobs``).
    ``reserve``: the number of free RMIDs that workloads of a priority below 0, such as units, leave to others.
    ``overflow``: the number of groups that units without an RMID of their own may share; 0 for none.
    """

    resctrl: AbsolutePath = "/sys/fs/resctrl"
    runtime_dir: AbsolutePath = "/run/resctrlmond"
    groups_dir: AbsolutePath = ""
    groups_mode: FolderMode = "0755"
    varlink_socket: AbsolutePath = ""
    group: UnixGroup = "resctrlmon"
    read_group: UnixGroup = DEFAULT_READ_GROUP
    group_prefix: GroupPrefix = ""
    snapshot_ttl: TimeSpan = 300.0
    linger: TimeSpan = 0.0
    pod_linger: TimeSpan = 300.0
    checkpoint_interval: TimeSpan = 60.0
    hook_queue_timeout: HookTimeout = 30.0
    expose_interval: ExposeInterval = 10.0
    log_level: LogLevel = "info"
    dbus: Switch = True
    units: Units = ()
    reserve: RmidCount = 16
    overflow: RmidCount = 4

    def __post_init__(self) -> None:
        if not self.groups_dir:
            msgspec.structs.force_setattr(self, "groups_dir", f"{self.runtime_dir}/groups")
        if not self.varlink_socket:
            path = f"{self.runtime_dir}/org.resctrlmon.Manager"
            msgspec.structs.force_setattr(self, "varlink_socket", path)

    def group_id(self) -> int:
        """Return the number of ``group``. Raises ConfigError if the group does not exist or is root's."""
        return _group_number("group", self.group, "so that our groups would look like root's")

    def reader_ids(self, group_id: int) -> set[int]:
        """Return the numbers of the Unix groups whose members may read: ``group_id`` and that of ``read_group``.

        Raises ConfigError if ``read_group`` does not exist and is not the default, or is root's.
        """
        if self.read_group == DEFAULT_READ_GROUP and not _exists(self.read_group):
            return {group_id}
        return {group_id, _group_number("read_group", self.read_group, "to which many services belong")}


def _exists(group: str) -> bool:
    try:
        grp.getgrnam(group)
    except KeyError:
        return False
    return True


def _group_number(key: str, group: str | int, harm: str) -> int:
    """Return the number of the Unix group that a key names. Raises ConfigError if it does not exist or is root's."""
    remedy = f"Create it with 'systemd-sysusers', or name another group with the key '{key}'"
    if isinstance(group, int):
        return group
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"there is no Unix group '{group}'", remedy=remedy) from None
    if number == 0:
        raise ConfigError(f"the Unix group '{group}' has the number 0, {harm}", remedy=remedy)
    return number


_FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}


def load(path: str | None = None) -> Config:
    """Return the configuration of a file; without ``path`` of ``DEFAULT_PATH``, which need not exist.

    ``DEFAULT_PATH`` is read with its drop-ins. Raises ConfigError if a file cannot be read or is wrong.
    """
    return merge(files(path))


def files(path: str | None = None) -> list[tuple[str, bytes]]:
    """Return the path and the contents of each file that ``load`` reads, in their order. Raises ConfigError."""
    data = read_contents(path, DEFAULT_PATH, "the defaults apply")
    first = [] if data is None else [(path or DEFAULT_PATH, data)]
    return first + (_drop_ins() if path is None else [])


def _drop_ins() -> list[tuple[str, bytes]]:
    """Return the path and the contents of each drop-in, in the order in which they apply. Raises ConfigError."""
    try:
        names = sorted(name for name in os.listdir(DROP_INS) if name.endswith(".yaml") and not name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        remedy = "Check the directory, or remove it: it need not exist"
        raise ConfigError(
            "cannot list the drop-ins of the configuration", path=DROP_INS, errno=error.errno or 0, remedy=remedy
        ) from error
    paths = [os.path.join(DROP_INS, name) for name in names]
    return [(path, read_contents(path, path, "the other files apply") or b"") for path in paths]


def parse(data: bytes, path: str) -> Config:
    """Return the configuration from the bytes of a file; ``path`` is for messages only. Raises ConfigError."""
    return merge([(path, data)])


def problems(path: str | None = None) -> list[ConfigError]:
    """Return all mistakes in the files that ``load`` reads: of each key, and of each glob of units."""
    mistakes: list[ConfigError] = []
    with _added_to(mistakes):
        merge(files(path), mistakes)
    return mistakes


@contextlib.contextmanager
def _added_to(mistakes: list[ConfigError] | None) -> Iterator[None]:
    """Add a ConfigError to the list, and go on after the block; without a list, raise it."""
    try:
        yield
    except ConfigError as error:
        if mistakes is None:
            raise
        mistakes.append(error)


def merge(contents: Iterable[tuple[str, bytes]], mistakes: list[ConfigError] | None = None) -> Config:
    """Return the configuration from several files, each with its path: the last one that sets a key applies.

    The globs of units are those of all files. Raises ConfigError. With ``mistakes``, they are added to that list
    instead, and the result is without the wrong keys.
    """
    values: dict[str, Any] = {}
    places: dict[str, tuple[str, int]] = {}
    for path, data in contents:
        if not has_settings(data):
            continue
        from resctrlmond.configuration.yaml_file import is_mapping, is_plain, parse_mapping  # noqa: PLC0415 - see has_settings()

        nodes: list[tuple[yaml.Node, yaml.Node]] = []
        with _added_to(mistakes):
            nodes = parse_mapping(data, path, max_depth=1, remedy='Write one "key: value" a line')
        for key, node in nodes:
            with _added_to(mistakes):
                if not is_plain(key) or is_mapping(node):
                    line = (node if is_plain(key) else key).start_mark.line
                    refuse_line(path, line, PLAIN_VALUE_EXPECTED, 'Write one "key: value" a line')
                if key.value not in _FIELDS:
                    refuse_unknown_key(path, key.start_mark.line, key.value, _FIELDS)
                value = _globs(node, path, mistakes) if key.value == "units" else _value(key.value, node, path)
                places[key.value] = path, node.start_mark.line
                values[key.value] = (*values.get("units", ()), *value) if key.value == "units" else value
    config = Config(**values)
    with _added_to(mistakes):
        _check_paths(config, places)
    return config


def parse_time_span(text: str) -> float:
    """Return the seconds of a time span of systemd.time(7), with units from us to weeks. Raises ValueError.

    Months and years are refused, because systemd's month has 30.44 days.
    """
    total = Decimal(0)
    position = 0
    while part := _TIME_SPAN_PART.match(text, position):
        number, unit = part.groups()
        if not unit and part.span() != (0, len(text)):
            raise ValueError(f"a number without a unit in the time span {text!r}")
        if unit and unit not in _MICROSECONDS:
            raise ValueError(f"not a unit of time: {unit!r}")
        total += Decimal(number) * _MICROSECONDS[unit or "s"]
        position = part.end()
    if not text or position != len(text):
        raise ValueError(f"not a time span: {text!r}")
    return float(total / 1_000_000)


def _globs(node: yaml.Node, path: str, mistakes: list[ConfigError] | None = None) -> tuple[str, ...]:
    """Return the globs of units in a list. Raises ConfigError, at the line of a wrong glob.

    The errors of globs are added to ``mistakes`` instead, if there is such a list.
    """
    from resctrlmond.configuration.yaml_file import entries, is_empty, is_plain  # noqa: PLC0415

    line = node.start_mark.line
    found = entries(node)
    if found is None:
        remedy = f"Expected {_description('units')}"
        refuse_line(path, line, "units has no value" if is_empty(node) else "units is not a list", remedy)
    for entry in found:
        line = entry.start_mark.line
        with _added_to(mistakes):
            if not is_plain(entry):
                refuse_line(path, line, PLAIN_VALUE_EXPECTED, f"Expected {_description('units')}")
            problem, _, remedy = unit_globs.problem_of(entry.value).partition(". ")
            if problem:
                remedy = remedy or "See resctrlmond.yaml(5)"
                refuse_line(path, line, f"units: {quoted(entry.value)} is {problem}", remedy)
    return tuple(entry.value for entry in found if is_plain(entry))


def _description(key: str) -> str:
    kind = _FIELDS[key].type
    return str(next(meta.description for meta in kind.__metadata__ if meta.description))


def _value(key: str, node: yaml.Node, path: str) -> Any:
    """Return the value of one key, of the key's type. Raises ConfigError."""
    from resctrlmond.configuration.yaml_file import construct, is_empty, is_plain  # noqa: PLC0415

    if not is_plain(node):
        refuse_line(path, node.start_mark.line, PLAIN_VALUE_EXPECTED, f"Expected {_description(key)}")
    kind = _FIELDS[key].type
    try:
        value = node.value if kind is FolderMode else construct(node)
        if kind in (TimeSpan, HookTimeout, ExposeInterval) and isinstance(value, str):
            value = parse_time_span(value)
        return msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, ValueError):
        remedy = f"Expected {_description(key)}"
        if is_empty(node):
            refuse_line(path, node.start_mark.line, f"{key} has no value", remedy)
        refuse_line(path, node.start_mark.line, f"{key} cannot be {quoted(node.value)}", remedy)


def _check_paths(config: Config, places: Mapping[str, tuple[str, int]]) -> None:
    """Check the paths against each other. ``places`` are the file and the line that set a key.

    A path that depends on runtime_dir is reported at that key's line.

    Raises ConfigError.
    """

    def refuse(key: str, what: str, remedy: str) -> NoReturn:
        # The defaults are not refused, so one of these keys is set.
        path, line = next(places[name] for name in (key, "runtime_dir", "resctrl") if name in places)
        refuse_line(path, line, f"{key} {what}", remedy)

    for key in ("runtime_dir", "groups_dir", "varlink_socket"):
        if is_within(getattr(config, key), config.resctrl):
            refuse(key, "is in resctrl", "resctrl has directories of groups only: use a folder in /run")
    if config.groups_dir == config.runtime_dir or any(
        is_within(config.groups_dir, f"{config.runtime_dir}/{own}") for own in ("records", "completed", "exposed")
    ):
        refuse("groups_dir", "is a folder for other files of the daemon", "Use a separate folder")
    if len(os.fsencode(config.varlink_socket)) > _MAX_SOCKET_BYTES:
        refuse(
            "varlink_socket",
            f"has more than {_MAX_SOCKET_BYTES} bytes",
            "Use a shorter path: unix(7) allows no more",
        )


def is_within(path: str, folder: str) -> bool:
    """Return whether the path is the folder or below it, by components: /run/a-b is not within /run/a."""
    return path == folder or path.startswith(f"{folder}/")
