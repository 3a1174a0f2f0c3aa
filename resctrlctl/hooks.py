# SPDX-License-Identifier: Apache-2.0
"""``hooks``: has Podman and CRI-O call us for every container, or no longer."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass

import msgspec

from resctrlctl.ask import OK, Failure
from resctrlctl.layout import Column, Row, Table
from resctrlctl.screen import Json, Screen
from resctrlmond.api.errors import DENIED
from resctrlmond.resctrl.errors import printable

# Where the hook files are installed, and where the runtimes look by default (oci-hooks(5)): both read /etc only where
# they are configured to.
SOURCE = "/usr/share/resctrlmond/hooks.d"
TARGET = "/usr/share/containers/oci/hooks.d"

_ACTIONS = {"enable": "enable the hooks", "disable": "disable the hooks", "status": "show the hooks"}

ENABLED = "enabled"
DISABLED = "disabled"
# Something else has the hook file's name there: a copy, or an administrator's own.
FOREIGN = "foreign"


class Hook(msgspec.Struct, frozen=True, rename="camel"):
    """One hook file: ``path`` is where the runtimes find it, ``state`` one of ENABLED, DISABLED and FOREIGN."""

    name: str
    path: str
    state: str


class Hooks(msgspec.Struct, frozen=True, rename="camel"):
    """All hook files with regard to one folder."""

    hooks_dir: str
    hooks: list[Hook]


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder ``target`` that runtimes read, with respect to our hook files in ``source``."""

    source: str
    target: str

    def names(self) -> list[str]:
        """The names of our hook files. Raises Failure if there are none."""
        try:
            names = sorted(name for name in os.listdir(self.source) if name.endswith(".json"))
        except FileNotFoundError:
            names = []
        if not names:
            raise Failure(f"there are no hook files in {self.source}. Install the package, or run 'make install'")
        return names

    def state(self, name: str) -> str:
        """How the runtimes see the hook file of that name."""
        path = os.path.join(self.target, name)
        if not os.path.lexists(path):
            return DISABLED
        return ENABLED if self._is_ours(path) else FOREIGN

    def enable(self) -> list[str]:
        """Link all hook files; the names of those that were not linked before. All or, with a Failure, none."""
        names = self.names()
        for name in names:
            self._check_program(name)
            if self.state(name) == FOREIGN:
                path = printable(os.path.join(self.target, name))
                raise Failure(
                    f"cannot enable the hooks: {path} exists and is not a link to the hook file. Remove it first"
                )
        os.makedirs(self.target, exist_ok=True)
        new = [name for name in names if self.state(name) == DISABLED]
        for name in new:
            os.symlink(os.path.join(self.source, name), os.path.join(self.target, name))
        return new

    def disable(self) -> list[str]:
        """Remove all links to our hook files, also to those that are no more; the names."""
        try:
            there = sorted(os.listdir(self.target))
        except FileNotFoundError:
            return []
        ours = [name for name in there if self._is_ours(os.path.join(self.target, name))]
        for name in ours:
            os.unlink(os.path.join(self.target, name))
        return ours

    def _is_ours(self, path: str) -> bool:
        return os.path.islink(path) and os.path.dirname(os.readlink(path)) == self.source

    def _check_program(self, name: str) -> None:
        # Podman passes over a hook whose program is missing without a word.
        path = os.path.join(self.source, name)
        try:
            with open(path, "rb") as file:
                program = json.load(file)["hook"]["path"]
        except (ValueError, KeyError, TypeError) as error:
            raise Failure(f"{path} is not a hook file: {error!r}. Install the package again") from error
        if not os.access(program, os.X_OK) or os.path.isdir(program):
            raise Failure(f"{path} names {program}, which is not an executable program. Install the package again")


def hooks(args: argparse.Namespace, screen: Screen) -> int:
    """Enable, disable, or tell how it is."""
    folder = Folder(SOURCE, os.path.abspath(args.hooks_dir))
    try:
        match args.action:
            case "enable":
                _confirm(folder.enable(), ENABLED, screen)
            case "disable":
                _confirm(folder.disable(), DISABLED, screen)
        if args.action == "status" or screen.json is not Json.OFF:
            _show(folder, screen)
    except PermissionError as error:
        what = f"cannot {_ACTIONS[args.action]}: access to {printable(str(error.filename))} is denied"
        raise Failure(f"{what}. Run it as root", DENIED) from error
    except OSError as error:
        what = f"cannot {_ACTIONS[args.action]}: {printable(str(error.filename))}: {error.strerror}"
        raise Failure(f"{what}. Check --hooks-dir") from error
    return OK


def _confirm(names: list[str], done: str, screen: Screen) -> None:
    if screen.json is Json.OFF:
        for name in names:
            screen.confirm(f"{printable(name)}: {done}")
        if not names:
            screen.confirm(f"the hooks are {done} already")


def _show(folder: Folder, screen: Screen) -> None:
    found = [Hook(name, os.path.join(folder.target, name), folder.state(name)) for name in folder.names()]
    if screen.json is not Json.OFF:
        screen.answer(Hooks(folder.target, found))
        return
    columns = (Column("HOOK"), Column("STATE"), Column("PATH"))
    rows = tuple(Row((hook.name, hook.state, printable(hook.path))) for hook in found)
    screen.show([Table(columns, rows)])
