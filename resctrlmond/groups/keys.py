# SPDX-License-Identifier: Apache-2.0
"""Which names may stand for workloads, members and classes, checked before they meet a path."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

from resctrlmond.groups.errors import InvalidAttributes, InvalidClass, InvalidKey, InvalidRequest
from resctrlmond.resctrl.errors import FORMAT_RANGES

# A record is "<key>.json" plus the suffix of a temporary file in one name of at most 255 bytes (NAME_MAX).
MAX_KEY_LENGTH = 200
MAX_MEMBER_LENGTH = 255
MAX_CLASS_BYTES = 255

MAX_WORD_LENGTH = 128
MAX_ATTRIBUTES = 64
MAX_ATTRIBUTE_NAME_LENGTH = 128
MAX_ATTRIBUTE_LENGTH = 4096
# Of all names and values in UTF-8: many times what the labels and annotations of a real pod take.
MAX_ATTRIBUTES_BYTES = 64 * 1024
MAX_REASON_LENGTH = 512
MAX_PRIORITY = 1000

# The directories that resctrl itself makes in a control group.
_RESCTRL_DIRECTORIES = frozenset({"info", "mon_data", "mon_groups"})

# Every name that resctrl makes in a group, with all mount options (fs/resctrl/rdtgroup.c,
# res_common_files[]). A key of that name would be mistaken for the file by whoever lists the tree.
_RESCTRL_NAMES = _RESCTRL_DIRECTORIES | {
    "cpus",
    "cpus_list",
    "ctrl_hw_id",
    "mba_MBps_event",
    "mbm_L3_assignments",
    "mode",
    "mon_hw_id",
    "schemata",
    "size",
    "tasks",
}

# What systemd allows in a unit's name (systemd.unit(5)), and "+,=~", which other names are known to hold.
# "." and "-" do not begin a key: hidden files, ".." and options of commands do.
_KEY = re.compile(r"[A-Za-z0-9@:_\\+,=~][A-Za-z0-9@:._\-\\+,=~]*")
_POD_UID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}|[0-9A-Fa-f]{32}")
# runc's rule for container ids (libcontainer/factory_linux.go, idRegex), and what systemd allows in a unit's name:
# a control group that is assigned as a whole goes by its own. No traversal.
_MEMBER = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9_.+@:\\-]+")
# Control characters end lines and drive terminals, format characters (U+202E, U+200B) make a text look like another
# one, and lone surrogates cannot be written as UTF-8.
_FORMAT = "".join(f"{chr(first)}-{chr(last)}" for first, last in FORMAT_RANGES)
_UNPRINTABLE = re.compile(f"[\x00-\x1f\x7f-\x9f\ud800-\udfff{_FORMAT}]")


def is_pod_uid(text: str) -> bool:
    """Whether the text is a Kubernetes pod UID, dashed (8-4-4-4-12) or compact (32 digits), in any case.

    Static pods have compact ones: the kubelet takes the MD5 of their manifest. UUID version and variant are
    not looked at. A container id has 64 digits and is none.
    """
    return _POD_UID.fullmatch(text) is not None


def canonical_key(text: str) -> str:
    """The one spelling of a workload's key; pod UIDs become dashed lower case, all others stay as they are.

    A key is 1 to 200 characters, of ASCII letters, digits and ``@:._-\\+,=~``, begins with neither ``.`` nor
    ``-``, and is no name that resctrl uses itself. It is safe as one part of a path. Raises InvalidKey.
    """
    if is_pod_uid(text):
        digits = text.replace("-", "").lower()
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    if not text:
        raise InvalidKey("the key is empty", remedy="Name the workload by pod UID, container id or unit")
    if len(text) > MAX_KEY_LENGTH:
        raise InvalidKey(f"the key {text[:64]!a}... has {len(text)} characters, more than {MAX_KEY_LENGTH}")
    if _KEY.fullmatch(text) is None:
        raise InvalidKey(
            f"the key {text!a} contains a character that is not allowed",
            remedy="Use ASCII letters, digits and @:._-\\+,=~, and begin with neither '.' nor '-'",
        )
    if text in _RESCTRL_NAMES:
        raise InvalidKey(f"the key {text!a} is a name that resctrl uses itself")
    return text


def valid_class(name: str) -> str:
    """The canonical name of a class: ``""`` for the root class (``""`` or ``"/"``), else the name itself.

    The rule is the kernel's (one directory name without newline), less the names of resctrl's own
    directories. It says nothing about whether the class exists. ``follow`` passes: what it means is for the
    caller to decide before this is asked. Raises InvalidClass.
    """
    if name in ("", "/"):
        return ""
    if re.search("[/\0\n\ud800-\udfff]", name):
        raise InvalidClass(f"the class {name[:64]!a} contains a character that is not allowed in the name of a class")
    if len(name.encode()) > MAX_CLASS_BYTES:
        raise InvalidClass(f"the class {name[:64]!a}... is longer than {MAX_CLASS_BYTES} bytes")
    if name in (".", "..") or name in _RESCTRL_DIRECTORIES:
        raise InvalidClass(
            f"{name!a} is not a class", remedy="Name a control group of /sys/fs/resctrl; '/' is the root class"
        )
    return name


def check_member_id(text: str) -> None:
    """Raise InvalidKey unless the text can be a container's id or a unit's name, of 1 to 255 characters."""
    if len(text) > MAX_MEMBER_LENGTH:
        raise InvalidKey(f"the member {text[:64]!a}... has more than {MAX_MEMBER_LENGTH} characters")
    if _MEMBER.fullmatch(text) is None:
        remedy = "Use ASCII letters, digits and _.+-@:\\"
        raise InvalidKey(f"the member {text!a} is not a valid member id", remedy=remedy)


def check_word(parameter: str, text: str, longest: int = MAX_WORD_LENGTH) -> None:
    """Raise InvalidRequest unless the text that a ``parameter`` gives is printable, not empty and not too long."""
    if not 1 <= len(text) <= longest:
        raise InvalidRequest(f"{parameter} has {len(text)} characters, not 1 to {longest}")
    if _UNPRINTABLE.search(text):
        raise InvalidRequest(f"{parameter} {text[:64]!a} contains control or format characters")


def check_attributes(attributes: Mapping[str, str]) -> None:
    """Raise InvalidAttributes unless the attributes keep to the bounds.

    They are at most 64, with 64 KiB of names and values in UTF-8; a name has 1 to 128 characters, a value at most
    4096. Neither contains control or format characters: they are shown on terminals and written line by line.
    """
    _check_sum(attributes)
    for name, value in attributes.items():
        shown = ascii(name[:64])
        if not 1 <= len(name) <= MAX_ATTRIBUTE_NAME_LENGTH:
            raise InvalidAttributes(
                f"the name of the attribute {shown} does not have 1 to {MAX_ATTRIBUTE_NAME_LENGTH} characters"
            )
        if len(value) > MAX_ATTRIBUTE_LENGTH:
            raise InvalidAttributes(f"the attribute {shown} is longer than {MAX_ATTRIBUTE_LENGTH} characters")
        if _UNPRINTABLE.search(name) or _UNPRINTABLE.search(value):
            raise InvalidAttributes(f"the attribute {shown} contains control or format characters")


def _check_sum(attributes: Mapping[str, str]) -> None:
    if len(attributes) > MAX_ATTRIBUTES:
        raise InvalidAttributes(f"{len(attributes)} attributes are more than {MAX_ATTRIBUTES}")
    # A lone surrogate, which is refused later, counts like any other character.
    size = sum(len(text.encode(errors="surrogatepass")) for pair in attributes.items() for text in pair)
    if size > MAX_ATTRIBUTES_BYTES:
        raise InvalidAttributes(f"the attributes take {size} bytes, more than {MAX_ATTRIBUTES_BYTES}")


def merged_attributes(before: Mapping[str, str], new: Mapping[str, str], *, fitting: bool = False) -> dict[str, str]:
    """The attributes of a workload after ``new`` ones came; a new value replaces an earlier one of its name.

    ``fitting``: leave out those that would exceed a limit. Otherwise that raises InvalidAttributes.
    """
    merged = {**before, **new}
    try:
        _check_sum(merged)
    except InvalidAttributes as error:
        if not fitting:
            raise InvalidAttributes(
                f"{error.message} that one workload may have, together with those that it has already",
                remedy="Use fewer names: a new value of an existing attribute replaces the earlier value",
            ) from error
        merged = dict(before)
        for name, value in new.items():
            with contextlib.suppress(InvalidAttributes):
                merged = merged_attributes(merged, {name: value})
    return merged


def reason_text(text: str) -> str:
    """The text as a reason to be kept: control and format characters dropped, cut to 512 characters."""
    return attribute_value(text)[:MAX_REASON_LENGTH]


def check_priority(priority: int | None) -> None:
    """Raise InvalidRequest unless the priority, if one is given, is within -1000 to 1000."""
    if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"the priority {priority} is not within -{MAX_PRIORITY} to {MAX_PRIORITY}")


def attribute_value(text: str) -> str:
    """The text as a value that check_attributes accepts: control and format characters dropped, cut to the bound."""
    return _UNPRINTABLE.sub("", text)[:MAX_ATTRIBUTE_LENGTH]
