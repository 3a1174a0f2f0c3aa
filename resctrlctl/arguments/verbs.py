# SPDX-License-Identifier: Apache-2.0
"""The verbs and their options, with the texts of --help."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from resctrlctl.arguments.parser import (
    MAX_PRIORITY,
    Parser,
    count,
    milliseconds,
    name_and_value,
    priority,
    process_id,
    seconds,
    words,
)
from resctrlctl.base.defaults import CLAIM, HOOKS_DIR, SOCKET
from resctrlctl.base.errors import OWN_FAILURE, PROGRAM
from resctrlmond import __version__
from resctrlmond.service.arguments import not_empty

_DESCRIPTION = "Show and control the workloads that resctrlmond monitors, and run a command as a workload."
_EPILOG = """\
examples:
  resctrlctl list
  resctrlctl list --watch --sort power
  resctrlctl top --by namespace
  resctrlctl record -o use.jsonl -n 60
  resctrlctl plot use.jsonl --html use.html
  resctrlctl list --pods
  resctrlctl list --units
  resctrlctl show --json=pretty web.service
  resctrlctl status nginx.service
  resctrlctl run make -j8
  resctrlctl assign batch --cgroup /sys/fs/cgroup/batch.slice
  resctrlctl release batch
  resctrlctl move batch silver
  resctrlctl hooks enable
  resctrlctl doctor
  resctrlctl sums --by user
  resctrlctl report --since yesterday --by namespace
  resctrlctl -H root@web1 top

exit status:
  0    done
  1    failure
  2    the command line is wrong
  3    resctrlmond is not running, or resctrl is not mounted or does not monitor; status: a unit is not running
  4    no such workload, claim, process, control group or unit
  5    no RMID is free
  8    doctor: the worst finding is a warning
  9    doctor: there is an error
  77   access denied
'run' exits with the command's status (128+N if signal N ended it), with 125 if resctrlctl fails before the
command starts, with 126 if the command cannot be executed, and with 127 if it is not found.
"""
_EPILOGS = {
    "run": """\
examples:
  resctrlctl run -r 5 -e core_energy sleep 1
  resctrlctl run --key nightly --json -o nightly.json make -j8
  resctrlctl run --unit web.service sleep 10
""",
    "units": """\
actions:
  enable    watch the units that the globs select, from now on; with "!" in front, a glob excludes units
  disable   remove globs
  exact     make the figures of services exact from their next start on, if
            resctrlmond-witness is loaded
  inexact   undo exact
  status    show the globs and the files that set them; the default

examples:
  resctrlctl units enable '*.service' '!getty@*'
  resctrlctl units exact nginx.service
  systemctl stop nginx.service; sleep 2; systemctl start nginx.service
  resctrlctl list --units
  resctrlctl status nginx.service
  resctrlctl units disable '*.service' '!getty@*'
""",
    "profiles": """\
actions:
  list      show the profiles and the rules that select them, from the files
  show      show one profile
  check     check a file before it is copied to /etc/resctrlmond/profiles.d
  explain   ask the daemon which profile a workload, unit or container has, and why

examples:
  resctrlctl profiles check batch.yaml && cp batch.yaml /etc/resctrlmond/profiles.d
  systemctl reload resctrlmond
  resctrlctl profiles explain nginx.service
