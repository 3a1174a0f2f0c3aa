# SPDX-License-Identifier: Apache-2.0
"""Render replies of the daemon as tables and sheets: their columns, labels and tones. Without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation

import msgspec
from msgspec.structs import replace

from resctrlctl.screen.format import (
    SYMBOLS,
    format_class,
    format_count,
    format_duration,
    format_message,
    format_time,
    format_value,
    shorten,
)
from resctrlctl.screen.layout import Block, Column, Row, Sheet, Table, Tone
from resctrlctl.screen.output import to_json
from resctrlctl.workloads.reasons import reasons
from resctrlctl.workloads.workload_table import TONES, counted_since, seconds_counted
from resctrlmond.api.levels import levels
from resctrlmond.api.types import (
    Bandwidth,
    Capacity,
    Claim,
    Companion,
    Container,
    Counters,
    DomainUse,
    Foreign,
    GetReply,
    Latency,
    Level,
    ListPodsReply,
    ListReply,
    Member,
    Pod,
    Proof,
    ReadAllReply,
    Reading,
    ReadReply,
    StatusReply,
    Total,
    Unwatched,
    Usage,
    Workload,
)
from resctrlmond.resctrl.errors import printable
from resctrlmond.resctrl.kinds import Kind, Mode
from resctrlmond.workloads.model.changes import ContainerState
from resctrlmond.workloads.model.reports import Report
from resctrlmond.workloads.model.states import seconds_up_to

# A longer name may have a line of its own.
_NAME_WIDTH = 24
_FOREIGN_COLUMNS = (
    Column("FOREIGN GROUP", name_width=_NAME_WIDTH),
    Column("CLASS"),
    Column("PATH"),
)
_UNWATCHED_COLUMNS = (
    Column("UNWATCHED", name_width=_NAME_WIDTH),
    Column("ID"),
    Column("POD"),
    Column("SINCE"),
    Column("PROFILE"),
    Column("REASON", is_note=True),
)
_POD_COLUMNS = (
    Column("POD", name_width=_NAME_WIDTH // 2),
    Column("CONTAINER"),
    Column("STATE"),
    Column("GROUP"),
    Column("CLASS"),
    Column("KEY"),
    Column("NOTE", is_note=True),
)
_PROOF_COLUMNS = (
    Column("PROOF"),
    Column("SHOWN"),
    Column("WHAT WAS SEEN", is_note=True),
)
_READING_COLUMNS = (
    Column("DOMAIN"),
    Column("EVENT"),
    Column("VALUE", right=True),
    Column("KIND"),
)
_DOMAIN_COLUMNS = (
    Column("DOMAIN"),
    Column("EVENT"),
    Column("VALUE", right=True),
    Column("PER SECOND", right=True),
    Column("QUALITY"),
)
_TOTAL_COLUMNS = (
    Column("EVENT"),
    Column("TOTAL", right=True),
    Column("QUALITY"),
)

# The fields that the output for people leaves out, with the reason or the place where their meaning is shown. Every
# other field of a reply must change the output (tests/ctl/test_fields.py). JSON output has all fields.
NOT_SHOWN: dict[type[msgspec.Struct], dict[str, str]] = {
    Bandwidth: {},
    Capacity: {},
    Claim: {"end_rule": "rarely needed"},
    Companion: {},
    Container: {"sandbox": "rarely needed", "pid": "changes with each restart; show prints it with the member"},
    Counters: {},
    DomainUse: {"reason": "with the total of the event"},
    Foreign: {},
    GetReply: {"workload": "with the reply of Read"},
    Level: {"event": "selects a column", "unit": "that of the column", "value": "only of llc_occupancy"},
    Usage: {
        "levels": "the column LLC",
        "read_at": "for programs",
        "read_ns": "the end of AGE",
        "domains": "top --by domain",
    },
    ListReply: {"workloads": "their keys, with --quiet"},
    ReadAllReply: {"next": "for the next call"},
    ReadReply: {"read_ns": "the end of the time of PER SECOND"},
    Workload: {
        "key": "the title",
        "reason": "with state",
        "in_limbo": "with state",
        "classes": "with class_",
        "profile_source": "profiles explain",
        "cpu_time_outside_ns": "with cpu_time_ns",
        "created_ns": "the begin of AGE",
        "completed_ns": "for programs, as the end of AGE",
    },
    Member: {
        "id": "the beginning of the line",
        "owner": "with kind",
        "start_time": "for programs, with pid",
        "started_at": "rarely needed",
        "snapshot_folder": "for programs",
        "take_over": "an option of Assign",
        "allow_class_change": "an option of Assign",
        "joining": "lasts milliseconds",
        "include_descendants": "an option of Assign",
        "cpu_time_before_ns": "with late",
        "dormant": "rarely needed",
        "profile_source": "profiles explain",
    },
    Proof: {},
    Pod: {"labels": "too long for a table", "sandboxes": "rarely needed"},
    Reading: {"status": "the text has the kernel's word for it", "nested": "for programs that add up domains"},
    Report: {},
    Latency: dict.fromkeys(("calls", "since", "bounds_us", "counts", "sum_us"), "for resctrlmon-exporter"),
    StatusReply: {
        "in_limbo": "the reason of each pending workload has it",
        "latencies": "for resctrlmon-exporter",
    },
    Total: {},
    Unwatched: {"profile_source": "with reason"},
}
# Each labelled line of a workload, by its field; the line Workload has no field of its own. A line without values is
# left out.
_WORKLOAD_LINES: dict[str, tuple[str, Callable[[Workload], Iterable[str]]]] = {
    "state": ("State", lambda workload: [": ".join(filter(None, (str(workload.state), _reason(workload))))]),
    "workload": ("Workload", lambda workload: [describe_workload(workload.attributes)]),
    "class_": ("Class", lambda workload: [" ".join(map(format_class, workload.classes or (workload.class_,)))]),
    "priority": ("Priority", lambda workload: [str(workload.priority)] if workload.priority else []),
    "companion": ("Companion", lambda workload: _companion_lines(workload.companion)),
    "memory": ("Memory", lambda workload: [format_message(workload.memory)] if workload.memory else []),
    "path": ("Path", lambda workload: [printable(workload.path)] if workload.path else []),
    "observed": (
        "Observed",
        lambda workload: ["yes, the group belongs to another program"] if workload.observed else [],
    ),
    "snapshot": ("Snapshot", lambda workload: [printable(workload.snapshot)] if workload.snapshot else []),
    "created_at": ("Since", lambda workload: [format_time(workload.created_at)]),
    "completed_at": (
        "Completed",
        lambda workload: [format_time(workload.completed_at)] if workload.completed_at else [],
    ),
    "cpu_time_ns": (
        "CPU time",
        lambda workload: _cpu_time_lines(workload.cpu_time_ns, workload.cpu_time_outside_ns),
    ),
    "generation": ("Run", lambda workload: [str(workload.generation)]),
    "part_of": ("Inside", lambda workload: map(printable, workload.part_of or ())),
    "nested": (
        "Nested",
        lambda workload: [format_count(workload.nested, "workload")] if workload.nested else [],
    ),
    "loss": ("Loss", lambda workload: [format_message(workload.loss)] if workload.loss else []),
    "baseline": ("Baseline", lambda workload: [str(workload.baseline)]),
    "caveats": (
        "Caveats",
        lambda workload: [format_message(f"{event}: {reason}") for event, reason in _items(workload.caveats)],
    ),
    "claims": ("Claims", lambda workload: map(_claim_text, workload.claims)),
    "members": ("Members", lambda workload: map(_member_text, workload.members)),
    "attributes": (
        "Attributes",
        lambda workload: [printable(f"{name}={text}") for name, text in _items(workload.attributes)],
    ),
}
# The fields above the totals.
_HEAD = ("state", "workload", "companion", "memory", "created_at", "completed_at", "cpu_time_ns")
# Each fact in the line of a member, by its field; "" is left out.
_MEMBER_FACTS: dict[str, Callable[[Member], str]] = {
    "kind": lambda member: f"{_kind_text(member)} of {member.owner}",
    "pid": lambda member: f"process {member.pid}" if member.pid else "",
    "cgroup": lambda member: member.cgroup,
    "ended_at": lambda member: f"ended {format_time(member.ended_at)}" if member.ended_at else "",
    "late": lambda member: late_text(member) if member.late else "",
    "descendants_outside": lambda member: _outside_text(member.descendants_outside, "descendant", "outside"),
    "tasks_outside": lambda member: _outside_text(member.tasks_outside, "task", "stayed outside"),
    "reason": lambda member: member.reason if member.reason != "ended" else "",
}


def _kind_text(member: Member) -> str:
    # "process" is the kind of a member whose caller gave none, as resctrlctl assign --cgroup.
    return "control group" if member.kind == "process" and member.cgroup and not member.pid else member.kind


def render_foreign_list(foreign: Iterable[Foreign]) -> Table:
    """Render the monitoring groups of other programs."""
    rows = tuple(map(_foreign_row, sorted(foreign, key=lambda group: group.path)))
    return Table(_FOREIGN_COLUMNS, rows, f"{format_count(len(rows), 'foreign group')}.")


def render_unwatched(containers: Iterable[Unwatched]) -> Table:
    """Render the containers and units that are in no group because of their profiles."""
    containers = list(containers)
    unit_count = sum(container.is_unit for container in containers)
    counts = [format_count(len(containers) - unit_count, "unwatched container")]
    if unit_count:
        counts.append(format_count(unit_count, "unwatched unit"))
    rows = tuple(
        Row(
            (
                printable(container.id if container.is_unit else container.name) or "-",
                "-" if container.is_unit else printable(container.id[:12]),
                printable(container.pod) or "-",
                format_time(container.since),
                printable(container.profile),
                format_message(container.reason),
            )
        )
        for container in containers
    )
    return Table(_UNWATCHED_COLUMNS, rows, f"{', '.join(counts)}.")


def render_pods(reply: ListPodsReply) -> list[Block]:
    """Render ``list --pods``: each container of each pod, with the state of the pod's group."""
    rows = [row for pod in reply.pods for row in _pod_rows(pod)]
    containers = [container for pod in reply.pods for container in pod.containers]
    pod_count = format_count(len(reply.pods), "pod")
    container_count = format_count(len(containers), "container")
    unmonitored = sum(map(_is_unmonitored, containers))
    reports = [
        f"{printable(report.owner)} reported at {format_time(report.reported_at)}." for report in reply.reported
    ]
    footer = " ".join([f"{pod_count}, {container_count}, {unmonitored} unmonitored.", *reports])
    return [Table(_POD_COLUMNS, tuple(rows), footer)]


