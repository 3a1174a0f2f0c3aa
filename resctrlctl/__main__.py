# SPDX-License-Identifier: Apache-2.0
"""The entry point of resctrlctl. It imports almost nothing, so that it sets SIGINT before all other imports."""

from __future__ import annotations

import gc
import os
import signal

TYPE_CHECKING = False  # importing typing takes longer than this module
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Run the command, and exit with its status."""
    # The other imports take a tenth of a second, in which Ctrl-C would print a traceback. With the default action,
    # the shell sees that SIGINT ended the process. In a background job, the shell ignores SIGINT; keep that.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Most of the time of a verb is imports, which create no garbage.
    gc.disable()
    from resctrlctl import command  # noqa: PLC0415

    status = command.main()
    # Output is flushed, and threads that are left are not waited for: the interpreter would only free all modules.
    os._exit(status)


if __name__ == "__main__":
    main()
