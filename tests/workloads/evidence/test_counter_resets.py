# SPDX-License-Identifier: Apache-2.0
"""Another program resets bandwidth counters between two readings, and they count more afterwards than before."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from resctrlmond.resctrl import witness
from resctrlmond.resctrl.class_counters import ClassCounters
from resctrlmond.resctrl.errors import NotMounted
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.kernel.witness import MOVES
from resctrlmond.workloads.evidence import interference
from resctrlmond.workloads.figures.caveats import by_event
from resctrlmond.workloads.machine.pools import Pool
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import total_of
from tests.workloads.conftest import Host, assignment, machine
from tests.workloads.evidence.test_interference import react, write
from tests.workloads.known_reasons import check_reasons

Start = Callable[[], "subprocess.Popen[bytes]"]
Reset = Callable[[Host], None]
TRAFFIC, LOCAL = "mbm_total_bytes", "mbm_local_bytes"
SECOND = 1_000_000_000
GROUP = "mon_groups/k/mbm_L3_assignments"
MODE = "info/L3_MON/mbm_assign_mode"
FILTER = f"info/L3_MON/event_configs/{TRAFFIC}/event_filter"
ROOT = "mbm_L3_assignments"


@pytest.fixture
def abmc(tmp_path: Path) -> Iterator[tuple[Host, Control]]:
    with machine(tmp_path, "amd-abmc") as made:
        yield made


@pytest.fixture
def busy(abmc: tuple[Host, Control], process: Start) -> tuple[Host, Callable[[int], None]]:
    """Return a host with the workload k, and a function that lets its task run for so many nanoseconds."""
    host, control = abmc
    child = process()
    control.spawn(tid=child.pid)
    assign(host.ctx, assignment("k", child.pid))
    return host, lambda ns: control.run(child.pid, ns)


def reassign(host: Host) -> None:
    for state in "_e":
        write(host, GROUP, f"{TRAFFIC}:*={state}")


def change_and_restore_filter(host: Host) -> None:
    before = Path(host.mountpoint, FILTER).read_text()
    write(host, FILTER, "local_reads")
    write(host, FILTER, before.removesuffix("\n"))


def change_and_restore_mode(host: Host) -> None:
    for mode in ("default", "mbm_event"):
        write(host, MODE, mode)
    write(host, GROUP, f"{TRAFFIC}:*=e\n{LOCAL}:*=e")


@pytest.mark.parametrize(
    ("reset", "file", "events"),
    [
        (reassign, GROUP, {TRAFFIC, LOCAL}),
        (change_and_restore_filter, FILTER, {TRAFFIC}),
        (change_and_restore_mode, MODE, {TRAFFIC, LOCAL}),
    ],
)
@pytest.mark.parametrize("is_seen_at_end", [False, True])
def test_counters_that_were_reset_are_not_exact(
    busy: tuple[Host, Callable[[int], None]], reset: Reset, file: str, events: set[str], is_seen_at_end: bool
) -> None:
    """The use before the reset was missing, and the total was exact."""
    host, run = busy
    run(SECOND)
    host.manager.tick()
    reset(host)
    run(3 * SECOND)
    if not is_seen_at_end:
        react(host)
        totals = read(host.ctx, "k")[2]
        assert total_of(totals).quality is Quality.ESTIMATED
        host.manager.tick()
        assert total_of(read(host.restart().context, "k")[2]).quality is Quality.ESTIMATED
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.event.name for total in totals if total.quality is not Quality.EXACT} == events
    traffic = total_of(totals)
    assert traffic.quality is Quality.ESTIMATED
    assert (
        f"another program wrote to {'/'.join(file.split('/')[-2:])}, which may have reset the counter"
        in traffic.reason
    )
    check_reasons(traffic)


def test_counters_of_a_group_that_begins_after_the_reset_are_exact(
    abmc: tuple[Host, Control], process: Start
) -> None:
    host, control = abmc
    change_and_restore_filter(host)
    child = process()
    control.spawn(tid=child.pid)
    assign(host.ctx, assignment("k", child.pid))
    control.run(child.pid, SECOND)
    react(host)
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.EXACT}


def test_counters_that_the_daemon_or_an_earlier_one_assigns_are_not_reset(
    tmp_path: Path, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are counters for one group, and the second one gets them when the first ends."""
    with machine(tmp_path, "amd-abmc", counters=4) as (host, control):
        create(host.ctx, "first", owner="test")
        child = process()
        control.spawn(tid=child.pid)
        assign(host.ctx, assignment("k", child.pid))
        assert host.get("k").first.unassigned
        release(host.ctx, "first", owner="test")
        assert not host.get("k").first.unassigned
        for _ in range(2):
            react(host)
            assert "another program" not in "".join(by_event(host.get("k").first.doubts).values())
            # The next daemon is another process.
            monkeypatch.setattr(os, "getpid", lambda: 4_000_000)
            host.restart()


def test_refused_write_of_the_daemon_hides_none_of_another_program(tmp_path: Path) -> None:
    with machine(tmp_path, "amd-abmc", counters=4) as (host, _):
        create(host.ctx, "first", owner="test")
        create(host.ctx, "k", owner="test")
        react(host)
        assert not host.tree.assign_counter(host.get("k").first.ref, TRAFFIC, "mon_L3_00")
        assert "another program" not in "".join(by_event(host.get("k").first.doubts).values())
        write(host, GROUP, f"{TRAFFIC}:*=_")
        react(host)
        assert "another program wrote to k/mbm_L3_assignments" in by_event(host.get("k").first.doubts)[TRAFFIC]