""",
}
JSON = "--json"
_WORKLOAD = (
    "the workload: its name in the list, its key (pod UID, container id, unit, ...), or the beginning of an id"
)
_PATTERN = "only workloads whose key or name matches this pattern, such as 'shop/*' (default: all)"
# The filters of list, which workload_table.FILTERS defines.
_FILTERS = ("state", "class", "owner", "quality", "namespace", "pod", "container", "unit", "key")
# The kinds of changes, which types.ChangeKind defines.
_CHANGES = ("present", "added", "pending", "changed", "ended", "lost", "removed")
# The groupings and columns of top, which top_view.By and top_view.COLUMNS define.
_GROUPINGS = ("workload", "pod", "namespace", "unit", "class", "domain")
# The groupings of sums, which states.NameKind defines.
_SUM_GROUPINGS = ("namespace", "slice", "user", "profile")
_TOP_SORTS = ("name", "workloads", "power", "bandwidth", "llc", "energy", "age", "quality")


def build(added: Collection[str] | None = None) -> Parser:
    """Return the parser with all verbs, or only with the verbs ``added``: adding all takes longer than parsing."""
    parser = Parser(prog=PROGRAM, description=_DESCRIPTION, epilog=_EPILOG, parents=[_common(first=True)])
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    common = _common(first=False)
    for name in VERBS if added is None else added:
        summary, _, arguments = VERBS[name]
        verb = verbs.add_parser(
            name,
            prog=f"resctrlctl {name}",
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=_EPILOGS.get(name),
            parents=[common],
        )
        if name == "run":
            verb.usage_status = OWN_FAILURE
        verb.set_defaults(verb=name, parser=verb)
        arguments(verb)
        parser.verbs[name] = verb
    return parser


def _common(*, first: bool) -> Parser:
    # These options are accepted before and after the verb. Only the main parser has defaults, because a default of
    # the verb's parser would overwrite an option before the verb.
    def default(value: object) -> Any:
        return value if first else argparse.SUPPRESS

    options = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    options.add_argument(
        JSON,
        nargs="?",
        choices=("short", "pretty", "off"),
        metavar="MODE",
        default=default("off"),
        help="print JSON: short (one line), pretty or off; without MODE, the same as -j",
    )
    options.add_argument(
        "-j",
        dest="json",
        action="store_const",
        const="auto",
        help="print JSON: pretty on a terminal, short elsewhere",
    )
    options.add_argument(
        "--no-legend", action="store_true", default=default(False), help="print no headings and no footer"
    )
    options.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        default=default(False),
        help="print no notes and no confirmations; list: print only keys",
    )
    options.add_argument(
        "-l",
        "--full",
        action="store_true",
        default=default(False),
        help="do not cut lines to the width of the terminal",
    )
    options.add_argument(
        "--socket",
        type=not_empty,
        metavar="PATH",
        default=default(None),
        help=f"the socket of resctrlmond (default: $RESCTRLMOND_SOCKET, else {SOCKET})",
    )
    options.add_argument(
        "-H",
        "--host",
        type=not_empty,
        metavar="HOST",
        default=default(None),
        help="ask resctrlmond on another host, [USER@]HOST[:PORT], over ssh",
    )
    return options


def _list(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "-a", "--all", action="store_true", help="list workloads that have ended too, and groups of other programs"
    )
    verb.add_argument(
        "--pods", action="store_true", help="list pods with their containers, including unmonitored ones"
    )
    verb.add_argument(
        "--units",
        action="store_true",
        help="list the systemd units as a tree, with the sums of the workloads in them",
    )
    verb.add_argument(
        "--columns", type=words, metavar="NAME,...", default=[], help="the columns; see LIST in resctrlctl(1)"
    )
    verb.add_argument("--sort", metavar="NAME", help="sort by a column: numbers from the largest, texts from A")
    _filters(verb)
    verb.add_argument(
        "--rate", action="store_true", help="read twice, one second apart, for power and bandwidth of that second"
    )
    verb.add_argument(
        "--watch",
        type=seconds,
        metavar="SECONDS",
        nargs="?",
        const=1.0,
        help="repeat every SECONDS (default: 1), with power and bandwidth of that time, until interrupted",
    )
    _root(verb)


def _filters(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--filter",
        type=_filter,
        metavar="NAME=PATTERN",
        action="append",
        default=[],
        help=f"list only workloads that match; can be repeated. NAME: {', '.join(_FILTERS)}",
    )


def _top(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "-b", "--batch", action="store_true", help="print lines of text; always so if there is no terminal"
    )
    verb.add_argument("-n", "--iterations", type=count, metavar="N", help="end after N intervals")
    verb.add_argument(
        "-d", "--delay", type=seconds, metavar="SECONDS", default=1.0, help="the length of an interval (default: 1)"
    )
    verb.add_argument(
        "--by", choices=_GROUPINGS, default=_GROUPINGS[0], help="what a row stands for (default: workload)"
    )
    verb.add_argument("--sort", choices=_TOP_SORTS, default="power", help="the column to sort by (default: power)")
    verb.add_argument("-r", "--reverse", action="store_true", help="reverse the order")
    _filters(verb)


def _record(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("key", metavar="PATTERN", nargs="*", default=[], help=_PATTERN)
    verb.add_argument(
        "-o",
        "--output",
        type=not_empty,
        metavar="FILE",
        required=True,
        help="the file to write; - is standard output",
    )
    verb.add_argument(
        "-d", "--delay", type=seconds, metavar="SECONDS", default=1.0, help="the time between readings (default: 1)"
    )
    verb.add_argument("-n", "--count", type=count, metavar="N", help="end after N readings")
    verb.add_argument("--parquet", action="store_true", help="write a Parquet file at the end; needs pyarrow")
    _filters(verb)


def _watch(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("key", metavar="PATTERN", nargs="*", default=[], help=_PATTERN)
    verb.add_argument(
        "--change",
        choices=_CHANGES,
        action="append",
        default=[],
        help="show only changes of this kind; can be repeated",
    )
    _filters(verb)


def _plot(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("file", metavar="FILE", type=not_empty, help="a file of 'record'; - is standard input")
    verb.add_argument("key", metavar="PATTERN", nargs="*", default=[], help=_PATTERN)
    verb.add_argument(
        "--html", type=not_empty, metavar="PAGE", help="write a page with plots to PAGE; needs matplotlib"
    )


def _show(verb: argparse.ArgumentParser) -> None:
    text = f"{_WORKLOAD}; or a class (/ is the root), or the name or path of a foreign group"
    verb.add_argument("key", metavar="NAME", nargs="+", help=text)
    verb.add_argument("--raw", action="store_true", help="show the counters of each domain too")
    verb.add_argument("--why", action="store_true", help="show the proofs on which the quality rests too")
    verb.add_argument(
        "-p",
        "--property",
        type=words,
        metavar="NAME,...",
        default=[],
        help="print only these properties, as NAME=VALUE, such as core_energy",
    )
    verb.add_argument("--value", action="store_true", help="with -p: print only the values")
    _root(verb)


def _no_arguments(_verb: argparse.ArgumentParser) -> None:
    return


def _status(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "unit",
        metavar="UNIT",
        nargs="*",
        type=not_empty,
        help="a unit, such as nginx.service or user-1000:app.service, or a glob: is it watched, and what did it use",
    )
    verb.set_defaults(root=None)


def _machine(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--domains", action="store_true", help="a line for each L3 cache and processor package")
    verb.add_argument(
        "--rate", action="store_true", help="with --json: read twice, half a second apart, for power and bandwidth"
    )
    verb.add_argument(
        "--watch",
        type=seconds,
        metavar="SECONDS",
        nargs="?",
        const=1.0,
        help="repeat every SECONDS (default: 1), with power and bandwidth of that time, until interrupted",
    )


def _sums(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--by",
        choices=_SUM_GROUPINGS,
        default=_SUM_GROUPINGS[0],
        help="add up the workloads of the same name (default: namespace)",
    )


def _create(verb: argparse.ArgumentParser) -> None:
    _key(verb)
    _class(verb)
    _claim(verb)
    _attribute(verb)
    _pending(verb)


def _assign(verb: argparse.ArgumentParser) -> None:
    _key(verb)
    tasks = verb.add_mutually_exclusive_group(required=True)
    tasks.add_argument("--pid", type=process_id, metavar="PID", help="a process with all its threads")
    tasks.add_argument(
        "--cgroup",
        type=not_empty,
        metavar="PATH",
        help="the directory of a control group, with all control groups below it",
    )
    verb.add_argument("--tree", action="store_true", help="with --pid: move all its descendants too")
    _class(verb)
    verb.add_argument(
        "--allow-class-change", action="store_true", help="move the tasks to the class if they are in another one"
    )
    _take_over(verb)
    verb.add_argument("--member", metavar="ID", help="the id of the process or control group as a member")
    _claim(verb)
    _attribute(verb)
    _pending(verb)


def _release(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("key", metavar="WORKLOAD", help=_WORKLOAD)
    _claim(verb)
    verb.add_argument("--reason", metavar="TEXT", help="the reason, for the record of the workload")


def _move(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("key", metavar="WORKLOAD", help=_WORKLOAD)
    verb.add_argument(
        "class_", type=not_empty, metavar="CLASS", help="a class (control group) of resctrl; / is the root"
    )


def _run(verb: argparse.ArgumentParser) -> None:
    verb.usage = "resctrlctl run [options] [--] COMMAND [ARGUMENT...]"
    verb.add_argument("--key", type=not_empty, metavar="KEY", help="the workload's key (default: run-PID-STARTTIME)")
    target = verb.add_mutually_exclusive_group()
    target.add_argument(
        "-p",
        "--pid",
        type=process_id,
        metavar="PID",
        help="measure this process and its descendants while the command runs, and not the command",
    )
    target.add_argument(
        "--cgroup",
        type=not_empty,
        metavar="PATH",
        help="measure the control group at PATH, and all below it, while the command runs",
    )
    target.add_argument(
        "--unit", type=not_empty, metavar="NAME", help="measure this unit of systemd while the command runs"
    )
    _class(verb)
    _take_over(verb)
    verb.add_argument(
        "--best-effort", action="store_true", help="if the command cannot be monitored, run it unmonitored"
    )
    verb.add_argument(
        "-o",
        "--output",
        type=not_empty,
        metavar="FILE",
        help="write the report to FILE instead of standard error",
    )
    verb.add_argument("--append", action="store_true", help="with -o: append to FILE")
    verb.add_argument(
        "-r", "--repeat", type=count, metavar="N", default=1, help="run N times, and report means and deviations"
    )
    verb.add_argument(
        "-I",
        "--interval-print",
        dest="interval_ms",
        type=milliseconds,
        metavar="MS",
        help="also print what was used in each interval of MS milliseconds",
    )
    verb.add_argument(
        "-e",
        "--events",
        type=words,
        metavar="PATTERN,...",
        default=[],
        help="report only events that match, such as 'core_energy,mbm_*'",
    )
    verb.add_argument(
        "-x",
        "--field-separator",
        type=not_empty,
        metavar="TEXT",
        help="print a line for each event, with fields that are separated by TEXT: event, unit, total, deviation, "
        "per second, quality",
    )


def _action(verb: argparse.ArgumentParser, actions: tuple[str, ...], text: str) -> None:
    # argparse names a missing argument by its metavar, and its choices in usage by the same text.
    verb.add_argument("action", choices=actions, metavar=f"{{{','.join(actions)}}}", help=text)


def _hooks(verb: argparse.ArgumentParser) -> None:
    _action(verb, ("enable", "disable", "status"), "the action on the OCI hooks")
    verb.add_argument(
        "--hooks-dir",
        type=not_empty,
        metavar="PATH",
        default=HOOKS_DIR,
        help=f"the directory that the runtimes read (default: {HOOKS_DIR})",
    )


def _units(verb: argparse.ArgumentParser) -> None:
    actions = ("enable", "disable", "exact", "inexact", "status")
    verb.add_argument("action", choices=actions, nargs="?", default="status", help="the action on units")
    verb.add_argument(
        "glob", metavar="GLOB", nargs="*", help="units, such as nginx.service, '*.service' or '!getty@*'"
    )


def _profiles(verb: argparse.ArgumentParser) -> None:
    _action(verb, ("list", "show", "check", "explain"), "the action on the profiles")
    verb.add_argument(
        "subject",
        metavar="NAME",
        nargs="?",
        type=not_empty,
        help="show: the profile; check: the file; explain: the workload or container",
    )
    verb.add_argument(
        "--profiles-dir",
        type=not_empty,
        metavar="PATH",
        help="the directory to read instead of those of the daemon",
    )
    verb.add_argument(
        "--root",
        type=not_empty,
        metavar="PATH",
        help="check: the resctrl filesystem (or simulator) whose classes the profiles can name",
    )


def _root(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--root",
        type=not_empty,
        metavar="PATH",
        help="read the resctrl filesystem (or simulator) at PATH, without asking resctrlmond",
    )


def _report(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--since", type=not_empty, metavar="TIME", help="only workloads that ended at TIME or later")
    verb.add_argument(
        "--until",
        type=not_empty,
        metavar="TIME",
        help="only workloads that ended at TIME or earlier; systemd.time(7)",
    )
    verb.add_argument(
        "--by",
        choices=("key", "namespace", "pod", "unit", "user", "class"),
        default="key",
        help="add up the workloads of the same name (default: key)",
    )
    verb.add_argument("--csv", action="store_true", help="print comma-separated values, each with every digit")


def _key(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("key", metavar="KEY", help="the workload: pod UID, container id, unit name or other key")


def _class(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--class",
        dest="class_",
        type=not_empty,
        metavar="CLASS",
        help="the class (control group) of resctrl; / is the root (default: follow, the class of the tasks)",
    )


def _claim(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--claim",
        type=not_empty,
        metavar="OWNER",
        default=CLAIM,
        help=f"the owner of the claim (default: {CLAIM})",
    )


def _attribute(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--attribute",
        type=name_and_value,
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an attribute to show with the workload; can be repeated",
    )


def _take_over(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--take-over", action="store_true", help="take tasks out of other monitoring groups")


def _pending(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--no-pending", action="store_true", help="fail if no RMID is free, instead of waiting for one")
    verb.add_argument(
        "--priority",
        type=priority,
        metavar="N",
        help=f"the order in which pending workloads get free RMIDs: -{MAX_PRIORITY} to {MAX_PRIORITY}, highest first",
    )


def _filter(text: str) -> tuple[str, str]:
    name, pattern = name_and_value(text, "NAME=PATTERN")
    if name not in _FILTERS:
        raise argparse.ArgumentTypeError(f"there is no filter {name!r}; choose from {', '.join(_FILTERS)}")
    return name, pattern


# Each verb: its summary, the module and name of its function, which is imported when the verb is called, and the
# function that adds its arguments.
VERBS = {
    "list": (
        "list the workloads with what they use; the default verb",
        "workloads.listing:list_workloads",
        _list,
    ),
    "top": ("show what the workloads use now, again and again", "live.top:top", _top),
    "watch": ("report what happens to the workloads, as it happens", "live.watch:watch", _watch),
    "record": ("write what the workloads use to a file, again and again", "live.record:record", _record),
    "plot": ("show a recording as plots in the terminal, or as a page", "live.plot:plot", _plot),
    "show": ("show workloads, foreign groups or classes with their counters", "workloads.show:show", _show),
    "status": (
        "show the state of resctrlmond and of the machine, or of systemd units",
        "host.status:status",
        _status,
    ),
    "doctor": ("examine this machine, and explain each fault with its remedy", "doctor.verb:doctor", _no_arguments),
    "classes": (
        "show the classes with their cache ways, bandwidth limits and use",
        "workloads.classes:classes",
        _root,
    ),
    "machine": (
        "show what the whole machine used, and how much of it the workloads used",
        "host.machine:machine",
        _machine,
    ),
    "sums": (
        "show what all workloads used since the boot, by namespace, slice, user or profile",
        "host.sums:sums",
        _sums,
    ),
    "create": ("create a workload with an empty group", "workloads.control:create", _create),
    "assign": ("move a process or a control group into a workload's group", "workloads.control:assign", _assign),
    "release": ("end a claim; the workload ends with its last claim", "workloads.control:release", _release),
    "move": ("move a workload's group to another class, with its counters", "workloads.control:move", _move),
    "hooks": ("enable or disable the OCI hooks of Podman and CRI-O, or show their state", "host.hooks:hooks", _hooks),
    "units": ("watch systemd units that globs select, or show the globs", "units.verb:units", _units),
    "profiles": (
        "list, show, check and explain the profiles of containers and units",
        "host.profiles:profiles",
        _profiles,
    ),
    "report": ("add up what ended workloads used, from the journal", "workloads.report:report", _report),
    "run": ("run a command as a workload, and print what it used", "run.verb:run", _run),
}
