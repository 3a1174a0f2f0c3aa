# SPDX-License-Identifier: Apache-2.0
"""Replies as tables and sheets: which columns, which words, which tone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resctrlctl.figures import count, figure, local_time, prose
from resctrlctl.layout import Block, Column, Row, Sheet, Table, Tone
from resctrlmond.api.types import (
    Bandwidth,
    Container,
    Foreign,
    Group,
    ListPodsReply,
    ListReply,
    Member,
    Pod,
    ReadForeignReply,
    Reading,
    ReadReply,
    StatusReply,
    Total,
)
from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model import State
from resctrlmond.workloads.pods import ContainerState

# A state that needs nobody's attention is in the normal tone.
_TONES = {
    State.PENDING: Tone.WARNING,
    State.COMPLETED: Tone.FAINT,
    State.LOST: Tone.BAD,
    State.FAILED: Tone.BAD,
}
_FOREIGN = "foreign"
_LIST_COLUMNS = (
    Column("KEY"),
    Column("CLASS"),
    Column("STATE"),
    Column("MEMBERS", right=True),
    Column("SINCE"),
    Column("WORKLOAD"),
)
_POD_COLUMNS = (
    Column("POD"),
    Column("CONTAINER"),
    Column("STATE"),
    Column("GROUP"),
    Column("CLASS"),
    Column("KEY"),
    Column("NOTE"),
)
_READING_COLUMNS = (Column("DOMAIN"), Column("EVENT"), Column("VALUE", right=True), Column("KIND"))
_TOTAL_COLUMNS = (Column("EVENT"), Column("TOTAL", right=True), Column("QUALITY"), Column("REASON"))


def group_list(reply: ListReply) -> list[Block]:
    """``list``: our groups in order of the key, below them those of others."""
    groups = sorted(reply.groups, key=lambda group: group.key)
    foreign = sorted(reply.foreign, key=lambda other: other.path)
    rows = [*map(_group_row, groups), *map(_foreign_row, foreign)]
    footer = f"{count(len(groups), 'group')}, {len(foreign)} foreign."
    return [Table(_LIST_COLUMNS, tuple(rows), footer)]


def pod_list(reply: ListPodsReply) -> list[Block]:
    """``list --pods``: each container of each pod, in order of the pods' names, and how its group stands."""
    rows = [row for pod in reply.pods for row in _pod_rows(pod)]
    containers = [container for pod in reply.pods for container in pod.containers]
    unmonitored = sum(_is_missed(container) for container in containers)
    counts = f"{count(len(reply.pods), 'pod')}, {count(len(containers), 'container')}, {unmonitored} unmonitored."
    reported = [f"{printable(one.owner)} reported at {local_time(one.reported_at)}" for one in reply.reported]
    return [Table(_POD_COLUMNS, tuple(rows), " ".join([counts, *(f"{words}." for words in reported)]))]


def group_show(reply: ReadReply) -> list[Block]:
    """``show``: the group's life, its counters now, and what was used since the baseline."""
    blocks: list[Block] = [_group_sheet(reply.group)]
    if reply.readings:
        blocks.append(Table(_READING_COLUMNS, tuple(map(_reading_row, reply.readings))))
    if reply.totals:
        blocks.append(totals_table(reply.totals))
    return blocks


def foreign_show(reply: ReadForeignReply) -> list[Block]:
    """``show`` of a foreign group: where it is, and its counters now."""
    other = reply.foreign
    fields = (
        ("State", (f"{_FOREIGN}: another program created it; resctrlmond only reads it",)),
        ("Class", (class_name(other.class_),)),
        ("Path", (printable(other.path),)),
    )
    readings = Table(_READING_COLUMNS, tuple(map(_reading_row, reply.readings)))
    return [Sheet(printable(other.name), fields, Tone.FAINT), readings]


_NO_ENERGY = "core energy is not counted by this processor or kernel; see CORE ENERGY in resctrlmond(7)"
_NO_HOOK = "assign its containers by control group; see DOCKER AND ROOTLESS PODMAN in resctrlctl(1)"


def totals_table(totals: Iterable[Total]) -> Table:
    """What was used of each event since the baseline, and how far that can be trusted."""
    return Table(_TOTAL_COLUMNS, tuple(map(_total_row, totals)))


