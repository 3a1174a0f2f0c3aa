# SPDX-License-Identifier: Apache-2.0
"""Faults that were asked for: which operation they befall, and how often still."""

from __future__ import annotations

import errno
import time
from fnmatch import fnmatchcase

import msgspec

from resctrlmond.sim.messages import WORDS, Fault, Operation
from resctrlmond.sim.tree import error


class Faults:
    """The faults in force; of those that match an operation the first answers."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def set(self, faults: list[Fault]) -> None:
        """Replaces all faults."""
        self._faults = list(faults)

    def show(self) -> bytes:
        """What is still in force, as JSON, ``times`` being what is left of it."""
        return msgspec.json.encode(self._faults)

    def strike(self, on: Operation, group: str, domain: str = "", event: str = "") -> None:
        """A system call: waits as long as it should, and raises ``OSError`` where a fault's answer is an errno."""
        answer = ""
        for fault in list(self._faults):
            if (
                fault.answer in WORDS
                or (fault.answer and answer)
                or not self._concerns(fault, on, group, domain, event)
            ):
                continue
            time.sleep(fault.milliseconds / 1000)
            answer = answer or fault.answer
            self._use_up(fault)
        if answer:
            raise error(getattr(errno, answer))

    def word(self, group: str, domain: str, event: str) -> str:
        """A group's own counter is read, for its file or for a sum: what the hardware says ("": a number)."""
        for fault in self._faults:
            if fault.answer in WORDS and self._concerns(fault, Operation.READ, group, domain, event):
                time.sleep(fault.milliseconds / 1000)
                self._use_up(fault)
                return fault.answer
        return ""

    @staticmethod
    def _concerns(fault: Fault, on: Operation, group: str, domain: str, event: str) -> bool:
        patterns = ((group, fault.group), (domain, fault.domain), (event, fault.event))
        return fault.on is on and all(fnmatchcase(name, pattern) for name, pattern in patterns)

    def _use_up(self, fault: Fault) -> None:
        if fault.times is None:
            return
        fault.times -= 1
        if not fault.times:
            self._faults = [other for other in self._faults if other is not fault]
