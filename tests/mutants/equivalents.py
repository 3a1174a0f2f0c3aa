# SPDX-License-Identifier: Apache-2.0
"""Random mutants that no test can detect, each with the reason. ``make mutate`` does not draw them."""

from __future__ import annotations

from typing import NamedTuple


class Equivalent(NamedTuple):
    """A change (``changes.Change``) without an effect that a caller could see."""

    file: str
    function: str
    text: str
    reason: str


EQUIVALENTS: tuple[Equivalent, ...] = ()
