# SPDX-License-Identifier: Apache-2.0
"""The verb ``units``: select the systemd units that the daemon watches, make services exact, or show both."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from collections.abc import Iterable

import msgspec

from resctrlctl.base import systemd_programs
from resctrlctl.base.errors import OK, CommandError
from resctrlctl.screen.layout import Block, Column, Row, Table
from resctrlctl.screen.output import Json, Output
from resctrlctl.units import exact_units
from resctrlctl.units.exact_units import ExactUnit
from resctrlmond.api.exit_codes import DENIED, USAGE
from resctrlmond.configuration import config
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.host import unit_exec
from resctrlmond.host.unit_globs import UnitGlobs, is_valid_name, problem_of
from resctrlmond.resctrl.errors import printable

# The drop-in that this verb writes.
FILE = "units.yaml"
_HEAD = "# Written by 'resctrlctl units'. See resctrlmond.yaml(5).\n"
_SERVICE = "resctrlmond.service"
_FAILED = {
    "enable": "cannot watch units",
    "disable": "cannot stop watching units",
    "exact": "cannot make services exact",
    "inexact": "cannot make services inexact",
    "status": "cannot show the globs",
}


class Glob(msgspec.Struct, frozen=True, rename="camel"):
    """A glob, and the file that sets it."""

    glob: str
    path: str


class Units(msgspec.Struct, frozen=True, rename="camel"):
    """All globs, in their order, and the services that are exact."""

    globs: list[Glob]
    exact: list[ExactUnit]


def units(args: argparse.Namespace, output: Output) -> int:
    """Change the globs of the drop-in, or the drop-ins of services, or show all of them. Return the exit status."""
    failed = _FAILED[args.action]
    try:
        match args.action:
            case "enable":
                _enable(args.glob, output)
            case "disable":
                _disable(args.glob, output)
            case "exact":
                _make_exact(list(dict.fromkeys(args.glob)), output)
            case "inexact":
                _make_inexact(args.glob, output)
        if args.action == "status" or output.json is not Json.OFF:
            _show(output)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    except PermissionError as error:
        message = f"{failed}: access to {printable(str(error.filename))} is denied. Run resctrlctl as root"
        raise CommandError(message, DENIED) from error
    except OSError as error:
        if error.filename is None:
            raise  # the output cannot be written
        raise CommandError(f"{failed}: {printable(str(error.filename))}: {error.strerror}") from error
    return OK


def _enable(globs: Iterable[str], output: Output) -> None:
    for glob in globs:
        if problem := problem_of(glob):
            raise CommandError(f"{printable(glob)!r} is {problem}", USAGE)
    own, set_in = _own(), {of.glob: of.path for of in all_globs()}
    new = [glob for glob in dict.fromkeys(globs) if glob not in set_in]
    if new:
        _write([*own, *new])
    _confirm(globs, new, "enabled", output)


def _disable(globs: Iterable[str], output: Output) -> None:
    own, others = _own(), {of.glob: of.path for of in all_globs() if of.path != _path()}
    for glob in globs:
        if glob in others:
            path = printable(others[glob])
            raise CommandError(f"{printable(glob)!r} is set in {path}: remove it there, and reload resctrlmond")
    left = [glob for glob in own if glob not in globs]
    if left != own:
        _write(left)
    removed = [glob for glob in own if glob not in left]
    _confirm([glob for glob in globs if glob in removed], removed, "disabled", output)
    if output.json is Json.OFF:
        for glob in globs:
            if glob not in removed:
                output.confirm(f"{printable(glob)}: {_why_not_enabled(glob)}")
    if left and not all(glob in own for glob in globs):
        output.note(f"write a glob exactly as it was enabled. Still enabled: {' '.join(map(shlex.quote, left))}")


def _why_not_enabled(glob: str) -> str:
    """Return that a glob is not enabled, and which glob watches the unit that it may name."""
    name = glob if is_valid_name(glob) else f"{glob}.service"
    globs = UnitGlobs([of.glob for of in all_globs()])
    rank = globs.rank(name) if is_valid_name(name) else None
    if rank is None:
        return "not enabled"
    if globs.wanted[rank] == name:
        return f"not enabled. Did you mean {name}?"
    exclude = shlex.quote(f"!{name}")
    return f"not enabled, but {globs.wanted[rank]} selects {name}. To exclude it: resctrlctl units enable {exclude}"


def _make_exact(names: list[str], output: Output) -> None:
    """Write the drop-ins of services, watch the services, and reload systemd."""
    if not os.access(unit_exec.PROGRAM, os.X_OK):
        raise CommandError(
            f"{unit_exec.PROGRAM} is not installed, and a service that runs through it would not start. Install "
            "resctrlmond again (package, or 'make install' in the source, with a C compiler)"
        )
    # All of them before the first is written.
    texts = {name: exact_units.drop_in_for(name) for name in names}
    notes = [exact_units.session_note(name) for name in names]
    globs = [of.glob for of in all_globs()]
    new: list[str] = []
    for name in names:
        if UnitGlobs([*globs, *new]).rank(exact_units.sample_of(name)) is not None:
            continue
        glob = exact_units.glob_of(name)
        if UnitGlobs([*globs, glob]).rank(exact_units.sample_of(name)) is None:
            raise CommandError(f"{name} cannot be exact: a glob with '!' excludes it. See: resctrlctl units status")
        new.append(glob)
    changed = [name for name in names if exact_units.write(name, texts[name])]
    if changed:
        _reload_systemd()
    if new:
        _write([*_own(), *new])
        _reload(output)
    if output.json is Json.OFF:
        for name in names:
            output.confirm(f"{name}: exact{'' if name in changed else ' already'}")
    for note in filter(None, notes):
        output.note(note)
    if changed:
        units = " ".join(changed)
        output.note(
            "this applies to a start after a stop; a restart continues the workload as it is: "
            f"systemctl stop {units}; sleep 2; systemctl start {units}"
        )


def _make_inexact(patterns: list[str], output: Output) -> None:
    """Remove the drop-ins of services, and reload systemd."""
    removed = exact_units.remove(patterns)
    if removed:
        _reload_systemd()
    if output.json is Json.OFF:
        globs = UnitGlobs([of.glob for of in all_globs()])
        for name in removed:
            is_watched = globs.rank(exact_units.sample_of(name)) is not None
            output.confirm(f"{name}: inexact{', and still watched' if is_watched else ''}")
        if not removed:
            output.confirm("no service that matches is exact")


def _reload_systemd() -> None:
    try:
        done = _systemctl("daemon-reload", unit="")
        why = printable(done.stderr.strip()) if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    if why:
        raise CommandError(
            f"the drop-ins are changed, but systemd was not reloaded: {why}. Run: systemctl daemon-reload"
        )


def _confirm(globs: Iterable[str], changed: list[str], state: str, output: Output) -> None:
    if output.json is Json.OFF:
        for glob in globs:
            already = "" if glob in changed else " already"
            output.confirm(f"{printable(glob)}: {state}{already}")
    if changed:
        _reload(output)


def _path() -> str:
    return os.path.join(config.DROP_INS, FILE)


def _own() -> list[str]:
    """Return the globs in the drop-in of this verb. Raises ConfigError."""
    return [of.glob for of in all_globs() if of.path == _path()]


def all_globs() -> list[Glob]:
    """Return the globs of all files of the configuration. Raises ConfigError."""
    return [Glob(glob, path) for path, data in config.files() for glob in config.parse(data, path).units]


def _write(globs: list[str]) -> None:
    """Replace the drop-in in one step; remove it if there are no globs."""
    path = _path()
    if not globs:
        os.unlink(path)
        return
    os.makedirs(config.DROP_INS, exist_ok=True)
    # In single quotes a backslash is a backslash; no glob has a quote.
    text = _HEAD + "units:\n" + "".join(f"- '{glob}'\n" for glob in globs)
    temporary = os.path.join(config.DROP_INS, f".{FILE}.new")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError as error:
        # A write has no name of a file in its error, ENOSPC for example.
        raise OSError(error.errno, error.strerror, path) from error


def _reload(output: Output) -> None:
    """Reload the daemon, if it runs. Raises CommandError."""
    failed = "the drop-in is changed, but resctrlmond could not be reloaded"
    try:
        if _systemctl("is-active", "--quiet").returncode:
            output.note("resctrlmond.service is not running: the change applies when it starts")
            return
        done = _systemctl("reload")
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"{failed}: {error}. Reload it: systemctl reload resctrlmond") from error
    if done.returncode:
        raise CommandError(f"{failed}: {printable(done.stderr.strip())}. See: systemctl status resctrlmond")


def _systemctl(*arguments: str, unit: str = _SERVICE) -> subprocess.CompletedProcess[str]:
    return systemd_programs.run("systemctl", *arguments, *([unit] if unit else []))


def _show(output: Output) -> None:
    found, exact = all_globs(), exact_units.exact_units()
    if output.json is not Json.OFF:
        output.print_json(Units(found, exact))
        return
    blocks: list[Block] = []
    if found:
        columns = (Column("GLOB"), Column("SET IN"))
        blocks.append(Table(columns, tuple(Row((printable(of.glob), printable(of.path))) for of in found)))
    else:
        output.confirm("no units are watched. Watch some: resctrlctl units enable '*.service'")
    if exact:
        columns = (Column("EXACT SERVICE"), Column("DROP-IN"))
        blocks.append(Table(columns, tuple(Row((printable(of.unit), printable(of.path))) for of in exact)))
    if blocks:
        output.print_blocks(blocks)
    globs = UnitGlobs([of.glob for of in found])
    unwatched = [of.unit for of in exact if globs.rank(exact_units.sample_of(of.unit)) is None]
    if unwatched:
        names = " ".join(printable(shlex.quote(exact_units.glob_of(unit))) for unit in unwatched)
        output.note(
            "exact services that no glob selects start through resctrlmon-unit-exec, and are in no group. To watch "
            f"them: resctrlctl units enable {names}"
        )
