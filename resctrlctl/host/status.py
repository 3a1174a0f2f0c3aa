# SPDX-License-Identifier: Apache-2.0
"""The verb ``status``: the state of the daemon and of the machine, or that of systemd units."""

from __future__ import annotations

import argparse
import glob
import os

from msgspec.structs import replace

from resctrlctl.base.errors import OK, CommandError
from resctrlctl.connection.daemon import Daemon, daemon_of
from resctrlctl.host.machine import bar
from resctrlctl.screen.output import Json, Output
from resctrlctl.screen.width import has_blocks
from resctrlctl.units.unit_status import unit_status
from resctrlctl.workloads.render import render_status
from resctrlmond.api import signatures

# How long status waits for the counters of the machine.
_MACHINE_S = 2.0


def status(args: argparse.Namespace, output: Output) -> int:
    """Print the state of the daemon and of the machine, or that of units; return the exit status."""
    if args.unit:
        return unit_status(args, output)

    daemon = daemon_of(args)
    reply = daemon.call("ask for the status", signatures.STATUS)
    if output.json is not Json.OFF:
        output.print_json(reply)
    elif not output.quiet:
        without_hook = runtimes_without_hook() if args.host is None else []
        output.print_blocks(render_status(reply, without_hook, _use_of_machine(daemon)))
    return OK


def _use_of_machine(daemon: Daemon) -> tuple[str, ...]:
    """Return the shares of the machine's pools, or why they are not known: status must not hang as the kernel may."""
    try:
        reply = replace(daemon, timeout_s=_MACHINE_S).call("read what the machine used", signatures.MACHINE)
    except CommandError as error:
        return (f"not known: {error}",)
    return bar(reply.pools, has_blocks=has_blocks())


def runtimes_without_hook(root: str = "/") -> list[str]:
    """Return the container runtimes of this host that never call the OCI hook, detected by their files in /run."""
    found = ["Docker"] if os.path.exists(os.path.join(root, "run/docker.sock")) else []
    # Rootless Podman creates /run/user/UID/libpod.
    return [*found, *(["rootless Podman"] if glob.glob(os.path.join(root, "run/user/*/libpod")) else [])]
