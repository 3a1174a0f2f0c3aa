# SPDX-License-Identifier: Apache-2.0
"""A simulated resctrl filesystem, for hosts without the hardware and for tests: never a source of real values."""

from __future__ import annotations