def status_sheet(reply: StatusReply, without_hook: Iterable[str] = ()) -> list[Block]:
    """``status``: the machine and the daemon; ``without_hook``: the runtimes of this host that call no hook."""
    has_energy = any("core_energy" in each.events for each in reply.capacity)
    mount = reply.mount if reply.mounted else f"{reply.mount} (not mounted)"
    groups = count(reply.groups, "group") + (f", {reply.pending} pending" if reply.pending else "")
    fields = [
        ("Mount", (printable(mount),)),
        ("Simulation", (printable(reply.simulation),) if reply.simulation else ()),
        ("RMIDs", (_rmids_text(reply),)),
        ("Groups", (f"{groups}, {len(reply.foreign)} foreign",)),
        ("Classes", (" ".join(class_name(class_) for class_ in reply.classes),)),
        (
            "Resources",
            tuple(f"{each.resource}: {each.rmids} RMIDs; {' '.join(each.events)}" for each in reply.capacity),
        ),
        ("Bandwidth", _bandwidth_lines(reply.bandwidth) if reply.bandwidth else ()),
        ("Energy", (_NO_ENERGY,) if reply.mounted and not has_energy else ()),
        ("No hook", tuple(f"{runtime}: {_NO_HOOK}" for runtime in without_hook)),
        ("Problems", tuple(map(prose, reply.problems))),
    ]
    tone = Tone.WARNING if reply.problems or not reply.mounted else Tone.NORMAL
    shown = tuple((label, values) for label, values in fields if values)
    return [Sheet(f"resctrlmond {printable(reply.version)}", shown, tone)]


def _rmids_text(reply: StatusReply) -> str:
    """``7 of 64 used: 2 by classes, 4 by groups, 1 by foreign groups``."""
    # Each class has an RMID, the root's included, and each monitoring group.
    groups = reply.rmids_used - len(reply.classes) - len(reply.foreign)
    users = f": {len(reply.classes)} by classes, {groups} by groups, {len(reply.foreign)} by foreign groups"
    return f"{reply.rmids_used} of {reply.rmids} used{users if reply.classes else ''}"


def _bandwidth_lines(bandwidth: Bandwidth) -> tuple[str, ...]:
    """How bandwidth is counted, where that limits what can be told; nothing where each RMID has its own counter."""
    match bandwidth.mode:
        case Mode.REALLOCATED:
            text = "reallocated by the processor: no total of bandwidth is exact"
            remedy = "; write mbm_event to info/L3_MON/mbm_assign_mode" if bandwidth.can_assign else ""
            return (text + remedy,)
        case Mode.ASSIGNED:
            return tuple(
                f"{printable(each.domain)}: {each.available} of {each.counters} counters available"
                for each in bandwidth.counters
            )
        case _:
            return ()


def state_sentence(group: Group) -> str:
    """``web: active in class gold (/sys/fs/resctrl/gold/mon_groups/web)``, and the reason for the state behind it."""
    text = f"{printable(group.key)}: {group.state} in {_classes_text(group)}"
    if group.path:
        text += f" ({printable(group.path)})"
    reason = _reason(group)
    return f"{text}: {reason}" if reason else text


def _classes_text(group: Group) -> str:
    """``class gold``, or ``classes gold, /`` for a workload that has a group in each of several classes."""
    names = ", ".join(map(class_name, group.classes or (group.class_,)))
    return f"{'classes' if group.classes else 'class'} {names}"


def _reason(group: Group) -> str:
    """Why the group is in its state."""
    reasons = [group.reason, "RMIDs are in limbo" if group.in_limbo else None]
    return "; ".join(prose(why) for why in reasons if why)


def class_name(class_: str) -> str:
    """A class as it is shown and typed: the root, which has no name, is ``/``."""
    return printable(class_) or "/"


def total_figure(total: Total) -> str:
    """The total's figure, "unknown" where there is none."""
    return "unknown" if total.value is None else figure(total.value, total.unit)


def workload(attributes: Mapping[str, str]) -> str:
    """Who that is, for a person: the pod as namespace/name with its container, or the command."""
    pod = "/".join(filter(None, (attributes.get("pod.namespace"), attributes.get("pod.name"))))
    named = " ".join(filter(None, (pod, attributes.get("container.name"))))
    return printable(named or attributes.get("command") or attributes.get("unit") or "-")