def render_workload(reply: ReadReply, proofs: Sequence[Proof] = (), *, is_raw: bool = False) -> list[Block]:
    """Render ``show``: the workload, what it used, its proofs, the details and, with ``is_raw``, its counters."""
    head, details = _workload_sheets(reply)
    blocks: list[Block] = [head, *_use_tables(reply)]
    if reply.domains and _divide(reply.domains, reply.totals):
        seconds = seconds_counted(reply.workload, reply.workload.created_at, reply.read_ns) or None
        # The parts of lost runs are not known.
        footer = f"Since {format_time(reply.workload.created_at)} only." if reply.workload.loss else ""
        blocks.append(Table(_DOMAIN_COLUMNS, tuple(_domain_row(use, seconds) for use in reply.domains), footer))
    blocks += _reasons([*reply.totals, *(reply.nested or ())])
    if proofs:
        blocks.append(Table(_PROOF_COLUMNS, tuple(map(_proof_row, proofs))))
    if details.fields:
        blocks.append(details)
    if is_raw and reply.readings:
        blocks.append(Table(_READING_COLUMNS, tuple(map(_reading_row, reply.readings))))
    return blocks


def render_use(reply: ReadReply) -> list[Block]:
    """Render what the workload used since its baseline, and the reasons why that is not exact, as ``show`` does."""
    return [*_use_tables(reply), *_reasons([*reply.totals, *(reply.nested or ())])]


