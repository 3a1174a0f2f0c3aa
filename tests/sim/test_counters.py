# SPDX-License-Identifier: Apache-2.0
"""Counter values: the model's arithmetic, the kernel's print formats, and resets."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.sim.kernel.counters import decimals, format_fixed
from tests.sim.virtual import VirtualResctrl

GIB = 1 << 30
SCALE = 64 << 10
L3 = "mon_data/mon_L3_00/"
PACKAGE = "mon_data/mon_PERF_PKG_00/"


@pytest.mark.parametrize(
    ("bits", "digits"),
    [
        *((bits, 1) for bits in (1, 2, 3)),
        *((bits, 2) for bits in (4, 5, 6)),
        *((bits, 3) for bits in (7, 8, 9)),
        *((bits, 4) for bits in (10, 13)),
        *((bits, 5) for bits in (14, 16)),
        *((bits, 6) for bits in (17, 18, 19)),
        *((bits, 7) for bits in (20, 23)),
        *((bits, 8) for bits in (24, 26)),
        (27, 9),
    ],
)
def test_decimals_by_number_of_fraction_bits(bits: int, digits: int) -> None:
    assert decimals(bits) == digits


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (0, "0.000000"),
        (1, "0.000004"),  # 3.8 microjoules, the resolution of core_energy
        (1 << 17, "0.500000"),
        ((1 << 18) - 1, "0.999996"),
        ((12 << 18) + (1 << 16), "12.250000"),
    ],
)
def test_fixed_point_has_six_decimals(raw: int, text: str) -> None:
    assert format_fixed(raw) == text


def test_no_fraction_bits_print_a_zero_decimal() -> None:
    assert format_fixed(7, 0) == "7.0"


@given(st.integers(0, 2**63), st.integers(1, 27))
def test_printed_decimals_are_within_half_of_the_last_digit(raw: int, bits: int) -> None:
    printed = Decimal(format_fixed(raw, bits))
    exact = Decimal(raw) / (1 << bits)
    assert abs(printed - exact) <= Decimal(1).scaleb(-decimals(bits)) / 2 + Decimal("1e-12")


def busy_resctrl(profile: str = "intel-aet") -> tuple[VirtualResctrl, int]:
    resctrl = VirtualResctrl(profile)
    resctrl.mkdir("mon_groups/a")
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    return resctrl, tid


def test_two_cpu_seconds_are_five_joules_three_farads_and_two_gib() -> None:
    resctrl, tid = busy_resctrl()
    resctrl.run(tid, 2.0)
    assert resctrl.read("mon_groups/a/" + PACKAGE + "core_energy") == "5.000000\n"
    assert resctrl.read("mon_groups/a/" + PACKAGE + "activity") == "3.000000\n"
    assert resctrl.read("mon_groups/a/" + L3 + "mbm_total_bytes") == f"{2 * GIB}\n"
    assert resctrl.read("mon_groups/a/" + L3 + "mbm_local_bytes") == f"{3 * GIB // 2}\n"


def test_cpu_time_before_joining_is_not_the_groups() -> None:
    resctrl = VirtualResctrl("intel-aet")
    resctrl.mkdir("mon_groups/a")
    tid = resctrl.tasks.fork()
    resctrl.run(tid, 100.0)
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.run(tid, 1.0)
    assert resctrl.read("mon_groups/a/" + PACKAGE + "core_energy") == "2.500000\n"


def test_energy_of_a_task_that_left_or_died_stays_with_the_group() -> None:
    resctrl, tid = busy_resctrl()
    resctrl.run(tid, 1.0)
    resctrl.write("tasks", str(tid))
    resctrl.run(tid, 50.0)
    other = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(other))
    resctrl.run(other, 1.0)
    resctrl.poll()
    resctrl.tasks.exit(other)
    assert resctrl.read("mon_groups/a/" + PACKAGE + "core_energy") == "5.000000\n"


def test_telemetry_is_unavailable_until_the_rmid_was_active_on_that_package() -> None:
    resctrl, tid = busy_resctrl()
    assert resctrl.read("mon_groups/a/" + PACKAGE + "core_energy") == "Unavailable\n"
    resctrl.run(tid, 1.0, cpu=1)  # of two CPUs and two packages, the second
    assert resctrl.read("mon_groups/a/" + PACKAGE + "core_energy") == "Unavailable\n"
    assert resctrl.read("mon_groups/a/mon_data/mon_PERF_PKG_01/core_energy") == "2.500000\n"


def test_new_group_begins_with_the_telemetry_but_not_the_traffic_of_its_rmids_last_owner() -> None:
    resctrl = VirtualResctrl("intel-aet", rmids=2)
    for expected in ("2.500000\n", "5.000000\n"):
        resctrl.mkdir("mon_groups/a")
        tid = resctrl.tasks.fork()
        resctrl.write("mon_groups/a/tasks", str(tid))
        resctrl.run(tid, 1.0)
        assert resctrl.read("mon_groups/a/" + PACKAGE + "core_energy") == expected
        assert resctrl.read("mon_groups/a/" + L3 + "mbm_total_bytes") == f"{GIB}\n"
        resctrl.rmdir("mon_groups/a")
        resctrl.now += 5
    resctrl.mkdir("mon_groups/a")
    assert resctrl.read("mon_groups/a/" + PACKAGE + "core_energy") == "5.000000\n"
    assert resctrl.read("mon_groups/a/" + L3 + "mbm_total_bytes") == "0\n"


def test_residue_is_the_same_for_the_same_seed() -> None:
    def first(seed: int) -> str:
        resctrl = VirtualResctrl("intel-aet", residue=seed)
        resctrl.mkdir("mon_groups/a")
        assert resctrl.read("mon_groups/a/" + L3 + "mbm_total_bytes") == "0\n"
        return resctrl.read("mon_groups/a/" + PACKAGE + "core_energy")

    assert first(1) == first(1) != first(2)
    assert Decimal(first(1)) > 0


def test_a_control_groups_value_is_its_own_plus_its_children_and_drops_with_them() -> None:
    resctrl = VirtualResctrl("intel-aet")
    for path in ("c", "c/mon_groups/a", "c/mon_groups/b"):
        resctrl.mkdir(path)
    for path in ("c", "c/mon_groups/a", "c/mon_groups/b"):
        tid = resctrl.tasks.fork()
        resctrl.write("c/tasks", str(tid))
        resctrl.write(path + "/tasks", str(tid))
        resctrl.run(tid, 1.0)
    assert resctrl.read("c/" + PACKAGE + "core_energy") == "7.500000\n"
    resctrl.rmdir("c/mon_groups/a")
    assert resctrl.read("c/" + PACKAGE + "core_energy") == "5.000000\n"


def test_a_control_group_with_one_available_child_is_a_number() -> None:
    resctrl = VirtualResctrl("intel-aet")
    resctrl.mkdir("c")
    resctrl.mkdir("c/mon_groups/a")
    assert resctrl.read("c/" + PACKAGE + "core_energy") == "Unavailable\n"
    tid = resctrl.tasks.fork()
    resctrl.write("c/tasks", str(tid))
    resctrl.write("c/mon_groups/a/tasks", str(tid))
    resctrl.run(tid, 1.0)
    assert resctrl.read("c/" + PACKAGE + "core_energy") == "2.500000\n"


def test_sums_are_rounded_after_the_addition() -> None:
    resctrl = VirtualResctrl("intel-aet")
    resctrl.mkdir("c")
    resctrl.mkdir("c/mon_groups/a")
    for path in ("c", "c/mon_groups/a"):
        tid = resctrl.tasks.fork()
        resctrl.write("c/tasks", str(tid))
        resctrl.write(path + "/tasks", str(tid))
        resctrl.run(tid, 1e-9 * 1_526)  # one raw unit of 2^-18 J
    assert resctrl.read("c/mon_groups/a/" + PACKAGE + "core_energy") == "0.000004\n"
    assert resctrl.read("c/" + PACKAGE + "core_energy") == "0.000008\n"


def test_root_counts_the_cpu_time_of_the_host_outside_all_groups() -> None:
    resctrl, tid = busy_resctrl()
    resctrl.run(tid, 3.0)
    resctrl.run(1, 1.0)
    assert resctrl.read(PACKAGE + "core_energy") == "10.000000\n"
    resctrl.rmdir("mon_groups/a")
    assert resctrl.read(PACKAGE + "core_energy") == "2.500000\n"


@pytest.mark.parametrize("name", ["llc_occupancy", "mbm_total_bytes", "mbm_local_bytes"])
def test_cache_counters_are_multiples_of_the_scale_factor(name: str) -> None:
    resctrl, tid = busy_resctrl()
    for _ in range(20):
        resctrl.run(tid, 0.0137)
        assert int(resctrl.read("mon_groups/a/" + L3 + name)) % SCALE == 0


def test_occupancy_rises_with_tasks_and_drains_after_them() -> None:
    resctrl, tid = busy_resctrl("intel-rdt")
    path = "mon_groups/a/" + L3 + "llc_occupancy"
    assert int(resctrl.read(path)) == 1 << 20
    resctrl.tasks.exit(tid)
    after = [int(resctrl.read(path))]
    for _ in range(12):
        resctrl.now += 0.5
        after.append(int(resctrl.read(path)))
    assert after == sorted(after, reverse=True)
    assert after[-1] == 0


def test_occupancy_never_exceeds_the_cache() -> None:
    resctrl = VirtualResctrl("intel-rdt")
    resctrl.mkdir("mon_groups/a")
    for _ in range(200):
        resctrl.write("mon_groups/a/tasks", str(resctrl.tasks.fork()))
    assert int(resctrl.read("mon_groups/a/" + L3 + "llc_occupancy")) <= 32 << 20
    assert int(resctrl.read(L3 + "llc_occupancy")) <= 32 << 20
