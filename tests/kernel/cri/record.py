# SPDX-License-Identifier: Apache-2.0
"""Record the NRI messages of real containerds and the adapter into tests/nri/recordings (make record)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.kernel.cri.containerd import SID, TRIXIE, Containerd
from tests.kernel.cri.node import HERE, THERE, Node, serving
from tests.kernel.install import install, stage
from tests.kernel.machine import Machine

RECORDINGS = Path(__file__).parents[2] / "nri" / "recordings"
_TAP, _FILE = "/run/nri-tap.sock", "/run/nri-tap.json"


def scenario(node: Node) -> None:
    """Make three connections: one in which pods start and end, one of a new adapter, one of a new containerd."""
    pod, other = node.pod(), node.pod()
    first, _ = node.container(pod)
    second, _ = node.container(pod)
    node.container(other)
    node.remove_container(first)
    node.remove_sandbox(other.sandbox)
    for service in ("resctrlmon-nri", "containerd"):
        count = node.registrations()
        node.run(f"systemctl restart {service}", timeout=100)
        node.registered_again(count)
        again, _ = node.container(pod)
        node.remove_container(again)
    node.remove_container(second)
    node.remove_sandbox(pod.sandbox)


def record(containerd: Containerd, work: Path) -> None:
    """Record one version, in a separate guest."""
    with Machine("cat").start() as guest:
        install(guest, stage(work / "staged"))
        with serving(guest, work, containerd) as node:
            shutil.copy(HERE / "tap.py", work / "tap.py")
            guest.put(work / "tap.py", f"{THERE}/tap.py")
            tap = f"python3 {THERE}/tap.py {_TAP} /run/nri/nri.sock {_FILE}"
            node.run(f"systemd-run --unit nri-tap {tap}")
            guest.write(
                "/run/systemd/system/resctrlmon-nri.service.d/debug.conf",
                f"[Service]\nExecStart=\nExecStart=/usr/bin/resctrlmon-nri --socket {_TAP}\n",
            )
            count = node.registrations()
            node.run("systemctl daemon-reload && systemctl restart resctrlmon-nri")
            node.registered_again(count)
            scenario(node)
            version = node.out("/opt/containerd/containerd -v || containerd -v").split()[2]
            (RECORDINGS / f"containerd-{version.partition('~')[0].partition('+')[0]}.json").write_bytes(
                guest.read(_FILE)
            )


def main() -> None:
    """Record all versions."""
    for containerd in (TRIXIE, SID):
        with tempfile.TemporaryDirectory() as work:
            record(containerd, Path(work))


if __name__ == "__main__":
    main()
