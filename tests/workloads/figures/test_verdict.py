# SPDX-License-Identifier: Apache-2.0
"""The verdict on a run from what the witness has seen: exact only if nothing is missing and nothing is unknown."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.witness import Ids, Move, Moves, Seen, Use, Watch
from resctrlmond.workloads.figures.verdict import (
    DROPPED,
    SLACK_NS,
    baseline_of,
    cpu_time,
    entered_now,
    is_news,
    outside_ns_of,
    verdict,
    weighed,
    with_ids,
    with_new_cgroup,
)
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Member, Proof, Workload, replace
from tests.workloads.builders import workload

WATCH = Watch(begun_ns=5, gaps=0)
OWN, CLASS_DEFAULT, ROOT = (0, 7), (0, 0), (1, 1)
BASELINE_NS = 1_000
# A container's control group, one below it, another container, and what is above all.
HERE, BELOW, OTHER, TOP = 11, 12, 13, 1
MS = 1_000_000
OTHERS, OURS = 99, 7


def moved(
    number: int, old: Ids, new: Ids, *, writer: int = OTHERS, cgroup: int = HERE, at_ns: int = BASELINE_NS + 1
) -> Move:
    return Move(number, at_ns, writer, 500, cgroup, old, new, "sh")


ENTRY = [moved(1, CLASS_DEFAULT, OWN)]


def running(entered_ns: int = 0) -> Workload:
    """Return a run whose control group is HERE, with a group that has the IDs OWN."""
    proof = Proof(watch=WATCH, until_ns=BASELINE_NS, cgroups=(HERE,), entered={HERE: entered_ns})
    found = workload("web", nonce=1, inodes={"mon_L3_00": 12}, created_ns=BASELINE_NS, has_begin=True)
    member = Member(id="c1", kind="container", owner="oci", pid=7, cgroup="/sys/fs/cgroup/c1", late=False)
    return replace(found.with_group(replace(found.first, ids=OWN)).with_member(member), proof=proof)


def used(ids: Ids, ns: int, *cgroups: int, at_ns: int = BASELINE_NS + 1) -> Use:
    """Return CPU time in a control group, by default after the baseline."""
    return Use(ids, ns, at_ns, (*cgroups, TOP))


def judged(of: Workload, *uses: Use, watch: Watch = WATCH) -> Workload:
    """Return the workload as its totals are reported after a look."""
    return weighed(of, Seen(watch, uses), Moves(), 2_000)


def test_use_in_the_group_alone_is_exact() -> None:
    found = judged(running(), used(OWN, 5_000 * MS, HERE), used(OWN, 3 * MS, BELOW, HERE))
    assert baseline_of(found) is Quality.EXACT
    assert found.proof.inside_ns == 5_003 * MS


def test_use_outside_the_group_is_late_by_its_amount() -> None:
    found = judged(running(), used(OWN, 750 * MS, HERE), used(CLASS_DEFAULT, 250 * MS, BELOW, HERE))
    assert baseline_of(found) is Quality.LATE
    assert verdict(found).reasons == (
        "tasks in its control groups used 0.250 s of CPU time outside the group, 25.0 % of their CPU time",
    )


def test_use_within_the_slack_does_not_matter() -> None:
    within, above = (used(CLASS_DEFAULT, ns, HERE) for ns in (SLACK_NS, SLACK_NS + 1))
    assert [baseline_of(judged(running(), use)) for use in (within, above)] == [Quality.EXACT, Quality.LATE]
    assert [is_news(running(), judged(running(), use)) for use in (within, above)] == [False, True]
    within, above = (used(OWN, ns, OTHER) for ns in (SLACK_NS, SLACK_NS + 1))
    assert [baseline_of(judged(running(), use)) for use in (within, above)] == [Quality.EXACT, Quality.ESTIMATED]


def test_use_before_the_tasks_entered_is_not_missing() -> None:
    uses = used(OWN, 750 * MS, HERE), used(CLASS_DEFAULT, 30 * MS, HERE)
    assert baseline_of(judged(running(entered_ns=30 * MS), *uses)) is Quality.EXACT
    assert baseline_of(judged(running(entered_ns=28 * MS), *uses)) is Quality.LATE


def test_use_of_helpers_of_the_runtime_is_not_missing() -> None:
    of = running()
    of = replace(of, proof=replace(of.proof, helpers=(BELOW,)))
    assert baseline_of(judged(of, used(CLASS_DEFAULT, 30 * MS, BELOW, HERE))) is Quality.EXACT


def test_use_of_others_in_the_group_is_estimated() -> None:
    found = judged(running(), used(OWN, 750 * MS, HERE), used(OWN, 20 * MS, OTHER))
    assert baseline_of(found) is Quality.ESTIMATED
    assert verdict(found).reasons == (
        "tasks of other control groups used up to 0.020 s of CPU time in the group, and their use is counted",
    )


def test_use_of_the_rmid_before_the_baseline_is_history() -> None:
    history = used(OWN, 9_000 * MS, OTHER, at_ns=BASELINE_NS - 1)
    assert baseline_of(judged(running(), history)) is Quality.EXACT


def test_rest_of_the_use_of_a_former_user_is_history() -> None:
    """The last use of a task is charged when the kernel frees it, which is some time after its end."""
    of = running()
    long_ago, before, after = (200_000 * MS + ns * MS for ns in (-100_000, 1, 3))
    of = of.with_group(replace(of.first, ids=None, created_ns=200_000 * MS))
    former = [used(OWN, 900 * MS, OTHER, at_ns=before), used(OWN, 300 * MS, 14, at_ns=long_ago)]
    entry = [moved(1, CLASS_DEFAULT, OWN, at_ns=before + MS)]
    of = of.with_group(with_ids(of.first, entry, of.proof, Seen(WATCH, former)))
    assert [(use.cpu_ns, use.cgroups[0]) for use in of.first.history] == [(900 * MS, OTHER)]
    for ns, quality in ((900, Quality.EXACT), (901, Quality.EXACT), (902, Quality.ESTIMATED)):
        assert baseline_of(judged(of, used(OWN, ns * MS, OTHER, at_ns=after))) is quality
    assert baseline_of(judged(of, used(OWN, 301 * MS, 14, at_ns=after))) is Quality.ESTIMATED


def test_use_of_others_since_a_task_entered_is_that_of_strangers() -> None:
    of = running()
    for at_ns, quality in ((ENTRY[0].at_ns, Quality.EXACT), (ENTRY[0].at_ns + 1, Quality.ESTIMATED)):
        stranger = used(OWN, 20 * MS, OTHER, at_ns=at_ns)
        new = of.with_group(with_ids(of.first, ENTRY, of.proof, Seen(WATCH, [stranger])))
        assert baseline_of(judged(new, stranger)) is quality


def test_use_of_others_elsewhere_does_not_matter() -> None:
    assert baseline_of(judged(running(), used(ROOT, 9_000 * MS, OTHER))) is Quality.EXACT


def test_gap_is_not_exact() -> None:
    for watch in (Watch(6, 0), Watch(5, 1)):
        assert baseline_of(judged(running(), watch=watch)) is Quality.ESTIMATED


def test_use_before_a_task_has_entered_the_group_is_late() -> None:
    of = running()
    of = of.with_group(replace(of.first, ids=None))
    assert baseline_of(judged(replace(of, members=()))) is Quality.EXACT
    assert baseline_of(judged(of, used(OWN, 30 * MS, HERE))) is Quality.LATE


def test_run_whose_entry_the_witness_has_not_shown_is_not_exact() -> None:
    of = running()
    unseen = [judged(of.with_group(replace(of.first, ids=None)))]
    unseen.append(replace(of, proof=replace(of.proof, until_ns=0)))
    service = replace(of.members[0], pid=0, commands=("ExecStart=7",))
    unseen.append(judged(of.with_member(service).with_group(replace(of.first, ids=None))))
    container = replace(tree().members[0], kind="container")
    unseen.append(replace(tree().with_member(container), proof=replace(tree().proof, until_ns=1)))
    causes = (
        "the witness has not seen the move of c1 into the group",
        "resctrlmond has not asked the witness yet",
        "the witness has not seen the move of c1 into the group",
        "c1 has no control group of its own, so processes that join it from outside are not known",
    )
    for found, cause in zip(unseen, causes, strict=True):
        (reason,) = verdict(found).reasons
        assert (baseline_of(found), reason.partition(": ")[2]) == (Quality.ESTIMATED, cause)


def test_rows_that_the_witness_has_dropped_make_no_verdict_better() -> None:
    uses = used(CLASS_DEFAULT, 30 * MS, HERE), used(OWN, 9 * MS, OTHER)
    before = weighed(running(), Seen(WATCH, uses), Moves(), 2_000)
    assert verdict(judged(before)).reasons == verdict(before).reasons


def looked(of: Workload, at_ns: int, *, dropped_ns: int = 0) -> Workload:
    """Return the workload after a look that began at ``at_ns``."""
    return weighed(of, Seen(WATCH, (), dropped_ns), Moves(), at_ns)


def test_use_that_the_witness_dropped_since_the_last_look_may_be_missing() -> None:
    of = looked(running(), 2_000)
    for dropped_ns, quality in ((1_999, Quality.EXACT), (2_000, Quality.EXACT), (2_001, Quality.ESTIMATED)):
        now = looked(of, 9_000, dropped_ns=dropped_ns)
        assert baseline_of(now) is quality
        assert is_news(of, now) == (quality is not Quality.EXACT)
        # It stays so, although this look has read all that is newer.
        assert looked(now, 10_000, dropped_ns=dropped_ns).proof.cause == now.proof.cause
        assert now.proof.cause == ("" if quality is Quality.EXACT else DROPPED)


def test_drop_before_the_run_began_does_not_matter() -> None:
    begun = running()
    begun = replace(begun, proof=replace(begun.proof, until_ns=BASELINE_NS))
    assert baseline_of(looked(begun, 2_000, dropped_ns=BASELINE_NS - 1)) is Quality.EXACT


def test_drop_does_not_matter_to_a_run_that_is_known_by_moves() -> None:
    assert looked(tree(), 2_000, dropped_ns=9_000).proof.cause == ""


def test_time_of_a_look_is_saved_before_the_witness_drops_what_it_has_shown() -> None:
    half_hour_ns = 1_800 * 10**9
    for of, is_saved in ((looked(running(), 2_000), True), (looked(tree(), 2_000), False)):
        assert not is_news(of, looked(of, 2_000 + half_hour_ns))
        assert is_news(of, looked(of, 2_001 + half_hour_ns)) is is_saved


def tree() -> Workload:
    """Return a run that is known by the tasks that were put into its group."""
    of = running()
    return replace(
        of.with_member(replace(of.members[0], kind="process", cgroup="")),
        proof=Proof(watch=WATCH, moves=4, movers=(OURS,)),
    )


def judged_by(of: Workload, *moves: Move, last: int = 10) -> Workload:
    seen = weighed(of, Seen(WATCH, ()), Moves(last=last, tasks=moves, capacity=4096), 2_000)
    assert is_news(of, seen) == bool(seen.first.moved_in or seen.first.moved_out or last - 4 > 1024)
    return seen


def test_run_of_which_no_other_program_has_moved_a_task_is_exact() -> None:
    for move in (
        moved(5, CLASS_DEFAULT, OWN, writer=OURS),
        moved(5, OWN, CLASS_DEFAULT, writer=OURS),
        moved(4, OWN, CLASS_DEFAULT),  # it was looked at
        moved(5, CLASS_DEFAULT, ROOT),
        moved(5, OWN, OWN),
        moved(5, OWN, ROOT, at_ns=BASELINE_NS - 1),  # out of an earlier group
    ):
        assert baseline_of(judged_by(tree(), move)) is Quality.EXACT


def test_moves_of_others_are_counted_once() -> None:
    for move, quality in ((moved(5, OWN, ROOT), Quality.LATE), (moved(5, ROOT, OWN), Quality.ESTIMATED)):
        for of in (tree(), tree().with_member(replace(tree().members[0], late=True))):
            found = judged_by(of, move)
            assert baseline_of(found) is quality
            again = weighed(found, Seen(WATCH, ()), Moves(last=10, tasks=(move,)), 3_000)
            assert (again.first.moved_in, again.first.moved_out) == (found.first.moved_in, found.first.moved_out)
            assert found.first.moved_in + found.first.moved_out == 1
            assert found.first.moved_by == "sh (process 99)"


def test_number_of_the_last_move_is_saved_before_the_witness_forgets() -> None:
    assert judged_by(tree(), last=1028).proof.moves == 4
    assert judged_by(tree(), last=1029).proof.moves == 1029


def test_run_without_a_witness_is_not_exact() -> None:
    of = running()
    assert baseline_of(replace(of, proof=replace(of.proof, cause="none ran"))) is Quality.ESTIMATED
    assert baseline_of(replace(tree(), proof=Proof())) is Quality.ESTIMATED


uses = st.lists(
    st.builds(
        used,
        st.sampled_from([OWN, CLASS_DEFAULT, ROOT]),
        st.integers(0, 10**12),
        st.sampled_from([HERE, BELOW, OTHER]),
        at_ns=st.integers(BASELINE_NS + 1, 2 * BASELINE_NS),
    )
)


@given(uses, uses)
def test_more_use_never_makes_a_verdict_better(some: list[Use], more: list[Use]) -> None:
    ranks = list(Quality)
    before, after = judged(running(), *some), judged(running(), *some, *more)
    assert ranks.index(baseline_of(before)) <= ranks.index(baseline_of(after))


@given(uses)
def test_verdict_is_news_when_it_is_not_in_the_record(some: list[Use]) -> None:
    of = running()
    now = weighed(of, Seen(WATCH, some), Moves(), 2_000)
    if baseline_of(now) is not baseline_of(of):
        assert is_news(of, now)
    assert not is_news(now, now)


def test_record_keeps_the_proof() -> None:
    of = judged(running(), used(CLASS_DEFAULT, 30 * MS, HERE))
    assert msgspec.json.decode(msgspec.json.encode(of), type=Workload) == of


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_group_keeps_its_rmid_in_another_class(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """On arm64, groups of several classes can have the same PMG."""
    is_arm = machine == "aarch64"
    monkeypatch.setattr("resctrlmond.workloads.figures.verdict._RMIDS_ARE_OF_CLASSES", is_arm)
    of, other = running(), (3, OWN[1])
    in_two = used(OWN, 5_000 * MS, HERE), used(other, 5_000 * MS, HERE)
    assert baseline_of(judged(of, *in_two)) is (Quality.LATE if is_arm else Quality.EXACT)
    strange = judged(of, used(other, 20 * MS, OTHER))
    assert baseline_of(strange) is (Quality.EXACT if is_arm else Quality.ESTIMATED)


def test_use_before_in_another_class_is_not_in_the_group() -> None:
    """Its RMID was used in that class before."""
    of = running()
    before = used((3, OWN[1]), 5_000 * MS, HERE, at_ns=BASELINE_NS - 1)
    changed = of.with_group(with_ids(of.first, ENTRY, of.proof, Seen(WATCH, [before])))
    for ns in (5_000 * MS, 5_020 * MS):
        now = judged(changed, used((3, OWN[1]), ns, HERE, at_ns=BASELINE_NS + 2 * MS))
        assert (cpu_time(now), baseline_of(now)) == ((ns - 5_000 * MS, 5_000 * MS), Quality.LATE)
    strange = used((3, OWN[1]), 300 * MS, OTHER, at_ns=BASELINE_NS - 1)
    changed = of.with_group(with_ids(of.first, ENTRY, of.proof, Seen(WATCH, [strange])))
    for ns, quality in ((300, Quality.EXACT), (320, Quality.ESTIMATED)):
        again = used((3, OWN[1]), ns * MS, OTHER, at_ns=BASELINE_NS + 2 * MS)
        assert baseline_of(judged(changed, again)) is quality


def test_use_before_hides_none_of_another_control_group() -> None:
    """The witness drops rows of control groups that were removed."""
    of = running()
    of = replace(of, proof=replace(of.proof, cgroups=(TOP,), entered={HERE: 400 * MS, OTHER: 0}))
    assert judged(of, used(CLASS_DEFAULT, 300 * MS, OTHER)).proof.outside[OTHER] == {OTHER: 300 * MS}
    assert baseline_of(judged(of, used(CLASS_DEFAULT, 300 * MS, OTHER))) is Quality.LATE
    assert baseline_of(judged(of, used(CLASS_DEFAULT, 20 * MS, 14))) is Quality.LATE


def test_container_whose_entry_was_not_witnessed_is_not_exact() -> None:
    of = running()
    member = replace(of.members[0], cgroup="/sys/fs/cgroup/c1")
    of = replace(of.with_member(member), proof=Proof(watch=WATCH))
    assert baseline_of(of) is Quality.ESTIMATED
    for watch, cause in ((WATCH, "resctrlmond did not ask the witness"), (None, "had not been loaded")):
        late = replace(of.with_member(replace(member, late=True)), proof=Proof(watch=watch))
        found = verdict(late)
        assert found.quality is Quality.ESTIMATED
        assert found.reasons[0] == "c1 ran before it was put into the group"
        assert cause in found.reasons[1]


def test_use_of_a_container_that_is_about_to_enter_is_late_until_it_has() -> None:
    """Its runtime uses CPU time in its control group before it calls the hook."""
    of = running()
    of = replace(of, proof=replace(of.proof, cgroups=(TOP,)))
    starting = used(CLASS_DEFAULT, 300 * MS, OTHER)
    seen = weighed(of, Seen(WATCH, [starting]), Moves(), 2_000)
    assert baseline_of(seen) is Quality.LATE
    entered = replace(seen, proof=entered_now(seen.proof, [OTHER], seen.groups, Seen(WATCH, [starting])))
    assert baseline_of(entered) is Quality.EXACT
    assert baseline_of(judged(entered, starting)) is Quality.EXACT
    other = entered_now(seen.proof, [OTHER], seen.groups, Seen(WATCH, [starting, used(CLASS_DEFAULT, 9 * MS, 14)]))
    assert baseline_of(replace(seen, proof=other)) is Quality.LATE
    assert baseline_of(judged(entered, starting, used(CLASS_DEFAULT, 2 * MS, OTHER))) is Quality.LATE


def test_use_of_a_container_that_never_entered_is_late_after_its_rows_were_dropped() -> None:
    of = running()
    of = replace(of, proof=replace(of.proof, cgroups=(TOP,)))
    missed, other = used(CLASS_DEFAULT, 300 * MS, OTHER), used(CLASS_DEFAULT, 200 * MS, 14)
    of = weighed(of, Seen(WATCH, [missed]), Moves(), 2_000)
    for uses in ([], [other]):
        assert outside_ns_of(judged(of, *uses).proof) == (500 if uses else 300) * MS
    entered = replace(of, proof=entered_now(of.proof, [14], of.groups, Seen(WATCH, [other])))
    assert outside_ns_of(judged(entered, other).proof) == 300 * MS
    assert baseline_of(judged(entered, other)) is Quality.LATE


def test_use_of_helpers_before_they_are_known_is_not_missing_after_that() -> None:
    of = running()
    of = replace(of, proof=replace(of.proof, cgroups=(TOP,)))
    helping = used(CLASS_DEFAULT, 300 * MS, OTHER)
    of = weighed(of, Seen(WATCH, [helping]), Moves(), 2_000)
    assert baseline_of(of) is Quality.LATE
    known = replace(of, proof=replace(of.proof, helpers=(OTHER,)))
    assert baseline_of(judged(known, helping)) is Quality.EXACT


def called(of: Workload, outside_ns: int, before_ns: int) -> Workload:
    """Return a service after the call of a process that had used ``before_ns``.

    Its control group has used ``outside_ns`` outside the group until then.
    """
    seen = Seen(WATCH, [used(CLASS_DEFAULT, outside_ns, HERE)])
    return replace(of, proof=entered_now(of.proof, [HERE], of.groups, seen, before_ns=before_ns))


def service() -> Workload:
    """Return the run of a service of which no process has called yet."""
    return replace(running(), proof=Proof(watch=WATCH, cgroups=(HERE,)))


def missing_ns(of: Workload, outside_ns: int) -> int:
    """Return the CPU time that is missing when the control group has used so much outside the group."""
    seen = weighed(of, Seen(WATCH, [used(CLASS_DEFAULT, outside_ns, HERE)]), Moves(), 2_000)
    is_exact = baseline_of(seen) is Quality.EXACT
    found = outside_ns_of(seen.proof)
    assert is_exact == (found <= MS)
    return found


def test_only_use_of_processes_that_called_is_not_missing() -> None:
    of = called(service(), 30 * MS, 10 * MS)
    assert missing_ns(of, 30 * MS) == 20 * MS
    assert missing_ns(of, 35 * MS) == 25 * MS
    again = called(of, 37 * MS, 7 * MS)
    assert missing_ns(again, 37 * MS) == 20 * MS
    all_called = called(called(service(), 10 * MS, 10 * MS), 25 * MS, 15 * MS)
    for _ in range(2):
        assert missing_ns(all_called, 25 * MS) == 0


def test_use_of_a_process_in_another_control_group_before_its_call_hides_none() -> None:
    of = called(service(), 10 * MS, 500 * MS)
    assert missing_ns(of, 10 * MS) == 0
    assert missing_ns(of, 310 * MS) == 300 * MS


def test_use_in_a_control_group_that_has_replaced_one_is_missing() -> None:
    of = called(service(), 10 * MS, 10 * MS)
    of = replace(of, proof=with_new_cgroup(of.proof, OTHER, "a.service"))
    uses = used(CLASS_DEFAULT, 10 * MS, HERE), used(CLASS_DEFAULT, 30 * MS, OTHER)
    assert weighed(of, Seen(WATCH, uses), Moves(), 2_000).proof.outside == {
        HERE: {HERE: 10 * MS},
        OTHER: {OTHER: 30 * MS},
    }
    assert baseline_of(judged(of, *uses[:1])) is Quality.EXACT
    assert baseline_of(judged(of, *uses)) is Quality.LATE
    assert outside_ns_of(judged(of, *uses).proof) == 30 * MS


def test_service_with_too_many_control_groups_is_not_exact() -> None:
    proof = service().proof
    for number in range(100, 1100):
        proof = with_new_cgroup(proof, number, "a.service")
    assert not proof.cause
    full = with_new_cgroup(proof, 1100, "a.service")
    assert full.cgroups == proof.cgroups
    assert full.cause == "the control group of a.service was created too many times"
    assert baseline_of(judged(replace(service(), proof=full))) is Quality.ESTIMATED


def test_member_that_is_not_known_to_have_entered_first_is_late() -> None:
    """That is the default: a member is exact only if the code that creates it has seen that."""
    of = running()
    known = of.members[0]
    made = Member(known.id, known.kind, known.owner, pid=known.pid)
    assert baseline_of(judged(of.with_member(made))) is Quality.LATE


def test_former_use_of_a_control_group_hides_no_living_task_of_it() -> None:
    """The sum of what has ended grows only when the task ends."""
    of = running()
    ended = used(OWN, 905 * MS, OTHER, at_ns=BASELINE_NS - 1)
    of = of.with_group(with_ids(of.first, ENTRY, of.proof, Seen(WATCH, [ended])))
    assert baseline_of(judged(of, ended)) is Quality.EXACT
    assert baseline_of(judged(of, ended, used(OWN, 20 * MS, OTHER, at_ns=1 << 63))) is Quality.ESTIMATED


def test_use_before_a_container_entered_a_pod_that_has_entered_is_not_missing() -> None:
    """In the second run of a pod, its control group has entered too."""
    pod = 20
    of = replace(running(), proof=Proof(watch=WATCH, until_ns=1, cgroups=(pod,), entered={pod: 0}))
    starting = used(CLASS_DEFAULT, 9 * MS, OTHER, pod)
    seen = judged(of, starting)
    assert outside_ns_of(seen.proof) == 9 * MS
    assert outside_ns_of(entered_now(seen.proof, [OTHER], seen.groups, Seen(WATCH, [starting]))) == 0


def test_cpu_time_has_no_use_of_earlier_runs() -> None:
    """A pod can get the RMID of its run before."""
    of = running()
    before = used(OWN, 700 * MS, HERE, at_ns=BASELINE_NS - 1)
    of = of.with_group(with_ids(of.first, ENTRY, of.proof, Seen(WATCH, [before])))
    of = replace(of, proof=entered_now(of.proof, [HERE], of.groups, Seen(WATCH, [before])))
    now = used(OWN, 950 * MS, HERE, at_ns=BASELINE_NS + 2 * MS), used(OWN, 40 * MS, BELOW, HERE, at_ns=1 << 63)
    assert cpu_time(judged(of, *now, used(CLASS_DEFAULT, 3 * MS, HERE))) == (290 * MS, 3 * MS)


def test_cpu_time_is_not_known_if_it_may_have_that_of_an_earlier_run() -> None:
    of = running()
    late = used(OWN, 700 * MS, HERE, at_ns=BASELINE_NS + 5 * MS)
    of = of.with_group(with_ids(of.first, ENTRY, of.proof, Seen(WATCH, [late])))
    assert cpu_time(judged(of, late)) is None
    assert baseline_of(judged(of, late)) is Quality.ESTIMATED
    assert cpu_time(running()) is not None
    assert cpu_time(replace(running(), proof=Proof(watch=WATCH, until_ns=1))) is None


def test_cpu_time_keeps_what_the_witness_has_dropped() -> None:
    of = judged(running(), used(OWN, 30 * MS, BELOW, HERE), used(OWN, 9 * MS, HERE))
    found = judged(of, used(OWN, 10 * MS, HERE))
    assert cpu_time(found) == (40 * MS, 0)
    many = [used(OWN, 10 * MS, HERE), *(used(OWN, MS, 1_000 + number, HERE) for number in range(1_500))]
    found = judged(judged(found, *many), used(OWN, 11 * MS, HERE))
    assert cpu_time(found) == (1_541 * MS, 0)
    assert len(found.proof.inside) <= 2
