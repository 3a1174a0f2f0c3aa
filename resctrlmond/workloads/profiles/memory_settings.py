# SPDX-License-Identifier: Apache-2.0
"""The memory settings of a profile: a container's swap, and the use of memory above which it is slowed down.

No I/O. The files are those of cgroup v2 (Linux, Documentation/admin-guide/cgroup-v2.rst, "Memory Interface Files").
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

import msgspec

SWAP_MAX = "memory.swap.max"
MEMORY_HIGH = "memory.high"

# The annotations of memtierd's NRI plugin that set these files: for one container ("<name>/<container>"), or the pod.
ANNOTATIONS = {f"{name}.memtierd.nri.io": name for name in (SWAP_MAX, MEMORY_HIGH)}

# More than any amount: the kernel's "max".
UNLIMITED = 1 << 63

# The syntax of the kernel (memparse in lib/cmdline.c), without its octal and hexadecimal numbers.
_AMOUNT = re.compile(r"(0|[1-9][0-9]{0,18})([KMGTPE]?)", re.IGNORECASE | re.ASCII)
_SUFFIXES = "KMGTPE"


class Swap(enum.StrEnum):
    """Whether a container may use swap."""

    LEAVE = "leave"
    """As its runtime decides."""
    ALLOW = "allow"
    """Without a limit of its own."""
    DENY = "deny"
    """Not at all."""


class MemorySettings(msgspec.Struct, frozen=True):
    """The memory settings of a profile. Amounts are in bytes, or UNLIMITED; None for what it does not set.

    ``allowed`` are the greatest amounts that annotations may set, by the name of the file. Files that are not in it
    cannot be set by annotations.
    """

    swap: Swap = Swap.LEAVE
    high: int | None = None
    allowed: Mapping[str, int] = msgspec.field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.swap is not Swap.LEAVE or self.high is not None or bool(self.allowed)

    @property
    def lines(self) -> tuple[str, ...]:
        """The settings as lines of text."""
        found = [] if self.swap is Swap.LEAVE else [f"swap: {self.swap}"]
        if self.high is not None:
            found.append(f"{MEMORY_HIGH}: {text_of(self.high)}")
        found += [f"annotations: {name} up to {text_of(amount)}" for name, amount in sorted(self.allowed.items())]
        return tuple(found)


def parse_amount(text: str) -> int:
    """Return the bytes of an amount as the kernel reads it: ``max``, or a number with K, M, G, T, P or E (1024 each).

    Raises ValueError for any other text, and for more than the kernel can hold.
    """
    if text == "max":
        return UNLIMITED
    found = _AMOUNT.fullmatch(text)
    amount = int(found[1]) << (10 * (_SUFFIXES.find(found[2].upper()) + 1) if found[2] else 0) if found else UNLIMITED
    if amount >= UNLIMITED:
        raise ValueError(f"{text[:64]!a} is not an amount of memory")
    return amount


def text_of(amount: int) -> str:
    """Return an amount as the kernel writes it."""
    return "max" if amount >= UNLIMITED else str(amount)


def memory_annotations(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations that can set a file."""
    prefixes = tuple(f"{name}/" for name in ANNOTATIONS)
    return {name: value for name, value in annotations.items() if name in ANNOTATIONS or name.startswith(prefixes)}


def files_of(
    settings: MemorySettings, annotations: Mapping[str, str], container: str
) -> tuple[dict[str, int], list[str]]:
    """Return the amount for each file to set, and a sentence for each annotation that does not have its full effect.

    An annotation replaces what the profile sets, as far as the profile allows it; one for the container replaces one
    for the pod.
    """
    files: dict[str, int] = {}
    if settings.swap is not Swap.LEAVE:
        files[SWAP_MAX] = UNLIMITED if settings.swap is Swap.ALLOW else 0
    if settings.high is not None:
        files[MEMORY_HIGH] = settings.high
    wrong = []
    for annotation, name in ANNOTATIONS.items():
        shown = f"{annotation}/{container}"
        if not container or (text := annotations.get(shown)) is None:
            shown, text = annotation, annotations.get(annotation)
        if text is None:
            continue
        most = settings.allowed.get(name)
        if most is None:
            wrong.append(f"annotation {shown} has no effect: the profile does not allow it")
            continue
        try:
            amount = parse_amount(text)
        except ValueError as error:
            wrong.append(f"annotation {shown} has no effect: {error}")
            continue
        if amount > most:
            wrong.append(
                f"annotation {shown} has the value {text_of(amount)}; the limit of the profile applies, which is "
                f"{text_of(most)}"
            )
        files[name] = min(amount, most)
    return files, wrong
