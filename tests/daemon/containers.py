# SPDX-License-Identifier: Apache-2.0
"""Containers while their hooks run: init processes, each in a control group that is named after its container."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.daemon.conftest import Machine, cgroup_root, end
from tests.hook.builds import compile_hook
from tests.wait import wait_until

CONTAINER = "4d" * 32
UID = "0f8fad5b-d9cb-469f-a165-70867728950e"

Containers = dict[str, "subprocess.Popen[bytes]"]


@contextlib.contextmanager
def containers(count: int) -> Iterator[Containers]:
    """Start the init processes of containers. Yield them by the container's id."""
    parent = cgroup_root() / f"resctrlmond-burst-{os.getpid()}"
    parent.mkdir()
    inits: Containers = {}
    try:
        for number in range(count):
            id_ = f"{number:04x}" * 16
            inits[id_] = subprocess.Popen(["sleep", "3600"])
            (parent / f"crio-{id_}.scope").mkdir()
            (parent / f"crio-{id_}.scope" / "cgroup.procs").write_text(str(inits[id_].pid))
        yield inits
    finally:
        for id_, init in inits.items():
            end(init)
            (parent / f"crio-{id_}.scope").rmdir()
        parent.rmdir()


def state_of(id_: str, pid: int) -> bytes:
    """Return the state that a runtime passes to the hooks of a container (OCI runtime-spec, runtime.md, "State")."""
    state = {"ociVersion": "1.0.2", "id": id_, "status": "created", "pid": pid, "bundle": "/b", "annotations": {}}
    return json.dumps(state).encode()


def execute(child: subprocess.Popen[bytes]) -> None:
    """Let a container's init process execute its program, and wait until it has."""
    assert child.stdin
    child.stdin.write(b"go\n")
    child.stdin.flush()
    wait_until(lambda: b"sleep" in Path(f"/proc/{child.pid}/cmdline").read_bytes())


def state(pid: int, id_: str = CONTAINER, **annotations: str) -> dict[str, Any]:
    """Return an OCI state; in the names of annotations, "__" stands for "." and "_" for "-"."""
    names = {name.replace("__", ".").replace("_", "-"): value for name, value in annotations.items()}
    return {
        "ociVersion": "1.0.2",
        "id": id_,
        "status": "created",
        "pid": pid,
        "bundle": "/run/bundle",
        "annotations": names,
    }


def hook(machine: Machine, stage: str, text: object, *options: str) -> tuple[int, str]:
    """Run the hook with a state, and return its exit code and its standard error."""
    command = [str(compile_hook()), stage, "--socket", machine.socket]
    command += ["--timeout", "10", "--journal", "/nowhere", *options]
    input_ = text if isinstance(text, bytes) else json.dumps(text).encode()
    done = subprocess.run(command, input=input_, capture_output=True, check=False, timeout=60)
    return done.returncode, done.stderr.decode()
