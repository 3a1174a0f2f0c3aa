# SPDX-License-Identifier: Apache-2.0
"""The folder of the examples, and a simulated machine."""

from __future__ import annotations

from pathlib import Path

from tests.exporter.conftest import machine

__all__ = ["machine"]

ROOT = Path(__file__).parents[2]
FLEET = ROOT / "packaging" / "examples" / "fleet"
PAGE = ROOT / "man" / "resctrlmond-fleet.7.scd"
