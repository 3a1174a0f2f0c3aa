# SPDX-License-Identifier: Apache-2.0
"""The entry point of resctrlctl. It imports almost nothing, so that it sets SIGINT before all other imports."""

import gc
import signal


def main() -> int:
    """Run the command; return its exit status."""
    # The other imports take a tenth of a second, in which Ctrl-C would print a traceback. With the default action,
    # the shell sees that SIGINT ended the process. In a background job, the shell ignores SIGINT; keep that.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Most of the time of a verb is imports, which create no garbage.
    gc.disable()
    from resctrlctl import command  # noqa: PLC0415

    status = command.main()
    # At its exit, the interpreter would search all imported modules for garbage.
    gc.freeze()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
