# SPDX-License-Identifier: Apache-2.0
"""The command ``resctrlmond-sim MOUNTPOINT``: mount a simulated resctrl until a signal stops it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

from resctrlmond import __version__
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.service.arguments import Parser
from resctrlmond.sim.fuse.mount import serve
from resctrlmond.sim.profiles import PROFILES, Kernel, Profile, profile_named

PROGRAM = "resctrlmond-sim"
Number = TypeVar("Number", int, float)


def describe(profile: Profile) -> str:
    """Describe the machine in one line."""
    count = profile.domains
    parts = [f"{profile.num_rmids} RMIDs", f"{count} L3 cache{'s' if count > 1 else ''}"]
    if profile.nodes_per_cache > 1:
        parts.append(f"{profile.nodes_per_cache} nodes in each")
    if profile.mbm_counters:
        parts.append(f"{profile.mbm_counters} assignable bandwidth counters in each")
    if profile.configurable_events:
        parts.append("configurable bandwidth events")
    parts.append(" ".join(event.name for event in (*profile.cache_events, *profile.package_events)))
    parts.append(f"{profile.num_closids} CLOSIDs" if profile.can_allocate else "no control groups")
    return ", ".join(parts)


def profiles() -> str:
    """List all machines, one on each line."""
    width = max(map(len, PROFILES))
    return "\n".join(f"{profile.name:{width}}  {describe(profile)}" for profile in PROFILES.values())


def _integer(text: str) -> int:
    # argparse would have the type of Python in its message.
    return _converted(int, text, "a number")


def _real(text: str) -> float:
    return _converted(float, text, "a number")


def _hexadecimal(text: str) -> int:
    return _converted(lambda digits: int(digits, 16), text, "a hexadecimal number")


def _converted(convert: Callable[[str], Number], text: str, kind: str) -> Number:
    try:
        return convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = Parser(
        prog=PROGRAM,
        usage="%(prog)s [options] MOUNTPOINT",
        description="Mount a simulated resctrl filesystem. Its counters follow a fixed model on the CPU time of "
        "the real tasks in its groups; nothing in it is a measurement.",
    )
    made.add_argument("mountpoint", metavar="MOUNTPOINT", nargs="?", help="an empty directory")
    made.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    made.add_argument("--list-profiles", action="store_true", help="print the machines with their events, and exit")
    made.add_argument("--profile", default="intel-aet", choices=PROFILES, help="the machine (default: %(default)s)")
    made.add_argument(
        "--kernel",
        default=Kernel.NEWEST.value,
        choices=[kernel.value for kernel in Kernel],
        help="the kernel version to simulate (default: %(default)s)",
    )
    made.add_argument("--rmids", type=_integer, metavar="N", help="the number of RMIDs, including that of the root")
    made.add_argument(
        "--closids", type=_integer, metavar="N", help="the number of control groups, including the root"
    )
    made.add_argument("--domains", type=_integer, metavar="N", help="the number of L3 caches and packages")
    made.add_argument(
        "--counters", type=_integer, metavar="N", help="the number of assignable bandwidth counters in an L3"
    )
    made.add_argument(
        "--lag-ms",
        type=_real,
        metavar="MS",
        help="the interval of telemetry pushes; above 2, no figure is exact (default: 2)",
    )
    made.add_argument("--telemetry-bits", type=_integer, metavar="N", help="where telemetry wraps (default: 63)")
    made.add_argument("--mbm-bits", type=_integer, metavar="N", help="where a bandwidth counter wraps (default: 32)")
    made.add_argument("--cbm-bits", type=_integer, metavar="N", help="the number of bits in the mask of a class")
    made.add_argument(
        "--shareable-bits", type=_hexadecimal, metavar="MASK", help="the bits that the hardware uses too, hexadecimal"
    )
    made.add_argument(
        "--sparse-masks", type=_integer, metavar="0|1", help="whether a mask may have holes (default: 0)"
    )
    made.add_argument("--events", metavar="NAMES", help="the events of an L3, separated by commas: llc_occupancy,...")
    made.add_argument(
        "--debug", action="store_true", help="as with mount -o debug: groups have mon_hw_id, ctrl_hw_id"
    )
    made.add_argument("--cpus", type=_integer, metavar="N", help="the number of CPUs (default: that of this machine)")
    made.add_argument(
        "--residue",
        type=_integer,
        metavar="SEED",
        help="start telemetry with a pseudo-random history of every RMID, instead of Unavailable",
    )
    made.add_argument(
        "--virtual",
        type=_integer,
        metavar="CPUS",
        help="use virtual tasks on CPUS virtual CPUs; orders create and run them",
    )
    made.add_argument("--until-eof", action="store_true", help="also exit at the end of standard input")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return the exit status: 0 after an orderly end, 1 if the simulation could not be mounted.

    A wrong command line ends the process with the exit status 2.
    """
    command = parser()
    options = command.parse_args(arguments)
    if options.list_profiles:
        print(profiles())
        return 0
    if not options.mountpoint:
        command.error("MOUNTPOINT is missing")
    try:
        for cpus in (options.virtual, options.cpus):
            if cpus is not None and not 1 <= cpus <= 1024:
                raise ValueError(f"{cpus} CPUs cannot be simulated: give 1 to 1024")
        if options.virtual is not None and options.cpus is not None:
            raise ValueError("virtual tasks have their own CPUs: use either --cpus or --virtual")
        profile = profile_named(
            options.profile,
            rmids=options.rmids,
            domains=options.domains,
            closids=options.closids,
            counters=options.counters,
            kernel=options.kernel,
            lag_ms=options.lag_ms,
            telemetry_bits=options.telemetry_bits,
            mbm_bits=options.mbm_bits,
            cbm_bits=options.cbm_bits,
            shareable_bits=options.shareable_bits,
            sparse_masks=options.sparse_masks,
            events=options.events,
            debug=options.debug,
        )
    except ValueError as error:
        command.error(str(error))
    try:
        serve(
            options.mountpoint,
            profile,
            options.residue,
            cpus=options.cpus,
            virtual_cpus=options.virtual,
            until_eof=options.until_eof,
        )
    except ResctrlError as failure:
        print(f"{PROGRAM}: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
