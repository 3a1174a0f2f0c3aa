# SPDX-License-Identifier: Apache-2.0
"""Entries in the journal, received by a real datagram socket in its place, and lines on standard error."""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.configuration.config import parse
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.resctrl.errors import KernelRefused
from resctrlmond.service import journal
from resctrlmond.service.journal import NOTICE, ConsoleHandler, JournalHandler, fields, setup

LOG = logging.getLogger("resctrlmond.test")


def decoded(data: bytes) -> dict[str, bytes]:
    """Return the fields of an entry in the journal's native protocol; a duplicate field is an error."""
    found: dict[str, bytes] = {}
    while data:
        line, data = data.split(b"\n", 1)
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(data[:8], "little")
            value, end, data = data[8 : 8 + size], data[8 + size : 9 + size], data[9 + size :]
            assert end == b"\n"
        assert name.decode() not in found
        found[name.decode()] = value
    return found


class Journal:
    """A datagram socket in the place of the journal's."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(5)

    def entry(self) -> dict[str, bytes]:
        """Return the next entry."""
        data, ancillary, flags, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
        assert not flags & socket.MSG_TRUNC
        assert not ancillary
        return decoded(data)

    def entry_in_memory_file(self) -> tuple[dict[str, bytes], int]:
        """Return the entry in the memfd of a datagram without data, and the memfd's seals."""
        data, ancillary, _, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
        assert data == b""
        rights = array.array("i", ancillary[0][2])
        with open(rights[0], "rb") as file:
            seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
            return decoded(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)), seals

    def entries(self) -> list[dict[str, bytes]]:
        """Return all entries that have arrived."""
        self.socket.setblocking(False)
        found = []
        try:
            while True:
                found.append(self.entry())
        except BlockingIOError:
            self.socket.settimeout(5)
            return found


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Journal]:
    receiver = Journal(tmp_path / "socket")
    yield receiver
    receiver.socket.close()


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the handlers and levels of logging after a test."""
    root, own = logging.getLogger(), logging.getLogger("resctrlmond")
    before = list(root.handlers), root.level, own.level
    yield
    for handler in set(root.handlers) - set(before[0]):
        handler.close()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


@pytest.fixture
def to_journal(receiver: Journal, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Log to the journal's socket, and return it."""
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    assert setup("debug", socket_path=receiver.path) == "journal"
    return receiver


def test_format_characters_are_escaped_in_the_journal(to_journal: Journal) -> None:
    LOG.warning("pod %s", "a\u202eb\u200b", extra=fields(key="k\u2066"))
    entry = to_journal.entry()
    assert entry["MESSAGE"] == rb"pod a\u202eb\u200b"
    assert entry["RESCTRLMON_KEY"] == rb"k\u2066"


def test_entry_has_message_priority_identifier_and_code_location(to_journal: Journal) -> None:
    LOG.info("created the group %s", "abc")
    entry = to_journal.entry()
    assert entry.pop("CODE_FILE") == __file__.encode()
    assert int(entry.pop("CODE_LINE")) > 1
    assert entry == {
        "MESSAGE": b"created the group abc",
        "PRIORITY": b"6",
        "SYSLOG_IDENTIFIER": b"resctrlmond",
        "CODE_FUNC": b"test_entry_has_message_priority_identifier_and_code_location",
    }


@pytest.mark.parametrize(
    ("level", "priority"),
    [("debug", b"7"), ("info", b"6"), ("notice", b"5"), ("warning", b"4"), ("error", b"3")],
)
def test_levels_are_syslog_priorities(to_journal: Journal, level: str, priority: bytes) -> None:
    LOG.log(journal.LEVELS[level], "x")
    assert to_journal.entry()["PRIORITY"] == priority


def test_levels_of_the_configuration_are_those_of_logging() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(b"log_level: x", "f")
    assert caught.value.remedy == f"Expected one of {', '.join(journal.LEVELS)}"


