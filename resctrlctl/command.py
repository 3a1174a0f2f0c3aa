# SPDX-License-Identifier: Apache-2.0
"""Run the command resctrlctl: parse its arguments, call the verb, and return the exit status."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys

from resctrlctl.arguments.command_line import parse
from resctrlctl.arguments.verbs import VERBS
from resctrlctl.base.errors import INVALID_NUMBER, CommandError, print_error
from resctrlctl.connection.bridge import bridge
from resctrlctl.connection.remote import Remote
from resctrlctl.screen.output import Json, Output
from resctrlmond.api.exit_codes import FAILURE


def main(argv: list[str] | None = None) -> int:
    """Run resctrlctl with these arguments; return its exit status."""
    _prepare_streams()
    try:
        try:
            status = _call(sys.argv[1:] if argv is None else argv)
        except CommandError as error:
            print_error(str(error))
            status = error.status
        except ArithmeticError:
            print_error(INVALID_NUMBER)
            status = FAILURE
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()  # the reader of the pipe has closed it, as head(1) does
        return FAILURE
    except OSError as error:
        _discard_output()
        print_error(f"{error.filename or 'cannot write the output'}: {error.strerror or error}")
        return FAILURE
    return status


def _call(argv: list[str]) -> int:
    if argv[:1] == ["bridge"]:
        return bridge(argv[1:])  # ssh starts it for each connection of --host
    try:
        args = parse(argv)
    except SystemExit as ended:  # from argparse, after --help or for a wrong command line
        return int(ended.code or 0)
    to_terminal = sys.stderr.isatty() and not args.output if args.verb == "run" else sys.stdout.isatty()
    mode = args.json if args.json != "auto" else "pretty" if to_terminal else "short"
    output = Output(Json(mode), legend=not args.no_legend, quiet=args.quiet, full=args.full)
    module, _, function = VERBS[args.verb][1].partition(":")
    call = getattr(importlib.import_module(f"resctrlctl.{module}"), function)
    if args.host is None:
        return int(call(args, output))
    # A second thread of top reads the machine.
    with Remote(args.host, args.socket, 2 if args.verb == "top" else 1) as args.socket:
        return int(call(args, output))


def _prepare_streams() -> None:
    # Python sets a stream to None if its descriptor is closed. A write to a descriptor that is open for reading
    # returns EBADF as well; messages to a closed standard error are discarded.
    for name, flags in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # The locale's encoding may lack the ellipsis, or a character of a pod's name: UnicodeEncodeError otherwise.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    # Python writes the rest of its buffer when it exits, and would report the same error again.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno(), inheritable=False)
