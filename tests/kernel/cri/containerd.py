# SPDX-License-Identifier: Apache-2.0
"""The versions of containerd in the guest: Debian 13's own, and unstable's in a separate directory."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.kernel.machine import cache, sources
from tests.kernel.machine.tools import tool

# For containerd 1.7, where NRI is off by default. The native snapshotter works on any filesystem. With the runtime
# "systemd", systemd creates the control groups; the other runtime creates them itself.
_CONFIG_2 = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.systemd]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.systemd.options]
        SystemdCgroup = true
[plugins."io.containerd.nri.v1.nri"]
  disable = false
  # The guest may be slow.
  plugin_request_timeout = "20s"
"""

# For containerd 2, where NRI is on.
_CONFIG_3 = """
version = 3
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "native"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.systemd]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.systemd.options]
        SystemdCgroup = true
[plugins."io.containerd.nri.v1.nri"]
  plugin_request_timeout = "20s"
"""

_FOLDER = "/opt/containerd"
_DROP_IN = f"""\
[Service]
Environment=PATH={_FOLDER}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin
ExecStart=
ExecStart={_FOLDER}/containerd
"""


@dataclass(frozen=True)
class Containerd:
    """One version: its configuration, and the drop-in file of its service ("" for the guest's own)."""

    series: str
    config: str
    drop_in: str = ""


TRIXIE = Containerd("1.7", _CONFIG_2)
SID = Containerd("2.", _CONFIG_3, _DROP_IN)
DROP_IN = "/run/systemd/system/containerd.service.d/unstable.conf"


def programs() -> tuple[Path, str]:
    """Return the directory with unstable's programs, and its path in the guest.

    These are two programs that need no library except libc. runc and all other tools are those of the guest.
    """
    return cache.artifact("containerd", cache.key(Path(__file__)), _build), _FOLDER


def _build(place: Path) -> None:
    cache.progress("fetching containerd of Debian unstable")
    work = place / "work"
    work.mkdir()
    environment = sources.private_apt(work, "sid")
    tool(["apt-get", "-q", "download", "containerd"], cwd=work, env=environment)
    [package] = work.glob("containerd_*.deb")
    tool(["dpkg-deb", "-x", package, work / "root"])
    for program in ("containerd", "containerd-shim-runc-v2"):
        (work / "root" / "usr" / "bin" / program).rename(place / program)
    shutil.rmtree(work)
