# SPDX-License-Identifier: Apache-2.0
"""The entry point of resctrlctl. It sets SIGINT before all other imports."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command, and exit with its status."""
    # The other imports take a tenth of a second, in which Ctrl-C would print a traceback. With the default action,
    # the shell sees that SIGINT ended the process. In a background job, the shell ignores SIGINT; keep that.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from resctrlctl import command  # noqa: PLC0415

    sys.exit(command.main())


if __name__ == "__main__":
    main()
