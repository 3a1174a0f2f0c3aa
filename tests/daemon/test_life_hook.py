# SPDX-License-Identifier: Apache-2.0
"""The OCI hook, run as by a runtime: its containers are in their groups, and invalid input changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resctrlmond.api.verbs import VERBS
from resctrlmond.client import Client, VarlinkError
from resctrlmond.resctrl import processes
from resctrlmond.service.rate_limit import BURST
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.messages import Operation
from resctrlmond.workloads.evidence.pod_cgroups import pod_cgroup
from tests.daemon.conftest import MANAGER, Machine, MoveToCgroup, StartProcess, cgroup_root, end
from tests.daemon.containers import CONTAINER, UID, containers, execute, hook, state
from tests.hook.builds import compile_hook
from tests.resctrl.conftest import cgroup_of_systemd
from tests.sim.conftest import Puppet
from tests.wait import wait_until


def test_container_is_in_its_group_before_it_executes_and_ends_with_poststop(
    machine: Machine, init: StartProcess
) -> None:
    machine.start()
    child = init()
    labels = {"io__kubernetes__container__name": "web"}
    assert hook(machine, "createRuntime", state(child.pid, **labels), "--strict") == (0, "")
    assert b"sleep" not in Path(f"/proc/{child.pid}/comm").read_bytes()
    assert machine.tasks(CONTAINER) == {child.pid}
    workload = machine.group(CONTAINER)
    assert (workload["state"], workload["baseline"]) == ("active", "exact")
    assert workload["attributes"] == {"bundle": "/run/bundle", "container.name": "web"}
    assert workload["claims"][0]["owner"] == "oci"
    execute(child)
    assert machine.tasks(CONTAINER) == {child.pid}
    end(child)
    assert hook(machine, "poststop", state(0), "--strict") == (0, "")
    assert machine.group(CONTAINER)["state"] == "completed"
    assert machine.groups() == []
    assert hook(machine, "poststop", state(0), "--strict") == (0, "")


def test_container_ends_the_same_without_a_poststop(machine: Machine) -> None:
    """No installed hook file calls the hook when a container has stopped."""
    machine.start()
    with containers(2) as inits:
        ids = list(inits)
        for id_, child in inits.items():
            assert hook(machine, "createRuntime", state(child.pid, id_), "--strict") == (0, "")
        for child in inits.values():
            end(child)
        assert hook(machine, "poststop", state(0, ids[0]), "--strict") == (0, "")
        for id_ in ids:
            wait_until(lambda id_=id_: machine.group(id_)["state"] == "completed")  # type: ignore[misc]
        assert machine.groups() == []
    ended = [machine.group(id_) for id_ in ids]
    for workload in ended:
        assert [member["endedAt"] <= workload["completedAt"] for member in workload["members"]] == [True]
        totals = machine.call("Read", key=workload["key"])["totals"]
        assert {total["quality"] for total in totals} == {"exact"}
    assert ended[0].keys() == ended[1].keys()
    files = [sorted(path.name for path in Path(workload["snapshot"]).rglob("*")) for workload in ended]
    assert files[0] == files[1]
    assert "completed_at" in files[0]


def test_container_without_a_control_group_of_its_own_is_late(machine: Machine, init: StartProcess) -> None:
    """Processes of 'podman exec' are not in the group with --cgroups=disabled, but the total was exact."""
    machine.start()
    child, session = init(), init()
    shared = Path(f"/proc/{session.pid}/cgroup").read_text().splitlines()[-1].partition("::")[2]
    Path(f"{cgroup_root()}{shared}", "cgroup.procs").write_text(str(child.pid))
    assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
    workload = machine.group(CONTAINER)
    assert (workload["state"], workload["baseline"], workload["members"][0].get("cgroup")) == (
        "active",
        "late",
        None,
    )
    totals = machine.call("Read", key=CONTAINER)["totals"]
    assert {total["quality"] for total in totals} == {"late"}
    assert all("has no control group of its own" in total["reason"] for total in totals)


def test_late_poststop_does_not_end_a_restarted_container(machine: Machine, init: StartProcess) -> None:
    """Podman restarts a container with the same id, and the call of a hook that gave up can still be in a queue."""
    machine.start()
    child = init()
    assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
    assert hook(machine, "poststop", state(0), "--strict") == (0, "")
    assert machine.group(CONTAINER)["state"] == "active"
    assert machine.tasks(CONTAINER) == {child.pid}
    end(child)
    assert machine.reaches(CONTAINER, "completed")


def test_restarted_container_is_a_new_run(machine: Machine, init: StartProcess) -> None:
    machine.start()
    for generation in (1, 2):
        child = init()
        assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
        assert machine.group(CONTAINER)["generation"] == generation
        end(child)
        assert machine.reaches(CONTAINER, "completed")
    assert os.listdir(machine.run / "completed" / CONTAINER) == ["1"]


def test_annotations_of_any_length_do_not_hide_a_container_from_its_pod(
    machine: Machine, init: StartProcess, move_to_cgroup: MoveToCgroup
) -> None:
    """The user of a pod chose what its exact total lacked."""
    machine.start()
    for id_, text in ((CONTAINER, ""), ("5e" * 32, "<" * 250_000)):
        child = init()
        move_to_cgroup(f"hook-{os.getpid()}-pod{UID}/{id_}", child.pid)
        given = state(child.pid, id_, io__kubernetes__pod__uid=UID, text=text)
        # As Go writes it.
        written = json.dumps(given).replace("<", "\\u003c").encode()
        assert hook(machine, "createRuntime", written) == (0, "")
        assert child.pid in machine.tasks(UID)
    assert machine.group(UID)["baseline"] == "exact"


@pytest.mark.parametrize("spelling", [UID, UID.upper(), UID.replace("-", "_")])
def test_container_in_the_control_group_of_its_pod_is_in_the_pods_group(
    machine: Machine, init: StartProcess, move_to_cgroup: MoveToCgroup, spelling: str
) -> None:
    machine.start()
    child = init()
    move_to_cgroup(f"hook-{os.getpid()}-pod{spelling}/{CONTAINER}", child.pid)
    annotated = state(child.pid, io__kubernetes__pod__uid=UID, io__kubernetes__pod__name="web-0")
    assert hook(machine, "createRuntime", annotated, "--strict") == (0, "")
    assert machine.groups() == [UID]
    assert machine.group(UID)["attributes"]["pod.name"] == "web-0"


@pytest.mark.parametrize(("status", "seconds"), [("created", 2), ("running", 2), ("running", 0.1)])
def test_container_whose_process_ran_before_its_hook_is_late(
    machine: Machine, move_to_cgroup: MoveToCgroup, status: str, seconds: float
) -> None:
    """Kata Containers call the hook for a virtual machine that runs, and the totals were exact."""
    machine.start()
    with contextlib.closing(Puppet()) as vm:
        move_to_cgroup(f"hook-{os.getpid()}-pod{UID}/kata_{CONTAINER}", vm.pid)
        vm.do(f"burn {seconds}")
        given = state(vm.pid, io__kubernetes__pod__uid=UID) | {"status": status}
        assert hook(machine, "createRuntime", given, "--strict") == (0, "")
        assert machine.tasks(UID) == {vm.pid}
        (member,) = machine.group(UID)["members"]
        assert member["late"] and member["cpuTimeBeforeNs"] >= seconds * 10**9
        totals = machine.call("Read", key=UID)["totals"]
    assert {total["quality"] for total in totals} == {"late"}
    assert all(f"{CONTAINER} ran and had used up to" in total["reason"] for total in totals)


def test_pod_of_a_hybrid_host_is_found_by_its_control_group_of_version_1(
    machine: Machine, init: StartProcess, tmp_path: Path
) -> None:
    """In version 2 its process is in the service of its runtime, and it was a workload of its own."""
    machine.start()
    child = init()
    with cgroup_of_systemd(tmp_path / "v1", f"hook-{os.getpid()}/pod{UID}/{CONTAINER}") as path:
        Path(path, "cgroup.procs").write_text(str(child.pid))
        assert hook(machine, "createRuntime", state(child.pid, io__kubernetes__pod__uid=UID), "--strict") == (0, "")
        assert machine.tasks(UID) == {child.pid}
        assert machine.group(UID)["members"][0]["cgroup"] == path
        totals = machine.call("Read", key=UID)["totals"]
    assert {total["quality"] for total in totals} == {"estimated"}
    assert all("does not count CPU time, as in version 1" in total["reason"] for total in totals)


@pytest.mark.parametrize(
    ("name", "is_in_pod"),
    [
        ("podetcd-master-0", True),
        ("kubepods-burstable-podetcd_master_0.slice", True),
        ("podetcd-master-00", False),
        ("pods.slice", False),
    ],
)
def test_pod_whose_uid_is_not_a_uuid(
    machine: Machine, init: StartProcess, move_to_cgroup: MoveToCgroup, name: str, is_in_pod: bool
) -> None:
    machine.start()
    child = init()
    move_to_cgroup(f"hook-{os.getpid()}/{name}/{CONTAINER}", child.pid)
    claiming = {"io__kubernetes__pod__uid": "etcd-master-0"}
    assert hook(machine, "createRuntime", state(child.pid, **claiming), "--strict") == (0, "")
    assert machine.groups() == ["etcd-master-0" if is_in_pod else CONTAINER]
    claims = f"container {CONTAINER} claims to be of pod etcd-master-0, but is not in the control group of a pod"
    assert (claims in machine.log.read_text()) is not is_in_pod
    end(child)
    assert hook(machine, "poststop", state(0, **claiming), "--strict") == (0, "")
    if not is_in_pod:
        assert machine.group(CONTAINER)["state"] == "completed"


@pytest.mark.parametrize("id_", [UID, UID.replace("-", ""), f"{UID.replace('-', '')}-2531612879"])
def test_container_without_pod_whose_id_has_the_form_of_a_pod_uid_is_counted(
    machine: Machine, init: StartProcess, id_: str
) -> None:
    """Garden of Cloud Foundry uses such ids. It was refused, and the log stated that it was counted."""
    machine.start()
    child = init()
    assert hook(machine, "createRuntime", state(child.pid, id_), "--strict") == (0, "")
    assert machine.group(id_)["state"] == "active"
    assert "is counted as a workload of its own" not in machine.log.read_text()
    assert machine.call("ListPods")["pods"] == []
    end(child)
    assert hook(machine, "poststop", state(0, id_), "--strict") == (0, "")
    assert machine.group(id_)["state"] == "completed"


@pytest.mark.parametrize(
    "other_uid", ["", "0a8fad5b-d9cb-469f-a165-70867728950e", "0A8FAD5B-D9CB-469F-A165-70867728950E"]
)
def test_annotation_alone_does_not_add_a_container_to_a_pod(
    machine: Machine, init: StartProcess, move_to_cgroup: MoveToCgroup, other_uid: str
) -> None:
    """A container outside the pod's control group has annotations with the UID of a monitored pod."""
    machine.start()
    victim, other = init(), init()
    move_to_cgroup(f"hook-{os.getpid()}-pod{UID}/{CONTAINER}", victim.pid)
    annotated = state(victim.pid, io__kubernetes__pod__uid=UID, io__kubernetes__pod__name="web-0")
    assert hook(machine, "createRuntime", annotated, "--strict") == (0, "")
    id_ = "bb" * 32
    move_to_cgroup(f"hook-{os.getpid()}-{f'pod{other_uid}' if other_uid else 'no'}/{id_}", other.pid)
    spoofed = state(other.pid, id_, io__kubernetes__pod__uid=UID, io__kubernetes__pod__name="bank-0")
    assert hook(machine, "createRuntime", spoofed, "--strict") == (0, "")
    assert machine.groups() == sorted([UID, id_])
    assert machine.tasks(UID) == {victim.pid}
    assert machine.tasks(id_) == {other.pid}
    assert machine.group(UID)["attributes"]["pod.name"] == "web-0"
    assert not [name for name in machine.group(id_)["attributes"] if name.startswith("pod.")]
    assert f"container {id_} claims to be of pod {UID}" in machine.log.read_text()
    end(other)
    ended = state(0, id_, io__kubernetes__pod__uid=UID)
    assert hook(machine, "poststop", ended, "--strict") == (0, "")
    assert machine.group(id_)["state"] == "completed"
    assert machine.group(UID)["state"] == "active"


