# SPDX-License-Identifier: Apache-2.0
"""Injected faults: the operations that they affect, and how often they still apply."""

from __future__ import annotations

import errno
import time
from fnmatch import fnmatchcase

import msgspec

from resctrlmond.sim.kernel.tree import error
from resctrlmond.sim.messages import WORDS, Fault, Operation


class Faults:
    """The current faults. The first fault that matches an operation applies."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def set(self, faults: list[Fault]) -> None:
        """Replace all faults."""
        self._faults = list(faults)

    def show(self) -> bytes:
        """Return the current faults as JSON, with the rest of ``times``."""
        return msgspec.json.encode(self._faults)

    def strike(self, on: Operation, group: str, domain: str = "", event: str = "") -> None:
        """Apply a fault to a system call: delay it, and raise ``OSError`` if the fault has an errno."""
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
        """Return the word that replaces a group's own counter at a read; "" for a number."""
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
