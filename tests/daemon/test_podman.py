# SPDX-License-Identifier: Apache-2.0
"""Name and kind of Podman's containers, which are not in their OCI state: from conmon and from the control group."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.api.oci_hook import _placement
from resctrlmond.api.oci_state import State
from resctrlmond.api.podman import container_name, is_infra, is_podman

ID = "4d" * 32
INFRA = "5e" * 32
POD = "6f" * 32
NOBODY = 65534

# Executes the arguments after "--" as a child, and waits for it.
_PARENT = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[sys.argv.index('--') + 1:]).returncode)"
_INIT = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"

Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts monitor, runtime and init process of a container, and returns the pid of init."""
    started: list[subprocess.Popen[str]] = []
    # A Python that other users can execute, too.
    python = os.path.realpath("/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        script = Path(folder, "parent.py")
        script.write_text(_PARENT)

        def begin(*arguments: str, name: str = "conmon", runtimes: int = 1, uid: int = 0) -> int:
            program = Path(folder, name)
            program.symlink_to(python)
            runtime = [python, str(script), "--"] * runtimes
            command = [str(program), str(script), *arguments, "--", *runtime, python, "-c", _INIT]
            options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "user": uid}
            started.append(subprocess.Popen(command, **options))  # type: ignore[call-overload]
            assert started[-1].stdout
            return int(started[-1].stdout.readline())

        yield begin
        for monitor in started:
            monitor.communicate()


def test_name_of_a_container_is_an_argument_of_its_monitor(start: Start) -> None:
    pid = start("--api-version", "1", "-c", ID, "-u", ID, "-r", "/usr/bin/crun", "-n", "web", "--runtime-arg", "-n")
    assert container_name(ID, pid) == "web"


@pytest.mark.parametrize(
    ("annotations", "names"),
    [
        ({"io.container.manager": "libpod"}, {"container.name": "web"}),
        ({"io.container.manager": "libpod", "io.kubernetes.container.name": "app"}, {"container.name": "app"}),
        ({}, {}),
    ],
    ids=["podman", "named by an annotation", "another manager"],
)
def test_container_of_podman_has_its_name_as_an_attribute(
    start: Start, annotations: dict[str, str], names: dict[str, str]
) -> None:
    pid = start("-c", ID, "-n", "web")
    state = State(oci_version="1.0", id=ID, status="created", pid=pid, annotations=annotations)
    container, _, _ = _placement(state, lambda _pod, _container: None)
    assert container.attributes == names


def test_monitor_of_another_container_is_ignored(start: Start) -> None:
    assert container_name(ID, start("-c", INFRA, "-n", "web")) == ""


def test_parent_that_is_not_a_monitor_is_ignored(start: Start) -> None:
    assert container_name(ID, start("-c", ID, "-n", "web", name="sh")) == ""


def test_monitor_of_another_user_is_ignored(start: Start) -> None:
    assert container_name(ID, start("-c", ID, "-n", "web", uid=NOBODY)) == ""


def test_grandparent_of_the_runtime_is_ignored(start: Start) -> None:
    assert container_name(ID, start("-c", ID, "-n", "web", runtimes=2)) == ""


@pytest.mark.parametrize("arguments", [["-c", ID], ["-c", ID, "-n"], []], ids=ascii)
def test_monitor_without_a_name_is_accepted(start: Start, arguments: list[str]) -> None:
    assert container_name(ID, start(*arguments)) in ("", "--")


def test_ended_process_has_no_name() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert container_name(ID, ended.pid) == ""


@pytest.mark.parametrize(
    ("cgroup", "annotations", "expected"),
    [
        (f"/libpod_parent/{POD}/libpod-{ID}", {}, True),
        (f"/mine/{POD}/libpod-{ID}", {}, True),
        (f"/machine.slice/machine-libpod_pod_{POD}.slice/libpod-{ID}.scope", {}, True),
        (f"/machine.slice/machine-libpod_pod_{POD}.slice/libpod-{ID}.scope/container", {}, True),
        (f"/libpod_parent/{POD}/libpod-{ID}", {"io.kubernetes.cri-o.SandboxID": INFRA}, False),
        (f"/libpod_parent/libpod-{ID}", {}, False),
        (f"/machine.slice/libpod-{ID}.scope/container", {}, False),
        (f"/system.slice/web.service/libpod-payload-{ID}", {}, False),
        (f"/libpod_parent/{POD}/libpod-{INFRA}", {}, False),
        ("", {}, False),
    ],
)
def test_infra_container_is_in_a_pod_and_names_no_other_sandbox(
    cgroup: str, annotations: dict[str, str], expected: bool
) -> None:
    assert is_infra(ID, annotations, f"/sys/fs/cgroup{cgroup}") is expected


def test_podman_is_recognized_by_its_annotation() -> None:
    assert is_podman({"io.container.manager": "libpod"})
    assert not is_podman({"io.container.manager": "cri-o"})
    assert not is_podman({})
