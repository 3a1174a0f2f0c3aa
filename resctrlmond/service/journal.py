# SPDX-License-Identifier: Apache-2.0
"""Log to systemd's journal with structured fields, or to standard error if it does not lead to the journal."""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import re
import socket
import stat
import sys
from collections.abc import Mapping
from typing import Literal, TextIO

from resctrlmond.resctrl.errors import FORMAT_RANGES, ResctrlError

SOCKET_PATH = "/run/systemd/journal/socket"

# syslog(3) has a level between info and warning, for normal but significant events; logging has none.
NOTICE = 25
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": NOTICE,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# Lowest level of logging for each priority of syslog(3), most severe first.
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (NOTICE, 5), (logging.INFO, 6))

# Fields of systemd.journal-fields(7) that fields() leaves as they are.
_WELL_KNOWN = frozenset({"ERRNO", "MESSAGE_ID"})
# The journal refuses other names. A newline in a name would begin another field.
_FIELD_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")

# Messages contain input from outside. Control characters would control the reader's terminal, and format characters
# would display another text than was logged.
_FORMAT = {code: ascii(chr(code))[1:-1] for first, last in FORMAT_RANGES for code in range(first, last + 1)}
_CONTROLS = _FORMAT | {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def setup(
    level: str, identifier: str = "resctrlmond", socket_path: str = SOCKET_PATH
) -> Literal["journal", "console"]:
    """Send all logging of this process to the journal, or to standard error if that is not the journal's.

    ``level`` is a name of ``LEVELS`` for the loggers below "resctrlmond"; libraries log warnings and errors. Returns
    the LogTarget of org.freedesktop.LogControl1. A second call replaces the first.
    """
    logging.addLevelName(NOTICE, "NOTICE")
    root = logging.getLogger()
    for handler in [known for known in root.handlers if isinstance(known, JournalHandler | ConsoleHandler)]:
        root.removeHandler(handler)
        handler.close()
    journal = _stderr_is_journal() and _is_socket(socket_path)
    root.addHandler(JournalHandler(identifier, socket_path) if journal else ConsoleHandler(identifier))
    root.setLevel(logging.WARNING)
    set_level(level)
    return "journal" if journal else "console"


def set_level(level: str) -> None:
    """Set the lowest level to log, a name of ``LEVELS``. Raises KeyError for another name."""
    logging.getLogger("resctrlmond").setLevel(LEVELS[level])


def level() -> str:
    """Return the lowest level that is logged, as a name of ``LEVELS``."""
    current = logging.getLogger("resctrlmond").level
    return next((name for name, number in LEVELS.items() if number == current), "info")


def target() -> Literal["journal", "console"]:
    """Return the LogTarget of org.freedesktop.LogControl1."""
    handlers = logging.getLogger().handlers
    return "journal" if any(isinstance(handler, JournalHandler) for handler in handlers) else "console"


def fields(error: ResctrlError | OSError | None = None, /, **names: str | int | None) -> dict[str, dict[str, str]]:
    """Return the journal fields for ``extra`` of a logger: ``log.warning("…", extra=fields(error, key=key))``.

    Each name becomes the field RESCTRLMON_<NAME>, except ``errno`` and ``message_id``, which are fields of systemd.
    Values that are None or "" are left out. An error adds its path, errno and the kernel's status.
    """
    given = dict(names)
    if error is not None:
        path = error.path if isinstance(error, ResctrlError) else error.filename
        given.setdefault("path", None if path is None else os.fsdecode(path))
        given.setdefault("errno", error.errno or None)
    if isinstance(error, ResctrlError):
        given.setdefault("status", error.status)
    found = {}
    for name, value in given.items():
        upper = name.rstrip("_").upper()
        if value not in (None, ""):
            found[upper if upper in _WELL_KNOWN else f"RESCTRLMON_{upper}"] = str(value)
    return {"fields": found}


def printable_fields(entry: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of an entry with control and format characters escaped, as those of messages."""
    return {name: value.translate(_CONTROLS) for name, value in entry.items()}


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes lines ``resctrlmond: level: text`` to standard error; further lines of a message are indented."""

    def __init__(self, identifier: str) -> None:
        super().__init__()
        self._identifier = identifier

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).translate(_CONTROLS).replace("\n", "\n  ")
        return f"{self._identifier}: {record.levelname.lower()}: {text}"

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        # If a line cannot be written, a traceback cannot be written either. Every other error is a bug to report.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class JournalSocket:
    """Sends entries in the journal's native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL), and never waits."""

    def __init__(self, path: str = SOCKET_PATH) -> None:
        self._path = path
        # Not connected: the journal may create its socket again while the daemon runs.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def deliver(self, entry: Mapping[str, str]) -> bool:
        """Send an entry to the journal. Return whether the journal accepted it."""
        data = _encode(entry)
        try:
            self._socket.sendto(data, self._path)
            return True
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS):
                return False
        try:
            self._deliver_in_memory_file(data)
            return True
        except OSError:
            return False

    def _deliver_in_memory_file(self, data: bytes) -> None:
        """Send an entry that is too large for a datagram in a sealed memfd, with an empty datagram."""
        with open(os.memfd_create("journal-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as file:
            file.write(data)
            file.flush()
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            # Not socket.send_fds(): it drops the address.
            rights = array.array("i", [file.fileno()])
            self._socket.sendmsg([], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], 0, self._path)


class JournalHandler(logging.Handler):
    """Writes messages as entries of the journal.

    Never waits: an entry that the journal does not accept at once is dropped. The number of dropped entries is logged
    before the next entry that the journal accepts.
    """

    def __init__(self, identifier: str, socket_path: str = SOCKET_PATH) -> None:
        super().__init__()
        self._identifier = identifier
        self._journal = JournalSocket(socket_path)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            entry = self._entry(record)
        except Exception:
            # A message that does not match its arguments is a bug to report, not a reason to stop.
            self.handleError(record)
            return
        if self._lost and self._journal.deliver(self._loss()):
            self._lost = 0
        if self._lost or not self._journal.deliver(entry):
            self._lost += 1

    def close(self) -> None:
        self._journal.close()
        super().close()

    def _entry(self, record: logging.LogRecord) -> dict[str, str]:
        extra = getattr(record, "fields", {})
        return {name: value.translate(_FORMAT) for name, value in extra.items() if _FIELD_NAME.fullmatch(name)} | {
            "MESSAGE": self.format(record).translate(_CONTROLS),
            "PRIORITY": str(_priority(record.levelno)),
            "SYSLOG_IDENTIFIER": self._identifier,
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
            "CODE_FUNC": record.funcName or "",
        }

    def _loss(self) -> dict[str, str]:
        return {
            "MESSAGE": f"{self._lost} messages are missing here: the journal did not take them",
            "PRIORITY": str(_priority(logging.WARNING)),
            "SYSLOG_IDENTIFIER": self._identifier,
        }


def _encode(entry: Mapping[str, str]) -> bytes:
    """Encode an entry: a line ``NAME=value`` each; a value of several lines follows its length (64 bits)."""
    parts = []
    for name, value in entry.items():
        # Python has lone surrogates for the bytes of file names that are not UTF-8.
        data = value.encode("utf-8", "backslashreplace")
        if b"\n" in data:
            parts.append(b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data))
        else:
            parts.append(b"%s=%s\n" % (name.encode(), data))
    return b"".join(parts)


def _priority(level: int) -> int:
    """Return the priority of syslog(3) for a level of logging."""
    return next((priority for lowest, priority in _PRIORITIES if level >= lowest), 7)


def _stderr_is_journal() -> bool:
    """Return whether standard error leads to the journal: $JOURNAL_STREAM is its device and inode."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False
