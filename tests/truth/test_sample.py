# SPDX-License-Identifier: Apache-2.0
"""Run a sample of ``make truth``, and test the rules by which it compares figures."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from tests.truth import cases
from tests.truth.compare import ENERGY, TRAFFIC, Figure, Tally, broken, figures, table
from tests.truth.peers import GoresctrlMonitor, InProcess, NriResctrlMon
from tests.truth.run import Part, run
from tests.truth.script import Owner, What, Workload, write
from tests.truth.world import Life, Reported, Task, Use


def played(part: Part) -> list[Tally]:
    """Run a part in a process of its own: it forks, which a process with threads should not do."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, (part,))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [Part(5, 100), Part(6, 25, by_daemon=True)], ids=["manager", "daemon"])
def test_no_use_is_lost_without_a_mark_or_counted_twice(part: Part) -> None:
    ours, *peers = played(part)
    assert ours.violations == []
    assert (ours.workloads, ours.wrong) == (part.workloads, 0)
    for event in (ENERGY, TRAFFIC):
        assert ours.lost[event, False] == 0
        assert sum(amount for (name, _), amount in ours.twice.items() if name == event) == 0
    # The sample includes kills, late workloads, and mostly the usual ones.
    assert ours.kills > 0
    assert ours.marks["late"] > 0
    assert part.by_daemon or ours.pools_exact > 5
    assert ours.exact > part.workloads / 2
    # The models were, too, by the same truth.
    for tally in peers:
        assert (tally.workloads, tally.used) == (part.workloads, ours.used)
        assert tally.wrong > 0
    assert "lost without a mark" in table([ours, *peers])


@pytest.mark.timeout(900)
def test_the_command_prints_the_table() -> None:
    command = [sys.executable, "-m", "tests.truth", "--seed", "3", "--workloads", "5", "--machines", "amd-tracking"]
    top = Path(__file__).parents[2]
    done = subprocess.run(command, check=False, cwd=top, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "5 " in next(line for line in done.stdout.splitlines() if line.startswith("workloads"))
    assert "0 promises broken" in done.stdout
    assert done.stdout.splitlines()[-1].split()[::4] == ["amd-tracking", "0"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("profile", ["intel-aet", "amd-abmc"])
def test_no_case_has_a_wrong_figure_that_is_exact(profile: str) -> None:
    """``make truth`` runs the cases on all machines, this test on a sample."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        report = pool.apply(cases.play, (profile,))
    assert report.wrong == []
    assert report.exact > 0
    assert report.marked > 20


def test_script_is_the_same_for_a_seed_and_has_all_kinds_of_events() -> None:
    script = write(1, 2000)
    assert script == write(1, 2000)
    assert script != write(2, 2000)
    happened = {event.what for events in script.seconds for event in events}
    assert happened == set(What)
    assert {one.owner for one in script.workloads} == set(Owner)
    assert script.domain_off
    again = [one.key for one in script.workloads if one.again]
    assert len(again) > 50


def life(figures: Use, mark: str, *, used: Use, counted: Use | None = None, state: str = "completed") -> Life:
    reported = Reported(figures.joules, figures.bytes, {ENERGY: mark, TRAFFIC: mark}, state)
    return Life(Workload(0, "k", Owner.POD), used=used, counted=counted or used, reported=reported)


FULL, HALF = Use(Decimal(2), 200), Use(Decimal(1), 100)


@pytest.mark.parametrize(
    ("one", "complaint"),
    [
        (life(FULL, "exact", used=FULL), ""),
        (life(HALF, "exact", used=FULL), "called exact and is not"),
        (life(FULL, "late", used=HALF), "more than was used"),
        (life(HALF, "late", used=FULL, counted=HALF), ""),
        (life(HALF, "late", used=FULL), "not what its tasks used in the group"),
        (life(FULL, "", used=FULL), "without a word"),
        (life(FULL, "estimated", used=FULL, counted=HALF, state="lost"), "more than was used in groups of its own"),
        (life(HALF, "estimated", used=FULL), ""),
    ],
)
def test_broken_promise_is_reported(one: Life, complaint: str) -> None:
    found = [why for figure in figures(one) for why in broken(one, figure)]
    assert bool(found) == bool(complaint)
    assert not found or any(complaint in why for why in found)
    tally = Tally("x")
    tally.add(one)
    assert len(tally.violations) == len(found)


def test_loss_of_more_than_the_use_since_the_checkpoint_is_reported() -> None:
    piece = Decimal("0.078125")
    one = life(Use(piece, 32 << 20), "estimated", used=Use(3 * piece, 96 << 20), state="lost")
    one.pieces_at_removal, one.pieces_risked = 3, 2
    assert [why for figure in figures(one) for why in broken(one, figure)] == []
    one.pieces_risked = 1
    (why,) = (why for figure in figures(one) for why in broken(one, figure))
    assert "than was used since the last checkpoint" in why
    assert [figure.lost for figure in figures(one)] == [2 * piece, 64 << 20]


def test_missing_figures_count_as_lost() -> None:
    assert Figure(ENERGY, None, Decimal(3), Decimal(3), Decimal(0), "unknown").lost == 3


def scraped(model: type[NriResctrlMon | GoresctrlMonitor], monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the model's report after each reading of a counter that reads 100, 150, 148 and 200."""
    machine = InProcess(8, 1)
    agent = model(machine, 1)
    one = Life(Workload(0, "0f8fad5b-d9cb-469f-a165-70867728950e", Owner.POD))
    one.tasks[0] = Task(machine.spawn())
    agent.adopt(one, late=False)
    readings: list[object] = []
    for number in (100, 150, 148, 200):
        monkeypatch.setattr(machine, "numbers", lambda group, number=number: [(("d", TRAFFIC), number)])
        agent.scrape()
        readings.append(agent.figures[one.of.key][TRAFFIC])
    return readings


def test_models_count_as_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accumulator of goresctrl goes 100, 150, 150, 202; a reader's increase() takes a fall for a reset."""
    assert scraped(GoresctrlMonitor, monkeypatch) == [100, 150, 150, 202]
    assert scraped(NriResctrlMon, monkeypatch) == [0, 50, 198, 250]
