# SPDX-License-Identifier: Apache-2.0
"""Start of the command resctrlmond: take the start lock, then load everything else."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from resctrlmond.service.notify import Notify
from resctrlmond.service.start_lock import StartLock, path_for_passed_socket


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until it is stopped; return the exit status."""
    lock = StartLock(path_for_passed_socket())
    lock.take()
    Notify().extend_start()
    # Not at the top: these imports take most of the time of a start, and a hook may already be waiting.
    from resctrlmond.daemon import command  # noqa: PLC0415

    return command.main(arguments, lock)


if __name__ == "__main__":
    sys.exit(main())
