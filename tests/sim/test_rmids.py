# SPDX-License-Identifier: Apache-2.0
"""RMIDs are allocated first in, first out, and stay in limbo as long as they hold cache lines."""

from __future__ import annotations

import errno

import pytest

from resctrlmond.sim.kernel.rmids import RmidPool


class Cache:
    """The occupancy of each (rmid, domain), which a test sets."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], int] = {}

    def __call__(self, rmid: int, domain: int, at: float) -> int:
        return self.held.get((rmid, domain), 0)


def failure(pool: RmidPool, now: float) -> int | None:
    with pytest.raises(OSError) as caught:
        pool.allocate(now)
    return caught.value.errno


def test_lowest_first_then_in_the_order_they_were_freed() -> None:
    pool = RmidPool(5, 1, 0, None)
    assert [pool.allocate(0) for _ in range(4)] == [1, 2, 3, 4]
    for rmid in (3, 1, 4):
        pool.free(rmid, 0)
    assert [pool.allocate(0) for _ in range(3)] == [3, 1, 4]


def test_rmid_0_is_never_assigned() -> None:
    pool = RmidPool(2, 1, 0, None)
    assert pool.allocate(0) == 1
    assert failure(pool, 0) == errno.ENOSPC


def test_without_occupancy_there_is_no_limbo() -> None:
    pool = RmidPool(2, 1, 0, None)
    pool.free(pool.allocate(0), 0)
    assert pool.allocate(0) == 1


def test_freed_rmids_come_back_at_the_tick_one_second_later() -> None:
    pool = RmidPool(2, 1, 100, Cache())
    pool.free(pool.allocate(0.0), 0.3)
    assert failure(pool, 1.29) == errno.EBUSY
    assert pool.allocate(1.3) == 1


def test_ticks_of_a_running_worker_are_not_put_off_by_later_frees() -> None:
    pool = RmidPool(3, 1, 100, Cache())
    first, second = pool.allocate(0), pool.allocate(0)
    pool.free(first, 0.0)
    pool.free(second, 0.9)
    assert [pool.allocate(1.0), pool.allocate(1.0)] == [first, second]


def test_occupancy_equal_to_the_threshold_stays_dirty() -> None:
    cache = Cache()
    pool = RmidPool(2, 1, 100, cache)
    rmid = pool.allocate(0)
    cache.held[rmid, 0] = 100
    pool.free(rmid, 0)
    assert failure(pool, 1.5) == errno.EBUSY
    cache.held[rmid, 0] = 99
    assert failure(pool, 1.9) == errno.EBUSY  # only the tick looks
    assert pool.allocate(2.0) == rmid


def test_an_rmid_must_be_clean_in_every_domain() -> None:
    cache = Cache()
    pool = RmidPool(2, 2, 100, cache)
    rmid = pool.allocate(0)
    cache.held[rmid, 1] = 5000
    pool.free(rmid, 0)
    assert failure(pool, 10.5) == errno.EBUSY
    cache.held[rmid, 1] = 0
    assert pool.allocate(11.0) == rmid


def test_threshold_zero_never_lets_anything_out() -> None:
    pool = RmidPool(2, 1, 0, Cache())
    pool.free(pool.allocate(0), 0)
    assert failure(pool, 500.0) == errno.EBUSY


def test_used_limbo_and_free_are_all_there_are() -> None:
    pool = RmidPool(8, 2, 100, Cache())
    taken = [pool.allocate(0) for _ in range(3)]
    pool.free(taken[0], 0)
    assert pool.counts(0.5) == (3, 1, 4)
    assert pool.counts(1.0) == (3, 0, 5)
