# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.bench.serve FOLDER``: the daemon with D-Bus, on the simulation in the folder.

``resctrlmond --simulate`` serves D-Bus on the session bus; this one serves it where a host does.
"""

from __future__ import annotations

import asyncio
import sys

from resctrlmond.configuration.config import Config
from resctrlmond.daemon.daemon import Daemon
from resctrlmond.daemon.startup import prepare
from resctrlmond.service import journal
from resctrlmond.workloads.records.atomic_files import set_umask

# The mark may be any group but root's, which the groups of others bear.
MARK = 65534


def main(folder: str, *, dbus: bool = True) -> None:
    """Serve until SIGTERM."""
    config = Config(resctrl=f"{folder}/resctrl", runtime_dir=f"{folder}/run", log_level="warning", dbus=dbus)
    journal.setup(config.log_level)
    set_umask(0o022)
    ground = prepare(config, MARK, allow_simulation=True)
    asyncio.run(Daemon(config, ground, lambda: config).run())


if __name__ == "__main__":
    main(sys.argv[1])
