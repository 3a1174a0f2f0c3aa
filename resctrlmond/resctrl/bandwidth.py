# SPDX-License-Identifier: Apache-2.0
"""Determine how the hardware assigns memory bandwidth counters, and whether a group can lose its counter."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from resctrlmond.resctrl.kinds import Mode

# Declared in a module that clients can import without this one.
__all__ = ["Mode"]


class Configuration(msgspec.Struct, frozen=True):
    """How the bandwidth events of groups count at one time.

    ``transactions`` is which memory transactions each event counts, by its configuration file below ``info``; {} if
    no event can be configured. ``kernel_mode`` is the mode in which the kernel may count its work for a task in a
    group other than the task's; "" if it counts it there.
    """

    mode: Mode
    transactions: dict[str, str]
    kernel_mode: str = ""


class Bandwidth(msgspec.Struct, frozen=True):
    """The mode at one time; ``can_assign``: the mode ``mbm_event`` is offered.

    ``counters`` and ``available``: the number of assignable counters of each domain, in all and free, by its name.
    ``available`` is known only in the mode ``assigned``. ``kernel_mode``: as in ``Configuration``.
    """

    mode: Mode
    can_assign: bool = False
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    available: dict[str, int] = msgspec.field(default_factory=dict)
    kernel_mode: str = ""


# AMD's hardware tracks only some RMIDs at a time (Documentation/filesystems/resctrl.rst, mbm_assign_mode: "default"),
# and Hygon's is derived from it. No file has the number of tracked RMIDs, so no number of groups is known to be safe.
# X86_VENDOR_AMD and X86_VENDOR_HYGON of arch/x86/include/asm/processor.h.
_REALLOCATING_VENDORS = frozenset({"0002", "0009"})
_VENDOR = re.compile(r"cpu:type:x86,ven([0-9A-F]{4})")
_DOMAIN = re.compile(r"mon_([^/]+)_([0-9]+)", re.ASCII)
_MODE = re.compile(r"\[(\w+)\]")
# The mode of several resources is the worst of theirs.
_FROM_BEST = (Mode.DEDICATED, Mode.ASSIGNED, Mode.REALLOCATED)
# info/kernel_mode of the proposed kernels with Privilege Level Zero Association (PLZA): the active mode is in square
# brackets, and in some versions ":group=" follows. In these modes, the kernel's work has the RMID of the task.
_INHERITING = frozenset(
    {"inherit_ctrl_and_mon", "global_assign_ctrl_inherit_mon", "global_assign_ctrl_inherit_mon_per_cpu"}
)
_KERNEL_MODE = re.compile(r"\[(\w+)(?::[^\]\n]*)?\]")


def mode_of(assign_mode: str, features: str, modalias: str) -> Mode:
    """Return the mode of a resource, from the texts of its files ``mbm_assign_mode`` ("" before Linux 6.18) and
    ``mon_features``, and of ``/sys/devices/system/cpu/modalias`` ("" if it cannot be read).

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


def worst_mode(modes: Iterable[Mode]) -> Mode:
    """Return the worst of these modes."""
    return max(modes, key=_FROM_BEST.index)


def kernel_mode_of(text: str) -> str:
    """Return the mode in which the kernel may count its work for a task elsewhere; "" if it counts it with the task.

    ``text`` is that of ``info/kernel_mode``, "" if there is no such file.
    """
    active = _KERNEL_MODE.findall(text)
    if not text or (len(active) == 1 and active[0] in _INHERITING):
        return ""
    return active[0] if len(active) == 1 else "unknown"


def assignments_file(domain: str) -> tuple[str, int]:
    """Return the file of a group that assigns the counters of a domain, and the number of the domain in it.

    The domain is a directory of ``mon_data``, such as ``mon_L3_01``. ("", -1) for others.
    """
    found = _DOMAIN.fullmatch(domain)
    return (f"mbm_{found[1]}_assignments", int(found[2])) if found else ("", -1)


def by_domain(resource: str, text: str) -> dict[str, int]:
    """Parse ``0=32;1=30``, as in ``num_mbm_cntrs`` of a resource such as "L3"; skip invalid entries."""
    return {f"mon_{resource}_{int(domain):02}": int(number) for domain, number in re.findall(r"(\d+)=(\d+)", text)}
