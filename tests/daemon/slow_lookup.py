# SPDX-License-Identifier: Apache-2.0
"""Run the daemon with a lookup of users that hangs while the file $HANGS exists, as that of a network may."""

from __future__ import annotations

import os
import pwd
import runpy
import time
from collections.abc import Callable

_getpwnam: Callable[[str], pwd.struct_passwd] = pwd.getpwnam


def getpwnam(name: str) -> pwd.struct_passwd:
    """Return the user of that name, as soon as the file does not exist."""
    while os.path.exists(os.environ["HANGS"]):
        time.sleep(0.01)
    return _getpwnam(name)


if __name__ == "__main__":
    pwd.getpwnam = getpwnam
    runpy.run_module("resctrlmond", run_name="__main__")
