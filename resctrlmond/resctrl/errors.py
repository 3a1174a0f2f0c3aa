# SPDX-License-Identifier: Apache-2.0
"""Convert the errnos of resctrl and /proc to typed errors."""

from __future__ import annotations

import errno as errno_
import os
from collections.abc import Callable
from types import TracebackType

# Invisible characters that change how others are displayed: Unicode's categories Cf, Zl and Zp. U+202E reverses the
# text after it, U+200B makes two different names look the same.
FORMAT_RANGES = (
    *((0x00AD, 0x00AD), (0x0600, 0x0605), (0x061C, 0x061C), (0x06DD, 0x06DD), (0x070F, 0x070F), (0x0890, 0x0891)),
    *((0x08E2, 0x08E2), (0x180E, 0x180E), (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F), (0xFEFF, 0xFEFF)),
    *((0xFFF9, 0xFFFB), (0x110BD, 0x110BD), (0x110CD, 0x110CD), (0x13430, 0x1343F), (0x1BCA0, 0x1BCA3)),
    *((0x1D173, 0x1D17A), (0xE0000, 0xE007F)),
)


def printable(text: str) -> str:
    """Return the text with all characters escaped that are not plainly visible.

    Other users choose the names of their control groups, and these names appear in terminals, in the journal and, as
    reasons, in records, which are UTF-8.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


class ResctrlError(Exception):
    """The base class of all errors that a caller can act on.

    ``message``: what failed and why. ``path``: the object. ``errno``: the errno of the system call, 0 if none failed.
    ``status``: the kernel's text in ``info/last_cmd_status``, "" if there is none. ``remedy``: what to do, "" if
    nothing can be done.
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
    """The path is not a resctrl filesystem: nothing is mounted there, or another filesystem is."""


class MonitoringUnavailable(ResctrlError):
    """resctrl is mounted, but offers no monitoring: no ``info/*_MON``."""


class NoSuchGroup(ResctrlError):
    """The monitoring group does not exist, or was removed during the call."""


class GroupExists(ResctrlError):
    """A directory with that name exists already."""


class NoSuchClass(ResctrlError):
    """The control group (class) does not exist."""


class ClassMismatch(ResctrlError):
    """The task is not in the group's class: a write to a mon_group does not move tasks between classes."""


class RmidsExhausted(ResctrlError):
    """No RMID is free. ``in_limbo``: freed RMIDs wait until their cache lines drain (EBUSY); retry after a second."""

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
    """The process or thread does not exist, or has ended."""


class ProcessChanged(ResctrlError):
    """The process ended while it was moved, and its number may belong to another process now."""


class PermissionDenied(ResctrlError):
    """The caller may not do this, or no caller may (process 1, kernel threads, resctrlmond itself)."""


class KernelRefused(ResctrlError):
    """The kernel refused the operation for another reason, which ``status`` has in its words."""


class OutOfResources(ResctrlError):
    """resctrlmond or the host lacks descriptors or memory. A later call may succeed."""


class NotRead(ResctrlError):
    """A file of /proc, of a control group, or of the daemon under /run cannot be read, so the result is unknown."""


# Temporary errors that are caused by a lack of resources, and not by the file.
LACKS = frozenset({errno_.EMFILE, errno_.ENFILE, errno_.ENOMEM, errno_.ENOSPC, errno_.EINTR, errno_.EAGAIN})
_RESOURCES = frozenset({errno_.EMFILE, errno_.ENFILE, errno_.ENOMEM})
_REMEDIES = {
    errno_.EMFILE: "resctrlmond has as many open files as it may: see LimitNOFILE= of its unit",
    errno_.ENFILE: "The host has as many open files as it can: see /proc/sys/fs/file-nr and 'lsof'",
    errno_.ENOMEM: "The kernel is out of memory: see 'free -m' and the kernel's log",
    errno_.EIO: "The kernel's log (journalctl -k) may show the cause",
}


def remedy_for(number: int) -> str:
    """Return what to do about an errno that is not about the file, "" for all others."""
    return _REMEDIES.get(number, "")


def not_read(error: OSError, what: str, path: str = "") -> NotRead:
    """Return the typed error for a failed read. ``path`` is used if the error has no file name."""
    number = error.errno or 0
    where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else path
    return NotRead(f"cannot {what}", path=where, errno=number, remedy=remedy_for(number))


