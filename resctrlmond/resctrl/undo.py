# SPDX-License-Identifier: Apache-2.0
"""Undo what a failed call did."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from resctrlmond.resctrl.errors import ResctrlError, printable

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def undoing(what: str) -> Iterator[None]:
    """Log an error of the body, which undoes a failed call, so that it does not hide the error of the call."""
    try:
        yield
    except (ResctrlError, OSError) as error:
        _log.error("%s: cannot undo what a failed call did: %s", printable(what), error)
