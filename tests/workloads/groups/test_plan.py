# SPDX-License-Identifier: Apache-2.0
"""Tables of the decisions at start-up and at the end of claims."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from resctrlmond.resctrl.tree import Found, GroupRef
from resctrlmond.workloads.groups.claims import claims_over
from resctrlmond.workloads.groups.plan import Do, plan_start
from resctrlmond.workloads.groups.queue_order import waiting
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.owners import OCI, RECOVERED
from resctrlmond.workloads.model.workload import Claim, EndRule, Group, Member, State, Workload
from tests.workloads.builders import workload

GID, BOOT = 7, "this-boot"
UID = "0f8fad5b-d9cb-469f-a165-70867728950e"


def record(state: State, nonce: int = 1, boot: str = BOOT, class_: str = "", key: str = "k") -> Workload:
    return workload(key, state, class_=class_, nonce=nonce, boot_id=boot)


def found(nonce: int = 1, gid: int = GID, class_: str = "", name: str = "k") -> Found:
    return Found(GroupRef(class_, name), gid, nonce, os.path.join("/sys", class_, name), inode=nonce)


@pytest.mark.parametrize(
    ("one", "tree", "do"),
    [
        (record(State.ACTIVE), [found()], Do.KEEP),
        (record(State.IDLE), [found()], Do.KEEP),
        (record(State.ACTIVE), [found(class_="gold")], Do.KEEP),
        (record(State.ACTIVE), [], Do.RECORD_LOSS),
        (record(State.ACTIVE), [found(nonce=2)], Do.RECORD_LOSS),
        (record(State.ACTIVE), [found(gid=0)], Do.RECORD_LOSS),
        (record(State.ACTIVE, boot="another"), [found()], Do.RECORD_LOSS),
        (record(State.PENDING, nonce=0), [], Do.RETRY),
        (record(State.PENDING, nonce=0), [found(nonce=0)], Do.RETRY),
        (record(State.PENDING), [found(nonce=2)], Do.RETRY),
        (record(State.PENDING), [found()], Do.BASELINE),
        (record(State.PENDING, boot="another"), [found()], Do.RECORD_LOSS),
        (record(State.ENDING), [found()], Do.FINISH),
        (record(State.ENDING), [], Do.FINISH),
        (record(State.ENDING, boot="another"), [], Do.FINISH),
    ],
)
def test_each_record_has_one_step(one: Workload, tree: list[Found], do: Do) -> None:
    [step] = plan_start([one], tree, GID, BOOT).steps
    assert (step.do, step.key, step.group) == (do, one.key, one.first)


def test_queue_has_pending_workloads_in_order() -> None:
    def waits(key: str, at: int, priority: int = 0) -> Workload:
        # By the time of day the oldest is the youngest, because the clock was set back.
        return workload(key, State.PENDING, created_at=f"{9 - at}", created_ns=at + 1, priority=priority, nonce=1)

    def second(at: int) -> Group:
        return replace(waits("second", at).first, folder="gold")

    pods = [
        waits("old", 1),
        waits("young", 2),
        waits("urgent", 3, 1),
        waits("patient", 0, -1),
        record(State.ACTIVE, key="spread").with_group(second(0)),
        # Its first group comes first, and then this one.
        waits("none", 4).with_group(second(4)),
        record(State.ENDING, key="ending").with_group(second(0)),
        record(State.FAILED, key="failed"),
    ]
    found = [(queued.workload.key, queued.group.folder) for queued in waiting(pods)]
    assert found == [
        ("urgent", ""), ("spread", "gold"), ("old", ""), ("young", ""), ("none", ""), ("patient", ""),
    ]  # fmt: skip


def test_ended_workloads_need_nothing_and_groups_without_a_record_are_left_over() -> None:
    over = [record(state, key=state) for state in State if state.is_over]
    marked, foreign = found(nonce=9, name="marked"), found(nonce=8, gid=0, name="foreign")
    plan = plan_start(over, [marked, foreign], GID, BOOT)
    assert plan.steps == ()
    assert plan.leftovers == (marked,)


@given(
    st.lists(st.tuples(st.sampled_from(State), st.integers(0, 4), st.sampled_from([BOOT, "another"])), max_size=6),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([GID, 0]), st.sampled_from(["", "gold"])), max_size=6),
)
def test_no_group_belongs_to_two_workloads_and_foreign_groups_to_none(
    states: list[tuple[State, int, str]], groups: list[tuple[int, int, str]]
) -> None:
    records = [record(state, nonce, boot, key=f"k{i}") for i, (state, nonce, boot) in enumerate(states)]
    tree = [found(nonce, gid, class_, f"k{i}") for i, (nonce, gid, class_) in enumerate(groups)]
    plan = plan_start(records, tree, GID, BOOT)
    kept = [step.group.nonce for step in plan.steps if step.do in (Do.KEEP, Do.BASELINE)]
    assert len(set(kept)) == len(kept)
    assert not set(kept) & {one.nonce for one in plan.leftovers}
    assert set(kept) <= {one.nonce for one in tree if one.gid == GID}
    assert all(one.gid == GID for one in plan.leftovers)
    assert [step.key for step in plan.steps] == [one.key for one in records if not one.state.is_over]


RUN = "run"
RULES = {OCI: EndRule.CONTAINER, RUN: EndRule.MEMBERS, RECOVERED: EndRule.TASKS}


def claimed(key: str, owners: list[str], members: list[Member], pod_cgroup: str = "") -> Workload:
    claims = tuple(Claim(owner, utc_now(), RULES.get(owner, EndRule.RELEASE)) for owner in owners)
    return workload(key, claims=claims, members=tuple(members), pod_cgroup=pod_cgroup)


def member(owner: str, ended: float | None = None, id_: str = "m") -> Member:
    # Seconds ago in hundreds, which the test makes a time of: the table is made long before it is used.
    text = "" if ended is None else str(ended)
    return Member(id=id_, kind="container", owner=owner, ended_at=text)


def timed(record: Workload) -> Workload:
    last = min((float(one.ended_at) for one in record.members if one.ended_at), default=0.0)
    return replace(record, idle_ns=boot_ns() - int(last * 100e9))


CTR = "4d" * 32


@pytest.mark.parametrize(
    ("one", "gone", "empty", "over"),
    [
        # a container's group ends with its last member
        (claimed(CTR, [OCI], [member(OCI)]), False, False, []),
        (claimed(CTR, [OCI], [member(OCI, 6)]), False, False, [OCI]),
        (claimed(CTR, [OCI], [member(OCI, 4)]), False, False, []),
        # by the clock of another boot
        (claimed(CTR, [OCI], [member(OCI, -3600)]), False, False, [OCI]),
        (claimed(CTR, [OCI], [member(OCI, 60), member(OCI, id_="n")]), False, False, []),
        # another owner's member does not end the hook's claim, nor the hook's member the other claim
        (claimed(CTR, [OCI], [member("cli", 60)]), False, False, []),
        (claimed(CTR, [OCI], []), False, False, []),
        # a pod's ends with its control group, however long no container of it ran
        (claimed(UID, [OCI], [member(OCI, 9999)], "/cg"), False, False, []),
        (claimed(UID, [OCI], [member(OCI, 1)], "/cg"), True, False, [OCI]),
        (claimed(UID, [OCI], [member(OCI)], "/cg"), True, False, []),
        # one that has none waits for its time
        (claimed(UID, [OCI], [member(OCI, 29)]), False, False, []),
        (claimed(UID, [OCI], [member(OCI, 31)]), False, False, [OCI]),
        # a command's end is claimed a little longer
        (claimed("run-1", [RUN], [member(RUN)]), False, False, []),
        (claimed("run-1", [RUN], [member(RUN, 11)]), False, False, [RUN]),
        (claimed("run-1", [RUN], []), False, False, []),
        # our own claim on what was found ends with its tasks
        (claimed("k", [RECOVERED], []), False, False, []),
        (claimed("k", [RECOVERED], []), False, True, [RECOVERED]),
        # claims by word are ended by word only
        (claimed("k", ["cli", "uid:0", "nri"], [member("cli", 9999)]), True, True, []),
        (claimed(CTR, [OCI, "cli"], [member(OCI, 60)]), False, False, [OCI]),
    ],
)
def test_ended_claims(one: Workload, gone: bool, empty: bool, over: list[str]) -> None:
    found = claims_over(timed(one), pod_is_gone=gone, group_is_empty=empty, linger_s=500, pod_linger_s=3000)
    assert found == over


@pytest.mark.parametrize("owner", ["oci", "run", "recovered", "nri", "engine"])
def test_claim_ends_by_its_rule_for_any_owner(owner: str) -> None:
    ended = {rule: claimed(CTR, [], [member(owner, 60)]).with_claim(owner, utc_now(), rule) for rule in EndRule}
    over = {
        rule
        for rule, one in ended.items()
        if claims_over(timed(one), pod_is_gone=False, group_is_empty=True, linger_s=500, pod_linger_s=3000)
    }
    assert over == {EndRule.MEMBERS, EndRule.CONTAINER, EndRule.TASKS}
