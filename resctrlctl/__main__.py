# SPDX-License-Identifier: Apache-2.0
"""The entry point of resctrlctl. It imports almost nothing, so that it can set SIGINT before all other imports."""

import signal


def main() -> int:
    """Run the command; return its exit status."""
    # Imports take a third of a second. Ctrl-C ends the process like any other command, without a traceback, and the
    # shell sees that SIGINT ended it. A shell's background job ignores SIGINT, which stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from resctrlctl import command  # noqa: PLC0415

    return command.main()


if __name__ == "__main__":
    raise SystemExit(main())
