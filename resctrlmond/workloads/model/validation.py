# SPDX-License-Identifier: Apache-2.0
"""Validation of keys, member ids, classes and attributes, before any of them is used in a path or a message."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

from resctrlmond.resctrl.errors import FORMAT_RANGES
from resctrlmond.workloads.model.errors import InvalidAttributes, InvalidClass, InvalidKey, InvalidRequest

# A record is "<key>.json" plus the suffix of a temporary file in one name of at most 255 bytes (NAME_MAX).
MAX_KEY_LENGTH = 200
MAX_MEMBER_LENGTH = 255
MAX_CLASS_BYTES = 255

MAX_WORD_LENGTH = 128
MAX_ATTRIBUTES = 64
MAX_ATTRIBUTE_NAME_LENGTH = 128
MAX_ATTRIBUTE_LENGTH = 4096
# The sum of all names and values in UTF-8: many times the size of a real pod's labels and annotations.
MAX_ATTRIBUTES_BYTES = 64 * 1024
MAX_REASON_LENGTH = 512
MAX_PRIORITY = 1000

# The directories that resctrl itself creates in a control group.
_RESCTRL_DIRECTORIES = frozenset({"info", "mon_data", "mon_groups"})

# Every name that resctrl creates in a group, with all mount options (fs/resctrl/rdtgroup.c,
# res_common_files[]). A key of that name would look like the file in a listing of the tree.
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

# The patterns are compiled when they are used: "resctrlctl run" imports this module, and uses none for most commands.

# The characters of a unit's name (systemd.unit(5)), and "+,=~", which occur in other names. A key does not begin with
# "." or "-", because hidden files, ".." and options of commands do.
_KEY = r"[A-Za-z0-9@:_\\+,=~][A-Za-z0-9@:._\-\\+,=~]*"
_POD_UID = r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}|[0-9A-Fa-f]{32}"
# The characters of runc's container ids (libcontainer/factory_linux.go, idRegex) and of unit names: a control group
# that is assigned as a whole has its name as its id. "." and ".." would be path traversal.
_MEMBER = r"(?!\.\.?\Z)[A-Za-z0-9_.+@:\\-]+"
# Control characters end lines and control terminals, format characters (U+202E, U+200B) make a text look like a
# different text, and lone surrogates cannot be encoded in UTF-8.
_FORMAT = "".join(f"{chr(first)}-{chr(last)}" for first, last in FORMAT_RANGES)
_UNPRINTABLE = f"[\x00-\x1f\x7f-\x9f\ud800-\udfff{_FORMAT}]"


def is_pod_uid(text: str) -> bool:
    """Return whether the text is a Kubernetes pod UID: 32 hexadecimal digits, with dashes (8-4-4-4-12) or without.

    The UID of a static pod has no dashes: it is the MD5 of the pod's manifest. The version and variant of the UUID
    are not checked. A container id has 64 digits, so it is not a pod UID.
    """
    return re.fullmatch(_POD_UID, text) is not None


def canonical_key(text: str) -> str:
    """Return the canonical form of a workload's key: a pod UID with dashes in lower case, any other key unchanged.

    A key has 1 to 200 characters, of ASCII letters, digits and ``@:._-\\+,=~``, does not begin with ``.`` or ``-``,
    and is not a name that resctrl uses itself. It is safe as one component of a path. Raises InvalidKey.
    """
    if re.fullmatch(_POD_UID, text):
        digits = text.replace("-", "").lower()
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    if not text:
        raise InvalidKey("the key is empty", remedy="Name the workload by pod UID, container id or unit")
    if len(text) > MAX_KEY_LENGTH:
        raise InvalidKey(f"the key {text[:64]!a}... has {len(text)} characters, more than {MAX_KEY_LENGTH}")
    if re.fullmatch(_KEY, text) is None:
        raise InvalidKey(
            f"the key {text!a} contains a character that is not allowed",
            remedy="Use ASCII letters, digits and @:._-\\+,=~, and begin with neither '.' nor '-'",
        )
    if text in _RESCTRL_NAMES:
        raise InvalidKey(f"the key {text!a} is a name that resctrl uses itself")
    return text


def is_own_key(key: str, container: str) -> bool:
    """Return whether the key of a container's workload is the container's own id, and not that of its pod."""
    return container == key or (is_pod_uid(container) and canonical_key(container) == key)


def valid_class(name: str) -> str:
    """Return the canonical name of a class: ``""`` for the root class (``""`` or ``"/"``), otherwise the name itself.

    The rule is the kernel's (one directory name without a newline), without the names of resctrl's own directories.
    The class need not exist. ``follow`` is accepted like any other name: the caller must handle its special meaning
    first. Raises InvalidClass.
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
    """Raise InvalidKey unless the text is a valid container id or unit name, of 1 to 255 characters."""
    if len(text) > MAX_MEMBER_LENGTH:
        raise InvalidKey(f"the member {text[:64]!a}... has more than {MAX_MEMBER_LENGTH} characters")
    if re.fullmatch(_MEMBER, text) is None:
        remedy = "Use ASCII letters, digits and _.+-@:\\"
        raise InvalidKey(f"the member {text!a} is not a valid member id", remedy=remedy)


