# SPDX-License-Identifier: Apache-2.0
"""resctrlctl profiles: the profiles as the files have them, and mistakes in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resctrlctl.command import main
from resctrlmond.sim.fuse.mount import Simulation

TEXT = """\
profiles:
  batch: {watch: container, class: batch, linger: 5min, snapshot_ttl: 1h, priority: -3}
  quiet: {watch: none}
  root: {class: /}
rules:
  - {profile: quiet, namespace: kube-*}
  - {profile: batch, labels: "tier in (batch)", user: root}
default_profile: root
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with profiles."""
    (tmp_path / "10-shop.yaml").write_text(TEXT)
    return tmp_path


@pytest.fixture
def without_class(directory: Path) -> Path:
    """A directory with profiles that name no class, which a machine may have or not."""
    (directory / "10-shop.yaml").write_text(TEXT.replace("class: batch, ", ""))
    return directory


def call(directory: Path, *words: str) -> int:
    return main(["profiles", *words, "--profiles-dir", str(directory)])


def test_list_shows_profiles_and_rules(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(directory, "list") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    file = f"{directory}/10-shop.yaml"
    assert ["batch", "container", "batch", "5m0s", "60m", "-3", "-", f"{file}:2"] in lines
    assert ["quiet", "none", "follow", "-", "-", "-", "-", f"{file}:3"] in lines
    assert ["root", "pod", "/", "-", "-", "-", "containers", f"{file}:4"] in lines
    assert [f"{file}:6", "quiet", "namespace:", "kube-*"] in lines
    assert [f"{file}:7", "batch", "labels:", "tier", "in", "(batch);", "user:", "0"] in lines


def test_list_prints_json_and_names(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(directory, "list", "--json") == 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["defaultProfile"] == "root"
    assert reply["profiles"][0] == {
        "name": "batch",
        "watch": "container",
        "class": "batch",
        "linger": 300.0,
        "snapshotTtl": 3600.0,
        "priority": -3,
        "origin": f"{directory}/10-shop.yaml:2",
    }
    assert [rule["profile"] for rule in reply["rules"]] == ["quiet", "batch"]
    assert call(directory, "list", "--quiet") == 0
    assert capsys.readouterr().out == "batch\nquiet\nroot\n"


def test_show_prints_a_profile_with_its_rules(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(directory, "show", "quiet") == 0
    shown = capsys.readouterr().out
    assert "Watch: none" in shown
    assert f"namespace: kube-* ({directory}/10-shop.yaml:6)" in shown
    assert "batch" not in shown
    assert call(directory, "show", "root", "--json") == 0
    reply = json.loads(capsys.readouterr().out)
    assert [profile["name"] for profile in reply["profiles"]] == ["root"]
    assert reply["rules"] == []


def test_events_and_snapshot_are_shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "20.yaml").write_text(
        'profiles: {brief: {expose: true, snapshot: false, events: ["mbm_*", "!mbm_local_bytes"]}}\n'
    )
    assert call(directory, "show", "brief") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Events: mbm_*, !mbm_local_bytes" in lines
    assert "Snapshot TTL: off" in lines
    assert "Expose: yes" in lines
    assert call(directory, "show", "brief", "--json") == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    assert profile["expose"] is True
    assert (profile["snapshot"], profile["events"]) == (False, ["mbm_*", "!mbm_local_bytes"])


def test_memory_settings_are_shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "swap: deny, memory_high: 64M, allow_memory_annotations: {memory.high: 1G}"
    (directory / "20.yaml").write_text(f"profiles: {{tight: {{{settings}}}}}\n")
    assert call(directory, "show", "tight") == 0
    shown = capsys.readouterr().out
    for line in ("swap: deny", "memory.high: 67108864", "annotations: memory.high up to 1073741824"):
        assert line in shown
    assert call(directory, "show", "tight", "--json") == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    assert (profile["swap"], profile["memoryHigh"]) == ("deny", "67108864")
    assert profile["allowMemoryAnnotations"] == {"memory.high": "1073741824"}


def test_companion_is_shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "command: [/bin/helper, a b], template: $KEY, restart: on-failure, cpu_quota: 7%"
    (directory / "20.yaml").write_text(f"profiles: {{helped: {{companion: {{{settings}}}}}}}\n")
    assert call(directory, "show", "helped") == 0
    shown = capsys.readouterr().out
    for line in ("/bin/helper 'a b'", "template: in this file (yaml), as config.yaml", "restart: on-failure"):
        assert line in shown
    assert "memory_max: 268435456, cpu_quota: 7%, tasks_max: 64" in shown
    assert call(directory, "show", "helped", "--json") == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    assert profile["companion"] == {
        "command": ["/bin/helper", "a b"],
        "template": "$KEY",
        "templateFormat": "yaml",
        "restart": "on-failure",
        "memoryMax": "268435456",
        "cpuQuota": "7%",
        "tasksMax": 64,
    }


def test_check_refuses_a_companion_with_a_wrong_template(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # In another directory than the profiles: there, any user may own the file.
    new = directory / "new" / "30.yaml"
    new.parent.mkdir()
    new.write_text("profiles: {helped: {companion: {command: [/bin/helper], template_file: /no/such/file}}}\n")
    assert call(directory, "check", str(new)) == 1
    assert "profile helped: cannot read the template /no/such/file: No such file" in capsys.readouterr().err


def test_show_names_the_existing_profiles(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(directory, "show", "other") == 1
    assert "there is no profile 'other'. Existing profiles: batch, quiet, root" in capsys.readouterr().err


def test_check_reports_the_mistake_with_its_line(without_class: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = without_class / "20.yaml"
    new.write_text("profiles: {new: }\nrules:\n  - {profile: nwe, image: x}\n")
    assert call(without_class, "check", str(new)) == 1
    assert f"{new}:3: there is no profile 'nwe'. Did you mean new?" in capsys.readouterr().err
    new.write_text("profiles: {new: }\nrules:\n  - {profile: quiet, image: x}\n")
    assert call(without_class, "check", str(new)) == 0
    assert capsys.readouterr().out == f"{new}: correct. Together with the other files: 4 profiles, 3 rules\n"


def test_check_names_a_class_that_does_not_exist(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top, new = directory / "resctrl", directory / "20.yaml"
    top.mkdir()
    new.write_text(
        "profiles:\n  nightly:\n    priority: 1\n    class: bacth\n  other: {class: zzz}\n  top: {class: /}\n"
    )
    with Simulation(str(top)):
        (top / "batch").mkdir()
        (top / "gold").mkdir()
        assert call(directory, "check", str(new), "--root", str(top)) == 8
        shown = capsys.readouterr()
        counts = "Together with the other files: 6 profiles, 2 rules"
        assert shown.out == f"{new}: accepted, but a class does not exist. {counts}\n"
        effect = "until it exists, containers and units with this profile stay in their class"
        assert shown.err.splitlines() == [
            f"resctrlctl: {new}:4: profile nightly names the class bacth, which does not exist: {effect}. "
            "Did you mean batch?",
            f"resctrlctl: {new}:5: profile other names the class zzz, which does not exist: {effect}. "
            "Existing classes: /, batch, gold",
        ]
        # That of another file is a note.
        right = directory / "30.yaml"
        right.write_text("profiles:\n  right: {class: gold}\n")
        assert call(directory, "check", str(right), "--root", str(top)) == 0
        shown_of_other = capsys.readouterr()
        assert shown_of_other.out.startswith(f"{right}: correct. ")
        assert shown_of_other.err == shown.err
        right.unlink()
        for name in ("bacth", "zzz"):
            (top / name).mkdir()
        assert call(directory, "check", str(new), "--root", str(top)) == 0
        assert capsys.readouterr() == (f"{new}: correct. {counts}\n", "")


def test_check_without_resctrl_states_that_classes_are_unknown(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket, file = str(directory / "no-socket"), str(directory / "10-shop.yaml")
    assert call(directory, "check", file, "--socket", socket) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{file}: correct. ")
    assert shown.err.startswith("resctrlctl: cannot check whether the classes exist: cannot ask where resctrl is")
    assert call(directory, "check", file, "--root", str(directory)) == 3
    assert capsys.readouterr().err.startswith(f"resctrlctl: cannot check the classes: {directory}: ")


def test_root_is_for_check_only(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(directory, "list", "--root", "/x") == 2
    assert "argument --root: not allowed with list" in capsys.readouterr().err


def test_check_names_the_rules_that_select_no_unit(without_class: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = without_class / "20.yaml"
    new.write_text(
        "rules:\n"
        "- {profile: quiet, unit: web.service}\n"
        "- {profile: quiet, unit: [a.timer, '!b.service', x, '[a.service', 'y*', 'z[12]', z.slice], owner: systemd}\n"
        "- {profile: quiet, cgroup: [system.slice/*, /system.slice/*, '*/x']}\n"
    )
    assert call(without_class, "check", str(new)) == 0
    notes = capsys.readouterr().err.splitlines()
    assert [note.partition(f"{new}:")[2] for note in notes] == [
        "2: the rule selects containers in that unit, not the unit itself. For the unit, add 'owner: systemd'",
        "3: 'a.timer' matches no service, scope or slice. Did you mean a.service?",
        "3: '!b.service' matches no unit: a rule cannot exclude units. Put a rule for these before it",
        "3: 'x' matches no service, scope or slice. Did you mean x.service?",
        "3: '[a.service' matches no unit: a bracket has no end",
        "4: 'system.slice/*' matches no control group: the path of each begins with '/'",
    ]


@pytest.mark.parametrize(
    ("before", "rule", "is_hidden"),
    [
        ("unit: '*'", "unit: web.service", True),
        ("unit: [x, '*'], cgroup: '*'", "cgroup: /system.slice/*", True),
        ("owner: [oci, systemd]", "unit: 'user-1000:*'", True),
        ("unit: '*'", "unit: 'user-1000:*'", False),
        ("unit: '*'", "user: 0", False),
        ("unit: '*'", "cgroup: /user.slice/*", False),
        ("unit: '*.service'", "unit: web.service", False),
        ("unit: '*', user: 0", "unit: web.service", False),
        ("unit: '*', owner: oci", "unit: web.service", False),
        ("unit: '*', owner: [oci, systemd], namespace: '*'", "unit: web.service", False),
    ],
)
def test_check_names_a_rule_for_units_behind_one_that_selects_all(
    without_class: Path, capsys: pytest.CaptureFixture[str], before: str, rule: str, is_hidden: bool
) -> None:
    new = without_class / "20.yaml"
    owner = "" if "owner" in before else ", owner: systemd"
    rules = f"- {{profile: quiet, {before}{owner}}}\n- {{profile: quiet, {rule}, owner: systemd}}\n"
    new.write_text(f"rules:\n{rules}")
    assert call(without_class, "check", str(new)) == 0
    note = f"{new}:3: the rule never matches: the rule at {new}:2 selects these units. Put it first"
    assert (note in capsys.readouterr().err) == is_hidden


def test_file_that_does_not_exist_is_reported_before_its_name(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(directory, "check", "/nonexistent") == 1
    assert capsys.readouterr().err == "resctrlctl: /nonexistent: the file does not exist. Check its path\n"
    assert call(directory, "check", str(directory)) == 1
    assert capsys.readouterr().err == f"resctrlctl: {directory}: this is a directory. Name a file in it\n"


def test_wrong_file_is_one_line_on_standard_error(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "10-shop.yaml").write_text("profils: {}")
    assert call(directory, "list") == 1
    error = capsys.readouterr().err
    assert error.endswith("unknown key 'profils'. Did you mean profiles?\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [["list", "batch"], ["show"], ["check"], ["shwo", "batch"], []])
def test_wrong_command_line_is_refused(words: list[str], directory: Path) -> None:
    assert call(directory, *words) == 2


def test_no_profiles_are_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path, "list") == 0
    assert capsys.readouterr().out == f"0 profiles in {tmp_path}.\n"


def test_directory_that_does_not_exist_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert call(missing, "list") == 1
    message = f"{missing}: the directory of the profiles does not exist. Create it, or leave out --profiles-dir"
    assert capsys.readouterr().err == f"resctrlctl: {message}\n"
