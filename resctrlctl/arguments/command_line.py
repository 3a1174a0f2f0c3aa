# SPDX-License-Identifier: Apache-2.0
"""Parse the command line: repair what argparse would misunderstand, and check combinations of options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

from resctrlctl.arguments.parser import Parser
from resctrlctl.arguments.verbs import JSON, VERBS, build
from resctrlctl.base.defaults import SOCKET

# The options before the verb whose value is the next word.
_WITH_VALUE = ("--socket", "--host", "-H")
# The verbs that concern this machine and not only its daemon, with what they do here.
_ONLY_HERE = {
    "plot": "reads a file on this machine",
    "doctor": "examines this machine",
    "classes": "reads the resctrl filesystem of this machine",
    "hooks": "reads and changes files on this machine",
    "units": "reads and changes files on this machine",
    "report": "reads the journal of this machine",
    "run": "runs its command on this machine",
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; return its options and arguments, with the name of the verb as ``verb``.

    Exits if the command line is wrong.
    """
    own, command, parser = _split(argv)
    # Without a verb, list. A wrong verb stays an error.
    if not _places_of_words(own) and not {"-h", "--help", "--version"}.intersection(own):
        own = [*own, "list"]
    parser = parser or build(_verbs_to_add(own))
    own = _with_joined_times(own)
    # Replace --json without a mode: argparse would take the next word, such as a key, as the mode.
    args, unknown = parser.parse_known_args(["-j" if word == JSON else word for word in own])
    unknown = _with_arguments_behind_options(args, unknown)
    # argparse would report this with the main parser, which has neither the verb's name nor its exit status.
    if unknown:
        args.parser.error(f"unknown argument: {unknown[0]}")
    if not all(map(_is_text, own)):
        args.parser.error("an argument is not UTF-8")
    if args.verb == "run":
        if not command:
            args.parser.error("the command is missing; it is last, for example: resctrlctl run make -j8")
        args.command = command
        if args.append and args.output is None:
            args.parser.error("argument --append: needs -o FILE")
        has_target = args.pid is not None or args.cgroup is not None or args.unit is not None
        if has_target and (args.class_ is not None or args.take_over):
            args.parser.error("--class and --take-over: not allowed with --pid, --cgroup or --unit")
        if args.field_separator is not None and args.json != "off":
            args.parser.error("argument -x: not allowed with --json")
    _check_combination(args)
    if args.host is not None:
        _check_remote(args)
    if args.socket is None:
        # The variable names a socket of this machine.
        args.socket = (args.host is None and os.environ.get("RESCTRLMOND_SOCKET")) or SOCKET
    return args


def _with_arguments_behind_options(args: argparse.Namespace, unknown: list[str]) -> list[str]:
    """Add the arguments of an action behind an option, as in ``profiles check -q FILE``; return the unknown ones.

    argparse gives optional arguments up at the first option, in Python 3.11 at least.
    """
    if not unknown or not all(word and not word.startswith("-") for word in unknown):
        return unknown
    if args.verb == "units":
        args.glob = [*args.glob, *unknown]
        return []
    if args.verb == "profiles" and args.subject is None:
        args.subject = unknown[0]
        return unknown[1:]
    return unknown


def _check_combination(args: argparse.Namespace) -> None:
    """Exit if an option or argument of a verb requires, or excludes, another one."""
    if args.verb == "profiles" and (args.subject is None) != (args.action == "list"):
        missing = {
            "show": "the name of a profile",
            "check": "the path of a file",
            "explain": "the name of a workload",
        }
        args.parser.error(
            f"{args.action}: "
            + ("an argument is not allowed" if args.subject else f"{missing[args.action]} is missing")
        )
    if args.verb == "profiles" and args.root is not None and args.action != "check":
        args.parser.error(f"argument --root: not allowed with {args.action}: only check needs the classes")
    if args.verb == "report" and args.csv and args.json != "off":
        args.parser.error("argument --csv: not allowed with --json")
    if args.verb == "plot" and args.json != "off":
        args.parser.error("argument --json: the recording itself is JSON")
    if args.verb == "list":
        _check_list(args)
    if args.verb == "show" and args.value and not args.property:
        args.parser.error("argument --value: needs -p NAME")
    if args.verb == "show" and args.why and (args.property or args.root is not None):
        args.parser.error(f"argument --why: not allowed with {'-p/--property' if args.property else '--root'}")
    if args.verb == "show" and args.property and args.json != "off":
        args.parser.error("argument -p/--property: not allowed with --json")
    if args.verb == "assign" and args.tree and args.pid is None:
        args.parser.error("argument --tree: not allowed with --cgroup, which includes all control groups below it")
    if args.verb == "units" and args.action != "status" and not args.glob:
        needed, example = ("SERVICE", "nginx.service") if "exact" in args.action else ("GLOB", "'*.service'")
        args.parser.error(
            f"{args.action}: {needed} is missing, for example: resctrlctl units {args.action} {example}"
        )
    if args.verb == "units" and args.action == "status" and args.glob:
        args.parser.error("status: an argument is not allowed: it shows all globs")


