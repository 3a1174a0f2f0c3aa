# SPDX-License-Identifier: Apache-2.0
"""The files of profiles: accepted and refused values, lines in errors, and which files are read."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.configuration.profile_files import check, load
from resctrlmond.configuration.profile_syntax import COMPANION_KEYS, KEYS, PROFILE_KEYS, RULE_KEYS, parse
from resctrlmond.workloads.profiles.companion_settings import VARIABLES, Companion, Format, Restart
from resctrlmond.workloads.profiles.memory_settings import UNLIMITED, MemorySettings, Swap
from resctrlmond.workloads.profiles.profile import Profile, Profiles, Watch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "man" / "resctrlmond-profiles.5.scd").read_text(encoding="utf-8")
FILE = "/etc/10-test.yaml"
EVERYTHING = """\
profiles:
  plain:
  batch:
    watch: container
    class: batch
    snapshot_ttl: 1h
    linger: 1h 30min
    priority: -5
    snapshot: true
    events: ["mbm_*", "!mbm_local_bytes"]
  root: {class: /, watch: none}
  brief: {snapshot: false, events: core_energy, expose: true}
  tight: {swap: deny, memory_high: 2G, allow_memory_annotations: {memory.swap.max: max, memory.high: 1M}}
  helped:
    companion:
      command: [/bin/helper, -c, $COMPANION_DIR/config.json, 5]
      template: '{"path": "$CGROUP2_ABS_PATH"}'
      template_format: json
      restart: on-failure
      memory_max: 1G
      cpu_quota: 150%
      tasks_max: 8
  read: {companion: {command: [/bin/helper], template_file: /etc/helper}}
