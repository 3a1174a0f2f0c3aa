# SPDX-License-Identifier: Apache-2.0
"""The configuration file: accepted and refused values, lines in errors, and agreement of all texts about it."""

from __future__ import annotations

import grp
import os
import re
import string
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.api.varlink import metrics
from resctrlmond.configuration import config
from resctrlmond.configuration.config import Config, load, parse, parse_time_span
from resctrlmond.configuration.config_file import MAX_BYTES, ConfigError, has_settings
from resctrlmond.daemon.startup import group_settings
from resctrlmond.workloads.model.settings import Settings

ROOT = Path(__file__).parents[2]
FILE = "/etc/test.yaml"


def parsed(text: str) -> Config:
    """Return the configuration in a text."""
    return parse(text.encode(), FILE)


def refused(text: str | bytes) -> str:
    """Return the error for a text."""
    with pytest.raises(ConfigError) as caught:
        parse(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"), FILE)
    assert caught.value.path == FILE
    assert caught.value.remedy
    return str(caught.value)


def test_defaults() -> None:
    assert msgspec.structs.asdict(parsed("")) == {
        "resctrl": "/sys/fs/resctrl",
        "runtime_dir": "/run/resctrlmond",
        "groups_dir": "/run/resctrlmond/groups",
        "groups_mode": "0755",
        "varlink_socket": "/run/resctrlmond/org.resctrlmon.Manager",
        "group": "resctrlmon",
        "read_group": "resctrlmon-read",
        "group_prefix": "",
        "snapshot_ttl": 300.0,
        "linger": 0.0,
        "pod_linger": 300.0,
        "checkpoint_interval": 60.0,
        "hook_queue_timeout": 30.0,
        "expose_interval": 10.0,
        "log_level": "info",
        "dbus": True,
        "units": (),
        "reserve": 16,
        "overflow": 4,
    }


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "\ufeff# with a byte order mark\n", "{}"])
def test_file_without_keys_has_the_defaults(text: str) -> None:
    assert parsed(text) == Config()


def test_installed_file_sets_nothing() -> None:
    assert not has_settings((ROOT / "systemd" / "resctrlmond.yaml").read_bytes())


@pytest.mark.parametrize(
    "text", ["dbus: no", "---", "# a\n{}", "# \u00e9", "# \x07", "#\r\nlinger: 5s", "\t# a", "#" * (MAX_BYTES + 1)]
)
def test_text_that_may_set_something_or_be_wrong_is_parsed(text: str) -> None:
    assert has_settings(text.encode())


@given(st.text(alphabet="# \n\r\ta:-", max_size=40))
def test_text_that_sets_nothing_is_parsed_to_the_defaults(text: str) -> None:
    if not has_settings(text.encode()):
        assert parsed(text) == Config()


def test_paths_follow_the_runtime_directory_unless_set() -> None:
    assert parsed("runtime_dir: /run/x").groups_dir == "/run/x/groups"
    assert parsed("runtime_dir: /run/x").varlink_socket == "/run/x/org.resctrlmon.Manager"
    assert parsed("runtime_dir: /run/x\ngroups_dir: /run/nri-resctrl-mon").groups_dir == "/run/nri-resctrl-mon"


def test_file_of_the_command_line_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("linger: 1h 30min\ndbus: no\ngroup: 1000\n")
    assert load(str(file)) == Config(linger=5400.0, dbus=False, group=1000)


def test_missing_file_of_the_command_line_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml: cannot read the configuration: .*ENOENT.*--config"):
        load(str(tmp_path / "x.yaml"))
    with pytest.raises(ConfigError, match="EISDIR"):
        load(str(tmp_path))


