# SPDX-License-Identifier: Apache-2.0
"""Read the definitions of the interfaces, which are files beside this module."""

from __future__ import annotations

import os

_FOLDER = os.path.dirname(__file__)


def read(name: str) -> str:
    """Return the text of a definition by its file name."""
    # importlib.resources would import a dozen modules, which take 1.5 MiB in the daemon.
    with open(os.path.join(_FOLDER, name), encoding="utf-8") as file:
        return file.read()
