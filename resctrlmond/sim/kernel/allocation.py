# SPDX-License-Identifier: Apache-2.0
"""Cache Allocation Technology: the files schemata, mode and size, and info/L3/bit_usage.

Pseudo-locking is refused, as on all but a few old processors. The mode exclusive follows fs/resctrl/rdtgroup.c and
ctrlmondata.c only: the hardware of the test machines shares every part of the cache, so no group can be exclusive.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from operator import or_

from resctrlmond.sim.kernel.commands import CommandStatus, parse_unsigned_long
from resctrlmond.sim.kernel.groups import Group
from resctrlmond.sim.kernel.tree import error
from resctrlmond.sim.profiles import Profile

SHAREABLE, EXCLUSIVE = "shareable", "exclusive"
_SPACE = " \t\n\v\f\r\xa0"


class Allocation:
    """The part of each L3 that a class may fill, as bit masks.

    ``controls`` returns the control groups, the root's first; ``caches`` the numbers of the L3 caches that are
    online.
    """

    def __init__(
        self,
        profile: Profile,
        status: CommandStatus,
        controls: Callable[[], Collection[Group]],
        caches: Callable[[], Collection[int]],
    ) -> None:
        self._profile = profile
        self._status = status
        self._controls = controls
        self._caches = caches
        self._full = (1 << profile.cbm_bits) - 1
        # (closid, cache) -> its mask; the whole cache if none was written.
        self._masks: dict[tuple[int, int], int] = {}

    def _mask(self, group: Group, cache: int) -> int:
        return self._masks.get((group.ids.closid, cache), self._full)

    def _refusal(self, why: str, number: int = errno.EINVAL) -> OSError:
        self._status.add(why)
        return error(number)

    # -- new classes and caches

    def begin(self, closid: int) -> None:
        """Give a new class the unused or shared part in one piece. Raises ENOSPC if a cache has nothing left."""
        masks: dict[tuple[int, int], int] = {}
        for cache in self._caches():
            used = free = self._profile.shareable_bits
            for other in self._controls():
                used |= self._mask(other, cache)
                free |= self._mask(other, cache) if other.mode == SHAREABLE else 0
            free |= self._full & ~used
            lowest = free & -free
            # Adding the lowest bit carries through the lowest run of ones; the changed bits are that run.
            mask = free & ~(free + lowest)
            if not mask:
                raise self._refusal(f"No space on L3:{cache}", errno.ENOSPC)
            masks[closid, cache] = mask
        self._masks |= masks

    def reset(self, cache: int) -> None:
        """Give all classes the whole cache, as when its first CPU comes online (resctrl_arch_online_cpu())."""
        self._masks = {key: mask for key, mask in self._masks.items() if key[1] != cache}

    # -- schemata and size

    def _show(self, value: Callable[[int], str]) -> str:
        if not self._profile.can_allocate:
            return ""
        return "L3:" + ";".join(f"{cache}={value(cache)}" for cache in self._caches()) + "\n"

    def show_schemata(self, group: Group) -> str:
        """Show the masks of the group's class, in hexadecimal."""
        return self._show(lambda cache: f"{self._mask(group, cache):x}")

    def show_size(self, group: Group) -> str:
        """Show the masks as bytes."""
        of_bit = self._profile.cache_bytes // self._profile.cbm_bits
        return self._show(lambda cache: str(self._mask(group, cache).bit_count() * of_bit))

    def write_schemata(self, group: Group, command: str) -> None:
        """Apply lines of ``L3:0=ff;1=f0``, all or none (rdtgroup_schemata_write())."""
        masks: dict[tuple[int, int], int] = {}
        for line in self._status.line("schemata", command).split("\n"):
            resource, colon, domains = line.partition(":")
            name = resource.strip(_SPACE)
            if not colon:
                raise self._refusal("Missing ':'")
            if not domains:
                raise self._refusal(f"Missing '{name}' value")
            if name != "L3" or not self._profile.can_allocate:
                raise self._refusal(f"Unknown or unsupported resource name '{name}'")
            # Only the last domain may be empty.
            for domain in domains.removesuffix(";").split(";"):
                self._stage(group, domain, masks)
        self._masks |= masks

    def _stage(self, group: Group, domain: str, masks: dict[tuple[int, int], int]) -> None:
        number, equals, text = domain.partition("=")
        cache = parse_unsigned_long(number, 10)
        if not equals or cache is None:
            raise self._refusal("Missing '=' or non-numeric domain")
        if cache not in self._caches():
            raise error(errno.EINVAL)
        if (group.ids.closid, cache) in masks:
            raise self._refusal(f"Duplicate domain {cache}")
        mask = self._valid(text.strip(_SPACE))
        if self._overlaps(group, cache, mask, [EXCLUSIVE]):
            raise self._refusal("Overlaps with exclusive group")
        if group.mode == EXCLUSIVE and self._overlaps(group, cache, mask):
            raise self._refusal("Overlaps with other group")
        masks[group.ids.closid, cache] = mask

    def _valid(self, text: str) -> int:
        mask = parse_unsigned_long(text, 16)
        if mask is None:
            raise self._refusal(f"Non-hex character in the mask {text}")
        if not 0 < mask <= self._full:
            raise self._refusal("Mask out of range")
        if not self._profile.sparse_masks and mask & (mask + (mask & -mask)):
            raise self._refusal(f"The mask {mask:x} has non-consecutive 1-bits")
        return mask

    def _overlaps(self, group: Group, cache: int, mask: int, modes: Collection[str] = ()) -> bool:
        """Whether another class (of these modes, if any), or without modes the hardware, has a part of this mask."""
        others = [other for other in self._controls() if other is not group and (not modes or other.mode in modes)]
        hardware = 0 if modes else self._profile.shareable_bits
        return bool(mask & reduce(or_, (self._mask(other, cache) for other in others), hardware))

    # mode

    def write_mode(self, group: Group, command: str) -> None:
        """Set the mode, ``shareable`` or ``exclusive`` (rdtgroup_mode_write())."""
        mode = self._status.line("mode", command)
        if mode == EXCLUSIVE and group.mode != EXCLUSIVE:
            if not self._profile.can_allocate:
                raise self._refusal("Cannot be exclusive without CAT/CDP")
            if any(self._overlaps(group, cache, self._mask(group, cache)) for cache in self._caches()):
                raise self._refusal("Schemata overlaps")
        elif mode == "pseudo-locksetup":
            default = group.ids.closid == 0
            raise self._refusal("Cannot pseudo-lock default group" if default else "Pseudo-locking not supported")
        elif mode not in (SHAREABLE, EXCLUSIVE):
            raise self._refusal("Unknown or unsupported mode")
        group.mode = mode

    # info/L3/bit_usage

    def show_usage(self) -> str:
        """Show a letter for each bit of each cache, the highest first (rdt_bit_usage_show())."""
        return ";".join(f"{cache}={self._usage(cache)}" for cache in self._caches()) + "\n"

    def _usage(self, cache: int) -> str:
        masks: Mapping[str, int] = {
            mode: reduce(or_, (self._mask(group, cache) for group in self._controls() if group.mode == mode), 0)
            for mode in (SHAREABLE, EXCLUSIVE)
        }
        hardware = self._profile.shareable_bits

        def letter(bit: int) -> str:
            shared = bool(masks[SHAREABLE] & bit)
            if hardware & bit:
                return "X" if shared else "H"
            return "S" if shared else "E" if masks[EXCLUSIVE] & bit else "0"

        return "".join(letter(1 << number) for number in reversed(range(self._profile.cbm_bits)))
