# SPDX-License-Identifier: Apache-2.0
"""From the OCI hook, run as a runtime runs it, to the group and back: what it does, and what it lets be."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resctrlmond import oci_hook
from resctrlmond.api.hooks import pod_cgroup
from resctrlmond.api.varlink.client import Client, VarlinkError
from resctrlmond.api.verbs import VERBS
from resctrlmond.resctrl import processes
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.control.messages import Operation
from tests.daemon.conftest import MANAGER, Machine
from tests.wait import wait_until

Start = Callable[[], "subprocess.Popen[bytes]"]
CTR = "4d" * 32
UID = "0f8fad5b-d9cb-469f-a165-70867728950e"

# A container's first process as a runtime leaves it to its hooks: there, and waiting for the word to execute.
_INIT = "import os, sys; sys.stdin.readline(); os.execvp('sleep', ['sleep', '600'])"


@pytest.fixture
def init() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the first processes of containers, each in a control group of its own."""
    made: list[subprocess.Popen[bytes]] = []
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")

    def own(one: subprocess.Popen[bytes]) -> Path:
        return Path(top, f"resctrlmond-hook-{os.getpid()}-{one.pid}")

    def start() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, "-c", _INIT], stdin=subprocess.PIPE))
        own(made[-1]).mkdir()
        (own(made[-1]) / "cgroup.procs").write_text(str(made[-1].pid))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.wait()
        own(one).rmdir()
        assert one.stdin
        with contextlib.suppress(BrokenPipeError):
            one.stdin.close()


def execute(child: subprocess.Popen[bytes]) -> None:
    """Tell the container's first process to become its program, and wait until it has."""
    assert child.stdin
    child.stdin.write(b"go\n")
    child.stdin.flush()
    wait_until(lambda: b"sleep" in Path(f"/proc/{child.pid}/cmdline").read_bytes())


def state(pid: int, id_: str = CTR, **annotations: str) -> dict[str, Any]:
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
    """Exit code and stderr of the hook, run with that state."""
    command = [sys.executable, "-IS", oci_hook.__file__, stage, "--socket", machine.socket]
    command += ["--timeout", "10", "--journal", "/nowhere", *options]
    given_ = text if isinstance(text, bytes) else json.dumps(text).encode()
    done = subprocess.run(command, input=given_, capture_output=True, check=False, timeout=60)
    return done.returncode, done.stderr.decode()


def test_a_container_is_in_its_group_before_it_executes_and_ends_with_poststop(machine: Machine, init: Start) -> None:
    machine.start()
    child = init()
    labels = {"io__kubernetes__container__name": "web"}
    assert hook(machine, "createRuntime", state(child.pid, **labels), "--strict") == (0, "")
    assert b"sleep" not in Path(f"/proc/{child.pid}/comm").read_bytes()
    assert machine.tasks(CTR) == {child.pid}
    group = machine.group(CTR)
    assert (group["state"], group["baseline"]) == ("active", "exact")
    assert group["attributes"] == {"bundle": "/run/bundle", "container.name": "web"}
    assert group["claims"][0]["owner"] == "oci"
    execute(child)
    assert machine.tasks(CTR) == {child.pid}
    child.kill()
    child.wait()
    assert hook(machine, "poststop", state(0), "--strict") == (0, "")
    assert machine.group(CTR)["state"] == "completed"
    assert machine.groups() == []
    assert hook(machine, "poststop", state(0), "--strict") == (0, "")


def test_a_container_without_a_control_group_of_its_own_is_late_and_says_why(machine: Machine, init: Start) -> None:
    """With --cgroups=disabled a 'podman exec' was never seen, and the total was called exact."""
    machine.start()
    child, session = init(), init()
    own = Path(f"/proc/{session.pid}/cgroup").read_text().splitlines()[-1].partition("::")[2]
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
    Path(f"{top}{own}", "cgroup.procs").write_text(str(child.pid))
    assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
    group = machine.group(CTR)
    assert (group["state"], group["baseline"], group["members"][0].get("cgroup")) == ("active", "late", None)
    totals = machine.call("Read", key=CTR)["totals"]
    assert {total["quality"] for total in totals} == {"late"}
    assert all("has no control group of its own" in total["reason"] for total in totals)


def test_a_poststop_that_comes_late_ends_nothing_of_the_container_that_came_back(
    machine: Machine, init: Start
) -> None:
    """Podman restarts a container under its id. A call whose hook gave up may still wait for its turn by then."""
    machine.start()
    child = init()
    assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
    assert hook(machine, "poststop", state(0), "--strict") == (0, "")
    assert machine.group(CTR)["state"] == "active"
    assert machine.tasks(CTR) == {child.pid}
    child.kill()
    child.wait()
    assert machine.reaches(CTR, "completed")