def test_drop_ins_set_keys_again_and_add_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = tmp_path / "resctrlmond.yaml", tmp_path / "resctrlmond.d"
    monkeypatch.setattr(config, "DEFAULT_PATH", str(file))
    monkeypatch.setattr(config, "DROP_INS", str(folder))
    file.write_text("linger: 1s\nunits: [a.service]\nlog_level: debug")
    folder.mkdir()
    (folder / "20.yaml").write_text("linger: 3s\nunits:\n- '!b*'\n")
    (folder / "10.yaml").write_text("linger: 2s\nunits: ['*.scope']\ndbus: false")
    (folder / ".hidden.yaml").write_text("lingr: 1")
    (folder / "30.yaml~").write_text("lingr: 1")
    expected = Config(linger=3.0, units=("a.service", "*.scope", "!b*"), log_level="debug", dbus=False)
    assert load() == expected
    file.unlink()
    assert load() == Config(linger=3.0, units=("*.scope", "!b*"), dbus=False)
    assert load(str(folder / "10.yaml")) == Config(linger=2.0, units=("*.scope",), dbus=False), "without drop-ins"
    (folder / "10.yaml").write_text("\nrunite_dir: /run/x")
    with pytest.raises(ConfigError, match=r"10\.yaml:2: unknown key 'runite_dir'. Did you mean runtime_dir\?"):
        load()
    (folder / "10.yaml").write_text("runtime_dir: /sys/fs/resctrl/x")
    with pytest.raises(ConfigError, match=r"10\.yaml:1: runtime_dir is in resctrl"):
        load()
    (folder / "10.yaml").unlink()
    (folder / "10.yaml").mkdir()
    with pytest.raises(ConfigError, match="EISDIR"):
        load()


