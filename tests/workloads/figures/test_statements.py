# SPDX-License-Identifier: Apache-2.0
"""The statements of the five proofs: what is shown agrees with the verdict, and what is not shown has a cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from resctrlmond.resctrl.counters import event
from resctrlmond.resctrl.witness import Moves, Seen, Use, Watch
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.reasons import Reason, doubt, text_of
from resctrlmond.workloads.figures.statements import statements
from resctrlmond.workloads.figures.verdict import baseline_of, verdict, weighed
from resctrlmond.workloads.model.states import ProofKind, Quality
from resctrlmond.workloads.model.workload import Member, Proof, State, Workload, replace
from tests.workloads.figures.test_verdict import CLASS_DEFAULT, HERE, MS, OTHER, OWN, WATCH, running, used, uses

S = 1_000_000_000
COUNTED = [Total(event(name), 7, Quality.EXACT) for name in ("core_energy", "mbm_total_bytes")]


def member(**fields: Any) -> Member:
    return replace(running().members[0], **fields)


def stated(of: Workload, counted: Sequence[Total] = (), now_ns: int = 12 * S) -> dict[ProofKind, tuple[bool, str]]:
    """Return whether each proof is shown, with its text, for a workload with one member."""
    found = list(statements(of, counted, now_ns))
    assert len(found) == len(ProofKind)
    return {one.kind: (one.shown, one.text) for one in found}


def seen(*some: Use, watch: Watch = WATCH, of: Workload | None = None) -> Workload:
    """Return a run with a member, as the witness has seen it 10 s after the boot."""
    return weighed(of or running(30 * MS), Seen(watch, some), Moves(), 10 * S)


def test_all_proofs_of_an_exact_run_are_shown() -> None:
    of = seen(used(OWN, 5_000_999_999, HERE), used(CLASS_DEFAULT, 30 * MS, HERE))
    assert stated(of, COUNTED) == {
        ProofKind.ENTERED: (
            True,
            "the first task of c1 was in the group before it ran; until then, 0.030 s of CPU time were used in the "
            "control groups",
        ),
        ProofKind.CLOSED: (
            True,
            "since then, tasks in its control groups used 5.000 s of CPU time in its groups and 0.000 s outside "
            "(0.0 %), as seen 2.000 s ago (10.000 s after boot)",
        ),
        ProofKind.ALONE: (
            True,
            "tasks of other control groups used up to 0.000 s of CPU time with CLOSID 0 and RMID 7, as seen 2.000 s "
            "ago (10.000 s after boot)",
        ),
        ProofKind.READ: (True, "every counter had a number at the begin and at the last reading"),
        ProofKind.WATCHED: (
            True,
            "resctrlmond-witness has counted without a gap since 0.000 s after boot; the group was created 0.000 s "
            "after boot",
        ),
    }


def test_use_outside_and_of_others_is_stated_with_its_bound() -> None:
    of = seen(used(OWN, 750 * MS, HERE), used(CLASS_DEFAULT, 280 * MS, HERE), used(OWN, 20 * MS + 1, OTHER))
    found = stated(of)
    assert (found[ProofKind.CLOSED][0], found[ProofKind.ALONE][0]) == (False, False)
    assert "0.750 s of CPU time in its groups and 0.250 s outside (25.0 %)" in found[ProofKind.CLOSED][1]
    assert "used up to 0.021 s of CPU time with CLOSID 0 and RMID 7" in found[ProofKind.ALONE][1]


@given(uses)
def test_statements_agree_with_the_verdict(some: list[Use]) -> None:
    of = seen(*some)
    found = stated(of)
    shown = all(found[kind][0] for kind in (ProofKind.CLOSED, ProofKind.ALONE, ProofKind.WATCHED))
    assert shown == (baseline_of(of) is Quality.EXACT)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"late": True, "cpu_time_before_ns": 1_230_001},
            "c1 ran and had used up to 0.002 s of CPU time before it was put into the group",
        ),
        ({"late": True}, "c1 ran before it was put into the group"),
        (
            {"late": True, "may_have_run": "its caller did not wait"},
            "c1 may have run before it was in the group: its caller did not wait",
        ),
        ({"joining": True}, "c1 may have run before it was in the group: it is being put into it"),
    ],
)
def test_reason_for_which_a_member_may_have_run_before_is_stated(fields: dict[str, Any], reason: str) -> None:
    of = running(30 * MS).with_member(member(**fields))
    assert (baseline_of(of), verdict(of).reasons) == (Quality.LATE, (reason,))
    assert stated(of)[ProofKind.ENTERED] == (False, reason)


def test_empty_control_group_is_stated_as_such() -> None:
    """It was said that its first task had been in the group before it ran."""
    found = stated(running().with_member(member(pid=0)))
    assert found[ProofKind.ENTERED] == (True, "c1 had no task when it was put into the group")


def test_each_member_with_tasks_has_a_statement() -> None:
    members = (
        Member("s", "sandbox", "oci"),
        member(late=True),
        replace(member(), id="c2"),
        replace(member(), id="c3"),
    )
    found = list(statements(replace(running(30 * MS), members=members), (), 0))[:3]
    assert [(one.kind, one.shown) for one in found] == [("entered", False), ("entered", True), ("entered", True)]
    # The time before is that of all.
    assert ["0.030 s" in one.text for one in found] == [False, True, False]


@pytest.mark.parametrize(("moved_in", "moved_out"), [(0, 0), (0, 1), (3, 0)])
def test_moves_of_others_are_stated_if_the_tasks_are_not_known_by_a_control_group(
    moved_in: int, moved_out: int
) -> None:
    of = replace(running(), members=(member(kind="process", cgroup=""),), proof=Proof(watch=WATCH, until_ns=10 * S))
    of = of.with_group(replace(of.first, moved_in=moved_in, moved_out=moved_out, moved_by="sh (process 99)"))
    found, ago = stated(of), "as seen 2.000 s ago (10.000 s after boot)"
    out, into = "1 task" if moved_out else "no task", "3 tasks" if moved_in else "no task"
    by = " (the last one was sh (process 99))"
    assert found[ProofKind.CLOSED] == (
        not moved_out,
        f"other programs{by if moved_out else ''} have moved {out} out of its groups, {ago}",
    )
    assert found[ProofKind.ALONE] == (
        not moved_in,
        f"other programs{by if moved_in else ''} have moved {into} into its groups, {ago}",
    )
    assert found[ProofKind.WATCHED][0]
    assert found[ProofKind.ENTERED][0]


@pytest.mark.parametrize("reason", list(Reason))
def test_each_doubt_about_all_totals_takes_a_proof_away_and_is_stated(reason: Reason) -> None:
    """The totals were estimated because of CPUs, and all five proofs were shown."""
    names = re.findall(r"{(\w+)}", reason.template)
    of = seen(used(OWN, 750 * MS, HERE))
    of = of.doubted(of.first, doubt(reason, **dict.fromkeys(names, "7")))
    found = stated(of, COUNTED)
    assert verdict(of).quality is not Quality.EXACT
    (text,) = (text for shown, text in found.values() if not shown)
    assert text_of(of.first.doubts[0]) in text


def test_missing_witness_is_stated() -> None:
    text = "resctrlmond-witness had not been loaded when the run began"
    for proof in (Proof(), Proof(cause=text, cgroups=(HERE,))):
        found = stated(replace(running(), proof=proof))
        assert found[ProofKind.WATCHED] == (False, text)
        assert not found[ProofKind.CLOSED][0]
        assert not found[ProofKind.ALONE][0]


def test_container_whose_entry_was_not_witnessed_shows_only_that() -> None:
    """It was stated that no program had moved a task, and the totals were estimated."""
    found = stated(replace(running(), proof=Proof(watch=WATCH, until_ns=10 * S, movers=(1,))))
    assert {kind for kind, (shown, _) in found.items() if shown} == {ProofKind.ENTERED}
    assert found[ProofKind.WATCHED][1].startswith("not known: resctrlmond did not ask the witness")


def test_gap_of_the_witness_leaves_only_the_entry() -> None:
    found = stated(seen(watch=Watch(6, 0)), COUNTED)
    assert {kind for kind, (shown, _) in found.items() if shown} == {ProofKind.ENTERED, ProofKind.READ}
    text = "not known: resctrlmond-witness was loaded again during the run, or could not record something"
    assert found[ProofKind.WATCHED][1] == text


def test_group_that_no_task_has_entered_has_no_rmid_to_state() -> None:
    of = running()
    found = stated(seen(of=replace(of.with_group(replace(of.first, ids=None)), members=())))
    assert found[ProofKind.ALONE] == (True, "no task has entered, as seen 2.000 s ago (10.000 s after boot)")


def test_witness_that_was_not_asked_yet_shows_nothing() -> None:
    of = running()
    found = stated(replace(of, proof=replace(of.proof, until_ns=0)))
    assert {kind for kind, (shown, _) in found.items() if shown} == {ProofKind.ENTERED}
    assert found[ProofKind.WATCHED][1] == "not known: resctrlmond has not asked the witness yet"


def test_workload_without_tasks_shows_nothing() -> None:
    found = stated(replace(running(), members=(), proof=Proof()))
    assert not any(shown for shown, _ in found.values())
    assert found[ProofKind.ENTERED][1] == "no task has been put into its groups"
    assert found[ProofKind.READ][1] == "no counter has been read"


def test_reason_of_counters_is_stated_once() -> None:
    bad = [unknown(one, "mon_L3_00 read 'Error' at the end") for one in COUNTED]
    assert stated(seen(), bad)[ProofKind.READ] == (
        False,
        "core_energy, mbm_total_bytes: mon_L3_00 read 'Error' at the end",
    )


def unknown(total: Total, reason: str) -> Total:
    return Total(total.event, None, Quality.UNKNOWN, reason)


def test_end_is_named_after_the_run() -> None:
    of = seen()
    ended = replace(of, groups=(replace(of.first, state="completed"),))
    assert ended.state is State.COMPLETED
    assert stated(ended, COUNTED)[ProofKind.READ][1] == "every counter had a number at the begin and at the end"
