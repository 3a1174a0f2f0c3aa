# SPDX-License-Identifier: Apache-2.0
"""One part of ``make crash``, which runs in a process of its own."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from tests.crash import daemon, harness
from tests.crash.fault import Fault
from tests.crash.sweep import Choose, Result, sample, sweep
from tests.workloads.conftest import MARK


@dataclass(frozen=True)
class Sweep:
    """One kind of fault at all points of a verb, or at a sample, in the manager alone or ``of_daemon``."""

    name: str
    of_daemon: bool
    fault: Fault
    sample: int
    seed: int

    @property
    def title(self) -> str:
        """Return the name in the table."""
        return f"daemon: {self.name}" if self.of_daemon else self.name

    def run(self, top: str) -> Result:
        """Inject the faults, on machines below the folder ``top``."""
        os.setegid(MARK)
        logging.disable()
        machine = daemon.machine_for(self.name) if self.of_daemon else harness.machine
        choose: Choose = sample(self.sample, self.seed) if self.sample else list
        return sweep(machine, Path(top), self.name, self.fault, choose)
