# SPDX-License-Identifier: Apache-2.0
"""Services that run through resctrlmon-unit-exec: their drop-ins, the program and its socket."""

from __future__ import annotations

from collections.abc import Iterator

from resctrlctl.base.errors import CommandError
from resctrlctl.doctor.finding import Finding, Severity
from resctrlctl.doctor.host import Host
from resctrlctl.screen.format import format_count
from resctrlctl.units import exact_units
from resctrlctl.units.exact_units import ExactUnit
from resctrlctl.units.unit_files import settings, split
from resctrlmond.host import unit_exec
from resctrlmond.resctrl.errors import printable

_CHECK = "exact-units"
_SOCKET_UNIT = "resctrlmond-unit.socket"


def check(host: Host) -> Iterator[Finding]:
    """Check each drop-in of 'resctrlctl units exact'."""
    found = exact_units.exact_units(host.path(exact_units.SYSTEM))
    faults = [finding for unit in found for finding in _drop_in(host, unit)]
    if found and not host.is_executable(unit_exec.PROGRAM):
        yield Finding(
            Severity.ERROR,
            _CHECK,
            f"{unit_exec.PROGRAM} is missing, and {format_count(len(found), 'service')} would be started through it",
            "These services do not start.",
            ("resctrlctl units inexact '*'  # or install resctrlmond again",),
        )
    elif found and not host.is_listening(unit_exec.SOCKET):
        yield Finding(
            Severity.WARNING,
            _CHECK,
            f"nothing listens on {unit_exec.SOCKET}",
            "Services that run through resctrlmon-unit-exec are late.",
            (f"systemctl enable --now {_SOCKET_UNIT}",),
        )
    yield from faults
    if found and not faults:
        count = format_count(len(found), "drop-in")
        yield Finding(Severity.OK, _CHECK, f"the unit files agree with {count} of 'resctrlctl units exact'")


def _drop_in(host: Host, unit: ExactUnit) -> Iterator[Finding]:
    again = f"resctrlctl units exact {unit.unit}"
    output = host.run("systemctl", "cat", "--no-pager", "--", unit.unit)
    text = host.read(exact_units.path_of(unit.unit))
    try:
        files = list(split(unit.unit, output or "", host.read))
    except CommandError as error:
        yield Finding(Severity.NOTE, _CHECK, f"{unit.unit} was not examined: {error}", "", (again,))
        return
    others = [(path, content) for path, content in files if path != exact_units.path_of(unit.unit)]
    if not any(path.endswith(".service") for path, _ in others):
        yield Finding(
            Severity.WARNING,
            _CHECK,
            f"{unit.unit} is gone, and its drop-in {exact_units.path_of(unit.unit)} is left",
            "If a service of that name is installed again, it runs the commands of the drop-in.",
            (f"resctrlctl units inexact {unit.unit}",),
        )
        return
    commands = exact_units.originals(exact_units.commands_of(settings(others)))
    if commands != exact_units.recorded(text):
        changed = [line for line in commands if line not in exact_units.recorded(text)]
        what = f": {printable(changed[0])}" if changed else ""
        yield Finding(
            Severity.WARNING,
            _CHECK,
            f"the commands of {unit.unit} have changed since 'resctrlctl units exact'{what}",
            "The service still runs the commands of the drop-in.",
            (again,),
        )
