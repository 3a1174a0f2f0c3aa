# SPDX-License-Identifier: Apache-2.0
"""Container runtimes: their hook files, NRI in containerd, and containers for which the runtime creates groups."""

from __future__ import annotations

import glob
import json
import os
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from resctrlctl.base.defaults import HOOKS_DIR
from resctrlctl.doctor.finding import Finding, Severity
from resctrlctl.doctor.host import Host
from resctrlctl.doctor.resctrl import rmids
from resctrlctl.doctor.service import unit_state
from resctrlctl.host.status import runtimes_without_hook

_HOOK_FOLDERS = (HOOKS_DIR, "/etc/containers/oci/hooks.d")
_OWN_HOOK = "resctrlmon"
_INSTALL_HOOK = (
    "Install resctrlmond again (package, or 'make install' in the source), then: resctrlctl hooks enable",
)
_NRI_SOCKET = "/run/nri/nri.sock"
_NRI = "io.containerd.nri.v1.nri"
_NRI_UNIT = "resctrlmon-nri.service"
_CONTAINERD = "/etc/containerd/config.toml"
_K3S = "/var/lib/rancher/k3s/agent/etc/containerd"
# The configurations of running containers (config.json of the OCI runtime specification).
_BUNDLES = (
    "/run/containerd/io.containerd.runtime.v2.task/*/*/config.json",
    "/run/k3s/containerd/io.containerd.runtime.v2.task/*/*/config.json",
    "/run/containers/storage/overlay-containers/*/userdata/config.json",
    "/var/lib/containers/storage/overlay-containers/*/userdata/config.json",
)


def check_hooks(host: Host) -> Iterator[Finding]:
    """Check each hook file that the runtimes read, and whether the own hook is enabled."""
    runtimes = [name for name in ("podman", "crio") if host.program(name)]
    files = [f"{folder}/{name}" for folder in _HOOK_FOLDERS for name in host.names(folder, "*.json")]
    faults = [finding for path in files for finding in _hook_file(host, path)]
    yield from faults
    is_enabled = any(os.path.basename(path).startswith(_OWN_HOOK) for path in files)
    if runtimes and not is_enabled:
        yield Finding(
            Severity.NOTE,
            "hooks",
            f"the OCI hook is not enabled for {' and '.join(runtimes)}",
            f"Containers of {' and '.join(runtimes)} are not monitored, unless the NRI plugin monitors them.",
            ("resctrlctl hooks enable",),
        )
    elif is_enabled and not faults:
        yield Finding(Severity.OK, "hooks", "the OCI hook is enabled, and all hook files are valid")
    for runtime in runtimes_without_hook(host.root):
        yield Finding(
            Severity.NOTE,
            "hooks",
            f"{runtime} does not call the OCI hook",
            "Its containers are not monitored from their start.",
            ('resctrlctl assign "$id" --cgroup PATH  # DOCKER AND ROOTLESS PODMAN in resctrlctl(1)',),
        )


def _hook_file(host: Host, path: str) -> Iterator[Finding]:
    is_own = os.path.basename(path).startswith(_OWN_HOOK)
    enable = f"rm {path} && resctrlctl hooks enable" if is_own else f"rm {path}  # or correct it"
    if is_own and not host.exists(path):
        yield Finding(
            Severity.ERROR,
            "hooks",
            f"{path} is a link to a file that does not exist",
            "The runtimes do not call the hook.",
            (f"rm {path}", *_INSTALL_HOOK),
        )
        return
    try:
        program = json.loads(host.read(path))["hook"]["path"]
        if not isinstance(program, str):
            raise TypeError("hook.path is not a text")
    except (ValueError, KeyError, TypeError) as error:
        yield Finding(
            Severity.ERROR,
            "hooks",
            f"{path} is not a hook file: {_describe(error)}",
            "Podman starts no container while it cannot read one of the files.",
            (enable,),
        )
        return
    if not host.is_executable(program):
        yield Finding(
            Severity.ERROR,
            "hooks",
            f"{path} names {program}, which is not an executable program",
            "Depending on the runtime, the hook is skipped or no container starts.",
            (f"rm {path}  # containers start again, without being monitored", *_INSTALL_HOOK)
            if is_own
            else (enable,),
        )