def test_a_container_that_comes_back_is_a_new_run(machine: Machine, init: Start) -> None:
    machine.start()
    for generation in (1, 2):
        child = init()
        assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
        assert machine.group(CTR)["generation"] == generation
        child.kill()
        child.wait()
        assert machine.reaches(CTR, "completed")
    assert os.listdir(machine.run / "completed" / CTR) == ["1"]


@pytest.fixture
def cgroup() -> Iterator[Callable[[str, int], Path]]:
    """Makes a control group below the root, puts a process into it, and removes it at the end."""
    top = Path(next(mount.point for mount in mounts() if mount.fstype == "cgroup2"))
    made: list[Path] = []

    def make(name: str, pid: int) -> Path:
        path = top / name
        made.extend(one for one in (path.parent, path) if not one.exists())
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.procs").write_text(str(pid))
        return path

    yield make
    for path in reversed(made):
        for pid in (path / "cgroup.procs").read_text().split():
            (top / "cgroup.procs").write_text(pid)
        path.rmdir()


@pytest.mark.parametrize("spelt", [UID, UID.upper(), UID.replace("-", "_")])
def test_a_container_in_its_pods_control_group_is_counted_with_the_pod(
    machine: Machine, init: Start, cgroup: Callable[[str, int], Path], spelt: str
) -> None:
    machine.start()
    child = init()
    cgroup(f"hook-{os.getpid()}-pod{spelt}/{CTR}", child.pid)
    named = state(child.pid, io__kubernetes__pod__uid=UID, io__kubernetes__pod__name="web-0")
    assert hook(machine, "createRuntime", named, "--strict") == (0, "")
    assert machine.groups() == [UID]
    assert machine.group(UID)["attributes"]["pod.name"] == "web-0"


@pytest.mark.parametrize(
    "place", ["", "0a8fad5b-d9cb-469f-a165-70867728950e", "0A8FAD5B-D9CB-469F-A165-70867728950E"]
)
def test_an_annotation_alone_counts_no_container_in_a_pod(
    machine: Machine, init: Start, cgroup: Callable[[str, int], Path], place: str
) -> None:
    """A container outside the pod's control group claims the UID of a pod that is monitored, and its name."""
    machine.start()
    victim, other = init(), init()
    cgroup(f"hook-{os.getpid()}-pod{UID}/{CTR}", victim.pid)
    named = state(victim.pid, io__kubernetes__pod__uid=UID, io__kubernetes__pod__name="web-0")
    assert hook(machine, "createRuntime", named, "--strict") == (0, "")
    id_ = "bb" * 32
    cgroup(f"hook-{os.getpid()}-{f'pod{place}' if place else 'no'}/{id_}", other.pid)
    claiming = state(other.pid, id_, io__kubernetes__pod__uid=UID, io__kubernetes__pod__name="bank-0")
    assert hook(machine, "createRuntime", claiming, "--strict") == (0, "")
    assert machine.groups() == sorted([UID, id_])
    assert machine.tasks(UID) == {victim.pid}
    assert machine.tasks(id_) == {other.pid}
    assert machine.group(UID)["attributes"]["pod.name"] == "web-0"
    assert not [name for name in machine.group(id_)["attributes"] if name.startswith("pod.")]
    assert f"container {id_} claims to be of pod {UID}" in machine.log.read_text()
    other.kill()
    other.wait()
    ended = state(0, id_, io__kubernetes__pod__uid=UID)
    assert hook(machine, "poststop", ended, "--strict") == (0, "")
    assert machine.group(id_)["state"] == "completed"
    assert machine.group(UID)["state"] == "active"


def test_another_owners_attributes_are_not_overwritten(machine: Machine) -> None:
    machine.start()
    machine.call("Create", key="k", claim="first", attributes={"name": "a", "only": "1"})
    machine.call("Create", key="k", claim="second", attributes={"name": "b", "more": "2"})
    assert machine.group("k")["attributes"] == {"name": "a", "only": "1", "more": "2"}
    machine.call("Create", key="k", claim="first", attributes={"name": "c", "more": "3"})
    assert machine.group("k")["attributes"] == {"name": "c", "only": "1", "more": "2"}
    machine.call("Release", key="k", claim="first")
    machine.call("Create", key="k", claim="second", attributes={"name": "d"})
    assert machine.group("k")["attributes"]["name"] == "d"