def _use_tables(reply: ReadReply) -> list[Table]:
    # 0 if the end values were read at the begin.
    seconds = seconds_counted(reply.workload, counted_since(reply.workload), reply.read_ns) or None
    found = ((reply.totals, "TOTAL"), (reply.nested or (), "IN NESTED"))
    return [_totals_table(totals, seconds, title) for totals, title in found if totals]


_NO_ENERGY = "core energy is not counted by this processor or kernel; see CORE ENERGY in resctrlmond(7)"
_NO_HOOK = "assign its containers by control group; see DOCKER AND ROOTLESS PODMAN in resctrlctl(1)"


def render_totals(totals: Sequence[Total], nested: Sequence[Total] = ()) -> list[Block]:
    """Render the use of each event since the baseline, with its quality and the reason if it is not exact.

    ``nested`` is that of the nested workloads.
    """
    inside = [_totals_table(nested, title="IN NESTED")] if nested else []
    return [_totals_table(totals), *inside, *_reasons([*totals, *nested])]


def _reasons(totals: Sequence[Total]) -> list[Sheet]:
    return reasons([(printable(total.event), total.reason or "") for total in totals])


def _totals_table(totals: Iterable[Total], seconds: float | None = None, title: str = "TOTAL") -> Table:
    columns, average = _TOTAL_COLUMNS, [] if seconds is None else [Column("PER SECOND", right=True)]
    rows = [_total_row(total, seconds) for total in totals]
    return Table((columns[0], Column(title, right=True), *average, columns[2]), tuple(rows))