def test_use_of_the_machine_is_not_exact_after_a_reset(abmc: tuple[Host, Control]) -> None:
    host, _ = abmc
    host.manager.tick()

    def qualities() -> set[Quality]:
        return {use.quality for use in host.ctx.machine.read().pools if use.event.name == TRAFFIC}

    assert qualities() == {Quality.EXACT}
    reset_bandwidth(host)
    assert qualities() == {Quality.ESTIMATED}


def traffic_of_machine(host: Host) -> set[Quality]:
    return {use.quality for use in host.ctx.machine.read().pools if use.event.name == TRAFFIC}


def test_reset_during_a_reading_of_the_machine_is_known_to_it(
    abmc: tuple[Host, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event was read by the next call only, so the number that lacks the use before the reset was exact."""
    host, _ = abmc
    host.manager.tick()
    machine = host.ctx.machine
    read = machine._read_whole

    def reset_and_read() -> tuple[dict[str, ClassCounters], bool]:
        reset_bandwidth(host)
        return read()

    monkeypatch.setattr(machine, "_read_whole", reset_and_read)
    assert traffic_of_machine(host) == {Quality.ESTIMATED}


def test_reset_while_the_pools_begin_is_not_forgotten(
    abmc: tuple[Host, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = abmc
    machine = host.ctx.machine
    read = machine._read_whole

    def read_and_reset() -> tuple[dict[str, ClassCounters], bool]:
        found = read()
        reset_bandwidth(host)
        host.ctx.interference.read_events()  # as the thread that waits for them does
        return found

    monkeypatch.setattr(machine, "_read_whole", read_and_reset)
    host.manager.tick()
    monkeypatch.setattr(machine, "_read_whole", read)
    assert traffic_of_machine(host) == {Quality.ESTIMATED}


@pytest.mark.parametrize(("profile", "quality"), [("amd-abmc", Quality.ESTIMATED), ("intel-aet", Quality.EXACT)])
def test_resets_that_were_not_reported_make_no_workload_exact(tmp_path: Path, profile: str, quality: Quality) -> None:
    with machine(tmp_path, profile) as (host, _):
        host.manager.tick()
        host.ctx.machine.events_lost()
        found = host.ctx.machine.read().pools
        assert {use.quality for use in found if use.event.name == TRAFFIC and use.pool is Pool.TRACKED} == {quality}


def reset_bandwidth(host: Host) -> None:
    for state in "_e":
        write(host, ROOT, f"{TRAFFIC}:*={state}")


def test_reading_of_the_machine_does_not_wait_for_ever_for_a_thread_that_hangs(
    abmc: tuple[Host, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = abmc
    host.manager.tick()
    assert traffic_of_machine(host) == {Quality.EXACT}
    monkeypatch.setattr(interference, "_EVENTS_WAIT_S", 0.01)
    with host.ctx.interference._events_lock:
        found = host.ctx.machine.read().pools
    assert {use.reason for use in found if use.event.name == TRAFFIC} == {
        "the last changes of other programs were not processed"
    }
    assert traffic_of_machine(host) == {Quality.EXACT}


def test_resets_are_kept_if_beginning_anew_fails(abmc: tuple[Host, Control], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file system was mounted over resctrl for a moment."""
    host, _ = abmc
    host.manager.tick()
    machine = host.ctx.machine
    assert traffic_of_machine(host) == {Quality.EXACT}
    reset_bandwidth(host)
    assert traffic_of_machine(host) == {Quality.ESTIMATED}

    def fail() -> NoReturn:
        raise NotMounted("another file system")

    with monkeypatch.context() as patch:
        patch.setattr(machine, "_is_remounted", lambda: True)
        patch.setattr(machine, "_read_whole", fail)
        with pytest.raises(NotMounted):
            machine.read()
    assert traffic_of_machine(host) == {Quality.ESTIMATED}


def test_machine_that_nobody_reads_for_a_time_stays_exact(
    abmc: tuple[Host, Control], process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that were looked at and forgotten meanwhile were taken for a gap."""
    monkeypatch.setattr(witness, "_KEPT", 2 / MOVES)
    host, control = abmc
    host.manager.tick()
    assert traffic_of_machine(host) == {Quality.EXACT}
    create(host.ctx, "k", owner="test")
    task = control.spawn(tid=process().pid)
    for path in (host.get("k").first.ref.path, "") * 4:
        host.tree.write_task(path, task)
        host.manager.tick()
    assert traffic_of_machine(host) == {Quality.EXACT}


def test_reset_before_the_pools_begin_is_not_of_them(abmc: tuple[Host, Control]) -> None:
    host, _ = abmc
    reset_bandwidth(host)
    host.ctx.machine.tick(has_trouble=False)
    assert traffic_of_machine(host) == {Quality.EXACT}


def test_changes_while_the_pools_begin_are_not_forgotten(
    abmc: tuple[Host, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = abmc
    machine = host.ctx.machine
    read = machine._read_whole

    def read_and_change() -> tuple[dict[str, ClassCounters], bool]:
        found = read()
        (Path(host.mountpoint) / host.make_foreign("brief").path).rmdir()
        host.ctx.interference.read_events()
        machine.events_lost()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(machine, "_read_whole", read_and_change)
        machine.tick(has_trouble=False)
    why = {use.pool: use.reason for use in machine.read().pools if use.event.name == TRAFFIC}
    assert "changes of other programs were not reported" in why[Pool.UNTRACKED]
    assert "changes of other programs were not reported" in why[Pool.FOREIGN]
    assert "mon_groups/brief was created and removed between two readings" in why[Pool.FOREIGN]
