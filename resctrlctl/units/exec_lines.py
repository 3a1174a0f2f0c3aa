# SPDX-License-Identifier: Apache-2.0
"""Put a program before the commands of a line such as ExecStart= (systemd.service(5), "Command Lines").

The text of the line stays as it is written: quotes, escapes and specifiers mean the same in an argument as in the
path of the command. Only variables do not: systemd does not replace them in the path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from resctrlmond.resctrl.errors import printable

_BLANKS = " \t\r\n"
_PREFIXES = "@-:+!"


class UnknownSyntax(ValueError):
    """Why the program cannot be put before the commands, to be read after the name of the setting."""


def with_program(line: str, program: str, find: Callable[[str], str]) -> str:
    """Return the line with the program before each command.

    ``find`` returns the absolute path of a command without a slash, "" if it is not found. Raises UnknownSyntax.
    """
    result, done = "", 0
    for begin, end in _commands(line):
        result += line[done:begin] + _prefixed(line[begin:end], program, find)
        done = end
    return result + line[done:]


def program_names(line: str) -> list[str]:
    """Return the names of the programs of a line, without their directories. Raises UnknownSyntax."""
    return [os.path.basename(_unquoted(line[begin:end].lstrip(_PREFIXES))) for begin, end in _commands(line)]


def _prefixed(word: str, program: str, find: Callable[[str], str]) -> str:
    """Return the first word of a command with the program, and what the program needs, before it."""
    path = word.lstrip(_PREFIXES)
    prefixes = word[: len(word) - len(path)]
    plain = _unquoted(path)
    if not plain or plain[0] in f"{_PREFIXES}|":
        raise UnknownSyntax(f"{printable(word)} has a prefix that is quoted or not known")
    if "$" in plain:
        raise UnknownSyntax(f"the path {printable(plain)} has a $")
    has_argv0 = "@" in prefixes
    kept = prefixes.replace("@", "")
    if plain.startswith(("/", "%")):
        return f"{kept}{program} {'@ ' if has_argv0 else ''}{path}"
    if "/" in plain or "%" in plain:
        raise UnknownSyntax(f"the path {printable(plain)} is not absolute")
    found = find(plain)
    if not found:
        raise UnknownSyntax(f"the command {printable(plain)} was not found in the directories of system programs")
    # The first argument of the command is its name, as without the program.
    return f"{kept}{program} @ {found}{'' if has_argv0 else f' {path}'}"


def _commands(line: str) -> Iterator[tuple[int, int]]:
    """Yield the places of the first words of all commands: ";" alone separates them."""
    is_first = True
    for begin, end in _words(line):
        if line[begin:end] == ";" and not is_first:
            is_first = True
            continue
        if is_first:
            yield begin, end
        is_first = False


def _words(line: str) -> Iterator[tuple[int, int]]:
    """Yield the places of the words of a line (src/basic/extract-word.c, extract_first_word())."""
    begin, quote, at = -1, "", 0
    while at < len(line):
        char = line[at]
        if not quote and char in _BLANKS:
            if begin >= 0:
                yield begin, at
            begin = -1
        else:
            begin = at if begin < 0 else begin
            if char == "\\":
                at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
        at += 1
    if quote:
        raise UnknownSyntax("a quote is not closed")
    if begin >= 0:
        yield begin, len(line)


def _unquoted(word: str) -> str:
    """Return the word without quotes; an escape is left as it is written, because only the beginning matters."""
    return word.replace('"', "").replace("'", "")


def find_program(name: str) -> str:
    """Return the path of a system program, as systemd finds it without ExecSearchPath=; "" if there is none."""
    folders = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    paths = (f"{folder}/{name}" for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK) and not os.path.isdir(path)), "")
