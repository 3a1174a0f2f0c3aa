# SPDX-License-Identifier: Apache-2.0
"""resctrlctl status UNIT, with scripts in the place of systemctl and journalctl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from resctrlctl.command import main
from resctrlctl.units import exact_units
from resctrlctl.units.unit_state import full_name
from resctrlctl.workloads import report, source
from resctrlctl.workloads.source import Source
from resctrlmond.api import types
from resctrlmond.api.exit_codes import USAGE
from resctrlmond.api.types import Claim, ListReply, Member
from resctrlmond.configuration import config
from resctrlmond.resctrl import cgroups
from resctrlmond.workloads.model.states import CompanionState, Quality
from resctrlmond.workloads.model.workload import EndRule, State
from tests.ctl.fake_manager import LATER, NOW, FakeManager, error
from tests.ctl.workloads.test_report import an_entry

_CLAIMS = (Claim("systemd", NOW, EndRule.RELEASE),)


class Machine:
    """The units of systemctl, the entries of journalctl, the configuration, and the calls of resctrlctl."""

    def __init__(self, folder: Path, manager: FakeManager) -> None:
        self.folder = folder
        self.manager = manager
        self.exact = folder / "etc"
        (folder / "units").mkdir()
        self.entries()
        script(
            folder / "systemctl",
            f"""echo "$@" >>{folder}/called
while [ "$1" != -- ]; do shift; done; shift
for name; do
    case $name in *'*'*) continue ;; esac
    cat {folder}/units/$name 2>/dev/null || printf 'Id=%s\\nLoadState=not-found\\nActiveState=inactive\\n' "$name"
    echo
done
for name; do
    case $name in *'*'*) cd {folder}/units; for file in $name; do cat $file; echo; done ;; esac
