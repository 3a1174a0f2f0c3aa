# SPDX-License-Identifier: Apache-2.0
"""Drop-ins of services that put resctrlmon-unit-exec before each command: write, compare and remove them."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Iterable, Sequence

import msgspec

from resctrlctl.base.errors import CommandError
from resctrlctl.units import sandbox
from resctrlctl.units.exec_lines import UnknownSyntax, find_program, with_program
from resctrlctl.units.unit_files import COMMANDS, UnitLine, current, files_of, settings
from resctrlmond.api.exit_codes import USAGE
from resctrlmond.host import unit_exec
from resctrlmond.resctrl.errors import printable

# The directory with the drop-ins of the administrator.
SYSTEM = "/etc/systemd/system"
# systemd applies drop-ins in the order of their names: this one has to be the last.
FILE = "zz-resctrlmon-exact.conf"
# systemd ignores sections with this prefix (systemd.unit(5)).
_SECTION = "X-Resctrlmon"
_ORIGINAL = "Original"
_HEAD = """\
# Written by 'resctrlctl units exact', and removed by 'resctrlctl units inexact'. See resctrlmon-unit-exec(8).
"""
_SERVICE = re.compile(r"[A-Za-z0-9:_.\\@-]{1,247}\.service", re.ASCII)
# systemd writes the files below these directories itself, at each boot or call.
_GENERATED = ("/run/systemd/generator", "/run/systemd/transient", "/run/user/")
_OWN = "resctrlmond.service"
# systemd states over the bus which processes it has started, and is not on it when this service starts.
_BUS = ("dbus.service", "dbus-broker.service")


class ExactUnit(msgspec.Struct, frozen=True, rename="camel"):
    """A service with a drop-in, and the path of the drop-in."""

    unit: str
    path: str


def path_of(unit: str) -> str:
    """Return the path of the drop-in of a service."""
    return os.path.join(SYSTEM, f"{unit}.d", FILE)


def exact_units(system: str = "") -> list[ExactUnit]:
    """Return the services with a drop-in, by name."""
    system = system or SYSTEM
    found = []
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(os.listdir(system)):
            path = os.path.join(system, folder, FILE)
            if folder.endswith(".service.d") and os.path.isfile(path):
                found.append(ExactUnit(folder.removesuffix(".d"), path))
    return found


def check_name(unit: str) -> None:
    """Raise CommandError if this is not the name of a system service that can be exact."""
    if not _SERVICE.fullmatch(unit):
        # A dot may begin the type of another unit.
        is_short = "." not in unit and _SERVICE.fullmatch(f"{unit}.service")
        hint = f". Did you mean {unit}.service?" if is_short else ""
        raise CommandError(f"{printable(unit)!r} is not the name of a service, such as nginx.service{hint}", USAGE)
    if unit == _OWN:
        raise CommandError(f"{_OWN} cannot be exact: it would wait for itself")
    if unit in _BUS:
        raise CommandError(f"{unit} cannot be exact: resctrlmond and systemd are not connected before it runs")


def may_be_exact(unit: str, file: str) -> bool:
    """Return whether nothing about its name and its unit file prevents that a unit can be exact."""
    try:
        check_name(unit)
    except CommandError:
        return False
    return bool(file) and not file.startswith(_GENERATED)


def drop_in_for(unit: str) -> str:
    """Return the text of the drop-in for a service. Raises CommandError, which names the setting in the way."""
    check_name(unit)
    files = [(path, text) for path, text in files_of(unit) if path != path_of(unit)]
    _check_files(unit, [path for path, _ in files])
    found = settings(files)
    if why := sandbox.problem(found):
        raise CommandError(f"{unit} cannot be exact: {why}")
    commands = commands_of(found)
    if not any(setting.key == "ExecStart" for setting in commands):
        raise CommandError(f"{unit} cannot be exact: it has no ExecStart=")
    _check_last(unit, commands)
    lines = [_HEAD, "[Service]\n"]
    for key in dict.fromkeys(setting.key for setting in commands):
        # An empty value removes the commands of the other files.
        lines.append(f"{key}=\n")
        of_key = [setting for setting in commands if setting.key == key]
        lines += [f"{key}={_through_program(unit, setting)}\n" for setting in of_key]
    lines.append(f"\n# The commands without the program, for 'resctrlctl doctor'.\n[{_SECTION}]\n")
    lines += [f"{_ORIGINAL}={original}\n" for original in originals(commands)]
    return "".join(lines)


def session_note(unit: str) -> str:
    """Return a warning for a service that opens sessions, with its cause and remedy; "" for any other service."""
    found = settings([(path, text) for path, text in files_of(unit) if path != path_of(unit)])
    if not (file := sandbox.session_file(found)):
        return ""
    return (
        f"the figures of {unit} are estimated after its first session, because systemd moves the processes of each "
        f"session to another control group (pam_systemd in {printable(file)}). To undo this: "
        f"resctrlctl units inexact {unit}"
    )


def commands_of(found: Sequence[UnitLine]) -> list[UnitLine]:
    """Return the commands of a service."""
    return [setting for key in COMMANDS for setting in current(found, key)]


def originals(commands: Iterable[UnitLine]) -> list[str]:
    """Return commands as the drop-in records them."""
    return [f"{setting.key}={setting.value}" for setting in commands]


def recorded(text: str) -> list[str]:
    """Return the commands that a drop-in records."""
    return [setting.value for setting in settings([("", text)], _SECTION) if setting.key == _ORIGINAL]


def _through_program(unit: str, setting: UnitLine) -> str:
    try:
        return with_program(setting.value, unit_exec.PROGRAM, find_program)
    except UnknownSyntax as error:
        raise CommandError(
            f"{unit} cannot be exact: {setting.key}={printable(setting.value)} in {printable(setting.path)}: {error}"
        ) from error


def _check_files(unit: str, paths: Sequence[str]) -> None:
    """Raise CommandError for an alias, a masked unit, and a unit that systemd or a generator has written."""
    fragment = paths[0] if paths else ""
    name = os.path.basename(fragment)
    prefix, at, _ = unit.partition("@")
    if not fragment or os.path.realpath(fragment) == os.devnull:
        raise CommandError(f"{unit} cannot be exact: it has no unit file, or is masked")
    real = os.path.basename(os.path.realpath(fragment))
    if name not in (unit, f"{prefix}@.service" if at else unit) or (real.endswith(".service") and real != name):
        raise CommandError(f"{unit} cannot be exact: it is an alias of {printable(real)}. Name that unit")
    if fragment.startswith(_GENERATED):
        raise CommandError(f"{unit} cannot be exact: its file {printable(fragment)} is generated, or transient")


def _check_last(unit: str, commands: Iterable[UnitLine]) -> None:
    for setting in commands:
        name = os.path.basename(setting.path)
        if setting.path.endswith(".conf") and name > FILE:
            raise CommandError(
                f"{unit} cannot be exact: {printable(setting.path)} sets {setting.key}=, and is applied after "
                f"{FILE}. Rename it"
            )


def write(unit: str, text: str) -> bool:
    """Write the drop-in in one step; return whether it was different. Raises OSError."""
    path = path_of(unit)
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="surrogateescape") as file:
        if file.read() == text:
            return False
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    # systemd ignores files with other endings.
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        os.fchmod(file.fileno(), 0o644)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    return True


def remove(patterns: Iterable[str]) -> list[str]:
    """Remove the drop-ins of the services that the patterns match; return the services. Raises OSError."""
    wanted = list(patterns)
    found = [one for one in exact_units() if any(fnmatch.fnmatchcase(one.unit, pattern) for pattern in wanted)]
    for one in found:
        os.unlink(one.path)
        with contextlib.suppress(OSError):  # it has other files
            os.rmdir(os.path.dirname(one.path))
    return [one.unit for one in found]


def glob_of(unit: str) -> str:
    """Return the glob of a service: all instances of a template."""
    return unit.replace("@.", "@*.")


def sample_of(unit: str) -> str:
    """Return a name that the glob of the service matches."""
    return unit.replace("@.", "@x.")
