# SPDX-License-Identifier: Apache-2.0
"""The verb ``profiles``: list, show and check the profiles in the files, and explain the profile of a workload."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence

import msgspec

from resctrlctl.base.defaults import SOCKET
from resctrlctl.base.errors import MISSING_CLASS, OK, CommandError
from resctrlctl.connection.daemon import Daemon, daemon_of
from resctrlctl.screen.format import format_class, format_count, format_duration, format_message
from resctrlctl.screen.layout import Block, Column, Row, Sheet, Table
from resctrlctl.screen.output import Json, Output
from resctrlctl.workloads.render import companion_text
from resctrlctl.workloads.selectors import matching
from resctrlmond.api import signatures, types
from resctrlmond.api.exit_codes import NO_SUCH_WORKLOAD, NOT_RUNNING
from resctrlmond.configuration import config, profile_files
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.host.unit_globs import TYPES, has_open_bracket, remedy_for_type
from resctrlmond.resctrl.errors import ResctrlError, printable
from resctrlmond.resctrl.tree import Tree
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.profiles.companion_settings import Companion
from resctrlmond.workloads.profiles.memory_settings import MemorySettings, Swap, text_of
from resctrlmond.workloads.profiles.profile import Profile, Profiles, Rule, missing_classes

_PROFILE_COLUMNS = (
    *map(Column, ("PROFILE", "WATCH", "CLASS", "LINGER", "SNAPSHOT TTL", "PRIORITY", "DEFAULT")),
    Column("FROM", is_note=True),
)
_RULE_COLUMNS = (Column("RULE"), Column("PROFILE"), Column("CONDITIONS", is_note=True))


class CompanionReport(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The companion of a profile in the JSON output. ``memory_max`` is as the kernel writes it."""

    command: Sequence[str]
    template_file: str = ""
    template: str | None = None
    template_format: str | None = None
    restart: str
    memory_max: str
    cpu_quota: str
    tasks_max: int


