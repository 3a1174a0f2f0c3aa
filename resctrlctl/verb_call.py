# SPDX-License-Identifier: Apache-2.0
"""Call the function of a verb, with its options and its output."""

from __future__ import annotations

import argparse
import sys

from resctrlctl.arguments import VERBS
from resctrlctl.screen.output import Json, Output


def call_verb(args: argparse.Namespace) -> int:
    """Import the module of the verb, call its function, and return the exit status."""
    to_terminal = sys.stderr.isatty() and not args.output if args.verb == "run" else sys.stdout.isatty()
    mode = args.json if args.json != "auto" else "pretty" if to_terminal else "short"
    output = Output(Json(mode), legend=not args.no_legend, quiet=args.quiet, full=args.full)
    module, _, function = VERBS[args.verb][1].partition(":")
    name = f"resctrlctl.{module}"
    __import__(name)  # importing importlib takes as long as a module of a verb
    call = getattr(sys.modules[name], function)
    if args.host is None:
        return int(call(args, output))
    from resctrlctl.connection.remote import Remote  # noqa: PLC0415 - only --host needs it

    # A second thread of top reads the machine.
    with Remote(args.host, args.socket, 2 if args.verb == "top" else 1) as args.socket:
        return int(call(args, output))
