# SPDX-License-Identifier: Apache-2.0
"""The command resctrlctl: from its arguments to an exit status."""

from __future__ import annotations

import io
import os
import sys

from resctrlctl.arguments import parse
from resctrlctl.ask import Failure
from resctrlctl.run import run
from resctrlctl.screen import Json, Screen, complain
from resctrlmond.api.errors import FAILURE

# 128 + SIGINT, as a shell has it.
_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Do what the arguments say; the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A locale without the ellipsis, or without somebody's name, is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = parse(sys.argv[1:] if argv is None else argv)
    to_terminal = sys.stderr.isatty() and not args.output if args.verb is run else sys.stdout.isatty()
    mode = args.json if args.json != "auto" else "pretty" if to_terminal else "short"
    screen = Screen(Json(mode), legend=not args.no_legend, quiet=args.quiet, full=args.full)
    try:
        status = args.verb(args, screen)
        sys.stdout.flush()
    except Failure as failure:
        complain(str(failure))
        return failure.status
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain once more when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except OSError as error:
        complain(str(error))
        return FAILURE
    except KeyboardInterrupt:
        return _INTERRUPTED
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