def test_a_pods_containers_share_one_group_however_its_uid_is_spelt(
    machine: Machine, init: Start, cgroup: Callable[[str, int], Path]
) -> None:
    machine.start()
    sandbox, container = init(), init()
    cgroup(f"hook-{os.getpid()}-pod{UID}/{'aa' * 32}", sandbox.pid)
    cgroup(f"hook-{os.getpid()}-pod{UID}/{'bb' * 32}", container.pid)
    spelt = {"io__kubernetes__pod__uid": UID}
    compact = {"io__kubernetes__cri__sandbox_uid": UID.replace("-", "").upper()}
    assert hook(machine, "createRuntime", state(sandbox.pid, "aa" * 32, **spelt), "--strict") == (0, "")
    assert hook(machine, "createRuntime", state(container.pid, "bb" * 32, **compact), "--strict") == (0, "")
    assert machine.groups() == [UID]
    assert machine.tasks(UID) == {sandbox.pid, container.pid}
    assert [member["id"] for member in machine.group(UID)["members"]] == ["aa" * 32, "bb" * 32]
    for child, id_ in ((container, "bb" * 32), (sandbox, "aa" * 32)):
        child.kill()
        child.wait()
        assert hook(machine, "poststop", state(0, id_, **spelt), "--strict") == (0, "")
    assert machine.group(UID)["state"] == "idle"
    assert machine.groups() == [UID]


def test_a_hook_again_changes_nothing(machine: Machine, init: Start) -> None:
    machine.start()
    child = init()
    for _ in range(2):
        assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
    group = machine.group(CTR)
    assert (group["generation"], len(group["members"]), len(group["claims"])) == (1, 1, 1)


def test_a_container_whose_hook_gave_up_while_it_was_assigned_is_late(machine: Machine, init: Start) -> None:
    """It ran outside from then on, was moved seconds later, and its total was exact."""
    machine.start()
    Control(str(machine.top / "resctrl")).set_faults(Fault(on=Operation.MKDIR, milliseconds=5_000, times=1))
    child, given_up = init(), ["--timeout", "1", "--strict"]
    while not os.listdir(machine.run / "records"):
        # A machine with much to do may not even send the call in that time: then there is nothing to see.
        code, said = hook(machine, "createRuntime", state(child.pid), *given_up)
        assert (code, "gave up" in said) == (1, True)
    execute(child)
    wait_until(lambda: machine.group(CTR)["state"] == "active")
    assert machine.tasks(CTR) == {child.pid}
    (member,) = machine.group(CTR)["members"]
    assert member["late"] and member["cpuTimeBeforeNs"] > 0
    totals = machine.call("Read", key=CTR)["totals"]
    assert {total["quality"] for total in totals} == {"late"}
    assert all("its caller did not wait for the reply" in total["reason"] for total in totals)


def test_each_of_50_containers_that_start_at_once_is_in_its_group_when_its_hook_ends_or_marked(
    machine: Machine, init: Start
) -> None:
    machine.start()
    # Slower than hooks wait: the last of them give up.
    Control(str(machine.top / "resctrl")).set_faults(Fault(on=Operation.MKDIR, milliseconds=100))
    children = {f"{number:02x}" * 32: init() for number in range(50)}

    def start(key: str) -> bool:
        hook(machine, "createRuntime", state(children[key].pid, key), "--timeout", "2")
        try:
            return children[key].pid in machine.tasks(key)
        except FileNotFoundError:
            return False

    with ThreadPoolExecutor(len(children)) as runtimes:
        inside = dict(zip(children, runtimes.map(start, children), strict=True))
    Control(str(machine.top / "resctrl")).set_faults()
    # Behind all that the hooks have left.
    machine.call("Create", key="last")
    outside = {group["key"] for group in machine.call("List")["groups"]} - {"last"}
    outside -= {key for key, is_inside in inside.items() if is_inside}
    assert all(machine.reaches(key, "active") for key in outside)
    assert {machine.group(key)["baseline"] for key in outside} <= {"late"}
    assert not all(inside.values()), "no hook gave up"


@pytest.mark.parametrize(("waits", "quality"), [(True, "exact"), (False, "late")], ids=["waits", "hangs up"])
def test_a_caller_of_assign_that_hangs_up_before_it_is_answered_makes_it_late(
    machine: Machine, init: Start, waits: bool, quality: str
) -> None:
    machine.start()
    Control(str(machine.top / "resctrl")).set_faults(Fault(on=Operation.MKDIR, milliseconds=2_000, times=1))
    child = init()
    call = {"method": f"{MANAGER}.Assign", "parameters": {"key": CTR, "pid": child.pid, "late": False}}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(machine.socket)
        caller.sendall(json.dumps(call).encode() + b"\0")
        if waits:
            # It sends nothing more, but listens.
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(1)
        else:
            while not os.listdir(machine.run / "records"):
                time.sleep(0.01)
    assert machine.reaches(CTR, "active")
    assert machine.group(CTR)["baseline"] == quality