@pytest.mark.parametrize(
    "claimed", [None, "0a8fad5b-d9cb-469f-a165-70867728950e", "", "no UID\n\x1b[31m", "x" * 10_000]
)
@pytest.mark.parametrize("is_in_pod", [True, False])
def test_container_whose_annotation_names_no_pod_is_counted(
    machine: Machine, init: StartProcess, move_to_cgroup: MoveToCgroup, claimed: str | None, is_in_pod: bool
) -> None:
    """A pod in whose control group it is lacks what it uses, also if it ends before a sweep finds it.

    Without an annotation (None) it was started by ``docker run --cgroup-parent``, for example.
    """
    machine.start()
    sandbox, other = init(), init()
    move_to_cgroup(f"hook-{os.getpid()}-pod{UID}/{CONTAINER}", sandbox.pid)
    given = state(sandbox.pid, io__kubernetes__pod__uid=UID)
    assert hook(machine, "createRuntime", given, "--strict") == (0, "")
    id_ = "bb" * 32
    if is_in_pod:
        move_to_cgroup(f"hook-{os.getpid()}-pod{UID}/{id_}", other.pid)
    claiming = {} if claimed is None else {"io__kubernetes__pod__uid": claimed}
    assert hook(machine, "createRuntime", state(other.pid, id_, **claiming), "--strict") == (0, "")
    assert machine.tasks(id_) == {other.pid}
    workload = machine.group(id_)
    assert not [name for name in workload["attributes"] if name.startswith("pod.")]
    logged = machine.log.read_text().count("is counted as a workload of its own")
    assert logged == (0 if claimed is None else 1)
    assert "\x1b" not in machine.log.read_text()
    reasons = {total.get("reason") for total in machine.call("Read", key=UID)["totals"]}
    left_out = f"{id_} is not included: it runs in the control group of the pod, but not in the group"
    assert reasons == {left_out if is_in_pod else None}
    end(other)
    assert hook(machine, "poststop", state(0, id_, **claiming), "--strict") == (0, "")
    assert machine.group(id_)["state"] == "completed"


