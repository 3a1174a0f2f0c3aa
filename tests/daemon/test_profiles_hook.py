# SPDX-License-Identifier: Apache-2.0
"""Profiles of containers that the OCI hook reports: group, class, lifetimes, and files that are wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.resctrl import cgroups
from tests.daemon.conftest import Machine, MoveToCgroup, StartProcess, cgroup_root, end, run_daemon
from tests.daemon.containers import CONTAINER, UID, execute, hook, state
from tests.daemon.test_start_lock import slow_next_start
from tests.wait import wait_until

PROFILES = """\
profiles:
  plain:
  quiet: {watch: none}
  apart: {watch: container, priority: 7}
  gold: {class: gold, linger: 1h}
  missing: {class: platinum}
  short: {snapshot_ttl: 0}
"""
ANNOTATION = "profile.resctrlmon.org"
OTHER = "5e" * 32


class Host:
    """A machine with profiles, and its hook."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.directory = machine.top / "profiles.d"
        self.directory.mkdir()
        machine.options = ("--profiles-dir", str(self.directory))

    def write(self, text: str, name: str = "10.yaml") -> None:
        """Write a file with profiles."""
        (self.directory / name).write_text(text)

    def start(self, child: subprocess.Popen[bytes], id_: str = CONTAINER, **annotations: str) -> dict[str, Any]:
        """Run the hook of a container that starts, which must succeed. Return its workload; {} if it has none."""
        names = {"profile": ANNOTATION, "uid": "io.kubernetes.pod.uid", "name": "io.kubernetes.container.name"}
        names |= {"app_profile": f"{ANNOTATION}/app", "namespace": "io.kubernetes.pod.namespace"}
        text = state(child.pid, id_)
        text["annotations"] = {names.get(name, name): value for name, value in annotations.items()}
        assert hook(self.machine, "createRuntime", text, "--strict") == (0, "")
        listed = {one["key"]: one for one in self.machine.call("List")["workloads"]}
        found: dict[str, Any] = listed.get(id_, {})
        return found

    def unwatched(self) -> list[dict[str, Any]]:
        """Return the containers that are in no group."""
        found: list[dict[str, Any]] = self.machine.call("ListUnwatched")["containers"]
        return found

    def ctl(self, *words: str) -> str:
        """Return the output of resctrlctl."""
        command = [sys.executable, "-m", "resctrlctl", "--socket", self.machine.socket, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def class_of(self, pid: int) -> str:
        """Return the class whose list of tasks has the process; "" for the root."""
        top = self.machine.top / "resctrl"
        found = [path.parent.name for path in top.glob("*/tasks") if str(pid) in path.read_text().split()]
        return found[0] if found else ""


@pytest.fixture
def host(machine: Machine) -> Host:
    """A machine with the class gold and some profiles, whose daemon runs."""
    found = Host(machine)
    found.write(PROFILES)
    (machine.top / "resctrl" / "gold").mkdir()
    machine.start()
    return found


def test_container_without_a_selected_profile_is_watched_as_before(host: Host, init: StartProcess) -> None:
    workload = host.start(init())
    assert (workload["baseline"], workload.get("profile"), workload.get("profileSource")) == ("exact", None, None)
    assert "Selected by: no annotation, rule or default" in host.ctl("profiles", "explain", CONTAINER)


def test_container_changes_its_class_before_its_program_runs(host: Host, init: StartProcess) -> None:
    child = init()
    workload = host.start(child, profile="gold")
    assert (workload["class"], workload["baseline"]) == ("gold", "exact")
    assert host.class_of(child.pid) == "gold"
    assert b"sleep" not in Path(f"/proc/{child.pid}/comm").read_bytes()
    assert (workload["profile"], workload["profileSource"]) == ("gold", f"annotation {ANNOTATION}")
    member = workload["members"][0]
    assert (member["profile"], member["profileSource"]) == ("gold", f"annotation {ANNOTATION}")
    execute(child)
    totals = host.machine.call("Read", key=CONTAINER)["totals"]
    assert {total["quality"] for total in totals} == {"exact"}


def test_class_that_does_not_exist_leaves_the_container_where_it_is(host: Host, init: StartProcess) -> None:
    child = init()
    workload = host.start(child, profile="missing")
    assert (workload["class"], workload["baseline"], workload["profile"]) == ("", "exact", "missing")
    assert host.class_of(child.pid) == ""
    log = host.machine.log.read_text()
    assert f"container {CONTAINER} stays in its class, although its profile missing names the class platinum" in log


def test_class_that_does_not_exist_is_logged_when_the_profiles_are_read(host: Host, init: StartProcess) -> None:
    host.write("profiles:\n  typo:\n    class: glod\ndefault_profile: plain", "20.yaml")
    host.machine.reload()
    log = host.machine.log.read_text()
    effect = "until it exists, containers and units with this profile stay in their class"
    typo = f"20.yaml:3: profile typo names the class glod, which does not exist: {effect}. Did you mean gold?"
    assert log.count(typo) == 1
    missing = f"10.yaml:6: profile missing names the class platinum, which does not exist: {effect}."
    assert log.count(f"{missing} Existing classes: /, gold") == 2  # the start and the reload
    assert "names the class gold," not in log
    assert host.start(init())["profile"] == "plain"


def test_check_asks_the_daemon_of_another_socket_for_its_classes(host: Host) -> None:
    command = [sys.executable, "-m", "resctrlctl", "--socket", host.machine.socket, "profiles", "check"]
    command += [str(host.directory / "10.yaml"), "--profiles-dir", str(host.directory)]

    def check() -> tuple[int, str]:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    status, said = check()
    assert (status, said.count("\n")) == (8, 1)
    assert "10.yaml:6: profile missing names the class platinum, which does not exist" in said
    (host.machine.top / "resctrl" / "platinum").mkdir()
    assert check() == (0, "")


def test_container_that_is_not_watched_is_listed_with_the_reason_until_it_ends(
    host: Host, init: StartProcess
) -> None:
    child = init()
    assert host.start(child, profile="quiet", name="app") == {}
    assert host.machine.groups() == []
    reason = f"it is in no group, because of its profile quiet (annotation {ANNOTATION})"
    (unwatched,) = host.unwatched()
    unwatched.pop("since")
    assert unwatched == {
        "id": CONTAINER,
        "name": "app",
        "profile": "quiet",
        "profileSource": f"annotation {ANNOTATION}",
        "reason": reason,
    }
    assert reason in host.ctl("list", "--all", "--full")
    for name in (CONTAINER, CONTAINER[:12], "app"):
        explained = " ".join(host.ctl("profiles", "explain", name).split())
        assert "Profile: quiet" in explained
        assert f"Selected by: annotation {ANNOTATION}" in explained
        assert reason in explained
    end(child)
    assert host.unwatched() == []


def test_poststop_removes_a_container_that_is_not_watched(host: Host, init: StartProcess) -> None:
    child = init()
    host.start(child, profile="quiet")
    assert hook(host.machine, "poststop", state(0), "--strict") == (0, "")
    assert host.unwatched() == []


def test_empty_annotation_opts_out_of_rules_and_default(host: Host, init: StartProcess) -> None:
    host.write("rules: [{profile: quiet, cgroup: '*'}]\ndefault_profile: quiet", "20.yaml")
    host.machine.reload()
    workload = host.start(init(), profile="")
    assert workload.get("profile") is None
    assert workload["profileSource"] == f"annotation {ANNOTATION} is empty"
    assert host.start(init(), OTHER) == {}
    assert [one["id"] for one in host.unwatched()] == [OTHER]


def test_unknown_profile_gets_the_default_and_one_warning(host: Host, init: StartProcess) -> None:
    host.write("default_profile: gold", "20.yaml")
    host.machine.reload()
    workload = host.start(init(), profile="glod")
    assert workload["profile"] == "gold"
    unknown = f"annotation {ANNOTATION} names the profile 'glod', which does not exist"
    assert workload["profileSource"] == f"default_profile at {host.directory}/20.yaml:1; {unknown}"
    warning = f"{CONTAINER}: {unknown}: the default applies (profile gold)"
    assert host.machine.log.read_text().count(warning) == 1


def test_rule_on_the_control_group_selects(host: Host, init: StartProcess) -> None:
    host.write("rules: [{profile: plain, owner: oci, cgroup: '*/resctrlmond-hook-*'}]", "20.yaml")
    host.machine.reload()
    workload = host.start(init())
    assert workload["profileSource"] == f"rule at {host.directory}/20.yaml:1"


def test_container_shows_the_events_that_its_profile_selects(host: Host, init: StartProcess) -> None:
    host.write("profiles: {brief: {events: [mbm_total_bytes, llc_occupancy, no_such_*]}}", "20.yaml")
    host.machine.reload()
    warning = "20.yaml:1: events of profile brief match no event of this machine: no_such_*. See: resctrlctl status"
    assert warning in host.machine.log.read_text()
    workload = host.start(init(), profile="brief")
    assert workload["events"] == ["mbm_total_bytes", "llc_occupancy", "no_such_*"]
    reply = host.machine.call("Read", key=CONTAINER)
    assert {total["event"] for total in reply["totals"]} == {"mbm_total_bytes"}
    assert {reading["event"] for reading in reply["readings"]} == {"mbm_total_bytes", "llc_occupancy"}


def test_container_starts_while_a_reload_hangs(
    host: Host, init: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, hangs = host.machine, host.machine.top / "hangs"
    assert machine.stop() == 0
    monkeypatch.setenv("HANGS", str(hangs))
    machine.module = "tests.daemon.slow_lookup"
    machine.start()
    hangs.touch()
    host.write("rules: [{profile: plain, user: root}]\ndefault_profile: short", "20.yaml")
    assert machine.daemon is not None
    machine.daemon.send_signal(signal.SIGHUP)
    try:
        assert machine.wait_for_notify("RELOADING=1")
        assert host.start(init(), profile="gold")["profile"] == "gold"
    finally:
        hangs.unlink()
    assert machine.wait_for_notify("READY=1")
    assert host.start(init(), OTHER)["profile"] == "short"


def reasons_of(host: Host, key: str) -> set[str]:
    """Return the reasons of the totals of a workload; "" for an exact one."""
    return {total.get("reason", "") for total in host.machine.call("Read", key=key)["totals"]}


@pytest.fixture
def pod(move_to_cgroup: MoveToCgroup, init: StartProcess) -> Any:
    """Return a function that starts the init process of a container in the control group of the pod."""

    def start(id_: str) -> subprocess.Popen[bytes]:
        child = init()
        # The start of its interpreter is not use of the container.
        wait_until(lambda: "pipe" in Path(f"/proc/{child.pid}/wchan").read_text())
        move_to_cgroup(f"profiles-{os.getpid()}-pod{UID.replace('-', '_')}.slice/crio-{id_}.scope", child.pid)
        return child

    return start


def test_container_of_a_pod_can_be_a_workload_of_its_own(host: Host, pod: Any) -> None:
    sandbox, app, sidecar = "01" * 32, "02" * 32, "03" * 32
    texts = {"uid": UID, "namespace": "shop"}
    host.start(pod(sandbox), sandbox, **texts, **{"io.kubernetes.cri-o.ContainerType": "sandbox"})
    assert host.machine.group(UID)["baseline"] == "exact"
    child = pod(app)
    workload = host.start(child, app, name="app", app_profile="apart", **texts)
    assert (workload["baseline"], workload["profile"], workload["priority"]) == ("exact", "apart", 7)
    assert host.machine.tasks(app) == {child.pid}
    assert workload["attributes"]["pod.uid"] == UID
    assert workload["attributes"]["container.name"] == "app"
    assert [(claim["owner"], claim["endRule"]) for claim in workload["claims"]] == [("oci", "container")]
    host.start(pod(sidecar), sidecar, name="sidecar", app_profile="apart", **texts)
    whole = host.machine.group(UID)
    assert {member["id"] for member in whole["members"]} == {sandbox, sidecar}
    assert whole["baseline"] == "late"
    reasons = {total["reason"] for total in host.machine.call("Read", key=UID)["totals"]}
    assert reasons == {f"{app} is not included: its profile is apart"}
    listed = {one["key"]: one for one in host.machine.call("ListPods")["pods"]}
    assert listed.keys() == {UID}
    by_id = {one["id"]: one for one in listed[UID]["containers"]}
    assert by_id[app]["reason"] == f"it has its own group, because of its profile apart; see workload {app}"
    assert (by_id[sidecar]["monitored"], by_id[app]["monitored"]) == (True, False)
    end(child)
    assert hook(host.machine, "poststop", state(0, app), "--strict") == (0, "")
    assert host.machine.group(app)["state"] == "completed"
    assert host.machine.group(UID)["state"] == "active"


def test_pod_whose_containers_have_their_own_groups_has_none(host: Host, pod: Any) -> None:
    sandbox, app = "01" * 32, "02" * 32
    kind = {"io.kubernetes.cri-o.ContainerType": "sandbox"}
    host.start(pod(sandbox), sandbox, uid=UID, profile="apart", **kind)
    workload = host.start(pod(app), app, name="app", uid=UID, profile="apart")
    assert host.machine.groups() == [app]
    assert workload["baseline"] == "exact"
    (unwatched,) = host.unwatched()
    assert (unwatched["id"], unwatched["pod"]) == (sandbox, UID)
    assert unwatched["reason"].startswith("only the containers of the pod have groups, because of its profile apart")


def test_pod_without_one_container_is_late_also_if_it_begins_later(host: Host, pod: Any) -> None:
    app, other = "02" * 32, "03" * 32
    assert host.start(pod(app), app, name="app", uid=UID, app_profile="quiet") == {}
    assert host.machine.groups() == []
    host.start(pod(other), other, name="other", uid=UID, app_profile="quiet")
    totals = host.machine.call("Read", key=UID)["totals"]
    assert {total["quality"] for total in totals} == {"late"}
    assert {total["reason"] for total in totals} == {f"{app} is not included: its profile is quiet"}


def test_container_that_runs_apart_stays_late_for_its_pod_after_a_restart(host: Host, pod: Any) -> None:
    app, other = "02" * 32, "03" * 32
    host.start(pod(app), app, name="app", uid=UID, app_profile="apart")
    host.machine.kill()
    host.machine.start()
    host.start(pod(other), other, name="other", uid=UID)
    assert reasons_of(host, UID) == {f"{app} is not included: its profile is apart"}
    assert host.machine.group(app)["profile"] == "apart"


OUTSIDE = "tasks in its control groups used "


@pytest.fixture
def use(move_to_cgroup: MoveToCgroup) -> Any:
    """Return a function that uses 10 ms of CPU time in the control group of a container of the pod."""

    def start(id_: str) -> None:
        name = f"profiles-{os.getpid()}-pod{UID.replace('-', '_')}.slice/crio-{id_}.scope"
        with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as busy:
            move_to_cgroup(name, busy.pid)
            before_ns = cgroups.cpu_time_ns(str(cgroup_root() / name)) or 0
            wait_until(lambda: (cgroups.cpu_time_ns(str(cgroup_root() / name)) or 0) > before_ns + 10_000_000)
            end(busy)

    return start


def is_late(host: Host) -> bool:
    """Whether the pod is late, only because of use outside its group."""
    (reason,) = reasons_of(host, UID)
    qualities = {total["quality"] for total in host.machine.call("Read", key=UID)["totals"]}
    return qualities == {"late"} and reason.startswith(OUTSIDE) and ";" not in reason


def test_container_without_a_group_makes_its_pod_late_by_its_use_also_after_a_kill(
    host: Host, pod: Any, use: Any
) -> None:
    app, other = "02" * 32, "03" * 32
    assert host.start(pod(app), app, name="app", uid=UID, app_profile="quiet") == {}
    host.machine.kill()
    # The profile that excluded it may be gone by now.
    (host.directory / "10.yaml").unlink()
    host.machine.start()
    host.start(pod(other), other, name="other", uid=UID)
    assert reasons_of(host, UID) == {""}, "nothing is missing yet"
    use(app)
    assert is_late(host)
    host.machine.kill()
    host.machine.start()
    assert is_late(host)


def test_container_that_started_without_the_daemon_makes_its_pod_late_by_its_use(
    host: Host, pod: Any, use: Any
) -> None:
    """Whether or not a container of the pod is assigned later."""
    first, missed, last = "01" * 32, "02" * 32, "03" * 32
    host.start(pod(first), first, uid=UID)
    assert reasons_of(host, UID) == {""}
    host.machine.kill()
    pod(missed)
    host.machine.start()
    assert reasons_of(host, UID) == {""}
    use(missed)
    assert is_late(host)
    host.start(pod(last), last, uid=UID)
    assert is_late(host)


def test_container_that_started_and_ended_without_the_daemon_makes_its_pod_late(
    host: Host, pod: Any, use: Any
) -> None:
    first, missed = "01" * 32, "02" * 32
    host.start(pod(first), first, uid=UID)
    host.machine.kill()
    use(missed)
    host.machine.start()
    assert is_late(host)


def test_pod_whose_only_member_ended_meanwhile_is_late_for_use_outside(host: Host, pod: Any, use: Any) -> None:
    first, missed = "01" * 32, "02" * 32
    child = pod(first)
    host.start(child, first, uid=UID)
    host.machine.kill()
    end(child)
    use(missed)
    host.machine.start()
    assert any(OUTSIDE in reason for reason in reasons_of(host, UID))


def test_pod_is_exact_after_a_restart_if_no_container_runs_outside(host: Host, pod: Any) -> None:
    ended, created, last = "02" * 32, "03" * 32, "04" * 32
    child = pod(ended)
    assert host.start(child, ended, name="app", uid=UID, app_profile="quiet") == {}
    pod(f"conmon-{ended}")
    end(child)
    host.machine.kill()
    host.machine.start()
    # Its hook has not called yet.
    pod(created)
    host.start(pod(last), last, uid=UID)
    assert reasons_of(host, UID) == {""}


def test_pod_stays_exact_over_a_restart_if_all_its_containers_are_counted(host: Host, pod: Any) -> None:
    containers = "01" * 32, "02" * 32
    for id_ in containers:
        host.start(pod(id_), id_, uid=UID)
    host.machine.kill()
    host.machine.start()
    assert reasons_of(host, UID) == {""}


def test_linger_of_a_profile_keeps_the_group(host: Host, init: StartProcess) -> None:
    children = init(), init()
    host.start(children[0], profile="gold")
    host.start(children[1], OTHER, profile="plain")
    for child in children:
        end(child)
    assert host.machine.reaches(OTHER, "completed")
    assert host.machine.reaches(CONTAINER, "idle")
    host.write(PROFILES.replace("linger: 1h", "linger: 0"))
    host.machine.reload()
    assert host.machine.reaches(CONTAINER, "completed")


def test_snapshot_ttl_of_a_profile_removes_the_values_of_an_ended_run(host: Host, init: StartProcess) -> None:
    children = init(), init()
    # The one that is kept ends first.
    host.start(children[0], profile="plain")
    host.start(children[1], OTHER, profile="short")
    end(children[0])
    assert host.machine.reaches(CONTAINER, "completed")
    end(children[1])
    wait_until(lambda: OTHER not in {one["key"] for one in host.machine.call("List")["workloads"]})
    assert host.machine.group(CONTAINER)["state"] == "completed"
    assert not (host.machine.run / "groups" / OTHER).exists()


def test_member_that_is_assigned_again_keeps_its_profile(host: Host, init: StartProcess) -> None:
    child = init()
    host.start(child, profile="gold")
    host.machine.call("Move", key=CONTAINER, class_="")
    workload = host.start(child, profile="quiet")
    assert (workload["profile"], workload["class"]) == ("gold", ""), "moved by the administrator"
    assert host.unwatched() == []


def test_restarted_container_is_selected_again(host: Host, init: StartProcess) -> None:
    child = init()
    host.start(child, profile="gold")
    end(child)
    assert host.start(init(), profile="plain")["profile"] == "plain"
    assert host.machine.group(CONTAINER)["class"] == "gold", "the group lingers in its class"


def test_wrong_profiles_at_a_reload_leave_the_old_ones_in_use(host: Host, init: StartProcess) -> None:
    host.write(PROFILES.replace("watch: none", "wach: none"))
    host.machine.reload()
    problems = host.machine.call("Status")["problems"]
    expected = f"the profiles are wrong, and the old ones stay in use: {host.directory}/10.yaml:3: unknown key 'wach'"
    assert [problem for problem in problems if problem.startswith(expected)] == problems
    assert "reloaded" not in host.machine.log.read_text()
    assert host.start(init(), profile="quiet") == {}
    host.write(PROFILES)
    host.machine.reload()
    assert host.machine.call("Status")["problems"] == []
    assert "configuration and profiles reloaded" in host.machine.log.read_text()


def test_daemon_starts_without_profiles_if_they_are_wrong(machine: Machine, init: StartProcess) -> None:
    host = Host(machine)
    host.write("profiles: {quiet: {watch: nobody}}\ndefault_profile: quiet")
    machine.start()
    (problem,) = machine.call("Status")["problems"]
    assert problem.startswith("the profiles are wrong, and the daemon runs without profiles: ")
    assert host.start(init())["baseline"] == "exact"
    host.write("profiles: {quiet: {watch: none}}\ndefault_profile: quiet")
    machine.reload()
    assert machine.call("Status")["problems"] == []
    assert host.start(init(), OTHER) == {}


def test_check_config_checks_the_profiles(tmp_path: Path) -> None:
    (tmp_path / "10.yaml").write_text("profiles: {a: {watch: xyzzy}}")
    config = tmp_path / "resctrlmond.yaml"
    config.write_text("")
    options = (
        "--check-config",
        "--simulate",
        str(tmp_path),
        "--config",
        str(config),
        "--profiles-dir",
        str(tmp_path),
    )
    code, error = run_daemon(*options)
    assert code == 78
    assert "10.yaml:1: watch cannot be 'xyzzy'" in error
    (tmp_path / "10.yaml").write_text("profiles: {a: {watch: none}}")
    assert run_daemon(*options)[0] == 0


def test_explanation_of_an_unknown_name_is_an_error_with_a_remedy(host: Host) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        host.ctl("profiles", "explain", "mising")
    assert (failed.value.returncode, failed.value.stderr) == (
        4,
        "resctrlctl: cannot explain the profile of 'mising': there is no such workload or container. "
        "See: resctrlctl list --all\n",
    )


def test_explanation_names_each_container_of_a_pod(host: Host, pod: Any) -> None:
    app = "02" * 32
    host.start(pod(app), app, name="app", uid=UID, profile="plain", app_profile="gold")
    explained = host.ctl("profiles", "explain", UID)
    assert f"Profile: plain\n  Selected by: annotation {ANNOTATION}\n" in explained
    assert f"{app}: gold, annotation {ANNOTATION}/app" in " ".join(explained.split())
    reply = json.loads(host.ctl("profiles", "explain", app[:12], "--json"))
    assert reply == {"id": app, "profile": "gold", "source": f"annotation {ANNOTATION}/app"}
    shown = host.ctl("show", UID)
    assert "Profile: plain" in shown


def test_container_that_starts_before_the_socket_of_the_daemon_makes_its_pod_late(
    host: Host, pod: Any, use: Any, process: StartProcess
) -> None:
    first, left_out = "01" * 32, "02" * 32
    host.start(pod(first), first, uid=UID)
    assert host.machine.group(UID)["baseline"] == "exact"
    slow_next_start(host.machine, process, 10)
    host.machine.spawn()
    # The hook of the container cannot connect yet.
    assert host.machine.wait_for_notify("STATUS=recovering, now at slow")
    use(left_out)
    assert host.machine.wait_for_notify("READY=1")
    assert is_late(host)
