# SPDX-License-Identifier: Apache-2.0
"""The command resctrlctl: from its arguments to an exit status."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from resctrlctl.arguments import parse
from resctrlctl.ask import Failure
from resctrlctl.run import run
from resctrlctl.screen import Json, Screen, complain
from resctrlmond.api.errors import FAILURE


def main(argv: list[str] | None = None) -> int:
    """Do what the arguments say; the exit status."""
    _prepare_streams()
    try:
        try:
            status = _do(sys.argv[1:] if argv is None else argv)
        except Failure as failure:
            complain(str(failure))
            status = failure.status
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()  # the reader of our output has enough
        return FAILURE
    except OSError as error:
        _discard_output()
        complain(f"{error.filename or 'cannot write the output'}: {error.strerror or error}")
        return FAILURE
    return status


def _do(argv: list[str]) -> int:
    try:
        args = parse(argv)
    except SystemExit as ended:  # argparse: after --help, or for a wrong command line
        return int(ended.code or 0)
    to_terminal = sys.stderr.isatty() and not args.output if args.verb is run else sys.stdout.isatty()
    mode = args.json if args.json != "auto" else "pretty" if to_terminal else "short"
    screen = Screen(Json(mode), legend=not args.no_legend, quiet=args.quiet, full=args.full)
    return int(args.verb(args, screen))


def _prepare_streams() -> None:
    # Python has None for a stream that is closed. Writing to a descriptor that is open for reading gives EBADF too;
    # messages on a closed standard error are lost without an error.
    for name, flags in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A locale without the ellipsis, or without somebody's name, is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    # Python writes what is left in its buffer at its exit, and would complain once more.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno(), inheritable=False)