def test_container_that_restarts_in_a_loop_does_not_flood_the_log(machine: Machine, init: StartProcess) -> None:
    machine.start()
    child = init()
    claiming = state(child.pid, io__kubernetes__pod__uid=UID)
    for _ in range(BURST + 5):
        assert hook(machine, "createRuntime", claiming, "--strict") == (0, "")
    assert 1 < machine.log.read_text().count("it is counted as a workload of its own") <= BURST


def test_attributes_of_another_owner_are_not_overwritten(machine: Machine) -> None:
    machine.start()
    machine.call("Create", key="k", claim="first", attributes={"name": "a", "only": "1"})
    machine.call("Create", key="k", claim="second", attributes={"name": "b", "more": "2"})
    assert machine.group("k")["attributes"] == {"name": "a", "only": "1", "more": "2"}
    machine.call("Create", key="k", claim="first", attributes={"name": "c", "more": "3"})
    assert machine.group("k")["attributes"] == {"name": "c", "only": "1", "more": "2"}
    machine.call("Release", key="k", claim="first")
    machine.call("Create", key="k", claim="second", attributes={"name": "d"})
    assert machine.group("k")["attributes"]["name"] == "d"


def test_containers_of_a_pod_share_its_group_for_any_spelling_of_its_uid(
    machine: Machine, init: StartProcess, move_to_cgroup: MoveToCgroup
) -> None:
    machine.start()
    sandbox, container = init(), init()
    move_to_cgroup(f"hook-{os.getpid()}-pod{UID}/{'aa' * 32}", sandbox.pid)
    move_to_cgroup(f"hook-{os.getpid()}-pod{UID}/{'bb' * 32}", container.pid)
    dashed = {"io__kubernetes__pod__uid": UID}
    compact = {"io__kubernetes__cri__sandbox_uid": UID.replace("-", "").upper()}
    assert hook(machine, "createRuntime", state(sandbox.pid, "aa" * 32, **dashed), "--strict") == (0, "")
    assert hook(machine, "createRuntime", state(container.pid, "bb" * 32, **compact), "--strict") == (0, "")
    assert machine.groups() == [UID]
    assert machine.tasks(UID) == {sandbox.pid, container.pid}
    assert [member["id"] for member in machine.group(UID)["members"]] == ["aa" * 32, "bb" * 32]
    for child, id_ in ((container, "bb" * 32), (sandbox, "aa" * 32)):
        end(child)
        assert hook(machine, "poststop", state(0, id_, **dashed), "--strict") == (0, "")
    assert machine.group(UID)["state"] == "idle"
    assert machine.groups() == [UID]


