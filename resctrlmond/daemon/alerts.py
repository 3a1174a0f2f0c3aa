# SPDX-License-Identifier: Apache-2.0
"""The alerts (``Manager.alerts``) of work that needs systemd."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert: its key, the words before an error, and the log message after the last error."""

    key: str
    failure: str
    success: str

    def text(self, error: object) -> str:
        """Return the text with an error."""
        return f"{self.failure}: {error}"


UNITS = Alert("units", "systemd's units are not watched", "systemd's units are watched again")
COMPANIONS = Alert(
    "companions", "companions are neither started nor stopped", "companions are started and stopped again"
)
UNIT_MEMORY = Alert(
    "unit memory",
    "the memory settings of units are not changed",
    "the memory settings of units are changed again",
)