def _describe(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}: {error.msg}"
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def check_nri(host: Host) -> Iterator[Finding]:
    """Check that containerd offers NRI, and that the plugin is connected."""
    is_k3s = host.is_listening("/run/k3s/containerd/containerd.sock")
    path = f"{_K3S}/config.toml" if is_k3s else _CONTAINERD
    is_running = is_k3s or host.is_listening("/run/containerd/containerd.sock")
    has_nri = host.is_listening(_NRI_SOCKET)
    if not is_running and not host.program("containerd") and not has_nri:
        return
    text = host.read(path)
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        yield Finding(
            Severity.ERROR,
            "nri",
            f"{path} is not valid TOML: {error}",
            "containerd does not start with it.",
            (f"{path}: correct it, then: systemctl restart containerd",),
        )
        return
    table = _table(settings, "plugins", _NRI)
    is_off = table.get("disable") is True
    if is_off or table.get("disable_connections") is True or (is_running and not has_nri):
        yield Finding(
            Severity.WARNING,
            "nri",
            "containerd does not offer NRI" if is_off or not table else "containerd accepts no NRI plugin",
            f"Without NRI, containers of containerd are not monitored ({_NRI_SOCKET} is the plugin's connection).",
            _nri_fix(path, text, settings, is_k3s=is_k3s),
        )
        return
    if not has_nri:
        yield Finding(
            Severity.NOTE, "nri", "containerd is not running, so it is unknown whether it offers NRI", "", ()
        )
        return
    state = unit_state(host, _NRI_UNIT)
    if state and state.get("ActiveState") != "active":
        yield Finding(
            Severity.WARNING,
            "nri",
            f"the runtime offers NRI, and {_NRI_UNIT} is {state.get('ActiveState', 'unknown')}",
            "No pod is monitored, unless the runtime launches the plugin or calls the hook.",
            (f"systemctl enable --now {_NRI_UNIT}",),
        )
        return
    yield Finding(Severity.OK, "nri", f"the runtime offers NRI ({_NRI_SOCKET})")


def _table(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    found: Any = settings
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _nri_fix(path: str, text: str, settings: dict[str, Any], *, is_k3s: bool) -> tuple[str, ...]:
    """Return the change of containerd's configuration that enables NRI, in the form of the file's version."""
    # containerd 2 writes version 3, with single quotes; version 2 is read by containerd 1.3 and later.
    is_new = settings.get("version") == 3
    quote = "'" if is_new else '"'
    heading = f"[plugins.{quote}{_NRI}{quote}]"
    lines = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if _NRI in line and line.lstrip().startswith("[") and not line.lstrip().startswith("#")
    ]
    wanted = ("  disable = false", "  disable_connections = false", '  socket_path = "/var/run/nri/nri.sock"')
    if is_k3s:
        template = f"{_K3S}/{'config-v3.toml.tmpl' if is_new else 'config.toml.tmpl'}"
        return (f"{template}:", '{{ template "base" . }}', heading, *wanted, "systemctl restart k3s")
    if lines:
        return (f"{path}:{lines[0]}: change the lines below {heading} to:", *wanted, "systemctl restart containerd")
    version = () if settings.get("version") in (2, 3) else ("version = 2",)
    return (f"{path}: add:", *version, heading, *wanted, "systemctl restart containerd")


def check_runtime_groups(host: Host) -> Iterator[Finding]:
    """Find containers for which the runtime itself creates a monitoring group."""
    found = []
    for path in _bundles(host):
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        if re.search(r'"enableMonitoring"\s*:\s*true', text):
            found.append(os.path.basename(os.path.dirname(path).removesuffix("/userdata")))
    if found:
        usage = rmids(host)
        is_short = usage is not None and usage.is_short
        yield Finding(
            Severity.WARNING if is_short else Severity.NOTE,
            "runtime-groups",
            f"the runtime creates monitoring groups for containers (enableMonitoring), such as {found[0]}",
            "If no RMID is free, such a container does not start. resctrlmond only observes its group, because a "
            "task is in one group only, so no total of it is exact.",
            ("Remove linux.intelRdt.enableMonitoring from the containers' configuration (NRI plugin, annotation)",),
        )


def _bundles(host: Host) -> list[str]:
    """Return the configurations of running containers. Raises OSError if a directory of them cannot be listed."""
    paths = []
    for pattern in _BUNDLES:
        host.names(pattern.partition("/*")[0])  # glob ignores errors
        paths += sorted(glob.glob(host.path(pattern)))
    return paths


def check_runtime_classes(host: Host) -> Iterator[Finding]:
    """Find runtimes that manage the classes of resctrl."""
    for path in (_CONTAINERD, "/etc/crio/crio.conf", *(f"/etc/crio/crio.conf.d/{name}" for name in _crio(host))):
        for number, line in enumerate(host.read(path).splitlines(), 1):
            if re.match(r"\s*rdt_config_file\s*=\s*[\"'][^\"']", line):
                yield Finding(
                    Severity.NOTE,
                    "runtime-classes",
                    f"the runtime manages the classes of resctrl (rdt_config_file, {path}:{number})",
                    "When it starts, it removes classes that its file does not name, with their monitoring groups.",
                )


def _crio(host: Host) -> list[str]:
    return host.names("/etc/crio/crio.conf.d", "*.conf")