@pytest.mark.parametrize("annotation", ["io__kubernetes__cri-o__SandboxID", "io__kubernetes__cri__sandbox-id"])
def test_pause_process_of_a_pod_is_missing_only_if_it_works(
    machine: Machine, init: StartProcess, move_to_cgroup: MoveToCgroup, annotation: str
) -> None:
    """A pod with a shared PID namespace has one, outside the group: its runtime calls no hook for it."""
    machine.start()
    child = init()
    with contextlib.closing(Puppet()) as pause:
        move_to_cgroup(f"hook-{os.getpid()}-pod{UID}/crio-{'aa' * 32}.scope", pause.pid)
        move_to_cgroup(f"hook-{os.getpid()}-pod{UID}/crio-{CONTAINER}.scope", child.pid)
        given = state(child.pid, io__kubernetes__pod__uid=UID, **{annotation: "aa" * 32})
        assert hook(machine, "createRuntime", given, "--strict") == (0, "")
        for seconds, quality in ((0.05, "exact"), (0.2, "late")):
            pause.do(f"burn {seconds}")
            totals = machine.call("Read", key=UID)["totals"]
            assert {total["quality"] for total in totals} == {quality}, totals
        assert pause.pid not in machine.tasks(UID)


def test_second_call_of_a_hook_changes_nothing(machine: Machine, init: StartProcess) -> None:
    machine.start()
    child = init()
    for _ in range(2):
        assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
    workload = machine.group(CONTAINER)
    assert (workload["generation"], len(workload["members"]), len(workload["claims"])) == (1, 1, 1)


