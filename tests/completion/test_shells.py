# SPDX-License-Identifier: Apache-2.0
"""zsh and fish complete verbs, options and their values, and the keys and names of workloads."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlctl.arguments.verbs import VERBS, build
from resctrlctl.workloads.workload_table import FILTERS
from resctrlmond.resctrl.counters import EVENTS
from resctrlmond.workloads.model.states import Quality, State

COMPLETIONS = Path(__file__).parents[2] / "resctrlctl" / "completions"
CAPTURE = Path(__file__).parent / "capture.zsh"
# list --columns key,workload: a pod, a unit, a unit whose name zsh would split, and a command.
LISTED = """\
aaaa-bbbb           shop/cart-0 app
web.service         web.service
getty@tty1:service  getty@tty1:service
run-1-7             make -j8
"""
WORKLOADS = {"aaaa-bbbb", "shop/cart-0 app", "web.service", "getty@tty1:service", "run-1-7", "make -j8"}
# resctrlctl units status --no-legend --full
WATCHED = """\
*.service       /etc/resctrlmond/resctrlmond.yaml
web*.service    /etc/resctrlmond/resctrlmond.d/units.yaml
!web-test@*     /etc/resctrlmond/resctrlmond.d/units.yaml

web-1.service   /etc/systemd/system/web-1.service.d/zz-resctrlmon-exact.conf
"""
# systemctl list-units
UNITS = "wall@x:y.service loaded active running W\nwww.slice loaded active active S\n"
MODES = {"--json=short", "--json=pretty", "--json=off"}


class Shell:
    """A shell, and a resctrlctl that prints some workloads and records its arguments."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        (folder / "listed").write_text(LISTED)
        (folder / "watched").write_text(WATCHED)
        program = folder / "resctrlctl"
        own = f"units) cat {folder}/watched ;; profiles) echo batch; echo web ;;"
        shown = f"case $1 in {own} *) cat {folder}/listed ;; esac"
        program.write_text(f'#!/bin/sh\necho "$@" >>{folder}/asked\n{shown}\n')
        program.chmod(0o755)
        systemctl = folder / "systemctl"
        systemctl.write_text(f'#!/bin/sh\necho "$@" >>{folder}/asked\nprintf %s "{UNITS}"\n')
        systemctl.chmod(0o755)

    @property
    def asked(self) -> str:
        """The command lines of resctrlctl."""
        return (self.folder / "asked").read_text()

    def complete(self, line: str) -> dict[str, str]:
        """Return the completions at the end of the line, with the descriptions that fish shows."""
        fish = f'source {COMPLETIONS}/resctrlctl.fish; complete -C "$argv[1]"'
        commands = {
            "fish": ["fish", "--no-config", "-c", fish, "--", line],
            "zsh": ["zsh", "-f", str(CAPTURE), line, str(COMPLETIONS)],
        }
        done = subprocess.run(
            commands[self.name],
            env={
                "PATH": f"{self.folder}:/usr/bin:/bin",
                "HOME": str(self.folder),
                "LANG": "C.UTF-8",
                "TERM": "xterm",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        offered = (text.partition("\t") for text in done.stdout.splitlines())
        return {word: description for word, _, description in offered}


@pytest.fixture(params=["zsh", "fish"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    return Shell(request.param, tmp_path)


@pytest.fixture
def complete(shell: Shell) -> Callable[[str], set[str]]:
    """A function that returns the completions at the end of a line."""
    return lambda line: set(shell.complete(line))


def test_verbs_are_completed_with_their_summaries(shell: Shell) -> None:
    offered = shell.complete("resctrlctl ")
    assert set(offered) == set(VERBS)
    if shell.name == "fish":  # zsh's descriptions are those of _describe
        assert offered == {name: row[0] for name, row in VERBS.items()}


@pytest.mark.parametrize("verb", VERBS)
def test_each_option_of_a_verb_is_completed(verb: str, complete: Callable[[str], set[str]]) -> None:
    (verbs,) = (action for action in build()._actions if isinstance(action, argparse._SubParsersAction))
    names = {name for action in verbs.choices[verb]._actions for name in action.option_strings}
    offered = {name.removesuffix("=") for name in complete(f"resctrlctl {verb} --") if name != "--"}
    assert offered == {name for name in names if name.startswith("--")}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("resctrlctl sh", {"show"}),
        ("resctrlctl -q st", {"status"}),
        ("resctrlctl --json sh", {"show"}),
        ("resctrlctl --vers", {"--version"}),
        ("resctrlctl show ", WORKLOADS),
        ("resctrlctl show g", {"getty@tty1:service"}),
        ("resctrlctl show aaaa-bbbb w", {"web.service"}),
        ("resctrlctl record -o x show w", {"web.service"}),
        ("resctrlctl plot file w", {"web.service"}),
        ("resctrlctl release w", {"web.service"}),
        ("resctrlctl release web.service w", set()),
        ("resctrlctl assign --claim show w", {"web.service"}),
        ("resctrlctl move web.service ", {"/"}),
        ("resctrlctl run --class fo", {"follow"}),
        ("resctrlctl hooks ", {"enable", "disable", "status"}),
        ("resctrlctl units ", {"enable", "disable", "exact", "inexact", "status"}),
        ("resctrlctl units enable ", {"wall@x:y.service", "www.slice"}),
        ("resctrlctl units exact wa", {"wall@x:y.service"}),
        ("resctrlctl units disable ", {"web*.service", "!web-test@*"}),
        ("resctrlctl units disable x we", {"web*.service"}),
        ("resctrlctl units inexact ", {"web-1.service"}),
        ("resctrlctl units status w", set()),
        ("resctrlctl -H other units disable ", set()),
        ("resctrlctl profiles explain w", {"web.service"}),
        ("resctrlctl profiles ", {"list", "show", "check", "explain"}),
        ("resctrlctl list --sort en", {"energy"}),
        ("resctrlctl list --filter na", {"namespace="}),
        ("resctrlctl list --filter state=c", {"state=completed"}),
        ("resctrlctl top --filter quality=e", {"quality=exact", "quality=estimated"}),
        ("resctrlctl watch x --filter class=", {"class=/"}),
        ("resctrlctl show -p ", set()),
        ("resctrlctl show x --property ", set()),
        ("resctrlctl release x --claim ", set()),
        ("resctrlctl create --claim x ", WORKLOADS),
        ("resctrlctl report --since y", {"yesterday"}),
        ("resctrlctl run -e core", {"core_energy"}),
        ("resctrlctl run -e core_energy -- resctrlctl sho", {"show"}),
        ("resctrlctl profiles show ", {"batch", "web"}),
        ("resctrlctl profiles --profiles-dir /p ", {"list", "show", "check", "explain"}),
        ("resctrlctl top --by na", {"namespace"}),
        ("resctrlctl top --sort na", {"name"}),
        ("resctrlctl run -- resctrlctl sho", {"show"}),
        ("resctrlctl run resctrlctl sho", {"show"}),
        ("resctrlctl run -o x resctrlctl sho", {"show"}),
        ("resctrlctl top --by n", {"namespace"}),
        ("resctrlctl top --sort en", {"energy"}),
        ("resctrlctl status w", {"wall@x:y.service", "www.slice"}),
        ("resctrlctl status www.slice wa", {"wall@x:y.service"}),
    ],
)
def test_completion_of_words(line: str, offered: set[str], complete: Callable[[str], set[str]]) -> None:
    assert complete(line) == offered


def test_last_column_of_a_list_is_completed(complete: Callable[[str], set[str]]) -> None:
    offered = complete("resctrlctl list --columns key,age,p")
    assert {word.removeprefix("key,age,") for word in offered} == {"power", "pod"}


def test_filters_and_events_are_those_of_the_program(complete: Callable[[str], set[str]]) -> None:
    assert complete("resctrlctl list --filter ") == {f"{name}=" for name in FILTERS}
    assert complete("resctrlctl list --filter state=") == {f"state={state}" for state in State}
    assert complete("resctrlctl list --filter quality=") == {f"quality={quality}" for quality in Quality}
    assert {word.removeprefix("--filter=") for word in complete("resctrlctl list --filter=quality=l")} == {
        "quality=late"
    }
    assert complete("resctrlctl run --events ") == set(EVENTS)
    last = complete("resctrlctl run --events llc_occupancy,mbm_")
    assert {word.removeprefix("llc_occupancy,") for word in last} == {"mbm_total_bytes", "mbm_local_bytes"}


@pytest.mark.parametrize(
    ("option", "asked"),
    [("--profiles-dir /p", " --profiles-dir /p"), ("--profiles-dir=/p", " --profiles-dir /p"), ("--quiet", "")],
)
def test_profiles_are_those_of_the_directory_of_the_line(option: str, asked: str, shell: Shell) -> None:
    assert set(shell.complete(f"resctrlctl profiles {option} show w")) == {"web"}
    assert shell.asked == f"profiles list --quiet{asked}\n"


def test_modes_of_json_are_completed(complete: Callable[[str], set[str]]) -> None:
    offered = complete("resctrlctl --json=")
    assert {f"--json={word.removeprefix('--json=')}" for word in offered} == MODES


def test_command_of_run_is_completed(complete: Callable[[str], set[str]]) -> None:
    assert {"true", "truncate"} <= complete("resctrlctl run --key x -- tru")
    assert {"true", "truncate"} <= complete("resctrlctl run --key x tru")


def test_fish_describes_keys_by_names_and_names_by_keys(tmp_path: Path) -> None:
    offered = Shell("fish", tmp_path).complete("resctrlctl show ")
    assert offered["aaaa-bbbb"] == "shop/cart-0 app"
    assert offered["shop/cart-0 app"] == "aaaa-bbbb"


@pytest.mark.parametrize(
    "line",
    ["resctrlctl --socket /s show a", "resctrlctl show --socket=/s a", "resctrlctl show --socket /s a"],
)
def test_workloads_are_those_of_the_socket_of_the_line(line: str, shell: Shell) -> None:
    assert set(shell.complete(line)) == {"aaaa-bbbb"}
    assert shell.asked.startswith("--socket /s list ")


def test_workloads_are_listed_without_groups_of_other_programs(shell: Shell) -> None:
    shell.complete("resctrlctl show a")
    # A filter leaves out the table of foreign groups; without a legend, there is no heading.
    assert shell.asked == "list --all --no-legend --columns key,workload --filter key=*\n"


@pytest.mark.parametrize("verb", ["release", "move"])
def test_workloads_that_have_ended_are_not_offered_where_they_are_refused(verb: str, shell: Shell) -> None:
    assert set(shell.complete(f"resctrlctl {verb} a")) == {"aaaa-bbbb"}
    assert shell.asked == "list --no-legend --columns key,workload --filter key=*\n"


def test_another_host_is_not_asked_for_its_workloads(shell: Shell) -> None:
    """The shell would wait for ssh, which may ask for a password."""
    for option in ("-H web1", "--host web1", "--host=web1", "-Hweb1"):
        assert set(shell.complete(f"resctrlctl {option} show ")) & WORKLOADS == set()
        assert "list" in shell.complete(f"resctrlctl {option} ")
    assert not (shell.folder / "asked").exists()
