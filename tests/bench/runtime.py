# SPDX-License-Identifier: Apache-2.0
"""The time crun takes for a container that does nothing, with the OCI hook and without."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from resctrlmond.client import Client
from tests.bench.host import ROOT, Host
from tests.bench.measure import SECONDS, Row, interleaved
from tests.hook.builds import compile_hook

# A hook that does not read its state can end before crun has written it, and crun fails with EPIPE.
_TRUE = "#include <unistd.h>\nint main(void) { char part[4096]; while (read(0, part, sizeof part) > 0); return 0; }\n"
_STAGES = ("createRuntime", "poststop")
# crun 1.8 refuses hosts that have the hierarchies of both versions of control groups.
_CGROUP2 = """
umount --recursive /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup || exit
while read -r bundle name; do
    crun --root "$1" --cgroup-manager=cgroupfs run --bundle "$bundle" "$name" </dev/null >&2; echo $?
done
"""


def starts(host: Host, client: Client, rounds: int) -> Iterator[Row]:
    """Measure ``crun run`` of a static program, in turns without hooks, with an empty hook, and with ours."""
    assert shutil.which("crun"), "crun is not installed: tests/host-packages installs it"
    # Programs cannot be executed on /dev/shm of some hosts.
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as name:
        folder = Path(name)
        true = str(folder / "true")
        subprocess.run(["cc", "-static", "-Os", "-x", "c", "-", "-o", true], input=_TRUE, text=True, check=True)
        program = str(compile_hook())
        ours = {stage: [_hook(program, stage, "--strict", "--socket", host.varlink)] for stage in _STAGES}
        empty = {"createRuntime": [_hook(true)]}
        variants: list[dict[str, Any]] = [{}, empty, {"createRuntime": ours["createRuntime"]}, ours]
        bundles = [_bundle(folder / str(number), true, hooks) for number, hooks in enumerate(variants)]
        numbers = itertools.count()

        def run(bundle: str) -> None:
            assert shell.stdin and shell.stdout
            shell.stdin.write(f"{bundle} bench-{next(numbers)}\n")
            shell.stdin.flush()
            assert shell.stdout.readline() == "0\n"

        def wait_for_ends() -> None:
            while any(each["state"] == "active" for each in client.call("org.resctrlmon.Manager.List")["workloads"]):
                pass

        command = ["unshare", "--mount", "sh", "-c", _CGROUP2, "sh", str(folder / "crun")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
            works = [partial(run, bundle) for bundle in bundles]
            none, nothing, start, life = interleaved(rounds, *works, before=wait_for_ends)
    workloads = client.call("org.resctrlmon.Manager.List")["workloads"]
    # The look-alike has no witness, so they are not exact.
    assert not any(member.get("late") for workload in workloads for member in workload["members"])
    assert len(workloads) == 2 * (rounds + 1)
    yield Row("crun run with the OCI hook at createRuntime", start, "without hooks", none, SECONDS, goal=1.35)
    yield Row(
        "crun run with the OCI hook at createRuntime and poststop", life, "without hooks", none, SECONDS, goal=1.6
    )
    yield Row("crun run with an empty hook in C", nothing, "without hooks", none, SECONDS)


def _hook(program: str, *arguments: str) -> dict[str, Any]:
    return {"path": program, "args": [program, *arguments], "env": []}


def _bundle(folder: Path, program: str, hooks: dict[str, Any]) -> str:
    """Return the bundle of a container that executes the program (OCI runtime specification, config.md)."""
    (folder / "rootfs" / "dev").mkdir(parents=True)
    (folder / "rootfs" / "true").hardlink_to(program)
    config = {
        "ociVersion": "1.0.2",
        "process": {"cwd": "/", "args": ["/true"], "user": {"uid": 0, "gid": 0}},
        "root": {"path": "rootfs"},
        "mounts": [],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]},
        "hooks": hooks,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="ascii")
    return str(folder)
