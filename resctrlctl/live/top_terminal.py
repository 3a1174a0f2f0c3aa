# SPDX-License-Identifier: Apache-2.0
"""``top`` on the whole terminal, with curses: it draws only what has changed, and reads the keys."""

from __future__ import annotations

import contextlib
import curses
import locale
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from resctrlctl.base.errors import INVALID_NUMBER, OK, CommandError
from resctrlctl.live.top_view import Painted, screen
from resctrlctl.screen.layout import Tone, cut
from resctrlctl.workloads.entries import By, View, entries

if TYPE_CHECKING:
    from resctrlctl.live.top import Sample

# Each key that sorts: its column.
_SORTS = {"p": "power", "b": "bandwidth", "l": "llc", "e": "energy", "a": "age", "n": "name", "Q": "quality"}
_HELP = """\
p  sort by power           n  sort by name
b  sort by bandwidth       Q  sort by quality
l  sort by LLC             r  reverse the order
e  sort by energy          g  next grouping: workload, pod, namespace, unit, class, domain
a  sort by age             +  -  longer, shorter interval
Up Down PgUp PgDn Home End scroll
Space  read now            h  this help            q  quit""".splitlines()
_COLOURS = {Tone.WARNING: curses.COLOR_YELLOW, Tone.BAD: curses.COLOR_RED}
_DELAYS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# The heading and the line at the bottom, and what a terminal must have so that a row can be seen.
_LEAST_LINES = 6


def run(take: Callable[[], Sample], view: View, delay_s: float, iterations: int | None) -> int:
    """Show samples until the user quits, or ``iterations`` of them; return the exit status."""
    locale.setlocale(locale.LC_ALL, "")
    first = take()  # an error is to be seen after the command, not on a screen that is gone
    with _woken() as wake, _terminal() as window:
        _Top(_Terminal(window, wake), take, view, delay_s, iterations).run(first)
    return OK


