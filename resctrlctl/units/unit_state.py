# SPDX-License-Identifier: Apache-2.0
"""The state of systemd units: of system units from systemctl, of units of users from their control groups."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from resctrlctl.base import systemd_programs
from resctrlctl.base.errors import CommandError
from resctrlmond.api.exit_codes import USAGE
from resctrlmond.host.unit_globs import is_of_user
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import ResctrlError, printable

# The types of units (systemd.unit(5)).
_TYPES = (
    *("service", "scope", "slice", "socket", "target", "timer", "path"),
    *("mount", "automount", "swap", "device", "snapshot"),
)
_NAME = re.compile(rf"(user-[0-9]{{1,10}}:)?[A-Za-z0-9:_.\\@-]{{1,248}}\.({'|'.join(_TYPES)})", re.ASCII)
_GLOB = re.compile(r"[A-Za-z0-9:_.\\@*?\[\]!-]{1,255}", re.ASCII)
_USER = re.compile(r"user-([0-9]+):(.+)", re.ASCII)
_WILD = frozenset("*?[")
# systemctl status regards these states as "running", for its exit status.
_RUNNING = frozenset({"active", "reloading", "refreshing"})
# The property with the time of the last change to a state, as systemctl status selects it.
_SINCE = {
    **dict.fromkeys(_RUNNING, "ActiveEnterTimestamp"),
    "inactive": "InactiveEnterTimestamp",
    "failed": "InactiveEnterTimestamp",
    "activating": "InactiveExitTimestamp",
    "deactivating": "ActiveExitTimestamp",
}
_PROPERTIES = (
    *("Id", "Description", "LoadState", "ActiveState", "SubState", "ControlGroup", "FragmentPath"),
    *sorted(set(_SINCE.values())),
)
# A user may create any number of control groups.
_MAX_DIRECTORIES = 4096


class UnitState(msgspec.Struct, frozen=True, rename="camel"):
    """A unit: the states are those of systemctl(1), "" if they are not known. ``since`` is RFC 3339, UTC, or "".

    ``cgroup`` is the path of its control group, and ``file`` that of its unit file; "" for none.
    """

    name: str
    load: str = ""
    active: str = ""
    sub: str = ""
    since: str = ""
    description: str = ""
    cgroup: str = ""
    file: str = ""

    @property
    def is_running(self) -> bool:
        """Whether systemctl status exits with 0 for the unit."""
        return self.active in _RUNNING

    @property
    def has_ended(self) -> bool:
        """Whether it has no process: a service that is starting or stopping has one."""
        return self.active in ("inactive", "failed")

    @property
    def is_missing(self) -> bool:
        """Whether systemd knows no unit of this name."""
        return self.load == "not-found" and self.has_ended


def is_glob(name: str) -> bool:
    """Return whether a name is a glob."""
    return not _WILD.isdisjoint(name)


def full_name(text: str) -> str:
    """Return the name of a unit as systemctl completes it: ``nginx`` is ``nginx.service``. A glob is not changed.

    Raises CommandError if it is not valid.
    """
    if is_glob(text):
        if _GLOB.fullmatch(text):
            return text
    else:
        name = text if text.rpartition(".")[2] in _TYPES else f"{text}.service"
        if _NAME.fullmatch(name):
            return name
    raise CommandError(f"{text!r} is not the name or glob of a unit, such as nginx.service", USAGE)


def states_of(names: Sequence[str]) -> tuple[dict[str, UnitState], str]:
    """Return the units of these names and globs, by their names, and why system units are not known; "" if they are.

    An alias has the state of its unit. The units of a glob are those that systemd has loaded. The units of users are
    found by their control groups, so one that does not run is not known to exist.
    """
    of_users = [name for name in names if _USER.fullmatch(name) and not is_glob(name)]
    of_system = [name for name in names if not is_of_user(name)]
    found = {name: _of_user(name) for name in of_users}
    if not of_system:
        return found, ""
    try:
        text = _systemctl(of_system)
    except CommandError as error:
        return found, str(error)
    # systemctl prints the units of names first, in their order, and those of globs after them.
    named = [name for name in of_system if not is_glob(name)]
    for number, block in enumerate(filter(None, text.split("\n\n"))):
        state = _parsed(block)
        if number < len(named):
            found[named[number]] = state
        else:
            found.setdefault(state.name, state)
    return found, ""


def _systemctl(names: Iterable[str]) -> str:
    options = ("--no-pager", "--timestamp=unix", f"--property={','.join(_PROPERTIES)}")
    try:
        done = systemd_programs.run("systemctl", "show", *options, "--", *names)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"systemctl did not answer within {systemd_programs.TIMEOUT_S} s") from error
    except OSError as error:
        raise CommandError(f"systemctl: {error.strerror}") from error
    if done.returncode:
        reason = printable(" ".join(done.stderr.split())) or f"exit status {done.returncode}"
        raise CommandError(f'systemctl: "{reason}"')
    return done.stdout


def _parsed(block: str) -> UnitState:
    values = {name: value for name, _, value in (line.partition("=") for line in block.splitlines())}
    active, inner = values.get("ActiveState", ""), values.get("ControlGroup", "")
    path = ""
    if inner.strip("/"):
        with contextlib.suppress(ResctrlError):
            path = cgroups.path_of(inner)
    return UnitState(
        name=values.get("Id", ""),
        load=values.get("LoadState", ""),
        active=active,
        sub=values.get("SubState", ""),
        since=_time(values.get(_SINCE.get(active, ""), "")),
        description=values.get("Description", ""),
        cgroup=path,
        file=values.get("FragmentPath", ""),
    )


def _time(text: str) -> str:
    """Return a time of --timestamp=unix, such as ``@1793491200``, as RFC 3339; "" for none."""
    try:
        moment = datetime.datetime.fromtimestamp(int(text.removeprefix("@")), datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _of_user(key: str) -> UnitState:
    """Return the state of a user's unit: it runs if its control group, below that of the manager, has tasks."""
    found = _USER.fullmatch(key)
    assert found is not None
    uid, name = found.groups()
    top = ""
    with contextlib.suppress(ResctrlError):
        top = cgroups.path_of(f"/user.slice/user-{uid}.slice/user@{uid}.service")
    for path in _below(top):
        with contextlib.suppress(ResctrlError):
            if os.path.basename(path) == name and cgroups.is_populated(path):
                return UnitState(key, active="active", cgroup=path)
    return UnitState(key, active="inactive")


def _below(top: str) -> Iterator[str]:
    """Yield the control groups below that of a user's manager which may be units: those in slices."""
    waiting, room = [top] if top else [], _MAX_DIRECTORIES
    while waiting and room > 0:
        # A control group that was removed has none.
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                room -= 1
                if not entry.is_dir(follow_symlinks=False):
                    continue
                yield entry.path
                if entry.name.endswith(".slice"):
                    waiting.append(entry.path)
