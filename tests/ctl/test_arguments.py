# SPDX-License-Identifier: Apache-2.0
"""The parser, its help, the manual page and the completion have the same verbs, options and exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from resctrlctl.arguments.command_line import parse
from resctrlctl.arguments.parser import MAX_PRIORITY, Parser
from resctrlctl.arguments.verbs import VERBS, build
from resctrlctl.base.defaults import SOCKET
from resctrlmond import __version__
from resctrlmond.api.errors import ERRORS
from resctrlmond.resctrl.counters import EVENTS
from resctrlmond.workloads.model import validation
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from tests.ctl.conftest import ROOT, Ctl
from tests.ctl.fake_manager import FakeManager

MAN = (ROOT / "man" / "resctrlctl.1.scd").read_text()
COMPLETION = ROOT / "resctrlctl" / "completions" / "resctrlctl.bash"


def verb_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb."""
    actions = build()._actions
    (verbs,) = (action for action in actions if isinstance(action, argparse._SubParsersAction))
    return dict(verbs.choices)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return all spellings of all options."""
    return {spelling for action in parser._actions for spelling in action.option_strings}


def described(section: str) -> set[str]:
    """Return the options that a section of the manual page describes: the bold words in its terms."""
    text = re.search(rf"^##? {re.escape(section)}\n(.*?)(?=^##? |\Z)", MAN, re.MULTILINE | re.DOTALL)
    assert text is not None, section
    terms = [line for line in text[1].splitlines() if line.startswith("*-")]
    return {option for term in terms for option in re.findall(r"\*(--?[a-zA-Z-]+)\*", term)}


def test_man_page_has_every_option_and_no_other() -> None:
    parsers = verb_parsers()
    assert described("OPTIONS") == options_of(build())
    own = {name: options_of(parser) - options_of(build()) for name, parser in parsers.items()}
    sections = re.findall(r"^## (Options of .*)$", MAN, re.MULTILINE)
    in_man: dict[str, set[str]] = {name: set() for name in parsers}
    for section in sections:
        for name in parsers:
            if re.search(rf"\b{name}\b", section):
                # An option in a section for several verbs may be for some of them only, in parentheses.
                in_man[name] |= {
                    option for option in described(section) if name in (restriction(option, section) or {name})
                }
    assert in_man == own


def restriction(option: str, section: str) -> set[str]:
    """Return the verbs that a section of the manual page lists in parentheses after an option."""
    lines = MAN.partition(f"## {section}\n")[2].splitlines()
    line = next(line for line in lines if line.startswith("*-") and f"*{option}*" in line)
    found = re.search(r"\((\*[a-z]+\*(?:, \*[a-z]+\*)*)\)$", line)
    return set(re.findall(r"[a-z]+", found[1])) if found else set()


def test_man_page_has_every_verb() -> None:
    verbs = re.search(r"^# VERBS\n(.*?)(?=^# )", MAN, re.MULTILINE | re.DOTALL)
    assert verbs is not None
    assert re.findall(r"^\*([a-z]+)\*", verbs[1], re.MULTILINE) == list(VERBS)
    synopsis = re.search(r"^# SYNOPSIS\n(.*?)(?=^# )", MAN, re.MULTILINE | re.DOTALL)
    assert synopsis is not None
    assert re.findall(r"\[options\] \*([a-z]+)\*", synopsis[1]) == list(VERBS)


def test_man_page_and_help_have_every_exit_status() -> None:
    section = re.search(r"^# EXIT STATUS\n(.*?)(?=^# )", MAN, re.MULTILINE | re.DOTALL)
    assert section is not None
    in_man = {int(number) for number in re.findall(r"^\*([0-9]+)\*$", section[1], re.MULTILINE)}
    assert in_man == {0, 1, 2, 3, 4, 5, 8, 9, 77, 125, 126, 127}
    assert {row.exit_code for row in ERRORS.values()} <= in_man
    in_help = {int(number) for number in re.findall(r"^  ([0-9]+)  +\w", build().epilog or "", re.MULTILINE)}
    assert in_help == in_man - {125, 126, 127}
    assert all(number in (build().epilog or "") for number in ("125", "126", "127", "128+N"))


def test_man_page_is_valid() -> None:
    page = subprocess.run(["scdoc"], input=MAN, capture_output=True, text=True, check=True)
    assert page.stdout.startswith('.\\"')


@pytest.mark.parametrize("verb", [[], *([name] for name in VERBS)], ids=lambda verb: " ".join(verb) or "none")
def test_help_of_each_verb(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*verb, "--help"])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"usage: resctrlctl{''.join(f' {name}' for name in verb)} ")
    if not verb:
        assert all(re.search(rf"^    {name} ", out, re.MULTILINE) for name in VERBS)
        assert "examples:\n  resctrlctl list" in out
    assert "None" not in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"resctrlctl {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["-q", "--json", "--socket", "/s", "show", "k"], ["show", "k", "-q", "--json", "--socket", "/s"]]
)
def test_common_options_are_accepted_before_and_after_the_verb(arguments: list[str]) -> None:
    args = parse(arguments)
    assert (args.quiet, args.json, args.socket, args.key) == (True, "auto", "/s", ["k"])


def test_json_without_a_mode_does_not_take_the_next_word() -> None:
    args = parse(["show", "--json", "short"])
    assert (args.json, args.key) == ("auto", ["short"])
    assert parse(["show", "--json=short", "k"]).json == "short"
    assert parse(["-jq", "list"]).json == "auto"
    assert parse(["list"]).json == "off"


@pytest.mark.parametrize("words", [[], ["-j"], ["--socket", "/s"], ["--socket=/s", "-q"], ["-lq", "--no-legend"]])
def test_list_is_the_default_verb(words: list[str]) -> None:
    assert parse(words).verb == "list"
    assert vars(parse(words)) | {"parser": None} == vars(parse([*words, "list"])) | {"parser": None}


def test_two_dashes_end_the_options_of_every_verb() -> None:
    assert parse(["show", "--", "k"]).key == ["k"]
    args = parse(["run", "-q", "--", "show", "--quiet", "--", "x"])
    assert (args.quiet, args.command) == (True, ["show", "--quiet", "--", "x"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["-j", "bogus"],
        ["list", "--watch=0"],
        ["list", "--watch=fast"],
        ["list", "--filter", "state"],
        ["list", "--filter", "colour=red"],
        ["list", "--bogus"],
        ["list", "extra"],
        ["show"],
        ["show", "k", "--ful"],
        ["list", "--json=xml"],
        ["list", "--json=auto"],
        ["create", "k", "--attribute", "novalue"],
        ["create", "k", "--attribute", "=v"],
        ["move", "k"],
        ["assign", "k", "--cgroup", "/x", "--tree"],
        ["assign", "k", "--cgroup", ""],
        ["create", "k", "--claim", ""],
        ["create", "k", "--class", ""],
        ["move", "k", ""],
        ["--socket", "", "list"],
        ["list", "--socket", ""],
        ["list", "--root", ""],
        ["hooks", "status", "--hooks-dir", ""],
        ["list", "--columns", ""],
        ["list", "--pods", "--filter", "namespace=shop"],
        ["list", "--pods", "--sort", "key"],
        ["list", "--pods", "--columns", "key"],
        ["list", "--pods", "--rate"],
        ["list", "--pods", "--all"],
        ["show", "k", "-p", ""],
        ["show", "k", "-p", ","],
        ["show", "k", "-p", "key", "-j"],
        ["create", "k", "--priority", "high"],
        ["create", "k", "--priority", "1001"],
        ["create", "k", "--priority", "-1001"],
        ["create", "k", "--priority", "--5"],
        ["top", "-n", "9" * 5000],
        ["units", "enable"],
        ["units", "disable"],
        ["units", "status", "x"],
    ],
    ids=" ".join,
)
def test_wrong_command_line_prints_one_line_and_exits_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("resctrlctl")
    assert "--help'" in err
    assert "invalid int" not in err
    assert "invalid _" not in err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["shwo"], "resctrlctl: argument VERB: there is no 'shwo'. Did you mean show? See 'resctrlctl --help'\n"),
        (["units", "enbale", "x"], "there is no 'enbale'. Did you mean enable? See 'resctrlctl units --help'\n"),
        (
            ["top", "--by", "nmespace"],
            "there is no 'nmespace'. Did you mean namespace? See 'resctrlctl top --help'\n",
        ),
        (["hooks", "zzz"], "there is no 'zzz'. Choose from enable, disable, status. See 'resctrlctl hooks --help'\n"),
        (["\x1b[31m"], "there is no '\\x1b[31m'. Choose from list, top"),
    ],
)
def test_mistyped_word_is_reported_with_the_nearest_one(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert error in capsys.readouterr().err


def test_priority_has_the_limits_of_the_daemon() -> None:
    assert MAX_PRIORITY == validation.MAX_PRIORITY
    for priority in (-MAX_PRIORITY, -5, 0, MAX_PRIORITY):
        assert parse(["create", "k", "--priority", str(priority)]).priority == priority


@pytest.mark.parametrize("option", ["--key", "--output", "--class", "--events"])
def test_run_refuses_an_empty_key_file_class_or_event(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["run", option, "", "--", "true"])
    assert ended.value.code == 125
    assert f"{option}: the value is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["make", "-j8"], ["make", "-j8"]),
        (["-q", "make", "--json"], ["make", "--json"]),
        (["-o", "make", "true"], ["true"]),
        (["-qo", "make", "true"], ["true"]),
        (["-omake", "true"], ["true"]),
        (["--key=k", "--json=short", "true", "--", "-x"], ["true", "--", "-x"]),
        (["--socket", "run", "list"], ["list"]),
        (["--", "-x"], ["-x"]),
        (["-"], ["-"]),
        ([""], [""]),
    ],
    ids=" ".join,
)
def test_command_begins_with_the_first_word_that_is_not_an_option(words: list[str], command: list[str]) -> None:
    assert parse(["run", *words]).command == command
    assert parse(["--socket", "/s", "run", *words]).command == command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("hooks", "hooks: the following arguments are required: {enable,disable,status}. See"),
        ("profiles", "profiles: the following arguments are required: {list,show,check,explain}. See"),
        ("profiles show", "profiles: show: the name of a profile is missing. See"),
        ("profiles check", "profiles: check: the path of a file is missing. See"),
        ("profiles explain", "profiles: explain: the name of a workload is missing. See"),
        ("plot", "plot: the following arguments are required: FILE. See"),
    ],
)
def test_message_names_the_missing_argument(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 2
    assert f"resctrlctl {message}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["units", "profiles"])
def test_help_of_a_verb_with_actions_explains_each_of_them(verb: str) -> None:
    parser = verb_parsers()[verb]
    (action,) = (each for each in parser._actions if each.dest == "action")
    explained = re.findall(r"^  (\w+)  +\w", str(parser.epilog), re.MULTILINE)
    assert explained == list(action.choices or ())


def test_run_without_a_command_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["run", "-q"])
    assert ended.value.code == 125
    assert "the command is missing; it is last, for example: resctrlctl run make" in capsys.readouterr().err


def test_other_mistakes_of_run_get_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["run", "-x", "", "true"])
    assert ended.value.code == 125
    assert capsys.readouterr().err == (
        "resctrlctl run: argument -x/--field-separator: the value is empty: give one, or leave the option out. "
        "See 'resctrlctl run --help'\n"
    )


# -- completion


def split_as_bash(line: str, breaks: str) -> Iterator[str]:
    """Yield the words of COMP_WORDS as bash splits them: at spaces, and around each character of ``breaks``."""
    for word in line.split(" "):
        yield from (part for part in re.split(f"([{breaks}])", word) if part or word == "")


# The command line by which the completion reads the globs, and the reply.
WATCHED = ("units", "status", "--no-legend", "--full")
SHOWN = """\
*.service       /etc/resctrlmond/resctrlmond.yaml
web*.service    /etc/resctrlmond/resctrlmond.d/units.yaml
!web-test@*     /etc/resctrlmond/resctrlmond.d/units.yaml