def render_status(
    reply: StatusReply, without_hook: Iterable[str] = (), use_of_machine: tuple[str, ...] = ()
) -> list[Block]:
    """Render ``status``.

    ``without_hook`` are the container runtimes of this host that never call the OCI hook. ``use_of_machine`` are the
    lines of ``machine.bar``.
    """
    has_energy = any("core_energy" in resource.events for resource in reply.capacity)
    mount = reply.mount if reply.mounted else f"{reply.mount} (not mounted)"
    groups = format_count(reply.groups, "group") + _pending_text(reply)
    fields = [
        ("Mount", (printable(mount),)),
        ("Simulation", (printable(reply.simulation),) if reply.simulation else ()),
        ("RMIDs", (_rmids_text(reply),)),
        ("Groups", (f"{groups}, {len(reply.foreign)} foreign",)),
        ("Classes", (" ".join(format_class(class_) for class_ in reply.classes),)),
        (
            "Resources",
            tuple(printable(f"{of.resource}: {of.rmids} RMIDs; {' '.join(of.events)}") for of in reply.capacity),
        ),
        ("Bandwidth", _bandwidth_lines(reply.bandwidth) if reply.bandwidth else ()),
        ("Energy", (_NO_ENERGY,) if reply.mounted and not has_energy else ()),
        ("Used", use_of_machine),
        ("No hook", tuple(f"{runtime}: {_NO_HOOK}" for runtime in without_hook)),
        ("Problems", tuple(map(format_message, reply.problems))),
    ]
    tone = Tone.WARNING if reply.problems or not reply.mounted else Tone.NORMAL
    shown = tuple((label, values) for label, values in fields if values)
    return [Sheet(f"resctrlmond {printable(reply.version)}", shown, tone)]


def _rmids_text(reply: StatusReply) -> str:
    """Return, for example, ``7 of 64 used: 2 by classes, 4 by groups, 1 by foreign groups``."""
    # Each class, including the root, and each monitoring group has an RMID.
    groups = reply.rmids_used - len(reply.classes) - len(reply.foreign)
    users = f": {len(reply.classes)} by classes, {groups} by groups, {len(reply.foreign)} by foreign groups"
    return f"{reply.rmids_used} of {reply.rmids} used{users if reply.classes else ''}"


def _bandwidth_lines(bandwidth: Bandwidth) -> tuple[str, ...]:
    """Return the limits of the bandwidth counters; no line if each RMID has counters of its own."""
    match bandwidth.mode:
        case Mode.REALLOCATED:
            text = "reallocated by the processor: no total of bandwidth is exact"
            remedy = "; write mbm_event to the file mbm_assign_mode below info" if bandwidth.can_assign else ""
            return (text + remedy,)
        case Mode.ASSIGNED:
            return tuple(
                f"{printable(cache.domain)}: {cache.available} of {cache.counters} counters available"
                for cache in bandwidth.counters
            )
        case _:
            return ()


def _cpu_time_lines(inside_ns: int | None, outside_ns: int | None) -> tuple[str, ...]:
    if inside_ns is None:
        return ()
    outside = f", and {seconds_up_to(outside_ns)} s outside its groups" if outside_ns else ""
    return (f"{inside_ns / 1e9:.3f} s{outside}",)


def companion_text(companion: Companion) -> str:
    """Return ``failed: it exited with status 1``: the state of a companion, and the reason for it."""
    return ": ".join(filter(None, (str(companion.state), format_message(companion.reason))))


def _companion_lines(companion: Companion | None) -> tuple[str, ...]:
    return () if companion is None else (companion_text(companion), printable(companion.unit))