def test_default_file_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "resctrlmond.yaml"
    monkeypatch.setattr(config, "DEFAULT_PATH", str(file))
    assert load() == Config()
    file.write_text("log_level: debug")
    assert load().log_level == "debug"
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="EISDIR"):
        load()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n# c\nlingr: 5s\n", r"^/etc/test.yaml:3: unknown key 'lingr'. Did you mean linger\?$"),
        (
            "xyzzy: 1",
            "1: unknown key 'xyzzy'. Known keys are checkpoint_interval, dbus, expose_interval, group, group_prefix, "
            "groups_dir",
        ),
        ("Linger: 1", r"unknown key 'Linger'. Did you mean linger\?"),
        ("1: 2", "unknown key '1'"),
        ("k" * 500 + ": 2", r"unknown key 'k{61}\.\.\.'\. Known"),
        ("k" * 5000 + ": 2", "mapping values are not allowed here"),
        ("units: '*.service'", r"1: units is not a list. Expected a list of globs, as in"),
        ("units:", "1: units has no value. Expected a list of globs"),
        ("units: []\nlinger: [1s]", "2: a list or a mapping where a plain value is expected. Expected a time span"),
        ("units: {a: b}", "1: a list or a mapping where a plain value is expected"),
        ("units: [[a]]", "1: a list or a mapping where a plain value is expected"),
        ("linger: 1s\nunits:\n- a.service\n- nginx", r"4: units: 'nginx' is not a glob .* mean nginx.service\?"),
        ("units: ['!cups.socket']", r"Did you mean !cups.service\?"),
        ("units: [a.servce]", r"Did you mean a.service\?"),
        ("units: ['!a*.slce']", r"Did you mean !a\*.slice\?"),
        ("units: [org.example.Server]", r"Did you mean org.example.Server.service\?"),
        (
            "units: [mount]",
            r"'mount' is not a glob .* slices. Units of other types are not watched",
        ),
        ("units: [home.mount]", r"'home.mount' is not a glob .* Units of other types are not watched"),
        ("units: [init.scope]", "1: units: 'init.scope' is never watched"),
        ("units: [a b]", r"'a b' is not the name or glob of a unit.*See resctrlmond.yaml\(5\)"),
        ("linger: 1s\ndbus: true\nlinger: 2s", "3: 'linger' is set a second time. Line 1 sets it already"),
        ('linger: 1s\n"linger": 1s', "2: 'linger' is set a second time"),
        ("dbus: maybe", "1: dbus cannot be 'maybe'. Expected true or false"),
        ("dbus: 1", "dbus cannot be '1'"),
        ("hook_queue_timeout: 2min", "hook_queue_timeout cannot be '2min'. Expected a time span of at most a minute"),
        (
            "expose_interval: 500ms",
            "expose_interval cannot be '500ms'. Expected a time span from a second to an hour",
        ),
        ("expose_interval: 2h", "expose_interval cannot be '2h'"),
        ("reserve: -1", "reserve cannot be '-1'. Expected a number of RMIDs from 0 to 65536"),
        ("reserve: many", "reserve cannot be 'many'. Expected a number of RMIDs"),
        ("hook_queue_timeout: -1", "hook_queue_timeout cannot be '-1'"),
        ("dbus:", "1: dbus has no value. Expected true or false"),
        ("dbus: null", "dbus cannot be 'null'"),
        ("log_level: trace", "log_level cannot be 'trace'. Expected one of debug, info, notice, warning, error"),
        ("log_level: 7", "log_level cannot be '7'"),
        ("runtime_dir: run/x", "runtime_dir cannot be 'run/x'. Expected an absolute path"),
        ("runtime_dir: /run/../x", "absolute path"),
        ("runtime_dir: /run/./x", "absolute path"),
        ("runtime_dir: /run/..", "absolute path"),
        ("runtime_dir: /run//x", "absolute path"),
        ("runtime_dir: /run/x/", "without a slash at its end"),
        ("runtime_dir: /", "absolute path"),
        ('runtime_dir: ""', "runtime_dir cannot be ''"),
        ('runtime_dir: "/run/x\\n"', "absolute path"),
        ('runtime_dir: "/run/\\0"', "absolute path"),
        ("runtime_dir: /" + "x" * 1024, "absolute path"),
        ("linger: 1s\nruntime_dir: /sys/fs/resctrl/x", "2: runtime_dir is in resctrl"),
        ("dbus: true\nresctrl: /run", "2: runtime_dir is in resctrl"),
        ("groups_dir: /sys/fs/resctrl", "groups_dir is in resctrl"),
        ("groups_dir: /run/resctrlmond", "groups_dir is a folder for other files of the daemon"),
        ("groups_dir: /run/resctrlmond/records", "groups_dir is a folder for other files of the daemon"),
        ("groups_dir: /run/resctrlmond/completed/x", "groups_dir is a folder for other files of the daemon"),
        ("varlink_socket: /run/" + "x" * 103, "varlink_socket has more than 107 bytes"),
        ("varlink_socket: /run/" + "ü" * 52, "varlink_socket has more than 107 bytes"),
        ("dbus: true\nruntime_dir: /run/" + "x" * 90, "2: varlink_socket has more than 107 bytes"),
        ("group: 0", "group cannot be '0'. Expected the name or the number of a Unix group other than 0"),
        ("group: -1", "group cannot be"),
        ("group: 4294967295", "group cannot be"),
        ("group: no", "group cannot be 'no'"),
        ('group: "a b"', "group cannot be"),
        ("group_prefix: .x", "group_prefix cannot be '.x'. Expected at most 32 letters"),
        ("group_prefix: -x", "group_prefix cannot be"),
        ("group_prefix: a/b", "group_prefix cannot be"),
        ("group_prefix: " + "x" * 33, "group_prefix cannot be"),
        ("group_prefix: 12", "group_prefix cannot be '12'"),
        ("linger: [1, 2]", "1: a list or a mapping where a plain value is expected"),
        ("linger:\n  x: 1", "2: a list or a mapping"),
        ("- linger", "1: this is not a key with a value"),
        ("linger", "1: this is not a key with a value"),
        ("null", "1: this is not a key with a value"),
        ("? [a]\n: 1", "a list or a mapping"),
        ("<<: {linger: 1}", "a list or a mapping"),
        ("linger: &a 1s", "an anchor or alias"),
        ("&a linger: 1s", "an anchor or alias"),
        ("&a {linger: 1s}", "an anchor or alias"),
        ("linger: &a 1s\npod_linger: *a", "1: an anchor or alias"),
        ("linger: *a", "an anchor or alias"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]", "an anchor or alias"),
        ("linger: !!int ''", "a tag is not allowed"),
        ("units: [!getty@*.service]", '1: a tag is not allowed. Quote a text that begins with "!"'),
        ("units:\n- ! x", '2: a tag is not allowed. Quote a text that begins with "!"'),
        ("units: [!!]", '1: a tag is not allowed. Quote a text that begins with "!"'),
        ("linger: !!python/object/apply:os.system [id]", "a tag"),
        ("linger: 1s\n---\nlinger: 2s\n", "2: expected a single document in the stream"),
        ("linger: 'x", "found unexpected end of stream"),
        ("linger: 1s\n\tdbus: true", "2: "),
        ('linger: 1s\nstate_dir: "\\UFFFFFFFF"', r"2: not valid YAML"),
        ("%YAML " + "9" * 5000 + ".1\n---\n", r"1: not valid YAML"),
        ("linger: 1s\nx\x01: 2", r"2: the character '\\x01' is not allowed in YAML"),
        ("[" * 60000, "a list or a mapping|this is not a key with a value"),
        ("{a: " * 15000, "a list or a mapping"),
        ("linger: 2026-99-99", "linger cannot be '2026-99-99'"),
        ("linger: 1:" + ":".join(["59"] * 400) + ".5", "linger cannot be '1:59"),
        ("linger: " + "9" * 5000, "linger cannot be '999"),
        ("linger: =", "linger cannot be '='"),
        ("linger: <<", "linger cannot be '<<'"),
        ("#" * 65537, "larger than 65536 bytes"),
        (b"linger: 1s\n# \xff\n", "2: the text is not UTF-8"),
        ("linger: 1s".encode("utf-16"), "1: the text is not UTF-8"),
        ("# \ud800", "not UTF-8"),
    ],
)
def test_errors_are_reported_with_file_line_and_remedy(text: str | bytes, expected: str) -> None:
    assert re.search(expected, refused(text)), refused(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5min", 300.0),
        ("1h 30min", 5400.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        ("90", 90.0),
        (" 90 ", 90.0),
        ("1.5 h", 5400.0),
        ("0.1s", 0.1),
        ("300ms20s 5day", 432020.3),
        ("2 hours", 7200.0),
        ("1us", 1e-6),
        ("1w", 604800.0),
        ("0", 0.0),
    ],
)
def test_time_spans_of_systemd(text: str, seconds: float) -> None:
    assert parse_time_span(text) == seconds
    assert parsed(f'linger: "{text}"').linger == seconds
    assert parsed(f"linger: {text}").linger == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-1s",
        "5 foo",
        "s",
        "1h 30",
        "30 1h",
        "nan",
        "inf",
        "infinity",
        "1e3",
        "1.s",
        ".5s",
        "1S",
        "1s,",
        "٣s",
    ],
)
def test_text_that_is_not_a_time_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time_span(text)
    assert "linger" in refused(f'linger: "{text}"')


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf", "-1", "-0.5", "true", "null", "1e400", "367d", "31622401"])
def test_a_time_is_a_finite_number_of_at_most_a_year(text: str) -> None:
    assert "Expected a time span" in refused(f"pod_linger: {text}")


