# SPDX-License-Identifier: Apache-2.0
"""A counter that has no number at some reading makes no total that is wrong and called exact."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from resctrlmond.resctrl.bandwidth import Mode, mode_of
from resctrlmond.resctrl.counters import EVENTS, Kind, Reading, Unavailable, parse_value
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.control.client import Fault
from resctrlmond.workloads.figures import checkpoint
from resctrlmond.workloads.figures.accounting import Total, totals
from resctrlmond.workloads.figures.caveats import by_event, changed, of_readings
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import total_of
from tests.workloads.conftest import Host, assignment, machine

Start = Callable[[], "subprocess.Popen[bytes]"]
TRAFFIC, ENERGY = "mbm_total_bytes", "core_energy"
SECOND = 1_000_000_000
INTEL, AMD, HYGON = (
    f"cpu:type:x86,ven{vendor}fam0019mod0001:feature:,0000,0001\n" for vendor in ("0000", "0002", "0009")
)
FEATURES = "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n"


def so_far(host: Host) -> Total:
    """The traffic of the workload "k" until now."""
    return total_of(read(host.ctx, "k")[2])


def at_end(host: Host) -> Total:
    """The traffic of the workload "k", which this ends."""
    return total_of(release(host.ctx, "k", owner="test").totals)


def read_in_turn(event: str, *texts: str) -> Total:
    """Return the total of one counter with these readings: baseline, checkpoints, end."""
    rows = [[Reading("d", event, parse_value(text), 7)] for text in texts]
    kept: checkpoint.Checkpoint = {}
    for row in rows[1:]:
        kept = checkpoint.with_readings(kept, "now", row, lambda: checkpoint.of_baseline(rows[0], {"d": 7}))
    (found,) = totals(rows[0], rows[-1], past=checkpoint.histories(kept))
    return found


def test_bandwidth_that_is_unavailable_at_begin_and_end_is_not_0_and_exact(tmp_path: Path, process: Start) -> None:
    """It was reported as 0 bytes, exact, though the checkpoint in between had read a gigabyte."""
    with machine(tmp_path, "amd-bmec") as (host, control):
        pid = control.spawn(tid=process().pid)
        ref = create(host.ctx, "k", owner="test").first.ref
        release(host.ctx, "k", owner="test")
        control.set_faults(Fault(group=ref.path, event=TRAFFIC, answer="Unavailable"))
        assign(host.ctx, assignment("k", pid))
        control.set_faults()
        control.run(pid, SECOND)
        host.manager.maintenance.tick()
        before = so_far(host)
        assert before.number
        control.set_faults(Fault(group=ref.path, event=TRAFFIC, answer="Unavailable"))
        after = at_end(host)
        assert (after.number, after.quality) == (before.number, Quality.ESTIMATED)
        assert "had no number at the end ('Unavailable')" in after.reason


def test_reset_between_two_numbers_is_not_exact_if_hardware_reallocates_counters(
    tmp_path: Path, process: Start
) -> None:
    """AMD without mbm_event: the RMID loses its counter to others, gets it back at 0, and always reads a number."""
    with machine(tmp_path, "amd-tracking") as (host, control):
        pid, *others = (control.spawn(tid=process().pid) for _ in range(6))
        assign(host.ctx, assignment("k", pid))
        control.run(pid, SECOND)
        host.manager.maintenance.tick()
        first = so_far(host)
        assert first.number
        for number, other in enumerate(others):
            assign(host.ctx, assignment(f"other-{number}", other))
            control.run(other, SECOND)
        control.run(pid, 3 * SECOND)
        ended = at_end(host)
        # Three of four seconds, and no reading shows it.
        assert ended.number == 3 * int(first.number)
        assert ended.quality is Quality.ESTIMATED
        assert "takes bandwidth counters from one RMID for another" in ended.reason
        # The same after a restart, and from the record alone.
        assert total_of(read(host.restart().context, "k")[2]) == ended


@pytest.mark.parametrize("profile", ["amd-bmec", "amd-tracking"])
def test_no_bandwidth_is_exact_if_hardware_may_reallocate_counters(
    tmp_path: Path, process: Start, profile: str
) -> None:
    with machine(tmp_path, profile) as (host, control):
        pid = control.spawn(tid=process().pid)
        assign(host.ctx, assignment("k", pid))
        control.run(pid, SECOND)
        assert so_far(host).quality is Quality.ESTIMATED
        assert {one.quality for one in release(host.ctx, "k", owner="test").totals} == {Quality.ESTIMATED}


@pytest.mark.parametrize("profile", ["intel-rdt", "intel-snc2", "intel-aet", "amd-abmc", "monitoring-only"])
def test_bandwidth_is_exact_if_each_group_has_its_own_counters(tmp_path: Path, process: Start, profile: str) -> None:
    with machine(tmp_path, profile) as (host, control):
        pid = control.spawn(tid=process().pid)
        assign(host.ctx, assignment("k", pid))
        control.run(pid, SECOND)
        host.manager.maintenance.tick()
        found = release(host.ctx, "k", owner="test").totals
        assert {(one.quality, one.reason) for one in found if one.event.name.startswith("mbm")} == {
            (Quality.EXACT, "")
        }


def test_the_mode_that_is_left_during_a_run_makes_its_bandwidth_estimated(tmp_path: Path, process: Start) -> None:
    with machine(tmp_path, "amd-abmc") as (host, control):
        pid = control.spawn(tid=process().pid)
        assign(host.ctx, assignment("k", pid))
        assert so_far(host).quality is Quality.EXACT
        mode = Path(host.mountpoint, "info", "L3_MON", "mbm_assign_mode")
        mode.write_text("default\n")
        control.run(pid, SECOND)
        assert so_far(host).quality is Quality.ESTIMATED
        host.manager.maintenance.tick()
        mode.write_text("mbm_event\n")
        ended = at_end(host)
        assert ended.quality is Quality.ESTIMATED
        assert "mbm_event prevents this" in ended.reason


@pytest.mark.parametrize(
    ("assign_mode", "features", "modalias", "mode"),
    [
        ("[mbm_event]\ndefault\n", FEATURES, AMD, Mode.ASSIGNED),
        ("[default]\nmbm_event\n", FEATURES, "", Mode.REALLOCATED),
        ("[default]\n", FEATURES, AMD, Mode.REALLOCATED),
        ("[default]\n", FEATURES, INTEL, Mode.DEDICATED),
        ("", FEATURES, AMD, Mode.REALLOCATED),
        ("", FEATURES, INTEL, Mode.DEDICATED),
        ("", FEATURES + "mbm_total_bytes_config\n", "", Mode.REALLOCATED),
        ("", FEATURES, HYGON, Mode.REALLOCATED),
        ("[something_new]\n", FEATURES, INTEL, Mode.REALLOCATED),
        # The MPAM driver of arm64 shows bandwidth only where each group has a monitor.
        ("[default]\n", FEATURES, "cpu:type:aarch64:feature:,0001\n", Mode.DEDICATED),
        # An unknown processor may be from AMD.
        ("", FEATURES, "", Mode.REALLOCATED),
    ],
)
def test_files_show_how_groups_get_counters(assign_mode: str, features: str, modalias: str, mode: Mode) -> None:
    assert mode_of(assign_mode, features, modalias) is mode


def test_only_events_with_reallocated_counters_have_a_caveat() -> None:
    readings = [Reading("d", name, parse_value("0")) for name in EVENTS]
    found = [caveat.events for caveat in of_readings(readings, Mode.REALLOCATED, "")]
    assert sorted(found) == [("mbm_local_bytes",), (TRAFFIC,)]
    assert not [*of_readings(readings, Mode.DEDICATED, ""), *of_readings(readings, Mode.ASSIGNED, "")]


def test_event_of_two_resources_is_not_added_up() -> None:
    """The sum of both counted the same use twice, and was exact."""
    begin, end = (
        [Reading(domain, TRAFFIC, parse_value(text)) for domain, text in values.items()]
        for values in ({"mon_L3_00": "1", "mon_MB_00": "2"}, {"mon_L3_00": "4", "mon_MB_00": "9"})
    )
    caveats = by_event(of_readings(end, Mode.ASSIGNED, ""))
    assert "the domains of mon_MB count it too" in caveats[TRAFFIC]
    (found,) = totals(begin, end, caveats=caveats)
    assert (found.number, found.quality, list(found.domains)) == (3, Quality.ESTIMATED, ["mon_L3_00"])
    assert not list(of_readings(end[1:], Mode.ASSIGNED, ""))
    (found,) = totals(begin[1:], end[1:])
    assert (found.number, found.quality) == (7, Quality.EXACT)


def test_all_caveats_of_an_event_are_stated() -> None:
    readings = [Reading("d", name, parse_value("0")) for name in EVENTS]
    found = by_event(of_readings(readings, Mode.REALLOCATED, "", "global_assign_ctrl_assign_mon"))
    assert set(found) == {name for name, event in EVENTS.items() if event.kind is Kind.CUMULATIVE}
    why = "the kernel may have counted its work for the tasks in another group"
    assert all(f"{why}: info/kernel_mode is global_assign_ctrl_assign_mon" in text for text in found.values())
    assert found[TRAFFIC].startswith("this processor takes bandwidth counters from one RMID for another")


def test_unavailable_means_no_use_only_for_registers_of_packages() -> None:
    for name, event in EVENTS.items():
        is_register = event.kind is Kind.CUMULATIVE and not name.startswith("mbm_")
        assert (event.unavailable is Unavailable.NEVER_ACTIVE) == is_register, name


def test_event_was_active_if_another_event_of_its_package_has_a_number() -> None:
    """The registers of a package become valid together, when the RMID is active there for the first time."""
    begin = [Reading("d", name, parse_value("Unavailable")) for name in ("activity", ENERGY)]
    end = [Reading("d", "activity", parse_value("1.500000")), begin[1]]
    assert (total_of(totals(begin, begin), ENERGY).number, total_of(totals(begin, begin), ENERGY).quality) == (
        0,
        Quality.EXACT,
    )
    assert (total_of(totals(begin, end), ENERGY).number, total_of(totals(begin, end), ENERGY).quality) == (
        None,
        Quality.UNKNOWN,
    )


@pytest.mark.parametrize("word", ["Unavailable", "Error", "Unassigned"])
def test_event_without_a_number_only_at_the_baseline_excludes_the_past_of_its_rmid(
    tmp_path: Path, process: Start, word: str
) -> None:
    """All that the RMID had ever used on the package was reported as estimated energy of this workload."""
    with machine(tmp_path, "intel-aet", residue=7) as (host, control):
        pid = control.spawn(tid=process().pid)
        control.set_faults(Fault(group=GroupRef("", "k").path, event=ENERGY, answer=word))
        assign(host.ctx, assignment("k", pid))
        control.set_faults()
        control.run(pid, SECOND)
        ended = total_of(release(host.ctx, "k", owner="test").totals, ENERGY)
        assert (ended.number, ended.quality) == (None, Quality.UNKNOWN)
        assert f"had no number at the beginning: {word!r}" in ended.reason


def test_energy_of_an_rmid_without_a_past_counts_from_its_first_activity(tmp_path: Path, process: Start) -> None:
    """After a boot no register of any package has a number yet."""
    with machine(tmp_path, "intel-aet") as (host, control):
        pid = control.spawn(tid=process().pid)
        record = assign(host.ctx, assignment("k", pid)).workload
        assert {text for name, text in host.files("k").items() if "core_energy.begin" in name} == {"Unavailable\n"}
        control.run(pid, SECOND)
        ended = total_of(release(host.ctx, "k", owner="test").totals, ENERGY)
        assert ended.number
        assert baseline_of(record) is Quality.EXACT


@pytest.mark.parametrize(
    ("profile", "path", "new"),
    [
        ("amd-abmc", "event_configs/mbm_total_bytes/event_filter", "local_reads\n"),
        ("amd-bmec", "mbm_total_bytes_config", "1=0x15\n"),
    ],
)
def test_event_that_is_reconfigured_during_a_run_is_estimated(
    tmp_path: Path, process: Start, profile: str, path: str, new: str
) -> None:
    """The total was the difference of two counts of different things, and exact."""
    with machine(tmp_path, profile) as (host, control):
        pid = control.spawn(tid=process().pid)
        assign(host.ctx, assignment("k", pid))
        control.run(pid, SECOND)
        why = f"which memory transactions it counts was changed during the run (info/L3_MON/{path})"
        assert why not in so_far(host).reason
        Path(host.mountpoint, "info", "L3_MON", path).write_text(new)
        control.run(pid, SECOND)
        read = so_far(host)
        assert read.quality is Quality.ESTIMATED
        assert read.reason.count(why) == 1
        host.restart()
        totals = release(host.ctx, "k", owner="test").totals
        assert total_of(totals).quality is Quality.ESTIMATED
        assert total_of(totals).reason.count(why) == 1
        assert why not in total_of(totals, "mbm_local_bytes").reason
        host.check()


def test_an_event_that_counts_the_same_as_at_the_baseline_is_exact(tmp_path: Path, process: Start) -> None:
    """The event may have been reconfigured before the run, and an L3 may go offline and online."""
    with machine(tmp_path, "amd-abmc") as (host, control):
        pid = control.spawn(tid=process().pid)
        filters = Path(host.mountpoint, "info", "L3_MON", "event_configs", TRAFFIC, "event_filter")
        filters.write_text("local_reads\n")
        assign(host.ctx, assignment("k", pid))
        control.run(pid, SECOND)
        assert {one.quality for one in release(host.ctx, "k", owner="test").totals} == {Quality.EXACT}
    both, one = "0=0x7f;1=0x7f", "0=0x7f"
    for before, now in ((both, one), (one, both)):
        file = "L3_MON/mbm_total_bytes_config"
        assert not list(changed({file: before}, {file: now}))


@pytest.mark.parametrize(
    ("event", "texts", "number", "quality"),
    [
        # The registers of a package on which nothing of the workload ever ran.
        (ENERGY, ["Unavailable", "Unavailable"], 0, Quality.EXACT),
        (ENERGY, ["Unavailable", "Unavailable", "Unavailable"], 0, Quality.EXACT),
        (ENERGY, ["Unavailable", "2.500000", "Unavailable"], Decimal("2.5"), Quality.ESTIMATED),
        (ENERGY, ["Unavailable", "Error", "Unavailable"], None, Quality.UNKNOWN),
        (ENERGY, ["Unavailable", "Unassigned"], None, Quality.UNKNOWN),
        (ENERGY, ["5.000000", "Unavailable"], None, Quality.UNKNOWN),
        (ENERGY, ["5.000000", "7.500000", "Unavailable"], Decimal("2.5"), Quality.ESTIMATED),
        (ENERGY, ["5.000000", "Unavailable", "7.500000"], Decimal("2.5"), Quality.ESTIMATED),
        (ENERGY, ["5.000000", "Error", "7.500000"], Decimal("2.5"), Quality.ESTIMATED),
        (ENERGY, ["Unassigned", "5.000000", "7.500000"], None, Quality.UNKNOWN),
        # Bandwidth: no word is 0.
        (TRAFFIC, ["Unavailable", "Unavailable"], None, Quality.UNKNOWN),
        (TRAFFIC, ["0", "Unavailable"], None, Quality.UNKNOWN),
        (TRAFFIC, ["0", "Error"], None, Quality.UNKNOWN),
        (TRAFFIC, ["0", "70", "Error"], 70, Quality.ESTIMATED),
        (TRAFFIC, ["0", "70", "Unavailable", "Unavailable"], 70, Quality.ESTIMATED),
        # Without a baseline, the later value includes the past of the RMID.
        (TRAFFIC, ["Unavailable", "70", "Unavailable"], None, Quality.UNKNOWN),
        (TRAFFIC, ["Unavailable", "70"], None, Quality.UNKNOWN),
        (TRAFFIC, ["Unavailable", "70", "90"], None, Quality.UNKNOWN),
        (TRAFFIC, ["0", "Unavailable", "70"], 70, Quality.ESTIMATED),
        (TRAFFIC, ["0", "50", "Unavailable", "70"], 70, Quality.ESTIMATED),
        (TRAFFIC, ["0", "50", "Error", "70", "80"], 80, Quality.ESTIMATED),
        (TRAFFIC, ["Unassigned", "Unassigned"], None, Quality.UNKNOWN),
        (TRAFFIC, ["Unassigned", "70"], 70, Quality.ESTIMATED),
        (TRAFFIC, ["0", "50", "Unassigned", "30"], 80, Quality.ESTIMATED),
        (TRAFFIC, ["Error", "70"], None, Quality.UNKNOWN),
        (TRAFFIC, ["0", "50", "70"], 70, Quality.EXACT),
    ],
)
def test_quality_of_successive_readings(
    event: str, texts: list[str], number: Decimal | None, quality: Quality
) -> None:
    found = read_in_turn(event, *texts)
    assert (found.number, found.quality) == (number, quality)
    assert bool(found.reason) == (quality is not Quality.EXACT)