def test_level_applies_to_the_daemon_and_libraries_only_log_warnings(to_journal: Journal) -> None:
    journal.set_level("notice")
    LOG.info("no")
    LOG.log(NOTICE, "yes")
    logging.getLogger("dbus_fast").info("no")
    logging.getLogger("dbus_fast").warning("yes too")
    assert [entry["MESSAGE"] for entry in to_journal.entries()] == [b"yes", b"yes too"]
    with pytest.raises(KeyError):
        journal.set_level("loud")


def test_fields_are_structured(to_journal: Journal) -> None:
    LOG.warning("x", extra=fields(key="k", class_="gold", path="/a", errno=28, message_id="f" * 32, passes=0))
    entry = to_journal.entry()
    assert {name: entry[name] for name in entry if name.startswith(("RESCTRLMON_", "ERRNO", "MESSAGE_ID"))} == {
        "RESCTRLMON_KEY": b"k",
        "RESCTRLMON_CLASS": b"gold",
        "RESCTRLMON_PATH": b"/a",
        "RESCTRLMON_PASSES": b"0",
        "ERRNO": b"28",
        "MESSAGE_ID": b"f" * 32,
    }


def test_fields_of_an_error() -> None:
    error = KernelRefused("cannot x", path="/p", errno=22, status="no", remedy="r")
    assert fields(error, key="k") == {
        "fields": {
            "RESCTRLMON_KEY": "k",
            "RESCTRLMON_PATH": "/p",
            "ERRNO": "22",
            "RESCTRLMON_STATUS": "no",
        }
    }
    assert fields(KernelRefused("x"), path=None, key="") == {"fields": {}}
    assert fields(OSError(2, "x", b"/b"), path="/mine") == {"fields": {"RESCTRLMON_PATH": "/mine", "ERRNO": "2"}}
    assert fields(OSError(2, "x", b"/b")) == {"fields": {"RESCTRLMON_PATH": "/b", "ERRNO": "2"}}
    assert fields() == {"fields": {}}


def test_message_of_several_lines_is_a_single_entry(to_journal: Journal) -> None:
    LOG.error("one\nPRIORITY=0\n\ntwo", extra={"fields": {"RESCTRLMON_KEY": "a\nMESSAGE=forged"}})
    entry = to_journal.entry()
    assert entry["MESSAGE"] == b"one\nPRIORITY=0\n\ntwo"
    assert entry["RESCTRLMON_KEY"] == b"a\nMESSAGE=forged"
    assert entry["PRIORITY"] == b"3"


def test_traceback_is_in_the_message(to_journal: Journal) -> None:
    try:
        raise OSError(5, "broken")
    except OSError:
        LOG.exception("it failed")
    message = to_journal.entry()["MESSAGE"].decode()
    assert message.startswith("it failed\nTraceback (most recent call last):\n")
    assert message.endswith("OSError: [Errno 5] broken")


def test_terminal_control_characters_are_escaped(to_journal: Journal) -> None:
    LOG.error("a\x1b[31m\x00\x9b\tb\udcff")
    assert to_journal.entry()["MESSAGE"] == b"a\\x1b[31m\\x00\\x9b\tb\\udcff"