def test_paths_are_compared_by_component() -> None:
    """/sys/fs/resctrl-x is not inside /sys/fs/resctrl, nor is /run/resctrlmond/records-old a folder of the daemon."""
    apart = "groups_dir: /sys/fs/resctrl-x/groups\nruntime_dir: /sys/fs/resctrl-x\n"
    assert parsed(apart).groups_dir == "/sys/fs/resctrl-x/groups"
    assert parsed("groups_dir: /run/resctrlmond/records-old").groups_dir == "/run/resctrlmond/records-old"
    for folder in ("records", "records/x", "completed"):
        assert "a folder for other files of the daemon" in refused(f"groups_dir: /run/resctrlmond/{folder}")
    assert "is in resctrl" in refused("groups_dir: /sys/fs/resctrl")
    assert "is in resctrl" in refused("groups_dir: /sys/fs/resctrl/x")


def test_group_is_a_number_or_a_name() -> None:
    assert parsed("group: 4242").group_id() == 4242
    known = next(entry for entry in grp.getgrall() if entry.gr_gid != 0)
    assert parsed(f"group: {known.gr_name}").group_id() == known.gr_gid
    with pytest.raises(ConfigError, match=r"no Unix group 'no-such-group'.*systemd-sysusers"):
        Config(group="no-such-group").group_id()