def describe_state(workload: Workload) -> str:
    """Return ``web: active in class gold (/sys/fs/resctrl/gold/mon_groups/web)``, and the reason for the state."""
    text = f"{printable(workload.key)}: {workload.state} in {_classes_text(workload)}"
    if workload.path:
        text += f" ({printable(workload.path)})"
    reason = _reason(workload)
    return f"{text}: {reason}" if reason else text


def _classes_text(workload: Workload) -> str:
    """Return ``class gold``, or ``classes gold, /`` if the workload has groups in several classes."""
    names = ", ".join(map(format_class, workload.classes or (workload.class_,)))
    return f"{'classes' if workload.classes else 'class'} {names}"


def _reason(workload: Workload) -> str:
    """Return the reason for the state of the workload; "" if there is none."""
    reasons = [workload.reason, "RMIDs are in limbo" if workload.in_limbo else None]
    return "; ".join(format_message(reason) for reason in reasons if reason)


def describe_workload(attributes: Mapping[str, str]) -> str:
    """Return the name of a workload for people: the pod as namespace/name with its container, or the command."""
    pod = "/".join(filter(None, (attributes.get("pod.namespace"), attributes.get("pod.name"))))
    named = " ".join(filter(None, (pod, attributes.get("container.name"))))
    return printable(named or attributes.get("command") or attributes.get("unit") or "-")


def _is_unmonitored(container: Container) -> bool:
    return container.state in (ContainerState.RUNNING, ContainerState.PAUSED) and not container.monitored


def _pod_rows(pod: Pod) -> list[Row]:
    """Return a row for each container, or one row for a pod without containers."""
    name = printable("/".join(filter(None, (pod.namespace, pod.name)))) or "-"
    workload = pod.workload
    of_pod = (
        str(workload.state) if workload else "-",
        format_class(workload.class_) if workload else "-",
        printable(pod.key),
    )
    reason_without_group = workload.reason if workload and not workload.state.has_group else None
    note = pod.reason or reason_without_group or "-"
    tone = TONES.get(workload.state, Tone.NORMAL) if workload else Tone.FAINT
    if not pod.containers:
        return [Row((name, "-", "-", *of_pod, format_message(note)), tone)]
    return [
        Row(
            (
                name,
                printable(container.name or container.id[:12]),
                str(container.state),
                *of_pod,
                format_message(container.reason or note),
            ),
            Tone.WARNING if _is_unmonitored(container) and not pod.reason else tone,
        )
        for container in pod.containers
    ]


def _foreign_row(foreign: Foreign) -> Row:
    cells = (printable(foreign.name), format_class(foreign.class_), printable(foreign.path))
    return Row(cells, Tone.FAINT)


def _workload_sheets(reply: ReadReply) -> tuple[Sheet, Sheet]:
    """Return the sheet above the totals, and that with all other fields."""
    workload = replace(reply.workload, caveats=_caveats_without_total(reply))
    shown = workload_lines(workload)
    head = [shown[field] for field in _HEAD if field in shown]
    if found := level_texts(reply):
        head.append(("Now", found))
    rest = [line for field, line in shown.items() if field not in _HEAD]
    tone = TONES.get(workload.state, Tone.NORMAL)
    return Sheet(printable(workload.key), tuple(head), tone), Sheet("Details", tuple(rest))


def _caveats_without_total(reply: ReadReply) -> dict[str, str]:
    """Return the caveats that are not among the reasons of the totals, which the sheet above the details has."""
    stated = {(total.event, why) for total in reply.totals for why in (total.reason or "").split("; ")}
    left = {
        event: "; ".join(why for why in text.split("; ") if (event, why) not in stated)
        for event, text in reply.workload.caveats.items()
    }
    return {event: text for event, text in left.items() if text}


