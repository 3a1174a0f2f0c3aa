# SPDX-License-Identifier: Apache-2.0
"""Each errno of the kernel becomes the right typed error, with path, errno, the kernel's text and a remedy."""

from __future__ import annotations

import errno
import os

import pytest

from resctrlmond.resctrl.errors import (
    CREATE,
    ClassMismatch,
    GroupExists,
    KernelRefused,
    NoSuchGroup,
    NoSuchProcess,
    OutOfResources,
    PermissionDenied,
    ResctrlError,
    RmidsExhausted,
    from_oserror,
)

PATH = "/sys/fs/resctrl/mon_groups/a"
OTHER_CLASS = "Can't move task to different control group\nError while processing task 7\n"


def typed(number: int, status: str = "") -> ResctrlError:
    return from_oserror(OSError(number, os.strerror(number)), "do it", PATH, status)


@pytest.mark.parametrize(
    ("number", "status", "kind"),
    [
        (errno.ENOSPC, "Out of RMIDs\n", RmidsExhausted),
        (errno.EBUSY, "Out of RMIDs\n", RmidsExhausted),
        (errno.ENOSPC, "Kernel out of memory\n", KernelRefused),
        (errno.ENOSPC, "", KernelRefused),
        (errno.EBUSY, "ok\n", KernelRefused),
        (errno.EEXIST, "", GroupExists),
        (errno.EPERM, "No permission to move task 7\nError while processing task 7\n", PermissionDenied),
        (errno.EPERM, "Source must be a MON group\n", KernelRefused),
        (errno.EPERM, "", KernelRefused),
        (errno.EACCES, "", PermissionDenied),
        (errno.EINVAL, OTHER_CLASS, ClassMismatch),
        (errno.EINVAL, "Pseudo-locking in progress\n", KernelRefused),
        (errno.EINVAL, "", KernelRefused),
        (errno.ESRCH, "No task 7\nError while processing task 7\n", NoSuchProcess),
        (errno.ENODEV, "", NoSuchGroup),
        (errno.ENOENT, "", NoSuchGroup),
        (errno.ENOTDIR, "", NoSuchGroup),
        (errno.ENOTCONN, "", NoSuchGroup),
        (errno.ESTALE, "", NoSuchGroup),
        (errno.E2BIG, "", KernelRefused),
        *((number, "", OutOfResources) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)),
    ],
)
def test_every_errno_has_its_type(number: int, status: str, kind: type[ResctrlError]) -> None:
    error = typed(number, status)
    assert type(error) is kind
    assert (error.path, error.errno) == (PATH, number)
    assert error.message == "cannot do it"
    assert PATH in str(error)
    assert f"{os.strerror(number)} ({errno.errorcode[number]})" in str(error)


@pytest.mark.parametrize(("number", "in_limbo"), [(errno.EBUSY, True), (errno.ENOSPC, False)])
def test_exhaustion_distinguishes_limbo_from_full(number: int, in_limbo: bool) -> None:
    error = typed(number, "Out of RMIDs\n")
    assert isinstance(error, RmidsExhausted)
    assert error.in_limbo is in_limbo
    assert "the kernel says: Out of RMIDs. " in str(error)
    assert error.remedy
    assert str(error).endswith(error.remedy)


@pytest.mark.parametrize(("number", "in_limbo"), [(errno.EBUSY, True), (errno.ENOSPC, False)])
def test_exhaustion_is_recognized_without_the_status_text(number: int, in_limbo: bool) -> None:
    """It was KernelRefused, which made a workload fail that had only to wait."""
    error = from_oserror(OSError(number, os.strerror(number)), CREATE, PATH, "ok\n")
    assert isinstance(error, RmidsExhausted)
    assert (error.in_limbo, error.status) == (in_limbo, "")


def test_status_text_becomes_one_line() -> None:
    error = typed(errno.EINVAL, OTHER_CLASS)
    assert error.status == "Can't move task to different control group; Error while processing task 7"
    assert error.status in str(error)
    assert "--allow-class-change (allowClassChange)" in str(error)


@pytest.mark.parametrize("status", ["ok", "ok\n", "", "\n"])
def test_status_ok_is_not_reported(status: str) -> None:
    assert typed(errno.EINVAL, status).status == ""


@pytest.mark.parametrize(
    "number", [errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EMFILE, errno.E2BIG]
)
def test_status_text_of_another_command_is_not_used(number: int) -> None:
    error = typed(number, "Out of RMIDs\n")
    assert error.status == ""
    assert not isinstance(error, RmidsExhausted)
    assert "RMID" not in str(error)


def test_old_status_text_does_not_change_a_permission_error() -> None:
    assert type(typed(errno.EACCES, "Source must be a MON group\n")) is PermissionDenied


def test_str_has_the_path_once() -> None:
    assert str(ResctrlError("/a/b is bad", path="/a/b")) == "/a/b is bad"
    assert str(ResctrlError("is bad", path="/a/b", remedy="Mend it")) == "/a/b: is bad. Mend it"


def test_an_errno_without_a_name_is_a_number() -> None:
    assert "(524)" in str(ResctrlError("it failed", errno=524))