def test_an_assign_to_which_no_answer_is_wanted_is_late(machine: Machine, init: Start) -> None:
    machine.start()
    child = init()
    parameters = {"key": CTR, "pid": child.pid, "late": False}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(machine.socket)
        call = {"method": f"{MANAGER}.Assign", "parameters": parameters, "oneway": True}
        caller.sendall(json.dumps(call).encode() + b"\0")
        wait_until(lambda: machine.call("List")["groups"])
        assert machine.reaches(CTR, "active")
    assert machine.group(CTR)["baseline"] == "late"


def test_hostile_states_change_nothing_and_hold_nobody_up(machine: Machine) -> None:
    machine.start()
    assert machine.daemon is not None
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    stats = {number: processes.stat(number) for number in numbers}
    kthreads = [number for number, stat in stats.items() if stat is not None and stat.is_kernel_thread]
    pids = [0, -1, 1, 2**22 + 1, 2**31, 2**70, machine.daemon.pid, *kthreads[:1]]
    states: list[object] = [state(pid) for pid in pids]
    own = os.getpid()
    states += [state(own, id_) for id_ in ("", ".", "..", "../../etc", "a/b", "a\0b", "a\nb", "x" * 5000, "tasks")]
    states += [state(own, io__kubernetes__pod__uid=uid) for uid in ("", "../x", UID + "\n", "urn:uuid:" + UID)]
    states += [b"", b"null", b"[]", b"{}", b"\xff", b'{"id":' * 9000, b'{"ociVersion":1}', b'{"id":"\\ud800"}']
    for one in states:
        code, said = hook(machine, "createRuntime", one)
        assert (code, said) == (0, ""), one
        assert machine.groups() == [], one
    assert machine.call("List")["groups"] == []
    assert (os.listdir(machine.run / "records"), os.listdir(machine.run / "groups")) == ([], [])
    code, said = hook(machine, "createRuntime", state(1), "--strict")
    assert (code, "init" in said) == (1, True)
    assert "Traceback" not in machine.log.read_text()


def test_other_stages_and_unknown_containers_change_nothing(machine: Machine, init: Start) -> None:
    machine.start()
    child = init()
    for stage in ("createContainer", "startContainer", "poststart", "poststop", "whatever"):
        assert hook(machine, stage, state(child.pid), "--strict") == (0, ""), stage
    assert machine.groups() == []