done
""",
        )

    def unit(self, name: str, active: str = "active", *, is_of: str = "", **properties: str) -> None:
        values = {
            "Id": is_of or name,
            "Description": f"The unit {name}",
            "LoadState": "loaded",
            "ActiveState": active,
            "SubState": "running" if active == "active" else "dead",
            "ControlGroup": "",
            "FragmentPath": f"/usr/lib/systemd/system/{is_of or name}",
            "ActiveEnterTimestamp": "@1795258800",
            "InactiveEnterTimestamp": "@1795255200",
        } | properties
        (self.folder / "units" / name).write_text("".join(f"{key}={value}\n" for key, value in values.items()))

    def entries(self, *entries: dict[str, Any], end: str = "exit 0") -> None:
        (self.folder / "lines").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
        script(self.folder / "journalctl", f'echo "$@" >>{self.folder}/asked\ncat {self.folder}/lines\n{end}\n')

    def globs(self, *globs: str, file: str = "resctrlmond.d/units.yaml") -> Path:
        path = self.folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"units: {json.dumps(globs)}\n")
        return path

    def watched(self, key: str, **fields: Any) -> types.Workload:
        member = Member(key, "unit", "systemd", cgroup=f"/sys/fs/cgroup/system.slice/{key}", started_at=NOW)
        return self.manager.add(
            key, **({"claims": _CLAIMS, "members": (member,), "attributes": {"unit": key}} | fields)
        )


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: FakeManager, environment: dict[str, str]
) -> Machine:
    assert environment["TZ"] == "UTC"
    monkeypatch.setattr(config, "DEFAULT_PATH", str(tmp_path / "resctrlmond.yaml"))
    monkeypatch.setattr(config, "DROP_INS", str(tmp_path / "resctrlmond.d"))
    monkeypatch.setattr(exact_units, "SYSTEM", str(tmp_path / "etc"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(report, "JOURNALCTL", str(tmp_path / "journalctl"))
    return Machine(tmp_path, manager)


class Show:
    """Calls resctrlctl status, and returns its exit status and output."""

    def __init__(self, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
        self.machine = machine
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        status = main(["--socket", self.machine.manager.socket, "status", *words])
        return status, *self._capsys.readouterr()


@pytest.fixture
def show(machine: Machine, capsys: pytest.CaptureFixture[str]) -> Show:
    return Show(machine, capsys)


def lines(text: str) -> dict[str, str]:
    """Return the labelled lines of the first sheet; a value of several lines as one."""
    found: dict[str, str] = {}
    label = ""
    for line in text.split("\n\n", maxsplit=1)[0].splitlines()[1:]:
        head, colon, value = line.partition(": ")
        if colon and not line.startswith(" " * 14) and head.strip():
            label = head.strip()
            assert label not in found, f"{label} is shown twice"
            found[label] = value
        else:
            found[label] += f"\n{line.strip()}"
    return found


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("dbus.service", "/usr/lib/systemd/system/dbus.service"),
        ("resctrlmond.service", "/usr/lib/systemd/system/resctrlmond.service"),
        ("shop.service", "/run/systemd/transient/shop.service"),
        ("shop.slice", ""),
    ],
)
def test_units_exact_is_not_the_remedy_where_it_is_refused(
    machine: Machine, show: Show, name: str, file: str
) -> None:
    machine.globs("*")
    machine.unit(name, FragmentPath=file)
    machine.watched(name, baseline=Quality.LATE)
    status, out, _ = show(name)
    assert (status, lines(out)["Watched"]) == (0, "yes, late")
    assert "Remedy" not in lines(out)


def test_unit_that_is_late_is_shown_with_its_bound_and_remedy(machine: Machine, show: Show) -> None:
    file = machine.globs("*.service")
    machine.unit("nginx.service")
    member = Member("nginx.service", "unit", "systemd", late=True, cpu_time_before_ns=1_250_000_000)
    machine.watched("nginx.service", baseline=Quality.LATE, members=(member,), class_="gold", priority=-1)
    (machine.manager.tree / "nginx.service" / "tasks").write_text("1\n2\n3\n")
    status, out, err = show("nginx")
    assert (status, err) == (0, "")
    assert out.startswith("nginx.service - The unit nginx.service\n")
    found = lines(out)
    assert found["Unit"] == "active (running) since 2026-11-21 11:00:00"
    assert found["Watched"] == (
        "yes, late: it was already running when it was put into the group, for up to 1.250 s of CPU time"
    )
    assert found["Remedy"] == "resctrlctl units exact nginx.service"
    assert found["Selected by"] == f"*.service in {file}"
    assert (found["Tasks"], found["Workload"], found["Class"], found["Priority"]) == (
        "3 in the group",
        "active",
        "gold",
        "-1",
    )
    assert found["Since"] == "2026-11-21 11:13:22"
    assert found["Now"] == "llc_occupancy 1.50 MiB"
    assert "core_energy      12.345678 J" in out
    assert "mbm_total_bytes: mon_L3_00 read 'Unavailable' at the end" in out


def test_exact_unit_needs_no_remedy_and_its_drop_in_is_named_while_it_is_late(machine: Machine, show: Show) -> None:
    machine.globs("*.service")
    machine.unit("getty@tty1.service")
    machine.watched("getty@tty1.service")
    found = lines(show("getty@tty1.service")[1])
    assert (found["Watched"], found.get("Remedy")) == ("yes, from its first instruction on", None)
    drop_in = machine.exact / "getty@.service.d" / exact_units.FILE
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("")
    assert lines(show("getty@tty1.service")[1])["Watched"] == "yes, from its first instruction on"
    machine.watched("getty@tty1.service", baseline=Quality.LATE)
    found = lines(show("getty@tty1.service")[1])
    assert found["Watched"] == f"yes, late\nit can be exact from its next start after a stop on, by {drop_in}"
    assert "Remedy" not in found


def test_profile_companion_memory_and_exposed_files_are_shown(machine: Machine, show: Show) -> None:
    machine.globs("*.service")
    machine.unit("web.service")
    member = Member("web.service", "unit", "systemd", exposed="/run/resctrlmon")
    companion = types.Companion(state=CompanionState.RUNNING, unit="resctrlmon-companion-web.service")
    machine.watched(
        "web.service",
        profile="quiet",
        profile_source="rule 2 of /etc/p.yaml",
        companion=companion,
        memory="set: memory.high: 67108864",
        members=(member,),
    )
    found = lines(show("web.service")[1])
    assert found["Profile"] == "quiet\nrule 2 of /etc/p.yaml"
    assert found["Companion"] == "running\nresctrlmon-companion-web.service"
    assert found["Memory"] == "set: memory.high: 67108864"
    assert found["Exposed"] == "web.service: /run/resctrlmon"


def test_unit_without_an_rmid_is_shown_with_those_that_share_its_group(machine: Machine, show: Show) -> None:
    machine.globs("*.service")
    names = [f"w{number}.service" for number in range(4)]
    for name in names:
        machine.unit(name)
        machine.watched(name, state=State.PENDING, path=None, reason="no RMID is free", baseline=Quality.LATE)
    members = tuple(
        Member(name, "overflow", "overflow", ended_at=LATER if name == names[3] else "") for name in names
    )
    machine.manager.add("overflow@system.slice", claims=(Claim("overflow", NOW, EndRule.RELEASE),), members=members)
    status, out, _ = show(names[0])
    found = lines(out)
    assert status == 0
    assert (found["Watched"], found.get("Remedy")) == ("not yet: it waits for an RMID", None)
    assert found["Workload"] == "pending: no RMID is free"
    assert found["Shared"] == (
        "with 2 others in overflow@system.slice, which has their figures together\n"
        "resctrlctl show overflow@system.slice"
    )
    assert "Shared" not in lines(show(names[3])[1])


@pytest.mark.parametrize(
    ("unit", "globs", "reason", "remedy"),
    [
        ("a.service", "b*", "no glob in the configuration selects it", "resctrlctl units enable a.service"),
        ("a.service", "* !a*", "the glob !a* in {file} excludes it", "resctrlctl units disable '!a*'"),
        ("init.scope", "*", "it is never watched: it has the tasks of the whole host, or process 1", ""),
        (
            "a.socket",
            "*",
            "only services, scopes and slices are watched, because the others have no tasks of a program",
            "",
        ),
        (
            "a.service",
            "*",
            "resctrl: systemd's units are not watched: no bus",
            "systemctl status resctrlmond.service",
        ),
    ],
)
def test_unit_without_workload_is_explained(unit: str, globs: str, reason: str, remedy: str, show: Show) -> None:
    machine = show.machine
    file = machine.globs(*globs.split())
    machine.unit(unit)
    reply = machine.manager.status(types.NoParameters())
    problems = ["another problem", "resctrl: systemd's units are not watched: no bus"]
    machine.manager.replies = {"Status": replace(reply, problems=problems)}
    status, out, err = show(unit)
    found = lines(out)
    assert (status, err) == (0, "")
    assert found["Watched"] == f"no: {reason.format(file=file)}"
    assert found.get("Remedy", "") == remedy


def test_excluding_glob_of_another_file_is_removed_there(machine: Machine, show: Show) -> None:
    file = machine.globs("*", "!a*", file="resctrlmond.yaml")
    machine.unit("a.service")
    found = lines(show("a")[1])
    assert found["Remedy"] == f"remove the glob from {file}, then: systemctl reload resctrlmond"


def test_selected_unit_without_workload_that_the_daemon_does_not_explain(machine: Machine, show: Show) -> None:
    machine.globs("*")
    machine.unit("a.service")
    found = lines(show("a")[1])
    assert found["Watched"].startswith("no: it has no tasks, resctrlmond has not detected it yet")
    assert found["Remedy"] == "systemctl reload resctrlmond, then: journalctl -u resctrlmond"


def test_unit_that_its_profile_leaves_out(machine: Machine, show: Show) -> None:
    machine.globs("*")
    machine.unit("a.service")
    reason = "it is in no group, because of its profile off (rule 1 of p.yaml)"
    machine.manager.unwatched.append(
        types.Unwatched(
            id="a.service", is_unit=True, profile="off", profile_source="rule 1 of p.yaml", reason=reason, since=NOW
        )
    )
    found = lines(show("a")[1])
    assert found["Watched"] == f"no: {reason}"
    assert found["Remedy"] == "resctrlctl profiles show off"


def test_unit_that_another_workload_counts(machine: Machine, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "path_of", lambda inner: f"/sys/fs/cgroup{inner}")
    machine.globs("*.service")
    machine.unit("a.service", ControlGroup="/a.slice/a.service")
    top = "/sys/fs/cgroup/a.slice"
    machine.manager.add("a.slice", members=(Member("m", "unit", "systemd", cgroup=top),))
    machine.manager.add("b", members=(Member("m", "process", "cli", cgroup=f"{top}/a.servic"),))
    found = lines(show("a")[1])
    assert found["Watched"] == "no: its tasks are counted in the workload a.slice"
    machine.manager.add("own", members=(Member("m", "process", "cli", cgroup=f"{top}/a.service"),))
    found = lines(show("a")[1])
    assert found["Watched"] == "no: its tasks are counted in the workload own"
    assert found["Remedy"] == "resctrlctl show own"
    machine.globs("b.service")
    found = lines(show("a")[1])
    assert found["Watched"] == (
        "no: no glob in the configuration selects it; its tasks are counted in the workload own"
    )
    assert found["Remedy"] == "resctrlctl units enable a.service"


@pytest.mark.parametrize("active", ["inactive", "failed"])
def test_unit_that_does_not_run_exits_with_3(active: str, machine: Machine, show: Show) -> None:
    machine.globs("*.service")
    machine.unit("a.service", active)
    machine.watched("a.service", state=State.COMPLETED, completed_at=LATER, claims=(), path=None)
    status, out, _ = show("a.service")
    found = lines(out)
    assert status == 3
    assert found["Unit"] == f"{active} (dead) since 2026-11-21 10:00:00"
    assert found["Watched"] == "no: it is not running\nits last run is below"
    assert found["Remedy"] == "systemctl start a.service"
    assert found["Completed"] == "2026-11-21 11:20:00"
    assert "core_energy" in out


def test_service_that_is_starting_exits_with_3_and_is_not_explained_as_ended(machine: Machine, show: Show) -> None:
    machine.globs("*.service")
    machine.unit("a.service", "activating", SubState="start", InactiveExitTimestamp="@1795258800")
    status, out, _ = show("a.service")
    assert status == 3
    assert lines(out)["Unit"] == "activating (start) since 2026-11-21 11:00:00"
    assert "it is not running" not in out


def test_workload_that_was_lost(machine: Machine, show: Show) -> None:
    machine.globs("*.service")
    machine.unit("a.service")
    machine.watched("a.service", state=State.LOST, reason="another program removed the group", path=None)
    found = lines(show("a.service")[1])
    assert found["Watched"].startswith("no: its workload is lost")
    assert found["Workload"] == "lost: another program removed the group"


def test_unit_that_does_not_exist_exits_with_4_and_the_others_are_shown(machine: Machine, show: Show) -> None:
    machine.unit("b.service")
    status, out, err = show("a.service", "b.service")
    assert status == 4
    assert err == "resctrlctl: there is no unit a.service. See: systemctl list-unit-files\n"
    assert out.startswith("b.service - ")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("shop.servce", "there is no unit shop.servce.service. Did you mean shop.service?"),
        ("shp", "there is no unit shp.service. Did you mean shop.service?"),
        ("org.example.Shpo", "there is no unit org.example.Shpo.service. Did you mean org.example.Shop.scope?"),
        ("stop", "there is no unit stop.service. Did you mean shop.service?"),
        ("database", "there is no unit database.service. See: systemctl list-unit-files"),
    ],
)
def test_name_like_that_of_a_unit_is_an_error_with_that_name(
    machine: Machine, show: Show, typed: str, hint: str
) -> None:
    for key in ("shop.service", "org.example.Shop.scope"):
        machine.watched(key)
    assert show(typed) == (4, "", f"resctrlctl: {hint}\n")
    script(machine.folder / "systemctl", "echo 'Failed to connect to bus' >&2; exit 1\n")
    status, _, err = show(typed)
    assert (status, "Did you mean" in err) == (4, "Did you mean" in hint)


def test_unit_of_which_only_the_journal_knows_is_shown(machine: Machine, show: Show) -> None:
    machine.globs("*")
    machine.entries(an_entry(key="run-u1.service"))
    status, out, _ = show("run-u1.service")
    assert status == 3
    assert lines(out)["Unit"] == "not found by systemd"
    assert "Remedy" not in lines(out)


def test_alias_shows_the_workload_of_its_unit(machine: Machine, show: Show) -> None:
    machine.globs("*")
    machine.unit("dbus.service", is_of="dbus-broker.service")
    machine.watched("dbus-broker.service")
    status, out, _ = show("dbus")
    assert status == 0
    assert out.startswith("dbus-broker.service - ")
    assert lines(out)["Watched"] == "yes, from its first instruction on"


def test_last_runs_of_the_journal_are_shown_once_each(machine: Machine, show: Show) -> None:
    machine.unit("a.service", "inactive")
    runs = [
        an_entry(number, key="a.service", quality="late" if number == 6 else "exact")
        | {"__REALTIME_TIMESTAMP": str((1795248000 + 60 * number) * 10**6)}
        for number in range(1, 8)
    ]
    forged = an_entry(9, key="a.service") | {"_UID": "1000"}
    other = an_entry(8, key="b.service")
    machine.entries(*runs, runs[-1], forged, other)
    out = show("a.service")[1]
    assert out.partition("\n\n")[2] == (
        "RUN ENDED            TIME  TRAFFIC  ENERGY  QUALITY\n"
        "2026-11-21 08:03:00    1s  1.00MiB   12.5J  exact\n"
        "2026-11-21 08:04:00    1s  1.00MiB   12.5J  exact\n"
        "2026-11-21 08:05:00    1s  1.00MiB   12.5J  exact\n"
        "2026-11-21 08:06:00    1s  1.00MiB   12.5J  late\n"
        "2026-11-21 08:07:00    1s  1.00MiB   12.5J  exact\n"
        "\n"
        "5 ended runs, the newest last.\n"
    )
    asked = (machine.folder / "asked").read_text()
    assert "RESCTRLMON_KEY=a.service" in asked
    assert "--lines=" in asked


def test_journal_that_cannot_be_read_is_named(machine: Machine, show: Show) -> None:
    machine.unit("a.service")
    machine.entries(end='echo "insufficient permissions" >&2; exit 1')
    status, out, err = show("a.service")
    assert (status, err) == (0, "")
    assert lines(out)["Not known"].startswith("cannot read the entries of resctrlmond in the journal: this user")


def test_globs_that_cannot_be_read_are_named(machine: Machine, show: Show) -> None:
    file = machine.globs("nginx")
    machine.unit("a.service")
    found = lines(show("a")[1])
    assert found["Watched"] == "no: it is not known whether a glob selects it"
    assert f"{file}:1" in found["Not known"]


def test_without_systemd_only_workloads_are_known(machine: Machine, show: Show) -> None:
    script(machine.folder / "systemctl", "echo 'Failed to connect to bus' >&2; exit 1\n")
    machine.watched("a.service")
    machine.watched("b.service", state=State.COMPLETED, claims=(), completed_at=LATER)
    status, out, _ = show("a.service")
    assert status == 0
    assert lines(out)["Not known"] == 'systemctl: "Failed to connect to bus"'
    assert "Unit" not in lines(out)
    assert show("b.service")[0] == 3
    status, out, err = show("c.service")
    assert (status, out) == (4, "")
    assert 'c.service has no workload, and systemd cannot be asked: systemctl: "Failed' in err
    status, out, err = show("c*")
    assert (status, out) == (4, "")
    assert 'no workload of a unit, matches c*: systemctl: "Failed to connect to bus"' in err


def test_globs_show_units_that_run_and_those_with_a_workload(machine: Machine, show: Show) -> None:
    machine.globs("*.service")
    for name, active in (("a1.service", "active"), ("a2.service", "inactive"), ("a3.service", "inactive")):
        machine.unit(name, active)
    machine.watched("a3.service", state=State.COMPLETED, claims=(), completed_at=LATER)
    machine.manager.add("a-pod", attributes={"pod.name": "a"})
    status, out, err = show("a*")
    assert (status, err) == (3, "")
    titles = [block.partition(" - ")[0] for block in out.split("\n\n") if " - The unit" in block]
    assert titles == ["a1.service", "a3.service"]
    machine.watched("a4.service", state=State.COMPLETED, claims=(), completed_at=LATER)
    assert "a4.service\n         Unit: not found by systemd\n" in show("a*")[1]
    status, out, err = show("z*")
    assert (status, out) == (4, "")
    assert err == "resctrlctl: no unit that runs, and no workload of a unit, matches z*\n"


def test_unit_that_several_names_select_is_shown_once(machine: Machine, show: Show) -> None:
    machine.unit("dbus.service", is_of="dbus-broker.service")
    machine.unit("dbus-broker.service")
    out = show("dbus*", "dbus", "*.service")[1]
    assert out.count("dbus-broker.service - ") == 1


def test_remedy_can_be_pasted_into_a_shell(machine: Machine, show: Show) -> None:
    name = r"mnt-a\x2db.service"
    (machine.folder / "units" / name).write_text(
        f"Id={name}\nLoadState=loaded\nActiveState=active\nSubState=running\n"
    )
    assert lines(show(name)[1])["Remedy"] == r"resctrlctl units enable 'mnt-a\x2db.service'"


def test_json_has_an_object_for_each_unit(machine: Machine, show: Show) -> None:
    file = machine.globs("*.service")
    machine.unit("a.service")
    machine.unit("b.service", "inactive")
    machine.watched("a.service")
    machine.entries(an_entry(key="a.service") | {"__REALTIME_TIMESTAMP": "1795248000000000"})
    status, out, _ = show("--json=short", "a.service", "b.service")
    first, second = map(json.loads, out.splitlines())
    assert status == 3
    assert first["unit"]["active"] == "active"
    assert (first["glob"], first["globPath"]) == ("*.service", str(file))
    assert first["use"]["workload"]["key"] == "a.service"
    assert first["absence"] is None
    assert first["runs"][0]["endedAt"] == "2026-11-21T08:00:00Z"
    assert [(total["event"], total["value"]) for total in first["runs"][0]["totals"]] == [
        ("mbm_total_bytes", "1048576"),
        ("core_energy", "12.5"),
    ]
    assert (second["use"], second["absence"]["reason"]) == (None, "it is not running")


def test_quiet_prints_nothing_and_has_the_exit_status(machine: Machine, show: Show) -> None:
    machine.unit("a.service", "inactive")
    assert show("-q", "a.service") == (3, "", "")


def test_unit_of_a_user_is_found_by_its_control_group(
    machine: Machine, show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "path_of", lambda inner: f"{tmp_path}{inner}")
    machine.globs("user-*:*.service")
    top = tmp_path / "user.slice/user-1000.slice/user@1000.service"
    running, ended, nested = "app.slice/app.service", "app.slice/old.service", "app.slice/app.service/in.service"
    for name, populated in ((running, 1), (ended, 0), (nested, 1)):
        (top / name).mkdir(parents=True)
        (top / name / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
    machine.watched("user-1000:app.service")
    status, out, err = show("user-1000:app")
    assert (status, err) == (0, "")
    assert lines(out)["Unit"] == "active"
    assert lines(out)["Watched"] == "yes, from its first instruction on"
    assert show("user-1000:old.service")[0] == 3
    assert show("user-1000:in.service")[0] == 3
    assert not (machine.folder / "called").exists()
    machine.globs("*.service")
    found = lines(show("user-1000:other.service")[1])
    assert found["Watched"] == "no: no glob of this user's units in the configuration selects it"
    assert found["Remedy"] == "resctrlctl units enable user-1000:other.service"


def test_daemon_that_does_not_run_is_the_reason(
    machine: Machine, show: Show, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source, "SOCKET", "/nonexistent")
    monkeypatch.setattr(Source, "_open", lambda *_: NoWorkloads())
    machine.globs("*")
    machine.unit("a.service")
    assert main(["--socket", "/nonexistent", "status", "a.service"]) == 0
    found = lines(capsys.readouterr().out)
    assert found["Watched"] == "no: resctrlmond is not running, so no unit is watched"
    assert found["Remedy"] == "systemctl start resctrlmond.socket resctrlmond.service"


class NoWorkloads:
    """A view of a tree without groups."""

    def workloads(self) -> ListReply:
        return ListReply(workloads=[], foreign=[])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nginx", "nginx.service"),
        ("a.b", "a.b.service"),
        ("x.slice", "x.slice"),
        ("a@b.timer", "a@b.timer"),
        ("user-7:x", "user-7:x.service"),
        ("ng*", "ng*"),
    ],
)
def test_names_are_completed_as_by_systemctl(text: str, name: str) -> None:
    assert full_name(text) == name


@pytest.mark.parametrize("text", ["a b", "/x/y", "é", "a;*", "x" * 300, "--x*\n"])
def test_text_that_cannot_be_a_unit_is_refused(text: str, machine: Machine, show: Show) -> None:
    status, out, err = show("--", text)
    assert (status, out) == (USAGE, "")
    assert "is not the name or glob of a unit, such as nginx.service" in err
    assert machine.manager.calls == []


def test_units_of_another_host_are_refused(machine: Machine, show: Show) -> None:
    status, out, err = show("a.service", "-H", "web1")
    assert (status, out) == (USAGE, "")
    assert "status of a unit asks systemd on this machine. Run it there: ssh HOST resctrlctl status" in err
    assert machine.manager.calls == []


def test_daemon_that_refuses_the_list_is_an_error(machine: Machine, show: Show) -> None:
    machine.manager.refuse = {"List": error("NotMounted", "resctrl is not mounted")}
    status, out, err = show("a")
    assert (status, out) == (3, "")
    assert "cannot list the workloads: resctrl is not mounted" in err