class Converted:
    """Converts each OSError of the block, by a call of ``convert`` with the error and ``arguments``.

    A class, because a generator takes several times as long, and each verb enters tens of such blocks.
    """

    __slots__ = ("_arguments", "_convert")

    def __init__(self, convert: Callable[..., ResctrlError], *arguments: str) -> None:
        self._convert = convert
        self._arguments = arguments

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            raise self._convert(error, *self._arguments) from error


def reading(what: str, path: str) -> Converted:
    """Convert each OSError of the block to NotRead. The block handles the errors that are about the file."""
    return Converted(not_read, what, path)


# The kernel's text for a task whose closid differs from that of the mon_group's parent
# (fs/resctrl/rdtgroup.c, __rdtgroup_move_task()).
OTHER_CLASS_REMEDY = (
    'Use the class "follow", or --allow-class-change (allowClassChange) to move the process to that class'
)
CREATE = "create the monitoring group"
_OTHER_CLASS = "Can't move task to different control group"
# resctrl writes a text for these errnos. Others come from the layers above it, which leave the text of an earlier
# command, and that would be the wrong explanation.
_WITH_STATUS = frozenset({errno_.EINVAL, errno_.EPERM, errno_.ENOSPC, errno_.EBUSY, errno_.ESRCH})
# The group was removed (ENODEV if it is open, ESTALE if the simulator has created another one in its place), never
# existed, has a file in its place, or the simulator has died.
_GONE = frozenset({errno_.ENODEV, errno_.ENOENT, errno_.ENOTDIR, errno_.ESTALE, errno_.ENOTCONN})


def no_rmid_remedy(in_limbo: bool) -> str:
    """Return what to do if no RMID is free; ``in_limbo``: freed RMIDs wait until their cache lines drain."""
    if in_limbo:
        return "RMIDs that were freed become available again after at least 1 s, when their cache lines are gone"
    return (
        "Release a workload that is no longer needed. 'resctrlctl list --all' shows all monitoring groups; "
        "each of them holds one RMID"
    )


def from_oserror(error: OSError, what: str, path: str, status: str = "") -> ResctrlError:
    """Return the typed error for a failed system call on resctrl or /proc.

    ``what``: the failed action ("create the monitoring group"). ``path``: its file or directory. ``status``: the text
    of ``info/last_cmd_status``, read right after the call; "ok" counts as no text.
    """
    number = error.errno or 0
    has_text = number in _WITH_STATUS and status.strip() not in ("", "ok")
    kernel_text = "; ".join(status.strip().splitlines()) if has_text else ""
    message = f"cannot {what}"

    def make(kind: type[ResctrlError], remedy: str = "") -> ResctrlError:
        return kind(message, path=path, errno=number, status=kernel_text, remedy=remedy)

    # Another program may have cleared the text. mkdir of a monitoring group has no other reason for these errnos.
    is_without_text = not kernel_text and what == CREATE
    if number in (errno_.ENOSPC, errno_.EBUSY) and (is_without_text or "Out of RMIDs" in kernel_text):
        # The text is the same for EBUSY (freed RMIDs are in limbo) and ENOSPC (all are in use), see alloc_rmid().
        limbo = number == errno_.EBUSY
        return RmidsExhausted(
            message,
            path=path,
            errno=number,
            status=kernel_text,
            in_limbo=limbo,
            remedy=no_rmid_remedy(limbo),
        )
    if number == errno_.EINVAL and _OTHER_CLASS in kernel_text:
        return make(ClassMismatch, OTHER_CLASS_REMEDY)
    if number == errno_.ESRCH:
        return make(NoSuchProcess)
    if number in _GONE:
        return make(NoSuchGroup)
    if number == errno_.EEXIST:
        return make(GroupExists)
    # EACCES means missing permissions. EPERM is a rule of resctrl for all users (a wrong place; rename before
    # Linux 6.5, without a text), except for a task of another user.
    if number == errno_.EACCES or (number == errno_.EPERM and "permission" in kernel_text):
        return make(PermissionDenied)
    if number in _RESOURCES:
        return make(OutOfResources, remedy_for(number))
    return make(KernelRefused)
