# SPDX-License-Identifier: Apache-2.0
"""Find why resctrlmon-unit-exec cannot run in a service, or cannot make it exact: settings, and sessions of users."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from resctrlctl.base import systemd_programs
from resctrlctl.units.exec_lines import program_names
from resctrlctl.units.unit_files import UnitLine, current
from resctrlmond.host import unit_exec

# Where the program does not exist, the service would not start.
_OTHER_ROOTS = ("RootDirectory", "RootImage", "RootMStack")
# They are applied to the first program that systemd executes, and the command would get other rights.
_LABELS = ("SELinuxContext", "AppArmorProfile", "SmackProcessLabel")
_SELINUX = "/sys/fs/selinux/enforce"
# Lists of paths that hide what is there.
_HIDING = ("InaccessiblePaths", "InaccessibleDirectories", "TemporaryFileSystem")
_MOUNTED = ("BindPaths", "BindReadOnlyPaths", "MountImages")
# The system calls of the program that systemd does not always allow (@default of systemd-analyze syscall-filter).
_CALLS = ("socket", "connect", "sendto", "recvfrom", "close", "getrusage")
# The C library of Debian's sid calls readlinkat in the place of readlink.
_CALLS_OF_MACHINE = {"x86_64": ("poll", "readlink", "readlinkat")}
_NEWER_CALLS = ("ppoll", "readlinkat")
# Directories of PAM configuration files, which have the names of programs, except for these programs.
_PAM = ("/etc/pam.d", "/usr/lib/pam.d")
_PAM_FILES = {"agetty": "login", "gdm": "gdm-password", "gdm3": "gdm-password"}


def problem(found: Sequence[UnitLine], *, selinux: str = _SELINUX) -> str:
    """Return the first setting that is in the way, and why; "" if there is none."""
    return next(_problems(found, selinux), "")


def session_file(found: Sequence[UnitLine]) -> str:
    """Return the PAM configuration with which a program of the service opens sessions; "" if there is none.

    Each session gets a control group of its own, and the processes of the service that move there keep its RMID.
    """
    names = [name for setting in current(found, "ExecStart") for name in program_names(setting.value)]
    files = [path for name in names for path in _pam_paths(_PAM_FILES.get(name, name))]
    return next((path for path in files if _opens_sessions(path)), "")


def _pam_paths(name: str) -> list[str]:
    paths = (os.path.join(folder, name) for folder in _PAM)
    return [path for path in paths if name and os.path.isfile(path)][:1]


def _opens_sessions(path: str, above: tuple[str, ...] = ()) -> bool:
    """Whether a file with PAM configuration, or one that it includes, has pam_systemd for sessions (pam.conf(5))."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return False
    if re.search(r"^-?session\s[^#\n]*\bpam_systemd\.so\b", text, re.MULTILINE):
        return True
    names = re.findall(r"^(?:@include|-?session\s+(?:include|substack))\s+(\S+)", text, re.MULTILINE)
    paths = [of for name in names for of in _pam_paths(name) if of not in (*above, path)]
    return any(_opens_sessions(of, (*above, path)) for of in paths)


def _problems(found: Sequence[UnitLine], selinux: str) -> Iterator[str]:
    yield from _other_programs(found, selinux)
    yield from _other_processes(found)
    yield from _hidden(found)
    if not _allows_unix(current(found, "RestrictAddressFamilies")):
        yield "RestrictAddressFamilies= does not allow AF_UNIX"
    filters = [setting.value for setting in current(found, "SystemCallFilter")]
    if filters and (missing := _forbidden(filters, _sets())):
        yield f"SystemCallFilter= forbids {', '.join(missing)}"


def _other_programs(found: Sequence[UnitLine], selinux: str) -> Iterator[str]:
    """Yield the settings by which systemd would execute another program, or give the command other rights."""
    for key in _OTHER_ROOTS:
        if _last(found, key).strip("/ "):
            yield f"{key}={_last(found, key)} hides {unit_exec.PROGRAM}"
    for key in _LABELS:
        if _last(found, key):
            yield f"{key}={_last(found, key)} would be applied to resctrlmon-unit-exec in the place of the command"
    if os.path.exists(selinux):
        yield "SELinux is enabled, and gives a command that another program executes other rights"
    if value := _last(found, "ExecSearchPath"):
        yield f"ExecSearchPath={value} decides where commands are found"