def check_word(parameter: str, text: str, longest: int = MAX_WORD_LENGTH) -> None:
    """Raise InvalidRequest unless the text of a ``parameter`` is printable and has 1 to ``longest`` characters."""
    if not 1 <= len(text) <= longest:
        raise InvalidRequest(f"{parameter} has {len(text)} characters, not 1 to {longest}")
    if re.search(_UNPRINTABLE, text):
        raise InvalidRequest(f"{parameter} {text[:64]!a} contains control or format characters")


def check_claim(owner: str, attributes: Mapping[str, str], priority: int | None) -> None:
    """Raise InvalidRequest or InvalidAttributes unless these parameters of a claim are valid.

    A priority is within -1000 to 1000, or None.
    """
    check_word("claim", owner)
    check_attributes(attributes)
    if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"the priority {priority} is not within -{MAX_PRIORITY} to {MAX_PRIORITY}")


def check_attributes(attributes: Mapping[str, str]) -> None:
    """Raise InvalidAttributes unless the attributes are within the limits.

    The limits are 64 attributes and 64 KiB of names and values in UTF-8; 1 to 128 characters for a name and at most
    4096 for a value. Control and format characters are invalid, because attributes are shown on terminals and written
    line by line.
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
        if re.search(_UNPRINTABLE, name) or re.search(_UNPRINTABLE, value):
            raise InvalidAttributes(f"the attribute {shown} contains control or format characters")


def _check_sum(attributes: Mapping[str, str]) -> None:
    if len(attributes) > MAX_ATTRIBUTES:
        raise InvalidAttributes(f"{len(attributes)} attributes are more than {MAX_ATTRIBUTES}")
    # A lone surrogate is counted here and rejected later.
    size = sum(len(text.encode(errors="surrogatepass")) for pair in attributes.items() for text in pair)
    if size > MAX_ATTRIBUTES_BYTES:
        raise InvalidAttributes(f"the attributes take {size} bytes, more than {MAX_ATTRIBUTES_BYTES}")


def merged_attributes(before: Mapping[str, str], new: Mapping[str, str], *, fitting: bool = False) -> dict[str, str]:
    """Return the attributes ``before`` with the ``new`` ones added; a new value replaces an earlier one of its name.

    ``fitting``: leave out each new attribute that would exceed a limit, instead of raising InvalidAttributes.
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
    """Return the text without control and format characters, cut to 512 characters (the limit of a reason)."""
    return attribute_value(text)[:MAX_REASON_LENGTH]


def attribute_value(text: str) -> str:
    """Return the text without control and format characters, cut to 4096 characters (the limit of a value)."""
    if not text.isprintable():
        text = re.sub(_UNPRINTABLE, "", text)
    return text[:MAX_ATTRIBUTE_LENGTH]
