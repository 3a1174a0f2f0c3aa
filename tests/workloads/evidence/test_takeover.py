# SPDX-License-Identifier: Apache-2.0
"""A task is taken out of the group of another workload only while no other thread does that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from resctrlmond.resctrl.membership import Membership
from resctrlmond.workloads.verbs.create import create
from tests.workloads.conftest import Host


def test_task_stays_where_it_is_while_another_thread_has_the_turn(host: Host) -> None:
    """The thread must not wait: it has a transaction, for which the other one may wait."""
    create(host.ctx, "k", owner="test")
    where = Membership(host.get("k").first.ref.class_, "k")
    may_take = host.ctx.take_over.may_take_for("other")
    with ThreadPoolExecutor(1) as pool:
        with host.ctx.take_over.turn():
            assert not pool.submit(may_take, where).result(timeout=60)
        assert pool.submit(may_take, where).result(timeout=60)
    # Here too, because that thread has ended its turn.
    may_take = host.ctx.take_over.may_take_for("other")
    assert [may_take(Membership("", "gone")), may_take(where)] == [False, True]
