# SPDX-License-Identifier: Apache-2.0
"""Expected errnos of resctrl and /proc become typed errors here, and nowhere else."""

from __future__ import annotations

import contextlib
import errno as errno_
import logging
import os
from collections.abc import Iterator

_log = logging.getLogger(__name__)


# Characters that show nothing and change how others are shown: Unicode's categories Cf, Zl and Zp. U+202E turns the
# text around it, U+200B makes two different names look the same.
FORMAT_RANGES = (
    *((0x00AD, 0x00AD), (0x0600, 0x0605), (0x061C, 0x061C), (0x06DD, 0x06DD), (0x070F, 0x070F), (0x0890, 0x0891)),
    *((0x08E2, 0x08E2), (0x180E, 0x180E), (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F), (0xFEFF, 0xFEFF)),
    *((0xFFF9, 0xFFFB), (0x110BD, 0x110BD), (0x110CD, 0x110CD), (0x13430, 0x1343F), (0x1BCA0, 0x1BCA3)),
    *((0x1D173, 0x1D17A), (0xE0000, 0xE007F)),
)


def printable(text: str) -> str:
    """The text with everything escaped that is not plainly visible.

    Paths hold what others called their control groups: such text goes to terminals and the journal, and as a reason
    into records, which are UTF-8.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


class ResctrlError(Exception):
    """The root of every error that a caller can act on.

    ``message`` says what failed and why, ``path`` where, ``errno`` what the system call said (0: no system call
    failed), ``status`` what the kernel wrote to ``info/last_cmd_status`` for it ("" where it said nothing), and
    ``remedy`` what to do about it ("" where there is nothing to do).
    """

    def __init__(self, message: str, *, path: str = "", errno: int = 0, status: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.errno = errno
        self.status = status
        self.remedy = remedy

    def __str__(self) -> str:
        text = self.message
        if self.path and self.path not in text:
            text = f"{self.path}: {text}"
        if self.errno:
            text += f": {os.strerror(self.errno)} ({errno_.errorcode.get(self.errno, self.errno)})"
        if self.status:
            text += f"; the kernel says: {self.status}"
        if self.remedy:
            text += f". {self.remedy}"
        return printable(text)


class NotMounted(ResctrlError):
    """The path is no resctrl filesystem: nothing is mounted there, or something else is."""


class MonitoringUnavailable(ResctrlError):
    """resctrl is mounted, but offers no monitoring: no ``info/*_MON``."""


class NoSuchGroup(ResctrlError):
    """The monitoring group is not there, or went away during the call."""


class GroupExists(ResctrlError):
    """A directory of that name stands there already."""


class NoSuchClass(ResctrlError):
    """The control group (class) is not there."""


class ClassMismatch(ResctrlError):
    """The task is in another class than the group: the kernel moves no task between classes through a mon_group."""


class RmidsExhausted(ResctrlError):
    """No RMID is free. ``in_limbo``: freed ones wait for their cache lines to drain (EBUSY), retry in 1 to 2 s."""

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        errno: int = 0,
        status: str = "",
        remedy: str = "",
        in_limbo: bool = False,
    ) -> None:
        super().__init__(message, path=path, errno=errno, status=status, remedy=remedy)
        self.in_limbo = in_limbo


class NoSuchProcess(ResctrlError):
    """The process or thread does not exist (any more)."""


class ProcessChanged(ResctrlError):
    """The process ended while it was being moved and its number may belong to another one by now."""


class PermissionDenied(ResctrlError):
    """The caller may not do this, or nobody may (process 1, kernel threads, resctrlmond itself)."""


class KernelRefused(ResctrlError):
    """The kernel refused for a reason of its own: ``status`` has its words."""


class OutOfResources(ResctrlError):
    """resctrlmond or the machine lacks descriptors or memory, whatever the object is. A later call may succeed."""


class NotRead(ResctrlError):
    """What the answer rests on cannot be read: a file of /proc, of a control group, or of ours under /run."""


# What we lack passes, and says nothing of the file: who cannot open a file does not know what is in it.
LACKS = frozenset({errno_.EMFILE, errno_.ENFILE, errno_.ENOMEM, errno_.ENOSPC, errno_.EINTR, errno_.EAGAIN})
_RESOURCES = frozenset({errno_.EMFILE, errno_.ENFILE, errno_.ENOMEM})
_REMEDIES = {
    errno_.EMFILE: "resctrlmond holds as many files as it may: see LimitNOFILE= of its unit",
    errno_.ENFILE: "The machine holds as many files as it can: see /proc/sys/fs/file-nr and who holds them",
    errno_.ENOMEM: "The kernel is out of memory: see 'free -m' and the kernel's log",
    errno_.EIO: "The kernel's log (journalctl -k) may say more; what has passed by then is tried again",
}


def remedy_for(number: int) -> str:
    """What to do about an errno that says nothing of the file, "" for all others."""
    return _REMEDIES.get(number, "")


def not_read(error: OSError, what: str, path: str = "") -> NotRead:
    """The typed error for what could not be read; ``path`` is where, if the error itself says none."""
    number = error.errno or 0
    where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else path
    return NotRead(f"cannot {what}", path=where, errno=number, remedy=remedy_for(number))


@contextlib.contextmanager
def reading(what: str, path: str) -> Iterator[None]:
    """Turn every OSError in here into NotRead: those that say something of the file are taken before."""
    try:
        yield
    except OSError as error:
        raise not_read(error, what, path) from error


# The kernel's text for a task whose closid is not that of the mon_group's parent
# (fs/resctrl/rdtgroup.c, __rdtgroup_move_task()).
OTHER_CLASS_REMEDY = (
    'Use the class "follow", or --allow-class-change (allowClassChange) to move the process to that class'
)
CREATE = "create the monitoring group"
_OTHER_CLASS = "Can't move task to different control group"
# resctrl itself gives these with words. Others come from the layers above it, which leave the text of whatever
# command was the last one: a stale word would explain them wrongly.
_WITH_WORDS = frozenset({errno_.EINVAL, errno_.EPERM, errno_.ENOSPC, errno_.EBUSY, errno_.ESRCH})
# Gone: removed (ENODEV for who has it open, ESTALE where the simulator made another in its place), never there, a
# file in its place, or a simulator that died.
_GONE = frozenset({errno_.ENODEV, errno_.ENOENT, errno_.ENOTDIR, errno_.ESTALE, errno_.ENOTCONN})


def no_rmid_remedy(in_limbo: bool) -> str:
    """What to do if no RMID is free; ``in_limbo``: freed ones wait for their cache lines to drain."""
    if in_limbo:
        return "RMIDs that were freed become available again in 1 to 2 s"
    return (
        "Release a workload that is not needed: 'resctrlctl list' shows every monitoring group, which holds one RMID"
    )


def from_oserror(error: OSError, what: str, path: str, status: str = "") -> ResctrlError:
    """The typed error for what a system call on resctrl or /proc answered.

    ``what`` is the failed action in words ("create the monitoring group"), ``path`` the file or directory it was
    tried on, ``status`` the text of ``info/last_cmd_status`` read straight after it ("ok" counts as nothing said).
    """
    number = error.errno or 0
    spoken = number in _WITH_WORDS and status.strip() not in ("", "ok")
    said = "; ".join(status.strip().splitlines()) if spoken else ""
    message = f"cannot {what}"

    def make(kind: type[ResctrlError], remedy: str = "") -> ResctrlError:
        return kind(message, path=path, errno=number, status=said, remedy=remedy)

    # Where somebody else's operation took the words away: mkdir of a monitoring group gives these for nothing else.
    unsaid = not said and what == CREATE
    if number in (errno_.ENOSPC, errno_.EBUSY) and (unsaid or "Out of RMIDs" in said):
        # Same text for both: EBUSY when freed RMIDs are in limbo, ENOSPC when all are in use (alloc_rmid()).
        limbo = number == errno_.EBUSY
        return RmidsExhausted(
            message,
            path=path,
            errno=number,
            status=said,
            in_limbo=limbo,
            remedy=no_rmid_remedy(limbo),
        )
    if number == errno_.EINVAL and _OTHER_CLASS in said:
        return make(ClassMismatch, OTHER_CLASS_REMEDY)
    if number == errno_.ESRCH:
        return make(NoSuchProcess)
    if number in _GONE:
        return make(NoSuchGroup)
    if number == errno_.EEXIST:
        return make(GroupExists)
    # Who may not use a file gets EACCES. EPERM is a rule of resctrl for everybody (a wrong place; rename before
    # Linux 6.5, without a word), except for a task of another user.
    if number == errno_.EACCES or (number == errno_.EPERM and "permission" in said):
        return make(PermissionDenied)
    if number in _RESOURCES:
        return make(OutOfResources, remedy_for(number))
    return make(KernelRefused)


@contextlib.contextmanager
def undoing(what: str) -> Iterator[None]:
    """Undo a part of a call that failed: an error of that is logged, and does not hide the error that led here."""
    try:
        yield
    except (ResctrlError, OSError) as error:
        _log.error("%s: cannot undo what a failed call did: %s", printable(what), error)