def _group_row(group: Group) -> Row:
    living = sum(1 for member in group.members if member.lives)
    cells = (
        printable(group.key),
        class_name(group.class_),
        str(group.state),
        str(living),
        local_time(group.created_at),
        workload(group.attributes),
    )
    return Row(cells, _TONES.get(group.state, Tone.NORMAL))


def _is_missed(container: Container) -> bool:
    return container.state in (ContainerState.RUNNING, ContainerState.PAUSED) and not container.monitored


def _pod_rows(pod: Pod) -> list[Row]:
    """A row for each container; a pod without one has a row as well."""
    name = printable("/".join(filter(None, (pod.namespace, pod.name)))) or "-"
    group = pod.group
    of_pod = (str(group.state) if group else "-", class_name(group.class_) if group else "-", printable(pod.key))
    waits = group.reason if group and not group.state.has_group else None
    note = pod.reason or waits or "-"
    tone = _TONES.get(group.state, Tone.NORMAL) if group else Tone.FAINT
    if not pod.containers:
        return [Row((name, "-", "-", *of_pod, prose(note)), tone)]
    return [
        Row(
            (
                name,
                printable(container.name or container.id[:12]),
                str(container.state),
                *of_pod,
                prose(container.reason or note),
            ),
            Tone.WARNING if _is_missed(container) and not pod.reason else tone,
        )
        for container in pod.containers
    ]


def _foreign_row(other: Foreign) -> Row:
    cells = (printable(other.name), class_name(other.class_), _FOREIGN, "-", "-", "-")
    return Row(cells, Tone.FAINT)


def _group_sheet(group: Group) -> Sheet:
    completed = (local_time(group.completed_at),) if group.completed_at else ()
    fields = [
        ("State", (": ".join(filter(None, (str(group.state), _reason(group)))),)),
        ("Workload", (workload(group.attributes),)),
        ("Class", (" ".join(map(class_name, group.classes or (group.class_,))),)),
        ("Priority", (str(group.priority),) if group.priority else ()),
        ("Path", (printable(group.path),) if group.path else ()),
        ("Snapshot", (printable(group.snapshot),) if group.snapshot else ()),
        ("Since", (local_time(group.created_at),)),
        ("Completed", completed),
        ("Run", (str(group.generation),)),
        ("Loss", (prose(group.loss),) if group.loss else ()),
        ("Baseline", (str(group.baseline),)),
        ("Caveats", tuple(prose(f"{name}: {group.caveats[name]}") for name in sorted(group.caveats))),
        ("Claims", tuple(f"{printable(claim.owner)} since {local_time(claim.since)}" for claim in group.claims)),
        ("Members", tuple(map(_member_text, group.members))),
        ("Attributes", tuple(printable(f"{name}={group.attributes[name]}") for name in sorted(group.attributes))),
    ]
    shown = tuple((label, values) for label, values in fields if values)
    return Sheet(printable(group.key), shown, _TONES.get(group.state, Tone.NORMAL))


def _member_text(member: Member) -> str:
    facts = [
        f"{member.kind} of {member.owner}",
        f"process {member.pid}" if member.pid else "",
        member.cgroup,
        f"ended {local_time(member.ended_at)}" if member.ended_at else "",
        _ran_before(member) if member.late else "",
        f"{count(member.descendants_outside, 'descendant')} outside" if member.descendants_outside else "",
        f"{count(member.tasks_outside, 'task')} stayed outside" if member.tasks_outside else "",
        member.reason if member.reason != "ended" else "",
    ]
    return prose(f"{member.id}: {', '.join(filter(None, facts))}")


def _ran_before(member: Member) -> str:
    used = f", for up to {member.cpu_time_before_ns / 1e9:.3f} s of CPU time" if member.cpu_time_before_ns else ""
    return f"was already running when it was put into the group{used}"


def _reading_row(reading: Reading) -> Row:
    # What is no number is shown in the kernel's word: never as 0, and never left out.
    known = reading.value is not None
    value = figure(reading.value, reading.unit) if reading.value is not None else printable(reading.text)
    cells = (printable(reading.domain), printable(reading.event), value, str(reading.kind))
    return Row(cells, Tone.NORMAL if known else Tone.WARNING)


def _total_row(total: Total) -> Row:
    cells = (
        printable(total.event),
        total_figure(total),
        str(total.quality),
        prose(total.reason) if total.reason else "-",
    )
    return Row(cells, Tone.WARNING if total.value is None else Tone.NORMAL)
