# SPDX-License-Identifier: Apache-2.0
"""The companion of a profile's workloads: its settings, and the text of its files. No I/O."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping

import msgspec

# The variables, in the order of the manual page. The fifth one is that of memtierd's NRI plugin.
VARIABLES = (
    "CGROUP2_ABS_PATH",
    "MON_GROUP_PATH",
    "SNAPSHOT_DIR",
    "COMPANION_DIR",
    "MEMTIERD_SWAP_STATS_PATH",
    "KEY",
    "POD_UID",
    "POD_NAME",
    "NAMESPACE",
    "CONTAINER",
)
# Annotations of a pod can be their source, and an administrator may use them in paths.
_NAMES = ("POD_UID", "POD_NAME", "NAMESPACE", "CONTAINER")
STATS_FILE = "memtierd.stats"
MAX_ARGUMENTS = 64
# So that neither many variables nor long values can fill the memory of the daemon.
MAX_VARIABLES = 256
MAX_VALUE_LENGTH = 4096

# "$$" stands for "$". The syntax is that of a name in capitals, so that other uses of "$" need no escape.
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Z][A-Z0-9_]*)\}|([A-Z][A-Z0-9_]*))")
# The characters of the names that systemd, Kubernetes and the container runtimes give. In YAML, JSON and a list of
# words, such a text is always one value. A control group that a user created may have other characters in its name.
_VALUE = re.compile(r"[A-Za-z0-9_/](?:[A-Za-z0-9_./@:\\-]*[A-Za-z0-9_./@\\-])?")


class Restart(enum.StrEnum):
    """When systemd starts the process again after its end."""

    NO = "no"
    """Never."""
    ON_FAILURE = "on-failure"
    """After a failure, a few times at most."""


class Format(enum.StrEnum):
    """The format of a template, which decides how values are escaped."""

    YAML = "yaml"
    """The file is config.yaml."""
    JSON = "json"
    """The file is config.json."""
    PLAIN = "plain"
    """The file is config, and values are inserted as they are."""

    @property
    def file_name(self) -> str:
        """The name of the file that is written."""
        return "config" if self is Format.PLAIN else f"config.{self}"


class Companion(msgspec.Struct, frozen=True):
    """The process that a profile starts: its command, the text of its configuration file, and its limits.

    ``template`` is None if there is none, or if it is in ``template_file`` and has not been read. ``memory_max`` is
    in bytes, ``cpu_quota`` in percent of one CPU.
    """

    command: tuple[str, ...]
    template: str | None = None
    template_file: str = ""
    format: Format = Format.YAML
    restart: Restart = Restart.NO
    memory_max: int = 256 << 20
    cpu_quota: int = 50
    tasks_max: int = 64


class TemplateError(ValueError):
    """A text with variables is wrong, or a value cannot be inserted."""


class Rendered(msgspec.Struct, frozen=True):
    """The arguments of the process, the program first, and the text of its configuration file; None for no file."""

    arguments: tuple[str, ...]
    text: str | None


def check_template(text: str, format_: Format) -> None:
    """Raise TemplateError if the template has an unknown variable, or is not valid in its format."""
    _check_characters(text)
    _render_text(text, format_, dict.fromkeys(VARIABLES, "x"))


def check_argument(text: str) -> None:
    """Raise TemplateError if an argument has an unknown variable, or cannot be the argument of a process."""
    _check_characters(text)
    if "\0" in text:
        raise TemplateError("an argument has a null character")
    _insert(text, dict.fromkeys(VARIABLES, "x"))


def _check_characters(text: str) -> None:
    """Raise TemplateError if the text cannot be UTF-8: the escapes of YAML allow surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateError(f"a character cannot be encoded in UTF-8: {text[error.start]!a}") from error


def render(companion: Companion, values: Mapping[str, str]) -> Rendered:
    """Return the arguments and the text of the configuration file for a workload. Raises TemplateError."""
    arguments = (companion.command[0], *(_insert(argument, values) for argument in companion.command[1:]))
    if companion.template is None:
        return Rendered(arguments, None)
    return Rendered(arguments, _render_text(companion.template, companion.format, values))


def _render_text(text: str, format_: Format, values: Mapping[str, str]) -> str:
    if len(_VARIABLE.findall(text)) > MAX_VARIABLES:
        raise TemplateError(f"the template has more than {MAX_VARIABLES} variables")
    match format_:
        case Format.YAML:
            return _render_yaml(text, values)
        case Format.JSON:
            try:
                return json.dumps(_insert_json(json.loads(text), values), indent=2) + "\n"
            except TemplateError:
                raise
            except (ValueError, RecursionError) as error:
                raise TemplateError(f"the template is not valid JSON: {error}") from error
        case Format.PLAIN:
            return _insert(text, values)


def _insert(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the values of its variables. Raises TemplateError."""

    def value_of(found: re.Match[str]) -> str:
        if found[1]:
            return "$"
        name = found[2] or found[3]
        if name not in VARIABLES:
            raise TemplateError(f"there is no variable ${name[:64]}: write $$ for a $ that begins no variable")
        value = values.get(name, "")
        if not value:
            raise TemplateError(f"the workload has no value for ${name}")
        if len(value) > MAX_VALUE_LENGTH or not _VALUE.fullmatch(value):
            raise TemplateError(f"the value of ${name} has a character that is not allowed: {value[:64]!a}")
        parts = value.split("/")
        if ".." in parts or (name in _NAMES and len(parts) > 1):
            what = "a path with '..'" if ".." in parts else "a path, and not a name"
            raise TemplateError(f"the value of ${name} is {what}: {value[:64]!a}")
        return value

    return _VARIABLE.sub(value_of, text)


def _insert_json(document: object, values: Mapping[str, str]) -> object:
    match document:
        case str():
            return _insert(document, values)
        case list():
            return [_insert_json(entry, values) for entry in document]
        case dict():
            return {_insert(name, values): _insert_json(entry, values) for name, entry in document.items()}
        case _:
            return document


def _render_yaml(text: str, values: Mapping[str, str]) -> str:
    """Insert values into the scalars of a YAML text, and leave the rest of it as it is.

    A scalar with a variable is written in double quotes, so that its value stays a text. A block scalar stays a block
    scalar: values have no line break, and what a program reads from the block is up to that program.
    """
    # Not at the top: it takes 1.3 MiB, and only a daemon with profiles needs it.
    import yaml  # noqa: PLC0415

    parts, end = [], 0
    try:
        for _ in yaml.parse(text, yaml.SafeLoader):
            pass
        for token in yaml.scan(text, yaml.SafeLoader):
            if not isinstance(token, yaml.ScalarToken):
                continue
            first, last = token.start_mark.index, token.end_mark.index
            raw = text[first:last]
            if not _VARIABLE.search(raw if token.style in ("|", ">") else token.value):
                continue
            inserted = _insert(raw, values) if token.style in ("|", ">") else _quoted(_insert(token.value, values))
            parts += [text[end:first], inserted]
            end = last
    except TemplateError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise TemplateError(f"the template is not valid YAML: {' '.join(str(error).split())}") from error
    return "".join([*parts, text[end:]])


def _quoted(text: str) -> str:
    """Return a text as a scalar of YAML in double quotes."""

    def escaped(character: str) -> str:
        if " " <= character <= "~":
            return f"\\{character}" if character in '"\\' else character
        return f"\\U{ord(character):08x}"

    return f'"{"".join(map(escaped, text))}"'