def _check_list(args: argparse.Namespace) -> None:
    if args.units and (args.pods or args.columns):
        args.parser.error(f"argument --units: not allowed with {'--pods' if args.pods else '--columns'}")
    # The list of pods has no figures and columns of its own: an option that it ignores would give a wrong list.
    excluded = {
        "--all": args.all,
        "--columns": args.columns,
        "--filter": args.filter,
        "--rate": args.rate,
        "--sort": args.sort,
    }
    found = [name for name, value in excluded.items() if value]
    if args.pods and found:
        args.parser.error(f"argument --pods: not allowed with {found[0]}")


def _check_remote(args: argparse.Namespace) -> None:
    """Exit if the verb, or one of its options, does not concern the daemon of another host."""
    reason = _ONLY_HERE.get(args.verb, "")
    if args.verb == "profiles" and args.action != "explain":
        reason = "reads files on this machine, except with explain"
    if args.verb == "status" and args.unit:
        reason = "of a unit asks systemd on this machine"
    if reason:
        args.parser.error(
            f"argument -H/--host: not allowed, because {args.verb} {reason}. Run it there: ssh HOST resctrlctl "
            f"{args.verb}"
        )
    if getattr(args, "root", None) is not None:
        args.parser.error("argument --root: not allowed with -H/--host, because it reads files on this machine")


def _split(argv: list[str]) -> tuple[list[str], list[str], Parser | None]:
    """Return the words of resctrlctl, those of the command of run, and the parser if the verb is run.

    The command begins after --, or with the first word that is neither an option nor its value.
    """
    at = next(iter(_places_of_words(argv)), None)
    if at is None or argv[at] != "run":
        return argv, [], None
    parser = build(["run"])
    with_value = parser.verbs["run"].options_with_value
    index = at + 1
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return argv[:index], argv[index + 1 :], parser
        if not word.startswith("-") or word == "-":
            return argv[:index], argv[index:], parser
        index += 2 if _ends_with_option(word, with_value) else 1
    return argv, [], parser


def _ends_with_option(word: str, with_value: Collection[str]) -> bool:
    """Return whether the next word is the value of an option, such as -o, or of the last one of -qo."""
    if word.startswith("--"):
        return word in with_value
    first = next((index for index in range(1, len(word)) if f"-{word[index]}" in with_value), None)
    return first is not None and first == len(word) - 1


def _with_joined_times(words: list[str]) -> list[str]:
    """Return the words with --since and --until joined to their values: argparse would take -1h as an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--since", "--until") and word:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _places_of_words(words: list[str]) -> list[int]:
    """Return the indices of the words, without the options and the values of the common options."""
    return [
        index
        for index, word in enumerate(words)
        if not word.startswith("-") and (index == 0 or not _ends_with_option(words[index - 1], _WITH_VALUE))
    ]


def _verbs_to_add(words: list[str]) -> Collection[str]:
    """Return the verbs that the parser must know for this command line: all of them for its help or a wrong verb."""
    verb = next((words[index] for index in _places_of_words(words)), "")
    is_help = "-h" in words or "--help" in words
    return VERBS if is_help or verb not in VERBS else [verb]


def _is_text(word: str) -> bool:
    # Python decodes bytes that are not UTF-8 to lone surrogates, which JSON cannot encode.
    return not any("\ud800" <= character <= "\udfff" for character in word)
