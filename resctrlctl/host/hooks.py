# SPDX-License-Identifier: Apache-2.0
"""The verb ``hooks``: enable and disable the OCI hooks of Podman and CRI-O, and show their state."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass

import msgspec

from resctrlctl.base.errors import OK, CommandError
from resctrlctl.screen.layout import Column, Row, Table
from resctrlctl.screen.output import Json, Output
from resctrlmond.api.exit_codes import DENIED
from resctrlmond.resctrl.errors import printable

# The directory of the installed hook files.
SOURCE = "/usr/share/resctrlmond/hooks.d"

_ACTIONS = {"enable": "enable the hooks", "disable": "disable the hooks", "status": "show the hooks"}

ENABLED = "enabled"
DISABLED = "disabled"
# Another file has the hook file's name there: a copy of it, or a hook of the administrator.
FOREIGN = "foreign"


class Hook(msgspec.Struct, frozen=True, rename="camel"):
    """A hook file; ``path`` is its path in the directory that the runtimes read.

    ``state`` is ENABLED, DISABLED or FOREIGN.
    """

    name: str
    path: str
    state: str


class Hooks(msgspec.Struct, frozen=True, rename="camel"):
    """All hook files, with their state in one directory."""

    hooks_dir: str
    hooks: list[Hook]


@dataclass(frozen=True, slots=True)
class HookDirectory:
    """The directory ``target``, which the runtimes read. ``source`` has the installed hook files."""

    source: str
    target: str

    def names(self) -> list[str]:
        """Return the names of the installed hook files. Raises CommandError if there are none."""
        try:
            names = sorted(name for name in os.listdir(self.source) if name.endswith(".json"))
        except FileNotFoundError:
            names = []
        if not names:
            raise CommandError(
                f"there are no hook files in {self.source}. A wheel has none: install the Debian package, "
                "or run 'make install' in the source"
            )
        return names

    def state(self, name: str) -> str:
        """Return the state of the hook file of that name."""
        path = os.path.join(self.target, name)
        if not os.path.lexists(path):
            return DISABLED
        return ENABLED if self._is_link_to_source(path) else FOREIGN

    def enable(self) -> list[str]:
        """Link all hook files; return the names of the new links.

        Raises CommandError, before the first link is created, if one cannot be linked.
        """
        names = self.names()
        for name in names:
            self._check_program(name)
            if self.state(name) == FOREIGN:
                path = printable(os.path.join(self.target, name))
                raise CommandError(
                    f"cannot enable the hooks: {path} exists and is not a link to the hook file. Remove it first"
                )
        os.makedirs(self.target, exist_ok=True)
        new = [name for name in names if self.state(name) == DISABLED]
        for name in new:
            os.symlink(os.path.join(self.source, name), os.path.join(self.target, name))
        return new

    def disable(self) -> list[str]:
        """Remove all links to hook files, also to files that no longer exist; return their names."""
        try:
            names = sorted(os.listdir(self.target))
        except FileNotFoundError:
            return []
        linked = [name for name in names if self._is_link_to_source(os.path.join(self.target, name))]
        for name in linked:
            os.unlink(os.path.join(self.target, name))
        return linked

    def _is_link_to_source(self, path: str) -> bool:
        return os.path.islink(path) and os.path.dirname(os.readlink(path)) == self.source

    def _check_program(self, name: str) -> None:
        # Podman skips a hook whose program is missing, without an error.
        path = os.path.join(self.source, name)
        try:
            with open(path, "rb") as file:
                program = json.load(file)["hook"]["path"]
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{path} is not a hook file: {error!r}. Install the package again") from error
        if not os.access(program, os.X_OK) or os.path.isdir(program):
            raise CommandError(
                f"{path} names {program}, which is not an executable program. Install the package again"
            )


def hooks(args: argparse.Namespace, output: Output) -> int:
    """Enable or disable the hooks, or show their state; return the exit status."""
    directory = HookDirectory(SOURCE, os.path.abspath(args.hooks_dir))
    try:
        match args.action:
            case "enable":
                _confirm(directory.enable(), ENABLED, output)
            case "disable":
                _confirm(directory.disable(), DISABLED, output)
        if args.action == "status" or output.json is not Json.OFF:
            _show(directory, output)
    except PermissionError as error:
        message = f"cannot {_ACTIONS[args.action]}: access to {printable(str(error.filename))} is denied"
        raise CommandError(f"{message}. Run resctrlctl as root", DENIED) from error
    except OSError as error:
        message = f"cannot {_ACTIONS[args.action]}: {printable(str(error.filename))}: {error.strerror}"
        raise CommandError(f"{message}. Check --hooks-dir") from error
    return OK


def _confirm(names: list[str], state: str, output: Output) -> None:
    if output.json is Json.OFF:
        for name in names:
            output.confirm(f"{printable(name)}: {state}")
        if not names:
            output.confirm(f"the hooks are {state} already")


def _show(directory: HookDirectory, output: Output) -> None:
    found = [Hook(name, os.path.join(directory.target, name), directory.state(name)) for name in directory.names()]
    if output.json is not Json.OFF:
        output.print_json(Hooks(directory.target, found))
        return
    columns = (Column("HOOK"), Column("STATE"), Column("PATH"))
    rows = tuple(Row((hook.name, hook.state, printable(hook.path))) for hook in found)
    output.print_blocks([Table(columns, rows)])