def test_container_whose_hook_gave_up_during_the_assignment_is_late(machine: Machine, init: StartProcess) -> None:
    """The container ran outside its group until it was moved seconds later, but its total was reported as exact."""
    machine.start()
    Control(str(machine.top / "resctrl")).set_faults(Fault(on=Operation.MKDIR, milliseconds=10_000, times=1))
    child, given_up = init(), ["--timeout", "1", "--strict"]
    while not os.listdir(machine.run / "records"):
        # On a busy machine, the hook can give up before it has sent the call; then try again.
        code, stderr = hook(machine, "createRuntime", state(child.pid), *given_up)
        assert (code, "gave up" in stderr) == (1, True)
    execute(child)
    wait_until(lambda: machine.group(CONTAINER)["state"] == "active")
    assert machine.tasks(CONTAINER) == {child.pid}
    (member,) = machine.group(CONTAINER)["members"]
    assert member["late"] and member["cpuTimeBeforeNs"] > 0
    totals = machine.call("Read", key=CONTAINER)["totals"]
    assert {total["quality"] for total in totals} == {"late"}
    assert all("its caller did not wait for the reply" in total["reason"] for total in totals)


@pytest.mark.parametrize(("waits", "quality"), [(True, "exact"), (False, "late")], ids=["waits", "disconnects"])
def test_assign_is_late_if_the_caller_disconnects_before_the_reply(
    machine: Machine, init: StartProcess, waits: bool, quality: str
) -> None:
    machine.start()
    Control(str(machine.top / "resctrl")).set_faults(Fault(on=Operation.MKDIR, milliseconds=10_000, times=1))
    child = init()
    call = {"method": f"{MANAGER}.Assign", "parameters": {"key": CONTAINER, "pid": child.pid, "late": False}}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(machine.socket)
        caller.sendall(json.dumps(call).encode() + b"\0")
        if waits:
            # The caller closes only its sending side, and reads the reply.
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(1)
        else:
            while not os.listdir(machine.run / "records"):
                time.sleep(0.01)
    assert machine.reaches(CONTAINER, "active")
    assert machine.group(CONTAINER)["baseline"] == quality