rules:
  - profile: batch
    owner: [nri, oci]
    namespace: [shop, kube-*]
    labels: {app: web, version: 1.10}
    image: registry.example/*
    container: app
    unit: "*.scope"
    cgroup: /kubepods*
    user: [root, 1000]
  - {profile: root, labels: "app in (web, api), !canary"}
  - {profile: root, owner: systemd, unit: "*.scope"}
default_profile: plain
default_unit_profile: batch
"""


def parsed(text: str) -> Profiles:
    """Return the profiles in a text."""
    return parse(text.encode(), FILE)


def test_every_key_is_read() -> None:
    found = parsed(EVERYTHING)
    assert found.by_name == {
        "plain": Profile("plain", origin=f"{FILE}:2"),
        "batch": Profile(
            "batch",
            Watch.CONTAINER,
            "batch",
            3600.0,
            5400.0,
            -5,
            f"{FILE}:3",
            events=("mbm_*", "!mbm_local_bytes"),
            class_origin=f"{FILE}:5",
        ),
        "root": Profile("root", Watch.NONE, "", origin=f"{FILE}:11", class_origin=f"{FILE}:11"),
        "brief": Profile("brief", origin=f"{FILE}:12", keeps_files=False, events=("core_energy",), exposes=True),
        "tight": Profile(
            "tight",
            origin=f"{FILE}:13",
            memory=MemorySettings(Swap.DENY, 2 << 30, {"memory.swap.max": UNLIMITED, "memory.high": 1 << 20}),
        ),
        "helped": Profile(
            "helped",
            origin=f"{FILE}:14",
            companion=Companion(
                ("/bin/helper", "-c", "$COMPANION_DIR/config.json", "5"),
                '{"path": "$CGROUP2_ABS_PATH"}',
                format=Format.JSON,
                restart=Restart.ON_FAILURE,
                memory_max=1 << 30,
                cpu_quota=150,
                tasks_max=8,
            ),
        ),
        "read": Profile(
            "read", origin=f"{FILE}:23", companion=Companion(("/bin/helper",), template_file="/etc/helper")
        ),
    }
    first, second, of_units = found.rules
    assert of_units.owners == {"systemd"}
    assert (found.unit_default, found.unit_default_origin) == ("batch", f"{FILE}:37")
    assert (first.profile, first.origin) == ("batch", f"{FILE}:25")
    assert first.owners == {"nri", "oci"}
    assert first.globs == {
        "namespace": ("shop", "kube-*"),
        "image": ("registry.example/*",),
        "container": ("app",),
        "unit": ("*.scope",),
        "cgroup": ("/kubepods*",),
    }
    assert first.users == {0, 1000}
    assert str(first).endswith("labels: app: web, version: 1.10; user: 0, 1000")
    assert [str(requirement) for requirement in second.labels] == ["app in (api, web)", "!canary"]
    assert (found.default, found.default_origin) == ("plain", f"{FILE}:36")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}", "profiles:\nrules:\n"])
def test_file_without_values_sets_nothing(text: str) -> None:
    assert parsed(text) == Profiles()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\nprofile: {}", r"^/etc/10-test.yaml:2: unknown key 'profile'. Did you mean profiles\?$"),
        ("profiles: {a: {wach: pod}}", r"1: unknown key 'wach'. Did you mean watch\?"),
        ("profiles: {a: {xyzzy: pod}}", "unknown key 'xyzzy'. Known keys are allow_memory_annotations, class"),
        ("profiles:\n  a:\n    watch: pods", r"3: watch cannot be 'pods'. Did you mean pod\?"),
        ("profiles: {a: {watch: xyzzy}}", "watch cannot be 'xyzzy'. Expected one of pod, container, none"),
        ("profiles: {a: {watch: [pod]}}", "watch is a list or a mapping"),
        ("profiles: {a: {class: }}", "class has no value"),
        ("profiles: {a: {class: a/b}}", "the class 'a/b' contains a character that is not allowed"),
        ("profiles: {a: {class: info}}", "'info' is not a class. Expected follow, the name of a class"),
        ("profiles: {a: {linger: 5}, a: }", "'a' is set a second time"),
        ("profiles: {a: {linger: long}}", "linger cannot be 'long'. Expected a time span of at most a year"),
        ("profiles: {a: {linger: 2000d}}", "linger cannot be '2000d'"),
        ("profiles: {a: {snapshot_ttl: -1}}", "snapshot_ttl cannot be '-1'"),
        ("profiles: {a: {priority: 1001}}", "priority cannot be '1001'. Expected a number from -1000 to 1000"),
        ("profiles: {a: {priority: 1.5}}", "priority cannot be '1.5'"),
        ("profiles: {a: {swap: allows}}", r"swap cannot be 'allows'. Did you mean allow\?"),
        ("profiles: {a: {expose: 1}}", "1: expose cannot be '1'. Expected true or false"),
        ("profiles: {a: {exposed: true}}", r"unknown key 'exposed'. Did you mean expose\?"),
        ("profiles:\n a:\n  watch: none\n  expose: true", "4: there is nothing to expose with 'watch: none'"),
        ("profiles: {a: {snapshot: on}}", "1: snapshot cannot be 'on'. Expected true or false"),
        ("profiles: {a: {snapshot: fals}}", r"1: snapshot cannot be 'fals'. Did you mean false\?"),
        ("profiles: {a: {snapshot: [true]}}", "1: snapshot is a list or a mapping"),
        ("profiles:\n a:\n  snapshot: false\n  snapshot_ttl: 1h", "4: snapshot_ttl has no effect with 'snapshot: f"),
        ("profiles: {a: {snapshots: true}}", r"unknown key 'snapshots'. Did you mean snapshot\?"),
        ("profiles: {a: {event: x}}", r"unknown key 'event'. Did you mean events\?"),
        ("profiles: {a: {events: }}", "events has no value"),
        ("profiles: {a: {events: [[a]]}}", "events is a list or a mapping"),
        ("profiles: {a: {events: mbm/total}}", "events: 'mbm/total' is not the name or glob of an event"),
        ('profiles:\n a:\n  events: ["!mbm_*"]', "3: events selects no event: it only excludes some. Add"),
        ("profiles: {a: {swap: 1}}", "swap cannot be '1'. Expected one of leave, allow, deny"),
        (
            "profiles: {a: {memory_high: 1Gi}}",
            "memory_high cannot be '1Gi'. Expected max, or bytes with K, M, G or T",
        ),
        ("profiles: {a: {memory_high: }}", "memory_high cannot be ''"),
        ("profiles: {a: {allow_memory_annotations: yes}}", "allow_memory_annotations is not a mapping"),
        (
            "profiles:\n a:\n  allow_memory_annotations:\n   memory.max: 1",
            "4: unknown key 'memory.max'. Did you mean memory.",
        ),
        ("profiles: {a: {allow_memory_annotations: {memory.high: x}}}", "memory.high cannot be 'x'. Expected max"),
        ("profiles: {a: {allow_memory_annotations: {memory.high: 1, memory.high: 2}}}", "is set a second time"),
        ("profiles: {a: {companion: /bin/true}}", "companion is not a mapping"),
        ("profiles: {a: {companion: {}}}", r"the companion has no command. Add 'command: \[/PROGRAM"),
        ("profiles: {a: {companion: {comand: x}}}", r"unknown key 'comand'. Did you mean command\?"),
        ("profiles: {a: {companion: {command: /bin/true}}}", "command is not a list"),
        ("profiles: {a: {companion: {command: []}}}", "command does not have 1 to 64 words"),
        ("profiles: {a: {companion: {command: [[a]]}}}", "an argument is a list or a mapping"),
        ("profiles: {a: {companion: {command: [true]}}}", "the program of command cannot be 'true'. Expected an abs"),
        ("profiles: {a: {companion: {command: [/$KEY]}}}", "the program of command cannot be '/.KEY'"),
        (
            "profiles:\n a:\n  companion:\n   command:\n   - /bin/true\n   - $KEI",
            "6: there is no variable .KEI: write",
        ),
        ("profiles: {a: {companion: {command: [/x], template: $KEI}}}", "there is no variable .KEI"),
        ("profiles: {a: {companion: {command: [/x], template: 'a: b: c'}}}", "the template is not valid YAML"),
        (
            "profiles: {a: {companion: {command: [/x], template: x, template_format: json}}}",
            "the template is not valid JSON",
        ),
        ("profiles: {a: {companion: {command: [/x], template_format: jsn}}}", r"Did you mean json\?"),
        ("profiles: {a: {companion: {command: [/x], template_format: json}}}", "template_format without a template"),
        ("profiles: {a: {companion: {command: [/x], template: a, template_file: /b}}}", "has both template and"),
        ("profiles: {a: {companion: {command: [/x], template_file: b}}}", "template_file cannot be 'b'"),
        ("profiles: {a: {companion: {command: [/x], restart: always}}}", "restart cannot be 'always'. Expected one"),
        ("profiles: {a: {companion: {command: [/x], memory_max: 1K}}}", "memory_max cannot be '1K'. Expected at lea"),
        ("profiles: {a: {companion: {command: [/x], cpu_quota: 50}}}", "cpu_quota cannot be '50'. Expected percent"),
        ("profiles: {a: {companion: {command: [/x], tasks_max: 0}}}", "tasks_max cannot be '0'. Expected a number"),
        (
            "profiles: {a: {watch: none, companion: {command: [/x]}}}",
            "a container that is not watched has no companion: .* Use 'watch: container'",
        ),
        ("profiles: {-a: }", "'-a' is not a valid name of a profile. Use at most 63"),
        ("profiles: {a/b: }", "'a/b' is not a valid name"),
        ('profiles: {"": }', "'' is not a valid name"),
        ("profiles: {" + "x" * 64 + ": }", "is not a valid name"),
        ("profiles: {[a]: }", "the name of a profile is a list or a mapping"),
        ("profiles: [a]", "profiles is not a mapping"),
        ("profiles: {a: 5}", "profile a is not a mapping"),
        ("rules: {a: b}", 'rules is not a list. Begin each entry with "- "'),
        ("rules: [a]", "a rule is not a mapping"),
        ("rules: [{image: x}]", "the rule names no profile. Add 'profile: NAME'"),
        ("rules: [{profile: a}]", "the rule has no condition. For all containers, use 'default_profile'"),
        (
            "profiles: {batch: }\nrules: [{profile: bath, image: x}]",
            "2: there is no profile 'bath'. Did you mean b",
        ),
        ("default_profile: xyzzy", "1: there is no profile 'xyzzy'. Define it below 'profiles'"),
        ("default_profile:", "default_profile has no value"),
        ("rules: [{profile: a, imag: x}]", r"unknown key 'imag'. Did you mean image\?"),
        ("rules: [{profile: a, image: }]", "image has no value"),
        ("rules: [{profile: a, image: []}]", "image has no value"),
        ('rules: [{profile: a, image: [a, ""]}]', "image has no value"),
        ("rules: [{profile: a, image: {a: b}}]", "image is a list or a mapping"),
        ("rules: [{profile: a, owner: cli}]", "owner cannot be 'cli'. Expected oci"),
        (
            "rules: [{profile: a, user: no.such.user}]",
            "user cannot be 'no.such.user'. Expected the name",
        ),
        ("rules: [{profile: a, labels: }]", "labels has no value"),
        ("rules: [{profile: a, labels: {}}]", "labels has no value"),
        ("rules: [{profile: a, labels: 'app in'}]", "labels: it ends too early"),
        ("rules: [{profile: a, labels: {a/b/c: d}}]", "labels: 'a/b/c' is not a valid label name"),
        (
            "profiles: {a: }\nrules:\n  - profile: a\n    owner: oci\n    labels: app",
            "5: the rule can never match: Podman and CRI-O do not pass labels to the OCI hook. Use an annotation",
        ),
        (
            "profiles: {a: }\nrules:\n  - profile: a\n    owner: systemd\n    image: x",
            "5: the rule can never match: units of systemd have no image. Use the conditions unit, cgroup and user",
        ),
        ("default_unit_profile: xyzzy", "1: there is no profile 'xyzzy'. Define it below 'profiles'"),
        ("default_unit_profile:", "default_unit_profile has no value"),
        ("profiles: &x {a: }", "an anchor or alias is not allowed"),
        (
            "profiles: {a: }\nrules:\n- {profile: a, unit: *x}",
            "3: an anchor or alias is not allowed. Quote a text that",
        ),
        ("profiles: {a: }\nrules:\n- profile: a\n  unit: *.service", "4: an anchor or alias is not allowed. Quote a"),
        ("profiles:\n\ta:", "2: a tab is not allowed here. Indent with spaces, not with tabs"),
        ("rules: [[[[[[[a]]]]]]]", "nested too deeply"),
        ("profiles: !!map {a: }", "a tag is not allowed"),
        ("a: b: c", "mapping values are not allowed here"),
    ],
)
def test_mistake_is_reported_with_its_line_and_remedy(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert caught.value.path == FILE
    assert caught.value.remedy


@given(st.binary(max_size=200) | st.text(alphabet="profiles:rules{}[]-, \n'\"&*!#\x00", max_size=60).map(str.encode))
def test_bytes_are_profiles_or_a_mistake(data: bytes) -> None:
    try:
        assert isinstance(parse(data, FILE), Profiles)
    except ConfigError as error:
        assert str(error).startswith(f"{FILE}:")


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    """The directories of the administrator and of the distribution."""
    found = tmp_path / "etc", tmp_path / "lib"
    for directory in found:
        directory.mkdir()
    return found


def names(directories: tuple[Path, Path]) -> set[str]:
    """Return the names of the profiles in the directories."""
    return set(load(tuple(map(str, directories))).by_name)


def test_missing_directories_have_no_profiles(tmp_path: Path) -> None:
    assert load((str(tmp_path / "none"), str(tmp_path / "neither"))) == Profiles()


def test_file_of_the_administrator_replaces_the_file_of_the_same_name(directories: tuple[Path, Path]) -> None:
    etc, lib = directories
    (lib / "10.yaml").write_text("profiles: {old: }")
    (lib / "20.yaml").write_text("profiles: {kept: }")
    assert names(directories) == {"old", "kept"}
    (etc / "10.yaml").write_text("profiles: {new: }")
    assert names(directories) == {"new", "kept"}


@pytest.mark.parametrize("masked_by", ["empty", "null"])
def test_empty_file_and_a_link_to_null_mask_a_file(directories: tuple[Path, Path], masked_by: str) -> None:
    etc, lib = directories
    (lib / "10.yaml").write_text("profiles: {old: }")
    if masked_by == "empty":
        (etc / "10.yaml").touch()
    else:
        (etc / "10.yaml").symlink_to("/dev/null")
    assert names(directories) == set()


def test_later_file_replaces_a_profile_and_the_default_and_adds_rules(directories: tuple[Path, Path]) -> None:
    etc, lib = directories
    (etc / "10.yaml").write_text(
        "profiles: {a: {watch: none, linger: 1s}, b: }\nrules: [{profile: b, image: x}]\ndefault_profile: b"
    )
    (lib / "20.yaml").write_text("profiles: {a: {watch: pod}}\nrules: [{profile: a, image: y}]\ndefault_profile: a")
    found = load((str(etc), str(lib)))
    assert found.find("a") == Profile("a", Watch.POD, origin=f"{lib}/20.yaml:1")
    assert [rule.profile for rule in found.rules] == ["b", "a"]
    assert found.default == "a"


def test_rule_may_name_a_profile_of_a_later_file(directories: tuple[Path, Path]) -> None:
    etc, lib = directories
    (etc / "10.yaml").write_text("rules: [{profile: late, image: x}]")
    with pytest.raises(ConfigError, match=r"/10\.yaml:1: there is no profile 'late'"):
        names(directories)
    (lib / "20.yaml").write_text("profiles: {late: }")
    assert names(directories) == {"late"}


def test_other_files_are_not_read(directories: tuple[Path, Path]) -> None:
    for name in ("10.yaml.dpkg-old", ".10.yaml", "README", "10.yml"):
        (directories[0] / name).write_text("wrong")
    assert names(directories) == set()


def test_file_that_cannot_be_read_is_an_error(directories: tuple[Path, Path]) -> None:
    file = directories[0] / "10.yaml"
    file.symlink_to("missing")
    with pytest.raises(ConfigError, match=r"10\.yaml: cannot read the profiles: .*ENOENT.*Check the file"):
        names(directories)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="cannot read the profiles"):
        names(directories)
    file.rmdir()
    os.mkfifo(file)  # a reader of a pipe would wait for a writer
    with pytest.raises(ConfigError, match="EINVAL"):
        names(directories)
    file.unlink()
    file.write_text("#" * 70000)
    with pytest.raises(ConfigError, match="larger than 65536 bytes"):
        names(directories)


def test_checked_file_is_added_to_the_others_and_replaces_its_namesake(directories: tuple[Path, Path]) -> None:
    etc, lib = directories
    (lib / "20.yaml").write_text("profiles: {there: }")
    (etc / "10.yaml").write_text("profiles: wrong")
    new = etc.parent / "10.yaml"
    new.write_text("rules: [{profile: there, image: x}]")
    assert len(check(str(new), (str(etc), str(lib))).rules) == 1
    new.write_text("rules: [{profile: their, image: x}]")
    with pytest.raises(ConfigError, match=r"10\.yaml:1: there is no profile 'their'. Did you mean there\?"):
        check(str(new), (str(etc), str(lib)))
    (etc.parent / "10.yml").touch()
    with pytest.raises(ConfigError, match=r"does not end in \.yaml"):
        check(str(etc.parent / "10.yml"), (str(etc), str(lib)))


def test_names_of_users_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwnam", lambda _name: pwd.struct_passwd(("x", "x", 77, 77, "", "/", "")))
    (rule,) = parsed("profiles: {a: }\nrules: [{profile: a, user: x}]").rules
    assert rule.users == {77}


def test_page_describes_every_key() -> None:
    headings = set(re.findall(r"^\*([a-z_]+)\*:", PAGE, re.MULTILINE))
    assert headings == {*PROFILE_KEYS, *COMPANION_KEYS, *RULE_KEYS, *KEYS}


def test_page_describes_every_variable() -> None:
    assert tuple(re.findall(r"^\*\$([A-Z0-9_]+)\*$", PAGE, re.MULTILINE)) == VARIABLES


def test_example_in_the_page_is_correct() -> None:
    examples = re.findall(r"^```\n(profiles:.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert examples
    for example in examples:
        assert parsed(example).by_name


@pytest.mark.parametrize("file", sorted((ROOT / "packaging" / "examples").glob("*.yaml")), ids=lambda file: file.name)
def test_example_file_is_correct(file: Path) -> None:
    found = parse(file.read_bytes(), str(file))
    assert found.by_name
    assert found.rules or file.name != "profiles.yaml"
