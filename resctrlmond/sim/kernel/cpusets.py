# SPDX-License-Identifier: Apache-2.0
"""CPU masks and lists as the kernel writes and reads them (lib/bitmap-str.c)."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection

from resctrlmond.sim.kernel.tree import error

_WORD_DIGITS = 8  # 32 bits
_SEPARATORS = " \t\n\v\f\r\xa0,"
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")


def parse_cpu_mask(command: str, total: int) -> set[int]:
    """Return the CPUs of a mask in a write to ``cpus``: hexadecimal words of 32 bits, in the first line.

    Words are separated by commas or white space, and their number is limited by ``total``. Raises EINVAL for an
    invalid mask, EOVERFLOW for a word that is too long, too many words, or a CPU that is not possible.
    """
    rest = command.split("\0", 1)[0].split("\n", 1)[0].rstrip(_SEPARATORS)
    bits = 0
    for low in range(0, total, 32):
        word = re.split("[^0-9a-fA-F]", rest[-_WORD_DIGITS:])[-1]
        bits |= int(word or "0", 16) << low
        rest = rest[: len(rest) - len(word)]
        if len(word) == _WORD_DIGITS:
            if rest[-1:] in _HEXADECIMAL:
                raise error(errno.EOVERFLOW)
            # The kernel parses from the end, and includes any character before eight digits.
            rest = rest[:-1]
        elif rest and rest[-1] not in _SEPARATORS:
            raise error(errno.EINVAL)
        rest = rest.rstrip(_SEPARATORS)
    if rest or bits >> total:
        raise error(errno.EOVERFLOW)
    return {cpu for cpu in range(total) if bits >> cpu & 1}


class _Scanner:
    """The rest of a list of CPUs."""

    def __init__(self, text: str, total: int) -> None:
        self._rest = text
        self._total = total

    def finds_region(self) -> bool:
        """Skip to the next region. Return False if there is none."""
        self._rest = self._rest.lstrip(_SEPARATORS)
        return bool(self._rest)

    @property
    def at_end(self) -> bool:
        """Whether a region may end here."""
        return not self._rest or self._rest[0] in _SEPARATORS

    def takes(self, word: str) -> bool:
        """Skip a word, in either case. Return whether it came next."""
        found = self._rest[: len(word)].lower() == word
        if found:
            self._rest = self._rest[len(word) :]
        return found

    def number(self) -> int:
        """Parse a decimal number, or N for the last CPU."""
        if self._rest[:1] == "N":
            self._rest = self._rest[1:]
            return self._total - 1
        after = self._rest.lstrip("0123456789")
        digits, self._rest = self._rest[: len(self._rest) - len(after)], after
        if not digits:
            raise error(errno.EINVAL)
        if int(digits) >= 2**32:
            raise error(errno.EOVERFLOW)
        return int(digits)

    def number_after(self, sign: str) -> int:
        """Parse a sign and a number after it."""
        if not self.takes(sign):
            raise error(errno.EINVAL)
        return self.number()


def parse_cpu_list(command: str, total: int) -> set[int]:
    """Return the CPUs of a list in a write to ``cpus_list``: ``0-3,5``, ``all``, ``N`` for the last one.

    A range may select a part of every group: ``0-7:1/2``. Raises EINVAL for an invalid list, EOVERFLOW for a number
    above 32 bits, ERANGE for a CPU that is not possible.
    """
    text = _Scanner(command.split("\0", 1)[0], total)
    found: set[int] = set()
    while text.finds_region():
        whole = text.takes("all")
        first = 0 if whole else text.number()
        single = not whole and text.at_end
        last = total - 1 if whole else first if single else text.number_after("-")
        # Without a pattern, a group is as long as the number of the last CPU plus one, in 32 bits.
        taken = group = (last + 1) % 2**32
        if not single and not text.at_end:
            taken, group = text.number_after(":"), text.number_after("/")
        if first > last or group == 0 or taken > group:
            raise error(errno.EINVAL)
        if last >= total:
            raise error(errno.ERANGE)
        found.update(cpu for cpu in range(first, last + 1) if (cpu - first) % group < taken)
    return found


def cpu_mask(cpus: Collection[int], total: int) -> str:
    """Format CPUs as ``cpus`` does: hexadecimal, in groups of 32 bits with commas, as wide as ``total`` CPUs."""
    bits = sum(1 << cpu for cpu in cpus)
    words = []
    for low in range(0, total, 32):
        width = min(32, total - low)
        words.append(f"{bits >> low & (1 << width) - 1:0{(width + 3) // 4}x}")
    return ",".join(reversed(words)) + "\n"


def cpu_list(cpus: Collection[int]) -> str:
    """Format CPUs as ``cpus_list`` does: ``0-3,5``; an empty line for none."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges) + "\n"
