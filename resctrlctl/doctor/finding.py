# SPDX-License-Identifier: Apache-2.0
"""Findings of the verb ``doctor``."""

from __future__ import annotations

import enum

import msgspec


class Severity(enum.StrEnum):
    """How much a finding matters."""

    OK = "ok"
    """Works as intended."""
    NOTE = "note"
    """A limit of the machine, a choice of the administrator, or something that could not be examined."""
    WARNING = "warning"
    """Some figures are missing or not exact, or will be."""
    ERROR = "error"
    """No workload is monitored, or containers fail to start."""

    @property
    def rank(self) -> int:
        """The order of severities, the worst last."""
        return list(Severity).index(self)


class Finding(msgspec.Struct, frozen=True, rename="camel"):
    """One finding: ``what`` was found, ``why`` it matters, and the lines of ``fix``, () if there is none.

    A line of ``fix`` is a command, a file and line, or a line to write to that file.
    """

    severity: Severity
    check: str
    what: str
    why: str = ""
    fix: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """The JSON output of ``doctor``: all findings, and the severity of the worst."""

    worst: Severity
    findings: list[Finding]