def test_group_of_root_is_refused() -> None:
    with pytest.raises(ConfigError, match="number 0"):
        Config(group=grp.getgrgid(0).gr_name).group_id()
    with pytest.raises(ConfigError, match="number 0"):
        Config(read_group=grp.getgrgid(0).gr_name).reader_ids(4242)


def test_members_of_both_groups_may_read() -> None:
    assert parsed("read_group: 4243").reader_ids(4242) == {4242, 4243}
    with pytest.raises(ConfigError, match=r"no Unix group 'no-such-group'.*the key 'read_group'"):
        Config(read_group="no-such-group").reader_ids(4242)


def test_default_read_group_need_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(grp, "getgrnam", missing)
    assert Config().reader_ids(4242) == {4242}


def test_flow_mapping_is_accepted_and_an_empty_key_is_refused() -> None:
    assert parsed("{linger: 2s, dbus: off}") == Config(linger=2.0, dbus=False)
    assert "unknown key ''" in refused("? \n: 1")


@given(st.text(max_size=200) | st.binary(max_size=200))
def test_arbitrary_text_raises_only_config_errors(text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    try:
        assert isinstance(parse(data, FILE), Config)
    except ConfigError as error:
        assert str(error).startswith(FILE)


# Tokens of YAML, so that random text is not refused at its first character.
_FRAGMENTS = st.sampled_from(
    [
        *Config.__struct_fields__,
        ": ",
        "\n",
        "\t",
        "  ",
        ":",
        "-",
        "?",
        "[",
        "]",
        "{",
        "}",
        "&a",
        "*a",
        "!!int",
        "'",
        '"',
        "|",
        ">",
        "---",
        "...",
        "%YAML",
        "#",
        "0x_",
        "0b",
        "1_",
        "1:2",
        "2001-1-1",
        ".inf",
        "~",
        "<<",
        "=",
        "\\",
    ]
)


@given(st.lists(_FRAGMENTS | st.text(max_size=3), max_size=30))
def test_yaml_like_text_raises_only_config_errors(parts: list[str]) -> None:
    try:
        parse("".join(parts).encode("utf-8", "surrogatepass"), FILE)
    except ConfigError as error:
        assert str(error).startswith(FILE)


@given(st.sampled_from(sorted(Config.__struct_fields__)), _FRAGMENTS | st.text(max_size=40))
def test_any_value_of_any_key_raises_only_config_errors(key: str, value: str) -> None:
    try:
        parse(f"{key}: {value}\n".encode("utf-8", "surrogatepass"), FILE)
    except ConfigError as error:
        assert str(error).startswith(FILE)


_SPANS = st.integers(0, 366 * 86400 * 10**6).map(lambda number: (f"{number}us", number / 10**6))
_NAMES = st.text("abcxyz09ü_.-", min_size=3, max_size=10)
_PATHS = st.lists(_NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4).map(
    lambda names: "/run/" + "/".join(names)
)
_PREFIXES = st.text(string.ascii_letters + string.digits + "@:_\\+,=~", max_size=32)
_VALUES = {
    "resctrl": _PATHS.map(lambda path: "/sys" + path),
    "runtime_dir": _PATHS,
    "groups_dir": _PATHS.map(lambda path: "/srv" + path),
    "groups_mode": st.sampled_from(["0755", "0750", "0700"]),
    "varlink_socket": _PATHS,
    "group": st.integers(1, 2**32 - 2) | st.text(string.ascii_letters + "_", min_size=1, max_size=31),
    "read_group": st.integers(1, 2**32 - 2),
    "group_prefix": _PREFIXES,
    "snapshot_ttl": _SPANS,
    "linger": _SPANS,
    "pod_linger": st.floats(0, 366 * 86400),
    "checkpoint_interval": _SPANS,
    "hook_queue_timeout": st.integers(0, 60_000).map(lambda number: (f"{number}ms", number / 1000)),
    "expose_interval": st.integers(1, 3600).map(lambda number: (f"{number}s", float(number))),
    "log_level": st.sampled_from(["debug", "info", "notice", "warning", "error"]),
    "dbus": st.booleans(),
    "reserve": st.integers(0, 2**16),
    "overflow": st.integers(0, 2**16),
    "units": st.lists(st.sampled_from(["*.service", "!getty@*", "user-*:*.scope", r"a\x2db@.slice"]), max_size=3),
}


@given(st.fixed_dictionaries({}, optional=_VALUES))
def test_each_valid_value_round_trips(values: dict[str, object]) -> None:
    written = {key: value[0] if isinstance(value, tuple) else value for key, value in values.items()}
    expected = {key: value[1] if isinstance(value, tuple) else value for key, value in values.items()}
    assert parsed(yaml.safe_dump(written, allow_unicode=True)) == msgspec.convert(expected, Config)


def test_every_key_is_explained_in_docstring_man_page_and_sample() -> None:
    keys = set(Config.__struct_fields__)
    assert set(_VALUES) == keys
    assert set(re.findall(r"^ *``(\w+)``:", Config.__doc__ or "", re.M)) == keys
    page = (ROOT / "man/resctrlmond.yaml.5.scd").read_text()
    assert set(re.findall(r"^\*(\w+)\*: _", page, re.M)) == keys
    sample = (ROOT / "systemd/resctrlmond.yaml").read_text()
    assert set(re.findall(r"^#(\w+): ", sample, re.M)) == keys


def test_man_page_and_sample_have_the_defaults() -> None:
    sample = (ROOT / "systemd/resctrlmond.yaml").read_text()
    assert parsed(sample) == Config()
    assert parsed(re.sub(r"^#(\w+: )", r"\1", sample, flags=re.M)) == Config()
    page = (ROOT / "man/resctrlmond.yaml.5.scd").read_text()
    described = "\n".join(f"{key}: {value}" for key, value in re.findall(r"^\*(\w+)\*: _(.*)_$", page, re.M))
    assert parsed(described) == Config()


def test_units_and_bus_policy_have_the_same_defaults() -> None:
    texts = {file.name: file.read_text() for file in (ROOT / "systemd").iterdir()}
    defaults = Config()
    service = texts["resctrlmond.service"]
    assert f"/run/{re.findall(r'^RuntimeDirectory=(.*)$', service, re.M)[0]}" == defaults.runtime_dir
    assert re.findall(r"^Group=(.*)$", service, re.M) == [defaults.group]
    socket = texts["resctrlmond.socket"]
    assert re.findall(r"^ListenStream=(.*)$", socket, re.M) == [defaults.varlink_socket]
    assert re.findall(r"^SocketGroup=(.*)$", socket, re.M) == [defaults.group]
    report = texts["resctrlmond-report.socket"]
    assert re.findall(r"^ListenStream=(.*)$", report, re.M) == [f"/run/systemd/report/{metrics.SOURCE}"]
    assert re.findall(r"^SocketGroup=(.*)$", report, re.M) == [defaults.read_group]
    assert re.findall(r"^Where=(.*)$", texts["sys-fs-resctrl.mount"], re.M) == [defaults.resctrl]
    readers = [defaults.group, defaults.read_group]
    assert re.findall(r"^g ([\w-]+) ", texts["resctrlmond.sysusers.conf"], re.M) == readers
    policy = ElementTree.fromstring(texts["org.resctrlmon1.dbus.conf"])
    assert [rule.get("group") for rule in policy.iter("policy") if rule.get("group")] == readers


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("lingr: 1")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError):
        load(str(file))
    assert os.listdir("/proc/self/fd") == before


def test_settings_of_groups_have_the_values_of_the_configuration() -> None:
    config = Config(
        group_prefix="rm-",
        snapshot_ttl=1.0,
        linger=2.0,
        pod_linger=3.0,
        checkpoint_interval=4.0,
        hook_queue_timeout=5.0,
        expose_interval=7.0,
        reserve=6,
        overflow=7,
    )
    assert group_settings(config) == Settings("rm-", 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 6, 7)
    assert group_settings(Config()) == Settings()
