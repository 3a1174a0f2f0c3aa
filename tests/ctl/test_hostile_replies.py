# SPDX-License-Identifier: Apache-2.0
"""A daemon that is not the real one, as on another host: no text controls the terminal, no number is a traceback."""

from __future__ import annotations

import argparse
import os
import pty
import random
import re
import subprocess

import pytest
from msgspec import inspect as shapes

from resctrlctl.base.errors import INVALID_NUMBER
from resctrlctl.command import main
from resctrlctl.connection.daemon import daemon_of
from resctrlmond.api import types
from resctrlmond.api.verbs import VERBS
from resctrlmond.resctrl.counters import Kind, Status
from tests.ctl.conftest import Ctl, command
from tests.ctl.fake_manager import FakeManager, error
from tests.ctl.samples import Samples
from tests.ctl.test_fields import COMMANDS

# Erase the screen, in 7 and in 8 bits; write from right to left; a new line; a title.
TEXTS = ["\x1b[2J", "\x9b2J", "\u202e", "a\nb", "\u2028", "\x1b]0;owned\x07", "\x00"]
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]")
LINES = {**COMMANDS, "Machine": ["machine"], "Sums": ["sums"]}


class Hostile(Samples):
    """Draws texts that are hostile, except for numbers."""

    none_share = 0.2

    def text(self, name: str) -> str:
        return "7" if name in ("value", "late", "estimated") else self.choices.choice(TEXTS)

    def mapping(self) -> dict[str, str]:
        return {self.choices.choice(TEXTS): self.choices.choice(TEXTS)}

    def length(self) -> int:
        return self.choices.randrange(3)


@pytest.mark.parametrize("method", LINES)
def test_no_text_of_a_reply_controls_the_terminal(
    manager: FakeManager, environment: dict[str, str], capsys: pytest.CaptureFixture[str], method: str
) -> None:
    assert environment["TZ"] == "UTC"
    manager.foreign.append(types.Foreign(class_="", name="foreign", path="/foreign"))
    if method == "ReadForeign":
        manager.refuse = {"Read": error("NoSuchWorkload", "there is no such workload")}
    samples = Hostile(random.Random(method))
    for _ in range(40):
        manager.replies = {method: samples.of(shapes.type_info(VERBS[method].reply))}
        main(["--socket", manager.socket, *LINES[method]])
        shown = capsys.readouterr()
        assert not CONTROLS.search(shown.out), ascii(shown.out)
        assert not CONTROLS.search(shown.err), ascii(shown.err)


def test_top_shows_no_control_characters(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k\x1b[2J", attributes={"pod.name": "\x1b[2J\u202e"})
    done = ctl("top", "--batch", "--iterations", "1", "--delay", "0.5", "--json=off")
    assert "\\x1b[2J" in done.stdout
    assert not CONTROLS.search(done.stdout)


@pytest.mark.parametrize("number", ["1e999999999", "NaN!", "seven"])
def test_number_that_is_not_valid_is_explained(manager: FakeManager, ctl: Ctl, number: str) -> None:
    reading = types.Reading(
        domain="mon_L3_00",
        event="e",
        kind=Kind.CUMULATIVE,
        unit="bytes",
        status=Status.OK,
        value=number,
        text="",
        nested=False,
    )
    manager.refuse = {"Read": error("NoSuchWorkload", "there is no such workload")}
    foreign = types.Foreign(class_="", name="foreign", path="/foreign")
    manager.foreign.append(foreign)
    manager.replies = {"ReadForeign": types.ReadForeignReply(foreign=foreign, readings=[reading, reading])}
    done = ctl("show", "foreign")
    assert "Traceback" not in done.stderr
    assert not done.returncode or INVALID_NUMBER in done.stderr


def test_note_on_a_terminal_states_that_the_daemon_hangs(manager: FakeManager, environment: dict[str, str]) -> None:
    """The daemon may hang in a system call: without the note, the command prints nothing until its error."""
    manager.hangs.add("Status")
    primary, secondary = pty.openpty()
    with subprocess.Popen(
        command(manager.socket, "status"), env=environment, stdout=subprocess.DEVNULL, stderr=secondary
    ) as process:
        os.close(secondary)
        try:
            shown = os.read(primary, 4096).decode()
        finally:
            process.kill()
            os.close(primary)
    assert f"resctrlctl: waiting for resctrlmond ({manager.socket}) to answer, for 5 s at most" in shown


@pytest.mark.parametrize(
    ("is_terminal", "quiet", "noted"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_notes_of_waits_are_written_to_terminals_only(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, quiet: bool, noted: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    assert daemon_of(argparse.Namespace(socket="/s", quiet=quiet)).notes_waits == noted
