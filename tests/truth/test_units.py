# SPDX-License-Identifier: Apache-2.0
"""Run a sample of ``make units-budget``."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.truth.units import Outcome, Plan, play


def played(plan: Plan) -> Outcome:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(play, (plan,))


@pytest.mark.timeout(300)
def test_units_without_rmids_are_counted_once_in_shared_groups() -> None:
    found = played(Plan(units=30, rmids=8, seconds=20, reserve=1, shared=2))
    assert found.wrong == []
    assert found.runs > 50
    assert found.taken > 0
    assert found.containers == 20
    assert found.most_groups < 8
    assert found.shared_pieces > found.pieces / 2
    assert found.pools_exact > 2


@pytest.mark.timeout(300)
def test_services_are_exact_if_each_command_has_called_and_late_if_one_was_missed() -> None:
    found = played(Plan(units=40, rmids=50, seconds=20, reserve=1, shared=2, seed=7))
    assert found.wrong == []
    assert found.exact_services > 3
    assert found.late_services > 1
    assert found.missed_pieces > 0