web-1.service   /etc/systemd/system/web-1.service.d/zz-resctrlmon-exact.conf
"""


def complete(line: str, *, keys: str = "", breaks: str = "@:=", path: str = "/usr/bin:/bin") -> list[str]:
    """Return the completions at the end of the line; ``keys`` are the keys of the workloads, and those of units."""
    words = list(split_as_bash(line, breaks))
    script = (
        f'source {COMPLETION}; __resctrlctl_keys() {{ printf "%b" "$KEYS"; }}; '
        '__resctrlctl_units() { printf "%b" "$KEYS"; }; '
        'COMP_LINE=$1 COMP_POINT=${#1}; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        '_resctrlctl; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line, *words],
        env={"KEYS": keys, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_states_and_events_are_completed() -> None:
    assert set(complete("resctrlctl list --filter state=")) == set(State)
    assert set(complete("resctrlctl list --filter quality=")) == set(Quality)
    assert set(complete("resctrlctl run -e ")) == set(EVENTS)


def test_profiles_are_completed_from_the_directory_of_the_line(tmp_path: Path) -> None:
    (tmp_path / "resctrlctl").write_text('#!/bin/sh\ncase "$*" in *"--profiles-dir /p "*) echo mine ;; esac\n')
    (tmp_path / "resctrlctl").chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert complete("resctrlctl profiles --profiles-dir /p show m", path=path) == ["mine"]
    assert complete("resctrlctl profiles --profiles-dir=/p show m", path=path) == ["mine"]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("profiles check -q f", "subject", "f"),
        ("profiles check --root /r f", "subject", "f"),
        ("profiles -q check f", "subject", "f"),
        ("units enable -q *.service", "glob", ["*.service"]),
        ("units enable a* -q b*", "glob", ["a*", "b*"]),
    ],
)
def test_argument_of_an_action_can_be_behind_an_option(line: str, name: str, value: object) -> None:
    assert getattr(parse(line.split()), name) == value


@pytest.mark.parametrize(
    "line", ["profiles check -q f g", "profiles list -q f", "units enable -q --no f", "move a -q b c"]
)
def test_other_arguments_behind_an_option_are_refused(line: str) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(line.split())
    assert raised.value.code == 2


def test_filter_that_is_not_valid_gets_the_form_of_a_filter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["list", "--filter", "web"])
    assert "'web' is not NAME=PATTERN" in capsys.readouterr().err


def test_completion_has_every_verb_and_option() -> None:
    # Short options are not completed.
    def long(parser: argparse.ArgumentParser) -> set[str]:
        return {option for option in options_of(parser) if option.startswith("--")}

    modes = {"--json=short", "--json=pretty", "--json=off"}
    assert set(complete("resctrlctl ")) == set(VERBS) | long(build()) | modes
    for name, parser in verb_parsers().items():
        dashes = {"--"} if name == "run" else set()
        assert set(complete(f"resctrlctl {name} -")) == long(parser) | modes | dashes, name


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("resctrlctl sh", ["show"]),
        ("resctrlctl -q st", ["status"]),
        ("resctrlctl show w", ["web", "worker"]),
        ("resctrlctl show web w", ["web", "worker"]),
        ("resctrlctl release w", ["web", "worker"]),
        ("resctrlctl release web w", []),
        ("resctrlctl --socket /s assign --claim me wo", ["worker"]),
        ("resctrlctl move web /", ["/"]),
        ("resctrlctl run --class fo", ["follow"]),
        ("resctrlctl run -- tr", None),
        ("resctrlctl run tr", None),
        ("resctrlctl run -o list tr", None),
        ("resctrlctl status w", ["web", "worker"]),
        ("resctrlctl status web w", ["web", "worker"]),
        ("resctrlctl list --sort en", ["energy"]),
        ("resctrlctl list --columns key,age,p", ["key,age,power", "key,age,pod"]),
        ("resctrlctl list --filter na", ["namespace="]),
        ("resctrlctl list --filter state=c", ["completed"]),
        ("resctrlctl list --filter quality=e", ["exact", "estimated"]),
        ("resctrlctl run -e core", ["core_energy"]),
        ("resctrlctl run --events llc_occupancy,mbm_t", ["llc_occupancy,mbm_total_bytes"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_completion_of_words(line: str, offered: list[str] | None) -> None:
    found = complete(line, keys="web\\nworker\\nbatch\\n")
    if offered is None:
        assert "true" in found
    else:
        assert found == offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("resctrlctl show getty@", ["tty1.service", "tty2.service"]),
        ("resctrlctl show getty@tty1", ["tty1.service"]),
        ("resctrlctl show ge", ["getty@tty1.service", "getty@tty2.service"]),
        ("resctrlctl --json=p", ["pretty"]),
        ("resctrlctl --json=short sho", ["show"]),
    ],
)
def test_completion_of_a_word_that_bash_splits(line: str, offered: list[str]) -> None:
    assert complete(line, keys="getty@tty1.service\\ngetty@tty2.service\\n") == offered


def test_quiet_list_prints_the_keys_for_the_completion(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("web")
    manager.add("batch")
    manager.add("ended", state=State.COMPLETED)
    assert ctl("list", "--quiet").stdout == "batch\nweb\n"
    assert ctl("list", "--quiet", "--all").stdout == "batch\nended\nweb\n"
    assert not manager.called("ReadAll")


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("resctrlctl show w", "list --all --quiet"),
        ("resctrlctl --socket /s show w", "--socket /s list --all --quiet"),
        ("resctrlctl --socket=/s show w", "--socket /s list --all --quiet"),
        ("resctrlctl show --socket /s w", "--socket /s list --all --quiet"),
        ("resctrlctl assign w", "list --all --quiet"),
        ("resctrlctl profiles explain w", "list --all --quiet"),
        # These two refuse a workload that has ended.
        ("resctrlctl release w", "list --quiet"),
        ("resctrlctl --socket /s move w", "--socket /s list --quiet"),
    ],
)
def test_completion_uses_the_socket_of_the_line(line: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "resctrlctl").write_text('#!/bin/sh\necho "$@" >"$0.asked"; echo web\n')
    (tmp_path / "resctrlctl").chmod(0o755)
    script = (
        f"source {COMPLETION}; COMP_LINE=$1 COMP_POINT=${{#1}}; shift; "
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _resctrlctl; echo "${COMPREPLY[@]}"'
    )
    words = [*split_as_bash(line, "@:=")]
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line, *words],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("web\n", "")
    assert (tmp_path / "resctrlctl.asked").read_text().strip() == command


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("resctrlctl units disable ", ["web\\*.service", "\\!web-test@\\*"]),
        ("resctrlctl units disable x we", ["web\\*.service"]),
        ("resctrlctl units disable web\\*", ["web\\*.service"]),
        ("resctrlctl units inexact ", ["web-1.service"]),
        ("resctrlctl units status w", []),
        ("resctrlctl --host other units disable ", []),
    ],
)
def test_completion_of_globs_and_exact_services(line: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "resctrlctl").write_text(f"#!/bin/sh\ntest \"$*\" = '{' '.join(WATCHED)}' && cat <<'E'\n{SHOWN}E\n")
    (tmp_path / "resctrlctl").chmod(0o755)
    assert complete(line, path=f"{tmp_path}:/usr/bin:/bin") == offered


def test_completion_of_units_to_watch() -> None:
    for action in ("enable", "exact"):
        assert complete(f"resctrlctl units {action} w", keys="web.service\nbatch.service\n") == ["web.service"]


def test_completion_of_units_asks_systemd(tmp_path: Path) -> None:
    listed = "getty@tty1.service loaded active running Getty\nweb.service loaded failed failed W\n"
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$@" >"$0.asked"; printf %s "{listed}"\n')
    (tmp_path / "systemctl").chmod(0o755)
    done = subprocess.run(
        ["bash", "--norc", "-c", f"source {COMPLETION}; __resctrlctl_units"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("getty@tty1.service\nweb.service\n", "")
    asked = (tmp_path / "systemctl.asked").read_text()
    assert asked == "list-units --all --full --plain --no-legend --type=service,scope,slice\n"


def test_socket_option_precedes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["list"]).socket == SOCKET
    monkeypatch.setenv("RESCTRLMOND_SOCKET", "/tmp/sim/socket")
    assert parse(["list"]).socket == "/tmp/sim/socket"
    assert parse(["list", "--socket", "/other"]).socket == "/other"
    assert parse(["--socket", "/other", "list"]).socket == "/other"
    monkeypatch.setenv("RESCTRLMOND_SOCKET", "")
    assert parse(["list"]).socket == SOCKET


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["--socket", "run", "--json", "list", "show"], ["list"]),
        ([], ["list"]),
        (["bogus", "list"], list(VERBS)),
        (["list", "--help"], list(VERBS)),
        (["--help"], list(VERBS)),
    ],
    ids=" ".join,
)
def test_parser_has_only_the_verb_unless_its_help_or_an_error_lists_all(
    words: list[str], added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def recorded(verbs: Collection[str]) -> Parser:
        found.extend(verbs)
        return build(verbs)

    monkeypatch.setattr("resctrlctl.arguments.command_line.build", recorded)
    with contextlib.suppress(SystemExit):
        parse(words)
    assert found == added
