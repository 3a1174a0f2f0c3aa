# SPDX-License-Identifier: Apache-2.0
"""Read the bytes of a configuration file, and report errors with their line. ``yaml_file`` parses them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from resctrlmond.resctrl.errors import ResctrlError

# The larger sample file, with every key and all comments, has about 4 KiB.
MAX_BYTES = 64 * 1024

PLAIN_VALUE_EXPECTED = "a list or a mapping where a plain value is expected"


class ConfigError(ResctrlError):
    """The configuration is wrong. ``message`` begins with the file and, if there is one, the line."""


def read_contents(path: str | None, default: str, otherwise: str) -> bytes | None:
    """Return the bytes of a configuration file; None if ``path`` is None and the ``default`` file does not exist.

    Returns at most MAX_BYTES + 1 bytes. ``otherwise`` is the part of the message for a missing file. Raises
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


def has_settings(data: bytes) -> bool:
    """Return whether a configuration may set anything: False if all its lines are empty or plain comments.

    For such a file, as a package installs it, PyYAML need not be imported, which takes 1.3 MiB in the daemon.
    """
    if len(data) > MAX_BYTES or not data.isascii():
        return True
    lines = data.decode("ascii").split("\n")
    return not all(line.isprintable() and (not line.strip() or line.lstrip().startswith("#")) for line in lines)


def refuse_unknown_key(path: str, line: int, key: str, known: Collection[str]) -> NoReturn:
    """Raise ConfigError for a key that is not known, with the known key that is most like it."""
    import difflib  # noqa: PLC0415 - only a wrong file needs it

    close = difflib.get_close_matches(key[:64], known, n=1)
    remedy = f"Did you mean {close[0]}?" if close else f"Known keys are {', '.join(sorted(known))}"
    refuse_line(path, line, f"unknown key {quoted(key)}", remedy)


def quoted(text: str) -> str:
    """Return a text from a file in quotes, cut to 64 characters."""
    return repr(text if len(text) <= 64 else text[:61] + "...")


def refuse_line(path: str, line: int, problem: str, remedy: str) -> NoReturn:
    """Raise ConfigError for a line, which is counted from 0 like YAML's marks."""
    raise ConfigError(f"{path}:{line + 1}: {problem}", path=path, remedy=remedy) from None
