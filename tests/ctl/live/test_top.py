# SPDX-License-Identifier: Apache-2.0
"""The verb top: as lines of text and JSON, and on a real terminal, which pyte shows."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator

import pyte
import pytest
from msgspec.structs import replace

from resctrlctl.screen.layout import cell_width
from tests.ctl.conftest import Ctl, command
from tests.ctl.fake_manager import FakeManager
from tests.ctl.host.test_machine import REPLY
from tests.wait import wait_until


def test_batch_prints_a_table_for_each_interval(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k")
    done = ctl("top", "--batch", "-n", "2", "-d", "0.5")
    assert (done.returncode, done.stderr) == (0, "")
    _, *tables = done.stdout.split("1 workload")
    assert len(tables) == 2
    for table in tables:
        assert "RMIDs: " in table
        assert [line.split()[0] for line in table.splitlines() if line][-1] == "k"


def test_batch_without_legend_has_only_the_rows(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k")
    done = ctl("top", "--no-legend", "-n", "2", "-d", "0.5")
    assert [line.split()[:1] for line in done.stdout.splitlines()] == [["k"], [], ["k"]]


def test_output_to_a_pipe_has_no_control_characters(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k")
    done = ctl("top", "-n", "1", "-d", "0.5")
    assert "\x1b" not in done.stdout
    assert "WORKLOAD" in done.stdout


def test_json_is_one_line_for_each_interval(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k")
    lines = ctl("top", "--json", "-n", "2", "-d", "0.5", "--by", "class").stdout.splitlines()
    assert len(lines) == 2
    reply = json.loads(lines[1])
    pools = ["poolsEvent", "pools", "poolsWatts", "poolsBytesPerSecond"]
    assert list(reply) == ["readAt", "rmids", "rmidsUsed", "pending", "inLimbo", *pools, "by", "rows"]
    assert (reply["by"], [(row["name"], row["workloads"]) for row in reply["rows"]]) == ("class", [("/", 1)])


def test_json_has_the_pools_of_the_machine_in_the_interval(manager: FakeManager, ctl: Ctl) -> None:
    first, *others = REPLY.pools[4:]
    more = [replace(first, value="600080.000000"), replace(others[0], value="20.000000"), *others[1:]]
    manager.replies = {"Machine": REPLY}
    done = ctl("top", "--json", "-n", "1", "-d", "0.5")
    assert json.loads(done.stdout)["pools"] is None, "nothing was used"
    later = replace(REPLY, read_at="2026-11-22T10:00:00.5Z")
    manager.next_replies = {"Machine": [REPLY, replace(later, pools=more)]}
    done = ctl("top", "--json", "-n", "1", "-d", "0.5")
    reply = json.loads(done.stdout)
    shares = {"tracked": "0.800000", "foreign": "0.200000", "untracked": "0.000000", "uncore": "0.000000"}
    assert (reply["poolsEvent"], reply["pools"]) == ("core_energy", shares)
    watts = {"tracked": "160.000000", "foreign": "40.000000", "untracked": "0.000000", "uncore": "0.000000"}
    assert (reply["poolsWatts"], reply["poolsBytesPerSecond"]) == (watts, None)
    # Resctrl was mounted again, so nothing is since the reading before.
    tracked, foreign, untracked, uncore = REPLY.pools[4:]
    anew = [replace(tracked, value="3"), foreign, replace(untracked, value="150000"), replace(uncore, value="0")]
    manager.next_replies = {"Machine": [REPLY, replace(later, since=REPLY.read_at, pools=anew)]}
    reply = json.loads(ctl("top", "--json", "-n", "1", "-d", "0.5").stdout)
    assert reply["pools"] == {
        "tracked": "0.000020",
        "foreign": "0.000000",
        "untracked": "0.999980",
        "uncore": "0.000000",
    }


def test_filter_leaves_out_other_workloads(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("a")
    manager.add("b")
    done = ctl("top", "-n", "1", "-d", "0.5", "--json", "--filter", "key=b")
    assert [row["name"] for row in json.loads(done.stdout)["rows"]] == ["b"]


@pytest.mark.parametrize("words", [("-n", "0"), ("-d", "0.1"), ("--by", "host"), ("--sort", "key")])
def test_wrong_options_are_refused(ctl: Ctl, words: tuple[str, ...]) -> None:
    done = ctl("top", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert words[0] in done.stderr


class Terminal:
    """A terminal with a program on it; ``screen`` has its characters."""

    def __init__(
        self,
        words: list[str],
        environment: dict[str, str],
        columns: int = 90,
        rows: int = 14,
        term: str = "xterm-256color",
    ) -> None:
        self._guard = threading.Lock()
        self.screen = pyte.Screen(columns, rows)
        stream = pyte.ByteStream(self.screen)
        self.written = bytearray()
        self._master, terminal = pty.openpty()
        self.terminal = terminal
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(terminal)
        settings = environment | {"TERM": term, "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *words], env=settings, stdin=terminal, stdout=terminal, stderr=terminal
        )

        def show() -> None:
            while True:
                try:
                    data = os.read(self._master, 65536)
                except OSError:
                    return
                with self._guard:
                    stream.feed(data)
                    self.written += data

        self._shower = threading.Thread(target=show, daemon=True)
        self._shower.start()

    @property
    def text(self) -> str:
        """The lines of the screen, as the user sees them."""
        with self._guard:
            return "\n".join(line.rstrip() for line in self.screen.display)

    def press(self, keys: str) -> None:
        """Type these keys."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size."""
        # The screen before the program gets SIGWINCH: it draws everything once, and afterwards what has changed.
        with self._guard:
            self.screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        """End the program, and close the terminal."""
        self.process.kill()
        self.process.wait(60)
        os.close(self.terminal)
        self._shower.join(60)
        os.close(self._master)