def test_fields_cannot_forge_names(to_journal: Journal) -> None:
    LOG.error("x", extra={"fields": {"A\nPRIORITY": "0", "_UID": "0", "a": "1", "": "2", "PRIORITY": "0", "OK": "3"}})
    entry = to_journal.entry()
    assert entry["PRIORITY"] == b"3"
    assert set(entry) == {"MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "CODE_FILE", "CODE_LINE", "CODE_FUNC", "OK"}


@given(st.text(), st.dictionaries(st.from_regex(r"\A[A-Z][A-Z0-9_]{0,10}\Z"), st.text(), max_size=4))
def test_any_text_is_unchanged_by_encoding(message: str, extra: dict[str, str]) -> None:
    entry = decoded(journal._encode(extra | {"MESSAGE": message}))
    assert entry == {
        name: value.encode("utf-8", "backslashreplace") for name, value in (extra | {"MESSAGE": message}).items()
    }


def test_large_entry_is_sent_in_a_sealed_memfd(to_journal: Journal) -> None:
    before = len(os.listdir("/proc/self/fd"))
    LOG.error("x" * 3_000_000, extra=fields(key="k"))
    entry, seals = to_journal.entry_in_memory_file()
    assert entry["MESSAGE"] == b"x" * 3_000_000
    assert entry["RESCTRLMON_KEY"] == b"k"
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    assert len(os.listdir("/proc/self/fd")) == before


def test_full_socket_never_blocks_and_the_loss_is_reported(to_journal: Journal) -> None:
    # A blocking socket would wait for ever, because nothing reads from the other one meanwhile.
    for number in range(2000):
        LOG.info("message %d", number)
    LOG.info("large %s", "x" * 3_000_000)
    received = len(to_journal.entries())
    assert 0 < received < 2000
    LOG.info("after")
    report, after = to_journal.entries()
    assert report["MESSAGE"].startswith(b"%d messages are missing here" % (2001 - received))
    assert report["PRIORITY"] == b"4"
    assert after["MESSAGE"] == b"after"
    LOG.info("and no more")
    assert [entry["MESSAGE"] for entry in to_journal.entries()] == [b"and no more"]


def test_journal_that_is_created_again_is_found(to_journal: Journal, tmp_path: Path) -> None:
    to_journal.socket.close()
    LOG.info("without a listener")
    os.unlink(to_journal.path)
    LOG.info("no socket")
    recreated = Journal(tmp_path / "socket")
    try:
        LOG.info("back")
        report, back = recreated.entries()
    finally:
        recreated.socket.close()
    assert report["MESSAGE"].startswith(b"2 messages")
    assert back["MESSAGE"] == b"back"


def test_message_that_cannot_be_formatted_does_not_affect_others(
    receiver: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = JournalHandler("resctrlmond", receiver.path)
    handler.handle(LOG.makeRecord("n", logging.INFO, "f", 1, "%d", ("x",), None))
    handler.handle(LOG.makeRecord("n", logging.INFO, "f", 1, "next", (), None))
    handler.close()
    assert [entry["MESSAGE"] for entry in receiver.entries()] == [b"next"]
    assert "TypeError" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [None, "", "1:2", "x"])
def test_stderr_that_is_not_the_journal_gets_plain_lines(
    receiver: Journal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: str | None
) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    if stream is not None:
        monkeypatch.setenv("JOURNAL_STREAM", stream)
    assert setup("info", socket_path=receiver.path) == "console"
    LOG.warning("one\n<0>two\x1b[m", extra=fields(key="k"))
    LOG.log(NOTICE, "three")
    LOG.debug("no")
    assert capsys.readouterr().err == "resctrlmond: warning: one\n  <0>two\\x1b[m\nresctrlmond: notice: three\n"
    assert receiver.entries() == []


def test_journal_without_its_socket_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    (tmp_path / "file").touch()
    assert setup("info", socket_path=str(tmp_path / "none")) == "console"
    assert setup("info", socket_path=str(tmp_path / "file")) == "console"


def test_closed_standard_error_is_not_the_journal(receiver: Journal) -> None:
    program = (
        "import os; os.close(2); os.environ['JOURNAL_STREAM'] = '1:2'\n"
        "from resctrlmond.service.journal import setup\n"
        f"assert setup('info', socket_path={receiver.path!r}) == 'console'\n"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", program]) == 0


def test_second_setup_replaces_the_first(to_journal: Journal) -> None:
    assert setup("info", "resctrlmond-nri", to_journal.path) == "journal"
    LOG.info("once")
    assert [entry["SYSLOG_IDENTIFIER"] for entry in to_journal.entries()] == [b"resctrlmond-nri"]
    own_kinds = JournalHandler | ConsoleHandler
    assert len([handler for handler in logging.getLogger().handlers if isinstance(handler, own_kinds)]) == 1


def test_line_that_cannot_be_written_does_not_affect_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    handler = ConsoleHandler("resctrlmond")
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as full:  # close() fails, too
        handler.stream = full
        handler.handle(logging.LogRecord("x", logging.ERROR, __file__, 1, "lost", (), None))
    handler.stream = sys.stderr
    handler.handle(logging.LogRecord("x", logging.ERROR, __file__, 1, "written", (), None))
    assert capsys.readouterr().err == "resctrlmond: error: written\n"
