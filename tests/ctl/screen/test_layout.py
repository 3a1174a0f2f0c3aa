# SPDX-License-Identifier: Apache-2.0
"""Plain text fits the width, and a drawn table has the same text as a plain one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlctl.screen.layout import Column, Row, Sheet, Table, to_text
from tests.ctl.conftest import command
from tests.ctl.fake_manager import FakeManager
from tests.ctl.workloads.test_queries import populate

CELLS = st.text(st.characters(categories=["L", "N"]), max_size=60)
TABLES = st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5).map(
    lambda rows: Table(
        tuple(Column(heading, right=heading == "TWO", can_be_cut=True) for heading in ("ONE", "TWO", "THREE")),
        tuple(map(Row, rows)),
    )
)
SGR = re.compile(r"\x1b\[[0-9;]*m")


@given(TABLES, st.integers(min_value=28, max_value=100))
def test_no_line_of_a_table_exceeds_the_width(table: Table, width: int) -> None:
    assert all(len(line) <= width for line in to_text([table], width, legend=True).splitlines())


@given(TABLES)
def test_cells_are_not_cut_without_a_width(table: Table) -> None:
    text = to_text([table], None, legend=True)
    assert "…" not in text
    assert all(cell in text for row in table.rows for cell in row.cells)


def test_only_the_widest_columns_are_cut() -> None:
    columns = (Column("KEY", can_be_cut=True), Column("N", right=True, can_be_cut=True))
    table = Table(columns, (Row(("a" * 40, "7")), Row(("b", "12"))))
    assert to_text([table], 20, legend=False) == "aaaaaaaaaaaaaaa…   7\nb                 12\n"


def test_long_name_has_a_line_of_its_own_and_a_note_is_below_its_row() -> None:
    columns = (Column("POD", name_width=8), Column("N", right=True), Column("NOTE", is_note=True))
    rows = (Row(("a" * 12, "7", "-")), Row(("b" * 13, "8", "no RMID is free")), Row(("c", "1234", "-")))
    assert to_text([Table(columns, rows)], 22, legend=True).splitlines() == [
        "POD               N",
        "aaaaaaaaaaaa      7",
        "bbbbbbbbbbbbb     8",
        "    no RMID is free",
        "c              1234",
    ]
    assert to_text([Table(columns, rows)], 18, legend=True).splitlines() == [
        "POD              N",
        "aaaaaaaaaaaa     7",
        "bbbbbbbbbbbbb",
        "                 8",
        "    no RMID is free",
        "c             1234",
    ]


def test_name_in_the_middle_of_a_table_is_not_cut() -> None:
    table = Table((Column("KEY"), Column("PATH")), (Row(("a" * 40, "b" * 40)),))
    assert to_text([table], 20, legend=False) == f"{'a' * 40}  {'b' * 40}\n"


def test_wide_characters_take_two_columns() -> None:
    """The columns after a name in Japanese were out of line."""
    table = Table((Column("KEY"), Column("N")), (Row(("名前", "7")), Row(("cafe\u0301", "8")), Row(("a", "9"))))
    assert to_text([table], None, legend=False) == "名前  7\ncafe\u0301  8\na     9\n"
    narrow = Table((Column("K", can_be_cut=True),), (Row(("名前名前名前",)),))
    assert to_text([narrow], 9, legend=False) == "名前名前…\n"


def test_sheet_puts_further_values_below_the_first() -> None:
    sheet = Sheet("web", (("State", ("active",)), ("Members", ("one", "two"))))
    assert to_text([sheet], None, legend=True) == "web\n    State: active\n  Members: one\n           two\n"
    assert to_text([sheet], 13, legend=True).splitlines()[-1] == "           two"


def test_sheet_is_broken_between_words_and_never_cut() -> None:
    path, command = "/sys/fs/cgroup/" + 50 * "x", "systemctl enable --now resctrlmond.service"
    text = f"container of oci in {path} with 世界 and 人民"
    sheet = Sheet("web", (("Members", (text, "two")), ("Fix", (command,))), whole="Fix")
    lines = to_text([sheet], 38, legend=True).splitlines()
    assert lines == [
        "web",
        "  Members: container of oci in",
        f"             {path}",
        "             with 世界 and 人民",
        "           two",
        f"      Fix: {command}",
    ]


def on_terminal(arguments: list[str], environment: dict[str, str], columns: int) -> str:
    """Return the output of a command on a terminal of that width, with newlines as in a file."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    with subprocess.Popen(arguments, env=environment, stdout=secondary, stdin=secondary) as process:
        os.close(secondary)
        data = b""
        try:
            while chunk := os.read(primary, 4096):
                data += chunk
        except OSError:  # EIO: the last writer closed the terminal
            pass
        finally:
            os.close(primary)
        assert process.wait() == 0
    return data.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("verb", [["list"], ["show", "batch"], ["status"], ["list", "--no-legend"]])
def test_terminal_shows_the_plain_text_in_colour(
    manager: FakeManager, environment: dict[str, str], verb: list[str]
) -> None:
    populate(manager)
    drawn = on_terminal(command(manager.socket, *verb), environment | {"TERM": "xterm-256color"}, 90)
    piped = subprocess.run(
        command(manager.socket, *verb),
        env=environment | {"COLUMNS": "90"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "\x1b[" in drawn
    assert [line.rstrip() for line in SGR.sub("", drawn).splitlines()] == piped.splitlines()


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}])
def test_colours_can_be_switched_off(
    manager: FakeManager, environment: dict[str, str], setting: dict[str, str]
) -> None:
    populate(manager)
    drawn = on_terminal(command(manager.socket, "list"), environment | setting, 90)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", drawn)
    assert "batch" in drawn


def test_json_is_pretty_on_a_terminal(manager: FakeManager, environment: dict[str, str]) -> None:
    arguments = command(manager.socket, "status", "--json")
    assert on_terminal(arguments, environment | {"TERM": "xterm"}, 90).startswith('{\n  "version"')


def test_rich_is_not_imported_without_a_terminal(manager: FakeManager, environment: dict[str, str]) -> None:
    code = (
        "import sys; from resctrlctl.command import main; "
        f"main(['list', '--socket', {manager.socket!r}]); print('rich' in sys.modules, 'asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_closed_pipe_prints_no_message(manager: FakeManager, environment: dict[str, str]) -> None:
    populate(manager)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command(manager.socket, "list"),
        env=environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_names_are_escaped_in_an_ascii_locale(manager: FakeManager, environment: dict[str, str]) -> None:
    manager.add("web", attributes={"container.name": "café"})
    settings = environment | {"PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    done = subprocess.run(command(manager.socket, "list"), env=settings, capture_output=True, check=True)
    assert rb"caf\xe9" in done.stdout