@pytest.fixture
def on_terminal(manager: FakeManager, environment: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    """A function that runs top on a terminal."""
    opened: list[Terminal] = []

    def start(*options: str, term: str = "xterm-256color") -> Terminal:
        opened.append(Terminal(command(manager.socket, "top", *options), environment, term=term))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_terminal_shows_rows_and_follows_keys(manager: FakeManager, on_terminal: Callable[..., Terminal]) -> None:
    for number in range(30):
        manager.add(f"k{number:02}")
    shown = on_terminal("--sort", "name", "-d", "0.5")
    wait_until(lambda: "k00" in shown.text and "rows 1 to 7 of 30" in shown.text)
    shown.press("r")
    wait_until(lambda: "k29" in shown.text and "k00" not in shown.text)
    shown.press("\x1b[6~")  # PgDn
    wait_until(lambda: "k20" in shown.text and "k29" not in shown.text)
    shown.press("h")
    wait_until(lambda: "next grouping" in shown.text)
    shown.press("gggg")
    wait_until(lambda: "CLASS" in shown.text)
    shown.press("+")
    wait_until(lambda: "every 1 s" in shown.text)
    shown.press("ggr")
    for size in ((1, 1), (200, 50), (3, 3), (100, 12)):
        shown.resize(*size)
        time.sleep(0.1)
    wait_until(lambda: "k00" in shown.text and "rows 1 to 5 of 30" in shown.text)
    shown.press("q")
    assert shown.process.wait(60) == 0
    assert termios.tcgetattr(shown.terminal) == shown.settings


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_the_terminal_as_it_was(
    manager: FakeManager, on_terminal: Callable[..., Terminal], number: signal.Signals
) -> None:
    manager.add("k")
    shown = on_terminal()
    wait_until(lambda: "WORKLOAD" in shown.text)
    assert termios.tcgetattr(shown.terminal) != shown.settings
    shown.process.send_signal(number)
    assert shown.process.wait(60) == 128 + number
    assert termios.tcgetattr(shown.terminal) == shown.settings


def test_screen_names_a_missing_daemon_and_recovers(
    manager: FakeManager, on_terminal: Callable[..., Terminal]
) -> None:
    manager.add("k")
    shown = on_terminal("-d", "0.5")
    wait_until(lambda: "every 0.5 s" in shown.text)
    os.rename(manager.socket, manager.socket + ".away")
    wait_until(lambda: "resctrlmond is not running" in shown.text)
    assert "WORKLOAD" in shown.text, "the last figures stay"
    os.rename(manager.socket + ".away", manager.socket)
    wait_until(lambda: "every 0.5 s" in shown.text)


def test_rows_do_not_wait_for_a_slow_reading_of_the_pools(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k")
    manager.hangs = {"Machine"}
    done = ctl("top", "-b", "-n", "2", "-d", "0.5")
    assert (done.returncode, done.stdout.count("RMIDs: ")) == (0, 2)


def test_screen_of_500_workloads_changes_only_where_a_figure_changed(
    manager: FakeManager, on_terminal: Callable[..., Terminal]
) -> None:
    for number in range(500):
        manager.add(f"k{number:03}")
    shown = on_terminal("--sort", "name", "-d", "0.5")
    wait_until(lambda: "rows 1 to 7 of 500" in shown.text and len(manager.called("ReadAll")) > 2)
    begin, reads = len(shown.written), len(manager.called("ReadAll"))
    wait_until(lambda: len(manager.called("ReadAll")) >= reads + 4)
    written = bytes(shown.written[begin:])
    # ECMA-48: erase in display. The whole screen has 14 lines of 90 columns.
    assert not re.search(rb"\x1b\[[0-3]?J", written)
    assert len(written) < 14 * 90


def test_dumb_terminal_gets_lines_without_control_characters(
    manager: FakeManager, on_terminal: Callable[..., Terminal]
) -> None:
    manager.add("k", attributes={"container.name": "\u6570\u636e"})
    shown = on_terminal("-n", "2", "-d", "0.5", term="dumb")
    assert shown.process.wait(60) == 0
    # The name is in the last line of each reading.
    name = "\u6570\u636e".encode()
    wait_until(lambda: shown.written.count(name) == 2 and shown.written.endswith(b"\n"))
    assert shown.written.count(b"RMIDs: ") == 2
    assert b"\x1b" not in shown.written
    heading, row = shown.written.decode().replace("\r\n", "\n").splitlines()[-2:]
    # Each character of the name takes two columns.
    assert cell_width(row[: row.index("-") + 1]) == heading.index("POWER") + len("POWER")


def test_iterations_end_the_screen(manager: FakeManager, on_terminal: Callable[..., Terminal]) -> None:
    manager.add("k")
    assert on_terminal("-n", "1", "-d", "0.5").process.wait(60) == 0