class ProfileReport(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A profile in the JSON output. Keys that are not set are absent; times are in seconds."""

    name: str
    watch: str
    class_: str | None = msgspec.field(default=None, name="class")
    snapshot_ttl: float | None = None
    linger: float | None = None
    priority: int | None = None
    snapshot: bool | None = None
    events: Sequence[str] | None = None
    expose: bool | None = None
    swap: str | None = None
    memory_high: str | None = None
    allow_memory_annotations: dict[str, str] | None = None
    companion: CompanionReport | None = None
    origin: str = ""


class RuleReport(msgspec.Struct, frozen=True, rename="camel"):
    """A rule in the JSON output."""

    profile: str
    conditions: str
    origin: str


class ProfileList(msgspec.Struct, frozen=True, rename="camel"):
    """All profiles in the JSON output, the rules in their order, and the defaults ("" for none)."""

    profiles: list[ProfileReport]
    rules: list[RuleReport]
    default_profile: str
    default_unit_profile: str


class Selected(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The profile of a workload, container or unit in the JSON output: "" for none.

    ``source`` is the annotation, rule or default that selected it, ``reason`` why the container is in no group, and
    ``companion`` the state of the workload's companion. ``memory`` states what became of a unit's memory settings.
    """

    id: str
    profile: str
    source: str
    reason: str = ""
    companion: types.Companion | None = None
    memory: str = ""
    members: Sequence[Selected] = []


def profiles(args: argparse.Namespace, output: Output) -> int:
    """List, show or check profiles, or explain one; return the exit status."""
    if args.action == "explain":
        return _explain(args.subject, daemon_of(args), output)
    try:
        directories = profile_files.chosen(args.profiles_dir)
        if args.action == "check":
            found = profile_files.check(args.subject, directories)
        else:
            found = profile_files.load(directories)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    match args.action:
        case "list":
            _list(found, directories, output)
        case "show":
            _show(found, args.subject, output)
        case _:
            return _report_check(found, args, output)
    return OK


def _report_check(found: Profiles, args: argparse.Namespace, output: Output) -> int:
    """Print that a file is accepted, and what is probably a mistake in it; return the exit status."""
    existing, why_unknown = _classes(found, args)
    files = {profile.name: profile.class_origin.rpartition(":")[0] for profile in found.by_name.values()}
    own = [profile for profile in found.by_name.values() if files[profile.name] == args.subject]
    others = [profile for profile in found.by_name.values() if files[profile.name] != args.subject]
    missing = [] if existing is None else [*missing_classes(own, existing)]
    profile_count = format_count(len(found.by_name), "profile")
    rule_count = format_count(len(found.rules), "rule")
    verdict = "accepted, but a class does not exist" if missing else "correct"
    output.confirm(
        f"{printable(args.subject)}: {verdict}. Together with the other files: {profile_count}, {rule_count}"
    )
    for problem in (*missing, *(() if existing is None else missing_classes(others, existing))):
        output.note(problem)
    if why_unknown:
        output.note(f"cannot check whether the classes exist: {why_unknown}")
    for number, rule in enumerate(found.rules):
        for note in (*_notes(rule), *_notes_on_order(rule, found.rules[:number])):
            output.note(f"{printable(rule.origin)}: {note}")
    return MISSING_CLASS if missing else OK


def _classes(found: Profiles, args: argparse.Namespace) -> tuple[Sequence[str] | None, str]:
    """Return the classes that exist, None if no profile needs them, or with the reason if they are unknown."""
    if not any(profile.class_ for profile in found.by_name.values()):
        return None, ""
    try:
        path, allow_simulation = _place(args)
        return [*Tree.open(path, allow_simulation=allow_simulation).classes()], ""
    except (ResctrlError, CommandError) as error:
        if args.root is None:
            return None, str(error)
        raise CommandError(f"cannot check the classes: {error}", NOT_RUNNING) from error


def _place(args: argparse.Namespace) -> tuple[str, bool]:
    """Return where resctrl is, and whether it may be a simulator. Raises CommandError, ConfigError."""
    if args.root is not None:
        return args.root, True
    daemon = daemon_of(args)
    if daemon.socket == SOCKET:
        # Not asked, because systemd would start it, perhaps before its configuration is complete.
        return config.load().resctrl, False
    status = daemon.call("ask where resctrl is mounted", signatures.STATUS)
    return status.mount, status.simulation is not None


def _notes(rule: Rule) -> Iterable[str]:
    """Yield why a rule, or a glob of it, probably selects nothing."""
    units = rule.globs.get("unit", ())
    if units and not rule.owners:
        yield "the rule selects containers in that unit, not the unit itself. For the unit, add 'owner: systemd'"
    for glob in units:
        if has_open_bracket(glob):
            yield f"{printable(glob)!r} matches no unit: a bracket has no end"
        elif "!" in glob.replace("[!", ""):
            yield f"{printable(glob)!r} matches no unit: a rule cannot exclude units. Put a rule for these before it"
        elif not glob.endswith((*TYPES, "*", "?", "]")):
            yield f"{printable(glob)!r} matches no service, scope or slice. {printable(remedy_for_type(glob))}"
    for glob in rule.globs.get("cgroup", ()):
        if not glob.startswith(("/", "*", "?", "[")):
            yield f"{printable(glob)!r} matches no control group: the path of each begins with '/'"


def _notes_on_order(rule: Rule, before: Iterable[Rule]) -> Iterable[str]:
    """Yield that a rule for units can never match because a rule before it selects all of them."""
    if rule.owners != {SYSTEMD}:
        return
    for other in before:
        if (
            SYSTEMD not in other.owners
            or other.labels
            or other.users
            or not {"unit", "cgroup"}.issuperset(other.globs)
        ):
            continue
        # A pattern without the prefix user-UID: selects no unit of a user (resctrlmond-profiles(5)).
        if not other.globs or (not rule.is_for_users and all("*" in globs for globs in other.globs.values())):
            yield f"the rule never matches: the rule at {printable(other.origin)} selects these units. Put it first"
            return


def _list(found: Profiles, directories: Sequence[str], output: Output) -> None:
    if output.json is not Json.OFF:
        output.print_json(_report(found, found.by_name.values(), found.rules))
    elif output.quiet:
        for name in sorted(found.by_name):
            output.print_line(name)
    else:
        output.print_blocks(_tables(found, directories))


def _show(found: Profiles, name: str, output: Output) -> None:
    profile = found.find(name)
    if profile is None:
        known = ", ".join(sorted(found.by_name)) or "none"
        raise CommandError(f"there is no profile {name[:64]!a}. Existing profiles: {known}")
    rules = [rule for rule in found.rules if rule.profile == name]
    if output.json is not Json.OFF:
        output.print_json(_report(found, [profile], rules))
        return
    cells = _cells(profile)
    fields = {
        "Watch": (cells[0],),
        "Class": (cells[1],),
        "Linger": (cells[2],),
        "Snapshot TTL": (cells[3],),
        "Priority": (cells[4],),
        "Events": (", ".join(profile.events),) if profile.events else (),
        "Expose": ("yes",) if profile.exposes else (),
        "Memory": profile.memory.lines,
        "Companion": _companion_lines(profile.companion),
        "From": (printable(profile.origin),),
        "Rules": tuple(f"{printable(str(rule))} ({printable(rule.origin)})" for rule in rules),
        "Default": (printable(found.default_origin),) if found.default == name else (),
        "Default of units": (printable(found.unit_default_origin),) if found.unit_default == name else (),
    }
    shown = tuple((label, values) for label, values in fields.items() if values)
    output.print_blocks([Sheet(name, shown)])


def _explain(name: str, daemon: Daemon, output: Output) -> int:
    pages = daemon.stream("list the workloads", signatures.LIST)
    action = "list the unwatched containers"
    unwatched = daemon.call(action, signatures.LIST_UNWATCHED)
    found = _selected(name, [workload for page in pages for workload in page.workloads], unwatched.containers)
    if not found:
        message = f"cannot explain the profile of {name[:64]!a}: there is no such workload or container"
        raise CommandError(f"{message}. See: resctrlctl list --all", NO_SUCH_WORKLOAD)
    if output.json is not Json.OFF:
        for one in found:
            output.print_json(one)
        return OK
    output.print_blocks([_selected_sheet(one) for one in found])
    return OK


def _selected(name: str, workloads: Sequence[types.Workload], unwatched: Sequence[types.Unwatched]) -> list[Selected]:
    """Return the workloads, members, and unwatched containers and units that a text selects.

    What runs without a workload is selected before workloads that have ended: they may be its earlier runs.
    """
    matched = matching(name, workloads, is_change=False)
    found = [
        Selected(
            one.key,
            one.profile,
            one.profile_source,
            companion=one.companion,
            memory=one.memory,
            members=[Selected(of.id, of.profile, of.profile_source) for of in one.members if not of.ended_at],
        )
        for one in matched
    ]
    if any(not one.state.is_over for one in matched):
        return found

    def is_selected(text: str) -> bool:
        return text == name or (not matched and text.startswith(name))

    members = [
        Selected(member.id, member.profile, member.profile_source)
        for workload in workloads
        for member in workload.members
        if not member.ended_at and is_selected(member.id)
    ]
    left_out = [
        Selected(one.id, one.profile, one.profile_source, one.reason)
        for one in unwatched
        if name == one.name or is_selected(one.id)
    ]
    return members or left_out or found


def _selected_sheet(selected: Selected) -> Sheet:
    fields = {
        "Profile": (printable(selected.profile) or "none",),
        "Selected by": (_source_text(selected),),
        "Reason": (format_message(selected.reason),) if selected.reason else (),
        "Companion": (companion_text(selected.companion),) if selected.companion else (),
        "Memory": (format_message(selected.memory),) if selected.memory else (),
        "Members": tuple(
            f"{printable(of.id)}: {printable(of.profile) or 'none'}, {_source_text(of)}" for of in selected.members
        ),
    }
    return Sheet(printable(selected.id), tuple((label, values) for label, values in fields.items() if values))


def _source_text(selected: Selected) -> str:
    return format_message(selected.source) or "no annotation, rule or default"


def _tables(found: Profiles, directories: Sequence[str]) -> list[Block]:
    rows = tuple(
        Row((name, *_cells(profile), _default_text(found, name), printable(profile.origin)))
        for name, profile in sorted(found.by_name.items())
    )
    footer = f"{format_count(len(rows), 'profile')}."
    if not rows:
        footer = f"0 profiles in {' and '.join(map(printable, directories))}."
    blocks: list[Block] = [Table(_PROFILE_COLUMNS, rows, footer)]
    if found.rules:
        lines = tuple(Row((printable(rule.origin), rule.profile, printable(str(rule)))) for rule in found.rules)
        blocks.append(Table(_RULE_COLUMNS, lines, f"{format_count(len(lines), 'rule')}: the first match applies."))
    return blocks


def _default_text(found: Profiles, name: str) -> str:
    """Return for what the profile is the default."""
    defaults = {"containers": found.default, "units": found.unit_default}
    return ", ".join(what for what, default in defaults.items() if default == name) or "-"


def _cells(profile: Profile) -> tuple[str, str, str, str, str]:
    """Return watch, class, linger, snapshot_ttl and priority; "-" for the setting of the daemon."""
    return (
        str(profile.watch),
        "follow" if profile.class_ is None else format_class(profile.class_),
        "-" if profile.linger_s is None else format_duration(profile.linger_s),
        _ttl(profile),
        "-" if profile.priority is None else str(profile.priority),
    )


def _ttl(profile: Profile) -> str:
    """Return snapshot_ttl, "off" if the profile keeps no files."""
    if not profile.keeps_files:
        return "off"
    return "-" if profile.snapshot_ttl_s is None else format_duration(profile.snapshot_ttl_s)


def _memory(settings: MemorySettings) -> tuple[str | None, str | None, dict[str, str] | None]:
    """Return swap, memory_high and allow_memory_annotations; None for what is not set."""
    return (
        None if settings.swap is Swap.LEAVE else str(settings.swap),
        None if settings.high is None else text_of(settings.high),
        {name: text_of(amount) for name, amount in settings.allowed.items()} or None,
    )


def _companion(settings: Companion) -> CompanionReport:
    has_template = settings.template is not None or settings.template_file
    return CompanionReport(
        command=settings.command,
        template_file=settings.template_file,
        template=settings.template,
        template_format=str(settings.format) if has_template else None,
        restart=str(settings.restart),
        memory_max=text_of(settings.memory_max),
        cpu_quota=f"{settings.cpu_quota}%",
        tasks_max=settings.tasks_max,
    )


def _companion_lines(settings: Companion | None) -> tuple[str, ...]:
    """Return the command of a companion, its template and its limits, for the output for people."""
    if settings is None:
        return ()
    lines = [printable(shlex.join(settings.command))]
    if settings.template_file or settings.template is not None:
        name = printable(settings.template_file) or "in this file"
        lines.append(f"template: {name} ({settings.format}), as {settings.format.file_name}")
    limits = f"memory_max: {text_of(settings.memory_max)}, cpu_quota: {settings.cpu_quota}%"
    return (*lines, f"restart: {settings.restart}", f"{limits}, tasks_max: {settings.tasks_max}")


def _report(found: Profiles, profiles: Iterable[Profile], rules: Iterable[Rule]) -> ProfileList:
    return ProfileList(
        [
            ProfileReport(
                profile.name,
                str(profile.watch),
                profile.class_,
                profile.snapshot_ttl_s,
                profile.linger_s,
                profile.priority,
                None if profile.keeps_files else False,
                profile.events or None,
                profile.exposes or None,
                *_memory(profile.memory),
                None if profile.companion is None else _companion(profile.companion),
                profile.origin,
            )
            for profile in profiles
        ],
        [RuleReport(rule.profile, str(rule), rule.origin) for rule in rules],
        found.default,
        found.unit_default,
    )