@contextlib.contextmanager
def _woken() -> Iterator[int]:
    """Have signals end the program in an orderly way, or wake it: the descriptor is readable then."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, end)
    resized = signal.signal(signal.SIGWINCH, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGWINCH, resized)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def _terminal() -> Iterator[curses.window]:
    """The terminal, for curses; as it was before when the block ends."""
    try:
        window = curses.initscr()
    except curses.error as error:  # pragma: no cover - ncurses itself exits in most versions
        raise CommandError(f"cannot use the terminal {os.environ.get('TERM')!r}: {error}. Use --batch") from error
    try:
        curses.noecho()
        curses.cbreak()
        window.keypad(True)
        window.nodelay(True)
        with contextlib.suppress(curses.error):
            curses.curs_set(0)
        with contextlib.suppress(curses.error):
            curses.start_color()
            curses.use_default_colors()
        yield window
    finally:
        curses.endwin()


class _Terminal(NamedTuple):
    """The window, and a descriptor that is readable after a signal."""

    window: curses.window
    wake: int


class _Top:
    """The screen, and what the user has chosen. Samples are read in a thread, so that keys are answered at once."""

    def __init__(
        self,
        terminal: _Terminal,
        take: Callable[[], Sample],
        view: View,
        delay_s: float,
        iterations: int | None,
    ) -> None:
        self._window, self._wake = terminal
        self._take = take
        self._view = replace(view, is_rate=False)
        self._delay_s = delay_s
        self._left = iterations
        self._sample: Sample | None = None
        self._error = ""
        self._is_help = False
        self._offset = 0
        self._styles = _styles()
        self._found: queue.SimpleQueue[Sample | CommandError] = queue.SimpleQueue()
        self._is_reading = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)

    def run(self, first: Sample) -> None:
        """Show samples and follow keys until the end."""
        self._sample = first
        next_at = time.monotonic() + self._delay_s
        self._draw()
        while True:
            wait = None if self._is_reading else max(0.0, next_at - time.monotonic())
            ready, _, _ = select.select([sys.stdin, self._wake, self._reader], [], [], wait)
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._resize()
            if self._reader in ready:
                os.read(self._reader, 1)
                self._is_reading = False
                next_at = time.monotonic() + self._delay_s
                self._receive(self._found.get())
                if self._left == 0:
                    return
            if sys.stdin in ready:
                for key in iter(self._key, None):
                    if key == "q":
                        return
                    if key == " ":
                        next_at = 0.0
                    self._follow(key)
            if not self._is_reading and time.monotonic() >= next_at:
                self._is_reading = True
                threading.Thread(target=self._read, daemon=True).start()
            self._draw()

    def _read(self) -> None:
        try:
            self._found.put(self._take())
        except CommandError as error:
            self._found.put(error)
        except ArithmeticError:
            self._found.put(CommandError(INVALID_NUMBER))
        os.write(self._writer, b".")

    def _receive(self, found: Sample | CommandError) -> None:
        if isinstance(found, CommandError):
            self._error = str(found)  # the daemon may be restarting: the next reading may succeed
            return
        self._error = ""
        self._sample = found
        self._view = replace(self._view, is_rate=True)
        if self._left is not None:
            self._left -= 1

    def _key(self) -> str | None:
        try:
            key = self._window.get_wch()
        except curses.error:
            return None
        return key if isinstance(key, str) else curses.keyname(key).decode()

    def _follow(self, key: str) -> None:
        view, page = self._view, max(self._window.getmaxyx()[0] - _LEAST_LINES, 1)
        steps = {"KEY_UP": -1, "KEY_DOWN": 1, "KEY_PPAGE": -page, "KEY_NPAGE": page}
        was_help, self._is_help = self._is_help, False
        if key in _SORTS:
            self._view = replace(view, sort=_SORTS[key])
        elif key == "r":
            self._view = replace(view, is_reversed=not view.is_reversed)
        elif key == "g":
            self._view = replace(view, by=list(By)[(list(By).index(view.by) + 1) % len(By)])
        elif key == "+":
            self._delay_s = next((delay for delay in _DELAYS if delay > self._delay_s), self._delay_s)
        elif key == "-":
            self._delay_s = next((delay for delay in reversed(_DELAYS) if delay < self._delay_s), self._delay_s)
        elif key in ("h", "?"):
            self._is_help = not was_help
        elif key in steps:
            self._offset += steps[key]
        elif key in ("KEY_HOME", "KEY_END"):
            self._offset = 0 if key == "KEY_HOME" else sys.maxsize
        elif key == "\f":
            self._window.redrawwin()

    def _resize(self) -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        curses.resizeterm(size.lines, size.columns)
        # Draw everything anew: the terminal may have moved or cut the lines.
        self._window.clear()

    def _draw(self) -> None:
        height, width = self._window.getmaxyx()
        assert self._sample is not None
        rows = entries(self._sample.lines, self._view)
        # The lines above the rows, and the one at the bottom.
        status, machine = self._sample.status, self._sample.machine
        above = len(screen(rows, status, self._view, width, slice(0), machine=machine))
        room = max(height - above - 1, 0)
        self._offset = max(0, min(self._offset, len(rows) - room))
        shown = slice(self._offset, self._offset + room)
        lines = screen(rows, status, self._view, width, shown, machine=machine)
        if self._is_help:
            lines = [Painted(text) for text in _HELP]
        self._window.erase()
        for y, line in enumerate(lines[: height - 1]):
            self._write(y, line, width)
        self._write(height - 1, self._bottom(len(rows), room), width)
        self._window.refresh()

    def _bottom(self, rows: int, room: int) -> Painted:
        if self._error:
            return Painted(self._error, Tone.BAD)
        order = "reversed " if self._view.is_reversed else ""
        text = f"{order}by {self._view.sort}, every {self._delay_s:g} s"
        if rows > room > 0:
            text += f", rows {self._offset + 1} to {min(self._offset + room, rows)} of {rows}"
        return Painted(f"{text}. h: help, q: quit", Tone.FAINT)

    def _write(self, y: int, line: Painted, width: int) -> None:
        text = cut(line.text, width)
        if line.is_heading:
            text = text.ljust(width)
        encoding = locale.getpreferredencoding(False)
        text = text.encode(encoding, "replace").decode(encoding)
        style = curses.A_REVERSE if line.is_heading else self._styles[line.tone]
        # The last cell of the screen cannot be followed by the cursor: curses reports an error, and has drawn it.
        with contextlib.suppress(curses.error):
            self._window.addstr(y, 0, text, style)


def _styles() -> dict[Tone, int]:
    """Return the style of each tone; without colour if the terminal has none, or with NO_COLOR."""
    styles = {Tone.NORMAL: curses.A_NORMAL, Tone.FAINT: curses.A_DIM}
    has_colour = not os.environ.get("NO_COLOR")
    for number, (tone, colour) in enumerate(_COLOURS.items(), 1):
        styles[tone] = curses.A_BOLD
        if has_colour:
            with contextlib.suppress(curses.error, ValueError):
                curses.init_pair(number, colour, -1)
                styles[tone] = curses.color_pair(number)
    return styles
