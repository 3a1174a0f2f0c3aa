# SPDX-License-Identifier: Apache-2.0
"""Run the command resctrlctl: parse its arguments, call the verb, and return the exit status."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from resctrlctl.base.errors import INVALID_NUMBER, PROGRAM, CommandError, print_error
from resctrlmond import __version__
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
    if argv == ["--version"]:
        # Scripts ask often: argparse takes as long to import as Python to start.
        print(f"{PROGRAM} {__version__}")
        return 0
    if argv[:1] == ["bridge"]:
        # ssh starts it for each connection of --host.
        from resctrlctl.connection.bridge import bridge  # noqa: PLC0415

        return bridge(argv[1:])
    from resctrlctl.arguments import parse  # noqa: PLC0415

    try:
        args = parse(argv)
    except SystemExit as ended:  # from argparse, after --help or for a wrong command line
        return int(ended.code or 0)
    # --help and a wrong command line need none of these modules, and no types of the interface.
    from resctrlctl.verb_call import call_verb  # noqa: PLC0415

    return call_verb(args)


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