def _other_processes(found: Sequence[UnitLine]) -> Iterator[str]:
    """Yield the settings by which a process of the service does not call, or its call is refused."""
    if value := _last(found, "PAMName"):
        yield f"PAMName={value} starts a process that is in no group"
    if value := _last(found, "DelegateSubgroup"):
        yield f"DelegateSubgroup={value} puts ExecStart= into a control group from which resctrlmond accepts no call"


def _hidden(found: Sequence[UnitLine]) -> Iterator[str]:
    """Yield the settings by which the program or its socket is hidden, or the program cannot be executed."""
    for wanted in (unit_exec.PROGRAM, unit_exec.SOCKET):
        for key in _HIDING:
            yield from (f"{key}={path} hides {wanted}" for path in _above(wanted, _paths(current(found, key))))
        for key in _MOUNTED:
            paths = _above(wanted, _destinations(current(found, key)))
            yield from (f"{key}= mounts over {path}, and hides {wanted}" for path in paths)
    denied, allowed = (_above(unit_exec.PROGRAM, _paths(current(found, key))) for key in ("NoExecPaths", "ExecPaths"))
    if max(map(len, denied), default=0) > max(map(len, allowed), default=0):
        yield f"NoExecPaths={max(denied, key=len)} keeps {unit_exec.PROGRAM} from being executed"


def _last(found: Sequence[UnitLine], key: str) -> str:
    values = current(found, key)
    return values[-1].value if values else ""


def _above(path: str, paths: Iterable[str]) -> list[str]:
    """Return those of the paths that are the path, or above it."""
    return [above for above in paths if f"{path}/".startswith(f"{above.rstrip('/')}/")]


def _allows_unix(found: Sequence[UnitLine]) -> bool:
    words = [setting.value.split() for setting in found]
    if not words:
        return True
    if words[0] == ["none"]:
        return False
    is_deny_list = words[0][0].startswith("~")
    listed: set[str] = set()
    for line in words:
        is_removed = line[0].startswith("~") != is_deny_list
        names = {word.lstrip("~") for word in line}
        listed = listed - names if is_removed else listed | names
    return ("AF_UNIX" in listed or "AF_LOCAL" in listed) != is_deny_list


def _paths(found: Iterable[UnitLine]) -> list[str]:
    words = [word.strip("\"'") for setting in found for word in setting.value.split()]
    return [word.lstrip("-+").partition(":")[0] for word in words]


def _destinations(found: Iterable[UnitLine]) -> list[str]:
    parts = [word.strip("\"'").lstrip("-+").split(":") for setting in found for word in setting.value.split()]
    return [part[1] if len(part) > 1 and part[1] else part[0] for part in parts]


def _sets() -> dict[str, list[str]]:
    """Return the sets of system calls of this systemd; {} if it cannot list them."""
    try:
        text = systemd_programs.run("systemd-analyze", "syscall-filter", "--no-pager").stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("@"):
            name = line.strip()
            found[name] = []
        elif name and line.startswith(" ") and not line.strip().startswith("#"):
            found[name].append(line.strip())
    return found


def _forbidden(filters: Sequence[str], sets: dict[str, list[str]], machine: str = "") -> list[str]:
    """Return the system calls of the program that the values of SystemCallFilter= forbid (systemd.exec(5))."""
    is_deny_list = filters[0].startswith("~")
    listed = set() if is_deny_list else set(_members("@default", sets))
    for value in filters:
        is_removed = value.startswith("~") != is_deny_list
        names = {name for word in value.lstrip("~").split() for name in _members(word.partition(":")[0], sets)}
        listed = listed - names if is_removed else listed | names
    calls = (*_CALLS, *_CALLS_OF_MACHINE.get(machine or platform.machine(), _NEWER_CALLS))
    return [call for call in calls if (call in listed) == is_deny_list]


def _members(word: str, sets: dict[str, list[str]]) -> Iterator[str]:
    if word.startswith("@"):
        for inner in sets.get(word, ()):
            yield from _members(inner, sets)
    else:
        yield word