def test_a_member_of_another_pid_namespace_is_refused(machine: Machine) -> None:
    """Its numbers mean other processes here."""
    machine.start()
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-IS", oci_hook.__file__]
    command += ["createRuntime", "--socket", machine.socket, "--strict", "--journal", "/nowhere"]
    done = subprocess.run(command, input=json.dumps(state(2)).encode(), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"another PID namespace" in done.stderr
    assert machine.groups() == []


def test_the_end_is_seen_by_the_control_group_going_empty(machine: Machine, init: Start, process: Start) -> None:
    """The first process ends, another one of the container lives on, and its end is the container's."""
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
    cgroup = Path(top, f"resctrlmond-hook-{os.getpid()}")
    cgroup.mkdir()
    child, other = init(), process()
    try:
        (cgroup / "cgroup.procs").write_text(str(child.pid))
        machine.start()
        assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
        assert machine.group(CTR)["members"][0]["cgroup"] == str(cgroup)
        (cgroup / "cgroup.procs").write_text(str(other.pid))
        child.kill()
        child.wait()
        time.sleep(0.2)
        assert machine.group(CTR)["state"] == "active"
        ended = time.monotonic()
        other.kill()
        other.wait()
        assert machine.reaches(CTR, "completed")
        assert time.monotonic() - ended < 0.9
    finally:
        for one in (child, other):
            one.kill()
            one.wait()
        cgroup.rmdir()


# runc's init is a Go program: it has several threads when its hooks run.
_THREADED = """
import sys, threading, time
for _ in range(3):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_shared", [False, True], ids=["its own", "shared"])
def test_a_container_whose_init_has_several_threads_keeps_its_control_group_as_its_own(
    machine: Machine, process: Start, is_shared: bool
) -> None:
    """Its further threads were taken for other processes, and what joined the container later was never counted."""
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
    cgroup = Path(top, f"resctrlmond-hook-{os.getpid()}")
    cgroup.mkdir()
    child = subprocess.Popen([sys.executable, "-c", _THREADED], stdout=subprocess.PIPE)
    other = process()
    try:
        assert child.stdout
        assert child.stdout.readline() == b"started\n"
        (cgroup / "cgroup.procs").write_text(str(child.pid))
        if is_shared:
            (cgroup / "cgroup.procs").write_text(str(other.pid))
        machine.start()
        assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
        assert len(machine.tasks(CTR)) == len(os.listdir(f"/proc/{child.pid}/task")) == 4
        assert machine.group(CTR)["members"][0].get("cgroup", "") == ("" if is_shared else str(cgroup))
    finally:
        for one in (child, other):
            one.kill()
            one.wait()
        assert child.stdout
        child.stdout.close()
        while cgroup.exists():
            with contextlib.suppress(OSError):
                cgroup.rmdir()


POD = UID.replace("-", "_")


@pytest.mark.parametrize(
    ("cgroup", "pod"),
    [
        (f"/cg/kubepods/burstable/pod{UID}/{CTR}", f"/cg/kubepods/burstable/pod{UID}"),
        (
            f"/cg/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD}.slice/crio-{CTR}.scope",
            f"/cg/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD}.slice",
        ),
        (
            f"/cg/kubepods.slice/kubepods-pod{POD}.slice/cri-containerd-{CTR}.scope/container/inner",
            f"/cg/kubepods.slice/kubepods-pod{POD}.slice",
        ),
        # A static pod's UID as the kubelet has it.
        (f"/cg/kubepods/pod{UID.replace('-', '')}/{CTR}", f"/cg/kubepods/pod{UID.replace('-', '')}"),
        # Of two that are named for a pod the inner one.
        (f"/cg/pod{'ab' * 16}/pod{UID}/{CTR}", f"/cg/pod{'ab' * 16}/pod{UID}"),
    ],
)
def test_the_pods_control_group(cgroup: str, pod: str) -> None:
    assert pod_cgroup(cgroup) == (pod, UID)


@pytest.mark.parametrize(
    "cgroup",
    [
        f"/cg/machine.slice/libpod-{CTR}.scope",
        f"/cg/machine.slice/machine-libpod_pod_{CTR}.slice/libpod-{CTR}.scope",
        f"/cg/kubepods/pod{UID[:-1]}/{CTR}",
        f"/cg/kubepods/pod{UID}0/{CTR}",
        f"/cg/kubepods/xpod{UID}/{CTR}",
        f"/cg/kubepods/pod{UID}\n/{CTR}",
        "/",
        "",
    ],
)
def test_no_pods_control_group(cgroup: str) -> None:
    assert pod_cgroup(cgroup) == ("", "")


names = st.sampled_from(sorted({field for verb in VERBS.values() for field in verb.request.__struct_encode_fields__}))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.sampled_from(["follow", "/", "", "..", "k", UID, CTR, "/sys/fs/cgroup", "\0", "info", "tasks"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    top = tmp_path_factory.mktemp("running")
    with contextlib.closing(Machine(top)) as machine:
        machine.start()
        yield machine
        assert machine.stop() == 0
        assert "Traceback" not in machine.log.read_text()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(VERBS)), st.dictionaries(names, values, max_size=5))
def test_no_parameters_kill_it_or_leave_a_group(running: Machine, verb: str, parameters: dict[str, Any]) -> None:
    # What really moves processes is for other tests: here nothing but nonsense may arrive.
    for name in ("pid", "cgroup"):
        if not isinstance(parameters.get(name), (list, dict, str, float)) or parameters[name] == "/sys/fs/cgroup":
            parameters.pop(name, None)
    with Client(running.socket) as client:
        try:
            client.call(VERBS[verb].full_name, parameters)
            accepted = True
        except VarlinkError as error:
            accepted = False
            assert not str(error).startswith(f"{MANAGER}.InternalError"), (verb, parameters)
        groups = client.call(f"{MANAGER}.List")["groups"]
        for group in groups:
            assert accepted or group["state"] == "completed", (verb, parameters, group)
            for claim in group["claims"]:
                client.call(f"{MANAGER}.Release", {"key": group["key"], "claim": claim["owner"]})
    assert running.groups() == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["createRuntime", "poststop", "", "\0"]) | st.text(), values.map(json.dumps) | st.text())
def test_no_state_kills_it_or_leaves_a_group(running: Machine, stage: str, text: str) -> None:
    with Client(running.socket) as client:
        with contextlib.suppress(VarlinkError, UnicodeError):
            client.call("org.resctrlmon.Hook.Run", {"stage": stage, "state": text})
        assert client.call(f"{MANAGER}.Status")["groups"] == 0
    assert running.groups() == []