def test_oneway_assign_is_late(machine: Machine, init: StartProcess) -> None:
    machine.start()
    child = init()
    parameters = {"key": CONTAINER, "pid": child.pid, "late": False}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(machine.socket)
        call = {"method": f"{MANAGER}.Assign", "parameters": parameters, "oneway": True}
        caller.sendall(json.dumps(call).encode() + b"\0")
        wait_until(lambda: machine.call("List")["workloads"])
        assert machine.reaches(CONTAINER, "active")
    assert machine.group(CONTAINER)["baseline"] == "late"


def test_hostile_states_change_nothing_and_delay_no_container(machine: Machine) -> None:
    machine.start()
    assert machine.daemon is not None
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    stats = {number: processes.stat(number) for number in numbers}
    kthreads = [number for number, stat in stats.items() if stat is not None and stat.is_kernel_thread]
    pids = [0, -1, 1, 2**22 + 1, 2**31, 2**70, machine.daemon.pid, *kthreads[:1]]
    states: list[object] = [state(pid) for pid in pids]
    own = os.getpid()
    states += [state(own, id_) for id_ in ("", ".", "..", "../../etc", "a/b", "a\0b", "a\nb", "x" * 5000, "tasks")]
    states += [b"", b"null", b"[]", b"{}", b"\xff", b'{"id":' * 9000, b'{"ociVersion":1}', b'{"id":"\\ud800"}']
    for hostile in states:
        code, stderr = hook(machine, "createRuntime", hostile)
        assert (code, stderr) == (0, ""), hostile
        assert machine.groups() == [], hostile
    assert machine.call("List")["workloads"] == []
    assert (os.listdir(machine.run / "records"), os.listdir(machine.run / "groups")) == ([], [])
    code, stderr = hook(machine, "createRuntime", state(1), "--strict")
    assert (code, "init" in stderr) == (1, True)
    assert "Traceback" not in machine.log.read_text()


def test_other_stages_and_unknown_containers_change_nothing(machine: Machine, init: StartProcess) -> None:
    machine.start()
    child = init()
    for stage in ("createContainer", "startContainer", "poststart", "poststop", "whatever"):
        assert hook(machine, stage, state(child.pid), "--strict") == (0, ""), stage
    assert machine.groups() == []


