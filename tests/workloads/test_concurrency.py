# SPDX-License-Identifier: Apache-2.0
"""Many callers at once, on the same keys and on different ones, with a ticking upkeep between them."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Callable

from resctrlmond.resctrl.errors import ClassMismatch, NoSuchGroup, ResctrlError
from resctrlmond.workloads.model.errors import NoSuchClaim
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import reconcile, release
from tests.workloads.conftest import Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]
KEYS = ("a", "b", "c")


def run_all(*work: Callable[[], object]) -> list[BaseException]:
    """Run each call in a thread. Return the raised errors."""
    raised: list[BaseException] = []

    def guarded(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:  # reported by the test
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()
    return raised


def test_eight_callers_of_three_keys(host: Host, process: Start) -> None:
    host.make_class("gold")
    children = [process() for _ in range(8)]
    over = threading.Event()
    unexpected: list[Exception] = []

    def caller(number: int) -> None:
        dice = random.Random(number)
        pid, owner = children[number].pid, f"o{number}"
        verbs: list[Callable[[str], object]] = [
            lambda key: assign(host.ctx, assignment(key, pid, owner, take_over=True)),
            lambda key: create(host.ctx, key, owner=owner),
            lambda key: release(host.ctx, key, owner=owner),
            lambda key: move(host.ctx, key, dice.choice(["", "gold"])),
            lambda key: read(host.ctx, key),
            lambda key: reconcile(host.ctx, owner, ["a"]),
        ]
        for _ in range(25):
            try:
                dice.choice(verbs)(dice.choice(KEYS))
            except (NoSuchGroup, ClassMismatch, NoSuchClaim):
                pass
            except ResctrlError as error:
                unexpected.append(error)

    def ticks() -> None:
        while not over.wait(0.01):
            host.manager.maintenance.tick()

    ticking = threading.Thread(target=ticks)
    ticking.start()
    raised = run_all(*(lambda number=number: caller(number) for number in range(8)))
    over.set()
    ticking.join(60)
    assert raised == []
    assert [str(error) for error in unexpected] == []
    host.check()
    assert all(record.state is not State.LOST for record in host.ctx.store.all())
    for record in host.ctx.store.all():
        for claim in record.claims:
            release(host.ctx, record.key, owner=claim.owner)
    assert host.marked_groups() == []
    host.check()
    host.restart()
    host.check()


def test_the_same_call_eight_times_at_once(host: Host, process: Start) -> None:
    child = process()
    raised = run_all(*[lambda: assign(host.ctx, assignment("k", child.pid)) for _ in range(8)])
    # A call that began before the process was moved may find it in the group of this workload.
    assert raised == []
    record = host.get("k")
    assert (record.generation, len(record.members), len(record.claims)) == (1, 1, 1)
    host.check()


def test_a_reader_sees_a_run_or_its_end_and_never_an_error(host: Host) -> None:
    over = threading.Event()
    seen: set[State] = set()

    def writer() -> None:
        try:
            for _ in range(15):
                create(host.ctx, "k", owner="a")
                release(host.ctx, "k", owner="a")
        finally:
            over.set()

    def reader() -> None:
        was_over = False
        while not was_over:
            # The last reading is of the last end, also if this thread got no CPU time before.
            was_over = over.is_set()
            record, readings, totals = read(host.ctx, "k")
            seen.add(record.state)
            assert bool(readings) <= (record.state in (State.IDLE, State.ENDING))
            if record.state in (State.IDLE, State.COMPLETED):
                assert {total.number is None for total in totals} == {False}

    create(host.ctx, "k", owner="a")
    assert run_all(writer, reader, reader) == []
    assert State.COMPLETED in seen
    host.check()
