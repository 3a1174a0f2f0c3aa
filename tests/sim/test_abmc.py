# SPDX-License-Identifier: Apache-2.0
"""Assignable bandwidth counters: their limit, assignment at mkdir or by a write, and values without one."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resctrlmond.sim.kernel.abmc import TRANSACTIONS, parse_bool
from tests.sim.virtual import VirtualResctrl

GIB = 1 << 30
INFO = "info/L3_MON/"
OFF = "mbm_event counter assignment mode is not enabled\n"


@pytest.fixture
def resctrl() -> VirtualResctrl:
    """Return a model with five counters in each of two L3 caches; the root group has two of them."""
    return VirtualResctrl("amd-abmc", rmids=16, counters=5)


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:
        action()
    return errno.errorcode[caught.value.errno or 0]


def counter(resctrl: VirtualResctrl, group: str, event: str = "mbm_total_bytes", domain: int = 0) -> str:
    return resctrl.read(f"mon_groups/{group}/mon_data/mon_L3_{domain:02d}/{event}").strip()


def test_files_of_assignable_counters(resctrl: VirtualResctrl) -> None:
    assert resctrl.read(INFO + "mbm_assign_mode") == "[mbm_event]\ndefault\n"
    assert resctrl.read(INFO + "num_mbm_cntrs") == "0=5;1=5\n"
    assert resctrl.read(INFO + "available_mbm_cntrs") == "0=3;1=3\n"
    assert resctrl.read(INFO + "mbm_assign_on_mkdir") == "1\n"
    assert resctrl.read(INFO + "mon_features") == "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n"
    assert resctrl.read(INFO + "event_configs/mbm_local_bytes/event_filter") == (
        "local_reads,local_non_temporal_writes,local_reads_slow_memory\n"
    )
    assert resctrl.read("mbm_L3_assignments") == "mbm_total_bytes:0=e;1=e\nmbm_local_bytes:0=e;1=e\n"


def test_mkdir_without_free_counters_succeeds_with_a_message(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("mon_groups/a")
    assert resctrl.status == "ok\n"
    assert resctrl.read(INFO + "available_mbm_cntrs") == "0=1;1=1\n"
    resctrl.mkdir("mon_groups/b")
    failed = "Failed to allocate counter for mbm_local_bytes in domain"
    assert resctrl.status == f"{failed} 0\n{failed} 1\n"
    assert (counter(resctrl, "b"), counter(resctrl, "b", "mbm_local_bytes")) == ("0", "Unassigned")
    assert counter(resctrl, "b", "llc_occupancy") == "0"
    resctrl.rmdir("mon_groups/a")
    assert resctrl.read(INFO + "available_mbm_cntrs") == "0=2;1=2\n"


def test_a_counter_counts_from_when_it_was_assigned(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("mon_groups/a")
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.run(tid, 1.0)
    assert counter(resctrl, "a") == str(GIB)
    resctrl.write("mon_groups/a/mbm_L3_assignments", "mbm_total_bytes:0=_\n")
    assert resctrl.read("mon_groups/a/mbm_L3_assignments") == "mbm_total_bytes:0=_;1=e\nmbm_local_bytes:0=e;1=e\n"
    assert counter(resctrl, "a") == "Unassigned"
    resctrl.run(tid, 1.0)
    resctrl.write("mon_groups/a/mbm_L3_assignments", "mbm_total_bytes:*=e\n")
    assert counter(resctrl, "a") == "0"
    resctrl.run(tid, 1.0)
    assert counter(resctrl, "a") == str(GIB)
    assert int(counter(resctrl, "a", "mbm_local_bytes")) == 3 * (GIB * 3 // 4)


def test_a_control_group_counts_those_of_its_groups_that_have_a_counter(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("c")
    resctrl.mkdir("c/mon_groups/k")
    tid = resctrl.tasks.fork()
    resctrl.write("c/tasks", str(tid))
    resctrl.run(tid, 1.0)
    path = "c/mon_data/mon_L3_00/mbm_local_bytes"
    assert resctrl.read(path) == f"{GIB * 3 // 4}\n"
    resctrl.write("c/mbm_L3_assignments", "mbm_local_bytes:*=_\n")
    assert resctrl.read("c/mon_groups/k/mon_data/mon_L3_00/mbm_local_bytes") == "Unassigned\n"
    assert resctrl.read(path) == "Unassigned\n"
    resctrl.write("c/mon_groups/k/mbm_L3_assignments", "mbm_local_bytes:0=e\n")
    assert resctrl.read(path) == "0\n"


@pytest.mark.parametrize(
    ("written", "expected", "status"),
    [
        ("mbm_total_bytes:0=e", "EINVAL", "mbm_L3_assignments: Invalid input\n"),  # no newline
        ("foo:0=e\n", "ENOENT", "Invalid event foo\n"),
        ("mbm_total_bytes:x=e\n", "EINVAL", "Missing domain id\n"),
        ("mbm_total_bytes:0\n", "EINVAL", "Missing domain id\n"),
        ("mbm_total_bytes:7=e\n", "EINVAL", "Invalid domain id 7\n"),
        ("mbm_total_bytes:0=y\n", "EINVAL", "Assign operation 'mbm_total_bytes:0=y' failed\n"),
        (
            "mbm_total_bytes:0=e;1=e\n",
            "ENOSPC",
            "Failed to allocate counter for mbm_total_bytes in domain 0\n"
            "Assign operation 'mbm_total_bytes:0=e' failed\n",
        ),
    ],
)
def test_messages_for_an_invalid_assignment(
    resctrl: VirtualResctrl, written: str, expected: str, status: str
) -> None:
    resctrl.mkdir("mon_groups/a")
    resctrl.mkdir("mon_groups/b")
    resctrl.write("mon_groups/b/mbm_L3_assignments", "mbm_total_bytes:*=_\n")
    resctrl.write("mbm_L3_assignments", "mbm_total_bytes:*=e\n")
    resctrl.write("mon_groups/b/mbm_L3_assignments", "mbm_local_bytes:*=e\n")
    refused(lambda: resctrl.write(INFO + "event_configs/mbm_total_bytes/event_filter", "x\n"))
    assert refused(lambda: resctrl.write("mon_groups/b/mbm_L3_assignments", written)) == expected
    assert resctrl.status == status


def test_the_default_mode_counts_everything_and_has_no_counters_to_show(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("mon_groups/a")
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.run(tid, 1.0)
    resctrl.model.accounting.look()
    resctrl.write(INFO + "mbm_assign_mode", "default\n")
    assert resctrl.read(INFO + "mbm_assign_mode") == "[default]\nmbm_event\n"
    assert counter(resctrl, "a") == "0"  # a change restarts all
    for path in ("available_mbm_cntrs", "mbm_assign_on_mkdir", "event_configs/mbm_total_bytes/event_filter"):
        assert refused(lambda path=path: resctrl.read(INFO + path)) == "EINVAL"  # type: ignore[misc]
        assert resctrl.status == OFF
    assert refused(lambda: resctrl.read("mbm_L3_assignments")) == "EINVAL"
    assert refused(lambda: resctrl.write("mbm_L3_assignments", "mbm_total_bytes:0=e\n")) == "EINVAL"
    assert resctrl.status == "mbm_event mode is not enabled\n"
    assert resctrl.read(INFO + "num_mbm_cntrs") == "0=5;1=5\n"
    resctrl.write(INFO + "mbm_assign_mode", "mbm_event\n")
    assert resctrl.read(INFO + "available_mbm_cntrs") == "0=5;1=5\n"
    assert counter(resctrl, "a") == "Unassigned"


def test_without_assignment_at_mkdir_new_groups_have_none(resctrl: VirtualResctrl) -> None:
    assert refused(lambda: resctrl.write(INFO + "mbm_assign_on_mkdir", "2")) == "EINVAL"
    assert resctrl.status == "mbm_assign_on_mkdir: Invalid input\n"
    resctrl.write(INFO + "mbm_assign_on_mkdir", "0")
    resctrl.mkdir("mon_groups/a")
    assert counter(resctrl, "a") == "Unassigned"
    assert resctrl.read(INFO + "available_mbm_cntrs") == "0=3;1=3\n"


@pytest.mark.parametrize("path", ["available_mbm_cntrs", "mbm_assign_on_mkdir"])
def test_reading_clears_the_status(resctrl: VirtualResctrl, path: str) -> None:
    refused(lambda: resctrl.write("tasks", "abc"))
    resctrl.read(INFO + path)
    assert resctrl.status == "ok\n"


def test_a_filter_lets_its_transactions_through_from_when_it_was_set(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("mon_groups/a")
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.run(tid, 1.0)
    path = INFO + "event_configs/mbm_total_bytes/event_filter"
    assert refused(lambda: resctrl.write(path, "local_reads,nonsense\n")) == "EINVAL"
    assert resctrl.status == "Invalid memory transaction type nonsense\n"
    assert refused(lambda: resctrl.write(path, "local_reads")) == "EINVAL"
    assert resctrl.status == "event_filter: Invalid input\n"
    assert counter(resctrl, "a") == str(GIB)
    resctrl.write(path, "remote_reads,local_reads\n")
    assert resctrl.read(path) == "local_reads,remote_reads\n"
    assert counter(resctrl, "a") == "0"
    resctrl.run(tid, 1.0)
    assert counter(resctrl, "a") == str(GIB * 5 // 8)
    assert int(counter(resctrl, "a", "mbm_local_bytes")) == 2 * (GIB * 3 // 4)


def test_all_transactions_are_the_total_traffic() -> None:
    assert sum(TRANSACTIONS.values()) == 1
    assert sum(share for name, share in TRANSACTIONS.items() if name.startswith("local_")) * 4 == 3


def test_a_cache_that_goes_offline_has_no_counters(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("mon_groups/a")
    resctrl.model.hotplug.set_domain("mon_L3_01", False)
    assert resctrl.read(INFO + "num_mbm_cntrs") == "0=5\n"
    assert resctrl.read("mbm_L3_assignments") == "mbm_total_bytes:0=e\nmbm_local_bytes:0=e\n"
    resctrl.model.hotplug.set_domain("mon_L3_01", True)
    assert resctrl.read(INFO + "available_mbm_cntrs") == "0=1;1=5\n"
    assert counter(resctrl, "a", domain=1) == "Unassigned"


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("on\n", True), ("0\n", False), ("OFF", False), ("n", False)]
)
def test_truth_values(text: str, value: bool) -> None:
    assert parse_bool(text) is value


@pytest.mark.parametrize("text", ["", "2", "o", "\n", " 1"])
def test_no_truth_values(text: str) -> None:
    assert parse_bool(text) is None


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.sampled_from("mbm_total_bytes:01=e_*;\n "), max_size=30) | st.text(max_size=30))
def test_any_text_is_an_assignment_or_an_error(text: str) -> None:
    resctrl = VirtualResctrl("amd-abmc", rmids=4, counters=3)
    for path in ("mbm_L3_assignments", INFO + "mbm_assign_mode", INFO + "event_configs/mbm_total_bytes/event_filter"):
        try:
            resctrl.write(path, text)
        except OSError as failure:
            assert failure.errno in (errno.EINVAL, errno.ENOENT, errno.ENOSPC)
    resctrl.write(INFO + "mbm_assign_mode", "mbm_event\n")
    free = resctrl.read(INFO + "available_mbm_cntrs")
    assert all(0 <= int(part.partition("=")[2]) <= 3 for part in free.split(";"))
