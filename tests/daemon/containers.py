# SPDX-License-Identifier: Apache-2.0
"""Containers while their hooks run: init processes, each in a control group that is named after its container."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator

from tests.daemon.conftest import cgroup_root, end

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