def workload_lines(workload: Workload) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the labelled lines of a workload that have a value, by its field."""
    lines = {field: (label, tuple(values_of(workload))) for field, (label, values_of) in _WORKLOAD_LINES.items()}
    lines |= {field: (label, (value,)) for field, label, value in _other_fields(workload, _WORKLOAD_LINES)}
    return {field: (label, values) for field, (label, values) in lines.items() if values}


def level_texts(reply: ReadReply) -> tuple[str, ...]:
    """Return what the workload holds now, such as ``llc_occupancy 1.50 MiB``; nothing if it has no group."""
    return tuple(map(_level_text, levels(reply.readings)))


def _level_text(level: Level) -> str:
    value = format_value(level.value, level.unit)
    return f"{printable(level.event)} {value}"


def _member_text(member: Member) -> str:
    facts = [fact_of(member) for fact_of in _MEMBER_FACTS.values()]
    facts += [f"{label.lower()}: {value}" for _, label, value in _other_fields(member, _MEMBER_FACTS)]
    return format_message(f"{member.id}: {', '.join(filter(None, facts))}")


def _other_fields(struct: msgspec.Struct, shown: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    """Yield name, label and text of each field of a reply that is neither in ``shown`` nor in NOT_SHOWN.

    A field that is new in the declaration of the interface is therefore shown without a change here. A field that has
    its default is left out, as in the reply; any other value is shown, also 0 and false.
    """
    sent = msgspec.to_builtins(struct)
    for field in msgspec.structs.fields(struct):
        name = field.name
        if field.encode_name in sent and name not in shown and name not in NOT_SHOWN[type(struct)]:
            value = sent[field.encode_name]
            text = value if isinstance(value, str) else to_json(value)
            yield name, name.strip("_").replace("_", " ").capitalize(), format_message(text)


def _items(mapping: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(mapping.items())


def _claim_text(claim: Claim) -> str:
    return f"{printable(claim.owner)} since {format_time(claim.since)}"


def _outside_text(number: int, noun: str, text: str) -> str:
    return f"{format_count(number, noun)} {text}" if number else ""


def late_text(member: Member) -> str:
    """Return how late a member was put into the group, with the bound on what it had used."""
    used = (
        f", for up to {seconds_up_to(member.cpu_time_before_ns)} s of CPU time" if member.cpu_time_before_ns else ""
    )
    return f"was already running when it was put into the group{used}"


def _proof_row(proof: Proof) -> Row:
    cells = (str(proof.kind), "yes" if proof.shown else "no", format_message(proof.text))
    return Row(cells, Tone.NORMAL if proof.shown else Tone.WARNING)


def _reading_row(reading: Reading) -> Row:
    # If there is no number, show the kernel's word for that, such as "Unavailable", which does not mean 0.
    known = reading.value is not None
    value = format_value(reading.value, reading.unit) if reading.value is not None else printable(reading.text)
    cells = (printable(reading.domain), printable(reading.event), value, str(reading.kind))
    return Row(cells, Tone.NORMAL if known else Tone.WARNING)


def _divide(uses: Iterable[DomainUse], totals: Iterable[Total]) -> bool:
    """Return whether the figures of domains differ from the totals, as on a machine with several domains."""
    cumulative = [(use.event, use.value) for use in uses if use.kind is Kind.CUMULATIVE]
    return sorted(cumulative, key=str) != sorted(((total.event, total.value) for total in totals), key=str)


def _domain_row(use: DomainUse, seconds: float | None) -> Row:
    rate = "-"
    if use.kind is Kind.CUMULATIVE and use.value is not None and seconds is not None:
        rate = average(use.value, use.unit, seconds)
    cells = (
        printable(use.domain),
        printable(use.event),
        format_value(use.value, use.unit),
        rate,
        str(use.quality or "-"),
    )
    return Row(cells, Tone.WARNING if use.value is None else Tone.NORMAL)


def _total_row(total: Total, seconds: float | None = None) -> Row:
    cells = [printable(total.event), format_value(total.value, total.unit)]
    if seconds is not None:
        cells.append("-" if total.value is None else average(total.value, total.unit, seconds))
    cells.append(str(total.quality))
    return Row(tuple(cells), Tone.WARNING if total.value is None else Tone.NORMAL)


def average(value: str, unit: str, seconds: float) -> str:
    """Return a value per second as a short text with its unit, such as ``3.10W``."""
    symbol = {"joules": "W", "bytes": "B/s"}.get(unit) or f"{SYMBOLS.get(unit, printable(unit))}/s"
    try:
        return shorten(Decimal(value) / Decimal(seconds), symbol)
    except InvalidOperation:
        return "-"


def _pending_text(reply: StatusReply) -> str:
    if not reply.pending:
        return ""
    waited = reply.oldest_pending_ms
    return f", {reply.pending} pending" + ("" if waited is None else f" for {format_duration(waited / 1000)} at most")