def test_hook_of_another_pid_namespace_is_refused(machine: Machine) -> None:
    """The pid in its state is that of another process in the daemon's namespace."""
    machine.start()
    command = ["unshare", "--pid", "--fork", "--mount-proc", str(compile_hook())]
    command += ["createRuntime", "--socket", machine.socket, "--strict", "--journal", "/nowhere"]
    done = subprocess.run(command, input=json.dumps(state(2)).encode(), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"another PID namespace" in done.stderr
    assert machine.groups() == []


def test_container_ends_when_its_control_group_is_empty(
    machine: Machine, init: StartProcess, process: StartProcess
) -> None:
    """The container continues after the end of its first process while another process is in its control group."""
    cgroup = cgroup_root() / f"resctrlmond-hook-{os.getpid()}"
    cgroup.mkdir()
    child, other = init(), process()
    try:
        (cgroup / "cgroup.procs").write_text(str(child.pid))
        machine.start()
        assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
        assert machine.group(CONTAINER)["members"][0]["cgroup"] == str(cgroup)
        (cgroup / "cgroup.procs").write_text(str(other.pid))
        end(child)
        time.sleep(0.2)
        assert machine.group(CONTAINER)["state"] == "active"
        end(other)
        assert machine.reaches(CONTAINER, "completed")
    finally:
        for started in (child, other):
            end(started)
        cgroup.rmdir()


def test_container_that_a_sweep_took_for_a_session_of_another_one_gets_its_group(
    machine: Machine, init: StartProcess, move_to_cgroup: MoveToCgroup
) -> None:
    """Its hook was slow, and both have one control group: it was counted in the other one, or did not start."""
    machine.start()
    first, second, id_ = init(), init(), "5e" * 32
    move_to_cgroup(f"hook-{os.getpid()}", first.pid)
    assert hook(machine, "createRuntime", state(first.pid), "--strict") == (0, "")
    move_to_cgroup(f"hook-{os.getpid()}", second.pid)
    wait_until(lambda: machine.tasks(CONTAINER) == {first.pid, second.pid})
    assert hook(machine, "createRuntime", state(second.pid, id_), "--strict") == (0, "")
    execute(second)
    assert (machine.tasks(CONTAINER), machine.tasks(id_)) == ({first.pid}, {second.pid})
    for key in (CONTAINER, id_):
        assert {total["quality"] for total in machine.call("Read", key=key)["totals"]} == {"late"}


def test_container_that_a_process_of_another_one_starts_beside_it_stays_in_its_group(
    machine: Machine, move_to_cgroup: MoveToCgroup
) -> None:
    machine.start()
    with contextlib.closing(Puppet()) as outer:
        move_to_cgroup(f"hook-{os.getpid()}", outer.pid)
        assert hook(machine, "createRuntime", state(outer.pid), "--strict") == (0, "")
        inner = int(outer.do("fork"))
        for pid in (inner, outer.pid):
            code, stderr = hook(machine, "createRuntime", state(pid, "5e" * 32), "--strict")
            assert (code, "already in the monitoring group" in stderr) == (1, True)
        assert machine.tasks(CONTAINER) == {outer.pid, inner}
        assert machine.group(CONTAINER)["baseline"] == "exact"


# An init process with several threads, as runc's, which is a Go program, when its hooks run.
_THREADED = """
import sys, threading, time
for _ in range(3):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_shared", [False, True], ids=["its own", "shared"])
def test_control_group_of_an_init_with_several_threads_is_the_containers(
    machine: Machine, process: StartProcess, is_shared: bool
) -> None:
    """The control group counted as shared because of the further threads, and tasks that joined the container later
    were not in its group."""
    cgroup = cgroup_root() / f"resctrlmond-hook-{os.getpid()}"
    cgroup.mkdir()
    child = subprocess.Popen([sys.executable, "-c", _THREADED], stdout=subprocess.PIPE)
    assert child.stdout
    other = process()
    try:
        assert child.stdout.readline() == b"started\n"
        (cgroup / "cgroup.procs").write_text(str(child.pid))
        if is_shared:
            (cgroup / "cgroup.procs").write_text(str(other.pid))
        machine.start()
        assert hook(machine, "createRuntime", state(child.pid), "--strict") == (0, "")
        assert len(machine.tasks(CONTAINER)) == len(os.listdir(f"/proc/{child.pid}/task")) == 4
        assert machine.group(CONTAINER)["members"][0].get("cgroup", "") == ("" if is_shared else str(cgroup))
    finally:
        for started in (child, other):
            end(started)
        child.stdout.close()
        while cgroup.exists():
            with contextlib.suppress(OSError):
                cgroup.rmdir()


POD = UID.replace("-", "_")


@pytest.mark.parametrize(
    ("cgroup", "pod"),
    [
        (f"/cg/kubepods/burstable/pod{UID}/{CONTAINER}", f"/cg/kubepods/burstable/pod{UID}"),
        (
            f"/cg/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD}.slice/crio-{CONTAINER}.scope",
            f"/cg/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD}.slice",
        ),
        (
            f"/cg/kubepods.slice/kubepods-pod{POD}.slice/cri-containerd-{CONTAINER}.scope/container/inner",
            f"/cg/kubepods.slice/kubepods-pod{POD}.slice",
        ),
        # The UID of a static pod, as the kubelet writes it.
        (f"/cg/kubepods/pod{UID.replace('-', '')}/{CONTAINER}", f"/cg/kubepods/pod{UID.replace('-', '')}"),
        # The inner of two control groups with the names of pods.
        (f"/cg/pod{'ab' * 16}/pod{UID}/{CONTAINER}", f"/cg/pod{'ab' * 16}/pod{UID}"),
    ],
)
def test_control_group_of_a_pod_is_found(cgroup: str, pod: str) -> None:
    assert pod_cgroup(cgroup) == (pod, UID)


@pytest.mark.parametrize(
    "cgroup",
    [
        f"/cg/machine.slice/libpod-{CONTAINER}.scope",
        f"/cg/machine.slice/machine-libpod_pod_{CONTAINER}.slice/libpod-{CONTAINER}.scope",
        f"/cg/kubepods/pod{UID[:-1]}/{CONTAINER}",
        f"/cg/kubepods/pod{UID}0/{CONTAINER}",
        f"/cg/kubepods/xpod{UID}/{CONTAINER}",
        f"/cg/kubepods/pod{UID}\n/{CONTAINER}",
        "/",
        "",
    ],
)
def test_control_group_outside_a_pod_is_not_of_a_pod(cgroup: str) -> None:
    assert pod_cgroup(cgroup) == ("", "")


@pytest.mark.parametrize(
    ("cgroup", "pod"),
    [
        (f"/cg/kubepods/podetcd-0/{CONTAINER}", "/cg/kubepods/podetcd-0"),
        (f"/cg/my-kubepods-podetcd_0.slice/crio-{CONTAINER}.scope", "/cg/my-kubepods-podetcd_0.slice"),
        (f"/cg/machine-libpod_podetcd_0.slice/crio-{CONTAINER}.scope", ""),
        (f"/cg/kubepods/podetcd_0/{CONTAINER}", ""),
        (f"/cg/kubepods/podetcd-0.slice/{CONTAINER}", ""),
    ],
)
def test_control_group_of_a_pod_whose_uid_is_not_a_uuid_is_found_by_this_uid(cgroup: str, pod: str) -> None:
    assert pod_cgroup(cgroup, "etcd-0") == (pod, "etcd-0" if pod else "")
    assert pod_cgroup(cgroup, "etcd") == ("", "")
    assert pod_cgroup(cgroup) == ("", "")


names = st.sampled_from(sorted({field for verb in VERBS.values() for field in verb.request.__struct_encode_fields__}))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.sampled_from(["follow", "/", "", "..", "k", UID, CONTAINER, "/sys/fs/cgroup", "\0", "info", "tasks"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Return a machine with a daemon that must not stop or raise an unexpected error."""
    top = tmp_path_factory.mktemp("running")
    with contextlib.closing(Machine(top)) as machine:
        machine.start()
        yield machine
        assert machine.stop() == 0
        assert "Traceback" not in machine.log.read_text()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(VERBS)), st.dictionaries(names, values, max_size=5))
def test_daemon_survives_any_parameters_and_leaves_no_group(
    running: Machine, verb: str, parameters: dict[str, Any]
) -> None:
    # This test sends only invalid pids and control groups; a valid one would move a process.
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
        groups = client.call(f"{MANAGER}.List")["workloads"]
        for workload in groups:
            assert accepted or workload["state"] == "completed", (verb, parameters, workload)
            for claim in workload["claims"]:
                client.call(f"{MANAGER}.Release", {"key": workload["key"], "claim": claim["owner"]})
    assert running.groups() == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["createRuntime", "poststop", "", "\0"]) | st.text(), values.map(json.dumps) | st.text())
def test_daemon_survives_any_state_and_leaves_no_group(running: Machine, stage: str, text: str) -> None:
    with Client(running.socket) as client:
        with contextlib.suppress(VarlinkError, UnicodeError):
            client.call("org.resctrlmon.Hook.Run", {"stage": stage, "state": text})
        assert client.call(f"{MANAGER}.Status")["groups"] == 0
    assert running.groups() == []
