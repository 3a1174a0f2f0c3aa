# SPDX-License-Identifier: Apache-2.0
"""One part of ``make crash``, which runs in a process of its own."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from tests.crash import daemon, harness
from tests.crash.blow import Blow
from tests.crash.sweep import Choose, Struck, sample, sweep
from tests.workloads.conftest import MARK


@dataclass(frozen=True)
class Sweep:
    """One verb, of the manager alone or ``of_daemon``, and one kind of blow at all its points, or at some."""

    name: str
    of_daemon: bool
    blow: Blow
    sample: int
    seed: int

    @property
    def title(self) -> str:
        """The name in the table."""
        return f"daemon: {self.name}" if self.of_daemon else self.name

    def run(self, top: str) -> Struck:
        """Deal the blows, on machines below the folder ``top``."""
        os.setegid(MARK)
        logging.disable()
        machine = daemon.machine_for(self.name) if self.of_daemon else harness.machine
        choose: Choose = sample(self.sample, self.seed) if self.sample else list
        return sweep(machine, Path(top), self.name, self.blow, choose)
