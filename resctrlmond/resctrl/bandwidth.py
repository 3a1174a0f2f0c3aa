# SPDX-License-Identifier: Apache-2.0
"""Determine how the hardware assigns memory bandwidth counters, and whether a group can lose its counter."""

from __future__ import annotations

import re

import msgspec

from resctrlmond.resctrl.kinds import Mode

# Declared in a module that clients can import without this one.
__all__ = ["Mode"]


class Configuration(msgspec.Struct, frozen=True):
    """How the bandwidth events of groups count at one time.

    ``transactions`` is which memory transactions each event counts, by its configuration file below ``info``; {} if
    no event can be configured.
    """

    mode: Mode
    transactions: dict[str, str]


class Bandwidth(msgspec.Struct, frozen=True):
    """The mode at one time; ``can_assign``: the mode ``mbm_event`` is offered.

    ``counters`` and ``available``: the number of assignable counters of each L3, in all and free, by its number.
    ``available`` is known only in the mode ``assigned``.
    """

    mode: Mode
    can_assign: bool = False
    counters: dict[int, int] = msgspec.field(default_factory=dict)
    available: dict[int, int] = msgspec.field(default_factory=dict)


# AMD's hardware tracks only some RMIDs at a time (Documentation/filesystems/resctrl.rst, mbm_assign_mode: "default"),
# and Hygon's is derived from it. No file has the number of tracked RMIDs, so no number of groups is known to be safe.
# X86_VENDOR_AMD and X86_VENDOR_HYGON of arch/x86/include/asm/processor.h.
_REALLOCATING_VENDORS = frozenset({"0002", "0009"})
_VENDOR = re.compile(r"cpu:type:x86,ven([0-9A-F]{4})")
_DOMAIN = re.compile(r"mon_L3_([0-9]+)", re.ASCII)
_MODE = re.compile(r"\[(\w+)\]")


def mode_of(assign_mode: str, features: str, modalias: str) -> Mode:
    """Return the mode, from the texts of ``info/L3_MON/mbm_assign_mode`` ("" before Linux 6.18), ``mon_features`` and
    ``/sys/devices/system/cpu/modalias`` ("" if it cannot be read).

    A processor that offers ``mbm_event`` and does not use it reallocates (resctrl.rst). If it offers no mode, files
    that only AMD's BMEC has decide, and then the processor's vendor.
    """
    current = _MODE.search(assign_mode)
    if current is not None and current[1] == "mbm_event":
        return Mode.ASSIGNED
    if can_assign(assign_mode) or (current is not None and current[1] != "default"):
        return Mode.REALLOCATED
    if any(name.endswith("_config") for name in features.split()):
        return Mode.REALLOCATED
    vendor = _VENDOR.match(modalias)
    is_known_to_be_safe = bool(modalias) if vendor is None else vendor[1] not in _REALLOCATING_VENDORS
    return Mode.DEDICATED if is_known_to_be_safe else Mode.REALLOCATED


def can_assign(assign_mode: str) -> bool:
    """Whether the text of ``mbm_assign_mode`` offers the mode ``mbm_event``."""
    return "mbm_event" in re.findall(r"\w+", assign_mode)


def domain_number(domain: str) -> int:
    """Return the number of an L3 from its directory in ``mon_data``, such as ``mon_L3_01``; -1 for others."""
    found = _DOMAIN.fullmatch(domain)
    return int(found[1]) if found else -1


def by_domain(text: str) -> dict[int, int]:
    """Parse ``0=32;1=30``, as in ``num_mbm_cntrs``; skip invalid entries."""
    return {int(domain): int(number) for domain, number in re.findall(r"(\d+)=(\d+)", text)}
